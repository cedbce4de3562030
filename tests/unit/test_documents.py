"""CONTRIBUTING.md leads to files that exist, decisions have one form, and examples in docstrings are true.

A number that people may set, or rely on, stands on one page, to which others lead.
"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from sqlalchemy import create_engine

import sqlq
from sqlq.config.constants import (
    CONCURRENCY,
    CURSOR_BYTES,
    HEADERS_BYTES,
    HEARTBEAT_MS,
    IDLE_TRANSACTION_MS,
    LEASE_MS,
    MAX_ATTEMPTS,
    MAX_NAME,
    MAX_RELEASES,
    PAYLOAD_BYTES,
    POLLER_MS,
    PRIORITIES,
    RESCUE_MS,
    UNKNOWN_TASK_MS,
)
from sqlq.worker.options import WorkerOptions
from tests import words

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_each_file_and_folder_that_contributing_names_exists() -> None:
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([\w./*-]+(?:\.(?:py|md|toml|json|html|yml)|/))`", prose))
    assert len(named) > 100
    roots = (ROOT, ROOT / "sqlq", ROOT / "sqlq" / "worker")
    assert [path for path in named if not any(_exists(root, path) for root in roots)] == []


def _exists(root: Path, path: str) -> bool:
    """Whether a path is below a root; a bare name may be in any of its folders, as prose has it."""
    return any(root.glob(path if "/" in path.rstrip("/") else f"**/{path}"))


def test_each_folder_of_tests_has_a_row_in_contributing() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    assert folders <= set(re.findall(r"^\| `tests/(\w+)/` \|", TEXT, re.MULTILINE))


# -- decisions -----------------------------------------------------------------------------------------------


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
FORM = re.compile(
    r"# (?P<number>\d+)\. .+: .+\n\n"
    r"Status: (?:accepted\.(?: It replaces .+\.)?|replaced by \[decision \d+\]\((?P<next>.+\.md)\)\.)\n\n"
    r"## Context\n\n[^#].+\n\n## Decision\n\n[^#].+\n\n## Consequences\n\n[^#].+\n",
    re.DOTALL,
)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_subject_and_choice_status_context_decision_and_consequences(page: Path) -> None:
    form = FORM.fullmatch(page.read_text())
    assert form, f"{page.name}: CONTRIBUTING.md shows the form"
    assert re.fullmatch(rf"{int(form['number']):04d}(-[a-z0-9]+)+", page.stem)
    assert form["next"] is None or (page.parent / form["next"]).exists()
    assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_each_mention_of_a_decision_has_its_page() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert len(set(numbers)) == len(numbers)
    mentioned = set[int]()
    for path in (path for files in words.FILES for path in ROOT.glob(files)):
        mentioned |= {int(number) for number in re.findall(r"\bdecisions?[ /\n]+(\d+)", path.read_text())}
    assert mentioned <= {*numbers}


# -- examples in docstrings ----------------------------------------------------------------------------------


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "sqlq").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"sqlq", "sqlq.app.app", "sqlq.config.durations"} <= set(MODULES)
    monkeypatch.chdir(tmp_path)
    names = {"sqlq": sqlq, "create_engine": create_engine}
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS).failed == 0


# -- numbers, but for code, the README and the changelog -----------------------------------------------------


DOCS = Path(__file__).parents[2] / "docs"
SETTINGS, WORKERS, OBSERVABILITY = "settings-and-retention", "run-workers", "observability"
CONNECTIONS, RESULTS, CPU = "databases-and-connections", "results-and-progress", "cpu-bound-work"
OPTIONS = WorkerOptions()

NUMBERS = {
    # what it is: the words around the number, and its page
    "grace time": (rf"(?<![.\d]){OPTIONS.grace_ms // 1000} s\b", SETTINGS),
    "poll interval": (rf"\b{POLLER_MS / 1000} s\b", SETTINGS),
    "poll interval on SQLite": (r"\b(?:every|each) 50 ms\b", SETTINGS),
    "lease": (
        rf"\blease[^.\n]{{0,40}}\b{LEASE_MS // 1000} s\b|\b{LEASE_MS // 1000} s\b[^.\n]{{0,20}}\blease",
        SETTINGS,
    ),
    "heartbeat": (rf"\bevery {HEARTBEAT_MS // 1000} s\b", SETTINGS),
    "rescue": (rf"\babout (?:every )?{RESCUE_MS // 1000} s\b", SETTINGS),
    "prefetch": (
        rf"\bwithin {OPTIONS.ahead_ms} ms\b|(?:start|starts) within a tenth of a second|"
        rf"\b{OPTIONS.ahead_ms} ms by default",
        SETTINGS,
    ),
    "concurrency": (
        rf"\b{CONCURRENCY} in each\b|\bten jobs at a time\b|-c`?[^.\n]{{0,20}}default 10",
        SETTINGS,
    ),
    "attempts": (rf"(?i)\b(?:{MAX_ATTEMPTS}|five) attempts\b", SETTINGS),
    "backoff": (r"\b1, 2, 4 …|\bat most 1 h\b|± 20 %", SETTINGS),
    "releases": (
        rf"(?i)\b{MAX_RELEASES:,} (?:snoozes|times)\b|\bat most {MAX_RELEASES:,} in all\b",
        SETTINGS,
    ),
    "unknown task": (rf"\b{UNKNOWN_TASK_MS // 3_600_000} h(?:ours)?\b", SETTINGS),
    "retention": (r"\b7 days\b", SETTINGS),
    "payload and result": (rf"\b{PAYLOAD_BYTES >> 20} MiB\b", SETTINGS),
    "cursor": (
        rf"\bcursor[^.\n]{{0,40}}{CURSOR_BYTES >> 10} KiB|{CURSOR_BYTES >> 10} KiB[^.\n]{{0,40}}cursor",
        SETTINGS,
    ),
    "headers": (rf"\b(?:headers|object)\b[^.\n]{{0,60}}{HEADERS_BYTES >> 10} KiB\b", SETTINGS),
    "names": (rf"\b{MAX_NAME} characters\b", SETTINGS),
    "payload of SQL": (r"\b1\.5 MiB\b|\b100 levels\b", SETTINGS),
    "payloads of a claim": (r"\bfit 16 MiB\b", SETTINGS),
    "rows kept for 0s": (r"\bwithin a minute of (?:its|the) end\b|\bgone within a minute\b", SETTINGS),
    "start of a process": (r"\bstart\b[^.\n]{0,10}\b60 s\b", SETTINGS),
    "stuck process, killed": (r"\bstuck\b[^.\n]{0,60}\b(?:10|ten) minutes\b", SETTINGS),
    "stuck process, seen": (r"\b30 s without\b|\bsign of life\b[^.\n]{0,30}\b30 s\b|\bAfter 30 s\b", WORKERS),
    "request of an operator": (
        r"\b(?:obey|see|sees|reach|reaches|true)\b[^.\n]{0,60}\bwithin (?:2|two) s",
        WORKERS,
    ),
    "living worker": (r"\b90 s\b(?! and)", OBSERVABILITY),
    "isolated handler, killed": (r"\b(?:two|2) seconds later\b", CPU),
    "polls of waiters": (r"\b250 ms\b|\bquarter of a second\b", RESULTS),
    "idle transaction": (
        rf"\bidle\b[^.\n]{{0,60}}\b{IDLE_TRANSACTION_MS // 1000} s\b"
        rf"|\b{IDLE_TRANSACTION_MS // 1000} s\b[^.\n]{{0,60}}\bidle\b",
        CONNECTIONS,
    ),
    "timeout of an answer": (r"(?<!\.)\b64 s\b|\b30 s; 4 s\b|\btimes out after 30 s\b", CONNECTIONS),
    "priority": (rf"−{-PRIORITIES[0]} to {PRIORITIES[-1]}\b", "queues-and-priorities"),
    "connections of a worker": (r"\b2 × N \+ 2\b", CONNECTIONS),
    "jobs of a dead machine": (r"\babout 40 s\b(?!:)", "guarantees"),
}


def prose(page: Path) -> str:
    """Return a page without its blocks of code; a paragraph is one line."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?:^|(?<=\n\n))(?: {4}.*\n)+", "", text)
    return re.sub(r"\n(?![\n|#-]) *", " ", text)


PROSE = {page.stem: prose(page) for page in sorted(DOCS.glob("*.md"))}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_stands_on_one_page(name: str) -> None:
    pattern, home = NUMBERS[name]
    found = {
        page: [match[0] for match in re.finditer(pattern, text)]
        for page, text in PROSE.items()
        if re.search(pattern, text)
    }
    assert found.pop(home, None), f"{home}.md has no {name}: {pattern}"
    assert found == {}, f"{home}.md is the page of this number: put a link there"
