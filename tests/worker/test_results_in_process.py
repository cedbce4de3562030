"""Results of jobs that run where they are enqueued: there at once, and in no row."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
import sqlq.testing
from tests.kit.flows import Shop

ID = UUID(int=7)


def test_a_job_that_ran_eagerly_has_its_result_at_once(tmp_path: Any) -> None:
    app = sqlq.App(f"sqlite:///{tmp_path}/none.db", eager=True)
    shop = Shop(app)

    @app.task(name="answer")
    def answer(n: int) -> UUID:
        return UUID(int=n)

    @app.task(name="cancels")
    def cancels() -> None:
        raise sqlq.Cancel("not needed")

    job = app.enqueue(answer.new(7))
    assert app.result(job) == app.result(job, timeout=None) == ID
    assert asyncio.run(app.aresult(job, timeout="1s")) == ID
    assert app.wait_all([job]).ended == [job]
    assert [app.result(done) for done in app.as_completed([job])] == [ID]
    with pytest.raises(sqlq.JobCancelledError):
        app.result(app.enqueue(cancels.new()))
    assert app.result(app.enqueue(sqlq.group(shop.note.new(1), shop.note.new(2)))) == [1, 2]
    assert not (tmp_path / "none.db").exists()


def test_a_job_that_ran_inline_has_its_result_at_once(app: sqlq.App, engine: Engine) -> None:
    shop = Shop(app)
    shop.broken = {"pay"}
    with sqlq.testing.inline(app) as ran:
        job = app.enqueue(shop.note.new(7))
        assert app.result(job, timeout="1s") == app.result(job.id) == 7
        assert app.result(app.enqueue(sqlq.chain(shop.note.new(3), shop.note))) == 3
        with pytest.raises(ValueError, match="pay is broken"):
            app.enqueue(shop.note.new("pay"))
        with pytest.raises(sqlq.JobFailedError, match=r"\(note\) failed after 1 attempt: ValueError: pay is"):
            app.result(ran.jobs[-1].id)
    with sqlq.testing.inline(app, at="commit"), Session(engine) as session:
        job = app.enqueue(shop.note.new(7), session=session)
        with pytest.raises(sqlq.WaitTimeoutError, match=r"is available .*: it runs in this process when its"):
            app.result(job, timeout="1h")
        session.commit()
        assert app.result(job) == 7


def test_a_row_is_no_job_of_the_block_that_has_the_same_number(app: sqlq.App) -> None:
    shop = Shop(app)
    row = app.enqueue(shop.total.new([7]))
    with sqlq.testing.inline(app):
        here = app.enqueue(shop.note.new(7))
        assert here.id == row.id
        assert (app.jobs.get(row).task, app.jobs.get(here).task) == ("total", "note")
        with pytest.raises(sqlq.WaitTimeoutError, match="is available"):
            app.result(row)
        assert app.result(here) == 7


def test_a_value_that_is_no_id_is_refused_in_eager_mode(tmp_path: Any) -> None:
    app = sqlq.App(f"sqlite:///{tmp_path}/none.db", eager=True)
    app.enqueue(Shop(app).note.new(7))
    for wrong in ("7", None, 7.0, True):
        with pytest.raises(sqlq.errors.ConfigurationError, match="is not the id of a job: give what"):
            app.jobs.get(wrong)  # type: ignore[arg-type]
