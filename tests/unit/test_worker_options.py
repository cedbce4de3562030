"""The options of workers: by argument, variable and pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sqlq.cli.commands import work
from sqlq.errors import ConfigurationError
from sqlq.worker.options import WorkerOptions, checked_bytes, setting
from tests.kit import for_each

SETTINGS = {
    "processes": ("2", 2),
    "concurrency": ("20", 20),
    "lease": ('"1m"', 60_000),
    "grace": ('"2m"', 120_000),
    "max_jobs": ("1000", 1_000),
    "max_rss": ('"400MB"', 400_000_000),
    "wait": ('"60s"', 60_000),
    "poll": ('"1s"', 1_000),
    "claim_batch": ("7", 7),
    "ahead": ('"10ms"', 10),
}
"""Each as it is written in pyproject.toml, and its value."""


def test_an_argument_comes_before_the_variable_and_that_before_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {setting(name) for name in SETTINGS} == {None}
    keys = [f"{name.replace('_', '-')} = {written}" for name, (written, _) in SETTINGS.items()]
    (tmp_path / "pyproject.toml").write_text("\n".join(["[tool.sqlq]", *keys]))
    assert [setting(name) for name in SETTINGS] == [number for _, number in SETTINGS.values()]
    values = {"lease": "3s", "grace": "3s", "max_rss": "3KB", "wait": "3s", "poll": "3s", "ahead": "3ms"}
    for name in SETTINGS:
        monkeypatch.setenv(f"SQLQ_{name.upper()}", values.get(name, "3"))
    assert {setting(name) for name in SETTINGS} == {3, 3_000}
    made = WorkerOptions.of(lease="5s")
    assert (made.concurrency, made.lease_ms, made.grace_ms) == (3, 5_000, 3_000)
    assert (made.max_jobs, made.max_rss) == (None, None), "no supervisor replaces a worker in a program"


def test_a_wrong_variable_and_a_wrong_key_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.sqlq]\nclaim-batch = 0\n")
    with pytest.raises(ConfigurationError, match=r"^claim_batch in .*pyproject.toml is 0: it must be a"):
        WorkerOptions.of()
    monkeypatch.setenv("SQLQ_CLAIM_BATCH", "0.5")
    with pytest.raises(ConfigurationError, match=r"^SQLQ_CLAIM_BATCH is '0.5': it must be a whole number"):
        WorkerOptions.of()


@for_each(
    ("given", "number"),
    [
        *(("400MB", 400_000_000), ("400M", 400_000_000), ("400mb", 400_000_000)),
        *((" 1.5 GB ", 1_500_000_000), ("400MiB", 419_430_400), ("2K", 2_000), (7, 7)),
    ],
)
def test_sizes_are_read_in_bytes(given: str | int, number: int) -> None:
    assert checked_bytes(given, "max_rss") == number


@for_each(
    ("given", "queues"),
    [
        *(((), None), (("high,low",), ["high", "low"]), (("high=3", "low=1"), {"high": 3, "low": 1})),
        *((("high=3, low",), {"high": 3, "low": 1}), (("a=b=2",), {"a=b": 2})),
    ],
)
def test_the_command_line_reads_queues_and_weights(given: tuple[str, ...], queues: Any) -> None:
    assert work._named_queues(given) == queues
