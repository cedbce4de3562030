"""Bad messages on the pipes between processes of a worker: no process ends, or stops receiving."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Outcome
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.ipc.parent import Parent, SharedMemory
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.options import WorkerOptions
from sqlq.worker.run import isolated
from sqlq.worker.supervise.child import Child
from sqlq.worker.supervise.supervisor import Supervisor
from tests.kit import wait_until

pytestmark = pytest.mark.integration

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KINDS = ["Finished", "Failed", "Released", "Progress", "ClaimedJob", "ErrorText", "JobEvent", "no"]
packed_up = st.fixed_dictionaries(
    {"is": st.sampled_from([*KINDS, "datetime"])}, optional={"result": anything, "at": anything}
)
said_to_a_worker = ["look", "awaited", "paused", "events", "renewed", "none"]
said_to_a_supervisor = ["ready", "leaving", "replace", "ended", "report", "paused", "none"]
said_by_an_isolate = ["up", "began", "progress", "right", "outcome", "trace", "none"]


def messages(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    reports = st.fixed_dictionaries({"counts": anything, "running": anything, "idle_ms": anything})
    names_of_place = dict.fromkeys(("slots", "worker", "url", "schema"), anything)
    values = anything | packed_up | reports | st.fixed_dictionaries(names_of_place) | st.just([1, 1])
    return st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=4)


def fuzzed(*strategies: Any) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        often = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        given_some: Any = given(*strategies)
        return often(given_some(test))

    return mark


LINES = [b"", b"{", b"7", b"null", b'"x"', b"[]", b"[" * 100_000, b"\xff\xfe", b"9" * 5_000, b"{}" * 2, b"\0"]


@fuzzed(st.lists(st.binary(max_size=30) | st.sampled_from(LINES), max_size=8))
def test_a_line_that_is_no_message_is_skipped(lines: list[bytes]) -> None:
    here, there = Pipe.pair()
    writing = threading.Thread(target=there.sendall, args=(b"\n".join([*lines, b'{"last": 1}', b""]),))
    writing.start()
    message: Any = {}
    while "last" not in message:
        message = here.receive()
        assert isinstance(message, dict)
    writing.join(60)
    here.close()
    there.close()


@fuzzed(st.lists(messages(said_to_a_worker), max_size=6))
def test_no_message_stops_a_worker_from_receiving(said: list[dict[str, Any]]) -> None:
    box, fd = SharedMemory.create()
    os.close(fd)
    here, there = Pipe.pair()
    supervisor, stopped = Pipe(there), threading.Event()

    def follow(*what: Any) -> None:
        hash(what)

    worker = Parent(here, box)
    handlers: dict[str, Any] = dict.fromkeys(("renewed", "events", "awaited", "paused"), follow)
    worker.listen({**handlers, "stop": lambda grace: stopped.set()}, dict)
    for message in said:
        supervisor.send(**message)
    supervisor.send(stop=None)
    assert stopped.wait(60)
    worker._over = True
    supervisor.close()
    here.close()
    box.close()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child([sys.executable, "-c", "import signal; signal.pause()"], lambda child, message: None, {})
    yield child
    child.process.kill()
    wait_until(lambda: child.end() is not None, what="its process ending")
    child.close()


def test_no_message_ends_a_supervisor(child: Child) -> None:
    options = WorkerOptions(processes=1, lease_ms=30_000, grace_ms=1_000)

    @fuzzed(st.lists(messages(said_to_a_supervisor), max_size=6))
    def fuzz(said: list[dict[str, Any]]) -> None:
        supervisor = Supervisor([sys.executable, "-c", ""], options, {})
        supervisor._children = [child]
        kept: Any = SimpleNamespace(keep=lambda *what: None, deaths=supervisor._heartbeat.deaths)
        supervisor._heartbeat = kept
        for message in said:
            supervisor._receive(child, message)
            supervisor._calls.get()()
        supervisor._ended = supervisor._ended + child.counts
        assert supervisor.counts.total() + supervisor.running + supervisor.slots is not None

    fuzz()


def test_notifications_do_not_pile_up_for_a_stopped_child(child: Child) -> None:
    """Anybody may send notifications, and a stopped process reads none."""
    child.worker = "w"
    for _ in range(50_000):
        child.send()
    assert len(child.link._unsent) < 1_000


@fuzzed(st.lists(messages(said_by_an_isolate), max_size=6))
def test_messages_of_a_subprocess_are_an_outcome_or_its_end(said: list[dict[str, Any]]) -> None:
    """The caller handles exceptions: it kills the process and counts the attempt."""
    here, there = Pipe.pair()
    other = Pipe(there)
    for message in said:
        other.offer(**message)
    other.close()
    isolate: Any = SimpleNamespace(link=here)
    job = Attempt(ClaimedJob(1, 1, "q", "t", "{}", 1, 3), None, float("inf"), Target(), isolated=True)
    try:
        outcome = isolated.attempt_in(isolate, job, lambda job: None, lambda: None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return
    finally:
        here.close()
    assert outcome is None or isinstance(outcome, Outcome)
