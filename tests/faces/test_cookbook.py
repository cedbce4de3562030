"""Recipes of the cookbook are run as they stand there; others in `transcripts/pages/recipe_*.txt`."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from tests.kit import for_each, wait_until, working
from tests.kit.pages import BLOCKS, COOKBOOK, PAGES, Desk, block, commands, run_python
from tests.kit.processes import reasons, worker_process
from tests.kit.service import Service


@pytest.fixture
def app(app: sqlq.App, engine: Engine) -> sqlq.App:
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    return app


def test_a_recipe_is_short_and_explains_its_safety() -> None:
    parts = PAGES[COOKBOOK].split("\n## ")[1:]
    assert len(parts) == 15
    for part in parts:
        assert "**Why it is safe.**" in part
        assert ".md#" in part or ".md)" in part
        assert part.count("\n") < 70, part.partition("\n")[0]
    assert {b.kind for b in BLOCKS if b.where.startswith("docs/cookbook.md")} == {"recipe"}


def test_a_recipe_keeps_the_rate_of_an_api(names: dict[str, Any], app: sqlq.App) -> None:
    with Service(429).serving() as crm:
        run_python("rate_limited_api", names, "recipe", **{"https://crm.example.com": crm.url})
        begin = time.monotonic()
        jobs = app.enqueue_many([names["update_contact"].new(id) for id in range(5)])
        with working(app):
            assert not app.wait_all(jobs, timeout="30s").pending
        assert time.monotonic() - begin > 0.5  # six starts, one each 0.1 s
        assert len(crm.requests) == 6
        assert {path for path, _, _ in crm.requests} == {f"/contacts/{id}" for id in range(5)}
    assert sorted(app.jobs.get(job.id).attempts for job in jobs) == [1] * 5


AGENT = """
import json, os, signal
from pathlib import Path
from types import SimpleNamespace
import sqlq
app = sqlq.App()

def service(name, value):
    def call(*args, idempotency_key):
        dies("before", idempotency_key)
        with open("calls", "a") as calls:
            print(idempotency_key, file=calls)
        dies("after", idempotency_key)
        return value
    return call

def dies(*moment):
    mark = Path(" ".join(moment))
    if mark.name.startswith(os.environ["DIES"]) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

model = SimpleNamespace(ask=service("ask", {"id": 7}))
shop = SimpleNamespace(find_parcel=service("find", ["P1"]))
carrier = SimpleNamespace(track=service("track", "Kyoto"))
mail = SimpleNamespace(send=service("mail", None))
desk = SimpleNamespace(is_approved=lambda *_: Path("approved").exists() or Path("approved").touch())
"""


@pytest.mark.integration
@for_each("moment", ["before", "after"])
def test_an_agent_killed_at_each_step_calls_each_once_more_at_most(
    app: sqlq.App, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / moment
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT + block("recipe", "agent").replace("1m", "0s"))
    monkeypatch.setenv("DIES", moment)
    job = app.enqueue(app.named("agent.answer").new("a ticket").set(queue="agents"))
    with worker_process(folder, "agent:app", database_url):
        wait_until(lambda: app.jobs.get(job.id).state == "finished", 60, what="the agent finished")
    done = app.jobs.get(job.id)
    assert done.result == "Your order {'id': 7} is in Kyoto."
    assert (done.attempts, reasons(done)) == (5, ["worker_lost"] * 4)
    names = [f"job-{job.id} {name}" for name in ("ask", "find the parcel", "track it", "mail")]
    times = 1 if moment == "before" else 2
    assert (folder / "calls").read_text().splitlines() == [name for name in names for _ in range(times)]


def test_a_recipe_deploys_green_beside_blue(desk: Desk) -> None:
    url = f"sqlite:///{desk.directory}/shop.db"
    desk.run(block("recipe", "migrate"))
    lists, pause, look, stop = commands("blue_green", "recipe")
    with closing(sqlq.App(url)) as blue, closing(sqlq.App(url)) as green:
        blue.task(name="shop.which")(lambda: "blue")
        which = green.task(name="shop.which")(lambda: "green")
        with working(blue, name="blue"), working(green, name="green"):
            wait_until(lambda: desk.run(lists).count("idle") == 2, 30)
            assert "asked blue" in desk.run(pause)
            wait_until(lambda: "paused" in desk.run(lists), 10)
            jobs = green.enqueue_many([which.new() for _ in range(20)])
            assert not green.wait_all(jobs, timeout="30s").pending
            assert {green.result(job) for job in jobs} == {"green"}
            assert "no failed jobs" in desk.run(look)
            assert "asked blue" in desk.run(stop)
            wait_until(lambda: "blue" not in desk.run(lists), 10)
            assert "green" in desk.run(lists)
