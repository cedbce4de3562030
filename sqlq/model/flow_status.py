"""Flows and their steps in the database, as operators see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, ClassVar

from sqlq.config.json_text import AsJson
from sqlq.errors import JobNotFoundError
from sqlq.model.flow import When
from sqlq.model.job import Progress, State


@dataclass(frozen=True, slots=True)
class StepDetails:
    """A step of a flow, as its row has it. `after` has the steps that it waits or waited for, by their ids,
    each with how it has to end. `result` is decoded JSON; `error` is the error of a failed step, or why one
    was cancelled or skipped."""

    id: int
    task: str
    queue: str
    label: str | None
    state: State
    attempts: int
    after: Mapping[int, When]
    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class FlowStatus(AsJson):
    """How far a flow is: how many of its steps are in which state. Steps whose rows were pruned count as
    nothing."""

    COLUMNS: ClassVar = ("id", "name", "state", "steps=steps_by_state", "enqueued=created_at")
    id: int
    name: str | None
    created_at: datetime
    counts: Mapping[State, int]

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
        found = (State.FAILED, State.BLOCKED, State.FINISHED, State.CANCELLED)
        return next((state for state in found if self.counts.get(state)), State.FINISHED)

    @property
    def progress(self) -> Progress:
        """How many of its steps have finished or were cancelled, of all there are."""
        ended = sum(self.counts.get(state, 0) for state in (State.FINISHED, State.CANCELLED))
        return Progress(ended, sum(self.counts.values()))

    def as_json(self) -> dict[str, Any]:
        progress = self.progress
        return {**asdict(self), "state": self.state, "done": progress.done, "of": progress.of}


@dataclass(frozen=True, slots=True)
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
