"""The parts of a flow: its steps, chains and groups of jobs, and results as arguments of later steps."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast, overload

from sqlq.errors import EnqueueError
from sqlq.model.job import Job, NewJob, R, R_co

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Result:
    """Stands in the arguments of a job for the result of an earlier step, or for a list of several
    results."""

    source: Step | Steps | Group
    is_list: bool = False

    def __repr__(self) -> str:
        return "the results of a group" if self.is_list else f"the result of {self.source!r}"

    def __str__(self) -> str:  # guard: step-result-is-not-formatted
        raise EnqueueError(
            f"{self!r} is not known yet, and so is no part of a text: give it as an argument of its own, and "
            "make the text in the handler"
        )

    def __format__(self, spec: str) -> str:
        return str(self)


@dataclass(eq=False, repr=False)
class Step(Generic[R_co]):
    """A job of a flow. Other steps may wait for it, and take its result."""

    _flow: Any
    number: int
    job: NewJob[R_co]
    optional: bool = False
    """Whether the steps after it go on where it fails."""

    @property
    def result(self) -> R_co:
        """The result of this step, as an argument of a later one, whose handler gets the value.

        It is no value yet: give it to `task.new` as an argument of its own, and to nothing else.

        >>> flow.add(ship.new(7, paid.result), after=[paid])  # doctest: +SKIP
        """
        return cast(R_co, Result(self))

    def then(self, job: NewJob[T]) -> Step[T]:
        """Add a step that runs when this one has finished; the same as `flow.add(job, after=[step])`."""
        return cast("Step[T]", self._flow.add(job, after=[self]))

    def catch(self, job: NewJob[T]) -> Step[T]:
        """Add a step that runs when this one has failed for good."""
        return cast("Step[T]", self._flow.add(job, after=[self], when="failure"))

    def __repr__(self) -> str:
        return f"step {self.number + 1} ({self.job.task})"


class Steps(tuple[Step[R_co], ...]):
    """The steps at the end of a chain or group that was added to a flow: those that others wait for."""

    __slots__ = ()

    @property
    def results(self) -> list[R_co]:
        """The results of these steps, in their order, as one argument of a later step."""
        return cast("list[R_co]", Result(self, is_list=True))


class EnqueuedFlow(NamedTuple):
    """The answer of `enqueue` for a flow: its `id`, and its jobs in the order in which their steps were
    added. `ends` has the places among them of the jobs whose results are the flow's. With `is_list` these are
    a list whatever their number. `optional` has the places of the jobs that may fail."""

    id: int
    name: str | None
    jobs: tuple[Job, ...]
    ends: tuple[int, ...] = ()
    is_list: bool = False
    optional: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        return f"<EnqueuedFlow {self.id} {self.name!r}: {len(self.jobs):,} jobs>"

    def job(self, step: Step[R]) -> Job[R]:
        """Return the job that a step has become."""
        return self.jobs[step.number]


class AnyFlow:
    """The argument of `enqueue` of which it makes a flow: a flow, a chain or a group."""

    if TYPE_CHECKING:

        @property
        def _becomes(self) -> EnqueuedFlow: ...


class Composed(AnyFlow, Generic[R_co]):
    """The base of chains and groups."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = [_checked_part(part) for part in parts]

    def then(self, *parts: Any) -> Chain:
        """Return a chain of this and the parts after it."""
        return Chain([self, *parts])


class Chain(Composed[R_co]):
    """Jobs that run one after the other; see `sqlq.chain`."""


class Group(Composed[R_co]):
    """Jobs that run side by side; see `sqlq.group`."""

    @property
    def results(self) -> list[R_co]:
        """The results of this group's jobs, in their order, as one argument of a job that comes after it.

        >>> prices = sqlq.group(ask.new("a"), ask.new("b"))  # doctest: +SKIP
        >>> prices.then(choose.new(7, prices.results))  # doctest: +SKIP
        """
        return cast("list[R_co]", Result(self, is_list=True))


def chain(*parts: Any) -> Chain:
    """Return jobs that run one after the other, each when the one before it has finished.

    A part is a job, a chain, a group, or a task. A task is called with the result of the part before it, or
    the list of results of a group. When one fails, those after it stay blocked until it is retried. Give the
    chain to `app.enqueue` or `flow.add`. Raises `EnqueueError` for anything else as a part.

    >>> app.enqueue(sqlq.chain(fetch.new(url), parse, store))  # doctest: +SKIP
    """
    return Chain(parts)


@overload
def group(*parts: NewJob[Coroutine[Any, Any, R]]) -> Group[R]: ...


@overload
def group(*parts: NewJob[R]) -> Group[R]: ...


@overload
def group(*parts: Any) -> Group: ...


def group(*parts: Any) -> Group:
    """Return jobs that run side by side; `.then(…)` adds the part that comes when all have finished.

    A part is as in `sqlq.chain`. The results of a group are those of its jobs in their order. A chain in it
    has the result of its last job, a group in it those of its jobs. An empty group inside a
    flow has finished at once, and its results are an empty list. Raises `EnqueueError` for anything else as a
    part.

    >>> app.enqueue(sqlq.group(ask.new("a"), ask.new("b")).then(choose))  # doctest: +SKIP
    """
    return Group(parts)


def without_results(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[int | str, Result], list[Any], dict[str, Any]]:
    """Return which arguments are results of steps, by their places and names, and the arguments with None in
    place of these. A list of nothing but results is one."""
    each: Iterator[tuple[int | str, Any]] = iter([*enumerate(args), *kwargs.items()])
    results = {position: result for position, value in each if (result := _as_result(value)) is not None}
    known = [None if i in results else value for i, value in enumerate(args)]
    return results, known, {name: None if name in results else value for name, value in kwargs.items()}


def _as_result(value: Any) -> Result | None:
    if isinstance(value, Result):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, Result) for each in value):
        if any(each.is_list or not isinstance(each.source, Step) for each in value):
            raise EnqueueError("a list of results holds results of single steps: give a group's as it is")
        return Result(Steps([each.source for each in value]), is_list=True)
    return None


def _checked_part(part: Any) -> Any:
    if isinstance(part, (NewJob, Composed)) or hasattr(type(part), "_as_follow_up"):
        return part
    raise EnqueueError(
        f"{kind(part)} is no part of a chain or group: give jobs, as in sqlq.chain(charge.new(7), ship), "
        "tasks, chains or groups"
    )


def kind(value: Any) -> str:
    """Return a value as messages show it that was given in the place of a part."""
    if isinstance(value, AnyFlow) and not isinstance(value, Composed):
        return f"{value!r}"
    return f"the {type(value).__name__} {value!r}"[:100]
