"""Metrics, scraped as Prometheus does; the dashboard, alerts and guide name what they show."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, text

import sqlq
from benchmarks import day
from benchmarks.day import Look
from sqlq.metrics import DatabaseCollector
from sqlq.metrics.collectors import CONNECTIONS, OF_THE_DATABASE, OF_WORKERS, Described, serve
from sqlq.metrics.collectors import text as shown
from tests.kit import needs, received, span, wait_until
from tests.kit.command import Command
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.preloaded import Forked

yaml: Any = importlib.import_module("yaml")
ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
METRICS = {metric.name: metric for metric in (*OF_WORKERS, *OF_THE_DATABASE)}


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return parsed(answer.read().decode())


def parsed(said: str) -> Samples:
    samples = (sample for family in text_string_to_metric_families(said) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def value(found: Samples, name: str, /, **labels: str) -> float:
    """The sum over all samples of this name that have these labels."""
    wanted = set(labels.items())
    return sum(number for (named, has), number in found.items() if named == name and wanted <= has)


def seen(url: str, number: float, name: str, **labels: str) -> Samples:
    """Scrape until this number is shown, and return all that is."""

    def look() -> Samples:
        found = scrape(url)
        return found if value(found, name, **labels) == number else {}

    return wait_until(look, what=f"{name} {labels} of {number:g}")


def shown_as(metric: Described) -> set[str]:
    """The names of a metric's samples."""
    if metric.kind == "counter":
        return {f"{metric.name}_total"}
    if metric.kind == "histogram":
        return {f"{metric.name}_{part}" for part in ("bucket", "count", "sum")}
    return {metric.name}


def url_in(said: str) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+/metrics", said)
    return found[0] if found else ""


@contextmanager
def scraped(run: Command, *options: str) -> Iterator[tuple[str, subprocess.Popen[str] | Forked]]:
    """`sqlq work` with an endpoint, at the URL that it logs."""
    with run.working("--metrics-port", "0", *options) as process:
        url = wait_until(lambda: url_in(run.log()), what="the URL of the endpoint")
        yield url, process


def enqueue(app: sqlq.App, task: str, n: int = 1, *args: object, attempts: int = 2) -> list[int]:
    new = app.named(task).new(*args).set(queue="mail", max_attempts=attempts)
    return [job.id for job in app.enqueue_many([new] * n)]


def ended(app: sqlq.App) -> dict[str, int]:
    states = Counter(str(job.state) for job in app.jobs.list(limit=1_000, whole=False))
    return {state: states[state] for state in ("finished", "failed")}


DEADLY = """
import os, signal

@app.task(queue="mail", max_attempts=1)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_worker_endpoint_is_on_loopback_and_counts_as_the_database_does(
    sqlq_: Command, app: sqlq.App
) -> None:
    with (sqlq_.directory / "shop.py").open("a") as shop:
        shop.write(DEADLY)
    enqueue(app, "shop.send", 200, 7)
    enqueue(app, "shop.fail", 3, "lift it")
    app.enqueue(app.named("wait").new("one").set(queue="other"))
    for command in ("work", "metrics"):
        assert "127.0.0.1" in sqlq_.ok(command, "--help")
    with scraped(sqlq_, "-p", "2") as (url, process):
        held = psutil.Process(process.pid).net_connections()
        assert [each.laddr.ip for each in held if each.status == "LISTEN"] == ["127.0.0.1"]
        sqlq_.wait_for("one.started")
        seen(url, 1, "sqlq_slots_busy")
        sqlq_.touch("one.go")
        wait_until(lambda: ended(app) == {"finished": 201, "failed": 3}, what="all jobs to end")
        seen(url, 0, "sqlq_slots_busy")
        seen(url, 3, "sqlq_attempts_total", outcome="failed")
        seen(url, 2, "sqlq_processes")
        found = seen(url, 200, "sqlq_attempts_total", outcome="finished", queue="mail")
        send = {"task": "shop.send", "queue": "mail"}
        assert value(found, "sqlq_attempts_total", **send) == 200
        assert value(found, "sqlq_attempts_total", outcome="retried") == 3
        assert value(found, "sqlq_failed_total", task="shop.fail", reason="error") == 3
        assert value(found, "sqlq_run_seconds_count", outcome="finished", **send) == 200
        assert value(found, "sqlq_wait_seconds_count", **send) == 200
        assert value(found, "sqlq_settle_seconds_count", queue="mail") == 206
        assert value(found, "sqlq_claimed_total", queue="mail") == 206
        assert value(found, "sqlq_claim_seconds_count", found="jobs") >= 1
        assert value(found, "sqlq_slots") == 20
        assert value(found, "sqlq_processes_lost_total") == 0
        assert {name for name, _ in found} == {name for metric in OF_WORKERS for name in shown_as(metric)}
        enqueue(app, "shop.die", attempts=1)
        wait_until(lambda: ended(app)["failed"] == 4, what="the death")
        enqueue(app, "shop.send", 50, 7)
        wait_until(lambda: ended(app)["finished"] == 251, what="the other 50")
        seen(url, 1, "sqlq_processes_lost_total")
        found = seen(url, 250, "sqlq_attempts_total", outcome="finished", **send)
        assert value(found, "sqlq_attempts_total", task="shop.die", outcome="failed") == 1
        assert value(found, "sqlq_failed_total", task="shop.die", reason="worker_lost") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@needs("cheap")
def test_a_port_or_an_address_that_is_taken_is_reported_in_one_sentence(sqlq_: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (("work", "--metrics-port"), ("metrics", "--port")):
            said = sqlq_.shop(*command, port)
            assert said.code == 1
            named = f"sqlq: nothing can listen on host 127.0.0.1, port {port}: Address already in use"
            assert said.err == f"{named}; name a free port from 1024 on, and an address of this machine\n"
    said = sqlq_.shop("metrics", "--port", "0", "--host", "192.0.2.1")
    assert said.sentence().startswith("nothing can listen on host 192.0.2.1, port 0: ")
    assert "99999 is not in the range" in sqlq_.shop("work", "--metrics-port", "99999").misuse()


@pytest.mark.integration
@needs("cheap")
def test_the_endpoint_bounds_connections_of_strangers(sqlq_: Command) -> None:
    with scraped(sqlq_) as (url, process), ExitStack() as open_:
        supervisor = psutil.Process(process.pid)
        port = urllib.parse.urlsplit(url).port

        def taken() -> int:
            held = supervisor.net_connections("tcp")
            return sum(each.laddr.port == port and each.status != psutil.CONN_LISTEN for each in held)

        silent = []
        for _ in range(CONNECTIONS + 8):
            silent.append(open_.enter_context(socket.create_connection(("127.0.0.1", int(port or 0)), 60)))
            silent[-1].sendall(b"GET /met")
            assert taken() <= CONNECTIONS, "the others wait"
        with suppress(ConnectionError):
            assert silent[0].recv(1) == b"", "one that does not ask is closed in a while"
        open_.close()
        wait_until(lambda: taken() == 0, what="the descriptors free")
        wait_until(lambda: value(scrape(url), "sqlq_processes") == 1, what="the worker ready")


@needs("cheap")
def test_a_missing_prometheus_client_names_the_extra(sqlq_: Command) -> None:
    (sqlq_.directory / "prometheus_client.py").write_text("raise ImportError('not here')")
    path = {"PYTHONPATH": f"{sqlq_.directory}:{ROOT}"}
    for command in (("work", "--metrics-port", "0"), ("metrics",)):
        said = sqlq_("--app", "shop:app", *command, env=path).sentence()
        assert "needs prometheus_client and waitress: pip install 'sqlq-jobs[metrics]'" in said


@pytest.mark.integration
def test_the_database_is_shown_once_or_served(sqlq_: Command, app: sqlq.App) -> None:
    ids = enqueue(app, "shop.send", 4, 7)
    app.enqueue(app.named("shop.send").new(7).set(queue="mail", delay="1h"))
    app.enqueue(app.named("shop.send").new(7).set(queue="news"))
    app.queues.pause("news")
    once = parsed(sqlq_.ok("metrics"))
    assert value(once, "sqlq_jobs", queue="mail", state="available") == len(ids)
    assert value(once, "sqlq_jobs", queue="mail", state="scheduled") == 1
    assert value(once, "sqlq_jobs_capped") == 0
    assert value(once, "sqlq_queue_paused", queue="news") == 1
    assert value(once, "sqlq_queue_paused", queue="mail") == 0
    assert value(once, "sqlq_queue_served") == 0
    assert value(once, "sqlq_workers") == 0
    enqueue(app, "shop.fail", 1, "lift it", attempts=1)
    serving = sqlq_.running("metrics", "--port", "0", output="metrics.out")
    with sqlq_.working(), serving as process:
        url = wait_until(lambda: url_in((sqlq_.directory / "metrics.out").read_text()), what="the URL")
        seen(url, 1, "sqlq_failed_jobs", reason="error")
        seen(url, 1, "sqlq_jobs", queue="mail", state="failed")  # which a scrape reads before the other
        found = seen(url, 1, "sqlq_queue_served", queue="mail")
        assert value(found, "sqlq_workers", state="alive") == 1
        assert value(found, "sqlq_schedules_overdue") == 0
        assert value(found, "sqlq_failed_jobs", reason="timeout") == 0, "each reason begins at 0"
        assert ("sqlq_failed_jobs", frozenset({("reason", "timeout")})) in found
        assert value(found, "sqlq_database_up") == 1
        assert value(found, "sqlq_worker_slots") == 10
        assert value(found, "sqlq_oldest_wait_seconds", queue="news") > 0
        expected = {name for metric in OF_THE_DATABASE for name in shown_as(metric)}
        absent = {
            "sqlite": {"sqlq_table_rows", "sqlq_oldest_transaction_seconds", "sqlq_unpurged_transactions"},
            "postgresql": {"sqlq_wal_bytes", "sqlq_unpurged_transactions"},
            "mariadb": {"sqlq_wal_bytes", "sqlq_table_rows"},
        }[app.database.engine.dialect.name]
        assert {name for name, _ in found} == expected - absent - {"sqlq_replica_behind_seconds"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@needs("sessions")
def test_the_oldest_transaction_and_dead_rows(app: sqlq.App, engine: Engine) -> None:
    def ask() -> Samples:
        return parsed(shown(DatabaseCollector(app)))

    assert ("sqlq_table_rows", frozenset({("kind", "dead")})) in ask()
    with engine.connect() as conn:
        conn.execute(text("SELECT pg_current_xact_id()"))
        wait_until(lambda: value(ask(), "sqlq_oldest_transaction_seconds") > 0.1, what="the old transaction")


def test_scrapes_and_health_query_the_database_once_in_a_while(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlq.metrics.collectors.KEPT_SECONDS", 60.0)
    monkeypatch.setattr("sqlq.config.listen.HEALTH_SECONDS", 60.0)
    url = serve(DatabaseCollector(app), 0, "127.0.0.1", app)
    healthz = url.replace("/metrics", "/healthz")
    with received(Engine) as asked:
        first, well = scrape(url), health(healthz)
        number = len(asked)
        assert (scrape(url), health(healthz)) == (first, well)
    assert well == (200, "ok")
    assert len(asked) == number > 0


@needs("postgresql")
def test_a_scrape_and_health_show_the_database_as_down_while_it_is_away(
    restartable_postgresql: OwnPostgreSQL, app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlq.metrics.collectors.KEPT_SECONDS", 0.0)
    monkeypatch.setattr("sqlq.config.listen.HEALTH_SECONDS", 0.0)
    url = serve(DatabaseCollector(app), 0, "127.0.0.1", app)
    healthz = url.replace("/metrics", "/healthz")
    assert (value(scrape(url), "sqlq_database_up"), health(healthz)) == (1, (200, "ok"))
    restartable_postgresql.stop()
    try:
        found = scrape(url)
        assert health(healthz) == (503, "database")
    finally:
        restartable_postgresql.start()
    assert value(found, "sqlq_database_up") == 0
    assert {name for name, _ in found} == {"sqlq_database_up", "sqlq_version_info"}
    seen(url, 1, "sqlq_database_up")
    wait_until(lambda: health(healthz) == (200, "ok"), what="the database")


def health(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_scrape_counts_overdue_schedules_and_bears_names_that_break_labels(app: sqlq.App) -> None:
    app.schedules.add("report", app.task(name="report")(lambda: None).new(), every="1h")
    for key, until in {"open": "0s", "closed": "1h"}.items():
        app.limits.set(key, running=1)
        app.limits.close(key, until=until)
    with app.database.begin() as conn:
        conn.exec_driver_sql(f"UPDATE sqlq_schedules SET next_at = next_at - {span(conn, 3_700)}")
        insert = text("INSERT INTO jobs (queue, task, payload) VALUES (:queue, 't', '{}')")
        conn.execute(insert, {"queue": 'ma\nil"\\'})
    registry = CollectorRegistry()
    registry.register(DatabaseCollector(app))
    labels = {"queue": 'ma\\nil"\\', "state": "available"}
    assert registry.get_sample_value("sqlq_jobs", labels) == 1.0
    assert registry.get_sample_value("sqlq_schedules_overdue") == 1
    assert registry.get_sample_value("sqlq_limits_closed") == 1


PROMTOOL = os.environ.get("SQLQ_TEST_PROMTOOL") or shutil.which("promtool") or ""


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def named_in(expression: str) -> set[str]:
    return set(re.findall(r"\bsqlq_[a-z_]+\b", expression))


def expressions() -> dict[str, str]:
    """Every expression of the dashboard and of the alerts, by where it stands."""
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    targets = ((panel["title"], target) for panel in dashboard["panels"] for target in panel["targets"])
    found = {f"{title} {target['refId']}": target["expr"] for title, target in targets}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["query"]["query"]
    return found | {rule["alert"]: rule["expr"] for rule in alerts()}


def test_dashboard_and_alerts_use_existing_metrics() -> None:
    known = {name: metric for metric in METRICS.values() for name in shown_as(metric)}
    assert len([where for where in expressions() if where.startswith("Sqlq")]) >= 10
    assert len(expressions()) >= 28
    for where, expression in expressions().items():
        if where == "SqlqEndpointIsDown":  # Prometheus makes `up`
            continue
        assert named_in(expression), "an expression of no metric of sqlq's"
        for name in named_in(expression):
            assert name in known
        for name, selector in re.findall(r"\b(sqlq_[a-z_]+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)(?:=|!)", selector))
            assert labels <= {*known[name].labels, "le"}, f"{where}: {labels}"
        if grouped := re.search(r"by \(([\w, ]+)\)", expression):
            has = {label for name in named_in(expression) for label in known[name].labels}
            assert set(grouped[1].split(", ")) <= {*has, "le", "instance"}


def test_each_alert_is_tested_firing_and_silent_and_names_scraped_jobs() -> None:
    tests = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    rules = [rule for each in tests for rule in each["alert_rule_test"]]
    tested = {(rule["alertname"], bool(rule.get("exp_alerts"))) for rule in rules}
    assert tested == {(rule["alert"], is_firing) for rule in alerts() for is_firing in (True, False)}
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    (selector,) = re.findall(r'up\{job=~"([^"]+)"\}', expressions()["SqlqEndpointIsDown"])
    assert jobs
    assert all(re.fullmatch(selector, job["job_name"]) for job in jobs)


@pytest.mark.debian
@pytest.mark.skipif(not Path(PROMTOOL).is_file(), reason="there is no promtool: apt-get install prometheus")
def test_alerts_fire_when_they_should() -> None:
    for words in ("check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"):
        command = [PROMTOOL, *words.split()]
        done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_guide_describes_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    rows = dict(re.findall(r"^\| `(sqlq_[a-z_]+)` \|([^|]*)\|", page, re.MULTILINE))
    ends = {"counter": "_total"}
    described = {f"{metric.name}{ends.get(metric.kind, '')}": metric for metric in METRICS.values()}
    assert rows.keys() == described.keys()
    for name, metric in described.items():
        assert tuple(re.findall(r"\w+", rows[name])) == metric.labels, name
    assert "sqlq_version_info" in rows


def test_the_picture_uses_existing_metrics() -> None:
    known = {metric.name for metric in (*OF_WORKERS, *OF_THE_DATABASE)}
    named = set(re.findall(r'"(sqlq_[a-z_]+)"', Path(day.__file__).read_text()))
    assert len(named) >= 5
    assert {name.removesuffix("_total") for name in named} <= known


def test_a_quantile_is_computed_from_increments() -> None:
    def look(*numbers: float) -> Look:
        bounds = ("0.1", "1.0", "+Inf")
        return Look(
            0.0, {("w_bucket", frozenset({("le", le)})): n for le, n in zip(bounds, numbers, strict=True)}
        )

    assert day.quantile(look(100, 100, 100), look(105, 110, 110), 0.5, "w") == 0.1
    assert day.quantile(look(100, 100, 100), look(100, 110, 110), 0.5, "w") == 0.55
    assert day.quantile(look(1, 1, 1), look(1, 1, 2), 0.99, "w") == 1.0
