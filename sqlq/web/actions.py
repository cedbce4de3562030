"""The forms that act: the command line's verbs, each with the command that does the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlq.config.command_hint import command, word
from sqlq.config.durations import counted
from sqlq.errors import ConfigurationError
from sqlq.web.access import RefusedError, Role
from sqlq.web.pages import SEARCHED, filter_of, search_of, whole

if TYPE_CHECKING:
    from werkzeug import Response

    from sqlq.app.app import App
    from sqlq.web.site import View

MOST = 10_000
"""The most jobs that one form acts on."""
IDS_IN_A_LINE = 50

Form = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Action:
    """A verb: its role, the words of its command, and its work, which returns a sentence."""

    role: Role
    words: str
    """The command without its subject, as in "queues pause"."""
    do: Callable[[App, Any, Form], str]
    """Called with the ids, or the name, and the rest of the form."""
    asks: bool = False
    """Whether a page has to confirm it first."""
    states: tuple[str, ...] = ()
    """The states of the jobs that it is for; empty where it is for something else than jobs."""
    needs: tuple[str, ...] = ()
    """The other fields of its form, which become options of the command."""


def _cancel(app: App, ids: Sequence[int], form: Form) -> str:
    effects = Counter(app.jobs.cancel(ids, force=bool(form.get("force"))).values())
    if not effects:
        return "No job was there to cancel any more."
    return "Cancel: " + ", ".join(f"{number:,} {effect}" for effect, number in effects.items()) + "."


def _retry(app: App, ids: Sequence[int], form: Form) -> str:
    done = app.jobs.move_back(ids)
    said = f"Retried {counted(len(done.moved), 'job')} of {len(ids):,}."
    if done.held:
        said += f" {counted(len(done.held), 'job')} stayed failed: a live job holds the unique key."
    return said


def _delete(app: App, ids: Sequence[int], form: Form) -> str:
    return f"Deleted {counted(len(app.jobs.delete(ids)), 'job')} of {len(ids):,}."


def _replay(app: App, ids: Sequence[int], form: Form) -> str:
    new = [*app.jobs.replay(ids).values()]
    said = f"Replayed {counted(len(new), 'job')} of {len(ids):,}"
    return said + (f" as {', '.join(map(str, new[:20]))}." if new else ".")


def _reschedule(app: App, ids: Sequence[int], form: Form) -> str:
    delay = form.get("in") or None
    moved = app.jobs.reschedule(ids, delay=delay)
    when = f"in {delay}" if delay else "now"
    return f"Rescheduled {counted(len(moved), 'job')} of {len(ids):,}: due {when}."


def _switched(names: Iterable[Any], done: str, nothing: str) -> str:
    named = ", ".join(str(name) for name in names)
    return f"{done}: {named}." if named else nothing


def _queue_pause(app: App, name: str, form: Form) -> str:
    done = app.queues.pause(name, lasting=form.get("for") or None)
    return _switched(done, "Paused", f"{name} was paused already; its end is set anew.")


def _queue_resume(app: App, name: str, form: Form) -> str:
    return _switched(app.queues.resume(name), "Resumed", f"{name} was not paused.")


def _queue_all(app: App, name: str, form: Form) -> str:
    return "All queues are claimed from again." if app.queues.resume(all=True) else "They were not paused."


def _worker(verb: str) -> Callable[[App, str, Form], str]:
    def do(app: App, name: str, form: Form) -> str:
        asked = getattr(app.workers, verb)(name)
        return f"Asked {counted(len(asked), 'process', 'processes')} to {verb}; each obeys within 2 seconds."

    return do


def _schedule(verb: str, done: str) -> Callable[[App, str, Form], str]:
    def do(app: App, name: str, form: Form) -> str:
        answer = getattr(app.schedules, verb)(name)
        return f"{done} {name}" + (f": job {answer.id}." if verb == "run" else ".")

    return do


def _flow(verb: str) -> Callable[[App, str, Form], str]:
    def do(app: App, name: str, form: Form) -> str:
        answer = getattr(app.flows, verb)(whole(name, "the flow") or 0)
        if verb == "retry":
            return f"Retried {counted(len(answer), 'step')}."
        effects = Counter(answer.values())
        return (
            "Cancel: "
            + (", ".join(f"{n:,} {effect}" for effect, n in effects.items()) or "no live step")
            + "."
        )

    return do


def _skip(app: App, ids: Sequence[int], form: Form) -> str:
    for id in ids:
        app.flows.skip(id)
    return f"Skipped {counted(len(ids), 'step')}."


def _limit_set(app: App, name: str, form: Form) -> str:
    status = app.limits.set(
        name, running=whole(form.get("running"), "running"), rate=form.get("rate") or None
    )
    return f"{name} allows {status.says} from now on."


def _limit_clear(app: App, name: str, form: Form) -> str:
    return f"{name} allows {app.limits.clear(name).says}, as tasks declare."


LIVE = ("blocked", "scheduled", "available", "running")
ACTIONS: dict[str, Action] = {
    "retry": Action("operator", "retry", _retry, states=("failed",)),
    "cancel": Action("operator", "cancel", _cancel, asks=True, states=LIVE, needs=("force",)),
    "reschedule": Action(
        "operator", "reschedule", _reschedule, states=("blocked", "scheduled", "available"), needs=("in",)
    ),
    "replay": Action("operator", "replay", _replay, asks=True, states=("finished", "failed", "cancelled")),
    "delete": Action("admin", "delete", _delete, asks=True, states=("failed",)),
    "skip": Action("operator", "flows skip", _skip, asks=True, states=("failed", "blocked")),
    "queue-pause": Action("operator", "queues pause", _queue_pause, needs=("for",)),
    "queue-resume": Action("operator", "queues resume", _queue_resume),
    "queues-resume": Action("operator", "queues resume --all", _queue_all),
    "worker-pause": Action("operator", "workers pause", _worker("pause")),
    "worker-resume": Action("operator", "workers resume", _worker("resume")),
    "worker-stop": Action("admin", "workers stop", _worker("stop"), asks=True),
    "worker-restart": Action("admin", "workers restart", _worker("restart"), asks=True),
    "schedule-pause": Action("operator", "schedules pause", _schedule("pause", "Paused")),
    "schedule-resume": Action("operator", "schedules resume", _schedule("resume", "Resumed")),
    "schedule-run": Action("operator", "schedules run", _schedule("run", "Enqueued a job of")),
    "schedule-remove": Action("admin", "schedules remove", _schedule("remove", "Removed"), asks=True),
    "flow-retry": Action("operator", "retry --flow", _flow("retry")),
    "flow-cancel": Action("operator", "cancel --flow", _flow("cancel"), asks=True),
    "limit-set": Action("admin", "limits set", _limit_set, needs=("running", "rate")),
    "limit-clear": Action("admin", "limits clear", _limit_clear),
}


def line(view: View, verb: str, subject: str, form: Form | None = None) -> str:
    """Return the command that does the same."""
    action = ACTIONS[verb]
    words = [action.words, subject]
    for name in action.needs:
        value = (form or {}).get(name)
        if value:
            words.append(f"--{name}" if name == "force" else f"--{name} {word(value)}")
    return command(" ".join(each for each in words if each), view.site.app.url)


def act(view: View) -> Response:
    """Carry out a form, or show the page that confirms it; then return to where it came from."""
    form = view.request.form
    verb = view.values["verb"]
    action = ACTIONS.get(verb)
    if action is None:
        raise ConfigurationError(f"there is no action {verb[:40]!r} here")
    if not view.user.may(action.role):  # guard: each-verb-has-its-role
        raise RefusedError(f"your role, {view.user.role}, may not do that: {action.role} is needed")
    subject: Any = form.get("name", "")
    named = "" if verb == "queues-resume" else word(subject)
    found, changed = _jobs(view, action) if action.states else ({}, 0)
    if action.states:
        if not found:
            return view.back("No job is chosen, or none is in a state for that any more: nothing was done.")
        subject = sorted(found)
        named = " ".join(map(str, subject[:IDS_IN_A_LINE])) + (" …" if len(subject) > IDS_IN_A_LINE else "")
        if fingerprint := form.get("fingerprint"):
            named = f"--error {word(fingerprint)}"
    # guard: a-filter-is-counted-before-it-acts
    if form.get("matching") or (action.asks and form.get("confirmed") != "yes"):
        return view.page(
            "confirm.html",
            verb=verb,
            action=action,
            subject=subject,
            states=Counter(found.values()),
            command=line(view, verb, named, form),
            form=form,
            most=MOST,
        )
    app = view.site.app
    with app.acting_as(view.user.name):
        done = action.do(app, subject, form)
    if changed:
        done += f" {counted(changed, 'other job')} had changed since, and stayed as before."
    view.reading.forget()
    return view.back(done)


def _jobs(view: View, action: Action) -> tuple[dict[int, str], int]:
    """Return the states of the jobs of a form, and how many that it names are in no state for the action.

    It names jobs, all of a fingerprint, or all that match a filter."""
    form, app = view.request.form, view.reading.own  # guard: a-replica-decides-nothing
    # guard: an-action-keeps-to-the-states-shown
    states = [each for each in action.states if each in (form.get("state") or each).split()]
    ids: set[int] = set()
    if fingerprint := form.get("fingerprint"):
        ids.update(app.jobs.failed_alike(fingerprint))
    elif not form.get("matching"):
        ids.update(id for text in form.getlist("id") if (id := whole(text, "the id")) is not None)
    chosen: dict[str, Any] = {"ids": tuple(ids)} if ids else search_of(view, filter_of(form))
    chosen.pop("state", None)
    found: dict[int, str] = {}
    for state in states if ids or form.get("matching") else ():
        some = app.jobs.ids(states=[state], limit=MOST, within=SEARCHED, **chosen)
        found |= dict.fromkeys(some[: MOST - len(found)], state)
    return found, len(ids - found.keys())
