"""A verb of operators: its options, its answer, and the jobs that it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlq.config.durations import counted
from sqlq.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlq.model.job import JobDetails

IDS_SHOWN = 20


class Outcome(NamedTuple):
    """The answer of a verb: the object for programs, and the lines for people. The ids are those of the jobs
    that stay as they were; some have `reasons` of their own."""

    value: Any
    lines: Sequence[str]
    unchanged: Sequence[int] = ()
    reasons: Mapping[int, str] = {}

    def sentence(self, also_unchanged: int = 0) -> str:
        """Return the answer as one sentence; `also_unchanged` other jobs had changed before."""
        if number := len(self.unchanged) + also_unchanged:
            return "; ".join([*self.lines, f"{counted(number, 'job')} stayed as before"])
        return "; ".join(self.lines)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a verb: an argument of the method, of a command, and of a form."""

    name: str
    help: str
    kind: Literal["text", "flag", "number", "duration", "time", "age"] = "text"
    """An age is a time, or a duration before or after now."""
    metavar: str | None = None
    example: str = ""
    """A value, for an empty field of a form."""

    @property
    def words(self) -> str:
        """The option of the command."""
        return f"--{self.name.replace('_', '-')}"

    def read(self, text: str) -> Any:
        """Return the value that a form has. Raises `ConfigurationError`."""
        if self.kind == "number":
            return whole(text, self.name)
        return True if self.kind == "flag" else text


def whole(text: str | None, name: str) -> int | None:
    """Return a whole number of a form or an address."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigurationError(f"{name} is {text[:40]!r}: give a whole number")
    return int(text)


SUBJECTS = {
    "": "[IDS]...",
    "flows": "STEP",
    "queues": "[QUEUE...]",
    "workers": "[NAME...]",
    "schedules": "NAME",
    "limits": "KEY",
    "audit": "ID",
}
"""The arguments of verbs by their groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb. `do` is called with the App, the ids or names, and the options."""

    words: str
    """Those of its command."""
    do: Callable[..., Outcome]
    selectors: tuple[Option, ...] = ()
    """The options that choose the subjects."""
    options: tuple[Option, ...] = ()
    role: Literal["operator", "admin"] = "operator"
    states: tuple[str, ...] = ()
    """The states of the subjects that it is for; empty for all."""
    button: str = ""
    """The text of its button; a verb without one has a command alone."""
    confirms: tuple[str, ...] = ()
    """The choices that a command has to confirm. Nobody confirms ids."""
    needs_code: bool = False
    """Whether it needs the tasks of the App."""
    takes: str = ""
    """Its arguments, where they are not those of its group."""
    steps: str = ""
    """The reason why an ended step of a flow may stay as it was."""

    @property
    def help(self) -> str:
        """The help of its command. The first sentence stands in lists of commands."""
        return self.do.__doc__ or ""

    @property
    def group(self) -> str:
        """The first of two words; empty for verbs on jobs."""
        return self.words.rpartition(" ")[0]

    @property
    def subjects(self) -> str:
        """The argument of its command: in brackets where options may choose in its place."""
        return self.takes or ("IDS..." if not self.group and not self.selectors else SUBJECTS[self.group])

    @property
    def is_of_jobs(self) -> bool:
        return self.group in ("", "flows") and not self.takes

    @property
    def asks(self) -> bool:
        """Whether a page has to confirm it first."""
        return self.button.endswith("…")

    @property
    def style(self) -> str:
        """The class of its button."""
        return "danger" if self.asks and self.role == "admin" else ""

    def filter_of(self, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the options that choose all jobs of a search; None where there are none, as for a text."""
        names = {each.name for each in self.selectors}
        fields = {name: each for name, each in fields.items() if name != "state" or name in names}
        if "all" not in names or not fields.keys() <= names:
            return None
        return fields or {"all": True}

    def fits(self, state: str | None) -> bool:
        """Whether it is for subjects of this state, or of some state."""
        return state is None or not self.states or state in self.states

    def why_not(self, outcome: Outcome, job: JobDetails) -> str:
        """Return why a job stayed as it was."""
        if job.id in outcome.reasons:
            return outcome.reasons[job.id]
        if self.steps and job.flow_id is not None and job.ended_at is not None:
            return self.steps
        if self.fits(job.state):
            return f"it is {job.state}, but not of those named, or locked by another transaction"
        return f"it is {job.state}: {self.words} is for {', '.join(self.states)} jobs"


def listed(ids: Sequence[int | str]) -> str:
    """Return ids or names for a sentence; of many only the first."""
    shown = ", ".join(map(str, ids[:IDS_SHOWN]))
    return shown if len(ids) <= IDS_SHOWN else f"{shown} and {counted(len(ids) - IDS_SHOWN, 'more', 'more')}"


def of(options: Mapping[str, Any]) -> str:
    """Return " of task … in queue … of batch … of flow …" for the jobs that the options choose."""
    names = {"task": "of task", "queue": "in queue", "batch": "of batch", "flow": "of flow"}
    names |= {"label": "with the label", "key": "with the unique key", "limit_key": "under the limit"}
    names |= {"error": "with the error", "state": "that are", "since": "since", "until": "until"}
    return "".join(f" {words} {options[name]}" for name, words in names.items() if options.get(name))


def worker_name(worker: Any) -> str:
    """Return the name of a worker, where it has one, with its host and process."""
    return f"{'' if worker.name is None else worker.name + ' on '}{worker.host} pid {worker.pid}"
