"""The jobs of a dead host, or a dead process, are released in batches that follow each other at once."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.config.constants import LEASE_MS
from sqlq.store import blockers
from sqlq.store.blockers import LimitBlocker
from sqlq.store.jobs import settle
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from sqlq.worker.maintain import services
from tests.kit import blocked, claim, deaths
from tests.kit.hand import fail_before

RHYTHM = 1_000.0
"""Far longer than any batch takes: a service that waits for so long waits for its next look."""
SHORT = 5.0
"""Longer than a batch takes, and shorter than the rhythm is."""
MANY = 10_000
NOBODY = float("inf")
LIMITED, SPENT = 7, 50
"""Every so many of the jobs are under a limit, and have no attempt left."""


@pytest.fixture(autouse=True)
def rhythm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "jittered", lambda seconds: RHYTHM if seconds > SHORT else seconds)
    monkeypatch.setattr(blockers.Blocker, "share", 0)  # a slow machine would rest after its last turn, too


def die(app: sqlq.App, number: int) -> list[int]:
    """Have a worker hold so many jobs, with follow-ups, limits and spent attempts among them, and die."""
    alarm = app.task(name="alarm", queue="ops")(lambda ended: None)
    plain, limited, once = (
        app.task(name=name, on_failure=alarm, **options)(lambda: None)
        for name, options in (
            ("plain", {}),
            ("limited", {"limit": sqlq.Limit("api", running=number)}),
            ("once", {"max_attempts": 1}),
        )
    )
    new = [(once if n % SPENT == 0 else limited if n % LIMITED == 0 else plain).new() for n in range(number)]
    ids = [job.id for job in app.enqueue_many(new)]
    with app.database.begin() as conn:
        workers.register(conn, id="dead", host="gone", pid=1, version="0", queues=None, concurrency=1)
        # as a claim leaves them, but with leases that have run out
        conn.execute(
            text(
                "UPDATE jobs SET attempts = 1, lease_token = lease_token + 1, reserved_by = 'dead', "
                "reserved_at = created_at, lease_expires_at = created_at, blocked_by = NULL, due_at = NULL, "
                "available_at = created_at"
            )
        )
    return ids


def is_as_the_contract_says(engine: Engine, ids: list[int]) -> None:
    """Assert that each token has risen by one, and each job is due, blocked, or failed with a callback."""
    spent = len(ids[::SPENT])
    with engine.connect() as conn:
        rows = conn.execute(text("SELECT * FROM jobs WHERE task <> 'alarm'")).all()
        failed = conn.execute(text("SELECT lease_token, reason FROM failed_jobs")).all()
        followed = conn.execute(text("SELECT count(*) FROM jobs WHERE task = 'alarm'")).scalar_one()
    assert [tuple(row) for row in failed] == [(2, "worker_lost")] * spent
    assert (followed, len(rows)) == (spent, len(ids) - spent)
    assert {(row.lease_token, row.losses, row.reserved_by) for row in rows} == {(2, 1, None)}
    assert all("worker_lost" in row.errors for row in rows)
    assert {(row.task, row.blocked_by) for row in rows} == {("plain", None), ("limited", "limit")}


def rescuing(app: sqlq.App, **options: Any) -> tuple[services.Rescue, list[int]]:
    """Return a service that rescues jobs, and the list of those that it has."""
    taken: list[int] = []

    def tell(rescued: Any, why: str) -> None:
        taken.extend(job.id for job in rescued)

    return services.Rescue(app.database, LEASE_MS, tell, **options), taken


def turns_of(service: services.Service) -> int:
    """Run a service until it waits for its next look, and return how often it ran."""
    turns = 1
    while service.run() < RHYTHM:
        turns += 1
    return turns


@pytest.mark.integration
@pytest.mark.parametrize("somebody_looks", [False, True], ids=["looks itself", "was called"])
def test_ten_thousand_jobs_of_a_dead_host_are_rescued_without_a_wait(
    app: sqlq.App, engine: Engine, somebody_looks: bool
) -> None:
    """A turn for each batch, and one that finds none."""
    ids = die(app, MANY)
    service, taken = rescuing(app, is_watched=lambda: somebody_looks)
    service.calls += somebody_looks
    assert turns_of(service) == -(-MANY // services.RESCUE_BATCH) + 1
    assert sorted(taken) == ids, "each is rescued once"
    is_as_the_contract_says(engine, ids)


def test_a_job_whose_end_is_refused_does_not_delay_its_batch(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "RESCUE_BATCH", 10)
    ids = die(app, 35)
    fail_before(engine, ids[0])
    service, taken = rescuing(app)
    turns_of(service)
    assert sorted(taken) == ids[1:]


def test_concurrent_rescues_take_each_job_once(app: sqlq.App, engine: Engine) -> None:
    ids = die(app, 2_000)
    start = threading.Barrier(3)

    def rescue() -> list[int]:
        service, taken = rescuing(app)
        start.wait(30)
        turns_of(service)
        return taken

    with ThreadPoolExecutor(3) as pool:
        rescued = [pool.submit(rescue) for _ in range(3)]
    # what one found locked, the others were about to take
    assert sorted(id for each in rescued for id in each.result()) == ids
    is_as_the_contract_says(engine, ids)


def test_rescue_pauses_between_batches_on_a_single_writer(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for SQLite's write lock gets no turn between two transactions without a pause."""
    die(app, services.RESCUE_BATCH)
    clock, rescue = [0.0], settle.rescue

    def takes(*given: Any, **more: Any) -> Any:
        clock[0] += 0.5
        return rescue(*given, **more)

    def tell(rescued: Any, why: str) -> None:
        clock[0] += 0.125

    monkeypatch.setattr(services, "monotonic", lambda: clock[0])
    monkeypatch.setattr(settle, "rescue", takes)
    service = services.Rescue(app.database, LEASE_MS, tell)
    wait = service.run()
    monkeypatch.undo()
    assert wait == (0.375 if app.database.dialect.in_a_file else 0.0)


def admit_all(app: sqlq.App) -> None:
    for unblocker in app.worker()._unblockers:
        unblocker.look_now()


@pytest.mark.parametrize("number", [3, 4])
def test_a_paused_queue_releases_all_its_slots_without_a_wait(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(admit, "JOBS_AT_ONCE", 2)
    task = app.task(name="t", limit=sqlq.Limit("api", running=number))(lambda: None)
    app.enqueue_many([task.new() for _ in range(number)])
    admit_all(app)
    app.queues.pause("default")
    assert turns_of(services.Unblock(app.database, LimitBlocker())) == number // 2 + 1
    assert blocked(app) == number


def test_the_jobs_of_a_dead_process_are_released_at_once(app: sqlq.App, noop: Any, engine: Engine) -> None:
    number = 601
    app.enqueue_many([noop.new() for _ in range(number)])
    held = claim(app, "dead", number)
    begun = {(job.id, job.lease_token) for job in held[::2]}
    dead = deaths("dead", started=begun)
    assert dead.release(app.database) == NOBODY
    with engine.connect() as conn:
        found = conn.execute(text("SELECT attempts, releases, losses FROM jobs")).all()
    assert Counter(map(tuple, found)) == {(1, 0, 1): len(begun), (0, 1, 0): number - len(begun)}
    assert dead.counts == {"retried": len(begun), "released": number - len(begun)}


@pytest.mark.parametrize("by", ["its supervisor", "itself"])
def test_a_job_that_never_began_frees_its_slot_when_released(app: sqlq.App, by: str) -> None:
    task = app.task(name="t", limit=sqlq.Limit("api", running=1))(lambda: None)
    first, _ = app.enqueue_many([task.new(), task.new()])
    admit_all(app)
    (held,) = claim(app, "dead", 2)
    assert held.id == first.id
    if by == "itself":
        app.worker()._leases._give_back({(held.id, held.lease_token)})
    else:
        deaths("dead").release(app.database)
    row = app.jobs.get(first.id)
    assert (row.state, row.blocked_by, row.releases, row.attempts) == ("blocked", "limit", 1, 0)
    admit_all(app)
    assert blocked(app) == 1, "one of the two holds the slot"
    (line,) = row.history
    assert (line.outcome, line.attempt, line.worker) == ("released", 1, "dead")
