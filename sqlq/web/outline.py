"""A flow as boxes to draw: each step that matters in one, the others folded by their state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlq.model.flow import StepDetails

BOXES = 16
"""A flow of more steps is folded."""
_BY_HARM = ("failed", "running", "available", "scheduled", "blocked", "cancelled", "finished")


class Box(NamedTuple):
    """One step, or the steps of one state that are folded; `after` has the numbers of the boxes before it."""

    steps: list[StepDetails]
    column: int
    after: set[int]


def outline(steps: Sequence[StepDetails], at: int | None = None, limit: int = BOXES) -> list[Box]:
    """Return the boxes of a flow, those of failed steps first, folded ones last; `at` is the one step whose
    surroundings alone are drawn.

    At most `limit` steps are not folded. If there are more, the failed and running ones, and those beside
    them, have boxes of their own, and then those that wait.
    """
    core = {step.id for step in steps if (step.id == at if at else step.state in _BY_HARM[:2])}
    near = {id for step in steps if step.id in core for id in step.after}
    near |= {step.id for step in steps if not core.isdisjoint(step.after)}
    relevant = core | near
    if at:
        steps = [step for step in steps if step.id in relevant]

    def rank(step: StepDetails) -> tuple[bool, bool, int, int]:
        return step.id not in core, step.id not in relevant, _BY_HARM.index(step.state), step.id

    ranked = sorted(steps, key=rank)
    shown = {
        step.id
        for step in ranked[:limit]
        if len(steps) <= limit or step.id in (core if at else relevant) or step.state not in _BY_HARM[5:]
    }
    columns = _columns(steps, shown)
    folded: dict[Any, list[StepDetails]] = defaultdict(list)
    for step in ranked:
        folded[columns[step.id], step.id if step.id in shown else step.state].append(step)
    numbers = {step.id: number for number, some in enumerate(folded.values()) for step in some}
    return [
        # steps of a fold may wait for each other
        Box(
            some,
            column,
            {numbers[id] for step in some for id in step.after if columns.get(id, column) < column},
        )
        for (column, _), some in folded.items()
    ]


def _columns(steps: Sequence[StepDetails], shown: set[int]) -> dict[int, int]:
    """Return the column of each step, after those that it waits for. Columns in which no step is shown become
    one; but a single step and a fan stay apart."""
    depths: dict[int, int] = {}
    for step in sorted(steps, key=lambda step: step.id):  # ids ascend, and a step waits for earlier ones only
        depths[step.id] = 1 + max((depths[id] for id in step.after if id in depths), default=-1)
    kept, sizes = {depths[id] for id in shown}, Counter(depths.values())
    kinds = [depth if depth in kept else -1 - (sizes[depth] > 1) for depth in range(len(sizes))]
    columns = [0]
    for kind, before in zip(kinds[1:], kinds, strict=False):
        columns.append(columns[-1] + (kind != before))
    return {id: columns[depth] for id, depth in depths.items()}
