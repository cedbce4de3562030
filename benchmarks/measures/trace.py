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

STAGES = {
    "call": "from the call to the INSERT that is sent",
    "insert": "to the answer: inserted, committed, and the hint given along",
    "return": "to the return of the call",
    "hint": "from the answer to the moment at which the worker hears of it, which may come first",
    "wake": "until its loop goes on",
    "prepare": "until the claim is sent",
    "claim": "until it is answered: claimed, and committed",
    "hand-over": "until a slot has the job",
    "begin": "until the handler's first line",
}
WHOLE = "whole"
COLD = 5
"""The first jobs, which find no connection and cold caches, are left out."""


def trace(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    ticks = bench.size.ticks
    with bench.place(subject, database) as place, tempfile.TemporaryDirectory() as folder:
        more = {"SQLQ_BENCHMARK_TRACE": folder}
        with bench.workers(subject, place, starts=ticks, more=more) as workers:
            warmed = warm_up(bench, name, place.url, workers)
            produced = bench.inside(subject, "traced", place.url, ticks, EVERY_MS)
            workers.wait_for(lambda: workers.calls.count() >= ticks + warmed, "called for each job")
            workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
            bench.check(subject, place, workers, ticks + warmed)
            starts = workers.calls.starts()
            workers.stop()
        (file,) = (file for file in Path(folder).glob("trace-*") if json.loads(file.read_text())["taken"])
        noted: dict[str, list[int]] = json.loads(file.read_text())
    found: dict[str, list[float]] = {stage: [] for stage in (*STAGES, WHOLE)}
    for (called, sent, answered, returned), start in list(zip(produced, starts, strict=True))[COLD:]:
        taken = _last(noted["taken"], start)
        claimed = _last(noted["claimed"], taken)
        claiming = _last(noted["claiming"], claimed)
        awake = _last(noted["awake"], claiming)
        hinted = _last(noted["hinted"], awake)
        moments = {
            "call": sent - called,
            "insert": answered - sent,
            "return": returned - answered,
            "prepare": claiming - awake,
            "claim": claimed - claiming,
            "hand-over": taken - claimed,
            "begin": start - taken,
            WHOLE: start - called,
        }
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
    """Return the last of these moments that is not later; 0 where there is none."""
    place = bisect_right(moments, until)
    return moments[place - 1] if place else 0


MEASURES = [
    Measure(
        "trace",
        "One pick-up, stage by stage",
        f"One job each {EVERY_MS} ms, one idle worker: how long each stage takes. "
        + "; ".join(f"{stage}: {text}" for stage, text in STAGES.items())
        + ". The stages of one job add up to the whole, but their medians need not.",
        {
            f"{stage} p{percent}": Figure("ms", more_is_better=False, decimals=2)
            for stage in (*STAGES, WHOLE)
            for percent in (50, 99)
        },
        trace,
        subjects(ours=("sqlq",), peers=False),
    )
]
