"""`sqlq doctor` on the queue: workers, what waits for them, and what stands still."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from sqlq.admin.doctor.finding import Answer, Checks, check, ok, to_do
from sqlq.admin.keys import unreadable
from sqlq.admin.queues import Queues, QueueStatus
from sqlq.admin.workers import Workers, WorkerStatus, forgotten_pauses, since_it_said
from sqlq.config.command_hint import command, word
from sqlq.config.constants import HEARTBEAT_MS, RESCUE_MS, UNKNOWN_TASK_MS, VERSION
from sqlq.config.durations import counted, readable, span, written
from sqlq.store import schedules as schedule_rows
from sqlq.store.flows import flows as flow_rows
from sqlq.store.health import health
from sqlq.store.limits import admit
from sqlq.store.workers import pauses as pause_rows
from sqlq.store.workers import workers as worker_rows
from sqlq.store.workers.pauses import Pauses
from sqlq.store.workers.workers import STUCK

LONG_MS = 300_000
"""The doctor reports waits of at least this length."""
LATE_TICK_MS = 60_000
NAMED = 5
"""The doctor reports at most this many of a kind."""
STUCK_MS = 2 * RESCUE_MS
CANCEL_MS = 6 * HEARTBEAT_MS
LONG_WAIT_S = 300.0
LONG_HELD_S = 15.0
"""A worker may hold a job this long without starting it: a new Python process takes seconds under load."""
LONG_PAUSE_S = 3_600.0
"""A worker that has been paused for so long may have been forgotten."""


class QueueChecks(Checks):
    """Checks of the queue in one database."""

    @cached_property
    def _alive(self) -> list[WorkerStatus]:
        return Workers(self._database).list()

    @cached_property
    def _held(self) -> list[QueueStatus]:
        return Queues(self._database).status()

    @cached_property
    def _pauses(self) -> Pauses:
        return self._ask(pause_rows.paused)

    def indexes(self) -> Iterator[Answer]:
        missing, invalid = self._ask(health.indexes)
        for name in invalid:
            yield to_do(
                f"the index {name} is INVALID: it costs writes and serves no reads",
                f"REINDEX INDEX CONCURRENTLY {name}",
            )
        if missing:
            remedy = f"create them as {command('migrate --sql')} shows"
            yield to_do(f"these indexes are missing: {', '.join(missing)}; claims read whole tables", remedy)
        if not missing and not invalid:
            yield ok("all are there and valid")

    def workers(self) -> Iterator[Answer]:
        entered = self._ask(worker_rows.entered)
        alive = self._alive
        others = sorted({worker.version for worker in alive} - {VERSION})
        silent = len(entered) - len(alive)
        said = f"{counted(len(alive), 'worker is', 'workers are')} alive"
        said += f", {silent} fell silent within a day" if silent > 0 else ""
        if not alive:
            waiting = [queue for queue in self._held if queue.available and not queue.paused]
            remedy = f"start one with {command('work', needs_app=True)}"
            if waiting:
                due = _held_in(waiting, ("available",), "job is", "jobs are")
                yield to_do(f"no worker is alive, and {due} due", remedy)
            else:
                yield check("no worker is alive; nothing is due", remedy)
        elif others:
            yield check(
                f"{said}; some run sqlq {', '.join(others)}, this is {VERSION}",
                f"finish the deploy: see {command('workers')}",
            )
        else:
            yield ok(said)

    def stuck(self) -> Iterator[Answer]:
        for worker in (worker for worker in self._alive if worker.state == STUCK):
            who = f"the worker on {worker.host}, pid {worker.pid}, has been stuck for "
            who += span(since_it_said(worker))
            held = ", ".join(f"job {job.id} ({job.task})" for job in worker.jobs[:5]) or "no job"
            remedy = "its supervisor kills it, after --stuck-after at the latest; see its log"
            yield check(f"{who}: it gives no sign of life, and holds {held}", remedy)

    def starts(self) -> Iterator[Answer]:
        short = [worker for worker in self._alive if worker.unstarted]
        for worker in short:
            jobs = counted(worker.unstarted, "job")
            yield check(
                f"the worker on {worker.host}, pid {worker.pid}, could not start {jobs}, and gave them back",
                "see its log: threads, open files (ulimit -n), processes or memory are short there",
            )
        held = self._held_long() if any(map(_unstarted, self._alive)) else []
        for worker, number in held:
            jobs = counted(number, "job")
            yield check(
                f"the worker on {worker.host}, pid {worker.pid}, has held {jobs} for over "
                f"{span(LONG_HELD_S)} without starting them",
                f"a handler blocks its event loop, or processes start slowly: see {command('workers')}",
            )
        if not short and not held:
            yield ok("workers could start every job they claimed")

    def _held_long(self) -> list[tuple[WorkerStatus, int]]:
        """Return workers that hold jobs for long that they have not started, and how many."""
        now, reserved = self._ask(worker_rows.moment), self._ask(worker_rows.reserved)
        old = {job.id for job in reserved if (now - job.since).total_seconds() > LONG_HELD_S}
        counted = [(worker, len(old & _unstarted(worker))) for worker in self._alive]
        return [(worker, number) for worker, number in counted if number]

    def queues(self) -> Iterator[Answer]:
        queues = [queue for queue in self._held if not queue.paused]
        unserved = [queue for queue in queues if queue.available and not queue.served]
        if unserved and self._alive:
            names = ", ".join(
                f"{queue.queue} ({_held_in([queue], ('available',), 'due', 'due')})" for queue in unserved
            )
            start = command(f"work -q {word(unserved[0].queue)}", needs_app=True)
            yield to_do(f"no worker serves {names}", f"start one with {start}, or without -q for all")
        waiting = [queue for queue in queues if queue.oldest_wait_seconds is not None]
        if not waiting:
            yield ok("nothing waits to be run")
            return
        longest = max(waiting, key=_wait)
        said = f"the job that has waited longest is in queue {longest.queue}, due for {span(_wait(longest))}"
        if longest.served and _wait(longest) > LONG_WAIT_S:
            more = "start more workers, or workers with more slots"
            yield check(said, f"{more}; {command('workers')} shows what they are at")
        elif not unserved:
            yield ok(said)

    def paused(self) -> Iterator[Answer]:
        pauses = self._pauses
        old = [
            check(said, command(mend)) for said, mend in forgotten_pauses(pauses, self._alive, LONG_PAUSE_S)
        ]
        yield from old
        holding = [
            queue for queue in self._held if queue.queue in pauses.named and queue.available + queue.scheduled
        ]
        for queue in holding:
            waiting = _held_in([queue], ("available", "scheduled"), "job waits", "jobs wait")
            said = f"{queue.queue} is paused, and {waiting} in it"
            yield check(said, command(f"queues resume {word(queue.queue)}"))
        if not holding and not old:
            yield ok("no queue that holds waiting jobs is paused")

    def leases(self) -> Iterator[Answer]:
        stuck = self._ask(health.stuck, longer_than_ms=STUCK_MS)
        if stuck is None:
            yield ok("no running job is without its worker")
            return
        have = counted(stuck.number, "running job has", "running jobs have")
        said = f"{have} lost their workers, the first {span(stuck.seconds)} ago, and no worker has taken them"
        should = "look at the workers' logs: they should"
        remedy = should if self._alive else "start a worker: any takes over what others lost"
        yield to_do(f"{said} over: {_ids(stuck.ids, stuck.number)}", remedy)

    def cancels(self) -> Iterator[Answer]:
        ids = self._ask(health.unheeded_cancels, longer_than_ms=CANCEL_MS)
        if ids:
            said = f"these jobs were asked to stop more than {readable(CANCEL_MS)} ago, and have not"
            yield check(f"{said}: {_ids(ids, len(ids))}", command(f"cancel --force {ids[0]}"))
        else:
            yield ok("no request to cancel is unheeded")

    def tasks(self) -> Iterator[Answer]:
        tasks = self._ask(health.unknown_tasks)
        for unknown in tasks[:5]:
            left = max(0.0, UNKNOWN_TASK_MS / 1000 - unknown.seconds)
            yield to_do(
                f"no worker that met it knows the task {unknown.task}: "
                f"{counted(unknown.number, 'job was', 'jobs were')} put back, first "
                f"{span(unknown.seconds)} ago, and will fail in {span(left)}",
                "deploy workers whose App has it, or cancel them with "
                + command(f"cancel --task {word(unknown.task)}"),
            )
        if not tasks:
            yield ok("workers knew the task of every job they met")

    def seals(self) -> Iterator[Answer]:
        said = unreadable(self._database)
        if said is not None:
            remedy = "give it to every App: App(keys=[…]) or SQLQ_KEYS"
            yield (check if self._database.seal is None else to_do)(said, remedy)
        elif self._database.seal is not None:
            yield ok("the newest rows are sealed with keys that are here, or plain")

    def failed(self) -> Iterator[Answer]:
        failed = [queue for queue in self._held if queue.failed]
        if failed:
            said = f"{_held_in(failed, ('failed',), 'job has', 'jobs have')} failed for good"
            lists, prunes = command("jobs --state failed"), command("prune --failed 30d")
            remedy = f"{lists}; then retry or delete them, or {prunes}"
            yield check(said, remedy)
        else:
            yield ok("no job has failed for good")

    def limits(self) -> Iterator[Answer]:
        """Find the waiting lists of limits that stand still, and report what holds them."""
        found = self._ask(admit.starving, LONG_MS, NAMED)
        if not found:
            yield ok("no line of a limit stands still")
            return
        paused, served = self._pauses, self._ask(worker_rows.served)
        for line in found:
            said = f"a job has been in line for the key {line.key!r} since {written(line.due_at)}"
            queue = word(line.waits_in)
            if line.held_by is not None:
                held = f"job {line.held_by} has failed, and holds those after it"
                yield to_do(f"{said}: {held}", command(f"retry {line.held_by}"))
            elif line.waits_in in paused:
                said = f"{said}: its queue {line.waits_in!r} is paused"
                yield check(said, command(f"queues resume {queue}"))
            elif served is not None and line.waits_in not in served:
                said = f"{said}: no worker serves its queue {line.waits_in!r}"
                yield to_do(said, command(f"work -q {queue}", needs_app=True))
            elif line.running and line.running == line.unclaimed and line.queue not in paused:
                work = command(f"work -q {word(line.queue or '')}", needs_app=True)
                held = f"its slots are held by {counted(line.unclaimed, 'job', 'jobs')} that no worker claims"
                yield to_do(f"{said}: {held}, in queue {line.queue!r}", work)
            else:
                held = f"{counted(line.running, 'job holds', 'jobs hold')} its slots"
                yield check(f"{said}: {held}", command("limits"))

    def flows(self) -> Iterator[Answer]:
        """Find the flows in which steps have long been blocked behind one that has failed."""
        found = self._ask(flow_rows.stuck, LONG_MS, NAMED)
        for each in found:
            flow = f"flow {each.flow_id}" + ("" if each.name is None else f" ({each.name})")
            waits = counted(each.waiting, "step waits", "steps wait")
            failed = f"its step {each.step} ({each.task}) failed {span(each.seconds)} ago"
            remedy = f"{command(f'retry --flow {each.flow_id}')}, or skip the step, or cancel the flow"
            yield check(f"{flow} stands still: {failed}, and {waits} for it", remedy)
        if not found:
            yield ok("no flow stands still behind a failed step")

    def schedules(self) -> Iterator[Answer]:
        """Find the schedules that are not ticked, or whose jobs nobody can run."""
        late = self._ask(schedule_rows.late, longer_than_ms=LATE_TICK_MS)
        failing = self._ask(schedule_rows.failing)
        for name, error in failing[:NAMED]:
            see = command(f"schedules show {word(name)}")
            said = f"the schedule {name} cannot be ticked: {error}"
            yield to_do(said, f"see {see}, and mend what it names")
        if late:
            are = counted(late, "schedule is", "schedules are")
            said = f"{are} due for more than {readable(LATE_TICK_MS)}"
            yield to_do(said, "see the workers' logs" if self._alive else "start a worker: any ticks them")
        if not late and not failing:
            yield ok("none is late, and none fails")


def _wait(queue: QueueStatus) -> float:
    return queue.oldest_wait_seconds or 0.0


def _held_in(queues: Sequence[QueueStatus], names: Sequence[str], one: str, many: str) -> str:
    """Return as text how many jobs queues hold, with "+" where a count was not brought to an end."""
    number = sum(getattr(queue, name) for queue in queues for name in names)
    more = any(name in queue.capped for queue in queues for name in names)
    return f"{number:,}+ {many}" if more else counted(number, one, many)


def _ids(ids: list[int], count: int) -> str:
    return ", ".join(map(str, ids)) + ("" if count <= len(ids) else ", …")


def _unstarted(worker: WorkerStatus) -> set[int]:
    """Return the jobs that a worker has claimed and not started."""
    return {job.id for job in worker.jobs if not job.started}
