"""A number that people may set, or rely on, stands on one page, to which others lead.

Code, the output of commands, the README and the changelog are excepted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
