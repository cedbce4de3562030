"""Flows as a caller writes them: jobs that wait for others. Their life in the database is in `store.flows`.

A flow is laid step by step, and a step can only wait for steps that were added before it. So there is no
cycle. An impossible step is refused where it is written, before anything is sent to a database.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from sqlq.config.constants import PAYLOAD_BYTES
from sqlq.errors import ArgumentsError, EnqueueError
from sqlq.model.checks import checked_name, checked_word, refusing_by
from sqlq.model.flow_parts import AnyFlow, Chain, Group, Result, Step, Steps, kind
from sqlq.model.job import Job, NewJob, R

When: TypeAlias = Literal["success", "failure", "ended"]
MOST_STEPS = 100_000
MOST_EDGES = 1_000_000
"""A flow is written in one transaction, and read as a whole."""
GROWN_FROM = -1
"""The number of the step whose handler adds steps to the flow that it is of."""


class Edge(NamedTuple):
    """Step number `step` waits for the step number `after` to end so. `place` is its place among those that
    the step waits for."""

    step: int
    after: int
    when: When
    place: int


class Plan(NamedTuple):
    """A flow as it is written: its jobs in an order in which each comes after those that it waits for."""

    name: str | None
    jobs: list[NewJob]
    edges: list[Edge]
    ends: tuple[int, ...] = ()
    """The numbers of the steps whose results are the flow's."""
    is_list: bool = False
    """Whether its result is a list, whatever their number."""


class _Laid(NamedTuple):
    """A part that was added to a flow. `ends` are the steps at its end; a step after the part waits for those
    in `gate`."""

    ends: list[Step]
    gate: dict[int, When]
    is_list: bool

    def given(self) -> tuple[Any, ...]:
        """Return the arguments for a task that comes next."""
        if self.is_list:
            return (Result(Steps(self.ends), is_list=True),)
        return tuple(step.result for step in self.ends)


class Flow(AnyFlow):
    """Jobs, some of which wait for others: enqueued whole or not at all.

    A `name` is for people, and need not be the only one of its kind. A flow is enqueued once, and takes no
    steps after that, also where its transaction is rolled back: make it anew then. (A chain or group is no
    flow yet but the plan of one. It may be enqueued many times, as a job may.) Raises `EnqueueError` for a
    name that cannot be stored.

    >>> flow = sqlq.Flow("order 7")
    >>> paid = flow.add(charge.new(7))  # doctest: +SKIP
    >>> flow.add(ship.new(7, paid.result), after=[paid])  # doctest: +SKIP
    >>> app.enqueue(flow, session=session)  # doctest: +SKIP
    """

    _grows = False

    def __init__(self, name: str | None = None) -> None:
        with refusing_by(EnqueueError):
            self.name = None if name is None else checked_name(name, "the flow's name")
        self.steps: list[Step] = []
        """In the order in which they were added."""
        self._edges: list[Edge] = []
        self._of: _Laid | None = None
        """The chain or group that the flow is."""
        self._laid: dict[int, tuple[Group, _Laid]] = {}
        self._is_enqueued = False

    @overload
    def add(
        self, job: NewJob[Coroutine[Any, Any, R]], *, after: After = (), when: When = "success"
    ) -> Step[R]: ...

    @overload
    def add(self, job: NewJob[R], *, after: After = (), when: When = "success") -> Step[R]: ...

    @overload
    def add(self, job: Chain[R] | Group[R], *, after: After = (), when: When = "success") -> Steps[R]: ...

    def add(self, job: Any, *, after: Any = (), when: When = "success") -> Any:
        """Add a job, a chain or a group, and return its step, or the steps at its end.

        - `job`: what `task.new(…)` returns, a chain or a group.
        - `after`: the steps for which it waits, or a mapping `{step: when}` to set `when` for each.
        - `when`: how they have to end: "success", "failure" (for good), or "ended" (in any way).

        A step that can no longer run, since a step before it ended otherwise, is cancelled. A delay counts
        from the enqueue. A step whose result is an argument of the job is waited for, whether or not it is
        named. Raises `EnqueueError` for steps of another flow, and for a job that cannot be a step.

        >>> flow.add(alarm.new(7), after=[paid], when="failure")  # doctest: +SKIP
        """
        waits = self._waits(after, when)
        if isinstance(job, NewJob):
            return self._put(job, waits)
        if isinstance(job, (Chain, Group)):
            return Steps(self._lay(job, waits, ()).ends)
        raise EnqueueError(
            f"flow.add takes a job, a chain or a group, not {kind(job)}: write flow.add(task.new(…))"
        )

    def _lay(self, part: Any, waits: Mapping[int, When], given: tuple[Any, ...]) -> _Laid:
        """Add a part, and return its place in the flow; `given` are the arguments for a task."""
        if isinstance(part, Chain):
            laid = _Laid([], dict(waits), is_list=False)
            for each in part._parts:
                laid = self._lay(each, laid.gate, given)
                given = laid.given()
            return laid
        if isinstance(part, Group):
            ends = [end for each in part._parts for end in self._lay(each, waits, given).ends]
            gate: dict[int, When] = {end.number: "success" for end in ends}
            laid = _Laid(ends, gate or dict(waits), is_list=True)
            self._laid[id(part)] = (part, laid)
            return laid
        try:
            job = part if isinstance(part, NewJob) else part.new(*given)
        except ArgumentsError as error:
            if not given:
                raise
            raise ArgumentsError(
                f"{error}; a task gets the result of the part before it, and a job has arguments of its own: "
                f"write {part.name}.new(…) where the result is not wanted"
            ) from None
        step = self._put(job, waits)
        return _Laid([step], {step.number: "success"}, is_list=False)

    def _ends(self) -> tuple[tuple[int, ...], bool]:
        """Return the steps whose results are the flow's, and whether they are a list whatever their number.

        They are those at the end of its chain or group. In another flow they are those for which no other
        waits, without steps that run only where one has failed.
        """
        if self._of is not None:
            return tuple(step.number for step in self._of.ends), self._of.is_list
        upon_failure: set[int] = set()
        for edge in self._edges:  # in the order of the steps that wait
            if edge.when == "failure" or (edge.when == "success" and edge.after in upon_failure):
                upon_failure.add(edge.step)
        waited_for = {edge.after for edge in self._edges if edge.step not in upon_failure}
        ends = tuple(
            step.number
            for step in self.steps
            if step.number not in waited_for and step.number not in upon_failure
        )
        return ends, len(ends) > 1

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return "a flow" if self.name is None else f"the flow {self.name!r}"

    def _put(self, job: NewJob[R], waits: Mapping[int, When]) -> Step[R]:
        if self._is_enqueued:  # guard: an-enqueued-flow-takes-no-steps
            raise EnqueueError(
                f"{job.task} is added to {self!r}, which is enqueued already: add steps before that, or in "
                "the handler of one, by sqlq.current_job().flow.add(…)"
            )
        if job.unique_key is not None:
            raise EnqueueError(
                f"{job.task} has the unique key {job.unique_key!r}: a step of a flow cannot have one, since "
                "a job that is there already may be a step of another flow; enqueue the flow from a job that "
                "has the key"
            )
        if job.start_by is not None or (job.start_within_ms is not None and "start_within_ms" in job._given):
            raise EnqueueError(
                f"{job.task} has a time by which it has to start: a step of a flow cannot have one, since "
                "it waits for others; say .set(start_within=None), or let the step look at its moment itself"
            )
        job = without_expiry(job)  # a start deadline of queue or App is for jobs that wait for nothing
        if len(self.steps) >= MOST_STEPS:
            raise EnqueueError(
                f"{self!r} has {MOST_STEPS:,} steps, which is the most: let a step enqueue flows of its own"
            )
        all_waits = dict(waits)
        wanted = [(where, self._sources(job, result), result.is_list) for where, result in job._results]
        for _, numbers, _ in wanted:
            for number in numbers:
                if all_waits.setdefault(number, "success") != "success":
                    raise EnqueueError(
                        f"{job.task} takes the result of {self._named(number)}, and comes when that has "
                        f"{_SAID[all_waits[number]]}: only a step that has finished has a result"
                    )
        if self._grows:
            all_waits.setdefault(GROWN_FROM, "success")
        places = {number: place for place, number in enumerate(all_waits)}
        if wanted:
            job = _with_results(
                job,
                [
                    (where, [places[n] for n in numbers] if is_list else places[numbers[0]])
                    for where, numbers, is_list in wanted
                ],
            )
        if len(self._edges) + len(all_waits) > MOST_EDGES:
            raise EnqueueError(
                f"in {self!r} steps wait for others in more than {MOST_EDGES:,} ways: between two wide "
                "groups put one step that waits for the first, and for which the second waits"
            )
        step = Step(self, len(self.steps), job)
        self._edges += [Edge(step.number, n, when, places[n]) for n, when in all_waits.items()]
        self.steps.append(step)
        return step

    def _named(self, number: int) -> str:
        return "the running step" if number == GROWN_FROM else repr(self.steps[number])

    def _sources(self, job: NewJob, result: Result) -> list[int]:
        """Return the numbers of the steps whose results an argument is."""
        source = result.source
        if isinstance(source, Group):
            laid = self._laid.get(id(source))
            if laid is None:
                raise EnqueueError(
                    f"{job.task} takes the results of a group that does not come before it in {self!r}: "
                    "add the group first, as in group.then(…)"
                )
            steps = laid[1].ends
        else:
            steps = [source] if isinstance(source, Step) else list(source)
        return [self._own(step).number for step in steps]

    def _own(self, step: Any) -> Step:
        if not isinstance(step, Step):
            raise EnqueueError(
                f"after holds {kind(step)}: it lists steps, as in after=[paid] with paid = flow.add(…)"
            )
        if step._flow is not self:
            raise EnqueueError(
                f"{step!r} is a step of another flow: a step waits for steps of its own flow, {self!r}, only"
            )
        return step

    def _waits(self, after: Any, when: Any) -> dict[int, When]:
        if isinstance(after, Step):
            after = [after]
        if not isinstance(after, Iterable):
            raise EnqueueError(f"after is {kind(after)}: it is a list of steps, as in after=[paid]")
        each = list(after.items() if isinstance(after, Mapping) else ((step, when) for step in after))
        with refusing_by(EnqueueError):
            for how in (when, *(how for _, how in each)):
                checked_word(how, "when", choice=When)
        waits: dict[int, When] = {}
        for item, how in each:
            for step in item if isinstance(item, Steps) else [item]:
                number = self._own(step).number
                if waits.setdefault(number, how) != how:
                    raise EnqueueError(
                        f"after says both {waits[number]!r} and {how!r} of {self._named(number)}: "
                        "name it once"
                    )
        if when != "success" and (not waits or isinstance(after, Mapping)):  # guard: when-is-of-steps
            raise EnqueueError(
                f'when is "{when}", and after names no steps of which it says that: write '
                f'flow.add(…, after=[paid], when="{when}") with paid = flow.add(…)'
            )
        return waits


After: TypeAlias = "Iterable[Step | Steps] | Mapping[Step, When] | Step | Steps"
_SAID = {"failure": "failed", "ended": "ended in any way"}


class Growth(Flow):
    """The flow of which a running job is a step. Steps added to it are written with the completion of that
    job, and wait for it."""

    _grows = True

    def __init__(self, id: int, job: NewJob) -> None:
        super().__init__()
        self.id = id
        self.step: Step = Step(self, GROWN_FROM, job)
        """The running step, whose result those that it adds may take."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"flow {self.id}"

    def _put(self, job: NewJob[R], waits: Mapping[int, When]) -> Step[R]:
        if self._is_closed:
            raise EnqueueError(
                f"{job.task} is added to {self!r} after complete() was called: add steps before that"
            )
        return super()._put(job, waits)


def plan_of(part: AnyFlow) -> Plan:
    """Return a flow, a chain or a group as it is to be written. Raises `EnqueueError` for a flow without
    steps, and one that is enqueued."""
    flow = part if isinstance(part, Flow) else Flow()
    if flow is not part:
        flow._of = flow._lay(part, {}, ())
    if flow._is_enqueued:  # guard: a-flow-is-enqueued-once
        raise EnqueueError(
            f"{flow!r} is enqueued already, and a second time would make another one: make it anew, with "
            "sqlq.Flow()"
        )
    if not flow.steps:
        raise EnqueueError(f"{flow!r} has no steps: add some with flow.add(task.new(…))")
    return Plan(flow.name, [step.job for step in flow.steps], list(flow._edges), *flow._ends())


class EnqueuedFlow(NamedTuple):
    """The answer of `enqueue` for a flow: its `id`, and its jobs in the order in which their steps were
    added. `ends` has the places among them of the jobs whose results are the flow's. With `is_list` these are
    a list whatever their number."""

    id: int
    name: str | None
    jobs: tuple[Job, ...]
    ends: tuple[int, ...] = ()
    is_list: bool = False

    def job(self, step: Step[R]) -> Job[R]:
        """Return the job that a step has become."""
        return self.jobs[step.number]


def without_expiry(job: NewJob[R]) -> NewJob[R]:
    """Return a step without a time by which it has to start, which its queue may have for jobs."""
    return job if job.start_within_ms is None else replace(job, start_within_ms=None)


def _with_results(job: NewJob[R], places: list[tuple[int | str, int | list[int]]]) -> NewJob[R]:
    """Return a job whose payload names the arguments that are results of the steps before it. Each is named
    by its place or name, and by the places of the steps among those that it waits for."""
    between = ", " if len(job.payload) > len("{}") else ""
    payload = f'{job.payload[:-1]}{between}"results": {json.dumps(places, ensure_ascii=False)}}}'
    if (size := len(payload.encode())) > PAYLOAD_BYTES:
        raise EnqueueError(
            f"the arguments of {job.task} take {size:,} bytes as JSON, more than the {PAYLOAD_BYTES:,} "
            "allowed: it takes the results of too many steps"
        )
    return replace(job, payload=payload, _results=())
