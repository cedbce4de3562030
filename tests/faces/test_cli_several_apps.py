"""`sqlq -a shop:apps` where that is a mapping of several Apps, each with a database of its own."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sqlq.worker.supervise import fleet as fleets
from sqlq.worker.supervise.fleet import Fleet
from tests.faces.command import Command
from tests.kit import for_each
from tests.preloaded import Forked, preloaded
from tests.waiting import wait_until

SHARDS = """
import sqlq

def app_of(name):
    app = sqlq.App(f"sqlite:///{name}.db")

    @app.task(name="greet")
    def greet(whom):
        with open("greeted", "a") as file:
            file.write(f"{name} {whom}\\n")

    return app

apps = {name: app_of(name) for name in ("eu", "us", "shop.example.com")}
same = {"eu": apps["eu"], "us": apps["eu"]}
spaced = {"e u": apps["eu"]}
numbers = {"eu": 7}
empty = {}

def made():
    return apps
"""


@pytest.fixture
def shards(tmp_path: Path) -> Command:
    run = Command(tmp_path)
    (tmp_path / "shards.py").write_text(SHARDS)
    return run


def greeted(run: Command) -> list[str]:
    file = run.directory / "greeted"
    return sorted(file.read_text().splitlines()) if file.exists() else []


@contextmanager
def working(run: Command, *options: str) -> Iterator[Forked]:
    """Serve all Apps meanwhile; the log is in worker.log."""
    with (run.directory / "worker.log").open("w") as log:
        process = preloaded().start(
            ["-a", "shards:apps", "work", *options], run.directory, run.environment, log, log
        )
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(60) == 0, (run.directory / "worker.log").read_text()


def test_one_worker_serves_each_app_of_a_mapping(shards: Command) -> None:
    run = shards
    assert "\nApp us\ncreated sqlq's tables" in run.ok("migrate", "-a", "shards:apps")
    for name in ("eu", "us", "shop.example.com"):
        run.ok("enqueue", "-a", f"shards:apps.{name}", "greet", "Ada")
    done = run("work", "-a", "shards:apps", "--drain")
    assert done.code == 0, done
    assert greeted(run) == ["eu Ada", "shop.example.com Ada", "us Ada"]
    for name in ("eu", "us", "shop.example.com"):
        assert re.search(rf"^{name} \| .* job 1 greet .* finished in", done.err, re.MULTILINE), done.err
    assert "stopped: 3 completed in" in done.err
    assert run.ok("jobs", "-a", "shards:made().us").count("finished") == 1


def test_an_app_without_tables_does_not_stop_the_jobs_of_others(shards: Command) -> None:
    run = shards
    for name in ("eu", "shop.example.com"):  # us has no tables
        run.ok("migrate", "-a", f"shards:apps.{name}")
    run.ok("enqueue", "-a", "shards:apps.eu", "greet", "Ada")
    done = run("work", "-a", "shards:apps", "--drain")
    assert done.code == 1
    assert greeted(run) == ["eu Ada"]
    status = run("status", "-a", "shards:apps")
    assert status.code == 1
    assert re.search(r"App us\n.*us\.db.*sqlq migrate -a shards:apps\.us", status.out), status.out
    assert "App shop.example.com\nno jobs wait" in status.out
    shown = run("status", "-a", "shards:apps", "--json")
    assert shown.code == 1
    assert '"us": {\n      "error": ' in shown.out
    check = run("migrate", "-a", "shards:apps", "--check")
    assert check.code == 1
    assert "App eu\n" in check.out


def test_metrics_name_the_app(shards: Command) -> None:
    run = shards
    run.ok("migrate", "-a", "shards:apps.eu")
    run.ok("enqueue", "-a", "shards:apps.eu", "greet", "Ada")
    shown = run.ok("metrics", "-a", "shards:apps")
    assert 'sqlq_jobs{app="eu",queue="default",state="available"} 1.0' in shown
    assert 'sqlq_database_up{app="us"} 0.0' in shown
    assert shown.count("# TYPE sqlq_database_up gauge") == 1


def test_a_supervisor_names_the_app_when_its_worker_dies(shards: Command) -> None:
    run = shards
    run.ok("migrate", "-a", "shards:apps")
    with working(run):
        log = run.directory / "worker.log"
        wait_until(lambda: len(re.findall("working on ", log.read_text())) == 3)
        (pid,) = re.findall(r" pid (\d+)", run.ok("workers", "-a", "shards:apps.us"))
        os.kill(int(pid), signal.SIGKILL)
        death = re.compile(rf"^us \| .* worker process {pid} was killed by signal 9", re.MULTILINE)
        wait_until(lambda: death.search(log.read_text()))


def test_status_lists_other_apps_when_one_server_is_down(shards: Command) -> None:
    run = shards
    down = 'apps = {"down": sqlq.App("postgresql+psycopg://127.0.0.1:1/down"), "eu": apps["eu"]}'
    (run.directory / "some.py").write_text(f"import sqlq\nfrom shards import apps\n{down}\n")
    run.ok("migrate", "-a", "shards:apps.eu")
    status = run("status", "-a", "some:apps")
    assert status.code == 1
    assert re.search("App down\n.*refused", status.out), status.out
    assert "App eu\nno jobs wait" in status.out


def test_a_worker_shares_its_health_file_and_its_metrics(shards: Command) -> None:
    run = shards
    run.ok("migrate", "-a", "shards:apps")
    with working(run, "--health-file", "health", "--metrics-port", "0"):
        run.ok("enqueue", "-a", "shards:apps.us", "greet", "Ada")
        wait_until(lambda: greeted(run) == ["us Ada"], timeout=60, what="the job")
        wait_until((run.directory / "health").exists, timeout=60, what="the health file")
        run.ok("health", "health")
        (url,) = re.findall(r"metrics at (http\S+)", (run.directory / "worker.log").read_text())

        def scraped() -> str:
            from urllib.request import urlopen

            with urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())

        counted = 'sqlq_attempts_total{app="us",outcome="finished",queue="default",task="greet"} 1.0'
        wait_until(lambda: counted in scraped(), timeout=60, what="the count")
        assert 'sqlq_processes{app="eu"} 1.0' in scraped()


@for_each(
    ("app", "sentence"),
    [
        (
            "shards:apps",
            "is a mapping of 3 Apps: name one, as in --app shards:apps.eu; they are eu, us, shop",
        ),
        ("shards:apps.mars", "there is no App 'mars'; there are eu, us, shop.example.com"),
        ("shards:same", "--app shards:same has the same App as 'eu' and as 'us'"),
        ("shards:spaced", "an App is named 'e u'; a name is text without spaces, colons and brackets"),
        ("shards:numbers", "'eu' is of type int, no sqlq.App"),
        ("shards:empty", "--app shards:empty is a mapping without an App"),
    ],
)
def test_a_mapping_that_cannot_be_used_is_reported_in_one_sentence(
    shards: Command, app: str, sentence: str
) -> None:
    assert sentence in shards("jobs", "-a", app).sentence()


def test_a_url_goes_with_one_app(shards: Command) -> None:
    said = shards("status", "-a", "shards:apps", "-d", "sqlite:///eu.db").sentence()
    assert said.endswith("leave out -d, or name one App, as in --app shards:apps.eu")


# -- the supervisors -----------------------------------------------------------------------------------------


class FakeSupervisor:
    """Runs until a test sets its exit code."""

    def __init__(self, apps: list[str] | None = None) -> None:
        self.apps = apps
        self.ready_since: float | None = None
        self.is_well, self.idle_ms, self.running = True, 0.0, 0
        self.tally: Counter[str] = Counter()
        self.calls: list[str] = []
        self._code = 0
        self._over = threading.Event()
        if apps is not None:
            self._over.set()

    def ends(self, code: int) -> None:
        self._code = code
        self._over.set()

    def run(self) -> int:
        assert self._over.wait(60)
        return self._code

    def stop(self) -> None:
        self.calls.append("stop")
        self._over.set()

    def pause(self) -> None:
        self.calls.append("pause")


class Fakes:
    """Makes the supervisors of two Apps, and keeps all it made."""

    def __init__(self) -> None:
        self.made: dict[str, list[FakeSupervisor]] = {"eu": [], "us": []}

    def __call__(self, app: str | None) -> Any:
        if app is None:
            return FakeSupervisor(["eu", "us"])
        self.made[app].append(FakeSupervisor())
        return self.made[app][-1]


@contextmanager
def running(fleet: Fleet) -> Iterator[Callable[[], int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(fleet.run()), daemon=True)
    thread.start()

    def code() -> int:
        thread.join(60)
        return codes[0]

    yield code
    fleet.stop()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setattr(fleets, "RESTART_SECONDS", 0.01)
    return Fakes()


def both(fakes: Fakes) -> bool:
    return all(fakes.made.values())


def test_workers_that_end_with_an_error_start_again_while_others_work(fakes: Fakes) -> None:
    fleet = Fleet(fakes)
    with running(fleet) as code:
        wait_until(lambda: both(fakes), what="both")
        fakes.made["eu"][0].ready_since = 1.0
        fakes.made["us"][0].tally["completed"] = 3
        fakes.made["us"][0].ends(1)
        wait_until(lambda: len(fakes.made["us"]) == 2, what="another one")
        assert fleet.tally["completed"] == 3
        fleet.pause()
        fakes.made["us"][1].ends(1)
        wait_until(lambda: len(fakes.made["us"]) == 3, what="the next one")
        wait_until(lambda: "pause" in fakes.made["us"][2].calls, what="its pause")
        fleet.stop()
        assert code() == 0


def test_a_stop_starts_no_workers_again(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "RESTART_SECONDS", 600.0)
    fleet = Fleet(fakes)
    with running(fleet) as code:
        wait_until(lambda: both(fakes), what="both")
        fakes.made["us"][0].ends(1)
        wait_until(lambda: "us" not in (fleet.apps() or {}), what="the end of one")
        fleet.stop()
        assert code() == 1
    assert len(fakes.made["us"]) == 1


def test_supervisors_that_all_fail_to_start_end_with_their_exit_code(fakes: Fakes) -> None:
    with running(Fleet(fakes)) as code:
        wait_until(lambda: both(fakes), what="both")
        fakes.made["eu"][0].ends(2)
        fakes.made["us"][0].ends(1)
        assert code() == 2
    assert len(fakes.made["us"]) == 1


def test_supervisors_stop_when_all_apps_are_idle(fakes: Fakes) -> None:
    with running(Fleet(fakes, max_idle_ms=1_000)) as code:
        wait_until(lambda: both(fakes), what="both")
        fakes.made["eu"][0].idle_ms = 5_000.0
        assert not fakes.made["eu"][0].calls
        fakes.made["us"][0].idle_ms = 1_000.0
        assert code() == 0
    assert "stop" in fakes.made["eu"][0].calls


@pytest.mark.parametrize(("well", "is_young"), [((True, True), True), ((True, False), False)])
def test_the_health_file_is_touched_while_every_app_is_well(
    fakes: Fakes, well: tuple[bool, bool], is_young: bool
) -> None:
    told: list[bool] = []
    health: Any = SimpleNamespace(tick=lambda *, is_well: told.append(is_well))
    with running(Fleet(fakes, health_file=health)):
        wait_until(lambda: both(fakes), what="both")
        fakes.made["eu"][0].is_well, fakes.made["us"][0].is_well = well
        told.clear()
        wait_until(lambda: len(told) > 2, what="ticks that began after this")
        assert told[-1] is is_young
