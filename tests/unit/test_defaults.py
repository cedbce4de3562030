"""Options in layers: call, task, queue, App, environment, pyproject.toml, built in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.model.checks import FOR_EVER_MS
from tests.kit import for_each

URL = "sqlite:///never-connected-to.db"


def options_of(job: sqlq.NewJob) -> tuple[Any, ...]:
    return job.queue, job.priority, job.max_attempts, job.timeout_ms, job.retention_ms


def stamped(app: sqlq.App, job: sqlq.NewJob) -> sqlq.NewJob:
    """The job as it is enqueued."""
    (done,) = app._completed([job])
    return done


def handler() -> None: ...


def test_options_of_the_task_come_before_queue_app_and_defaults() -> None:
    app = sqlq.App(
        URL,
        defaults={"queue": "mail", "priority": 1, "max_attempts": 2, "timeout": "1m", "retention": "1h"},
        queues={"mail": {"priority": 3, "max_attempts": 4}},
    )
    assert options_of(app.task(name="a")(handler).new()) == ("mail", 3, 4, 60_000, 3_600_000)
    assert options_of(app.task(name="b", max_attempts=9)(handler).new()) == ("mail", 3, 9, 60_000, 3_600_000)
    other = app.task(name="c", queue="other", timeout=None, retention="forever")(handler)
    assert options_of(other.new()) == ("other", 1, 2, None, FOR_EVER_MS)
    plain = sqlq.App(URL).task(name="t")(handler)
    assert options_of(plain.new()) == ("default", 0, 5, None, None)


def test_options_of_the_call_come_before_the_task() -> None:
    app = sqlq.App(URL, defaults={"timeout": "1m"})
    task = app.task(name="t", timeout="2m", retention="1h")(handler)
    job = task.new().set(timeout="3m", retention="2h", priority=5)
    assert (job.timeout_ms, job.retention_ms, job.priority) == (180_000, 7_200_000, 5)
    assert task.new().set(timeout=None).timeout_ms == 0, "taken away: in the row 0 is no timeout"
    assert task.new().set(retention="forever").retention_ms == FOR_EVER_MS
    assert task.new().set(priority=1).timeout_ms == 120_000, "what is not given stays"


def test_a_job_in_another_queue_has_the_options_of_that_queue() -> None:
    app = sqlq.App(URL, queues={"slow": {"timeout": "1h", "max_attempts": 2, "priority": -5}})
    task = app.task(name="t", max_attempts=7)(handler)
    assert options_of(stamped(app, task.new())) == ("default", 0, 7, None, None)
    slow = task.new().set(queue="slow")
    assert options_of(stamped(app, slow)) == ("slow", -5, 7, 3_600_000, None)
    assert options_of(stamped(app, slow.set(timeout=None, priority=1)))[1:4] == (1, 7, 0)
    assert task._in_queue("slow").timeout_ms == 3_600_000
    assert task._in_queue("any other") is task


def test_headers_of_all_layers_are_merged() -> None:
    app = sqlq.App(
        URL,
        defaults={"headers": {"a": "app", "b": "app", "c": "app"}},
        queues={"mail": {"headers": {"b": "queue", "c": "queue"}}},
    )
    task = app.task(name="t", queue="mail", headers={"c": "task", "d": "task"})(handler)
    job = stamped(app, task.new().set(headers={"d": "call"}))
    assert job.headers == {"a": "app", "b": "queue", "c": "task", "d": "call"}
    elsewhere = stamped(app, app.task(name="u")(handler).new().set(queue="mail"))
    assert elsewhere.headers == {"a": "app", "b": "queue", "c": "queue"}


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TIMEOUT": "5m", "MAX_ATTEMPTS": "3", "BACKOFF": "10s, 1m", "RETENTION": "30d"}
    for name, value in values.items():
        monkeypatch.setenv(f"SQLQ_{name}", value)
    task = sqlq.App(URL, defaults={"max_attempts": 4}).task(name="t")(handler)
    assert (task.timeout_ms, task.max_attempts, sqlq.App(URL)._retention_ms) == (300_000, 4, 30 * 86_400_000)
    assert [task.retry.wait_ms(attempts) for attempts in (1, 2, 3)] == [10_000, 60_000, 60_000]
    assert sqlq.App(URL, retention="1d")._retention_ms == 86_400_000
    monkeypatch.setenv("SQLQ_TIMEOUT", "none")
    monkeypatch.setenv("SQLQ_RETENTION", "forever")
    app = sqlq.App(URL)
    assert (app.task(name="t")(handler).timeout_ms, app._retention_ms) == (None, None)
    with pytest.raises(ConfigurationError, match="retention is 'none': write it as in"):
        sqlq.App(URL, retention="none")


PYPROJECT = """
[tool.sqlq]
retention = "30d"

[tool.sqlq.defaults]
timeout = "5m"
max-attempts = 3

[tool.sqlq.queues.mail]
max-attempts = 10
backoff = ["1s", "2s"]
"""


def test_the_environment_comes_before_pyproject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.chdir(tmp_path)
    app = sqlq.App(URL)
    task, mail = app.task(name="t")(handler), app.task(name="m", queue="mail")(handler)
    assert (task.timeout_ms, task.max_attempts, app._retention_ms) == (300_000, 3, 30 * 86_400_000)
    assert (mail.timeout_ms, mail.max_attempts, mail.retry.wait_ms(2)) == (300_000, 10, 2_000)
    monkeypatch.setenv("SQLQ_MAX_ATTEMPTS", "4")
    monkeypatch.setenv("SQLQ_RETENTION", "1d")
    app = sqlq.App(URL, queues={"mail": {"backoff": "7s"}})
    task, mail = app.task(name="t")(handler), app.task(name="m", queue="mail")(handler)
    assert (task.max_attempts, mail.max_attempts, app._retention_ms) == (4, 10, 86_400_000)
    assert mail.retry.wait_ms(2) == 7_000


@for_each(
    ("name", "value", "message"),
    [
        ("SQLQ_TIMEOUT", "5", "SQLQ_TIMEOUT: timeout is '5'"),
        ("SQLQ_MAX_ATTEMPTS", "many", "SQLQ_MAX_ATTEMPTS: max_attempts is 'many'"),
        ("SQLQ_BACKOFF", "1s,soon", r"SQLQ_BACKOFF: backoff\[1\] is 'soon'"),
        ("SQLQ_RETENTION", "long", "SQLQ_RETENTION is 'long'"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        with pytest.raises(ConfigurationError, match=f"^{message}"):
            sqlq.App(URL)
