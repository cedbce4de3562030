"""The measures.

Each measure is a list of cases, run in turn in every round, and the targets that its medians should reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.bench import Bench
from benchmarks.peers import OURS, PEERS


@dataclass(frozen=True)
class Figure:
    """A number that a case gives."""

    unit: str
    more_is_better: bool = True
    decimals: int = 0


class Medians:
    """The medians of a run by measure, database, case and figure; None where there is none."""

    def __init__(self, values: dict[tuple[str, str, str, str], float]) -> None:
        self._values = values

    def get(self, measure: str, database: str, case: str, figure: str) -> float | None:
        return self._values.get((measure, database, case, figure))

    def best_peer(
        self, measure: str, database: str, figure: str, *, more_is_better: bool = True
    ) -> float | None:
        """The best of the peers on this kind of database."""
        found = [
            value
            for (m, d, case, f), value in self._values.items()
            if (m, d, f) == (measure, database, figure) and case in PEERS
        ]
        return (max if more_is_better else min)(found) if found else None


@dataclass(frozen=True)
class Target:
    """The target of a case.

    `value` takes the figure to compare from the medians. It is None where a median is missing.
    """

    database: str
    case: str
    text: str
    value: Callable[[Medians], float | None]
    least: float | None = None
    most: float | None = None

    def reached(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


@dataclass(frozen=True)
class Measure:
    """One thing that is measured, `run` for one case on one kind of database; it returns the figures or
    raises."""

    name: str
    title: str
    what: str
    figures: dict[str, Figure]
    run: Callable[[Bench, str, str], dict[str, float]]
    cases: Callable[[Bench, tuple[str, ...]], list[tuple[str, str]]]
    """Return pairs of database and case, from the bench and the requested peers."""
    targets: list[Target] = field(default_factory=list)
    smoke: Callable[[str, str], bool] = lambda database, case: case != "sqlq-async"
    """Which cases the smoke version has, by database and case."""
    subjects: bool = True
    """Whether its cases are subjects, so that they can be compared with the limit and the peers."""
    rounds: int | None = None
    """How many rounds at most: what takes minutes is not repeated as often as the others."""


EVERY_DATABASE = ("postgresql", "sqlite", "mariadb")


def subjects(
    *,
    databases: tuple[str, ...] = ("postgresql", "sqlite"),
    ours: tuple[str, ...] = OURS,
    peers: bool = True,
    many: bool = False,
) -> Callable[[Bench, tuple[str, ...]], list[tuple[str, str]]]:
    """Return the cases of a measure of subjects: ours on each database, and the peers where they are at
    home."""

    def cases(bench: Bench, asked: tuple[str, ...]) -> list[tuple[str, str]]:
        from benchmarks.peers import find

        found = [
            (database, name) for database in databases for name in ours if database in find(name).databases
        ]
        for name in asked if peers else ():
            subject = find(name)
            if many and not subject.many:
                continue
            # the references on Redis stand beside PostgreSQL
            found += [
                (database, name)
                for database in subject.databases
                if database in databases or database == "redis"
            ]
        return found

    return cases


def load() -> list[Measure]:
    """Return all measures, in the order of the report."""
    from benchmarks.measures import (
        dashboard,
        drain,
        enqueue,
        features,
        fleet,
        flood,
        growth,
        hoarding,
        idle,
        latency,
        moments,
        overhead,
        recovery,
        rescue,
        results,
        snapshot,
        trace,
        waiting,
        weight,
    )

    rooms = (
        *(enqueue, drain, latency, results, trace, moments, idle, growth, snapshot, overhead, hoarding),
        *(recovery, rescue, flood, features, fleet, weight, waiting, dashboard),
    )
    return [measure for room in rooms for measure in room.MEASURES]
