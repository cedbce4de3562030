"""Where the time of one pick-up goes, stage by stage: from the call that enqueues a job to the first line of
its handler."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, subjects
from benchmarks.measures.latency import EVERY_MS, quantile, warm_up
from benchmarks.peers import find
from benchmarks.subject import NOOP
from benchmarks.tracing import TRACE

STAGES = {
    "call": "from the call to the INSERT that is sent",
    "insert": "to the answer: inserted, committed, and the hint given along",
    "return": "to the return of the call",
    "notice": "from the answer to the claim that takes it being sent, which may come first",
    "claim": "until that is answered: claimed, and committed",
    "start": "until the handler's first line",
}
WITHIN = {
    "hint": "of `notice`, until the worker hears of the job",
    "wake": "until its loop goes on",
    "prepare": "until the claim is sent",
    "hand-over": "of `start`, until a slot has the job",
    "begin": "until the handler's first line",
}
"""The stages that only sqlq has."""
WHOLE = "whole"
COLD = 5
"""The first jobs, which find no connection and cold caches, are left out."""


def trace(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    ticks = bench.size.ticks
    with bench.place(subject, database) as place, tempfile.TemporaryDirectory() as folder:
        more = {TRACE: folder}
        with bench.workers(subject, place, starts=ticks, more=more) as workers:
            warmed = warm_up(bench, name, place.url, workers)
            produced = bench.inside(subject, "traced", place.url, NOOP, ticks, EVERY_MS)
            workers.wait_for(lambda: workers.calls.count() >= ticks + warmed, "called for each job")
            workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
            bench.check(subject, place, workers, ticks + warmed)
            starts = workers.calls.starts()
            workers.stop()
        (noted,) = (
            noted
            for noted in (json.loads(file.read_text()) for file in Path(folder).glob("trace-*"))
            if noted.get("claimed")
        )
    found: dict[str, list[float]] = {stage: [] for stage in (*STAGES, *WITHIN, WHOLE)}
    for (called, sent, answered, returned), start in list(zip(produced, starts, strict=True))[COLD:]:
        taken = _last(noted["taken"], start) if "taken" in noted else None
        claimed = _last(noted["claimed"], taken or start)
        claiming = _last(noted["claiming"], claimed)
        moments = {
            "call": sent - called,
            "insert": answered - sent,
            "return": returned - answered,
            "notice": claiming - answered,
            "claim": claimed - claiming,
            "start": start - claimed,
            WHOLE: start - called,
        }
        if taken is not None:
            awake = _last(noted["awake"], claiming)
            hinted = _last(noted["hinted"], awake)
            moments |= {"prepare": claiming - awake, "hand-over": taken - claimed, "begin": start - taken}
            if hinted > called:  # else the worker has looked by itself
                moments |= {"hint": hinted - answered, "wake": awake - hinted}
        for stage, ns in moments.items():
            found[stage].append(ns / 1e6)
    return {
        f"{stage} p{percent}": quantile(values, percent)
        for stage, values in found.items()
        for percent in (50, 99)
        if len(values) > 1
    }


def _last(moments: list[int], until: int) -> int:
    """Return the last of these times that is not later; 0 where there is none."""
    place = bisect_right(moments, until)
    return moments[place - 1] if place else 0


def cases(bench: Bench, asked: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return sqlq on each database, and those peers whose inserts and claims can be noted."""
    all_of_them = subjects(ours=("sqlq",))(bench, asked)
    return [(database, name) for database, name in all_of_them if name == "sqlq" or find(name).traced]


MEASURES = [
    Measure(
        "trace",
        "One pick-up, stage by stage",
        f"One job each {EVERY_MS} ms, one idle worker: how long each stage takes. "
        + "; ".join(f"{stage}: {text}" for stage, text in (STAGES | WITHIN).items())
        + ". The stages of one job add up to the whole, but their medians need not.",
        {
            f"{stage} p{percent}": Figure("ms", more_is_better=False, decimals=2)
            for stage in (*STAGES, *WITHIN, WHOLE)
            for percent in (50, 99)
        },
        trace,
        cases,
    )
]
