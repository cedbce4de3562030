"""A flow as boxes to draw: each step that matters in one, the others folded by their state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sqlq.model.flow import StepDetails

BOXES = 16
"""A flow of more steps is folded."""
NEIGHBOURS = 8
_BY_HARM = ("failed", "running", "available", "scheduled", "blocked", "cancelled", "finished")
_OVER = _BY_HARM.index("cancelled")


class Box(NamedTuple):
    """One step, or the steps of one state that are folded; `after` has the numbers of the boxes before it."""

    steps: list[StepDetails]
    column: int
    row: int
    after: set[int]


def outline(steps: Sequence[StepDetails], at: int | None = None, limit: int = BOXES) -> list[Box]:
    """Return the boxes of a flow, those of failed steps first, folded ones last; `at` is the one step whose
    surroundings alone are drawn.

    A flow of at most `limit` steps is not folded. In a larger one the failed and running steps, and those
    beside them, have boxes of their own, and then those that wait.
    """
    core = {step.id for step in steps if (step.id == at if at else step.state in _BY_HARM[:2])}
    near = {id for step in steps if step.id in core for id in step.after}
    near |= {step.id for step in steps if not core.isdisjoint(step.after)}
    if at:
        steps, limit = [step for step in steps if step.id in core | near], NEIGHBOURS
    harm = {step.id: _BY_HARM.index(step.state) for step in steps}
    ranks = {id: (id not in core, id not in near, harm[id], id) for id in harm}
    folds = (True, True, _OVER) if len(steps) > limit else (True, True, len(_BY_HARM))
    shown = {id for id in sorted(ranks, key=ranks.__getitem__)[:limit] if ranks[id] < folds}
    columns = _columns(steps, shown)
    folded: dict[tuple[int, int], list[StepDetails]] = {}
    for step in sorted(steps, key=lambda step: ranks[step.id]):
        group = step.id if step.id in shown else -harm[step.id]
        folded.setdefault((columns[step.id], group), []).append(step)
    numbers = {step.id: number for number, some in enumerate(folded.values()) for step in some}
    rows: Counter[int] = Counter()
    boxes = []
    for (column, _), some in folded.items():
        # steps of a fold may wait for each other
        after = {numbers[id] for step in some for id in step.after if columns.get(id, column) < column}
        boxes.append(Box(some, column, rows[column], after))
        rows[column] += 1
    return boxes


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
