"""The pages that look. Each reads through the App's parts for operators, and renders one template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.doctor import Doctor
from sqlq.admin.doctor.finding import Finding, Verdict
from sqlq.admin.storage import Storage, storage
from sqlq.admin.why import why
from sqlq.app.app import App
from sqlq.config.durations import milliseconds
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.job import State
from sqlq.web.access import RefusedError
from sqlq.web.reading import too_slow

if TYPE_CHECKING:
    from werkzeug import Response

    from sqlq.web.site import View

JOBS_SHOWN = 50
SEARCHED, SEARCHED_BY_KEY = 50_000, 10_000
"""A search on a page reads at most so many of the newest jobs of each table."""
DOCTOR_SECONDS, PACE_SECONDS, STORAGE_SECONDS = 60.0, 10.0, 10.0
HOURS = {"hour": (timedelta(hours=1), 30), "day": (timedelta(days=1), 24)}
"""The times that plots show, and in how many parts."""


class TooSlow(str):
    """Stands for something that could not be read in time, with the reason."""


def part(view: View, key: Any, look: Callable[[App], Any], seconds: float = 2.0) -> Any:
    """Return a part of a page that may be missing: where it takes too long, the rest is still of use."""

    def attempt(app: App) -> Any:
        try:
            return look(app)
        except SQLAlchemyError as error:  # kept like an answer; guard: what-is-too-slow-is-kept
            return TooSlow(too_slow(error))

    return view.reading.fresh(key, attempt, seconds)


def overview(view: View) -> Response:
    span = "day" if view.request.args.get("span") == "day" else "hour"
    length, parts = HOURS[span]
    fresh = view.reading.fresh
    return view.page(
        "overview.html",
        queues=fresh("queues", lambda app: app.queues.status()),
        pauses=fresh("pauses", lambda app: app.queues.pauses()),
        workers=fresh("workers", lambda app: app.workers.list()),
        pace=part(view, ("pace", span), lambda app: app.jobs.pace(length, parts), PACE_SECONDS),
        span=span,
        findings=part(view, "doctor", lambda _: _findings(view.reading.own), DOCTOR_SECONDS),
    )


def _findings(app: App) -> list[Finding]:
    return [each for each in Doctor(app.database).examine() if each.verdict is not Verdict.OK]


# -- jobs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs a page shows, as its URL has it."""

    state: str | None = None
    queue: str | None = None
    task: str | None = None
    label: str | None = None
    group: str | None = None
    header: str | None = None
    key: str | None = None
    limit_key: str | None = None
    text: str | None = None
    since: str | None = None
    until: str | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, str]) -> Filter:
        return cls(**{name: arguments.get(name) or None for name in cls.__slots__})

    @property
    def given(self) -> dict[str, str]:
        """The parts that are set."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    @property
    def has_more(self) -> bool:
        """Whether one of the fields is set that are seldom used."""
        return any((self.group, self.header, self.key, self.limit_key, self.since, self.until))

    def options(self) -> dict[str, Any]:
        """Return the options of `app.jobs.listing`. Raises `ConfigurationError` for what cannot be read."""
        return self.given | {
            name: _moment(value, name)
            for name in ("since", "until")
            if (value := getattr(self, name)) is not None
        }


def _moment(text: str, name: str) -> datetime:
    """Return a time, or how long ago in a duration."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC) - timedelta(milliseconds=milliseconds(text, name))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def whole(text: str | None, name: str) -> int | None:
    """Return a whole number of a form or an address."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigurationError(f"{name} is {text[:40]!r}: give a whole number")
    return int(text)


def filter_of(view: View) -> Filter:
    """Return the filter of an address. Raises `RefusedError` where it would reveal hidden arguments."""
    chosen = Filter.of(view.request.args)
    if (chosen.text or chosen.header) and view.hides:  # guard: no-search-tells-what-is-hidden
        raise RefusedError("arguments are hidden from viewers here, so that no search may look into them")
    return chosen


def jobs(view: View) -> Response:
    chosen = filter_of(view)
    before = whole(view.request.args.get("before"), "before")
    options = chosen.options()
    found = view.reading.fresh(
        ("jobs", chosen, before),
        lambda app: app.jobs.listing(**options, before=before, limit=JOBS_SHOWN + 1, within=SEARCHED),
    )
    shown = found.jobs[:JOBS_SHOWN]
    return view.page(
        "jobs.html",
        jobs=shown,
        more=len(found.jobs) > JOBS_SHOWN,
        complete=found.complete,
        searched=SEARCHED,
        chosen=chosen,
        states=list(State),
        before=before,
    )


def job(view: View) -> Response:
    id = view.values["id"]
    app = view.reading.app
    found = app.jobs.get(id)
    same_key = []
    if found.unique_key is not None:
        same_key = app.jobs.listing(
            queue=found.queue, key=found.unique_key, limit=10, within=SEARCHED_BY_KEY
        ).jobs
    flow = None
    if found.flow_id is not None:
        try:
            flow = app.flows.get(found.flow_id)
        except JobNotFoundError:
            flow = None
    return view.page(
        "job.html",
        job=found,
        why=list(why(app.database, found)),
        same_key=[each for each in same_key if each.id != id],
        flow=flow,
        sql=f"SELECT * FROM job_states WHERE id = {id};",  # noqa: S608 - to read; a number
        command=view.command(f"show {id}"),
    )


def decoded(text: str) -> Any:
    """Return what a text of JSON stands for, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- failures ------------------------------------------------------------------------------------------------


def failures(view: View) -> Response:
    task, queue = view.request.args.get("task") or None, view.request.args.get("queue") or None
    found, complete = view.reading.fresh(
        ("failures", task, queue), lambda app: app.jobs.failures(task=task, queue=queue), 5.0
    )
    workers = view.reading.fresh("workers", lambda app: app.workers.list())
    deployed = max((worker.started_at for worker in workers), default=None)
    return view.page(
        "failures.html", groups=found, complete=complete, deployed=deployed, task=task, queue=queue
    )


def failure(view: View) -> Response:
    fingerprint = view.values["fingerprint"]
    found, complete = view.reading.fresh(("failures", None, None), lambda app: app.jobs.failures(), 5.0)
    group = next((each for each in found if each.fingerprint == fingerprint), None)
    if group is None:
        raise JobNotFoundError(
            "no failed job has this error now: they were retried or deleted, or it is not among the newest"
        )
    sample = view.reading.app.jobs.get(group.newest)
    return view.page("failure.html", group=group, sample=sample, complete=complete)


# -- the rest ------------------------------------------------------------------------------------------------


def flows(view: View) -> Response:
    return view.page("flows.html", flows=view.reading.fresh("flows", lambda app: app.flows.list(limit=100)))


def flow(view: View) -> Response:
    return view.page("flow.html", flow=view.reading.app.flows.get(view.values["id"]))


def schedules(view: View) -> Response:
    return view.page(
        "schedules.html", schedules=view.reading.fresh("schedules", lambda app: app.schedules.list())
    )


def schedule(view: View) -> Response:
    found = view.reading.app.schedules.get(view.values["name"])
    return view.page("schedule.html", schedule=found, arguments=decoded(found.payload))


def limits(view: View) -> Response:
    prefix = view.request.args.get("prefix", "")
    found = view.reading.fresh(("limits", prefix), lambda app: app.limits.list(prefix, limit=200))
    return view.page("limits.html", limits=found, prefix=prefix)


def queues(view: View) -> Response:
    fresh = view.reading.fresh
    return view.page(
        "queues.html",
        queues=fresh("queues", lambda app: app.queues.status()),
        pauses=fresh("pauses", lambda app: app.queues.pauses()),
    )


def workers(view: View) -> Response:
    return view.page(
        "workers.html", workers=view.reading.fresh("workers+", lambda app: app.workers.list(silent=True))
    )


def audit(view: View) -> Response:
    arguments = view.request.args
    before = whole(arguments.get("before"), "before")
    actor, action = arguments.get("actor") or None, arguments.get("action") or None
    found = view.reading.app.audit.list(limit=JOBS_SHOWN + 1, before=before, actor=actor, action=action)
    shown, more = found[:JOBS_SHOWN], len(found) > JOBS_SHOWN
    return view.page("audit.html", actions=shown, more=more, actor=actor, action=action)


def database(view: View) -> Response:
    return view.page("database.html", storage=storage_of(view))


def storage_of(view: View) -> Storage:
    """Return the state of the database. Only operators see the statements of other sessions."""
    found: Storage = view.reading.fresh(
        "storage", lambda _: storage(view.reading.own.database), STORAGE_SECONDS
    )
    if view.user.may("operator"):
        return found
    # guard: statements-of-others-are-hidden
    return replace(found, readings=tuple(replace(each, query=None) for each in found.readings))


PAGES: Mapping[str, Callable[[View], Response]] = {
    "/": overview,
    "/jobs": jobs,
    "/jobs/<int:id>": job,
    "/failures": failures,
    "/failures/<fingerprint>": failure,
    "/flows": flows,
    "/flows/<int:id>": flow,
    "/schedules": schedules,
    "/schedules/<path:name>": schedule,
    "/limits": limits,
    "/queues": queues,
    "/workers": workers,
    "/database": database,
    "/audit": audit,
}
"""The pages by their paths. Each is called by the name of its function."""
