"""Small plots and graphs as SVG. Their styles are classes, since the pages allow none in line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

WIDTH, HEIGHT = 240, 48
_SVG = (
    '<svg class="plot {}" viewBox="0 0 {} {}" role="img" preserveAspectRatio="none">'
    "<title>{:.200}</title>{}</svg>"
)


def bars(values: Sequence[float], title: str, kind: str = "") -> Markup:
    """Return a bar for each value, the oldest on the left."""
    most = max(values, default=0) or 1
    step = WIDTH / max(1, len(values))
    drawn = [
        Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            i * step,
            HEIGHT - max(1.0, value / most * HEIGHT),
            max(1.0, step - 1.5),
            max(1.0, value / most * HEIGHT),
        )
        for i, value in enumerate(values)
        if value
    ]
    return Markup(_SVG).format(f"bars {kind}", WIDTH, HEIGHT, title, Markup("").join(drawn))


def lines(series: Mapping[str, Sequence[float | None]], title: str) -> Markup:
    """Return a line for each series; None leaves a gap."""
    most = max((value for values in series.values() for value in values if value is not None), default=0) or 1
    drawn = []
    for name, values in series.items():
        step = WIDTH / max(1, len(values) - 1)
        path, pen = [], "M"
        for i, value in enumerate(values):
            if value is None:
                pen = "M"
                continue
            path.append(f"{pen}{i * step:.1f} {HEIGHT - 1 - value / most * (HEIGHT - 2):.1f}")
            pen = "L"
        if len(path) == 1:  # a single point is a dot
            path.append("l0.1 0")
        drawn.append(Markup('<path class="{}" d="{}"/>').format(name, " ".join(path)))
    return Markup(_SVG).format("lines", WIDTH, HEIGHT, title, Markup("").join(drawn))


BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 190, 44, 48, 14
MOST_STEPS = 200


def graph(steps: Sequence[Any], url: Any, at: int | None = None) -> Markup:
    """Return the steps of a flow as boxes, each in the column after those that it waits for."""
    shown = steps[:MOST_STEPS]
    level: dict[int, int] = {}
    for step in shown:  # ids ascend, and a step waits for earlier ones only
        level[step.id] = 1 + max((level[id] for id in step.after if id in level), default=-1)
    rows: dict[int, int] = {}
    place: dict[int, tuple[int, int]] = {}
    for step in shown:
        column = level[step.id]
        row = rows.get(column, 0)
        rows[column] = row + 1
        place[step.id] = (column * (BOX_WIDTH + GAP_X) + 1, row * (BOX_HEIGHT + GAP_Y) + 1)
    width = (max(level.values(), default=0) + 1) * (BOX_WIDTH + GAP_X) - GAP_X + 2
    height = max(rows.values(), default=1) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 2
    drawn = []
    for step in shown:
        x, y = place[step.id]
        for id in step.after:
            if id in place:
                from_x, from_y = place[id][0] + BOX_WIDTH, place[id][1] + BOX_HEIGHT / 2
                middle = (from_x + x) / 2
                to_y = y + BOX_HEIGHT / 2
                drawn.append(
                    Markup('<path class="edge" d="M{} {}C{} {} {} {} {} {}"/>').format(
                        from_x, from_y, middle, from_y, middle, to_y, x, to_y
                    )
                )
    for step in shown:
        x, y = place[step.id]
        name = step.label or step.task
        drawn.append(
            Markup(
                '<a href="{}"><g class="step {}{}"><rect x="{}" y="{}" width="{}" height="{}" rx="6"/>'
                '<text x="{}" y="{}">{}</text><text class="small" x="{}" y="{}">{} · {}</text></g></a>'
            ).format(
                url("job", id=step.id),
                step.state,
                " here" if step.id == at else "",
                *(x, y, BOX_WIDTH, BOX_HEIGHT),
                *(x + 10, y + 18, _short(name)),
                *(x + 10, y + 34, step.id, step.state),
            )
        )
    title = f"{len(steps):,} steps" + (
        f", the first {MOST_STEPS} of them drawn" if len(steps) > MOST_STEPS else ""
    )
    return Markup(
        '<svg class="graph" viewBox="0 0 {} {}" width="{}" height="{}"><title>{}</title>{}</svg>'
    ).format(width, height, width, height, title, Markup("").join(drawn))


def _short(name: str) -> str:
    text = str(name)
    return text if len(text) <= 24 else f"…{text[-23:]}"
