"""The counts of the workers of one `sqlq work`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector

from sqlq.metrics import names
from sqlq.metrics.families import histogram, number, numbers, version
from sqlq.metrics.names import Described
from sqlq.worker.report import meter

if TYPE_CHECKING:
    from sqlq.worker.supervise.supervisor import Supervisor

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


class WorkCollector(Collector):
    """Shows the totals of all children, and their number."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Any]:
        supervisor = self._supervisor
        if supervisor.totals is None:
            return
        found = supervisor.totals.now()
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
