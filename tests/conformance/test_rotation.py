"""Keys are changed without a lost job: signed and encrypted rows are counted, and rewritten in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.admin.doctor.doctor import Doctor
from sqlq.admin.doctor.finding import Finding
from sqlq.admin.keys import Rotation
from sqlq.errors import ConfigurationError
from sqlq.payload.encryption import new_key
from sqlq.store import keys

OLD, NEW = new_key(), new_key()
Apps = Callable[..., sqlq.App]


@pytest.fixture
def apps(database_url: str) -> Iterator[Apps]:
    """Makes Apps on the test's database, each with a task `t` that fails on request."""
    made: list[sqlq.App] = []

    def make(**options: Any) -> sqlq.App:
        app = sqlq.App(database_url, **options)
        made.append(app)

        @app.task(name="t", max_attempts=1)
        def task(n: int) -> int:
            if n < 0:
                raise ValueError(n)
            return n

        return app

    yield make
    for app in made:
        app.close()


def fill(app: sqlq.App, waiting: int = 3) -> None:
    """One that has finished, one that has failed, a schedule, and some that wait."""
    task = app.tasks["t"]
    app.enqueue_many([task.new(1), task.new(-1)])
    app.worker(drain=True).run()
    app.enqueue_many([task.new(n) for n in range(waiting)])
    app.schedules.add("nightly", task.new(7), cron="0 3 * * *")


def uses(app: sqlq.App) -> dict[str, tuple[str, int]]:
    found = Rotation(app.database).uses()
    return {each.where: (each.state, each.number) for each in found}


def ids(app: sqlq.App) -> list[str]:
    assert app.database.seal is not None
    return list(app.database.seal.keys)


def doctor(app: sqlq.App) -> list[Finding]:
    return [found for found in Doctor(app.database).examine() if found.check == "seals"]


def test_uses_counts_rows_by_key_with_or_without_the_key(apps: Apps) -> None:
    old = apps(keys=[OLD])
    fill(old)
    expected = {"jobs.payload": 3, "failed_jobs.payload": 1, "sqlq_schedules.payload": 1}
    expected |= {"finished_jobs.payload": 1, "finished_jobs.result": 1}
    assert uses(old) == {where: ("first", number) for where, number in expected.items()}
    assert uses(apps(keys=[NEW, OLD])) == {where: ("known", number) for where, number in expected.items()}
    assert uses(apps()) == {where: ("unknown", number) for where, number in expected.items()}
    (use, *_) = Rotation(apps().database).uses()
    assert (use.where, use.how, use.key) == ("jobs.payload", "signed", ids(old)[0])
    old.enqueue(old.tasks["t"].new(1), eager=True)
    plain = apps()
    plain.enqueue(plain.tasks["t"].new(1))
    states = {(use.where, use.state): use.number for use in Rotation(old.database).uses()}
    assert (states["jobs.payload", "plain"], states["jobs.payload", "first"]) == (1, 3)


@pytest.mark.parametrize("how", ["sign", "encrypt"])
def test_a_rotation_rewrites_rows_until_the_old_key_can_go(apps: Apps, how: Any) -> None:
    old = apps(keys=[OLD])
    fill(old, waiting=250)
    both = apps(keys=[NEW, OLD], seal=how)
    told: list[int] = []
    done = Rotation(both.database).rotate(told=lambda where, number: told.append(number))
    assert done.sealed == {"jobs.payload": 250, "failed_jobs.payload": 1, "sqlq_schedules.payload": 1}
    assert (done.bad, done.left) == (0, 0)
    assert told == [100, 100, 50, 1, 1]
    assert not any(Rotation(both.database).rotate().sealed.values()), "all is done"
    assert Rotation(both.database).rotate(finished=True).sealed["finished_jobs.result"] == 1
    new = apps(keys=[NEW], seal=how)
    assert {state for state, _ in uses(new).values()} == {"first"}
    assert Rotation(new.database).check(finished=True).bad == 0
    (failed,) = new.jobs.list(state="failed")
    assert new.jobs.retry([failed.id])
    new.schedules.run("nightly")
    tally = new.worker(drain=True).run()
    assert (tally.completed, tally.failed) == (251, 1)
    assert {job.reason for job in new.jobs.list(state="failed")} == {"error"}
    assert new.result(1) == 1


def test_signed_rows_are_encrypted_by_the_same_key(apps: Apps, engine: Engine) -> None:
    fill(apps(keys=[OLD]))
    app = apps(keys=[OLD], seal="encrypt")
    assert Rotation(app.database).rotate().sealed["jobs.payload"] == 3
    with engine.connect() as conn:
        assert all(
            each.startswith('{"seal": "e1.') for each in conn.scalars(text("SELECT payload FROM jobs"))
        )
    assert app.worker(drain=True).run().completed == 3


def test_a_rotation_signs_plain_rows_only_with_plain_set(apps: Apps, engine: Engine) -> None:
    fill(apps())
    with engine.begin() as conn:
        conn.execute(text("INSERT INTO jobs (task, payload) VALUES ('t', 'oops')"))
    app = apps(keys=[NEW])
    assert not any(Rotation(app.database).rotate().sealed.values()), "not by themselves"
    done = Rotation(app.database).rotate(plain=True)
    assert (done.sealed["jobs.payload"], done.bad, done.left) == (3, 1, 0)
    assert "no JSON object" in done.why[0]
    tally = app.worker(drain=True).run()
    assert (tally.completed, tally.failed) == (3, 1)


def test_a_rotation_reports_a_row_with_a_bad_signature_and_keeps_it(apps: Apps, engine: Engine) -> None:
    fill(apps(keys=[OLD]))
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET queue = 'other' WHERE id = (SELECT max(id) FROM jobs)"))
        before = conn.scalar(text("SELECT payload FROM jobs WHERE queue = 'other'"))
    both = apps(keys=[NEW, OLD])
    done = Rotation(both.database).rotate()
    assert (done.sealed["jobs.payload"], done.bad, done.left) == (2, 1, 0)
    assert "(jobs): the seal of its payload does not fit" in done.why[0]
    with engine.connect() as conn:
        assert conn.scalar(text("SELECT payload FROM jobs WHERE queue = 'other'")) == before
    checked = Rotation(both.database).check()
    assert (checked.bad, checked.sealed["jobs.payload"]) == (1, 2)
    assert Rotation(apps(keys=[new_key()]).database).check().bad == 5


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_rotation_skips_and_counts_a_locked_row(apps: Apps, engine: Engine) -> None:
    fill(apps(keys=[OLD]))
    both = apps(keys=[NEW, OLD])
    with engine.begin() as conn:
        conn.execute(text("SELECT 1 FROM jobs WHERE id = (SELECT max(id) FROM jobs) FOR UPDATE"))
        done = Rotation(both.database).rotate()
    assert (done.sealed["jobs.payload"], done.bad, done.left) == (2, 0, 1)
    assert Rotation(both.database).rotate().left == 0


def test_a_rotation_rewrites_a_running_job_for_its_next_attempt(apps: Apps) -> None:
    """Its next attempt needs the new key alone."""
    app = apps(keys=[NEW, OLD])
    old = apps(keys=[OLD])
    tries: list[int] = []

    @app.task(name="again", max_attempts=2, backoff="0s")
    def again(n: int) -> None:
        tries.append(n)
        if len(tries) == 1:
            Rotation(app.database).rotate()
            assert app.database.seal is not None
            del app.database.seal.keys[ids(app)[1]]
            raise ValueError("again")

    old.enqueue(old.named("again").new(7))
    assert app.worker(drain=True).run().completed == 1
    assert tries == [7, 7]


def test_a_rotation_without_a_writing_key_is_refused(apps: Apps) -> None:
    with pytest.raises(ConfigurationError, match="there are no keys"):
        Rotation(apps().database).rotate()
    with pytest.raises(ConfigurationError, match="there are no keys"):
        Rotation(apps().database).check()
    with pytest.raises(ConfigurationError, match='with seal="read" nothing is sealed'):
        Rotation(apps(keys=[NEW], seal="read").database).rotate()


def test_every_place_of_payloads_has_task_and_queue() -> None:
    for place in keys.EVERYWHERE:
        assert {"task", "queue", place.kind} <= set(place.table.c.keys())


def test_the_doctor_names_keys_that_are_not_here(apps: Apps) -> None:
    assert doctor(apps()) == []
    old = apps(keys=[OLD])
    fill(old)
    assert [found.verdict for found in doctor(old)] == ["ok"]
    (found,) = doctor(apps())
    assert (found.verdict, found.said) == (
        "check",
        f"4 rows are sealed with key {ids(old)[0]}, which this App does not have (it has none)",
    )
    (found,) = doctor(new := apps(keys=[NEW]))
    assert found.verdict == "to do"
    assert f"(it has {ids(new)[0]})" in found.said
    assert not any(key in str(found) for key in (OLD, NEW))
