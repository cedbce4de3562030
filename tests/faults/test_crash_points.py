"""The process dies before and after every statement of a job's life, and before and after each COMMIT.

From each of these points a fresh worker brings the job to a legal end, and the guard rejects nothing on the
way. The number of points is not written down: it grows until a step gets through without dying.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.checks import Rule
from sqlq.model.job import ClaimedJob, NewJob
from sqlq.model.outcome import Outcome
from sqlq.store import blockers, schedules
from sqlq.store.flows import unblock
from sqlq.store.jobs import insert
from sqlq.store.limits import admit
from sqlq.testing import tick
from sqlq.worker.ipc.pipe import packed
from tests import kit
from tests.faults import account, guard
from tests.faults.account import MINUTE
from tests.faults.dying import OUTCOMES, dying_process
from tests.kit import execute, wait_until

pytestmark = pytest.mark.each_database

HOUR = 3_600_000
MOST = 400
"""No step has more points than this; beyond it something goes round in circles."""
Die = Callable[..., str | None]


class Points:
    """The points a step died at, each on a queue of its own, and the arguments of the step."""

    def __init__(self, app: sqlq.App, engine: Engine, die: Die, step: str) -> None:
        self.app, self.engine, self._die, self.step = app, engine, die, step
        self.moments: dict[int, str] = {}
        self.made = 0

    def all(self, prepare: Callable[[int], Any]) -> None:
        """Die at each point of the step; `prepare` takes the number and returns the step's argument."""
        for n in range(1, MOST):
            moment = self._die(self.step, n, prepare(n))
            self.wait_until_gone()
            if moment is None:
                break
            self.moments[n] = moment
        else:
            raise AssertionError(f"{self.step} has more than {MOST} moments")
        assert any("after COMMIT" in moment for moment in self.moments.values()), self.moments
        print(f"{self.step}: {len(self.moments)} moments")

    def took(self, n: int) -> bool:
        """Return whether the step's writes were committed when it died at this point, or did not die."""
        moments = sorted(self.moments)
        wrote = next(m for m in moments if self.moments[m].startswith("after WRITE"))
        return n >= next(m for m in moments if m > wrote and self.moments[m] == "after COMMIT")

    def wait_until_gone(self) -> None:
        """The server takes a while to notice that a client died, and holds its locks until then."""
        if self.engine.dialect.name != "sqlite":
            wait_until(lambda: self.others() == 0, what="the server noticing the death")

    def others(self) -> int:
        query = {
            "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
            "state LIKE 'idle in transaction%'",
            "mariadb": "SELECT count(*) FROM information_schema.innodb_trx t JOIN "
            "information_schema.processlist p ON p.id = t.trx_mysql_thread_id WHERE p.db = database() "
            "AND p.command = 'Sleep'",
        }[self.engine.dialect.name]
        return int(execute(self.engine, query))

    def new(self, n: int, max_attempts: int = 3, *, followed: bool = False, limited: int = 0) -> list[int]:
        """Enqueue a job of the number's queue, or so many under a limit of which one may run."""
        new = NewJob("note", f'{{"args": [{n}]}}', f"q{n}", max_attempts)
        if followed:
            new = replace(new, on_success='{"task": "follow"}', on_failure='{"task": "follow"}')
        if limited:
            new = replace(new, limit_key=f"key {n}", rule=Rule(max_running=1))
        with self.app.database.begin() as conn:
            ids = [job.id for job in insert.insert(conn, [new] * max(1, limited))]
        self.made += len(ids)
        return ids

    def claimed(self, n: int, max_attempts: int = 3, *, followed: bool = False) -> ClaimedJob:
        self.new(n, max_attempts, followed=followed)
        return self.claim(n)

    def claim(self, n: int, outcome: Outcome | None = None) -> ClaimedJob:
        """Claim the job of a number's queue, and settle it if there is an outcome."""
        job: ClaimedJob
        (job,) = kit.claim(self.app, f"worker-{n}", 1, queue=f"q{n}", lease_ms=HOUR)
        if outcome is not None:
            kit.settle(self.app, job, outcome)
        return job

    def finish(self) -> dict[int, list[Any]]:
        """Let the leases run out and a fresh worker do what is left; return the jobs of each number's
        queue."""
        guard.advance(self.engine, 3 * HOUR)
        kit.rescue(self.app)
        guard.advance(self.engine, HOUR)
        self.app.worker(drain=True).run()
        guard.check(self.engine)
        assert kit.count(self.engine) == 0, "every job reached an end"
        ended: dict[int, list[Any]] = {}
        for job in self.app.jobs.list(limit=10_000):
            number = int(job.queue.removeprefix("q")) if job.queue.startswith("q") else 0
            ended.setdefault(number, []).append(job)
        lost = self.made - sum(len(found) for number, found in ended.items() if number)
        account.record(f"G2: dying at every moment of {self.step}", cases=len(self.moments), lost=lost)
        return ended

    def check_followed(self, ended: dict[int, list[Any]]) -> None:
        """Demand that each job of a number's queue that finished or failed was followed once, and no
        other."""
        jobs = [job for number, found in ended.items() if number for job in found]
        figures = account.followed(jobs, ended.get(0, []))
        account.demand(f"G14: dying at every moment of {self.step}", figures)


@pytest.fixture(scope="module")
def dying() -> Iterator[Die]:
    with dying_process() as die:
        yield die


@pytest.fixture
def die(dying: Die, database_url: str, app: sqlq.App, engine: Engine) -> Die:
    guard.install(engine)
    app.task(name="note", max_attempts=3, backoff="0s")(lambda n: n)
    app.task(name="follow")(lambda ended: None)
    return partial(dying, database_url)


@pytest.fixture
def points(app: sqlq.App, engine: Engine, die: Die) -> Callable[[str], Points]:
    return lambda step: Points(app, engine, die, step)


@pytest.mark.parametrize("step", ["enqueue", "enqueue_in_session"])
def test_dying_while_enqueueing(points: Callable[[str], Points], engine: Engine, step: str) -> None:
    execute(engine, "CREATE TABLE orders (n INTEGER PRIMARY KEY)")
    crash = points(step)
    crash.all(lambda n: n)
    crash.finish()
    ran = sorted(job.payload["args"][0] for job in crash.app.jobs.list(state="finished", limit=10_000))
    took = [n for n in range(1, len(crash.moments) + 2) if crash.took(n)]
    if step == "enqueue":
        assert ran == sorted(2 * took), "all or none"
    else:
        with engine.connect() as conn:
            assert ran == sorted(conn.scalars(text("SELECT n FROM orders"))) == took, "exactly with the order"


def test_dying_while_claiming(points: Callable[[str], Points]) -> None:
    crash = points("claim")

    def prepare(n: int) -> str:
        crash.new(n)
        return f"q{n}"

    crash.all(prepare)
    for n, (job,) in crash.finish().items():
        took = crash.took(n)
        assert (job.state, job.attempts) == ("finished", 2 if took else 1), crash.moments.get(n)
        assert [error["reason"] for error in job.errors] == (["worker_lost"] if took else [])


@pytest.mark.variants
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_dying_while_settling(points: Callable[[str], Points], outcome: str) -> None:
    """With its end the job is followed, and its slot is free, or neither."""
    crash = points("settle")
    made: dict[int, int] = {}
    seen: dict[int, tuple[str, str | None]] = {}

    def look(n: int) -> None:
        job = crash.app.jobs.get(made[n])
        seen[n] = str(job.state), job.blocked_by

    def prepare(n: int) -> Any:
        if made:
            look(n - 1)  # before the next look admits it again
        (made[n],) = crash.new(n, followed=True, limited=1)
        assert admit.look(crash.app.database).number >= 1
        return [packed(crash.claim(n)), outcome]

    crash.all(prepare)
    look(max(made))
    back = ("blocked", "limit")
    settled: dict[str, Any] = {
        "complete": (("finished", None), ("finished", 1, [])),
        "cancel": (("cancelled", None), ("cancelled", 1, [])),
        "retry": (back, ("finished", 2, ["error"])),
        "release": (back, ("finished", 1, [])),
        "fail": (("failed", None), ("failed", 1, [])),
    }
    unsettled = ("running", None), ("finished", 2, ["worker_lost"])
    ended = crash.finish()
    crash.check_followed(ended)
    for n in made:
        (job,) = ended[n]
        end = str(job.state), job.attempts, [error["reason"] for error in job.errors]
        expected = settled[outcome] if crash.took(n) else unsettled
        assert (seen[n], end) == expected, crash.moments.get(n)


@pytest.mark.integration
def test_dying_while_completing_in_the_handlers_own_transaction(
    points: Callable[[str], Points], engine: Engine
) -> None:
    execute(engine, "CREATE TABLE orders (n INTEGER PRIMARY KEY)")
    crash = points("complete")
    crash.all(lambda n: packed(crash.claimed(n, followed=True)))
    ended = crash.finish()
    crash.check_followed(ended)
    del ended[0]
    with engine.connect() as conn:
        written = set(conn.scalars(text("SELECT n FROM orders")))
    assert len(ended) == len(crash.moments) + 1
    completed = {job.id for n, (job,) in ended.items() if crash.took(n)}
    figures = {"cases": len(ended), "effects_difference": len(written ^ completed)}
    account.demand("G6: dying at every moment of complete()", figures)
    for (job,) in ended.values():
        seen = (str(job.state), job.attempts, [error["reason"] for error in job.errors])
        assert seen == (("finished", 1, []) if job.id in completed else ("finished", 2, ["worker_lost"]))


@pytest.mark.integration
def test_dying_while_saving_a_checkpoint(points: Callable[[str], Points], engine: Engine) -> None:
    execute(engine, "CREATE TABLE slices (job BIGINT, n INTEGER)")
    crash = points("checkpoint")
    crash.all(lambda n: packed(crash.claimed(n)))
    ended = crash.finish()
    with engine.connect() as conn:
        rows = [tuple(row) for row in conn.execute(text("SELECT job, n FROM slices"))]
    saved = [(job.id, n) for (job,) in ended.values() for n in range(1, (job.cursor or 0) + 1)]
    lost, doubled = set(saved) - set(rows), Counter(rows) - Counter(saved)
    figures = {"cases": len(ended), "slices_lost": len(lost), "slices_doubled": doubled.total()}
    account.demand("G14: dying at every moment of a checkpoint", figures)
    assert {job.cursor for (job,) in ended.values()} == {None, 1, 2}, "dead before, between and after them"
    assert {str(job.state) for (job,) in ended.values()} == {"finished"}


@pytest.mark.integration
def test_dying_while_renewing(points: Callable[[str], Points]) -> None:
    crash = points("heartbeat")
    held: dict[int, ClaimedJob] = {}

    def prepare(n: int) -> Any:
        held[n] = crash.claimed(n)
        return [held[n].id, held[n].lease_token]

    crash.all(prepare)
    # whoever holds the job still does: the process that died was only its heartbeat
    assert kit.settle(crash.app, [*held.values()], OUTCOMES["complete"]) == {job.id for job in held.values()}
    assert {str(job.state) for (job,) in crash.finish().values()} == {"finished"}


@pytest.mark.integration
@pytest.mark.variants
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_dying_while_rescuing(points: Callable[[str], Points], max_attempts: int) -> None:
    crash = points("rescue")

    def prepare(n: int) -> None:
        job = crash.claimed(n, max_attempts, followed=True)
        # only this one has run out; what earlier deaths left behind waits for the end
        guard.advance(crash.engine, -HOUR, f"reserved_at IS NOT NULL AND id < {job.id}")
        guard.advance(crash.engine, HOUR, f"id = {job.id}")

    crash.all(prepare)
    guard.advance(crash.engine, MOST * HOUR)
    ended = crash.finish()
    crash.check_followed(ended)
    del ended[0]
    assert len(ended) == len(crash.moments) + 1
    for (job,) in ended.values():
        if max_attempts == 1:
            assert (job.state, job.reason, job.attempts, job.lease_token) == ("failed", "worker_lost", 1, 2)
        else:
            assert (job.state, job.attempts, job.lease_token) == ("finished", 2, 3)
            assert [error["reason"] for error in job.errors] == ["worker_lost"], "one loss, counted once"


@pytest.mark.integration
def test_dying_before_and_while_unblocking(points: Callable[[str], Points]) -> None:
    """Each flow has a step that becomes free, and one that is cancelled with the steps that wait for it. Its
    first point is after the settle and before anything of the unblock."""
    crash = points("unblock")
    task = crash.app.tasks["note"]
    made: dict[int, list[int]] = {}
    for n in range(1, MOST):
        flow = sqlq.Flow()
        first = flow.add(task.new(n).set(queue=f"q{n}"))
        first.then(task.new(n).set(queue=f"q{n}"))
        first.catch(task.new(n).set(queue=f"q{n}")).then(task.new(n).set(queue=f"q{n}"))
        made[n] = [job.id for job in crash.app.enqueue(flow).jobs]
        crash.made += len(made[n])
        crash.claim(n, OUTCOMES["complete"])
        moment = crash._die("unblock", n, made[n][:1])
        crash.wait_until_gone()
        if moment is None:
            break
        crash.moments[n] = moment
    assert any(moment.startswith("after WRITE") for moment in crash.moments.values())
    unblock.sweep_recent(crash.app.database.for_claims, HOUR)
    ended = crash.finish()
    states = {job.id: str(job.state) for found in ended.values() for job in found}
    wanted = ["finished", "finished", "cancelled", "cancelled"]
    tokens = {job.id: job.lease_token for found in ended.values() for job in found}
    figures = {
        "steps_lost": sum([states.get(id) for id in ids] != wanted for ids in made.values()),
        "steps_unblocked_twice": sum(tokens[ids[1]] != 1 for ids in made.values()),
    }
    account.demand("G11: dying at every moment of an unblock", figures)


@pytest.mark.integration
def test_dying_while_a_signal_ends_waits(points: Callable[[str], Points]) -> None:
    """Each flow has a step with a signal, and one past its timeout. Each ends once, by whichever look."""
    crash = points("free")
    task, ends = crash.app.tasks["note"], dict[int, list[int]]()

    def prepare(n: int) -> None:
        flow = sqlq.Flow()
        for wait, when in (
            (flow.wait(f"signal {n}"), "success"),
            (flow.wait(f"none {n}", timeout="0s"), "failure"),
        ):
            flow.add(task.new(n).set(queue=f"q{n}"), after={wait: when})
        ends[n] = [job.id for job in crash.app.enqueue(flow).jobs]
        crash.app.signal(f"signal {n}", n)
        crash.made += 2

    crash.all(prepare)
    blockers.EventBlocker().free(crash.app.database)
    unblock.sweep_recent(crash.app.database.for_claims, HOUR)
    crash.finish()
    lost = twice = 0
    for n, (signalled, timed_out, *after) in ends.items():
        one, two = crash.app.jobs.get(signalled), crash.app.jobs.get(timed_out)
        lost += (one.result, two.reason) != (n, "timeout")
        twice += [crash.app.jobs.get(id).lease_token for id in after] != [1, 1]
    account.demand(
        "G11: dying at every moment of a signal", {"waits_lost": lost, "steps_unblocked_twice": twice}
    )


@pytest.mark.integration
def test_dying_while_admitting(points: Callable[[str], Points]) -> None:
    """A key and its wake, its count and its job: all of an admission, or nothing."""
    crash = points("admit")
    made: dict[int, list[int]] = {}
    over = lost = 0
    seen: set[int] = set()

    def judge(n: int) -> None:
        nonlocal over, lost
        with crash.engine.connect() as conn:
            wakes = conn.scalars(text("SELECT limit_key FROM sqlq_wakes")).all()
        number = sum(crash.app.jobs.get(id).blocked_by is None for id in made[n])
        over, lost = over + (number > 1), lost + (number == 0 and f"key {n}" not in wakes)
        seen.add(number)
        admit.look(crash.app.database)  # what it has left, so that the next is as long

    def prepare(n: int) -> None:
        if made:
            judge(n - 1)
        made[n] = crash.new(n, limited=2)

    crash.all(prepare)
    judge(max(made))
    account.record("G12: dying at every moment of an admission", over_the_limit=over, wakes_lost=lost)
    assert (over, lost, seen) == (0, 0, {0, 1})
    ended = crash.finish()
    assert {str(job.state) for found in ended.values() for job in found} == {"finished"}


@pytest.mark.integration
@pytest.mark.variants
@pytest.mark.parametrize("failed", [False, True], ids=["waiting", "failed"])
def test_dying_while_an_operator_skips_a_step(points: Callable[[str], Points], failed: bool) -> None:
    """The step is in one table, and what waits for it runs after the skip alone."""
    crash = points("skip")
    task = crash.app.tasks["note"]
    made: dict[int, list[int]] = {}

    def prepare(n: int) -> int:
        first = task.new(n).set(queue=f"q{n}")
        made[n] = [job.id for job in crash.app.enqueue(sqlq.chain(first, first)).jobs]
        crash.made += 2
        if failed:
            crash.claim(n, OUTCOMES["fail"])
        return made[n][0]

    crash.all(prepare)
    for n, (step, after) in made.items():
        skipped = crash.took(n)
        waits = "failed" if failed else "available"
        assert str(crash.app.jobs.get(step).state) == ("finished" if skipped else waits), crash.moments.get(n)
        assert str(crash.app.jobs.get(after).state) == "blocked"
    if failed:
        crash.app.jobs.retry(all=True)
    unblock.sweep_recent(crash.app.database.for_claims, HOUR)
    ended = crash.finish()
    assert {str(job.state) for found in ended.values() for job in found} == {"finished"}


@pytest.mark.integration
def test_dying_while_an_operator_retries_a_job(points: Callable[[str], Points]) -> None:
    crash = points("retry_failed")

    def prepare(n: int) -> int:
        crash.new(n)
        return crash.claim(n, OUTCOMES["fail"]).id

    crash.all(prepare)
    for n, (job,) in crash.finish().items():
        back = crash.took(n)
        assert (job.state, job.attempts, job.lease_token) == (
            ("finished", 1, 2) if back else ("failed", 1, 1)
        ), crash.moments.get(n)


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.integration
def test_dying_in_a_tick_leaves_it_undone_or_done(points: Callable[[str], Points], app: sqlq.App) -> None:
    task = app.tasks["note"]
    app.schedules.add("hourly", task.new(1), every="1h", catch_up="all")
    app.schedules.add("minutely", task.new(2), cron="* * * * *", catch_up="all")
    tick(app, NOON, since=NOON)
    crash = points("tick")
    crash.all(lambda n: (NOON + n * MINUTE).isoformat())
    last = len(crash.moments) + 1
    wanted = {
        "minutely": [NOON + n * MINUTE for n in range(1, last + 1)],
        "hourly": [NOON + timedelta(hours=1)] if last >= 60 else [],
    }
    account.demand("schedules: death in a tick", account.ticks(app.jobs.list(limit=10_000), wanted))
    ticked = {each.name: each.ticks for each in app.schedules.list()}
    assert ticked == {name: len(moments) for name, moments in wanted.items()}


def test_a_clock_that_steps_either_way_loses_and_doubles_no_tick(app: sqlq.App) -> None:
    """The database's clock, which alone counts, is put forward and back between ticks."""
    task = app.task(name="note")(lambda: None)
    app.schedules.add("minutely", task.new(), cron="* * * * *", catch_up="all")
    chance = random.Random(7)
    tick(app, NOON, since=NOON)
    clock = furthest = NOON
    for _ in range(60):
        clock += chance.choice((MINUTE, 7 * MINUTE, -13 * MINUTE, timedelta(seconds=20)))
        furthest = max(furthest, clock)
        schedules.tick(app.database, at=clock)
    tick(app, furthest)
    wanted = {"minutely": [NOON + n * MINUTE for n in range(1, (furthest - NOON) // MINUTE + 1)]}
    account.demand("schedules: the clock stepped", account.ticks(app.jobs.list(limit=10_000), wanted))


@pytest.mark.integration
@pytest.mark.parametrize("each", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_dies_at_every_point_of_its_life(
    points: Callable[[str], Points], tmp_path: Path, each: int
) -> None:
    """A whole worker, with all its threads, dies at each of its points, or at some. Their order differs from
    run to run."""
    crash = points("work")
    ran: dict[int, Path] = {}
    for n in range(1, MOST, each):
        crash.new(n, followed=True)
        ran[n] = tmp_path / f"q{n}"
        moment = crash._die("work", n, str(ran[n]))
        crash.wait_until_gone()
        if moment is None:
            break
        crash.moments[n] = moment
    else:
        raise AssertionError(f"a worker's life has more than {MOST} moments")
    print(f"work: {len(crash.moments)} moments")
    # on PostgreSQL a statement by itself is its own commit
    assert each > 1 or any(
        moment == "after COMMIT" or moment.startswith("after WRITE") for moment in crash.moments.values()
    )
    ended = crash.finish()
    crash.check_followed(ended)
    assert ended.keys() == ran.keys() | {0}
    del ended[0]
    for n, (job,) in ended.items():
        assert job.state == "finished"
        runs = ran[n].read_text().count("\n") if ran[n].exists() else 0
        # before its death the job ran once or not at all; it runs again only where the death came before its
        # settlement
        assert runs <= 1, crash.moments.get(n)
        assert job.attempts <= 2
        assert runs == 1 or job.attempts == 2 or job.lease_token == 1, crash.moments.get(n)
    assert each > 1 or sum(file.exists() for file in ran.values()) > 1, "no death after a handler had run"
