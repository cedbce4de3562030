"""A process that dies at the n-th point of its work with the database, for every n.

`python -m tests.faults.dying` reads requests from its input, one a line: URL, STEP, N and ARGUMENT as JSON.
It does the step in a fork of itself that dies at its N-th point, and answers `died MOMENT` or `done`. The
death is like a SIGKILL: nothing is flushed, closed or rolled back. A point lies before or after each
statement, and before or after each COMMIT. No connection is open when it forks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.admin.flows import SKIPPED
from sqlq.database.dialect import Driver
from sqlq.database.mariadb.driver import MariaDBDriver
from sqlq.database.postgresql.driver import PostgreSQLDriver
from sqlq.database.sqlite.driver import SQLiteDriver
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Finished, Outcome, Released, Retried, settlement
from sqlq.store import schedules
from sqlq.store.blockers import EventBlocker
from sqlq.store.flows import unblock as unblocking
from sqlq.store.jobs import lease, lookup, operate
from sqlq.store.jobs import settle as settling
from sqlq.store.limits import admit as admission
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.context import JobContext
from sqlq.worker.ipc.pipe import unpacked
from tests.kit import claim_on

ROOT = Path(__file__).parents[2]
DIED = 77
ERROR = ErrorText("ValueError", "no")
WRITES = re.compile(r"\b(INSERT INTO|DELETE FROM|UPDATE \S+ SET|SET STATEMENT|UPDATE \S+ FORCE INDEX)\b")


class Mortal:
    """Counts the points of an engine, and ends the process at one of them."""

    def __init__(self, last: int, tell: int, every_thread: bool) -> None:
        self._last, self._tell, self._every_thread = last, tell, every_thread
        self._count = 0
        self._lock = threading.Lock()
        for kind in (PostgreSQLDriver, SQLiteDriver, MariaDBDriver):
            setattr(kind, "run", self._mortal(kind.run))  # noqa: B010 - statements that go past SQLAlchemy have no event

    def _mortal(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def mortal_run(own: Driver, driver: Any, statement: str, parameters: Any) -> Any:
            self.moment(f"before {_named(statement)}")
            rows = run(own, driver, statement, parameters)
            self.moment(f"after {_named(statement)}")
            return rows

        return mortal_run

    def moment(self, what: str) -> None:
        if not self._every_thread and threading.current_thread() is not threading.main_thread():
            return  # a thread of their own sends notifications at any time
        with self._lock:  # held for ever by the thread that dies: no other gets a statement through
            self._count += 1
            if self._count == self._last:
                os.write(self._tell, what.encode())
                os._exit(DIED)

    def watch(self, engine: Engine) -> None:
        for when in ("before", "after"):
            event.listen(engine, f"{when}_cursor_execute", partial(self._look, when))
        commit = engine.dialect.do_commit

        def mortal_commit(connection: Any) -> None:
            self.moment("before COMMIT")
            commit(connection)
            self.moment("after COMMIT")

        setattr(engine.dialect, "do_commit", mortal_commit)  # noqa: B010 - there is no event after a COMMIT

    def _look(self, when: str, conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        self.moment(f"{when} {_named(statement)}")


def _named(statement: str) -> str:
    words = " ".join(statement.split())
    return f"{'WRITE' if WRITES.search(words) else 'READ'} {words[:60]}"


OUTCOMES: dict[str, Outcome] = {
    "complete": Finished('"done"'),
    "cancel": Cancelled("not wanted"),
    "retry": Retried(0, ERROR),
    "release": Released(),
    "fail": Failed("error", ERROR),
}


class Life:
    """The steps of a job's life, each as its process takes it. `argument` is what the parent prepared: a job,
    as a rule."""

    def __init__(self, url: str, mortal: Mortal) -> None:
        self.app = sqlq.App(url)
        self.database = self.app.database
        databases = self.database, self.database.for_loops, self.database.for_claims
        for engine in {database.engine for database in databases}:
            mortal.watch(engine)
        self.mortal = mortal
        self.url = url

    def enqueue(self, argument: Any) -> None:
        task = self.app.task(name="note")(lambda n: n)
        self.app.enqueue_many([task.new(argument), task.new(argument)])

    def _users_engine(self) -> Engine:
        engine = create_engine(self.url)
        if engine.dialect.name == "sqlite":
            sqlq.configure_sqlite(engine, immediate=True)
        self.mortal.watch(engine)
        return engine

    def enqueue_in_session(self, argument: Any) -> None:
        engine = self._users_engine()
        task = self.app.task(name="note")(lambda n: n)
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": argument})
            self.app.enqueue(task.new(argument), session=session)

    def claim(self, argument: Any) -> None:
        with self.database.begin() as conn:
            claim_on(conn, [argument], limit=2, owner="mortal", lease_ms=3_600_000)

    def settle(self, argument: Any) -> None:
        """Settle a job as its worker does, with what follows it."""
        job, outcome = argument
        with self.database.begin() as conn:
            settling.settle(conn, [settlement(unpacked(job), OUTCOMES[outcome])])

    def _job(self, argument: Any) -> JobContext:
        target = Target(lambda: self.database, schema=self.database.schema)
        return JobContext(Attempt(unpacked(argument), None, float("inf"), target))

    def complete(self, argument: Any) -> None:
        """A handler that writes, and completes its job, in a transaction of its own."""
        running = self._job(argument)
        with running.completing(self._users_engine()) as session:
            session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": running.id})

    def checkpoint(self, argument: Any) -> None:
        """A handler that writes a slice, and saves with it how far it has come; then the next one."""
        running = self._job(argument)
        engine = self._users_engine()
        for n in (1, 2):
            with Session(engine) as session, session.begin():
                row = {"job": running.id, "n": n}
                session.execute(text("INSERT INTO slices VALUES (:job, :n)"), row)
                running.checkpoint(session, n)

    def heartbeat(self, argument: Any) -> None:
        with self.database.begin() as conn:
            lease.extend(conn, [tuple(argument)], lease_ms=7_200_000)

    def rescue(self, argument: Any) -> None:
        with self.database.begin() as conn:
            settling.rescue(conn)

    def unblock(self, argument: Any) -> None:
        unblocking.after(self.database.for_claims, argument)

    def free(self, argument: Any) -> None:
        EventBlocker().free(self.database)

    def admit(self, argument: Any) -> None:
        admission.look(self.database)

    def skip(self, argument: Any) -> None:
        with self.database.begin() as conn:
            settling.skip(conn, argument, SKIPPED)

    def retry_failed(self, argument: Any) -> None:
        with self.database.begin() as conn:
            operate.retry_failed(conn, lookup.Selection(ids=(argument,)))

    def tick(self, argument: Any) -> None:
        """Enqueue the due runs of schedules, by a clock that is an input."""
        schedules.tick(self.database, at=datetime.fromisoformat(argument))

    def work(self, argument: Any) -> None:
        """A whole worker: claims, runs and settles what it finds, and leaves."""

        def note(n: int) -> None:
            with Path(argument).open("a") as file:
                file.write(f"{n}\n")

        self.app.task(name="note", max_attempts=3, backoff="0s")(note)
        self.app.worker([str(Path(argument).name)], drain=True, lease="1h").run()


def main() -> None:
    for line in sys.stdin:
        url, step, last, argument = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            life = Life(url, Mortal(last, writing, every_thread=step == "work"))
            getattr(life, step)(argument)
            life.app.close()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            moment = told.read()
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        print(
            f"died {moment}" if code == DIED else "done" if code == 0 else f"failed with {code}", flush=True
        )


@contextmanager
def dying_process() -> Iterator[Callable[..., str | None]]:
    """Start the process, and yield a function of a URL, a step, a number and an argument.

    It returns the point of death, None for none.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.dying"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    requests: IO[str] = process.stdin  # type: ignore[assignment]
    answers: IO[str] = process.stdout  # type: ignore[assignment]

    def die(url: str, step: str, last: int, argument: Any = None) -> str | None:
        requests.write(json.dumps([url, step, last, argument]) + "\n")
        requests.flush()
        answer = answers.readline().strip()
        if answer == "done":
            return None
        assert answer.startswith("died "), f"{step}, moment {last}: {answer or 'the process is gone'}"
        return answer.removeprefix("died ")

    try:
        yield die
    finally:
        requests.close()
        process.wait(30)
        answers.close()


if __name__ == "__main__":
    main()
