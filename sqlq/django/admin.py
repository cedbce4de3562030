"""sqlq in Django's admin: jobs, schedules, queues and workers, as the App reads them and acts on them.

Lists end at the newest 10,000 jobs that match, and no page counts a table. Django's ORM reads and writes none
of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import InvalidPage
from django.db import transaction
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.html import format_html
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.why import why
from sqlq.config.command_hint import escaped_lines
from sqlq.django import app
from sqlq.django.models import FailedJob, Job, Queue, Schedule, Worker
from sqlq.errors import SqlqError
from sqlq.model.job import State
from sqlq.web.access import Redaction
from sqlq.web.actions import ACTIONS
from sqlq.web.pages import decoded, whole
from sqlq.web.reading import Reading, too_slow

MOST = 10_000
ASKED = 900
"""The most jobs that are deleted together: Django takes forms of a thousand fields."""
TROUBLE = (SqlqError, SQLAlchemyError)
redacted, reading = Redaction(), Reading(app)


class Looked(ChangeList):
    """A list of what the App has read."""

    def get_results(self, request: HttpRequest) -> None:
        shown, query = self.model_admin, self.query.strip()
        chosen = {each.parameter_name: each.value() for each in self.filter_specs if each.value()}
        found, self.result_list = [], []
        try:
            found = shown.found(query, chosen)
            self.paginator = shown.get_paginator(request, found, self.list_per_page)
            self.result_list = shown.rows(self.paginator.page(self.page_num).object_list, query, chosen)
        except InvalidPage:
            raise IncorrectLookupParameters from None
        except TROUBLE as error:
            _say(request, error)
            self.paginator = shown.get_paginator(request, found, self.list_per_page)
        self.result_count, self.multi_page = self.paginator.count, self.paginator.num_pages > 1
        self.full_result_count, self.show_full_result_count, self.can_show_all = None, False, False
        self.show_admin_actions = True


class Shown(admin.ModelAdmin):
    """Shows rows that the App has read, and changes nothing but by the verbs of the command line."""

    list_per_page = 50
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    texts = ("why", "payload", "headers", "result", "traceback", "history", "error", "jobs")
    """The fields whose lines stay as they are."""
    verbs: ClassVar[Mapping[str, str]] = {}
    """The actions, and what they are called."""

    def all(self) -> Iterable[Any]:
        """Return the rows that there are."""
        raise NotImplementedError

    def found(self, query: str, chosen: Mapping[str, str]) -> Sequence[Any]:
        """Return what a search finds, for `rows`."""
        return [row for row in self.all() if query in row.pk]

    def rows(self, page: Sequence[Any], query: str, chosen: Mapping[str, str]) -> Sequence[Any]:
        """Return the rows of a page."""
        return page

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        try:
            return self.one(object_id)
        except TROUBLE as error:
            _say(request, error)
            return None

    def one(self, key: str) -> Any:
        """Return a row; None where it is not there."""
        return next((row for row in self.all() if row.pk == key), None)

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        return Looked

    # A transaction would keep an action waiting, which has the App's own connection.
    @transaction.non_atomic_requests  # guard: no-transaction-around-actions
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        return super().changelist_view(request, extra_context)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[Any]:
        return [
            _as_text(each) if each.name in self.texts else each.name for each in self.opts.concrete_fields
        ]

    get_readonly_fields = get_fields

    # -- who may ---------------------------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission  # guard: the-orm-changes-nothing

    def _may(self, request: HttpRequest, *verbs: str) -> bool:
        model = self.opts.concrete_model.__name__.lower()
        return any(request.user.has_perm(f"sqlq.{verb}_{model}") for verb in verbs)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._may(request, "view", "change")

    has_module_permission = has_view_permission

    # -- actions ---------------------------------------------------------------------------------------------

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        found = {}
        for verb, said in self.verbs.items():
            needed = "delete" if ACTIONS[verb].role == "admin" else "change"
            if self._may(request, needed):  # guard: actions-by-djangos-permissions
                name = "delete_selected" if verb == "delete" else verb  # in place of Django's own
                found[name] = (partial(_act, verb), name, said)
        return found

    def do(self, verb: str, ticked: Sequence[str]) -> Iterator[Callable[[], str]]:
        """Yield what is to be done."""
        for name in ticked:
            yield partial(ACTIONS[verb].do, app, name, {})


def _act(verb: str, shown: Shown, request: HttpRequest, queryset: Any) -> TemplateResponse | None:
    """Do what somebody has chosen for the rows ticked, or for all that the list has found."""
    ticked = request.POST.getlist(ACTION_CHECKBOX_NAME)
    if request.POST.get("select_across") == "1":
        found = shown.get_changelist_instance(request).paginator.object_list
        ticked = [str(getattr(row, "pk", row)) for row in found]
    if verb == "delete" and "post" not in request.POST:
        return _ask(shown, request, ticked[:ASKED])
    with app.acting_as(request.user.get_username()):
        for do in shown.do(verb, ticked):
            try:
                messages.success(request, do())
            except TROUBLE as error:
                _say(request, error)
    return None


def _say(request: HttpRequest, error: Exception) -> None:
    messages.error(request, too_slow(error) if isinstance(error, SQLAlchemyError) else str(error))


def _ask(shown: Shown, request: HttpRequest, ticked: Sequence[str]) -> TemplateResponse:
    """Show the admin's own question, whose form is that of its action `delete_selected`."""
    jobs = [Job(pk=id) for id in ticked]
    context = {
        **shown.admin_site.each_context(request),
        "title": f"Delete {len(jobs)} failed jobs?",
        "objects_name": "failed jobs",
        "deletable_objects": [jobs],
        "model_count": [("failed jobs", len(jobs))],
        "queryset": jobs,
        # Django 6.1's template raises without it
        "delete_confirmation_max_display": getattr(shown, "delete_confirmation_max_display", None),
        "opts": shown.opts,
        "action_checkbox_name": ACTION_CHECKBOX_NAME,
        "media": shown.media,
    }
    return TemplateResponse(request, "admin/delete_selected_confirmation.html", context)


def _as_text(field: Any) -> Any:
    @admin.display(description=field.verbose_name)
    def show(row: Any) -> Any:
        text = getattr(row, field.name)
        return format_html("<pre>{}</pre>", escaped_lines(text)) if text else None

    return show


def _as_json(value: Any) -> str | None:
    if value in (None, {}):
        return None
    return json.dumps(redacted(value), ensure_ascii=False, indent=2, default=str)


def _choice(name: str, names: Callable[[], Iterable[str]]) -> Any:
    """Return a filter that the search reads; see `Looked`."""

    def lookups(self: Any, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        try:
            return [(each, each) for each in names()]
        except TROUBLE:  # the list has the message
            return []

    does = {"lookups": lookups, "queryset": lambda self, request, queryset: None}
    return type(name, (admin.SimpleListFilter,), {"title": name, "parameter_name": name, **does})


BY_STATE = _choice("state", lambda: list(State))
BY_QUEUE = _choice("queue", lambda: [status.queue for status in reading.app.queues.status()])
BY_TASK = _choice("task", lambda: sorted(app.tasks))


@admin.register(Job)
class JobAdmin(Shown):
    list_display: Sequence[str] = (
        *("id", "state", "task", "queue", "label"),
        *("attempts", "created_at", "ended_at", "error"),
    )
    list_filter: Sequence[Any] = (BY_STATE, BY_QUEUE, BY_TASK)
    search_fields = ("id", "label", "unique_key")
    search_help_text = "The id of a job, or the whole of its label or unique key"
    only: ClassVar[Mapping[str, str]] = {}
    verbs: ClassVar[Mapping[str, str]] = {
        "retry": "Retry those that have failed",
        "cancel": "Cancel those that have not ended",
        "delete": "Delete those that have failed",
    }

    def found(self, query: str, chosen: Mapping[str, str]) -> Sequence[int]:
        found: set[int] = set()
        for search in self._searches(query, chosen):
            states = [search.pop("state")] if "state" in search else list(State)
            ids = reading.app.jobs.ids(states=states, limit=MOST, **search)
            found |= {id for id in ids if search.get("newest") in (None, id)}
        return sorted(found, reverse=True)[:MOST]

    def rows(self, page: Sequence[int], query: str, chosen: Mapping[str, str]) -> list[Any]:
        read: dict[int, Any] = {}
        for search in self._searches(query, chosen) if page else ():
            listing = reading.app.jobs.listing(before=page[0] + 1, limit=len(page), **search)
            read |= {job.id: job for job in listing.jobs}
        return [self._of(read[id]) for id in page if id in read]

    def _searches(self, query: str, chosen: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the options of the searches whose findings are listed together."""
        options: dict[str, Any] = {**chosen, **self.only}
        if not query:
            return [options]
        by_id = (
            [{**options, "newest": int(query)}]
            if query.isascii() and query.isdigit() and len(query) < 19
            else []
        )
        return [{**options, "label": query}, {**options, "key": query}, *by_id]

    def one(self, key: str) -> Any:
        job = reading.app.jobs.get(whole(key, "the id") or 0)
        return self._of(job, "\n".join(reason.said for reason in why(reading.app.database, job)))

    def _of(self, job: Any, reasons: str | None = None) -> Any:
        most = "?" if job.max_attempts is None else job.max_attempts
        history = (f"{each.outcome}: {each.exception or ''} {each.message or ''}" for each in job.history)
        texts = {name: _as_json(getattr(job, name)) for name in ("payload", "headers", "result")}
        lines = "\n".join(each.rstrip(": ") for each in history)
        said = {"id": str(job.id), "attempts": f"{job.attempts}/{most}", "history": lines, "why": reasons}
        return self.model.of(job, **said, **texts)

    def do(self, verb: str, ticked: Sequence[str]) -> Iterator[Callable[[], str]]:
        yield lambda: ACTIONS[verb].do(app, [whole(id, "the id") for id in ticked], {})


@admin.register(FailedJob)
class FailedJobAdmin(JobAdmin):
    list_display = ("id", "task", "queue", "label", "attempts", "ended_at", "error")
    list_filter = (BY_QUEUE, BY_TASK)
    only: ClassVar[Mapping[str, str]] = {"state": "failed"}
    verbs: ClassVar[Mapping[str, str]] = {"retry": "Retry", "delete": "Delete"}


@admin.register(Schedule)
class ScheduleAdmin(Shown):
    list_display = ("name", "state", "plan", "task", "queue", "next_at", "last_at", "error")
    search_fields = ("name",)
    verbs: ClassVar[Mapping[str, str]] = {
        "schedule-pause": "Pause",
        "schedule-resume": "Resume",
        "schedule-run": "Enqueue a job now",
    }

    def all(self) -> Iterator[Any]:
        for each in reading.app.schedules.list():
            arguments, due = _as_json(decoded(each.payload)), next(iter(each.upcoming), None)
            yield Schedule.of(each, plan=str(each.plan), next_at=due, payload=arguments)


@admin.register(Queue)
class QueueAdmin(Shown):
    list_display = ("queue", "available", "scheduled", "blocked", "running", "failed", "paused", "served")
    search_fields = ("queue",)
    verbs: ClassVar[Mapping[str, str]] = {"queue-pause": "Pause", "queue-resume": "Resume"}

    def all(self) -> Iterator[Any]:
        for each in reading.app.queues.status():
            capped = {name: f"{getattr(each, name):,}+" for name in each.capped}
            yield Queue.of(each, **capped)


@admin.register(Worker)
class WorkerAdmin(Shown):
    list_display = ("name", "host", "pid", "state", "queues", "concurrency", "jobs", "started_at", "seen_at")
    search_fields = ("id",)

    def all(self) -> Iterator[Any]:
        for each in reading.app.workers.list(silent=True):
            yield Worker.of(
                each,
                name=each.name or f"{each.host}:{each.pid}",
                state=each.state if each.alive else "silent",
                queues="all" if each.queues is None else ", ".join(each.queues),
                jobs="\n".join(f"{job.id}: {job.task}" for job in each.jobs),
            )
