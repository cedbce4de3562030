"""Processes, hosts and servers are killed under a shop with jobs of every kind.

The account of its rows is that of a day without faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.payload.encryption import HEAD, new_key
from tests.faults import account, guard
from tests.faults.operated import Waiters, numbers
from tests.kit import wait_until
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.scenario import Fault, Scenario
from tests.programs import beats, effects
from tests.programs.shop import ACCOUNTS, SECRET

pytestmark = pytest.mark.integration

SEED = 20_261_123
FLOWS, WIDTH = 8, 3
JOBS = {
    "plain": 16,
    "loop": 12,
    "second": 6,
    "apart": 1,
    "pay": 20,
    "pay_apart": 1,
    "fails": 4,
    "cancels": 4,
    "call": 10,
    "late": 3,
}
"""How many jobs of each task are enqueued before each fault."""
ENDS = {"fails": "failed", "poison": "failed", "cancels": "cancelled"}
"""How the jobs of a task end, unless they finish."""


@pytest.fixture
def shop(
    tmp_path: Path, database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scenario]:
    monkeypatch.setenv(effects.VARIABLE, database_url)
    effects.create(engine)
    guard.install(engine, owners_may_be_known_dead=True)
    account.watch_flows(engine)
    with Scenario(tmp_path / "shop", database_url, "beats") as shop:
        yield shop


FOLLOWED = ("plain", "pay", "pay_apart", "fails", "cancels", "poison")


def enqueue(shop: Scenario, chance: random.Random, turn: int) -> None:
    """Enqueue jobs of every kind, mixed, and flows."""
    tasks = [task for task, number in JOBS.items() for _ in range(number)] + ["poison"] * (turn == 0)
    chance.shuffle(tasks)
    jobs = [new(shop, task, 1_000 * turn + n) for n, task in enumerate(tasks)]
    # ids rise with the numbers in each account
    jobs += [shop.new("book", n % ACCOUNTS, 1_000 * turn + n, SECRET) for n in range(2 * ACCOUNTS)]
    shop.enqueue_all(jobs)
    step = partial(shop.new, "plain", turn, SECRET)
    with shop.engine.begin() as conn:  # else a worker has done most of them before the last is there
        for _ in range(FLOWS):
            first = sqlq.group(*(step() for _ in range(WIDTH)))
            shop.app.enqueue(sqlq.chain(first, step(), sqlq.group(step(), step()), step()), session=conn)


def new(shop: Scenario, task: str, n: int) -> sqlq.NewJob:
    if task == "late":
        return shop.new("plain", n, SECRET).set(delay="1h", label="late")
    job = shop.new(task, n, SECRET)
    # a row names its callback, or the worker that ends the job knows it of the task
    return replace(job, on_success=None, on_failure=None) if task in ("plain", "pay") and n % 2 else job


def storm(shop: Scenario, faults: Sequence[Fault], *options: str) -> None:
    """Have two hosts work, with a fault in the midst of each lot of jobs, until all are done."""
    chance = random.Random(SEED)
    with shop.working_at(2, "-p", "2", "-c", "4", "--lease", "2s", *options):
        for turn, fault in enumerate(faults):
            enqueue(shop, chance, turn)
            shop.wait_for_notes(chance.randint(5, 60))
            fault(shop, chance)
            shop.app.jobs.cancel(label="late")
        shop.wait_done()
        wait_for_ticks(shop)


def wait_for_ticks(shop: Scenario) -> None:
    """Wait for a tick of each schedule after the last fault."""
    seen = {each.name: each.ticks for each in shop.app.schedules.list()}
    assert len(seen) == len(beats.BEATS)
    wait_until(lambda: all(each.ticks > seen[each.name] for each in shop.app.schedules.list()), what="ticks")


def judge(shop: Scenario) -> None:
    assert shop.killed
    assert guard.ILLEGAL not in shop.logs()
    guard.check(shop.engine)
    ended = [job for job in shop.app.jobs.list(queue="default", limit=100_000) if not job.schedule]
    wrong = [job for job in ended if (job.state, job.result) != expected(job)]
    assert wrong == []
    account.demand("jobs of every kind under SIGKILL", account.lost(shop), cases=len(ended), seed=SEED)
    account.demand("exactly once", account.effects_of(shop, "pay", "pay_apart"))
    followed = [job for job in ended if job.task.rpartition(".")[2] in FOLLOWED]
    follow_ups = shop.app.jobs.list(queue="follow", limit=100_000)
    assert {job.state for job in follow_ups} == {"finished"}
    guarantee = "G14: follow-ups of jobs whose workers are killed"
    account.demand(guarantee, account.followed(followed, follow_ups))
    account.demand("G11: flows whose workers are killed", account.flows_of(shop))
    account.demand("Limits under SIGKILL", account.limits_of(shop))
    account.demand("schedules: workers killed at random", account.ticks_of(shop.app))


def expected(job: sqlq.JobDetails) -> tuple[str, Any]:
    """Return the state and result that a job ends with."""
    state = "cancelled" if job.label == "late" else ENDS.get(job.task.rpartition(".")[2], "finished")
    return state, " ".join(map(str, job.payload["args"][-2:])) if state == "finished" else None


KILLS: list[Fault] = [Scenario.kill_one, Scenario.kill_host, Scenario.kill_one]


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_workers_lose_and_double_nothing(shop: Scenario, times: int) -> None:
    storm(shop, KILLS * times)
    judge(shop)


@pytest.fixture
def encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLQ_KEYS", new_key())
    monkeypatch.setenv("SQLQ_ENCRYPTION", "encrypt")


@pytest.mark.usefixtures("encrypted")
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_every_waiter_gets_the_end_of_its_job_in_a_storm(
    request: pytest.FixtureRequest, shop: Scenario, times: int
) -> None:
    """With encrypted payloads, waiters for each job, and metrics, which need no database."""
    attempts = []

    def scrape() -> None:
        # one of them may have begun just now
        attempts.append(sum(numbers(host).get("sqlq_attempts_total", 0) for host in shop.hosts))

    def crash(shop: Scenario, chance: random.Random) -> None:
        server: OwnPostgreSQL = request.getfixturevalue("restartable_postgresql")
        server.stop("immediate")
        scrape()
        server.start()

    def look(shop: Scenario, chance: random.Random) -> None:
        scrape()

    faults = [*KILLS, crash if shop.app.database.dialect.notifies else look] * times
    with Waiters(shop.url, each=4) as waiters:
        storm(shop, faults, "--metrics-port", "0")
    judge(shop)
    wrong = waiters.wrong(shop.app)
    print(wrong)
    figures = {"cases": len(shop.made), "told_wrong": len(wrong)}
    account.demand("operated: encrypted, waited for and measured, in a storm", figures)
    assert max(attempts) > 0
    texts = "coalesce(payload, '') || coalesce(result, '')"
    assert shop.count(f"finished_jobs WHERE {texts} LIKE '%{SECRET}%'") == 0
    assert SECRET not in shop.logs()


@pytest.mark.slow
def test_long_jobs_do_not_overlap(shop: Scenario) -> None:
    """They run for several leases, and whoever else looks for work finds none."""
    ids = shop.enqueue_all(shop.new("long", n, 8) for n in range(12))
    with shop.working_at(2, "--lease", "3s", "-c", "3"):
        shop.wait_done()
    assert guard.ILLEGAL not in shop.logs()
    figures = account.overlaps(shop, "long") | account.lost(shop)
    account.demand("G5: long jobs under short leases", figures)
    assert figures["cases"] == len(ids), "each ran once"


def test_the_callback_of_a_job_whose_worker_died_is_signed(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor signs it, which imports no App."""
    monkeypatch.setenv("SQLQ_KEYS", new_key())
    with Scenario(tmp_path / "shop", database_url) as shop, shop.working("-c", "1"):
        shop.enqueue("poison", 1, SECRET)
        shop.wait_done()
        (payload,) = shop.scalars("SELECT payload FROM finished_jobs WHERE task LIKE '%.follow'")
        assert payload.startswith(HEAD)
