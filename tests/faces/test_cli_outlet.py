"""Lines to stderr: in order, whole, and never waited for by the thread that writes them."""

from __future__ import annotations

import io
import os
import pty
import select
import socket
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from sqlq.cli import outlet
from sqlq.cli.outlet import Outlet
from tests.kit import refuse_threads
from tests.waiting import wait_until

Pair = tuple[TextIO, int]
"""A stream to write to, and the descriptor on which what it got is read."""


def note(lines: int) -> str:
    return f"{lines} dropped\n"


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
def opened() -> Iterator[Callable[[Callable[[], Pair]], Pair]]:
    pairs: list[Pair] = []

    def opened(make: Callable[[], Pair]) -> Pair:
        pairs.append(make())
        return pairs[-1]

    yield opened
    for stream, reading in pairs:
        stream.close()
        os.close(reading)


@pytest.fixture(params=["pipe", "inherited pipe", "terminal", "socket"])
def pair(
    request: pytest.FixtureRequest,
    opened: Callable[[Callable[[], Pair]], Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> Pair:
    if request.param == "inherited pipe":  # for example another user's
        monkeypatch.setattr(outlet, "_opened_anew", lambda fd: None)
    return opened({"terminal": terminal, "socket": unix_socket}.get(request.param, pipe))


def lines(numbers: range) -> list[str]:
    return [f"line {number} {'x' * 100}\n" for number in numbers]


def read(fd: int, until: Callable[[str], bool]) -> str:
    got = b""
    while not until(got.decode()):
        assert select.select([fd], [], [], 30)[0], "no more comes"
        got += os.read(fd, 65_536)
    return got.decode()


def test_lines_arrive_in_order(pair: Pair) -> None:
    stream, reading = pair
    to = Outlet(stream, note)
    for line in lines(range(10)):
        to.put(line)
    to.flush()
    assert read(reading, lambda got: got.count("\n") == 10) == "".join(lines(range(10)))
    assert os.get_blocking(stream.fileno()), "others have this descriptor, too"


def test_flush_writes_at_once_when_no_thread_can_be_started(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line is there when its process is killed, and busy handlers keep no line back."""
    refuse_threads(monkeypatch, "sqlq-stderr")
    stream, reading = pair
    to = Outlet(stream, note)
    to.put("line\n")
    to.flush()
    assert select.select([reading], [], [], 0)[0]
    assert os.read(reading, 65_536) == b"line\n"


def test_flush_begins_the_thread_later_when_none_can_be_started(
    opened: Callable[[Callable[[], Pair]], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, reading = opened(pipe)
    to = Outlet(stream, note)
    with monkeypatch.context() as patch:
        refuse_threads(patch, "sqlq-stderr")
        for line in lines(range(2_000)):
            to.put(line)
            to.flush()
    to.flush()
    assert read(reading, lambda got: got.count("\n") == 2_000) == "".join(lines(range(2_000)))


def test_lines_for_a_slow_reader_wait_without_blocking_the_thread(pair: Pair) -> None:
    stream, reading = pair
    to = Outlet(stream, note)
    for line in lines(range(6_000)):
        to.put(line)
        to.flush()
    assert read(reading, lambda got: got.count("\n") == 6_000) == "".join(lines(range(6_000)))


def test_lines_past_a_limit_are_dropped_and_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "MOST_WAITING", 20_000)
    stream, reading = pair
    to = Outlet(stream, note)
    for line in lines(range(6_000)):
        to.put(line)
        to.flush()
    got = read(reading, lambda got: " dropped\n" in got).splitlines(keepends=True)
    at, dropped = next((at, int(line.split()[0])) for at, line in enumerate(got) if line.endswith("ped\n"))
    assert got[:at] == lines(range(at))
    assert at + dropped == 6_000
    to.put("after\n")
    to.flush()
    assert [*got, read(reading, lambda got: got.endswith("after\n"))][-1].endswith("after\n")


def test_each_write_is_of_whole_lines(opened: Callable[[Callable[[], Pair]], Pair]) -> None:
    """A pipe takes so much as one, and the lines of other processes before or after it."""
    stream, _ = opened(pipe)
    to = Outlet(stream, note)
    written: list[bytes] = []
    to._write_now = lambda data: written.append(data) or len(data)  # type: ignore[func-returns-value]
    for line in lines(range(300)):
        to.put(line)
    to.flush()
    assert len(written) > 5
    assert all(data.endswith(b"\n") and len(data) <= 4096 for data in written)


def test_a_returning_reader_gets_the_count_of_dropped_lines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with (tmp_path / "fifo").open("w") as stream:
        to = Outlet(stream, note)
        os.close(reading)
        for line in lines(range(3)):
            to.put(line)
            to.flush()
        reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        to.put("back\n")
        to.flush()
        assert os.read(reading, 65_536) == b"3 dropped\nback\n"
        os.close(reading)


def test_finish_waits_for_the_reader_with_a_timeout(opened: Callable[[Callable[[], Pair]], Pair]) -> None:
    stream, reading = opened(pipe)
    to = Outlet(stream, note)
    for line in lines(range(2_000)):
        to.put(line)
    to.flush()
    ending = threading.Thread(target=to.finish, args=(0.01,), daemon=True)
    ending.start()
    wait_until(lambda: not ending.is_alive(), timeout=30, what="the end")
    took: list[str] = []
    reader = threading.Thread(target=lambda: took.append(read(reading, lambda got: got.count("\n") == 2_000)))
    reader.start()
    to.finish()
    reader.join()
    assert took == ["".join(lines(range(2_000)))]


def test_a_forked_process_does_not_write_waiting_lines(opened: Callable[[Callable[[], Pair]], Pair]) -> None:
    stream, reading = opened(pipe)
    to = Outlet(stream, note)
    to.put("once\n")
    if not (child := os.fork()):
        to.flush()
        os._exit(0)
    os.waitpid(child, 0)
    to.flush()
    assert os.read(reading, 65_536) == b"once\n"


def test_progress_is_not_drawn_while_lines_wait(
    opened: Callable[[Callable[[], Pair]], Pair],
) -> None:
    stream, reading = opened(pipe)
    to = Outlet(stream, note)
    to.draw("drawn\n")
    to.put("line\n")
    to.draw("not drawn\n")
    to.flush()
    assert os.read(reading, 65_536) == b"drawn\nline\n"


def test_an_outlet_without_a_descriptor_writes_to_its_stream() -> None:
    stream = io.StringIO()
    for to in (Outlet(None, note), Outlet(stream, note)):
        to.put("line\n")
        to.flush()
        to.finish()
    assert stream.getvalue() == "line\n"


def test_lines_are_dropped_when_the_disk_is_full() -> None:
    with Path("/dev/full").open("w") as stream:
        to = Outlet(stream, note)
        to.put("line\n")
        to.flush()
        assert to._dropped == 1


def test_lines_are_dropped_when_the_stream_is_closed() -> None:
    stream = io.StringIO()
    to = Outlet(stream, note)
    stream.close()
    to.put("line\n")
    to.flush()
    to.finish()
    assert to._dropped == 1
