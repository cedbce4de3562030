"""The plots for the docs: bars of subjects, curves of growth. Text stays text in the SVGs, so that they stay
small and readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.measures import EVERY_DATABASE
from benchmarks.report import Report

BARS = {
    "drain": ("rate", "jobs per second"),
    "enqueue-one": ("rate", "jobs per second"),
    "latency": ("p50", "ms until the handler starts, p50"),
}
COLOURS = {"sqlq": "#1f6f54", "sqlq-async": "#3f9f7a", "limit": "#b8b8b8", "lean": "#d8d8d8"}
PEER_COLOUR = "#7d93b2"
PROCESSES = {"1 process": 1, "2 processes": 2, "8 processes": 8, "24 processes": 24}
HOSTS = {
    "1 process": 1,
    "8 hosts": 8,
    "24 hosts": 24,
    "100 hosts, simulated": 100,
    "1,000 hosts, simulated": 1_000,
}
DAY_SECONDS = 86_400
LIMITS = {
    "processor of two cores: 41,400 jobs/s": (None, "in batches", 41_400),
    "log: 100 MB/s": ("log", "in batches", 100e6),
    "autovacuum: 50,000 rows/s": ("dead", "in batches", 50_000),
    "commits of single jobs: 5,000/s": ("commits", "one by one", 5_000),
}
"""For the plot of a day: the figure of a job, its case, and how much of it a server takes in a second. The
last three are examples."""
SIZES = {
    "nothing": 1,
    "10⁴ available": 10**4,
    "10⁵ available": 10**5,
    "10⁶ available": 10**6,
    "3·10⁶ available": 3 * 10**6,
}


def draw(report: Report, folder: Path) -> None:
    """Draw what was measured; needs matplotlib, which the extra `bench` brings."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no plots: matplotlib is missing (pip install 'sqlq-jobs[bench]')")
        return
    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sqlq", "font.size": 9})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    for measure, (figure, label) in BARS.items():
        _bars(report, folder, measure, figure, label)
    _growth(report, folder)
    _fleet(report, folder)
    _day(report, folder)


def _bars(report: Report, folder: Path, measure: str, figure: str, label: str) -> None:
    from matplotlib.figure import Figure

    by_database: dict[str, list[tuple[str, list[float]]]] = {}
    for (name, database, case, f), values in report.values.items():
        if (name, f) == (measure, figure) and not report.broken.get((name, database, case)):
            by_database.setdefault(database, []).append((case, values))
    if not by_database:
        return
    heights = [len(cases) for cases in by_database.values()]
    drawing = Figure(figsize=(7, 0.35 * sum(heights) + 0.8 * len(heights)), layout="constrained")
    axes: Any = drawing.subplots(len(by_database), 1, squeeze=False, height_ratios=heights, sharex=True)
    for ax, (database, cases) in zip(axes[:, 0], by_database.items(), strict=True):
        for place, (case, values) in enumerate(cases):
            middle = sorted(values)[len(values) // 2]
            ax.barh(place, middle, color=COLOURS.get(case, PEER_COLOUR))
            ax.plot([min(values), max(values)], [place, place], color="#333333", linewidth=1)
            ax.annotate(
                f" {middle:,.0f}" if middle >= 100 else f" {middle:.2f}", (max(values), place), va="center"
            )
        ax.set_yticks(range(len(cases)), [case for case, _ in cases])
        ax.invert_yaxis()
        ax.margins(x=0.1)  # room for the numbers
        ax.set_title(database, loc="left", fontweight="bold")
    axes[-1, 0].set_xlabel(label)
    drawing.savefig(folder / f"{measure}.svg", metadata={"Date": None})


def _growth(report: Report, folder: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 3), layout="constrained")
    rate, claim = drawing.subplots(1, 2)
    drawn = False
    for database in EVERY_DATABASE:
        for ax, figure in ((rate, "rate"), (claim, "claim p99")):
            found = {n: report.medians.get("growth", database, case, figure) for case, n in SIZES.items()}
            points = [(n, value) for n, value in found.items() if value is not None]
            if points:
                drawn = True
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=database)
    if not drawn:
        return
    for ax, title in ((rate, "drained jobs per second"), (claim, "claim of 10, p99 in ms")):
        ax.set_xscale("log")
        ax.set_ylim(bottom=0)
        ax.set_title(title, loc="left")
        ax.set_xlabel("jobs available beside")
        ax.legend(frameon=False)
    drawing.savefig(folder / "growth.svg", metadata={"Date": None})


def _fleet(report: Report, folder: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 5), layout="constrained")
    figures = {
        "transactions": "transactions a second at rest",
        "lone": "transactions a lone job",
        "p50": "ms until a lone job starts, p50",
        "rate": "drained jobs per second",
    }
    drawn = False
    for ax, (figure, title) in zip(drawing.subplots(2, 2).flat, figures.items(), strict=True):
        for label, cases in (("processes of one host", PROCESSES), ("hosts of one process", HOSTS)):
            found = {n: report.medians.get("fleet", "postgresql", case, figure) for case, n in cases.items()}
            points = [(n, value) for n, value in found.items() if value is not None]
            if points:
                drawn = True
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        ax.set_xscale("log")
        if figure == "rate":
            ax.set_ylim(bottom=0)
        else:
            ax.set_yscale("log")
        ax.set_title(title, loc="left")
    if not drawn:
        return
    drawing.axes[0].legend(frameon=False)
    drawing.savefig(folder / "fleet.svg", metadata={"Date": None})


def _day(report: Report, folder: Path) -> None:
    """Draw the share of each limit that so many jobs a day use."""
    from matplotlib.figure import Figure

    values = {
        (case, figure): found[0]
        for (name, _, case, figure), found in report.values.items()
        if name == "weight" and found
    }
    if not values:
        return
    figure = Figure(figsize=(7.2, 3.4))
    axes = figure.add_subplot()
    a_day = [10**n for n in (6, 7, 8, 9, 10)]
    for label, (name, case, limit) in LIMITS.items():
        each = {
            None: 1.0,
            "log": values[case, "wal enqueue"] + values[case, "wal run"],
            "dead": values[case, "dead"],
            "commits": values[case, "commits"] + 1,
        }[name]
        axes.plot(a_day, [100 * jobs / DAY_SECONDS * each / limit for jobs in a_day], label=label)
    axes.axhline(100, color="#b8b8b8", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="jobs a day", ylabel="% of what the server takes", ylim=(0.01, 1e4)
    )
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "day.svg", metadata={"Date": None})
