"""The picture of a day in the guide: what it computes as Prometheus would, and of which metrics."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import day
from benchmarks.day import Look
from sqlq.metrics.collectors import OF_THE_DATABASE, OF_WORKERS


def test_the_picture_uses_existing_metrics() -> None:
    known = {metric.name for metric in (*OF_WORKERS, *OF_THE_DATABASE)}
    named = set(re.findall(r'"(sqlq_[a-z_]+)"', Path(day.__file__).read_text()))
    assert len(named) >= 5
    assert {name.removesuffix("_total") for name in named} <= known


def test_a_quantile_is_computed_from_increments() -> None:
    def look(*numbers: float) -> Look:
        bounds = ("0.1", "1.0", "+Inf")
        return Look(
            0.0,
            {("w_bucket", frozenset({("le", le)})): n for le, n in zip(bounds, numbers, strict=True)},
        )

    assert day.quantile(look(100, 100, 100), look(105, 110, 110), 0.5, "w") == 0.1
    assert day.quantile(look(100, 100, 100), look(100, 110, 110), 0.5, "w") == 0.55
    assert day.quantile(look(1, 1, 1), look(1, 1, 2), 0.99, "w") == 1.0
