"""sqlq in Django's admin: jobs, schedules, queues and workers, as the App reads them and acts on them.

Lists end at the newest 1,000 jobs that match, and no page counts a table. Django's ORM reads and writes none
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.db import transaction
from django.http import HttpRequest
from django.utils.html import format_html
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.jobs import SEARCH_LIMIT
from sqlq.admin.verb import Verb, whole
from sqlq.admin.verbs import VERBS
from sqlq.admin.why import why
from sqlq.config.command_hint import escaped_lines, shortened
from sqlq.config.durations import about
from sqlq.config.json_text import in_json
from sqlq.django.application import project_app
from sqlq.django.models import FLAGS, Job, Queue, Schedule, Worker
from sqlq.errors import ConfigurationError, SqlqError
from sqlq.model.job import State
from sqlq.payload.codec import decoded
from sqlq.web.access import redacted
from sqlq.web.reading import Reading, unread

LIST_LIMIT = 1_000
ERRORS = (SqlqError, SQLAlchemyError)
app = project_app()
reading = Reading(app)


class Rows(list[Any]):
    """The rows that the App has read, in the place of a queryset."""

    def _clone(self) -> Rows:
        return self


class RowList(ChangeList):
    """A list of what the App has read."""

    def get_results(self, request: HttpRequest) -> None:
        fields = {each.parameter_name: each.value() for each in self.filter_specs if each.value()}
        self.queryset = Rows()
        try:
            self.queryset += self.model_admin.rows(self.query.strip(), fields)
        except ERRORS as error:
            self.model_admin.report(request, error)
        super().get_results(request)


class RowAdmin(admin.ModelAdmin):
    """Shows rows that the App has read, and changes nothing but by the verbs of the command line."""

    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    group: str | None = None
    """The command whose verbs are the actions; "" for verbs on jobs."""

    def all(self) -> Iterable[Any]:
        """Return the rows that there are."""
        raise NotImplementedError

    def rows(self, query: str, fields: Mapping[str, str]) -> Iterable[Any]:
        """Return the rows that match a search."""
        return [row for row in self.all() if query in row.pk]

    def one(self, key: str) -> Any:
        """Return a row; None where it is not there."""
        return next((row for row in self.all() if row.pk == key), None)

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        try:
            return self.one(object_id)
        except ERRORS as error:
            self.report(request, error)
            return None

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        return RowList

    # A transaction would keep an action waiting, which has the App's own connection.
    @transaction.non_atomic_requests  # guard: no-transaction-around-actions
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        return super().changelist_view(request, extra_context)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[Any]:
        return [each.name if each.name in FLAGS else _as_lines(each) for each in self.opts.concrete_fields]

    get_readonly_fields = get_fields

    # -- who may ---------------------------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission  # guard: the-orm-changes-nothing

    def report(self, request: HttpRequest, error: Exception) -> None:
        """Show the user why something is not shown or not done."""
        if isinstance(error, SQLAlchemyError):
            error = SqlqError(unread(error, app, "operator" if self._may(request, "change") else "reader"))
        messages.error(request, str(error))

    def _may(self, request: HttpRequest, *verbs: str) -> bool:
        return any(request.user.has_perm(f"sqlq.{verb}_{self.opts.model_name}") for verb in verbs)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._may(request, "view", "change")

    has_module_permission = has_view_permission

    # -- actions ---------------------------------------------------------------------------------------------

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Return the verbs of operators. Those of admins are for the dashboard, which confirms them."""
        actions = {}
        if self._may(request, "change"):  # guard: actions-by-djangos-permissions
            for words, verb in VERBS.items():
                if verb.button and verb.group == self.group and verb.role == "operator":
                    actions[words] = (partial(_act, verb), words, verb.button.rstrip("…"))
        return actions


def _act(verb: Verb, model_admin: RowAdmin, request: HttpRequest, queryset: Any) -> None:
    """Act on the rows ticked, or on all that the list has."""
    ticked = request.POST.getlist(ACTION_CHECKBOX_NAME)
    if request.POST.get("select_across") == "1":
        ticked = [row.pk for row in model_admin.get_changelist_instance(request).queryset]
    with app.acting_as(request.user.get_username()):
        for subjects in [ticked] if verb.is_of_jobs else [[name] for name in ticked]:
            try:
                ids = [whole(id, "the id") for id in subjects] if verb.is_of_jobs else subjects
                messages.success(request, f"{verb.do(app, ids).sentence()}.")
            except ERRORS as error:
                model_admin.report(request, error)


def _as_lines(field: Any) -> Any:
    @admin.display(description=field.verbose_name)
    def show(row: Any) -> Any:
        text = getattr(row, field.name)
        return None if text in (None, "") else format_html("<pre>{}</pre>", escaped_lines(str(text)))

    return show


def _as_json(value: Any) -> str | None:
    if value in (None, {}):
        return None
    return in_json(redacted(value), indent=2)


def _choice(name: str, names: Callable[[], Iterable[str]]) -> Any:
    """Return a filter that `rows` reads."""
    return type(
        name,
        (admin.SimpleListFilter,),
        {
            "title": name,
            "parameter_name": name,
            "lookups": lambda *arguments: [(each, each) for each in names()],
            "queryset": lambda *arguments: None,
        },
    )


@admin.register(Job)
class JobAdmin(RowAdmin):
    list_display = ("id", "state", "note", "task", "queue", "label", "attempts", "created_at", "ended_at")
    list_filter = (
        _choice("state", lambda: list(State)),
        _choice("queue", lambda: sorted({task.queue for task in app.tasks.values()})),
        _choice("task", lambda: sorted(app.tasks)),
    )
    search_fields = ("id", "label", "unique_key")
    search_help_text = "The id of a job, or the whole of its label or unique key"
    group = ""

    def rows(self, query: str, fields: Mapping[str, str]) -> list[Any]:
        searches: list[dict[str, Any]] = [{"label": query}, {"key": query}] if query else [{}]
        with suppress(ConfigurationError):
            searches += [{"ids": (id,)}] if (id := whole(query, "the id")) else []
        jobs: dict[int, Any] = {}
        for search in searches:
            search |= fields
            for job in reading.app.jobs.list(limit=LIST_LIMIT, within=SEARCH_LIMIT, whole=False, **search):
                jobs[job.id] = job
        return [self._of(jobs[id]) for id in sorted(jobs, reverse=True)[:LIST_LIMIT]]

    @admin.display(description="error, or why it waits")
    def note(self, row: Any) -> str | None:
        return shortened(row.error or row.why or "", 200) or None

    def one(self, key: str) -> Any:
        job = reading.app.jobs.get(whole(key, "the id") or 0)
        return self._of(job, "\n".join(reason.text for reason in why(reading.app.database, job)))

    def _of(self, job: Any, reasons: str | None = None) -> Any:
        awaited = job.flow_id if job.blocked_by == "flow" else job.limit_key
        history = (f"{each.outcome}: {each.exception or ''} {each.message or ''}" for each in job.history)
        return self.model.of(
            job,
            id=str(job.id),
            attempts=f"{job.attempts}/{'?' if job.max_attempts is None else job.max_attempts}",
            history="\n".join(each.rstrip(": ") for each in history),
            why=reasons or (job.blocked_by and f"it waits for its {job.blocked_by} {awaited}"),
            **{name: _as_json(getattr(job, name)) for name in ("payload", "headers", "result")},
        )


@admin.register(Schedule)
class ScheduleAdmin(RowAdmin):
    list_display = ("name", "state", "plan", "task", "queue", "next_at", "last_at", "error")
    search_fields = ("name",)
    group = "schedules"

    def all(self) -> Iterable[Any]:
        for each in reading.app.schedules.list():
            yield Schedule.of(
                each,
                plan=str(each.plan),
                next_at=next(iter(each.upcoming), None),
                payload=_as_json(decoded(each.payload)),
            )


@admin.register(Queue)
class QueueAdmin(RowAdmin):
    list_display = ("queue", "available", "scheduled", "blocked", "running", "failed", "paused", "served")
    search_fields = ("queue",)
    group = "queues"

    def all(self) -> Iterable[Any]:
        for each in reading.app.queues.list():
            numbers = {name: f"{getattr(each, name):,}+" for name in each.capped}
            yield Queue.of(each, **numbers, **{name: about(getattr(each, name)) for name in each.estimated})


@admin.register(Worker)
class WorkerAdmin(RowAdmin):
    list_display = ("name", "host", "pid", "state", "queues", "concurrency", "jobs", "started_at", "seen_at")
    search_fields = ("id",)

    def all(self) -> Iterable[Any]:
        for each in reading.app.workers.list(silent=True):
            yield Worker.of(
                each,
                name=each.name or f"{each.host}:{each.pid}",
                queues=each.served,
                jobs="\n".join(f"{job.id}: {job.task}" for job in each.jobs),
            )
