"""The load of the dashboard's pages on the database, beside few and many rows, and beside a busy worker."""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter, sleep

import psutil
import psycopg
from sqlalchemy import event
from werkzeug.test import Client

import sqlq.web
from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, Medians, Target, ratio
from benchmarks.measures.growth import Beside, fill
from benchmarks.peers import find
from benchmarks.servers import Place

FEW, MANY = "10⁴ waiting, 10⁵ finished, 10³ failed", "10⁶ waiting, 10⁷ finished, 10⁵ failed"
CASES = {FEW: Beside(10**4, finished=10**5, failed=10**3), MANY: Beside(10**6, finished=10**7, failed=10**5)}
PAGES = {"overview": "/", "jobs": "/jobs", "failed": "/jobs?state=failed", "search": "/jobs?text=nowhere"}
PAGES |= {"failures": "/failures", "queues": "/queues"}
BY_HAND = "SELECT id, queue, task, payload, priority, available_at FROM jobs ORDER BY id DESC LIMIT 50"
LOOKS, REFRESH_SECONDS = 5, 3.0


class Viewer:
    """Somebody who looks: the seconds of each statement, and the processes of the server that answer them."""

    def __init__(self, url: str) -> None:
        self.app = sqlq.App(url)
        self.site = sqlq.web.wsgi(self.app, authorize=lambda request: sqlq.web.User("ada"))
        self.browser, self.pids = Client(self.site), set[int]()
        took = self.took = list[float]()
        engine = self.site.reading.app.database.engine
        event.listen(engine, "connect", lambda conn, record: self.pids.add(conn.info.backend_pid))
        event.listen(engine, "before_cursor_execute", lambda *given: took.append(-perf_counter()))
        event.listen(engine, "after_cursor_execute", lambda *given: took.append(took.pop() + perf_counter()))

    def look(self, path: str) -> None:
        if self.browser.get(path).status_code != 200:
            raise RuntimeError(f"{path} is not shown")


def dashboard(bench: Bench, database: str, case: str) -> dict[str, float]:
    with bench.place(find("sqlq"), database) as place:
        fill(place, CASES[case], bench.size.growth, 0, 0)
        place.rest()
        viewer, figures = Viewer(place.url), {"by hand": _by_hand(place)}
        for page, path in PAGES.items():
            found = []
            for _ in range(1 + LOOKS):  # the first one connects, and reads each traceback
                viewer.site.reading.forget()
                viewer.took.clear()
                viewer.look(path)
                found.append(sum(viewer.took))
            figures |= {page: median(found[1:]) * 1e3, f"{page} sends": len(viewer.took)}
        if case == MANY:
            figures["share"] = _share(bench, place, viewer)
        viewer.app.close()
    return figures


def _by_hand(place: Place) -> float:
    took = []
    with psycopg.connect(place.url, autocommit=True) as conn:
        for _ in range(1 + LOOKS):
            began = perf_counter()
            conn.execute(BY_HAND).fetchall()
            took.append(perf_counter() - began)
    return median(took[1:]) * 1e3


def _share(bench: Bench, place: Place, viewer: Viewer) -> float:
    """Return the part of the server's processor time that an open overview takes, in percent."""
    waiting = int(CASES[MANY].available * bench.size.growth)
    server = psutil.Process(psutil.Process(next(iter(viewer.pids))).ppid())
    with bench.workers(find("sqlq"), place, options=("-q", "default")) as workers:
        workers.wait_for(lambda: workers.calls.count() > 0, "at the first job")
        viewer.site.reading.forget()
        until, before = perf_counter() + 2 * bench.size.idle_seconds, _processor_seconds(server)
        while perf_counter() < until and workers.calls.count() < waiting:
            viewer.look("/")
            sleep(min(REFRESH_SECONDS, bench.size.idle_seconds))
        spent = {pid: took - before.get(pid, 0.0) for pid, took in _processor_seconds(server).items()}
    return 100 * sum(spent[pid] for pid in viewer.pids & spent.keys()) / max(0.01, sum(spent.values()))


def _processor_seconds(server: psutil.Process) -> dict[int, float]:
    return {each.pid: sum(each.cpu_times()[:2]) for each in server.children(recursive=True)}


def _grown(page: str, medians: Medians) -> float | None:
    return ratio(*(medians.get("dashboard", "postgresql", case, page) for case in (MANY, FEW)))


GROWTH = [Target("postgresql", MANY, f"{page}, of few rows", partial(_grown, page), most=3) for page in PAGES]
SHARE = Target("postgresql", MANY, "share", lambda m: m.get("dashboard", "postgresql", MANY, "share"), most=1)
MEASURES = [
    Measure(
        "dashboard",
        "The dashboard: what its pages cost the database",
        "SQL time and statements of each page that nobody has seen of late; a SELECT of 50 jobs by hand; the "
        "part of the server's processor time for an overview that stays open beside a busy worker.",
        {"by hand": Figure("ms", more_is_better=False, decimals=2)}
        | {page: Figure("ms", more_is_better=False, decimals=1) for page in PAGES}
        | {f"{page} sends": Figure("", more_is_better=False) for page in PAGES}
        | {"share": Figure("%", more_is_better=False, decimals=2)},
        dashboard,
        lambda bench, asked: [("postgresql", case) for case in CASES],
        [*GROWTH, SHARE],
        subjects=False,
        rounds=1,
    )
]
