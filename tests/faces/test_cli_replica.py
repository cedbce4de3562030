"""`SQLQ_READ_URL`: commands that look read from a replica, those that act do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

import sqlq
from tests.kit.command import Command
from tests.kit.standby import Pair, pair_of_servers
from tests.kit.visitor import Visitor

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with pair_of_servers() as pair:
        yield pair


class Late(NamedTuple):
    """A replica that has stopped to replay, and so knows the first of two jobs only."""

    url: str
    replica: str
    known: int
    new: int


@pytest.fixture
def late(servers: Pair) -> Iterator[Late]:
    url, replica = (each.url(servers.database) for each in (servers.primary, servers.standby))
    with closing(sqlq.App(url)) as app:
        task = app.task(name="shop.send", queue="mail")(lambda n: None)
        known = app.enqueue(task.new(1)).id
        servers.standby.catch_up()
        replay(replica, "pause")
        new = app.enqueue(task.new(2)).id
        yield Late(url, replica, known, new)
        replay(replica, "resume")
        app.jobs.cancel(task="shop.send")
        servers.standby.catch_up()


def replay(replica: str, word: str) -> None:
    with psycopg.connect(replica.replace("+psycopg", ""), autocommit=True) as conn:
        conn.execute(f"SELECT pg_wal_replay_{word}()".encode())


def test_reading_commands_use_the_replica(tmp_path: Path, late: Late) -> None:
    command = Command(tmp_path, SQLQ_DATABASE_URL=late.url, SQLQ_READ_URL=late.replica)
    status = command("status", "--json").json()
    assert [each["available"] for each in status["queues"]] == [1]
    assert status["replica"]["url"] == late.replica
    assert status["replica"]["behind_seconds"] > 0
    said = command.ok("status", env={"COLUMNS": "300"})
    assert f"\nread from {late.replica}, " in said
    assert said.endswith(" behind\n")
    assert [each["id"] for each in command("jobs", "--state", "available", "--json").json()] == [late.known]
    assert f"job {late.known}: available" in command.ok("show", str(late.known))
    assert f"job {late.new}: available" in command.ok("show", str(late.new)), "from the database"
    metrics = command.ok("metrics")
    assert 'sqlq_jobs{queue="mail",state="available"} 1.0' in metrics
    assert "sqlq_replica_behind_seconds " in metrics
    assert "sqlq_table_rows" not in metrics, "which a replica does not count"
    for words in (["failed"], ["queues"], ["workers"], ["flows"], ["schedules"], ["limits"], ["audit"]):
        command.ok(*words)
    none = command("status", "--json", env={"SQLQ_READ_URL": ""}).json()
    assert none["queues"][0]["available"] == 2
    assert none["replica"] is None


def test_acting_commands_do_not_read_the_replica(tmp_path: Path, late: Late) -> None:
    command = Command(tmp_path, SQLQ_DATABASE_URL=late.url, SQLQ_READ_URL=late.replica)
    assert f": {late.known}, {late.new}\n" in command.ok("cancel", "--task", "shop.send")
    command.ok("queues", "pause", "mail")
    command.ok("queues", "resume", "mail")
    command.ok("--app", "shop:app", "enqueue", "shop.where")
    assert command("--app", "shop:app", "work", "--drain").code == 0
    assert command("doctor").out.count("a standby: nothing") == 0


def test_a_replica_of_another_database_is_skipped(tmp_path: Path, late: Late, database_url: str) -> None:
    command = Command(tmp_path, SQLQ_READ_URL=late.replica)
    assert command("-d", database_url, "status", "--json").json()["replica"] is None


def test_the_project_names_the_replica_and_one_that_is_away_is_named(tmp_path: Path, late: Late) -> None:
    file, away = tmp_path / "pyproject.toml", re.sub(r":\d+/", ":1/", late.replica)
    names = f'[tool.sqlq]\ndatabase-url = "{late.url}"\nread-url = '
    file.write_text(f'{names}"{late.replica}"\n')
    assert Command(tmp_path)("status", "--json").json()["queues"][0]["available"] == 1
    file.write_text(f'{names}"{away}"\n')
    assert Command(tmp_path)("status", "--json").sentence().startswith(f"{away}: ")


def test_the_dashboard_reads_the_replica_and_acts_on_the_database(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLQ_READ_URL", late.replica)
    with closing(sqlq.App(late.url)) as app:
        visitor = Visitor(app)
        assert f"/jobs/{late.new}" not in visitor.page("/jobs")
        assert "is a standby: nothing" not in visitor.page()
        question, form = visitor.asked("cancel", matching="yes", task="shop.send")
        assert "2 available jobs" in question, "it counts on the database, too"
        visitor.done("cancel", **form)
        assert [app.jobs.get(id).state for id in (late.known, late.new)] == ["cancelled"] * 2
