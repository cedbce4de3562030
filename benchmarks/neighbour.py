"""A drain beside hostile jobs: how much of its rate stays, and whether the worker's memory does.

    python -m benchmarks.neighbour [postgresql|mariadb|sqlite] [--seconds 600]

Calm and hostile periods of 20 s take turns in one worker. In a hostile one, a handler fails each 0.2 s, with
10 MB in its frame and a text that LATIN1 cannot hold. Each second the database refuses the result of a job.
Each fifth time it reports a deadlock first. The settings of the database are odd throughout. At the end all
jobs must have ended as they should.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

import sqlq
from benchmarks.servers import Place, Servers

PERIOD_SECONDS = 20.0
BACKLOG = 8_000
SHOP = """
import sqlq

app = sqlq.App(retention="20s")

@app.task(name="calm", queue="calm")
def calm() -> None: ...

@app.task(name="heavy", queue="hostile", max_attempts=1)
def heavy() -> None:
    frame = bytearray(10_000_000)
    raise ValueError("a price in €, and \\U0001f600")

@app.task(name="poison", queue="hostile", max_attempts=1)
def poison() -> str:
    return "poison"
"""
ODD = {
    "postgresql": [
        "CREATE SEQUENCE poisoned",
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.result LIKE '%poison%' THEN
            IF nextval('poisoned') % 5 = 0 THEN RAISE EXCEPTION 'a deadlock' USING errcode = '40P01'; END IF;
            RAISE EXCEPTION 'a rule of the host';
        END IF; RETURN NEW; END $$""",
        "CREATE TRIGGER refuse BEFORE INSERT ON finished_jobs FOR EACH ROW EXECUTE FUNCTION refuse()",
        """DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET datestyle = ''SQL, DMY''', current_database());
        EXECUTE format('ALTER DATABASE %I SET client_encoding = ''LATIN1''', current_database());
        EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''serializable''',
        current_database()); EXECUTE format('ALTER DATABASE %I SET lock_timeout = ''10ms''',
        current_database()); END $$""",
    ],
    "mariadb": [
        "CREATE SEQUENCE poisoned",
        """CREATE TRIGGER refuse BEFORE INSERT ON finished_jobs FOR EACH ROW BEGIN
        IF NEW.result LIKE '%poison%' THEN
            IF NEXT VALUE FOR poisoned % 5 = 0 THEN
                SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'a deadlock';
            END IF;
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a rule of the host';
        END IF; END""",
        "SET GLOBAL sql_mode = ''",
        "SET GLOBAL tx_isolation = 'SERIALIZABLE'",
    ],
    "sqlite": [
        """CREATE TRIGGER refuse BEFORE INSERT ON finished_jobs WHEN NEW.result LIKE '%poison%' BEGIN
        SELECT RAISE(ABORT, 'a rule of the host'); END"""
    ],
}


class Period(NamedTuple):
    kind: str
    rate: float
    megabytes: float


def run(place: Place, folder: Path, seconds: float) -> list[Period]:
    """Let the periods pass, and return the rate and the worker's memory of each."""
    (folder / "shop.py").write_text(SHOP)
    for statement in ODD[place.kind]:
        place.rows(statement)
    scheme = {"postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql", "sqlite": "sqlite"}[
        place.kind
    ]
    url = f"{scheme}:{place.url.partition(':')[2]}"
    app = sqlq.App(url)
    calm, heavy, poison = (
        app.task(name=name, queue=queue, max_attempts=1 if queue == "hostile" else 5)(lambda: None)
        for name, queue in (("calm", "calm"), ("heavy", "hostile"), ("poison", "hostile"))
    )
    command = [sys.executable, "-m", "sqlq", "work", "-p", "1", "-c", "10", "--log-level", "error"]
    environment = os.environ | {"SQLQ_DATABASE_URL": url, "SQLQ_APP": "shop:app"}
    enqueued, hostile, periods = 0, 0, list[Period]()
    begun = time.monotonic()
    with (
        (folder / "log").open("w") as log,
        place.questions() as number,
        subprocess.Popen(command, cwd=folder, env=environment, stderr=log) as worker,
    ):
        try:
            for turn in count(-2):  # the two before the first warm up
                is_hostile = turn % 2 == 1
                started, before = time.monotonic(), enqueued - number(left("calm"))
                while time.monotonic() < started + PERIOD_SECONDS:
                    if (more := BACKLOG - number(left("calm"))) > BACKLOG // 4:
                        app.enqueue_many([calm.new()] * more)
                        enqueued += more
                    if is_hostile:
                        app.enqueue(heavy.new())
                        hostile += 1
                        if hostile % 5 == 0:
                            app.enqueue(poison.new())
                    time.sleep(0.2)
                rate = (enqueued - number(left("calm")) - before) / (time.monotonic() - started)
                family = [process := psutil.Process(worker.pid), *process.children(recursive=True)]
                megabytes = sum(each.memory_full_info().uss for each in family) / 2**20
                if turn >= 0:
                    periods.append(Period("hostile" if is_hostile else "calm", rate, megabytes))
                    print(f"{periods[-1].kind:8} {rate:8,.0f} jobs/s  {megabytes:6.0f} MiB", flush=True)
                if worker.poll() is not None:
                    sys.exit("the worker has ended")
                if time.monotonic() - begun > seconds and is_hostile:
                    break
            until = time.monotonic() + 60
            while (jobs := number("SELECT count(*) FROM jobs")) and time.monotonic() < until:
                time.sleep(0.2)
        finally:
            worker.terminate()
    failed = place.number("SELECT count(*) FROM failed_jobs")
    print(f"{enqueued:,} calm jobs; of {hostile} that fail {failed} have failed; {jobs} jobs are left")
    if jobs or failed != hostile:
        sys.exit(1)
    return periods


def left(task: str) -> str:
    return f"SELECT count(*) FROM jobs WHERE task = '{task}'"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbour", description=__doc__)
    parser.add_argument("database", nargs="?", default="postgresql", choices=sorted(ODD))
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Servers(None, None) as servers:

        def prepare(url: str) -> None:
            sqlq.App(url.replace("postgresql://", "postgresql+psycopg://")).migrate()

        with servers.place(options.database, "sqlq", prepare) as place:
            periods = run(place, Path(folder), options.seconds)
    rates = {kind: median(each.rate for each in periods if each.kind == kind) for kind in ("calm", "hostile")}
    hostile, calm = rates["hostile"], rates["calm"]
    print(f"hostile {hostile:,.0f} of {calm:,.0f} jobs/s: {hostile / calm:.2f}")
    print(f"memory {periods[0].megabytes:.0f} MiB at first, {periods[-1].megabytes:.0f} MiB at the end")


if __name__ == "__main__":
    main()
