"""The verbs of operators: how each is done, for which jobs, by whom, and its answer. Commands, buttons of the
dashboard and actions of Django's admin are made from these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from sqlq.admin.workers import Asked, WorkerStatus
from sqlq.config.durations import counted
from sqlq.model.flow_status import FlowStatus
from sqlq.model.job import JobDetails

WAITING = ("blocked", "scheduled", "available")
LIVE = (*WAITING, "running")
ENDED = ("finished", "failed", "cancelled")
IDS_SHOWN = 20


class Outcome(NamedTuple):
    """The answer of a verb: the object for programs, and the lines for people. The ids are those of the jobs
    that stay as they were, and `why_not` returns the reason for one."""

    value: Any
    lines: Sequence[str]
    unchanged: Sequence[int] = ()
    why_not: Callable[[JobDetails], str] = lambda job: f"it is {job.state}"

    def sentence(self, also_unchanged: int = 0) -> str:
        """Return the answer as one sentence; so many other jobs had changed before."""
        if number := len(self.unchanged) + also_unchanged:
            return "; ".join([*self.lines, f"{counted(number, 'job')} stayed as before"])
        return "; ".join(self.lines)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb. `do` is called with the App, the ids or names, and the options."""

    do: Callable[..., Outcome]
    role: Literal["operator", "admin"] = "operator"
    asks: bool = False
    """Whether a page has to confirm it first."""
    states: tuple[str, ...] = ()
    """The states of the jobs that it is for; empty where it is for something else than jobs."""
    options: tuple[str, ...] = ()
    """The options that a form may have."""


def listed(ids: Sequence[int | str]) -> str:
    """Return ids or names for a sentence; of many only the first."""
    shown = ", ".join(map(str, ids[:IDS_SHOWN]))
    return shown if len(ids) <= IDS_SHOWN else f"{shown} and {counted(len(ids) - IDS_SHOWN, 'more', 'more')}"


def of(options: Mapping[str, Any]) -> str:
    """Return " of task … in queue … of group … of flow …" for the jobs that the options choose."""
    names = {"task": "of task", "queue": "in queue", "group": "of group", "flow": "of flow"}
    return "".join(f" {words} {options[name]}" for name, words in names.items() if options.get(name))


def who(worker: WorkerStatus | Asked) -> str:
    """Return the name of a worker, where it has one, with its host and process."""
    return f"{'' if worker.name is None else worker.name + ' on '}{worker.host} pid {worker.pid}"


def flow_counts(flow: FlowStatus) -> str:
    return ", ".join(f"{number:,} {state}" for state, number in flow.counts.items())


def _others(ids: Iterable[int], done: Collection[int]) -> list[int]:
    return sorted(set(ids).difference(done))


# -- jobs ----------------------------------------------------------------------------------------------------


def _cancel(app: Any, ids: Sequence[int], *, flow: int | None = None, **options: Any) -> Outcome:
    which = of({**options, "flow": flow})
    if flow is None:
        effects = app.jobs.cancel(ids, **options)
    else:
        named = {name: options[name] for name in ("force", "reason") if name in options}
        effects = app.flows.cancel(flow, **named)
    by_effect: dict[str, list[int]] = {
        effect.replace(" ", "_"): sorted(id for id, each in effects.items() if each == effect)
        for effect in ("cancelled", "requested", "ended", "unknown", "passed over", "locked")
    }
    lines = []
    if cancelled := by_effect["cancelled"]:
        lines += [f"cancelled {counted(len(cancelled), 'job')}{which}: {listed(cancelled)}"]
    if requested := by_effect["requested"]:
        asked = f"asked {counted(len(requested), 'running job')}{which} to stop: {listed(requested)}"
        lines += [f"{asked}; its worker sees it within 2 seconds; --force does not wait for it"]

    def why_not(job: JobDetails) -> str:
        if effects[job.id] == "locked":
            return "another transaction has locked its row: try again"
        if effects[job.id] == "passed over":
            return f"it is of task {job.task} in queue {job.queue}, not of those named"
        return f"it is {job.state} already"

    # a step that has ended meanwhile is no failure
    unchanged = _others(effects, cancelled + requested) if flow is None else by_effect["locked"]
    return Outcome(by_effect, lines or [f"no jobs{which} cancelled"], unchanged, why_not)


def _retry(app: Any, ids: Sequence[int], *, flow: int | None = None, **options: Any) -> Outcome:
    which = of({**options, "flow": flow})
    held: list[int] = []
    if flow is None:
        moved, held = app.jobs.move_back(ids, **options)
    else:
        moved = app.flows.retry(flow)
    lines = [f"no failed jobs{which} moved back"]
    if moved:
        lines = [f"moved back {counted(len(moved), 'job')}{which} to run again: {listed(moved)}"]
    if held:
        stay = counted(len(held), "job stays", "jobs stay")
        lines += [f"{stay} failed, since live jobs hold the same unique keys: {listed(held)}"]

    def why_not(job: JobDetails) -> str:
        if job.id in held:
            return str(app.jobs.why(job.id)[0])
        if job.state == "failed":
            return _NOT_NAMED
        return f"it is {job.state}: only failed jobs are retried"

    missing = _others(ids, moved)
    value = {"retried": moved, "held_back": held, "not_failed": _others(missing, held)}
    return Outcome(value, lines, missing, why_not)


_NOT_NAMED = "it has failed, but is not of those named, or is locked by another command"


def _delete(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    deleted, which = app.jobs.delete(ids, **options), of(options)
    lines = [f"deleted {counted(len(deleted), 'job')}{which}: {listed(deleted)}"]
    missing = _others(ids, deleted)
    return Outcome(
        {"deleted": deleted, "not_deleted": missing},
        lines if deleted else [f"no failed jobs{which} to delete"],
        missing,
        lambda job: {
            "finished": "another step of its flow may still take its result",
            "failed": _NOT_NAMED,
        }.get(job.state, f"it is {job.state}"),
    )


def _replay(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    replays, which = app.jobs.replay(ids, **options), of(options)
    lines = [f"replayed {counted(len(replays), 'job')}{which} as {listed([*replays.values()])}"]
    missing = _others(ids, replays)
    rows = [{"id": id, "replay_of": original} for original, id in replays.items()]
    return Outcome(
        {"replayed": rows, "not_replayed": missing},
        lines if replays else [f"no ended jobs{which} to replay"],
        missing,
        _why_not_replayed,
    )


def _why_not_replayed(job: JobDetails) -> str:
    if job.flow_id is not None:
        return f"it is a step of flow {job.flow_id}: sqlq retry --flow {job.flow_id} runs failed steps again"
    if job.ended_at is None:
        return f"it is {job.state}, and only ended jobs are replayed"
    return f"it is {job.state}, but not of those named"


def _reschedule(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    moved, which = app.jobs.reschedule(ids, **options), of(options)
    at, delay = options.get("at"), options.get("delay")
    when = f"at {at.isoformat()}" if at else f"in {delay.strip()}" if delay else "now"
    lines = [f"{counted(len(moved), 'job')}{which} due {when}: {listed(moved)}"]
    missing = _others(ids, moved)
    return Outcome(
        {"rescheduled": moved, "not_waiting": missing},
        lines if moved else [f"no waiting jobs{which} to move"],
        missing,
        _why_not_waiting,
    )


def _change(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    effects = app.jobs.change(ids, **options)
    changed = [id for id, effect in effects.items() if effect == "changed"]
    reasons = {
        "sealed": "it is signed or encrypted for its queue; enqueue it anew in the other one",
        "key held": "another job holds its unique key in that queue",
    }
    return Outcome(
        effects,
        [f"changed {counted(len(changed), 'job')}{': ' if changed else ''}{listed(changed)}"],
        _others(effects, changed),
        lambda job: reasons.get(effects[job.id]) or _why_not_waiting(job),
    )


def _why_not_waiting(job: JobDetails) -> str:
    if job.state == "running":
        return "it is running, and only waiting jobs are moved"
    if job.state in WAITING:
        return f"it is {job.state}, but not of those named, or locked by another transaction"
    return f"it is {job.state} already; sqlq retry and sqlq replay run jobs again"


def _skip(app: Any, ids: Sequence[int]) -> Outcome:
    flows = {id: app.flows.skip(id) for id in ids}
    lines = [
        f"skipped step {id}; flow {flow.id} is {flow.state}, {flow_counts(flow)}"
        for id, flow in flows.items()
    ]
    return Outcome([flow.as_json() for flow in flows.values()][-1], lines)


# -- queues, workers, schedules and limits -------------------------------------------------------------------


def _pause_queues(
    app: Any, names: Sequence[str], *, all: bool = False, lasting: str | None = None
) -> Outcome:
    ending = "" if lasting is None else f" for {lasting.strip()}"
    already = f"paused already, and from now on{ending or ' without an end'}"
    unknown = app.queues.unknown(names)
    paused = app.queues.pause(*names, all=all, lasting=lasting)
    if all:
        line = f"paused all queues{ending}" if paused else f"all queues are {already}"
        return Outcome({"all": True, "paused": bool(paused)}, [line])
    nothing = (
        "; nothing else is known of a queue of that name: no job is in it, and no worker or task names it"
    )
    lines = [
        f"paused {name}{ending}{nothing if name in unknown else ''}"
        if name in paused
        else f"{name} is {already}"
        for name in sorted({*names})
    ]
    return Outcome(_switched(names, "paused", paused, unknown), lines)


def _resume_queues(app: Any, names: Sequence[str], *, all: bool = False) -> Outcome:
    unknown = app.queues.unknown(names)
    resumed = app.queues.resume(*names, all=all)
    if all:
        line = "resumed all queues that are not paused by name" if resumed else "all queues are not paused"
        return Outcome({"all": True, "resumed": bool(resumed)}, [line])
    lines = [f"resumed {name}" if name in resumed else f"{name} is not paused" for name in sorted({*names})]
    return Outcome(_switched(names, "resumed", resumed, unknown), lines)


def _switched(
    names: Sequence[str], verb: str, changed: Collection[str], unknown: Collection[str]
) -> list[dict[str, object]]:
    return [{"queue": q, verb: q in changed, "known": q not in unknown} for q in sorted({*names})]


def _ask_workers(method: str, done: str, app: Any, names: Sequence[str], *, all: bool = False) -> Outcome:
    asked = getattr(app.workers, method)(*names, all=all)
    lines = [f"asked {who(each)} to {method}" for each in asked]
    lines += [f"{counted(len(asked), 'worker')} will be {done} within 2 seconds; what runs may finish"]
    return Outcome([each._asdict() for each in asked], lines if asked else ["no worker is running"])


def _switch_schedule(method: str, done: str, otherwise: str, app: Any, names: Sequence[str]) -> Outcome:
    (name,) = names
    changed = getattr(app.schedules, method)(name)
    line = f"{done} {name}" if changed else f"{name} is {otherwise}"
    return Outcome({"schedule": name, done: changed}, [line])


def _remove_schedule(app: Any, names: Sequence[str]) -> Outcome:
    (name,) = names
    is_declared = app.schedules.get(name).is_declared
    app.schedules.remove(name)
    again = "code declared it: the next worker that starts with that code adds it again"
    return Outcome(
        {"schedule": name, "removed": True}, [f"removed {name}", *([again] if is_declared else [])]
    )


def _run_schedule(app: Any, names: Sequence[str]) -> Outcome:
    (name,) = names
    job = app.schedules.run(name)
    line = f"enqueued job {job.id}: {job.task} in queue {job.queue}"
    if not job.created:
        line = f"nothing enqueued: job {job.id} holds its unique key"
    return Outcome({key: getattr(job, key) for key in ("id", "queue", "task", "created")}, [line])


def _set_limit(app: Any, names: Sequence[str], **options: Any) -> Outcome:
    (key,) = names
    known = app.limits.is_known(key)
    limit = app.limits.set(key, **options)
    unknown = "" if known else "; nothing else is known of this key: no job and no limit of the App has it"
    return Outcome(limit.as_json(), [f"{key}: {limit.says}, until it is cleared{unknown}"])


def _clear_limit(app: Any, names: Sequence[str]) -> Outcome:
    (key,) = names
    limit = app.limits.clear(key)
    line = f"{key}: {limit.says}, until a job is enqueued that says something else"
    return Outcome(limit.as_json(), [line])


VERBS: Mapping[str, Verb] = {
    "retry": Verb(_retry, states=("failed",), options=("flow",)),
    "cancel": Verb(_cancel, asks=True, states=LIVE, options=("flow", "force")),
    "reschedule": Verb(_reschedule, states=WAITING, options=("delay",)),
    "change": Verb(_change, states=WAITING),
    "replay": Verb(_replay, asks=True, states=ENDED),
    "delete": Verb(_delete, "admin", asks=True, states=("failed",)),
    "flows skip": Verb(_skip, asks=True, states=("failed", "blocked")),
    "queues pause": Verb(_pause_queues, options=("lasting",)),
    "queues resume": Verb(_resume_queues, options=("all",)),
    "workers pause": Verb(partial(_ask_workers, "pause", "paused")),
    "workers resume": Verb(partial(_ask_workers, "resume", "resumed")),
    "workers stop": Verb(partial(_ask_workers, "stop", "stopped"), "admin", asks=True),
    "workers restart": Verb(partial(_ask_workers, "restart", "restarted"), "admin", asks=True),
    "schedules pause": Verb(partial(_switch_schedule, "pause", "paused", "paused already")),
    "schedules resume": Verb(partial(_switch_schedule, "resume", "resumed", "not paused")),
    "schedules run": Verb(_run_schedule),
    "schedules remove": Verb(_remove_schedule, "admin", asks=True),
    "limits set": Verb(_set_limit, "admin", options=("running", "rate")),
    "limits clear": Verb(_clear_limit, "admin"),
}
"""The verbs by the words of their commands."""
