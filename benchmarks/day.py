"""A day squeezed into a minute, looked at through the two endpoints of metrics as Prometheus would.

    python -m benchmarks.day [--seconds 60] [--url URL] [--out docs/img/day.svg]

The load has two peaks, as that of a shop. In the afternoon a task fails for a while, and a worker process is
killed. All that is drawn was scraped.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

import sqlq

HOURS: Final = 24
FAILS: Final = (14.0, 16.0)
DIES: Final = 18.0
PEAK: Final = 120.0
"""Jobs a second where the day is busiest."""
LOOKS_A_DAY: Final = 96
SHOP: Final = """
import os, signal, time
from pathlib import Path
import sqlq

app = sqlq.App()

@app.task(name="shop.send_receipt", queue="mail")
def send_receipt(order_id: int) -> None:
    time.sleep(0.02)

@app.task(name="shop.charge", queue="cards", max_attempts=2, backoff="1s")
def charge(order_id: int) -> None:
    time.sleep(0.05)
    if Path("bank_is_away").exists():
        raise ConnectionError("the bank does not answer")

@app.task(name="shop.die", queue="cards", max_attempts=1)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Look(NamedTuple):
    hour: float
    found: Samples


def load(hour: float) -> float:
    """Return how many jobs a second come at this hour: little at night, peaks at eleven and at eight."""
    bump = sum(height * math.exp(-(((hour - at) / 2.2) ** 2)) for at, height in ((11.0, 1.0), (20.0, 0.8)))
    return PEAK * (0.04 + 0.96 * min(1.0, bump))


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=30) as answer:
        said = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(said)
        for sample in family.samples
    }


@contextmanager
def started(directory: Path, url: str, *args: str) -> Iterator[str]:
    """Run a command of sqlq that serves metrics; yields where."""
    said = directory / f"{args[0]}.log"
    environment = {**os.environ, "SQLQ_DATABASE_URL": url, "PYTHONUNBUFFERED": "1", "SQLQ_APP": "shop:app"}
    with (
        said.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-m", "sqlq", *args], cwd=directory, env=environment, stdout=out, stderr=out
        ) as process,
    ):
        try:
            while not (at := re.search(r"http://[\d.]+:(\d+)/metrics", said.read_text())):
                if process.poll() is not None:
                    sys.exit(said.read_text())
                time.sleep(0.05)
            yield f"http://127.0.0.1:{at[1]}/metrics"
        finally:
            process.terminate()


def run(directory: Path, url: str, seconds: float) -> list[Look]:
    """Let the day pass; return what was scraped, four times in an hour."""
    (directory / "shop.py").write_text(SHOP)
    app = sqlq.App(url)
    app.migrate()
    looks: list[Look] = []
    with ExitStack() as stack:
        work = stack.enter_context(started(directory, url, "work", "-c", "4", "--metrics-port", "0"))
        database = stack.enter_context(started(directory, url, "metrics", "--port", "0"))
        began = time.monotonic()
        owed, last, died, orders = 0.0, 0.0, False, count()
        while (hour := (time.monotonic() - began) / seconds * HOURS) < HOURS:
            away = directory / "bank_is_away"
            if FAILS[0] <= hour < FAILS[1]:
                away.touch()
            else:
                away.unlink(missing_ok=True)
            if hour >= DIES and not died:
                died = True
                app.enqueue(app.named("shop.die").new().set(queue="cards", max_attempts=1))
            owed += load(hour) * (hour - last) / HOURS * seconds
            last, due = hour, int(owed)
            owed -= due
            receipt, charge = app.named("shop.send_receipt"), app.named("shop.charge")
            app.enqueue_many(
                charge.new(n).set(queue="cards", max_attempts=2, backoff="1s")
                if n % 3 == 0
                else receipt.new(n).set(queue="mail")
                for n in islice(orders, due)
            )
            if hour >= len(looks) * HOURS / LOOKS_A_DAY:
                looks.append(Look(hour, scrape(work) | scrape(database)))
            time.sleep(seconds / HOURS / 40)
    app.close()
    return looks


# -- what Prometheus would make of it ------------------------------------------------------------------------


def total(look: Look, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(number for (named, has), number in look.found.items() if named == name and wanted <= has)


def rate(looks: Sequence[Look], seconds: float, name: str, **labels: str) -> list[float]:
    """Return by how much a counter rose in a second, between one look and the next."""
    return [
        (total(after, name, **labels) - total(before, name, **labels))
        / ((after.hour - before.hour) / HOURS * seconds)
        for before, after in pairwise(looks)
    ]


def quantile(before: Look, after: Look, q: float, name: str) -> float:
    """Return a quantile of what a histogram gained, as histogram_quantile() does."""
    gained: dict[float, float] = {}
    for look, sign in ((after, 1), (before, -1)):
        for (named, has), number in look.found.items():
            if named == f"{name}_bucket":
                bound = float(dict(has)["le"])
                gained[bound] = gained.get(bound, 0.0) + sign * number
    bounds = sorted(gained)
    if not bounds or gained[bounds[-1]] <= 0:
        return math.nan
    wanted, below, lower = q * gained[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if gained[bound] >= wanted:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / max(1e-9, gained[bound] - below)
        below, lower = gained[bound], bound
    return lower


def draw(looks: Sequence[Look], seconds: float, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sqlq", "font.size": 9})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    drawing = Figure(figsize=(8, 6), layout="constrained")
    (attempts, waiting), (waits, slots) = drawing.subplots(2, 2, sharex=True)
    hours = [look.hour for look in looks[1:]]
    colours = {"finished": "#1f6f54", "retried": "#d9a441", "failed": "#b3423a"}
    outcomes = {name: rate(looks, seconds, "sqlq_attempts_total", outcome=name) for name in colours}
    attempts.stackplot(hours, *outcomes.values(), labels=list(outcomes), colors=list(colours.values()))
    attempts.set_title("attempts a second, by outcome", loc="left")
    for queue, colour in (("mail", "#1f6f54"), ("cards", "#7d93b2")):
        held = [total(look, "sqlq_jobs", queue=queue, state="available") for look in looks[1:]]
        waiting.plot(hours, held, color=colour, label=queue)
    waiting.set_title("available jobs, by queue", loc="left")
    pairs = list(pairwise(looks))
    for q, colour in ((0.5, "#1f6f54"), (0.99, "#7d93b2")):
        found = [1000 * quantile(*pair, q, "sqlq_wait_seconds") for pair in pairs]
        waits.plot(hours, found, color=colour, label=f"p{round(100 * q)}")
    waits.set_yscale("log")
    waits.set_title("ms until the start", loc="left")
    slots.plot(hours, [total(look, "sqlq_slots") for look in looks[1:]], color="#b8b8b8", label="slots")
    slots.plot(hours, [total(look, "sqlq_slots_busy") for look in looks[1:]], color="#1f6f54", label="busy")
    lost = [look.hour for before, look in pairs if _lost(look) > _lost(before)]
    for hour in lost:
        slots.axvline(hour, color="#b3423a", linewidth=1, linestyle=":", label="a process died")
    slots.set_title("slots", loc="left")
    for ax in (attempts, waiting, waits, slots):
        axes: Any = ax
        axes.legend(frameon=False, fontsize=8)
        axes.set_xlim(0, HOURS)
        axes.set_xticks(range(0, HOURS + 1, 4))
    for ax in (waits, slots):
        ax.set_xlabel("hour of the day")
    out.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(out, metadata={"Date": None})


def _lost(look: Look) -> float:
    return total(look, "sqlq_processes_lost_total")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a day squeezed into a minute, of what was scraped.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--url", help="an empty database; a SQLite file that is thrown away without it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "img" / "day.svg")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        looks = run(Path(directory), given.url or f"sqlite:///{directory}/day.db", given.seconds)
    draw(looks, given.seconds, given.out)
    last = looks[-1]
    outcomes = ("finished", "retried", "failed")
    ended = ", ".join(f"{total(last, 'sqlq_attempts_total', outcome=o):,.0f} {o}" for o in outcomes)
    print(f"{len(looks)} scrapes: {ended}; {_lost(last):.0f} worker process died; drawn in {given.out}")


if __name__ == "__main__":
    main()
