"""`sqlq doctor` on the queue: workers, what waits for them, and what stands still."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from sqlq.admin.doctor.finding import Answers, Case, Check, Finding, check, ok, to_do
from sqlq.admin.queues import QueueStatus
from sqlq.admin.verb import listed, worker_name
from sqlq.admin.why import why
from sqlq.config.command_hint import command, word
from sqlq.config.constants import RESCUE_MS, UNKNOWN_TASK_MS
from sqlq.config.durations import about, counted, ending, readable, span, written
from sqlq.model.job import State
from sqlq.store import health
from sqlq.store import schedules as schedule_rows
from sqlq.store.flows import flows as flow_rows
from sqlq.store.jobs import lookup
from sqlq.store.limits import admit
from sqlq.store.workers import workers as worker_rows
from sqlq.store.workers.workers import PAUSED, STUCK, Pause

LONG_MS = 300_000
"""The doctor reports waits of at least this length."""
NAMED = 5
"""The doctor reports at most this many of a kind."""
STUCK_MS = 2 * RESCUE_MS
CLOCK_SECONDS = 5.0
"""A clock that differs by more than this is reported."""


def indexes(case: Case) -> Answers:
    missing, invalid = case.query(health.indexes)
    for name in invalid:
        yield to_do(
            f"the index {name} is INVALID: it costs writes and serves no reads",
            f"REINDEX INDEX CONCURRENTLY {name}",
        )
    if missing:
        remedy = f"create them as {command('migrate --sql')} shows"
        yield to_do(f"these indexes are missing: {', '.join(missing)}; claims read whole tables", remedy)


def workers(case: Case) -> Answers:
    if alive := len(case.workers):
        silent = len(case.query(worker_rows.entered)) - alive
        lost = f", {silent} fell silent within a day" if silent > 0 else ""
        yield ok(f"{counted(alive, 'worker is', 'workers are')} alive{lost}")
        return
    remedy = f"start one with {command('work', needs_app=True)}"
    if waiting := [queue for queue in case.queues if queue.available and not queue.paused]:
        due = _number_in(waiting, ("available",), "job is", "jobs are")
        yield to_do(f"no worker is alive, and {due} due", remedy)
    else:
        yield check("no worker is alive; nothing is due", remedy)


def stuck(case: Case) -> Answers:
    for worker in case.workers:
        if worker.state == STUCK:
            jobs = ", ".join(f"job {job.id} ({job.task})" for job in worker.jobs[:NAMED]) or "no job"
            yield check(
                f"the worker {worker_name(worker)} is stuck: it gives no sign of life, and holds {jobs}",
                "its supervisor kills it, after --stuck-after at the latest; see its log",
            )


def queues(case: Case) -> Answers:
    queues = [queue for queue in case.queues if not queue.paused]
    unserved = [queue for queue in queues if queue.available and not queue.served]
    if unserved and case.workers:
        names = (f"{queue.queue} ({_number_in([queue], ('available',), 'due', 'due')})" for queue in unserved)
        start = command(f"work -q {word(unserved[0].queue)}", needs_app=True)
        yield to_do(f"no worker serves {', '.join(names)}", f"start one with {start}, or without -q for all")
    waits = [(queue.oldest_wait_seconds, queue) for queue in queues if queue.oldest_wait_seconds is not None]
    if not waits:
        return
    seconds, oldest = max(waits, key=itemgetter(0))
    message = f"the oldest waiting job is in queue {oldest.queue}, due for {span(seconds)}"
    if seconds * 1000 > LONG_MS:
        remedy = f"start more workers, or workers with more slots; {command('workers')} shows their jobs"
        yield check(message, remedy if oldest.served else None)
    elif not (unserved and case.workers):
        yield ok(message)


def paused(case: Case) -> Answers:
    def pause(subject: str, pause: Pause, waits: str, names: str) -> Finding:
        text = f"{subject} paused{ending(pause.until)}, since {written(pause.since)}{waits}"
        return check(text, command(f"queues resume {names}"))

    if case.pauses.all is not None:
        yield pause("all queues are", case.pauses.all, "", "--all")
    for queue in case.queues:
        if (named := case.pauses.named.get(queue.queue)) is not None:
            waits = _number_in([queue], ("available", "scheduled"), "job waits", "jobs wait")
            waits = f", and {waits} in it" if queue.available + queue.scheduled else ""
            yield pause(f"{queue.queue} is", named, waits, word(queue.queue))
    if number := sum(worker.state == PAUSED for worker in case.workers):
        paused = f"{number:,} of {counted(len(case.workers), 'worker is', 'workers are')} paused"
        yield check(paused, command("workers resume --all"))


def imports(case: Case) -> Answers:
    """Find the hosts whose supervisors cannot start another process, as after a broken deploy."""
    hosts: dict[str, set[str]] = {}
    for worker in case.workers:
        if worker.start_error:
            error, _, _ = worker.start_error.partition("; see all of it")
            hosts.setdefault(error, set()).add(worker.host)
    number = len({worker.host for worker in case.workers})
    for error, named in sorted(hosts.items(), key=lambda each: -len(each[1]))[:NAMED]:
        yield to_do(
            f"{len(named):,} of {counted(number, 'host')} cannot start a new worker: {error}",
            f"mend it on {', '.join(sorted(named)[:NAMED])}, then {command('workers restart --all')}",
        )


def clocks(case: Case) -> Answers:
    """Find the hosts whose clocks differ from the database's."""
    hosts = {worker.host: worker.clock_ahead_seconds or 0.0 for worker in case.workers}
    for host, seconds in [each for each in hosts.items() if abs(each[1]) > CLOCK_SECONDS][:NAMED]:
        text = f"the clock of {host} is {span(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'}"
        yield check(f"{text} the database's: its logs have other times", "set both by NTP, as with chronyd")


def leases(case: Case) -> Answers:
    if late := case.query(health.stuck, longer_than_ms=STUCK_MS):
        have = counted(len(late), "running job has", "running jobs have")
        first = span(max(late.values()))
        yield to_do(
            f"{have} lost their workers, the first {first} ago, and no worker has taken them over: "
            f"{listed([*late])}",
            "look at the workers' logs: they should"
            if case.workers
            else "start a worker: any takes over what others lost",
        )


def tasks(case: Case) -> Answers:
    for unknown in case.query(health.unknown_tasks)[:NAMED]:
        if unknown.runs:
            serve = (each for each in case.workers if each.queues is None or unknown.queue in each.queues)
            servers = ", ".join([f"{each.host} pid {each.pid}" for each in serve][:NAMED])
            yield check(
                f"a worker puts back jobs of the task {unknown.task}, which another one runs: their Apps "
                f"share the queue {unknown.queue} (served by {servers})",
                "finish the deploy, or give each App queues of its own: App(service=…), or work -q",
            )
        else:
            left = max(0.0, UNKNOWN_TASK_MS / 1000 - unknown.seconds)
            yield to_do(
                f"no worker takes jobs of the task {unknown.task}: "
                f"{counted(unknown.number, 'job was', 'jobs were')} put back, first "
                f"{span(unknown.seconds)} ago, and will fail in {span(left)}",
                "deploy workers whose App has the task, its keys and its arguments, or cancel them with "
                + command(f"cancel --task {word(unknown.task)}"),
            )


def schedules(case: Case) -> Answers:
    """Find the schedules that are not ticked, or whose jobs nobody can run."""
    for name, error in case.query(schedule_rows.failing)[:NAMED]:
        remedy = f"see {command(f'schedules show {word(name)}')}, and mend what it names"
        yield to_do(f"the schedule {name} cannot be ticked: {error}", remedy)
    if late := case.query(schedule_rows.late):
        are = counted(len(late), "schedule is", "schedules are")
        remedy = "see the workers' logs" if case.workers else "start a worker: any ticks them"
        yield to_do(f"{are} due for more than {readable(schedule_rows.LATE_MS)}: {listed(late)}", remedy)


def limits(case: Case) -> Answers:
    """Find the waiting lists of limits that stand still, and report what holds the first job of each."""
    for key, due_at, id in case.query(admit.starving, LONG_MS, NAMED):
        job = case.query(lookup.details, id)
        if job is None or job.state is not State.BLOCKED:
            continue
        first, *others, _ = why(case.database, job)  # the last one is its cancel
        reasons = "; ".join(reason.text for reason in (first, *others))
        message = f"a job has been in line for the key {key!r} since {written(due_at)}: {reasons}"
        yield (to_do if first.needs_app else check)(message, first.command or command(f"why {id}"))


def flows(case: Case) -> Answers:
    """Find the flows in which steps have long been blocked behind one that has failed."""
    for each in case.query(flow_rows.stuck, LONG_MS, NAMED):
        flow = f"flow {each.flow_id}" + ("" if each.name is None else f" ({each.name})")
        waits = counted(each.waiting, "step waits", "steps wait")
        failed = f"its step {each.id} ({each.task}) failed {span(float(each.ms) / 1000)} ago"
        remedy = f"{command(f'retry --flow {each.flow_id}')}, or skip the step, or cancel the flow"
        yield check(f"{flow} is blocked: {failed}, and {waits} for it", remedy)


def failed(case: Case) -> Answers:
    if failed := [queue for queue in case.queues if queue.failed]:
        counts, prunes = command("failed"), command("prune --failed 30d")
        yield check(
            f"{_number_in(failed, ('failed',), 'job has', 'jobs have')} failed for good",
            f"{counts} counts them by error; then retry --error, delete --error, or {prunes}",
        )


CHECKS = (
    Check("workers", workers),
    Check("schedules", schedules, "none is late, and none fails"),
    Check("queues", queues, "nothing waits to be run"),
    Check("imports", imports, "no worker process has failed to start beside those at work"),
    Check("leases", leases, "no running job is without its worker"),
    Check("tasks", tasks, "workers knew the task of every job they met"),
    Check("stuck", stuck),
    Check("paused", paused, "no queue and no worker is paused"),
    Check("limits", limits, "no job has waited long for a limit"),
    Check("flows", flows, "no flow is blocked by a failed step"),
    Check("failed", failed, "no job has failed for good"),
    Check(
        "clocks",
        clocks,
        f"those of the workers' hosts differ from the database's by {CLOCK_SECONDS:g} s at most",
    ),
    Check("indexes", indexes, "all are there and valid"),
)
"""The checks, those whose findings harm most first."""


def _number_in(queues: Sequence[QueueStatus], names: Sequence[str], one: str, many: str) -> str:
    """Return the number of jobs in queues as text: with "+" where a count has not ended, with "about" where
    it is an estimate."""
    number = sum(getattr(queue, name) for queue in queues for name in names)
    if any(name in queue.estimated for queue in queues for name in names):
        return f"{about(number)} {many}"
    more = any(name in queue.capped for queue in queues for name in names)
    return f"{number:,}+ {many}" if more else counted(number, one, many)
