"""The verbs of operators, one function each: its docstring is the help of its command.

The commands, the buttons and forms of the dashboard, the actions of Django's admin, and the rows of the audit
are made from these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sqlq.admin.verb import Option, Outcome, Verb, listed, of, whole, worker_name
from sqlq.config.durations import counted
from sqlq.payload.codec import read_json

WAITING = ("blocked", "scheduled", "available")
LIVE = (*WAITING, "running")
ENDED = ("finished", "failed", "cancelled")
TASK = Option("task", "Jobs of this task.")
QUEUE = Option("queue", "Jobs of this queue.")
BATCH = Option("batch", "Jobs of this batch.")
ONES = (TASK, QUEUE, BATCH)
SEARCH = (
    *ONES,
    Option("label", "Jobs with this label."),
    Option("key", "Jobs with this unique key."),
    Option("limit_key", "Jobs under this limit.", metavar="KEY"),
    Option("since", "Jobs that ended, or live ones enqueued, since this time; or an age, as in 2h.", "age"),
    Option("until", "Jobs that ended, or live ones enqueued, before this time; or an age.", "age"),
)
"""Options that choose jobs. Those given together must all fit, and so must ids."""
STATE = Option("state", "Jobs in this state.")
OTHER_QUEUE = Option("queue", "Queue, in place of the task's own.")
PRIORITY = Option("priority", "Priority from -100 to 100; larger runs first.", "number")
ERROR = Option("error", "Jobs with this error, by its id in sqlq failed.", metavar="FINGERPRINT")
ALL_FAILED = Option("all", "All failed jobs.", "flag")
ALL_WORKERS = Option("all", "All workers, on all hosts.", "flag")
LASTING = Option("duration", "Resume automatically after this time, as in 10m.", "duration", example="no end")
AT = Option("available_at", "New due time.", "time")
UNTIL = Option("until", "Time at which it opens, or a duration from now.", "age", example="10m")
KEEP = Option("keep", "How long it counts for what waits later (default 7d).", "duration")
DELAY = Option("delay", "New due time, counted from now, as in 10m.", "duration")


VERBS: dict[str, Verb] = {}
"""The verbs by the words of their commands."""
Do = TypeVar("Do", bound=Callable[..., Outcome])


def verb(words: str, **values: Any) -> Callable[[Do], Do]:
    """Add a verb to the list, with what its function does."""

    def decorate(do: Do) -> Do:
        VERBS[words] = Verb(words=words, do=do, **values)
        return do

    return decorate


def _others(ids: Iterable[int], changed: Collection[int]) -> list[int]:
    return sorted(set(ids).difference(changed))


def _did(done: str, ids: Sequence[int], which: str = "") -> str:
    return f"{done} {counted(len(ids), 'job')}{which}: {listed(ids)}"


def on_jobs(
    done: str,
    ids: Sequence[int],
    changed: Collection[int],
    options: Mapping[str, Any],
    *,
    line: str = "",
    reasons: Mapping[int, str] = {},
    **values: Any,
) -> Outcome:
    """Return the answer where some of these ids, or of the jobs that the options choose, were changed.
    `line` takes the place of the usual one. `reasons` are those of single jobs that were not changed."""
    which, unchanged = of(options), _others(ids, changed)
    line = line or _did(done, sorted(changed), which) if changed else f"no jobs{which} {done}"
    return Outcome({done: changed, f"not_{done}": unchanged} | values, [line], unchanged, reasons)


# -- jobs ----------------------------------------------------------------------------------------------------


@verb(
    "retry",
    selectors=(
        *SEARCH,
        ERROR,
        Option("flow", "Failed steps of this flow, which then continues.", "number", metavar="ID"),
        ALL_FAILED,
    ),
    states=("failed",),
    button="Retry",
)
def retry(app: Any, ids: Sequence[int], *, flow: int | None = None, **options: Any) -> Outcome:
    """Run failed jobs again.

    Choose them by id, --task, --queue, --batch, --error, --since, --flow, or --all. They keep their ids
    and get all their attempts anew. A job whose unique key a live job holds stays failed. Exits with 1 if
    one of the ids was not moved back.
    """
    moved = app.jobs.retry(ids, **options) if flow is None else app.flows.retry(flow)
    held: Sequence[int] = getattr(moved, "held", ())
    reasons = {id: f"a live job holds its unique key: sqlq why {id} names it" for id in held}
    outcome = on_jobs("retried", ids, moved, {**options, "flow": flow}, reasons=reasons, held=held)
    if not held:
        return outcome
    stay = counted(len(held), "job stays", "jobs stay")
    line = f"{stay} failed, since live jobs hold the same unique keys: {listed(held)}"
    return outcome._replace(lines=[*outcome.lines, line])


@verb(
    "cancel",
    selectors=(
        *SEARCH,
        STATE,
        Option("flow", "Steps of this flow that have not ended.", "number", metavar="ID"),
        Option("all", "All jobs that have not ended; asks for confirmation.", "flag"),
    ),
    options=(
        Option("force", "End running jobs now, without waiting for their handlers.", "flag"),
        Option("reason", 'Reason to store with the job (default "cancelled on request").'),
    ),
    states=LIVE,
    button="Cancel…",
    confirms=("all",),
)
def cancel(app: Any, ids: Sequence[int], *, flow: int | None = None, **options: Any) -> Outcome:
    """Cancel jobs: by id, --task, --queue, --batch, --flow or --all.

    Those given together must all fit, and so must ids. A job that waits is cancelled at once. One
    that runs gets a request to stop, which its worker sees within 2 seconds. With --force it is cancelled
    at once, too; its handler may go on, but nothing it returns or raises counts. Exits with 1 if one of
    the ids could not be cancelled.
    """
    which = of({**options, "flow": flow})
    if flow is None:
        effects = app.jobs.cancel(ids, **options)
    else:
        effects = app.flows.cancel(flow, force=options.get("force", False), reason=options.get("reason"))
    by_effect: dict[str, list[int]] = {
        effect.replace(" ", "_"): sorted(id for id, of_job in effects.items() if of_job == effect)
        for effect in ("cancelled", "requested", "ended", "unknown", "passed over", "locked")
    }
    cancelled, requested = by_effect["cancelled"], by_effect["requested"]
    lines = [_did("cancelled", cancelled, which)] if cancelled else []
    if requested:
        request = f"asked {counted(len(requested), 'running job')}{which} to stop: {listed(requested)}"
        lines += [f"{request}; its worker sees it within 2 seconds; --force does not wait for it"]

    # a step that has ended meanwhile is no failure
    unchanged = _others(effects, cancelled + requested) if flow is None else by_effect["locked"]
    return Outcome(by_effect, lines or [f"no jobs{which} cancelled"], unchanged)


@verb(
    "reschedule",
    selectors=(*SEARCH, STATE, Option("all", "All waiting jobs.", "flag")),
    options=(AT, DELAY),
    states=WAITING,
    button="Run now",
)
def reschedule(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    """Move waiting jobs to another time.

    Without --available-at or --delay it is now.

    Choose them by id, --task, --queue, --batch, or --all. Jobs that wait for a retry are moved, too.
    Those that wait under a limit or in a flow do not start before that time. Exits with 1 if one of the
    ids was not moved.
    """
    return on_jobs("rescheduled", ids, app.jobs.reschedule(ids, **options), options)


@verb(
    "change",
    options=(OTHER_QUEUE, PRIORITY, AT, DELAY),
    states=WAITING,
)
def change(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    """Change the queue, priority or time of waiting jobs.

    A signed or encrypted job stays in its queue, and so does one whose unique key another job holds in
    the other queue. Exits with 1 if one of the jobs was not changed.
    """
    effects = app.jobs.change(ids, **options)
    changed = [id for id, effect in effects.items() if effect == "changed"]
    reasons = {id: _NOT_CHANGED[effect] for id, effect in effects.items() if effect in _NOT_CHANGED}
    return on_jobs("changed", ids, changed, {}, reasons=reasons)._replace(value=effects)


_NOT_CHANGED = {
    "protected": "it is signed or encrypted for its queue; enqueue it anew in the other one",
    "key held": "another job holds its unique key in that queue",
}


@verb(
    "delete",
    selectors=(*SEARCH, ERROR, ALL_FAILED),
    role="admin",
    states=("failed",),
    button="Delete…",
    confirms=("all", "error", *(each.name for each in SEARCH)),
    steps="another step of its flow may still take its result",
)
def delete(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    """Delete failed jobs for good, and ended ones by id.

    Choose failed jobs by id, --task, --queue, --batch, --error, --since, or --all. Unless they are named by
    their ids, it counts them, and wants a yes. An id may also be that of a finished or cancelled job.
    """
    return on_jobs("deleted", ids, app.jobs.delete(ids, **options), options)


@verb(
    "replay",
    selectors=(*SEARCH, ERROR, STATE, Option("all", "All ended jobs; asks for confirmation.", "flag")),
    states=ENDED,
    button="Replay…",
    confirms=("all",),
    needs_code=True,
    steps="it is a step of a flow: sqlq retry --flow runs failed steps again",
)
def replay(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    """Enqueue copies of ended jobs, as new jobs.

    By id, --task, --queue, --batch, --error, --since and --until; all that is given must fit. Each copy has
    an id of its own, and no unique key. A job whose copy is kept is copied again by its id only. Cancelled
    jobs are copied by id or --state, steps of flows never. Exits with 1 if one of the ids was not copied.

    \b
    sqlq replay --task shop.send_receipt --since 2h
    """
    replays = app.jobs.replay(ids, **options)
    line = f"replayed {counted(len(replays), 'job')}{of(options)} as {listed([*replays.values()])}"
    rows = [{"id": id, "replay_of": original} for original, id in replays.items()]
    return on_jobs("replayed", ids, replays, options, line=line, replayed=rows)


@verb("flows skip", states=("failed", "blocked"), button="Skip…")
def skip(app: Any, ids: Sequence[int]) -> Outcome:
    """Go on as if a step had finished, without a result.

    STEP is the id of a job that has failed, or that waits. The steps after it run; a step that needs its
    result fails.
    """
    flows = {id: app.flows.skip(id) for id in ids}
    lines = [
        f"skipped step {id}; flow {flow.id} is {flow.state}, {flow.steps_by_state}"
        for id, flow in flows.items()
    ]
    return Outcome([flow.as_json() for flow in flows.values()][-1], lines)


@verb("signal", takes="NAME [JSON]", options=(KEEP,))
def signal(app: Any, names: Sequence[str], *, keep: str | None = None) -> Outcome:
    """Send a signal to the steps and jobs that wait for it.

    They get the value, JSON, or else null. The first signal of NAME counts; a later one changes nothing.

    \b
    sqlq signal approved:7 '{"by": "ada"}'
    """
    from sqlq.admin.facet import audited

    def send(_: Any, name: str, *value: str, keep: str | None) -> Any:
        return app.signal(name, read_json(" ".join(value) or "null", "the value is"), keep=keep or "7d")

    is_first = audited("signal")(send)(app.flows, *names, keep=keep)
    line = f"sent {names[0]}" if is_first else f"{names[0]} came too late: the first signal counts"
    return Outcome({"signal": names[0], "first": is_first}, [line])


# -- queues, workers, schedules and limits -------------------------------------------------------------------


@verb(
    "queues pause",
    selectors=(Option("all", "All queues, future ones included.", "flag"),),
    options=(LASTING,),
    states=("open",),
    button="Pause",
)
def pause_queues(
    app: Any, names: Sequence[str], *, all: bool = False, duration: str | None = None
) -> Outcome:
    """Let no worker claim from queues until they are resumed.

    Running jobs and enqueueing go on. Workers that serve a paused queue by name wait as if it were empty.
    A pause of a queue counts from the next claim on, that of all queues within 2 seconds. To pause
    workers, and not queues: sqlq workers pause.
    """
    ending = "" if duration is None else f" for {duration.strip()}"
    unknown = app.queues._unknown(names)
    paused = app.queues.pause(*names, all=all, duration=duration)
    otherwise = f"paused already, and from now on{ending or ' without an end'}"
    return _switched("paused", names, paused, unknown, otherwise, ending)


@verb(
    "queues resume",
    selectors=(Option("all", "End a pause of all queues.", "flag"),),
    states=("paused",),
    button="Resume",
)
def resume_queues(app: Any, names: Sequence[str], *, all: bool = False) -> Outcome:
    """Let workers claim from these queues again.

    With --all the pause of all queues ends; those that were paused by name stay so.
    """
    unknown = app.queues._unknown(names)
    return _switched("resumed", names, app.queues.resume(*names, all=all), unknown, "not paused")


def _switched(
    done: str,
    names: Collection[str],
    changed: Collection[str],
    unknown: Collection[str],
    otherwise: str,
    ending: str = "",
) -> Outcome:
    if not names:
        line = f"{done} all queues{ending}" if changed else f"all queues are {otherwise}"
        return Outcome({"all": True, done: bool(changed)}, [line])
    queues = sorted({*names})
    lines = [f"{done} {name}{ending}" if name in changed else f"{name} is {otherwise}" for name in queues]
    if unknown:
        lines += [f"nothing else is known of {', '.join(unknown)}: no job, worker or task names such a queue"]
    rows = [{"queue": name, done: name in changed, "known": name not in unknown} for name in queues]
    return Outcome(rows, lines)


@verb(
    "workers pause",
    selectors=(ALL_WORKERS,),
    states=("starting", "idle", "busy", "stopping", "stuck"),
    button="Pause",
)
def pause_workers(app: Any, names: Sequence[str], **options: Any) -> Outcome:
    """Have workers claim nothing until they are resumed.

    Workers are named by --name, host, host:pid or id. They obey within 2 seconds; what they run goes on,
    and what they have not started is released. All processes of a `sqlq work` get the request together.
    """
    return _requested("pause", "paused", app.workers.pause(*names, **options))


@verb("workers resume", selectors=(ALL_WORKERS,), states=("paused",), button="Resume")
def resume_workers(app: Any, names: Sequence[str], **options: Any) -> Outcome:
    """Have paused workers claim again, within 2 seconds."""
    return _requested("resume", "resumed", app.workers.resume(*names, **options))


@verb(
    "workers restart",
    selectors=(ALL_WORKERS,),
    role="admin",
    button="Restart…",
)
def restart_workers(app: Any, names: Sequence[str], **options: Any) -> Outcome:
    """Have worker processes replaced by new ones, which import your App anew, as after a deploy.

    The new one starts first: when it works, the old one ends after what it runs. If it cannot start,
    the old one goes on. The supervisors stay, and with them their options.
    """
    return _requested("restart", "restarted", app.workers.restart(*names, **options))


@verb("workers stop", selectors=(ALL_WORKERS,), role="admin", button="Stop…")
def stop_workers(app: Any, names: Sequence[str], **options: Any) -> Outcome:
    """Have workers end when what they run has ended, however long that takes.

    They claim nothing more within 2 seconds, and exit with 0. A service manager may start them again.
    """
    return _requested("stop", "stopped", app.workers.stop(*names, **options))


def _requested(method: str, done: str, workers: Sequence[Any]) -> Outcome:
    lines = [f"asked {worker_name(worker)} to {method}" for worker in workers]
    lines += [f"{counted(len(workers), 'worker')} will be {done} within 2 seconds; what runs may finish"]
    return Outcome([worker._asdict() for worker in workers], lines if workers else ["no worker is running"])


@verb("schedules pause", states=("active", "failing", "retired", "ended"), button="Pause")
def pause_schedule(app: Any, names: Sequence[str]) -> Outcome:
    """Enqueue nothing for a schedule until it is resumed.

    The pause holds across deploys. Runs that pass meanwhile are not caught up.
    """
    return _schedule(names, "paused", app.schedules.pause, "paused already")


@verb("schedules resume", states=("paused",), button="Resume")
def resume_schedule(app: Any, names: Sequence[str]) -> Outcome:
    """Go on with a schedule, from its next run."""
    return _schedule(names, "resumed", app.schedules.resume, "not paused")


def _schedule(names: Sequence[str], done: str, switch: Callable[[str], bool], otherwise: str) -> Outcome:
    (name,) = names
    changed = switch(name)
    return Outcome(
        {"schedule": name, done: changed}, [f"{done} {name}" if changed else f"{name} is {otherwise}"]
    )


@verb("schedules run", button="Run now", needs_code=True)
def run_schedule(app: Any, names: Sequence[str]) -> Outcome:
    """Enqueue a job of a schedule now, beside its plan."""
    job = app.schedules.run(*names)
    line = f"enqueued job {job.id}: {job.task} in queue {job.queue}"
    if not job.created:
        line = f"nothing enqueued: job {job.id} holds its unique key"
    return Outcome({key: getattr(job, key) for key in ("id", "queue", "task", "created")}, [line])


@verb("schedules remove", role="admin", button="Remove…")
def remove_schedule(app: Any, names: Sequence[str]) -> Outcome:
    """Take a schedule out; jobs that it has enqueued stay.

    One that code declares is added again by the next worker that starts with that code: pause it instead.
    """
    (name,) = names
    app.schedules.remove(name)
    return Outcome({"schedule": name, "removed": True}, [f"removed {name}"])


@verb(
    "limits set",
    options=(
        Option("running", "Maximum number of jobs running at a time.", "number", example="running"),
        Option("rate", "Maximum number of starts in a period, as in 100/1m.", example="100/1m"),
    ),
    role="admin",
    button="Set",
    needs_code=True,
)
def set_limit(app: Any, names: Sequence[str], **options: Any) -> Outcome:
    """Set what KEY allows, whatever its tasks declare, until it is cleared.

    Without --running or --rate there is no such limit any more. Running jobs go on.
    """
    (key,) = names
    known = any(each.key == key for each in app.limits.list(key, limit=1))
    limit = app.limits.set(key, **options)
    unknown = "" if known else "; no job has had this key yet"
    return Outcome(limit.as_json(), [f"{key}: {limit.says}, until it is cleared{unknown}"])


@verb("limits clear", role="admin", states=("set",), button="Clear", needs_code=True)
def clear_limit(app: Any, names: Sequence[str]) -> Outcome:
    """Go back to what the App declares for KEY.

    The next job that is enqueued declares a key that is made from arguments; until then the old limit
    counts.
    """
    (key,) = names
    limit = app.limits.clear(key)
    return Outcome(
        limit.as_json(), [f"{key}: {limit.says}, until a job is enqueued that says something else"]
    )


@verb("limits close", options=(UNTIL,), button="Close")
def close_limit(app: Any, names: Sequence[str], **options: Any) -> Outcome:
    """Start no job of KEY until a time.

    Running jobs go on. A job that a worker has claimed starts within a second, or waits, too.
    """
    limit = app.limits.close(*names, **options)
    return Outcome(limit.as_json(), [f"{limit.key}: closed; it opens {limit.opens or 'now'}"])


@verb("limits open", states=("closed",), button="Open")
def open_limit(app: Any, names: Sequence[str]) -> Outcome:
    """Let jobs of KEY start again before it opens by itself."""
    limit = app.limits.open(*names)
    return Outcome(limit.as_json(), [f"{limit.key}: open, {limit.says}"])


# -- the audit -----------------------------------------------------------------------------------------------


@verb("audit stop", states=("running",), button="Stop")
def stop_action(app: Any, names: Sequence[str]) -> Outcome:
    """Have an action on many jobs stop after its batch.

    ID is that of sqlq audit. The rest stays as it is; the same command once more goes on with it.
    """
    (name,) = names
    stopped = app.audit.stop(whole(name, "the id"))
    line = f"action {name} stops after its batch" if stopped else f"action {name} has ended, or stops already"
    return Outcome({"id": name, "stopped": stopped}, [line])
