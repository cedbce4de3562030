"""The forms that act: the command line's verbs, each with the command that does the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlq.admin.facet import command_line
from sqlq.admin.verbs import VERBS, Verb
from sqlq.errors import ConfigurationError
from sqlq.web.access import RefusedError
from sqlq.web.pages import SEARCHED, filter_of, search_of, whole

if TYPE_CHECKING:
    from werkzeug import Response

    from sqlq.web.site import View

MOST = 10_000
"""The most jobs that one form acts on."""
READ: dict[str, Callable[[str], Any]] = {
    "all": bool,
    "flow": partial(whole, name="the flow"),
    "force": bool,
    "running": partial(whole, name="running"),
}
"""Options that are no text."""


def act(view: View) -> Response:
    """Carry out a form, or show the page that confirms it; then return to where it came from."""
    form = view.request.form
    words = view.values["verb"]
    verb = VERBS.get(words)
    if verb is None:
        raise ConfigurationError(f"there is no action {words[:40]!r} here")
    if not view.user.may(verb.role):  # guard: each-verb-has-its-role
        raise RefusedError(f"your role, {view.user.role}, may not do that: {verb.role} is needed")
    options = {name: READ.get(name, str)(form[name]) for name in verb.options if form.get(name)}
    subjects: list[Any] = [form["name"]] if form.get("name") else []
    states: dict[int, str] = {}
    changed = 0
    if verb.states and "flow" not in options:
        states, changed = _jobs(view, verb)
        subjects = sorted(states)
        if not subjects:
            return view.back("No job is chosen, or none is in a state for that any more: nothing was done.")
    # guard: a-filter-is-counted-before-it-acts
    if form.get("matching") or (verb.asks and form.get("confirmed") != "yes"):
        error = form.get("error")
        same = command_line(words, *([] if error else subjects), error=error, **options)
        return view.page(
            "confirm.html",
            verb=words,
            options=verb.options,
            subjects=subjects,
            states=Counter(states.values()),
            command=view.command(same),
            form=form,
            most=MOST,
        )
    with view.site.app.acting_as(view.user.name):
        outcome = verb.do(view.site.app, subjects, **options)
    view.reading.forget()
    return view.back(f"{outcome.sentence(changed)}.")


def _jobs(view: View, verb: Verb) -> tuple[dict[int, str], int]:
    """Return the states of the jobs of a form, and how many that it names are in no state for the verb.

    It names jobs, all of an error, or all that match a filter."""
    form, app = view.request.form, view.reading.own  # guard: a-replica-decides-nothing
    # guard: an-action-keeps-to-the-states-shown
    states = [each for each in verb.states if each in (form.get("state") or each).split()]
    ids: set[int] = set()
    if error := form.get("error"):
        ids.update(app.jobs.failed_alike(error))
    elif not form.get("matching"):
        ids.update(id for text in form.getlist("id") if (id := whole(text, "the id")) is not None)
    chosen: dict[str, Any] = {"ids": tuple(ids)} if ids else search_of(view, filter_of(form))
    chosen.pop("state", None)
    found: dict[int, str] = {}
    for state in states if ids or form.get("matching") else ():
        some = app.jobs.ids(states=[state], limit=MOST, within=SEARCHED, **chosen)
        found |= dict.fromkeys(some[: MOST - len(found)], state)
    return found, len(ids - found.keys())
