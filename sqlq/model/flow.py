"""Flows as a caller writes them: jobs that wait for others. Their life in the database is in `store.flows`.

A flow is laid step by step, and a step can only wait for steps that were added before it. So there is no
cycle. An impossible step is refused where it is written, before anything is sent to a database.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from sqlq.config.constants import DEFAULT_QUEUE, PAYLOAD_BYTES, WAIT_TASK
from sqlq.config.durations import Duration, milliseconds
from sqlq.config.json_text import AsJson
from sqlq.errors import ArgumentsError, EnqueueError, JobNotFoundError
from sqlq.model.checks import checked_name, checked_word, refusing_by
from sqlq.model.flow_parts import AnyFlow, Chain, Group, Result, Step, Steps, kind
from sqlq.model.job import NewJob, Progress, R, State

When = Literal["success", "failure", "ended"]
OnOutcome: TypeAlias = When | Literal["either"]
"""How a step has to end for another one. An optional step may finish or fail, but not be cancelled."""
STEPS_LIMIT = 100_000
EDGES_LIMIT = 1_000_000
"""A flow is written in one transaction, and read as a whole."""
GROWN_FROM = -1
"""The number of the step whose handler adds steps to the flow that it is of."""


class Edge(NamedTuple):
    """Step number `step` waits for the step number `after` to end so. `position` is that of `after` among
    those that the step waits for."""

    step: int
    after: int
    when: OnOutcome
    position: int


class Plan(NamedTuple):
    """A flow as it is written: its jobs in an order in which each comes after those that it waits for."""

    name: str | None
    jobs: list[NewJob]
    edges: list[Edge]
    ends: tuple[int, ...] = ()
    """The numbers of the steps whose results are the flow's."""
    is_list: bool = False
    """Whether its result is a list, whatever their number."""
    optional: frozenset[int] = frozenset()
    """The numbers of the steps that may fail."""


class _Laid(NamedTuple):
    """A part that was added to a flow. `ends` are the steps at its end; a step after the part waits for those
    in `gate`."""

    ends: list[Step]
    gate: dict[int, When]
    is_list: bool


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

    def __init__(self, name: str | None = None) -> None:
        with refusing_by(EnqueueError):
            self.name = None if name is None else checked_name(name, "the flow's name")
        self.steps: list[Step] = []
        """In the order in which they were added."""
        self._edges: list[Edge] = []
        self._of: _Laid | None = None
        """The chain or group that the flow is."""
        self._laid: dict[Group, _Laid] = {}
        self._is_closed = False

    @overload
    def add(
        self,
        job: NewJob[Coroutine[Any, Any, R]],
        *,
        after: After = (),
        when: When = "success",
        optional: bool = False,
        only_if: Any = None,
    ) -> Step[R]: ...

    @overload
    def add(
        self,
        job: NewJob[R],
        *,
        after: After = (),
        when: When = "success",
        optional: bool = False,
        only_if: Any = None,
    ) -> Step[R]: ...

    @overload
    def add(self, job: Chain[R] | Group[R], *, after: After = (), when: When = "success") -> Steps[R]: ...

    def add(
        self,
        job: Any,
        *,
        after: Any = (),
        when: When = "success",
        optional: bool = False,
        only_if: Any = None,
    ) -> Any:
        """Add a job, a chain or a group, and return its step, or the steps at its end.

        - `job`: what `task.new(…)` returns, a chain or a group.
        - `after`: the steps for which it waits, or a mapping `{step: when}` to set `when` for each.
        - `when`: how they have to end: "success", "failure" (for good), or "ended" (in any way).
        - `optional`: whether the steps after it go on where it fails for good. Its result is then None.
        - `only_if`: the result of a step before it, such as `checked.result`. A falsy value skips this step,
          and the steps that wait for skipped ones alone: they are cancelled with the reason `not_needed`.
          A step that also waits for others runs, and gets None for the result of a skipped one.

        A step that can no longer run, since a step before it ended otherwise, is cancelled. A delay counts
        from the enqueue. A step whose result is an argument of the job is waited for, whether or not it is
        named. Raises `EnqueueError` for steps of another flow, and for a job that cannot be a step.

        >>> flow.add(alarm.new(7), after=[paid], when="failure")  # doctest: +SKIP
        """
        waits = self._waits(after, when)
        if isinstance(job, NewJob):
            return self._put(job, waits, optional=optional, only_if=only_if)
        if optional or only_if is not None:
            raise EnqueueError(
                f"optional and only_if are of one job, not of {kind(job)}: add the jobs of it one by one"
            )
        if isinstance(job, (Chain, Group)):
            return Steps(self._lay(job, waits, ()).ends)
        raise EnqueueError(
            f"flow.add takes a job, a chain or a group, not {kind(job)}: write flow.add(task.new(…))"
        )

    def wait(
        self, name: str, *, timeout: Duration | None = None, after: After = (), when: When = "success"
    ) -> Step[Any]:
        """Add a step that no worker runs: `app.signal(name)` ends it, and its value is the result.

        - `name`: the signal's name. All steps and jobs that wait for one name get its value.
        - `timeout`: how long it waits, from the end of the steps before it on; then it fails as `timeout`.
        - `after`, `when`: as in `add`.

        The first signal of a name counts, also one that came before the step began to wait. Raises
        `EnqueueError` as `add`, and for a name or timeout that is none.

        >>> ok = flow.wait(f"approved:{order_id}", timeout="3d")  # doctest: +SKIP
        >>> flow.add(ship.new(order_id, ok.result))  # doctest: +SKIP
        >>> ok.catch(escalate.new(order_id))  # doctest: +SKIP
        """
        with refusing_by(EnqueueError):
            label = checked_name(name, "the signal's name")
            timeout_ms = None if timeout is None else milliseconds(timeout, "timeout")
        job: NewJob[Any] = NewJob(WAIT_TASK, "{}", DEFAULT_QUEUE, 1, label=label, timeout_ms=timeout_ms)
        return self._put(job, self._waits(after, when))

    def _lay(self, part: Any, waits: Mapping[int, When], arguments: tuple[Any, ...]) -> _Laid:
        """Add a part, and return its place in the flow; `arguments` are the arguments for a task."""
        if isinstance(part, Chain):
            laid = _Laid([], dict(waits), is_list=False)
            for each in part._parts:
                laid = self._lay(each, laid.gate, arguments)
                results = Result(Steps(laid.ends), is_list=True)
                arguments = (results,) if laid.is_list else tuple(step.result for step in laid.ends)
            return laid
        if isinstance(part, Group):
            ends = [end for each in part._parts for end in self._lay(each, waits, arguments).ends]
            gate: dict[int, When] = {end.number: "success" for end in ends}
            laid = _Laid(ends, gate or dict(waits), is_list=True)
            self._laid[part] = laid
            return laid
        try:
            job = part if isinstance(part, NewJob) else part.new(*arguments)
        except ArgumentsError as error:
            if not arguments:
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
            if edge.when == "failure" or (edge.when != "ended" and edge.after in upon_failure):
                upon_failure.add(edge.step)
        waited_for = {edge.after for edge in self._edges if edge.step not in upon_failure}
        ends = tuple(
            step.number
            for step in self.steps
            if step.number not in waited_for and step.number not in upon_failure
        )
        return ends, len(ends) > 1

    def __repr__(self) -> str:
        return "a flow" if self.name is None else f"the flow {self.name!r}"

    def _put(
        self, job: NewJob[R], waits: Mapping[int, When], *, optional: bool = False, only_if: Any = None
    ) -> Step[R]:
        if self._is_closed:  # guard: an-enqueued-flow-takes-no-steps
            raise EnqueueError(
                f"{job.task} is added to {self!r}, which takes no more steps: add it before the flow is "
                "enqueued, or in a step's handler before complete(), by sqlq.current_job().flow.add(…)"
            )
        if job.unique_key is not None:
            raise EnqueueError(
                f"{job.task} has the unique key {job.unique_key!r}: a step of a flow cannot have one, since "
                "a job that is there already may be a step of another flow; enqueue the flow from a job that "
                "has the key"
            )
        if job.start_by or (job.start_within_ms and "start_within_ms" in job._options_set):
            raise EnqueueError(
                f"{job.task} has a time by which it has to start: a step of a flow cannot have one, since "
                "it waits for others; say .set(start_within=None), or let the step look at its moment itself"
            )
        job = without_expiry(job)  # a start deadline of queue or App is for jobs that wait for nothing
        if len(self.steps) >= STEPS_LIMIT:
            raise EnqueueError(
                f"{self!r} has {STEPS_LIMIT:,} steps, which is the most: let a step enqueue flows of its own"
            )
        all_waits = dict(waits)
        if only_if is not None and not isinstance(only_if, Result):
            raise EnqueueError(
                f"only_if is {kind(only_if)}: it is the result of a step before, as in only_if=checked.result"
            )
        taken = job._results if only_if is None else ((None, only_if), *job._results)
        results = [(where, self._sources(job, result), result.is_list) for where, result in taken]
        for _, numbers, _ in results:
            for number in numbers:
                if all_waits.setdefault(number, "success") != "success":
                    raise EnqueueError(
                        f"{job.task} takes the result of {self._named(number)}, and waits for it with "
                        f'when="{all_waits[number]}": only a step that has finished has a result'
                    )
        if isinstance(self, Growth):
            all_waits.setdefault(GROWN_FROM, "success")
        positions = {number: position for position, number in enumerate(all_waits)}
        if results:
            job = _with_results(
                job,
                [
                    (where, [positions[n] for n in numbers] if is_list else positions[numbers[0]])
                    for where, numbers, is_list in results
                ],
            )
        if len(self._edges) + len(all_waits) > EDGES_LIMIT:
            raise EnqueueError(
                f"in {self!r} steps wait for others in more than {EDGES_LIMIT:,} ways: between two wide "
                "groups put one step that waits for the first, and for which the second waits"
            )
        step = Step(self, len(self.steps), job, optional)
        self._edges += [
            Edge(step.number, n, self._on_outcome(n, when), positions[n]) for n, when in all_waits.items()
        ]
        self.steps.append(step)
        return step

    def _on_outcome(self, number: int, when: When) -> OnOutcome:
        is_optional = number != GROWN_FROM and self.steps[number].optional
        # guard: optional-steps-are-not-cancelled
        return "either" if when == "success" and is_optional else when

    def _named(self, number: int) -> str:
        return "the running step" if number == GROWN_FROM else repr(self.steps[number])

    def _sources(self, job: NewJob, result: Result) -> list[int]:
        """Return the numbers of the steps whose results an argument is."""
        source = result.source
        if isinstance(source, Group):
            laid = self._laid.get(source)
            if laid is None:
                raise EnqueueError(
                    f"{job.task} takes the results of a group that does not come before it in {self!r}: "
                    "add the group first, as in group.then(…)"
                )
            steps = laid.ends
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


class Growth(Flow):
    """The flow of which a running job is a step. Steps added to it are written with the completion of that
    job, and wait for it."""

    def __init__(self, id: int, job: NewJob) -> None:
        super().__init__()
        self.id = id
        self.step: Step = Step(self, GROWN_FROM, job)
        """The running step, whose result those that it adds may take."""

    def __repr__(self) -> str:
        return f"flow {self.id}"


def plan_of(part: AnyFlow) -> Plan:
    """Return a flow, a chain or a group as it is to be written. Raises `EnqueueError` for a flow without
    steps, and one that is enqueued."""
    flow = part if isinstance(part, Flow) else Flow()
    if flow is not part:
        flow._of = flow._lay(part, {}, ())
    if flow._is_closed and not isinstance(flow, Growth):  # guard: a-flow-is-enqueued-once
        raise EnqueueError(
            f"{flow!r} is enqueued already, and a second time would make another one: make it anew, with "
            "sqlq.Flow()"
        )
    if not flow.steps:
        raise EnqueueError(f"{flow!r} has no steps: add some with flow.add(task.new(…))")
    optional = frozenset(step.number for step in flow.steps if step.optional)
    return Plan(flow.name, [step.job for step in flow.steps], list(flow._edges), *flow._ends(), optional)


def without_expiry(job: NewJob[R]) -> NewJob[R]:
    """Return a step without a time by which it has to start, which its queue may have for jobs."""
    return job if job.start_within_ms is None else replace(job, start_within_ms=None)


def _with_results(job: NewJob[R], positions: list[tuple[int | str | None, int | list[int]]]) -> NewJob[R]:
    """Return a job whose payload names the arguments that are results of the steps before it. Each is named
    by its place or name, and by the positions of the steps among those that it waits for. The result that
    decides whether the job is needed has None in place of a name."""
    between = ", " if len(job.payload) > len("{}") else ""
    payload = f'{job.payload[:-1]}{between}"results": {json.dumps(positions, ensure_ascii=False)}}}'
    if (size := len(payload.encode())) > PAYLOAD_BYTES:
        raise EnqueueError(
            f"the arguments of {job.task} take {size:,} bytes as JSON, more than the {PAYLOAD_BYTES:,} "
            "allowed: it takes the results of too many steps"
        )
    return replace(job, payload=payload, _results=())


# -- as operators see it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepDetails:
    """A step of a flow, as its row has it. `after` has the steps that it waits or waited for, by their ids,
    each with how it has to end. `result` is decoded JSON; `error` is the error of a failed step, or why one
    was cancelled or skipped."""

    COLUMNS = ("step=id", "task", "label", "state", "after", "error")
    id: int
    task: str
    queue: str
    label: str | None
    state: State
    attempts: int
    after: Mapping[int, OnOutcome]
    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class FlowStatus(AsJson):
    """How far a flow is: how many of its steps are in which state. Steps whose rows were pruned count as
    nothing."""

    COLUMNS = ("id", "name", "state", "steps=steps_by_state", "enqueued=created_at")
    id: int
    name: str | None
    created_at: datetime
    counts: Mapping[State, int]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name!r} {self.state}: {self.steps_by_state}>"

    @property
    def steps_by_state(self) -> str:
        return ", ".join(f"{number:,} {state}" for state, number in self.counts.items())

    @property
    def state(self) -> State:
        """The state of the flow as a whole. It is `running` as long as a step runs or will by itself. Else it
        is `failed` where one has failed, `blocked` where one waits, `cancelled` where all that ended were
        cancelled, and otherwise `finished`. A step that never had to run is cancelled, too."""
        if any(self.counts.get(state) for state in (State.RUNNING, State.AVAILABLE, State.SCHEDULED)):
            return State.RUNNING
        states = (State.FAILED, State.BLOCKED, State.FINISHED, State.CANCELLED)
        return next((state for state in states if self.counts.get(state)), State.FINISHED)

    @property
    def progress(self) -> Progress:
        """How many of its steps have finished or were cancelled, of all there are."""
        done = self.counts.get(State.FINISHED, 0) + self.counts.get(State.CANCELLED, 0)
        return Progress(done, sum(self.counts.values()))

    def as_json(self) -> dict[str, Any]:
        progress = self.progress
        return {**asdict(self), "state": self.state, "done": progress.done, "of": progress.of}


@dataclass(frozen=True, slots=True, repr=False)
class FlowDetails(FlowStatus):
    """A flow with its steps, in the order of their ids, which is that in which they were added."""

    steps: tuple[StepDetails, ...]

    @property
    def results(self) -> dict[int, Any]:
        """The results of the steps that have finished, as decoded JSON, by their ids."""
        return {step.id: step.result for step in self.steps if step.state is State.FINISHED}

    def step(self, id: int) -> StepDetails:
        """Return a step by its id. Raises `JobNotFoundError`."""
        for step in self.steps:
            if step.id == id:
                return step
        raise JobNotFoundError(f"flow {self.id} has no step {id}")
