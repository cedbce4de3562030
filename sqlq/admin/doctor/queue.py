"""`sqlq doctor` on the queue: finds waiting lists of limits that stand still, flows behind a failed step, and
schedules that are not ticked."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection

from sqlq.admin.doctor.finding import Finding, check, counted, ok, span, to_do
from sqlq.config.command_hint import command, word
from sqlq.config.durations import readable, written
from sqlq.store import schedules
from sqlq.store.flows import flows
from sqlq.store.limits import admit
from sqlq.store.workers import pauses, workers

LONG_MS = 300_000
"""The doctor reports waits of at least this length."""
LATE_TICK_MS = 60_000
NAMED = 5
"""The doctor reports at most this many of a kind."""


def lines(conn: Connection) -> Iterator[Finding]:
    """Find the waiting lists of limits that stand still, and report what holds them."""
    found = admit.starving(conn, LONG_MS, NAMED)
    paused, served = pauses.paused(conn), workers.served(conn)
    for line in found:
        said = f"a job has been in line for the key {line.key!r} since {written(line.due_at)}"
        queue = word(line.waits_in)
        if line.held_by is not None:
            held = f"job {line.held_by} has failed, and holds those after it"
            yield to_do("limits", f"{said}: {held}", command(f"retry {line.held_by}"))
        elif line.waits_in in paused:
            said = f"{said}: its queue {line.waits_in!r} is paused"
            yield check("limits", said, command(f"queues resume {queue}"))
        elif served is not None and line.waits_in not in served:
            said = f"{said}: no worker serves its queue {line.waits_in!r}"
            yield to_do("limits", said, command(f"work -q {queue}", needs_app=True))
        elif line.running and line.running == line.unclaimed and line.queue not in paused:
            work = command(f"work -q {word(line.queue or '')}", needs_app=True)
            held = f"its slots are held by {counted(line.unclaimed, 'job', 'jobs')} that no worker claims"
            yield to_do("limits", f"{said}: {held}, in queue {line.queue!r}", work)
        else:
            held = f"{counted(line.running, 'job holds', 'jobs hold')} its slots"
            yield check("limits", f"{said}: {held}", command("limits"))
    if not found:
        yield ok("limits", "no line of a limit stands still")


def flows_that_stand_still(conn: Connection) -> Iterator[Finding]:
    """Find the flows in which steps have long been blocked behind one that has failed."""
    found = flows.stuck(conn, LONG_MS, NAMED)
    for each in found:
        flow = f"flow {each.flow_id}" + ("" if each.name is None else f" ({each.name})")
        waits = counted(each.waiting, "step waits", "steps wait")
        yield check(
            "flows",
            f"{flow} stands still: its step {each.step} ({each.task}) failed {span(each.seconds)} ago, and "
            f"{waits} for it",
            f"{command(f'retry --flow {each.flow_id}')}, or skip the step, or cancel the flow",
        )
    if not found:
        yield ok("flows", "no flow stands still behind a failed step")


def plans(conn: Connection, *, is_worked_on: bool) -> Iterator[Finding]:
    """Find the schedules that are not ticked, or whose jobs nobody can run."""
    late = schedules.late(conn, longer_than_ms=LATE_TICK_MS)
    failing = schedules.failing(conn)
    for name, error in failing[:NAMED]:
        see = command(f"schedules show {word(name)}")
        said = f"the schedule {name} cannot be ticked: {error}"
        yield to_do("schedules", said, f"see {see}, and mend what it names")
    if late:
        said = f"{counted(late, 'schedule is', 'schedules are')} due for more than {readable(LATE_TICK_MS)}"
        yield to_do(
            "schedules", said, "see the workers' logs" if is_worked_on else "start a worker: any ticks them"
        )
    if not late and not failing:
        yield ok("schedules", "none is late, and none fails")
