"""`sqlq enqueue` by the name of a task, where only a database is named; and `--available-at`."""

from __future__ import annotations

import sqlq
from tests.kit import needs
from tests.kit.command import Command

AT = "2030-01-31T08:00:00+01:00"


def test_enqueue_by_name_needs_no_code_and_the_worker_knows_the_task(
    sqlq_: Command, app: sqlq.App, database_url: str
) -> None:
    words = ("shop.send", "7", "--kwargs", '{"note": "by hand"}', "--queue", "mail", "--priority", "3")
    said = sqlq_.ok("enqueue", *words, "-d", database_url)
    id = int(said.split()[2].rstrip(":"))
    assert said == (
        f"enqueued job {id}: shop.send in queue mail, available; no App is named, so nothing checked that "
        "the task takes it\n"
    )
    job = app.jobs.get(id)
    assert (job.max_attempts, job.priority) == (None, 3)
    sqlq_.work()
    assert app.jobs.get(id).result == "7 False by hand"


def test_why_explains_a_job_by_name_whose_arguments_do_not_fit(sqlq_: Command, app: sqlq.App) -> None:
    id = sqlq_("enqueue", "shop.send", "many", "words", "too", "much", "--json").json()["id"]
    sqlq_.work()
    assert app.jobs.get(id).history[-1].reason == "bad_payload"
    assert "the handler of the last worker that met it does not take its arguments" in sqlq_.ok(
        "why", str(id)
    )


@needs("cheap")
def test_enqueue_checks_the_name_and_the_options_of_a_job_by_name(sqlq_: Command) -> None:
    assert "the task's name is ''" in sqlq_("enqueue", "").sentence()
    assert "--priority is 1000" in sqlq_("enqueue", "shop.send", "--priority", "1000").misuse()
    done = sqlq_("enqueue", "shop.send", "--unique-key", "k", "--json").json()
    held = sqlq_("enqueue", "shop.send", "--unique-key", "k")
    assert (held.code, held.out) == (
        3,
        f"nothing enqueued: job {done['id']} (shop.send in queue default, available) holds this unique key\n",
    )


def test_enqueue_needs_an_app_where_not_even_a_database_is_named(bare: Command) -> None:
    assert "name the App with --app" in bare("enqueue", "shop.send").misuse()
    assert not (bare.directory / "sqlq.db").exists()


def test_enqueue_with_an_app_refuses_an_unknown_task(sqlq_: Command) -> None:
    assert "'shop.nothing'" in sqlq_.shop("enqueue", "shop.nothing").sentence()


def test_enqueue_and_reschedule_read_at_alike(sqlq_: Command, app: sqlq.App) -> None:
    id = sqlq_.shop("enqueue", "shop.send", "7", "--available-at", AT, "--json").json()["id"]
    due = app.jobs.get(id).available_at
    assert due is not None
    assert due.isoformat() == "2030-01-31T07:00:00+00:00"
    sqlq_.ok("reschedule", str(id), "--available-at", AT)
    assert app.jobs.get(id).available_at == due
    for moment in ("tomorrow", "2030-01-31T08:00:00"):
        refused = [
            sqlq_.shop(*words, "--available-at", moment)
            for words in (("enqueue", "shop.send", "7"), ("reschedule", "1"))
        ]
        first, second = (each.misuse() for each in refused)
        assert first.partition(":")[2] == second.partition(":")[2], "one grammar"
