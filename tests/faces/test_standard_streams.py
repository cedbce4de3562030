"""Lines to standard error: in order, whole, waited for once; those of finished jobs without records."""

from __future__ import annotations

import logging
import os
import pty
import select
import socket
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from sqlq.cli import processes
from sqlq.cli.processes import StandardStream
from sqlq.cli.terminal import logs
from sqlq.cli.terminal.logs import ERASE, JsonLines, Lines, OfJob, Stderr
from sqlq.events import JobEvent
from sqlq.model.job import ClaimedJob
from sqlq.worker.report import reporter

Pair = tuple[TextIO, int]
"""A stream to write to, and the descriptor on which what it got is read."""
Opened = Callable[[Callable[[], Pair]], Pair]


def pipe() -> Pair:
    reading, writing = os.pipe()
    return os.fdopen(writing, "w"), reading


def terminal() -> Pair:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    return os.fdopen(theirs, "w"), ours


def unix_socket() -> Pair:
    here, there = socket.socketpair()
    return os.fdopen(here.detach(), "w"), there.detach()


@pytest.fixture
def opened() -> Iterator[Opened]:
    pairs: list[Pair] = []

    def opened(make: Callable[[], Pair]) -> Pair:
        pairs.append(make())
        return pairs[-1]

    yield opened
    for stream, reading in pairs:
        stream.close()
        os.close(reading)


@pytest.fixture(params=["pipe", "inherited pipe", "terminal", "socket"])
def pair(request: pytest.FixtureRequest, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Pair:
    if request.param == "inherited pipe":  # for example another user's
        monkeypatch.setattr(processes, "nonblocking", lambda fd: fd)
    return opened({"terminal": terminal, "socket": unix_socket}.get(request.param, pipe))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WAIT_SECONDS", 0.05)


def opened_anew(stream: TextIO) -> StandardStream:
    return StandardStream(processes.nonblocking(stream.fileno()))


def lines(numbers: range) -> bytes:
    return b"".join(b"line %d %s\n" % (number, b"x" * 100) for number in numbers)


def read(fd: int, until: Callable[[bytes], bool]) -> bytes:
    got = b""
    while not until(got):
        assert select.select([fd], [], [], 30)[0], "no more comes"
        got += os.read(fd, 65_536)
    return got


def filled(stream: StandardStream) -> int:
    """Write until the stream takes no more, not even a byte. Return how many bytes it took."""
    taken = 0
    for data in (lines(range(10)), b"\n"):
        while written := stream.write(data):
            taken += written
    return taken


def test_a_slow_reader_gets_all_lines_in_order(pair: Pair) -> None:
    stream, reading = pair
    took: list[bytes] = []
    reader = threading.Thread(
        target=lambda: took.append(read(reading, lambda got: got.count(b"\n") == 6_000))
    )
    reader.start()
    to = opened_anew(stream)
    assert to.write(lines(range(10))) == len(lines(range(10)))
    assert to.write(lines(range(10, 6_000))) == len(lines(range(10, 6_000)))
    reader.join()
    assert took == [lines(range(6_000))]
    assert os.get_blocking(stream.fileno()), "others have this descriptor, too"


@pytest.mark.usefixtures("impatient")
def test_a_sleeping_reader_is_waited_for_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, reading = pair
    to = opened_anew(stream)
    taken = filled(to)
    monkeypatch.setattr(processes, "WAIT_SECONDS", 1.0)
    begin = time.monotonic()
    for _ in range(20):
        assert to.write(b"dropped\n") == 0
    assert time.monotonic() - begin < 10
    read(reading, lambda got: len(got) >= taken)
    assert to.write(b"back\n") == 5
    assert read(reading, lambda got: got.endswith(b"\n")) == b"back\n"


def test_each_write_is_of_whole_lines(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe takes so much as one, and the lines of other processes before or after it."""
    stream, _ = opened(pipe)
    to = opened_anew(stream)
    written: list[bytes] = []

    def write(fd: int, data: bytes) -> int:
        written.append(data)
        return len(data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        to.write(lines(range(300)))
    assert len(written) > 5
    assert all(data.endswith(b"\n") and len(data) <= 4096 for data in written)


def test_a_full_disk_and_a_reader_that_has_gone_raise_nothing(opened: Opened, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with Path("/dev/full").open("w") as full, (tmp_path / "fifo").open("w") as fifo:
        os.close(reading)
        for stream in (full, fifo):
            to = opened_anew(stream)
            assert to.write(b"line\n") == 0
            assert to.error.errno


@pytest.fixture
def handler(opened: Opened, monkeypatch: pytest.MonkeyPatch, impatient: None) -> tuple[Stderr, int]:
    stream, reading = opened(pipe)
    monkeypatch.setattr(logs, "STDERR", stream.fileno())
    return Stderr(Lines()), reading


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("sqlq.worker", logging.INFO, __file__, 1, message, (), None)


def test_the_first_line_after_dropped_ones_has_their_number(handler: tuple[Stderr, int]) -> None:
    stderr, reading = handler
    taken = filled(stderr._stream)
    for number in range(3):
        stderr.handle(record(f"dropped {number}"))
    read(reading, lambda got: len(got) >= taken)
    stderr.handle(record("back"))
    stderr.handle(record("again"))
    got = read(reading, lambda got: got.endswith(b"again\n")).decode().splitlines()
    assert [line[30:] for line in got] == [
        "WARNING 3 lines were dropped: stderr took no more",
        "INFO    back",
        "INFO    again",
    ]
    taken = filled(stderr._stream)
    stderr.handle(record("dropped"))
    read(reading, lambda got: len(got) >= taken)
    stderr.flush()
    assert b" 1 line was dropped" in read(reading, lambda got: got.endswith(b"\n")), "at the end, too"


def test_a_line_that_was_cut_is_ended_and_counted(handler: tuple[Stderr, int]) -> None:
    stderr, reading = handler
    stderr.handle(record("x" * 200_000))
    got = read(reading, lambda got: len(got) >= 60_000)
    assert got.endswith(b"x")
    stderr.handle(record("back"))
    rest = read(reading, lambda got: got.endswith(b"back\n"))
    assert rest.startswith(b"\n")
    assert b" 1 line was dropped" in rest


def test_a_forked_process_writes_no_line_of_its_parent(handler: tuple[Stderr, int]) -> None:
    stderr, reading = handler
    stderr.handle(record("once"))
    if not (child := os.fork()):
        stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
    assert read(reading, lambda got: got.endswith(b"\n")).count(b"once") == 1


ROOT, SQLQ, WORKER = (logging.getLogger(name) for name in (None, "sqlq", "sqlq.worker"))
NAMES = [
    ("shop.send", "mail"),
    ('a "quoted"\ntask', "queue\r\nwith\\backslashes"),
    ("nul\0 \ud800", "Größe ☃"),
    ("task", b"\xff"),  # SQLite lets it in
]


@pytest.mark.parametrize(("task", "queue"), NAMES)
@pytest.mark.parametrize("form", [Lines(), Lines(ERASE), JsonLines()], ids=["text", "drawn", "json"])
def test_the_line_of_a_finished_job_equals_that_of_a_log_record(
    form: Lines | JsonLines, task: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(reporter.log, "handle", records.append)
    monkeypatch.setattr(reporter.log, "isEnabledFor", lambda level: True)
    reporter.write_line(
        JobEvent(name="finished", id=7, task=task, queue=queue, attempt=2, max_attempts=5, seconds=0.0123456)
    )
    (record,) = records
    job = ClaimedJob(7, 1, queue, task, "{}", 2, 5)
    assert form.finished(job, 0.0123456, form.time(record.created)) == form.format(record)


NULL, FILTER = logging.NullHandler(), OfJob()
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "a handler beside": (lambda: ROOT.addHandler(NULL), lambda: ROOT.removeHandler(NULL)),
    "a handler of sqlq": (lambda: SQLQ.addHandler(NULL), lambda: SQLQ.removeHandler(NULL)),
    "a filter of the logger": (lambda: WORKER.addFilter(FILTER), lambda: WORKER.removeFilter(FILTER)),
    "a filter of the handler": (
        lambda: ROOT.handlers[0].addFilter(FILTER),
        lambda: ROOT.handlers[0].removeFilter(FILTER),
    ),
    "records of another kind": (
        lambda: logging.setLogRecordFactory(type("Own", (logging.LogRecord,), {})),
        lambda: logging.setLogRecordFactory(logging.LogRecord),
    ),
}
"""Changes that programs make to logging, and their ends."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_logging_setup_gets_records(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ROOT, "handlers", [handler := Stderr(Lines())])
    assert reporter.lines_of_finished() == handler.finished
    do, undo = CHANGES[change]
    do()
    try:
        assert reporter.lines_of_finished() is None
    finally:
        undo()
    assert reporter.lines_of_finished() == handler.finished
    with monkeypatch.context() as patch:
        patch.setattr("logging.Logger.callHandlers", lambda self, record: None)
        assert reporter.lines_of_finished() is None
