"""`manage.py sqlq …` and `manage.py migrate`, as people run them."""

from __future__ import annotations

import importlib.metadata
import json
import signal
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from sqlq.payload.encryption import HEAD, Key, new_key
from tests.faces.django.project_of_tests import Project, settings_of
from tests.kit import execute, needs, wait_until

DJANGO = tuple(map(int, importlib.metadata.version("django").split(".")[:2]))


def tables(project: Project) -> set[str]:
    engine = create_engine(project.url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


class TestMigrate:
    def test_djangos_migrate_makes_the_tables(self, bare_project: Project) -> None:
        assert "sqlq's tables: up to date now" in bare_project.ok("migrate")
        assert {"jobs", "failed_jobs", "finished_jobs", "shop_order"} <= tables(bare_project)
        assert "sqlq" not in bare_project.ok("migrate")
        assert "the one needed" in bare_project.ok("sqlq", "migrate", "--check")
        assert bare_project.ok("makemigrations", "--check", "--dry-run") == "No changes detected\n"

    def test_djangos_migrate_makes_no_tables_with_migrate_with_django_off(
        self, bare_project: Project
    ) -> None:
        bare_project.set(SQLQ={"migrate_with_django": False})
        bare_project.ok("migrate")
        assert "jobs" not in tables(bare_project)
        bare_project.ok("sqlq", "migrate")
        assert "jobs" in tables(bare_project)

    def test_djangos_migrate_makes_tables_only_in_the_database_of_the_jobs(
        self, bare_project: Project, tmp_path: Path
    ) -> None:
        bare_project.set(OTHER=settings_of(f"sqlite:///{tmp_path / 'other.db'}"))
        bare_project.ok("migrate", "--database", "other")
        if bare_project.url.startswith("postgresql"):  # else there is no file, even
            assert not tables(bare_project)

    def test_a_flush_leaves_jobs_alone(self, project: Project) -> None:
        project.sqlq("enqueue", "shop.tasks.pay", "7")
        project.ok("flush", "--no-input")
        assert [job["task"] for job in project.jobs()] == ["shop.tasks.pay"]


class TestCommand:
    def test_the_commands_of_sqlq_know_the_app(self, project: Project) -> None:
        assert project.sqlq("enqueue", "shop.tasks.pay", "7").code == 0
        assert "mail" in project.ok("sqlq", "status")
        project.ok("sqlq", "work", "--drain")
        assert project.results() == [7]
        done = project.run(
            ["-m", "sqlq", "-a", "sqlq.django:app", "status"], DJANGO_SETTINGS_MODULE="settings"
        )
        assert done.code == 0, done

    def test_a_worker_by_the_name_of_the_app_knows_the_tasks(self, project: Project) -> None:
        assert project.sqlq("enqueue", "shop.tasks.pay", "7").code == 0
        named = ["-m", "sqlq", "-a", "sqlq.django:app"]
        done = project.run([*named, "work", "--drain"], DJANGO_SETTINGS_MODULE="settings")
        assert done.code == 0, done
        assert project.results() == [7]

    def test_arguments_and_results_are_encrypted_with_the_keys_of_the_settings(
        self, project: Project
    ) -> None:
        key = new_key()
        project.set(SQLQ={"keys": [key], "encryption": "encrypt"})
        project.python("from shop.tasks import pay\nfrom sqlq.django import app\napp.enqueue(pay.new(4711))")
        project.ok("sqlq", "work", "--drain")
        shown = project.sqlq("show", "1", "--json").json()
        assert (shown["result"], shown["payload"]) == (4711, {"args": [4711]})
        assert shown["encryption"] == f"encrypted with key {Key(key, '').id}"
        engine = create_engine(project.url)
        with engine.connect() as conn:
            stored = conn.execute(text("SELECT payload, result FROM finished_jobs")).one()
        engine.dispose()
        assert all(each.startswith(HEAD) and "4711" not in each for each in stored)
        project.set(SQLQ={"keys": [key[:20]]})
        done = project.manage("check")
        assert done.code == 1
        assert "SQLQ in the settings: keys[0] is no key: a key is 32 random bytes in base64" in done.err
        assert key[:20] not in done.err + done.out

    @needs("cheap")
    def test_the_settings_have_options_of_workers(self, project: Project) -> None:
        project.set(SQLQ={"processes": 2, "concurrency": 3, "lease": "1m"})
        assert "3 slots in each of 2 processes" in project.sqlq("work", "--drain").err
        assert "5 slots in each of 2 processes" in project.sqlq("work", "--drain", "-c", "5").err

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

    @needs("cheap", empty=True)
    def test_help(self, bare_project: Project) -> None:
        assert "python manage.py sqlq [OPTIONS] COMMAND" in bare_project.ok("sqlq", "--help")
        assert "python manage.py sqlq [OPTIONS] COMMAND" in bare_project.ok("help", "sqlq")

    @needs("cheap")
    def test_options_of_djangos(self, project: Project) -> None:
        (project.directory / "elsewhere").mkdir()
        (project.directory / "elsewhere" / "other_settings.py").write_text(
            'from settings import *\nSQLQ = {"retention": "forever"}\n'
        )
        options = ["--settings=other_settings", "--pythonpath", "elsewhere"]
        assert project.sqlq("enqueue", "shop.tasks.pay", "7", *options).code == 0
        project.ok("sqlq", "work", "--drain", *options)
        assert len(project.jobs(state="finished")) == 1

    @needs("cheap")
    def test_call_command_names_the_app(self, project: Project) -> None:
        said = project.python(
            "from django.core.management import CommandError, call_command\n"
            "try: call_command('sqlq', 'migrate')\n"
            "except CommandError as error: print(error)\n"
        )
        assert "call the App in code, as in app.migrate()" in said

    @needs("cheap")
    def test_a_missing_settings_module_is_reported_in_one_sentence(self, project: Project) -> None:
        done = project.run(["-m", "sqlq", "-a", "sqlq.django:app", "status"])
        assert "set DJANGO_SETTINGS_MODULE" in done.sentence()

    @needs("cheap")
    def test_a_task_that_cannot_be_imported_is_reported_in_one_sentence(self, project: Project) -> None:
        (project.directory / "shop" / "tasks.py").write_text("import nowhere\n")
        done = project.run(
            ["-m", "sqlq", "-a", "sqlq.django:app", "status"], DJANGO_SETTINGS_MODULE="settings"
        )
        assert "No module named 'nowhere' (shop/tasks.py, line 1)" in done.sentence()


class TestEager:
    def test_a_view_runs_jobs_at_the_commit_with_eager_in_the_settings(self, project: Project) -> None:
        project.set(SQLQ={"eager": True})
        said = project.python(
            "from contextlib import suppress\n"
            "from django.conf import settings\n"
            "from django.test import Client\n"
            "settings.ALLOWED_HOSTS = ['*']\n"
            "from shop.models import Order\n"
            "print(Client().get('/order').status_code)\n"
            "with suppress(RuntimeError): Client().get('/order?fail')\n"
            "print(*Order.objects.values_list('paid', flat=True))\n"
        )
        assert said == "200\nTrue\n"
        assert project.jobs() == []


class TestDirectCalls:
    def test_the_settings_refuse_direct_calls_outside_workers(self, project: Project) -> None:
        project.set(SQLQ={"direct_calls": "refuse"})
        tasks = project.directory / "shop" / "tasks.py"
        more = "\n\n@app.task\ndef pay_here(order_id):\n    return pay(order_id)\n"
        tasks.write_text(tasks.read_text() + more)
        said = project.python(
            "from shop.tasks import pay, pay_here\n"
            "from sqlq.django import app\n"
            "from sqlq.errors import SqlqError\n"
            "app.enqueue(pay_here.new(7))\n"
            "try: pay(7)\n"
            "except SqlqError as error: print(error)\n"
        )
        assert said.startswith("shop.tasks.pay was called as a function, which runs it here and now: enqueue")
        project.ok("sqlq", "work", "--drain")
        assert project.results() == [7]


class TestMistakes:
    """Each command of manage.py reports a mistake in one sentence."""

    COMMANDS = (
        ("check",),
        ("migrate",),
        ("sqlq", "status"),
        ("sqlq", "work", "--drain"),
        ("shell", "-c", "1"),
    )
    OF_TASKS = (
        ("shop/tasks.py", 'backoff="10ms"', 'timeout="soon"', "timeout is 'soon'"),
        ("settings.py", '"QUEUES": [], ', "", "Queue 'mail' is not valid for backend."),
        ("settings.py", '"max_attempts": 1', '"max_attempts": 0', "max_attempts is 0"),
    )

    def said(self, project: Project, *command: str) -> str:
        done = project.manage(*command)
        assert done.code == 1, done
        assert "Traceback" not in done.err + done.out
        (line,) = done.err.strip().splitlines()
        assert line.startswith("python manage.py sqlq: ")
        return line

    @needs("cheap", empty=True)
    @pytest.mark.parametrize("command", COMMANDS, ids="-".join)
    def test_a_wrong_setting_or_option_is_reported_in_one_sentence(
        self, bare_project: Project, command: tuple[str, ...]
    ) -> None:
        bare_project.set(SQLQ={"databse": "default"})
        assert "SQLQ in the settings has the key 'databse'" in self.said(bare_project, *command)
        bare_project.set(SQLQ={}, DATABASE={"ENGINE": "django.db.backends.dummy"})
        assert "DATABASES['default'] has the ENGINE" in self.said(bare_project, *command)
        bare_project.set(DATABASE=settings_of(bare_project.url))
        known = 3 if DJANGO >= (6, 0) else 1  # which brought django.tasks
        for file, right, wrong, message in self.OF_TASKS[:known]:
            module = bare_project.directory / file
            before = module.read_text()
            module.write_text(before.replace(right, wrong))
            assert message in self.said(bare_project, *command)
            module.write_text(before)

    def test_tables_of_an_unknown_revision_are_reported_in_one_sentence(self, project: Project) -> None:
        engine = create_engine(project.url)
        execute(engine, "UPDATE sqlq_version SET version_num = '9999', oldest_code = '9999'")
        engine.dispose()
        done = project.manage("migrate")
        assert done.code == 1
        assert "Traceback" not in done.err
        assert "9999" in done.err.strip().splitlines()[-1]


class TestWork:
    def test_a_worker_from_any_directory(self, project: Project, tmp_path: Path) -> None:
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
        assert "True True" in project.python(
            "from shop.models import Order\nprint(*Order.objects.values_list('paid', flat=True))"
        )

    def test_a_process_for_each_job_shares_the_project_of_its_worker(self, project: Project) -> None:
        for order in "7", "8":
            project.sqlq("enqueue", "shop.tasks.isolated", order)
        project.ok("sqlq", "work", "--drain")
        (importer, first), (other, second) = project.results()
        assert importer == other
        assert len({importer, first, second}) == 3

    def test_a_line_is_logged_once(self, project: Project) -> None:
        """With DEBUG Django's own handler writes the lines of its loggers, too."""
        settings = project.directory / "settings.py"
        settings.write_text(f"{settings.read_text()}\nDEBUG = True\n")
        project.sqlq("enqueue", "shop.tasks.remind", "seven")
        done = project.sqlq("work", "--drain")
        (line,) = [line for line in done.err.splitlines() if "a reminder of seven" in line]
        assert "INFO    [django.shop] job 1 shop.tasks.remind: a reminder of seven" in line


@pytest.mark.skipif(DJANGO < (6, 0), reason="django.tasks came with Django 6.0")
class TestTasksOfDjangos:
    def test_django_tasks_have_the_options_of_their_decorator(self, project: Project) -> None:
        assert "in queue mail" in project.ok("sqlq", "enqueue", "shop.django_tasks.aabout_itself")
        shown = project.sqlq("show", "1", "--json").json()
        assert (shown["queue"], shown["priority"]) == ("mail", 5)
        project.ok("sqlq", "work", "--drain", "-q", "mail")
        assert project.sqlq("show", "1", "--json").json()["result"] == ["1", 1]

    def test_types_are_checked(self, project: Project) -> None:
        done = project.sqlq("enqueue", "shop.django_tasks.pay", "x")
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert 'order_id is "x": the task takes int there' in done.err
        done = project.sqlq("enqueue", "shop.django_tasks.about_itself", "--kwargs", '{"fail_until": "x"}')
        assert 'fail_until is "x": the task takes int there' in done.err
        assert project.jobs() == []


TIMES = 8


@pytest.mark.integration
@needs("sessions")
@pytest.mark.parametrize("max_age", [0, None], ids=["a connection each time", "connections that stay"])
@pytest.mark.parametrize("task", ["pay", "apay"])
def test_no_attempt_meets_a_connection_that_was_lost(
    project: Project, task: str, max_age: int | None
) -> None:
    """However long the worker was idle."""
    mark = "shop_worker"
    given = settings_of(project.url, CONN_MAX_AGE=max_age, OPTIONS={"application_name": mark})
    project.set(DATABASE=given)
    engine = create_engine(project.url)
    with engine.begin() as conn:
        (order,) = conn.execute(text("INSERT INTO shop_order (paid) VALUES (false) RETURNING id")).one()

    def run_some() -> None:
        with engine.begin() as conn:
            for _ in range(TIMES):
                conn.execute(
                    text("INSERT INTO jobs (task, payload, max_attempts) VALUES (:task, :payload, 1)"),
                    {"task": f"shop.tasks.{task}", "payload": json.dumps({"args": [order]})},
                )
        wait_until(lambda: not count("jobs"), what="the jobs")

    def count(table: str) -> int:
        with engine.connect() as conn:
            return int(conn.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())

    with project.working("--concurrency", "3"):
        for _ in range(3):
            run_some()
            with engine.begin() as conn:  # of handlers and of the worker alike
                killed = conn.execute(
                    text(
                        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                        "WHERE application_name = :mark"
                    ),
                    {"mark": mark},
                ).scalar_one()
            assert killed
    with engine.connect() as conn:
        rows = conn.execute(text("SELECT attempts, outcome FROM finished_jobs")).all()
        failures = conn.execute(text("SELECT message FROM failed_jobs")).all()
    engine.dispose()
    assert not failures
    assert {tuple(row) for row in rows} == {(1, "finished")}
    assert len(rows) == 3 * TIMES
