"""The forms that act: the command line's verbs, each with the command that does the same."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from werkzeug import Response

from sqlq.admin.jobs import SEARCH_LIMIT
from sqlq.admin.verb import Option, Outcome, Verb, of, whole
from sqlq.admin.verbs import VERBS
from sqlq.app.app import App
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.web.access import RefusedError
from sqlq.web.pages import FIELDS, SEARCHED, fields_of, search_of, shared
from sqlq.web.reading import unread
from sqlq.web.view import View

log = logging.getLogger("sqlq.web")

ANSWER_SECONDS = 1.0
"""An action on a filter that takes longer goes on behind the answer."""
NOTHING = "No job is chosen, or none is in a state for that any more: nothing was done."


def act(view: View) -> Response:
    """Carry out a form, or show the page that confirms it; then return to where it came from."""
    form, words = view.request.form, view.values["verb"]
    verb = VERBS.get(words)
    if verb is None:
        raise ConfigurationError(f"there is no action {words[:40]!r} here")
    if not view.user.may(verb.role):  # guard: each-verb-has-its-role
        raise RefusedError(f"your role, {view.user.role}, may not do that: {verb.role} is needed")
    app = view.reading.own  # guard: a-replica-decides-nothing
    known = _options(verb)
    options = {name: option.read(form[name]) for name, option in known.items() if form.get(name)}
    subjects: list[Any] = [form["name"]] if form.get("name") else []
    states: Mapping[Any, int] | str = {}
    changed = 0
    search = None
    if form.get("matching") or form.get("filter"):
        search = verb.filter_of(fields_of(form, (*FIELDS, "error")))
    # guard: a-filter-is-counted-before-it-acts
    to_confirm = form.get("matching") or (verb.asks and form.get("confirmed") != "yes")
    if search is not None:
        if to_confirm:
            states = _counts(view, app, verb, search)
        if search.get("state", form.get("state")) not in (None, "", *verb.states) or (
            to_confirm and not states
        ):
            return view.back(NOTHING)
    elif verb.is_of_jobs and "flow" not in options:
        jobs, changed = _jobs(view, app, verb)
        subjects, states = sorted(jobs), Counter(jobs.values())
        if not subjects:
            return view.back(NOTHING)
    if to_confirm:
        return view.page(
            "confirm",
            **shared(view),
            words=words,
            options={*known, *(() if search is None else (*FIELDS, "error"))},
            flags=[option for option in verb.options if option.kind == "flag"],
            subjects=subjects,
            states=states,
            which=None if search is None else of(search),
            limit=SEARCH_LIMIT,
            command=view.command(words, *subjects, **(search or {}), **options),
            form=form,
        )
    if search is None:
        with view.app.acting_as(view.user.name):
            outcome: Outcome | None = verb.do(view.app, subjects, **options)
    else:
        outcome = _in_a_thread(view, verb, {**search, **options})
    view.reading.forget()
    if outcome is None:
        return view.back(f"{words.capitalize()} goes on, and each page shows how far it came.")
    return view.back(f"{outcome.sentence(changed)}.")


def _options(verb: Verb) -> Mapping[str, Option]:
    """Return the options that a form may have. A filter has the fields of those that choose jobs."""
    others = (*FIELDS, "error", "all") if verb.is_of_jobs else ()
    return {
        each.name: each
        for each in (*verb.selectors, *verb.options)
        if each.name not in others and each.kind != "time"
    }


def _counts(view: View, app: App, verb: Verb, search: Mapping[str, Any]) -> Mapping[Any, int] | str:
    """Return how many jobs a filter has in each state, or why they could not be counted in time."""
    try:
        return app.jobs._counts(verb.states, **search)
    except SQLAlchemyError as error:
        return unread(error, view.app, view.kind)
    except JobNotFoundError:  # nothing has this error any more
        return {}


def _in_a_thread(view: View, verb: Verb, options: Mapping[str, Any]) -> Outcome | None:
    """Do a verb on a filter; return None where it goes on. The audit has how far it came."""
    result: Future[Outcome] = Future()
    site_app, name = view.app, view.user.name

    def run() -> None:
        try:
            with site_app.acting_as(name):
                result.set_result(verb.do(site_app, (), **options))
        except Exception as error:
            log.warning("%s did not end: %s", verb.words, error)
            result.set_exception(error)
        view.reading.forget()

    # a daemon: the process may end at any time, and the same action goes on
    Thread(target=run, name="sqlq-action", daemon=True).start()
    try:
        return result.result(ANSWER_SECONDS)
    except TimeoutError:
        if result.done():  # the action's own
            raise
        return None


def _jobs(view: View, app: App, verb: Verb) -> tuple[Mapping[int, str], int]:
    """Return the states of the jobs that a form names, or its search of texts finds. Return also the number
    of jobs that are in no state for the verb."""
    form = view.request.form
    # guard: an-action-keeps-to-the-states-shown
    states = [state for state in verb.states if state in (form.get("state") or state).split()]
    if form.get("matching"):
        search = search_of(view, fields_of(form, [name for name in FIELDS if name != "state"]))
    else:
        search = {"ids": tuple(id for text in form.getlist("id") if (id := whole(text, "the id")))}
        if not search["ids"]:  # an empty selection would mean all
            return {}, 0
    rows = app.jobs.list(limit=SEARCHED, within=SEARCHED, whole=False, **search)
    jobs = {row.id: row.state for row in rows if row.state in states}
    return jobs, len({*search.get("ids", jobs)} - jobs.keys())
