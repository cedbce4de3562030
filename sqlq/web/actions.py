"""The forms that act: the command line's verbs, each with the command that does the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from werkzeug import Response

from sqlq.admin.verb import JobSelection, Option, Verb, whole
from sqlq.admin.verbs import VERBS
from sqlq.errors import ConfigurationError
from sqlq.web.access import RefusedError
from sqlq.web.pages import FIELDS, SEARCHED, chosen, search_of
from sqlq.web.view import View

MOST = 10_000
"""The most jobs that one form acts on."""


def act(view: View) -> Response:
    """Carry out a form, or show the page that confirms it; then return to where it came from."""
    form, words = view.request.form, view.values["verb"]
    verb = VERBS.get(words)
    if verb is None:
        raise ConfigurationError(f"there is no action {words[:40]!r} here")
    if not view.user.may(verb.role):  # guard: each-verb-has-its-role
        raise RefusedError(f"your role, {view.user.role}, may not do that: {verb.role} is needed")
    known = _options(verb)
    options = {name: option.read(form[name]) for name, option in known.items() if form.get(name)}
    subjects: list[Any] = [form["name"]] if form.get("name") else []
    states: dict[int, str] = {}
    changed = 0
    if verb.is_of_jobs and "flow" not in options:
        states, changed = _jobs(view, verb)
        subjects = sorted(states)
        if not subjects:
            return view.back("No job is chosen, or none is in a state for that any more: nothing was done.")
    # guard: a-filter-is-counted-before-it-acts
    if form.get("matching") or (verb.asks and form.get("confirmed") != "yes"):
        error = form.get("error")
        return view.page(
            "confirm",
            words=words,
            options=known,
            flags=[option for option in verb.options if option.kind == "flag"],
            subjects=subjects,
            states=Counter(states.values()),
            command=view.command(words, *([] if error else subjects), error=error, **options),
            form=form,
            most=MOST,
        )
    with view.app.acting_as(view.user.name):
        outcome = verb.do(view.app, subjects, **options)
    view.reading.forget()
    return view.back(f"{outcome.sentence(changed)}.")


def _options(verb: Verb) -> Mapping[str, Option]:
    """Return the options that a form may have. A filter has the fields of those that choose jobs."""
    others = (*FIELDS, "error", *(["all"] if verb.is_of_jobs else []))
    options = (*verb.chosen_by, *verb.options)
    return {each.name: each for each in options if each.name not in others and each.kind != "time"}


def _jobs(view: View, verb: Verb) -> tuple[dict[int, str], int]:
    """Return the states of the jobs of a form, and the number of those that are in no state for the verb.

    It names jobs, all of an error, or all that match a filter."""
    form, app = view.request.form, view.reading.own  # guard: a-replica-decides-nothing
    # guard: an-action-keeps-to-the-states-shown
    states = [state for state in verb.states if state in (form.get("state") or state).split()]
    if form.get("matching") and not form.get("error"):
        search = search_of(view, chosen(form))
        search.pop("state", None)
        return JobSelection(search=search).states(app, states, MOST, within=SEARCHED), 0
    if form.get("error"):
        ids = app.jobs.failed_alike(form["error"])
    else:
        ids = [id for text in form.getlist("id") if (id := whole(text, "the id"))]
    if not ids:  # an empty selection would mean all
        return {}, 0
    jobs = JobSelection(tuple(ids)).states(app, states, MOST, within=SEARCHED)
    return jobs, len(set(ids) - jobs.keys())
