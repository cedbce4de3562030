"""The counts of the workers of one `sqlq work`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector

from sqlq.metrics import names
from sqlq.metrics.families import histogram, number, numbers, version

if TYPE_CHECKING:
    from sqlq.worker.supervise.supervisor import Supervisor


@dataclass(eq=False)
class WorkCollector(Collector):
    """Shows the totals of all children, and their number."""

    _supervisor: Supervisor

    def collect(self) -> Iterator[Any]:
        supervisor = self._supervisor
        if supervisor.totals is None:
            return
        counts, times = supervisor.totals.now()
        now = {
            names.SLOTS: supervisor.slots,
            names.SLOTS_BUSY: supervisor.running,
            names.PROCESSES: supervisor.ready,
            names.PROCESSES_LOST: supervisor.lost,
        }
        for metric in names.OF_WORKERS:
            if metric in now:
                yield number(metric, now[metric])
            elif metric.kind == "histogram":
                yield histogram(metric, [(key[1:], *of) for key, of in times.items() if key[0] == metric.key])
            elif metric.kind == "counter":
                yield numbers(metric, [(key[1:], n) for key, n in counts.items() if key[0] == metric.key])
        yield version()
