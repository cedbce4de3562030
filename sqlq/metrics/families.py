"""Turns counts and times into metric families of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from sqlq.config.command_hint import escaped
from sqlq.config.constants import VERSION as SQLQ
from sqlq.metrics.names import VERSION, Described
from sqlq.worker.report.meter import BOUNDS

Labelled = Iterable[tuple[Sequence[str], float]]


def numbers(metric: Described, values: Labelled) -> Any:
    """Return a counter or gauge with a value for each tuple of labels."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values:
        family.add_metric([shown(label) for label in labels], value)
    return family


def number(metric: Described, value: float) -> Any:
    """Return a counter or gauge without labels."""
    return numbers(metric, [((), value)])


def version() -> Any:
    return numbers(VERSION, [((SQLQ,), 1)])


def histogram(metric: Described, values: Iterable[tuple[Sequence[str], Sequence[float], float]]) -> Any:
    """Return a histogram of times: labels, the number in each bucket, and their sum."""
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*map(str, BOUNDS), "+Inf"]
    for labels, buckets, seconds in values:
        up_to = list(zip(bounds, accumulate(buckets), strict=True))
        family.add_metric([shown(label) for label in labels], up_to, seconds)
    return family


def shown(label: str) -> str:
    """Return a name that UTF-8 can carry and that steers no terminal: a row may hold anything."""
    return escaped(label)  # guard: labels-steer-no-terminal
