"""The counts of the workers of one `sqlq work`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client.registry import Collector

from sqlq.metrics import names
from sqlq.metrics.families import histogram, number, numbers, version
from sqlq.metrics.names import Described
from sqlq.worker.report import meter
from sqlq.worker.report.meter import Totals

_COUNTS = {
    meter.ATTEMPTS: names.ATTEMPTS,
    meter.FAILED: names.FAILED,
    meter.CLAIMED: names.CLAIMED,
}
_TIMES = {
    meter.RUN: names.RUN,
    meter.WAIT: names.WAIT,
    meter.SETTLE: names.SETTLE,
    meter.CLAIM: names.CLAIM,
}


class Supervises(Protocol):
    """The part of the supervisor that metrics need."""

    @property
    def slots(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def lost(self) -> int: ...


class WorkCollector(Collector):
    """Shows the totals of all children, and how many there are."""

    def __init__(self, totals: Totals, supervisor: Supervises) -> None:
        self._totals = totals
        self._supervisor = supervisor

    def collect(self) -> Iterator[Any]:
        found, supervisor = self._totals.now(), self._supervisor
        for what, metric in _COUNTS.items():
            yield numbers(metric, [(key[1:], n) for key, n in found.counts.items() if key[0] == what])
        for what, metric in _TIMES.items():
            yield histogram(
                metric, [(key[1:], *times) for key, times in found.times.items() if key[0] == what]
            )
        told: tuple[tuple[Described, int], ...] = (
            (names.SLOTS, supervisor.slots),
            (names.SLOTS_BUSY, supervisor.running),
            (names.PROCESSES, supervisor.ready),
            (names.PROCESSES_LOST, supervisor.lost),
        )
        for metric, value in told:
            yield number(metric, value)
        yield version(names.VERSION)
