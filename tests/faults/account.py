"""The account of a scenario: for each promise the figures of `MUST_BE_ZERO` that its rows and notes give. The
scorecard that `python -m tests.faults` prints has them all."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine, text

import sqlq
from sqlq.admin.schedules import ScheduleDetails
from sqlq.model.job import JobDetails
from tests.kit.scenario import Scenario
from tests.programs import effects
from tests.programs.notes import Note
from tests.programs.shop import ACCOUNTS, RUNNING

VARIABLE = "SQLQ_TEST_SCORECARD"
"""Names the file that records go to; without it nothing is recorded."""

ROUNDS = "SQLQ_TEST_FAILOVERS"
"""How many rounds of failovers of Patroni are run; 3 without it."""

MUST_BE_ZERO = {
    "lost": "jobs lost",
    "never_committed": "jobs run whose transaction was rolled back",
    "stale_settles_accepted": "stale settles accepted",
    "overlaps": "overlaps while the lease was renewed",
    "effects_difference": "difference of effects (writes per completed job)",
    "illegal_transitions": "illegal transitions",
    "early": "jobs started early",
    "told_wrong": "waiters who were told something else than what became of their job",
    "lock_errors": "lock errors from sqlq's own transactions",
    "follow_ups_lost": "follow-ups lost",
    "follow_ups_doubled": "follow-ups doubled",
    "ticks_lost": "ticks lost",
    "ticks_doubled": "ticks doubled",
    "slices_lost": "slices of long jobs lost",
    "slices_doubled": "slices of long jobs doubled",
    "steps_lost": "steps of flows lost",
    "steps_unblocked_twice": "steps of flows unblocked twice",
    "late_unblocks": "steps of flows unblocked later than a sweep",
    "over_the_limit": "jobs of a limit run beyond its number at once",
    "out_of_order": "serial jobs out of order",
    "damaged": "databases that failed their integrity check",
}
"""Figures that are added up, and of which the sum has to be zero."""

DISTRIBUTIONS = {
    "recovery_seconds": "recovery, s",
    "resume_seconds": "resuming after an outage, s",
    "exit_seconds": "leaving when told to, s",
    "failover_seconds": "from the first write of a new primary to the next job's start, s",
    "lone_seconds": "from a lone enqueue after a failover to the job's start, s",
}
"""Figures that are lists of samples, of which p50, p99 and the largest are shown."""


def record(guarantee: str, **figures: object) -> None:
    """Append the figures of a test as one line of JSON to the file in SQLQ_TEST_SCORECARD, if it is set.

    `guarantee` is the contract's, or words of one's own. Figures of `MUST_BE_ZERO` are whole numbers, those
    of `DISTRIBUTIONS` lists of seconds. `cases` is how many were tried. `seed` and others are shown as they
    are.
    """
    file = os.environ.get(VARIABLE)
    if file is None:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    with Path(file).open("a") as lines:
        lines.write(json.dumps({"guarantee": guarantee, "test": test, **figures}) + "\n")


HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
LATE_SECONDS = 60
"""Far more than a sweep takes to come, on a machine that is busy with other things."""
OUTCOMES = {"finished": "finished", "failed": "failed"}
Figures = dict[str, int]


def demand(guarantee: str, figures: Figures, **more: Any) -> None:
    """Record figures, and demand that those are zero which must be."""
    record(guarantee, **figures, **more)
    assert not {name: figures[name] for name in MUST_BE_ZERO if figures.get(name)}, guarantee


# -- ends and effects ----------------------------------------------------------------------------------------


def lost(scenario: Scenario) -> Figures:
    """Count the jobs that have not ended."""
    ended = set(scenario.scalars("SELECT id FROM finished_jobs UNION ALL SELECT id FROM failed_jobs"))
    return {"lost": len(scenario.made.keys() - ended)}


def effects_of(scenario: Scenario, *tasks: str) -> Figures:
    """Compare the effects with the finished jobs of these tasks, which have one each."""
    named = " OR ".join(f"task LIKE '%.{task}'" for task in tasks)
    rows = scenario.scalars(f"SELECT id FROM finished_jobs WHERE outcome = 'finished' AND ({named})")
    written = Counter(id for id in effects.committed(scenario.engine) if _of(scenario, id) in tasks)
    return {"cases": len(rows), "effects_difference": sum(written[id] != 1 for id in {*rows, *written})}


def _of(scenario: Scenario, id: int) -> str:
    return scenario.made[id].task.rpartition(".")[2] if id in scenario.made else ""


# -- what follows --------------------------------------------------------------------------------------------


def followed(ended: Iterable[JobDetails], follow_ups: Iterable[JobDetails]) -> Figures:
    """Each job that has finished, or failed for good, is followed once, and no other."""
    due = Counter((job.id, OUTCOMES[job.state]) for job in ended if job.state in OUTCOMES)
    arguments = [job.payload["args"][0] for job in follow_ups]
    rows = Counter((argument["id"], argument["outcome"]) for argument in arguments)
    return {
        "cases": due.total(),
        "follow_ups_lost": (due - rows).total(),
        "follow_ups_doubled": (rows - due).total(),
    }


def watch_flows(engine: Engine) -> None:
    """Note each step that becomes free, in the transaction that frees it."""
    frees = "OLD.blocked_by = 'flow' AND NEW.blocked_by IS NULL"
    begins, note = "CREATE TRIGGER note_freed AFTER UPDATE ON jobs", "INSERT INTO freed VALUES (NEW.id);"
    statements = {
        "sqlite": [f"{begins} WHEN {frees} BEGIN {note} END"],
        "mariadb": [f"{begins} FOR EACH ROW IF {frees} THEN {note} END IF"],
        "postgresql": [
            "CREATE FUNCTION note_freed() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {note} RETURN NULL; END $$",
            f"{begins} FOR EACH ROW WHEN ({frees}) EXECUTE FUNCTION note_freed()",
        ],
    }[engine.dialect.name]
    with engine.begin() as conn:
        for statement in ("CREATE TABLE freed (id BIGINT NOT NULL)", *statements):
            conn.execute(text(statement))


def flows_of(scenario: Scenario) -> Figures:
    """Each step starts after the steps that it waits for, and becomes free once, within a sweep."""
    seconds = {
        "postgresql": "EXTRACT(EPOCH FROM f.available_at - max(p.finished_at))",
        "sqlite": "(f.available_at - max(p.finished_at)) / 1000.0",
        "mariadb": "TIMESTAMPDIFF(MICROSECOND, max(p.finished_at), f.available_at) / 1000000",
    }[scenario.engine.dialect.name]
    before = "sqlq_edges e ON e.job_id = f.id JOIN finished_jobs p ON p.id = e.depends_on"
    waits = f"FROM finished_jobs f JOIN {before}"
    steps = set(scenario.scalars("SELECT DISTINCT job_id FROM sqlq_edges"))
    freed = scenario.scalars("SELECT id FROM freed")
    waited = scenario.scalars(f"SELECT {seconds} {waits} GROUP BY f.id, f.available_at")
    return {
        "cases": scenario.count("finished_jobs WHERE flow_id IS NOT NULL"),
        "steps_lost": len(steps - set(freed)) + scenario.count("jobs WHERE flow_id IS NOT NULL"),
        "steps_unblocked_twice": len(freed) - len(set(freed)),
        "late_unblocks": sum(each > LATE_SECONDS for each in waited),
        "early": len(scenario.scalars(f"SELECT f.id {waits} WHERE f.reserved_at < p.finished_at")),
    }


# -- runs beside each other ----------------------------------------------------------------------------------


class Run(NamedTuple):
    begin: float
    end: float
    n: int
    job: int


def intervals(found: Iterable[Note], killed: dict[int, float]) -> dict[str, list[Run]]:
    """Return the runs by their keys, in the order in which they began. One in a process that was killed ended
    then."""
    runs: dict[str, list[Run]] = defaultdict(list)
    begun: dict[tuple[int, str, int], Note] = {}
    for each in found:
        run = each.pid, each.key, each.job
        if each.what == "begin":
            begun[run] = each
        else:
            runs[each.key].append(Run(begun.pop(run).at, each.at, each.n, each.job))
    for each in begun.values():
        runs[each.key].append(Run(each.at, max(each.at, killed.get(each.pid, each.at)), each.n, each.job))
    return {key: sorted(each) for key, each in runs.items()}


def most_at_once(runs: Iterable[Run]) -> int:
    """Return how many of these runs there were at the same time, at the most."""
    runs = list(runs)
    changes = sorted([(run.end, -1) for run in runs] + [(run.begin, 1) for run in runs])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def overlaps(scenario: Scenario, key: str) -> Figures:
    """Count the runs of a job that began before its run before them had ended."""
    runs = intervals(scenario.notes(), scenario.killed)[key]
    by_job = [[run for run in runs if run.job == job] for job in {run.job for run in runs}]
    return {
        "cases": len(runs),
        "overlaps": sum(second.begin < first.end for each in by_job for first, second in pairwise(each)),
    }


def limits_of(scenario: Scenario) -> Figures:
    """Count the runs under limits beyond their number, and out of their order."""
    runs = intervals(scenario.notes(), scenario.killed)
    serial = [runs[f"account:{account}"] for account in range(ACCOUNTS)]
    most = most_at_once(runs["stripe"])
    assert most > 1, "nothing ran side by side, so nothing was tried"
    return {
        "cases": len({run.job for each in (runs["stripe"], *serial) for run in each}),
        "over_the_limit": max(0, most - RUNNING) + sum(most_at_once(each) - 1 for each in serial),
        "out_of_order": sum(later.n < earlier.n for each in serial for earlier, later in pairwise(each)),
    }


# -- ticks of schedules --------------------------------------------------------------------------------------


def ticks(jobs: list[sqlq.JobDetails], due: dict[str, list[datetime]]) -> Figures:
    """Compare the jobs of schedules with the times at which each was due."""
    had = Counter((job.schedule, job.scheduled_for) for job in jobs)
    wanted = {(name, moment) for name, moments in due.items() for moment in moments}
    return {
        "cases": len(wanted),
        "ticks_lost": len(wanted - had.keys()),
        "ticks_doubled": sum(number - 1 for number in had.values()) + len(had.keys() - wanted),
    }


def ticks_of(app: sqlq.App) -> Figures:
    """Judge all ticks of all schedules, from the first of each up to where it is decided."""
    jobs = [job for job in app.jobs.list(limit=100_000) if job.schedule]
    first = {job.schedule: job.scheduled_for for job in jobs}  # the newest come first
    due = {each.name: moments_of(each, first[each.name]) for each in app.schedules.list()}
    figures = ticks(jobs, due)
    assert sum(each.ticks for each in app.schedules.list()) == len(jobs)
    return figures


def moments_of(each: ScheduleDetails, since: datetime | None) -> list[datetime]:
    """Return the times from `since` up to where the schedule is decided."""
    assert each.plan is not None
    assert since is not None
    return [moment for moment in each.plan.due(since - MINUTE, each.last_at)[0] if moment >= since]
