"""`sqlq schedules`, and its errors for bad input."""

from __future__ import annotations

from sqlalchemy import Engine, text

import sqlq
from tests.kit import for_each, needs, span
from tests.kit.command import Command

CRON = ("--cron", "0 3 * * *", "--timezone", "Europe/Berlin")


def test_schedules_add_show_run_and_remove(sqlq_: Command, app: sqlq.App) -> None:
    assert sqlq_.ok("schedules") == "no schedules\n"
    done = sqlq_.shop("schedules", "add", "nightly", "shop.send", "7", "true", *CRON, "--priority", "3")
    assert done.code == 0, done
    assert done.out.startswith("added nightly: 0 3 * * * Europe/Berlin, next 20")
    found = app.schedules.get("nightly")
    assert (found.payload, found.queue, found.is_declared) == ('{"args": [7, true]}', "mail", False)

    table = sqlq_.ok("schedules").splitlines()
    assert table[0].split() == ["name", "state", "when", "task", "next", "ticks", "skipped", "last", "job"]
    assert table[1].startswith("nightly  active  0 3 * * * Europe/Berlin  shop.send")
    shown = sqlq_.ok("schedules", "show", "nightly")
    assert shown.startswith("schedule nightly: active\n")
    assert len(shown.partition("next runs\n")[2].splitlines()) == 10
    (listed,) = sqlq_("schedules", "--json").json()
    assert (listed["name"], listed["plan"], len(listed["upcoming"])) == (
        "nightly",
        "0 3 * * * Europe/Berlin",
        10,
    )
    assert sqlq_("schedules", "show", "nightly", "--json").json()["ticks"] == 0

    id = sqlq_("schedules", "run", "nightly", "--json").json()["id"]
    assert sqlq_.ok("schedules", "run", "nightly") == f"enqueued job {id + 1}: shop.send in queue mail\n"
    assert f"{id + 1} available" in sqlq_.ok("schedules")
    assert "schedule      nightly, for 20" in sqlq_.ok("show", str(id))
    shown = sqlq_.ok("schedules", "show", "nightly")
    assert [line.split()[:2] for line in shown.partition("last jobs\n")[2].splitlines()[1:]] == [
        [str(id + 1), "available"],
        [str(id), "available"],
    ]
    assert sqlq_.ok("schedules", "pause", "nightly") == "paused nightly\n"
    assert sqlq_.ok("schedules", "pause", "nightly") == "nightly is paused already\n"
    assert sqlq_("schedules", "resume", "nightly", "--json").json() == {
        "schedule": "nightly",
        "resumed": True,
    }
    assert sqlq_.ok("schedules", "resume", "nightly") == "nightly is not paused\n"
    assert sqlq_.ok("schedules", "remove", "nightly") == "removed nightly\n"
    assert sqlq_("schedules", "show", "nightly").sentence() == "there is no schedule 'nightly'"


@needs("cheap")
@for_each(
    ("arguments", "said"),
    [
        (["--cron", "61 * * * *"], "--cron is '61 * * * *' (bad minute): it has five fields"),
        (["--every", "10"], "--every is '10': write it as in"),
        (["--every", "500ms"], "--every is 500 ms: it must be at least 1 s"),
        (
            ["--cron", "* * * * *", "--timezone", "Mars"],
            "--timezone is 'Mars', which this machine does not know",
        ),
        (
            ["--every", "1h", "--repeats", "0"],
            "--repeats is 0: it must be a whole number from 1 to",
        ),
        (["--every", "1h", "--starts", "soon"], "'soon' is not a time like"),
        (["--at", "2030-01-31T08:00:00"], "has no time zone: add one"),
        ([], 'say when: --cron "0 3 * * *", --every 90s or --at'),
    ],
)
def test_an_impossible_plan_is_reported_in_one_sentence(
    sqlq_: Command, arguments: list[str], said: str
) -> None:
    assert said in sqlq_.shop("schedules", "add", "x", "shop.send", "7", *arguments).misuse()


@needs("cheap")
def test_a_wrong_command_line_of_schedules_is_reported_in_one_sentence(sqlq_: Command, app: sqlq.App) -> None:
    add = ("schedules", "add", "nightly", "shop.send")
    assert "no task is named 'shop.sent'" in sqlq_.shop(*add[:3], "shop.sent", *CRON).sentence()
    assert "missing a required argument" in sqlq_.shop(*add, *CRON).sentence()
    assert "add checks the job against its task: name the App" in sqlq_(*add, "7", *CRON).misuse()
    past = sqlq_.shop(*add, "7", "--at", "2020-01-01T00:00:00Z").sentence()
    assert "the schedule 'nightly' has no moment to come" in past
    assert sqlq_.shop(*add, "7", *CRON).code == 0
    assert "there is a schedule 'nightly' already" in sqlq_.shop(*add, "7", *CRON).sentence()
    assert "there is no schedule 'nightli'" in sqlq_("schedules", "pause", "nightli").sentence()


def test_the_list_and_the_doctor_show_failing_schedules(
    sqlq_: Command, app: sqlq.App, engine: Engine
) -> None:
    task = app.task(name="shop.send")(lambda: None)
    app.schedules.add("broken", task.new(), every="1h")
    app.schedules.add("unknown", task.new(), every="1h")
    assert "none is late, and none fails" in sqlq_("doctor").out
    job = app.schedules.run("unknown")
    with engine.begin() as conn:
        conn.execute(
            text("UPDATE sqlq_schedules SET error = 'it broke', error_at = created_at WHERE name = 'broken'")
        )
        conn.execute(text("UPDATE sqlq_schedules SET next_at = created_at WHERE name = 'unknown'"))
        columns = (
            "id, queue, task, payload, priority, attempts, available_at, lease_token, unique_until, releases"
        )
        conn.execute(
            text(
                f"INSERT INTO failed_jobs ({columns}, created_at, schedule, reason) "
                f"SELECT {columns}, created_at, schedule, 'unknown_task' FROM jobs WHERE id = :id"
            ),
            {"id": job.id},
        )
        conn.execute(text("DELETE FROM jobs"))
        hour = span(conn, 3_600)
        conn.execute(text(f"UPDATE sqlq_schedules SET next_at = next_at - {hour} WHERE name = 'unknown'"))
    said = sqlq_("doctor").out
    assert "the schedule broken cannot be ticked: it broke" in said
    assert "1 schedule is due for more than 60 s" in said
    listed = sqlq_.ok("schedules")
    assert "failing" in listed
    assert "error: it broke" in listed
    assert f"{job.id} failed: unknown_task" in listed
