"""`manage.py sqlq …` and `manage.py migrate`, as people run them."""

from __future__ import annotations

import importlib.metadata
import signal
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect

from tests.faces.django.project_of_tests import Project, settings_of
from tests.kit import committed, count, execute, needs, wait_until

DJANGO = tuple(map(int, importlib.metadata.version("django").split(".")[:2]))


def tables(engine: Engine) -> set[str]:
    return set(inspect(engine).get_table_names())


class TestMigrate:
    def test_djangos_migrate_makes_the_tables(self, bare_project: Project, empty: Engine) -> None:
        bare_project.set(SQLQ={"migrate_with_django": False})
        bare_project.ok("migrate")
        assert tables(empty) & {"jobs", "shop_order"} == {"shop_order"}
        bare_project.set(SQLQ={})
        assert "sqlq's tables: up to date now" in bare_project.ok("migrate")
        assert {"jobs", "failed_jobs", "finished_jobs", "shop_order"} <= tables(empty)
        assert "sqlq" not in bare_project.ok("migrate")
        assert "the one needed" in bare_project.ok("sqlq", "migrate", "--check")
        assert bare_project.ok("makemigrations", "--check", "--dry-run") == "No changes detected\n"

    def test_djangos_migrate_makes_tables_only_in_the_database_of_the_jobs(
        self, bare_project: Project, empty: Engine, tmp_path: Path
    ) -> None:
        bare_project.set(OTHER=settings_of(f"sqlite:///{tmp_path / 'other.db'}"))
        bare_project.ok("migrate", "--database", "other")
        assert not tables(empty)

    def test_a_flush_leaves_jobs_alone(self, project: Project) -> None:
        project.sqlq("enqueue", "shop.tasks.pay", "7")
        project.ok("flush", "--no-input")
        assert [job["task"] for job in project.jobs()] == ["shop.tasks.pay"]


class TestCommand:
    def test_a_worker_by_the_name_of_the_app_knows_the_tasks(self, project: Project) -> None:
        assert project.sqlq("enqueue", "shop.tasks.pay", "7").code == 0
        assert "mail" in project.ok("sqlq", "status")
        named = ["-m", "sqlq", "-a", "sqlq.django:app"]
        done = project.run([*named, "work", "--drain"], DJANGO_SETTINGS_MODULE="settings")
        assert done.code == 0, done
        assert project.results() == [7]

    @needs("cheap", empty=True)
    def test_messages_name_commands_of_manage_py(self, bare_project: Project) -> None:
        bare_project.set(SQLQ={"migrate_with_django": False})
        bare_project.ok("migrate")
        done = bare_project.sqlq("status")
        assert done.code == 1
        assert done.err.startswith("python manage.py sqlq: ")
        assert "python manage.py sqlq migrate" in done.err
        said = bare_project.python(
            "from sqlq.django import app\n"
            "from sqlq.errors import SqlqError\n"
            "from shop.tasks import pay\n"
            "try: app.enqueue(pay.new(7))\n"
            "except SqlqError as error: print(error)\n"
        )
        assert "python manage.py sqlq migrate" in said
        assert "-a " not in said + done.err
        assert "python manage.py sqlq [OPTIONS] COMMAND" in bare_project.ok("sqlq", "--help")

    @needs("cheap")
    def test_settings_of_djangos_options_have_those_of_workers(self, project: Project) -> None:
        (elsewhere := project.directory / "elsewhere").mkdir()
        settings = 'from settings import *\nSQLQ = {"processes": 2, "concurrency": 3, "lease": "1m"}\n'
        (elsewhere / "other_settings.py").write_text(settings)
        options = ["--settings=other_settings", "--pythonpath", "elsewhere"]
        assert project.sqlq("enqueue", "shop.tasks.pay", "7", *options).code == 0
        assert "3 slots in each of 2 processes" in project.sqlq("work", "--drain", *options).err
        assert len(project.jobs(state="finished")) == 1

    @needs("cheap")
    def test_a_missing_module_is_reported_in_one_sentence(self, project: Project) -> None:
        status = ["-m", "sqlq", "-a", "sqlq.django:app", "status"]
        assert "set DJANGO_SETTINGS_MODULE" in project.run(status).sentence()
        (project.directory / "shop" / "tasks.py").write_text("import nowhere\n")
        done = project.run(status, DJANGO_SETTINGS_MODULE="settings")
        assert "No module named 'nowhere' (shop/tasks.py, line 1)" in done.sentence()


class TestMistakes:
    """Each command of manage.py reports a mistake in one sentence."""

    COMMANDS = ("check", "migrate", "sqlq status", "sqlq work --drain", "shell -c 1")
    OF_TASKS = (
        ("shop/tasks.py", 'backoff="10ms"', 'timeout="soon"', "timeout is 'soon'"),
        ("settings.py", '"QUEUES": [], ', "", "Queue 'mail' is not valid for backend."),
        ("settings.py", '"max_attempts": 1', '"max_attempts": 0', "max_attempts is 0"),
    )

    def said(self, project: Project, command: str) -> str:
        done = project.manage(*command.split())
        assert done.code == 1, done
        assert "Traceback" not in done.err + done.out
        (line,) = done.err.strip().splitlines()
        assert line.startswith("python manage.py sqlq: ")
        return line

    @needs("cheap", empty=True)
    def test_a_wrong_setting_or_option_is_reported_in_one_sentence(self, bare_project: Project) -> None:
        bare_project.set(SQLQ={"databse": "default"})
        for command in self.COMMANDS:
            assert "SQLQ in the settings has the key 'databse'" in self.said(bare_project, command)
        bare_project.set(SQLQ={}, DATABASE={"ENGINE": "django.db.backends.dummy"})
        assert "DATABASES['default'] has the ENGINE" in self.said(bare_project, "check")
        bare_project.set(DATABASE=settings_of(bare_project.url))
        known = 3 if DJANGO >= (6, 0) else 1  # which brought django.tasks
        for file, right, wrong, message in self.OF_TASKS[:known]:
            module = bare_project.directory / file
            before = module.read_text()
            module.write_text(before.replace(right, wrong))
            for command in ("check", "sqlq status"):
                assert message in self.said(bare_project, command)
            module.write_text(before)


class TestWork:
    def test_a_worker_from_any_directory(self, project: Project, tmp_path: Path, engine: Engine) -> None:
        with project.working("--processes", "2", cwd=tmp_path) as process:
            project.python(
                "from shop.models import Order\n"
                "from shop.tasks import apay, pay\n"
                "from sqlq.django import app\n"
                "for task in (pay, apay):\n"
                "    app.enqueue(task.new(Order.objects.create().id))\n"
            )
            wait_until(lambda: len(project.jobs(state="finished")) == 2, what="the jobs")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, project.log.read_text()
        assert committed(engine, "shop_order", "paid") == [True, True]

    def test_a_process_for_each_job_shares_its_project_and_a_line_is_logged_once(
        self, project: Project
    ) -> None:
        """With DEBUG Django's own handler writes the lines of its loggers, too."""
        settings = project.directory / "settings.py"
        settings.write_text(f"{settings.read_text()}\nDEBUG = True\n")
        for order in "7", "8":
            project.sqlq("enqueue", "shop.tasks.isolated", order)
        project.sqlq("enqueue", "shop.tasks.remind", "seven")
        done = project.sqlq("work", "--drain")
        (line,) = [line for line in done.err.splitlines() if "a reminder of seven" in line]
        assert "INFO    [django.shop] job 3 shop.tasks.remind: a reminder of seven" in line
        (importer, first), (other, second) = (each for each in project.results() if "seven" not in each)
        assert importer == other
        assert len({importer, first, second}) == 3


@pytest.mark.integration
@needs("sessions")
@pytest.mark.parametrize("task", ["pay", "apay"])
def test_no_attempt_meets_a_connection_that_was_lost(project: Project, engine: Engine, task: str) -> None:
    name = {"application_name": "shop_worker"}
    project.set(DATABASE=settings_of(project.url, CONN_MAX_AGE=None, OPTIONS=name))
    order = execute(engine, "INSERT INTO shop_order (paid) VALUES (false) RETURNING id")
    enqueue = f"""INSERT INTO jobs (task, payload, max_attempts)
        SELECT 'shop.tasks.{task}', '{{"args": [{order}]}}', 1 FROM generate_series(1, 8)"""
    cut = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'shop_worker'"
    )
    with project.working("--concurrency", "3"):
        for _ in range(3):
            execute(engine, enqueue)
            wait_until(lambda: not count(engine), what="the jobs")
            assert execute(engine, cut), "those of handlers and of the worker alike"
    assert count(engine, "failed_jobs") == 0
    assert committed(engine, "finished_jobs", "attempts") == [1] * 24
