"""Serial: one job of a key after the other, in the order of their ids, retries included."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text

import sqlq
from sqlq.store.limits import admit
from tests.kit import claim_on, wait_until, waiting_for_locks, working


class Books:
    """An App with accounts whose bookings are noted as they come."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.noted: list[tuple[Any, int]] = []
        self.broken: set[int] = set()
        self.once: set[int] = set()
        self.lock = threading.Lock()

    def task(self, **options: Any) -> sqlq.Task[..., None]:
        @self.app.task(name="book", **options)
        def book(account: str, n: int) -> None:
            with self.lock:
                self.noted.append((account, n))
            if n in self.broken:
                raise ValueError("broken")
            if n in self.once:
                self.once.discard(n)
                raise ValueError("not yet")

        return book

    def work(self, **options: Any) -> list[int]:
        before = len(self.noted)
        self.app.worker(drain=True, concurrency=6, **options).run()
        return [n for _, n in self.noted[before:]]

    def of(self, account: str) -> list[int]:
        return [n for name, n in self.noted if name == account]


@pytest.fixture
def books(app: sqlq.App) -> Books:
    return Books(app)


def test_jobs_of_a_key_run_in_the_order_of_their_ids(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"))
    later = [book.new("a", n).set(priority=n) for n in range(8)]  # priorities do not change the order
    books.app.enqueue_many([*later, *(book.new("b", n) for n in range(8))])
    with ThreadPoolExecutor(2) as threads:
        for worker in [threads.submit(books.work) for _ in range(2)]:
            worker.result(60)
    assert books.of("a") == books.of("b") == list(range(8))


def test_later_jobs_wait_for_the_next_attempt(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"), backoff="50ms")
    books.once = {1, 3}
    books.app.enqueue_many([book.new("a", n) for n in range(5)])
    with working(books.app, concurrency=5):
        wait_until(lambda: len(books.app.jobs.list(state="finished")) == 5)
    assert books.of("a") == [0, 1, 1, 2, 3, 3, 4]


def test_a_delayed_job_blocks_those_after_it(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"))
    first = books.app.enqueue(book.new("a", 1).set(delay="1h"))
    books.app.enqueue(book.new("a", 2))
    assert books.work() == []
    books.app.jobs.cancel([first.id])
    assert books.work() == [2]


def test_the_next_job_runs_after_a_final_failure(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"), max_attempts=1)
    books.broken = {1}
    books.app.enqueue_many([book.new("a", n) for n in range(3)])
    assert books.work() == [0, 1, 2]
    books.broken.clear()
    books.app.enqueue(book.new("a", 3))
    books.app.jobs.retry(all=True)  # whose id is the least again
    assert books.work() == [1, 3]


def test_a_failure_holds_the_key_until_it_is_retried(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}", on_failure="hold"), max_attempts=1)
    books.broken = {1}
    books.app.enqueue_many([book.new("a", n) for n in range(3)])
    books.app.enqueue(book.new("b", 7))
    assert sorted(books.work()) == [0, 1, 7]
    assert len(books.app.jobs.list(state="blocked")) == 1
    books.broken.clear()
    books.app.jobs.retry(all=True)
    assert books.work() == [1, 2]


def test_a_failure_holds_the_key_until_it_is_deleted(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}", on_failure="hold"), max_attempts=1)
    books.broken = {0}
    books.app.enqueue_many([book.new("a", n) for n in range(3)])
    assert books.work() == [0]
    books.app.jobs.delete(all=True)
    assert admit.look(books.app.database).number == 1
    assert books.work() == [1, 2]


def test_a_head_that_is_locked_is_not_overtaken(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"))
    first, second = books.app.enqueue_many([book.new("a", n) for n in range(2)])
    admit.look(books.app.database, limit=0)
    if books.app.database.dialect.in_a_file:
        return  # nobody holds a row there while another writes
    with books.app.database.begin() as conn, ThreadPoolExecutor(1) as threads:
        conn.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": first.id})
        admitting = threads.submit(admit.look, books.app.database)
        wait_until(lambda: admitting.done() or waits(books.app))  # MariaDB refuses a locked row at once
        conn.commit()
        if refused := admitting.exception(60):
            assert "Lock wait timeout" in str(refused)
        else:
            assert admitting.result().number == 1
    assert admit.look(books.app.database).number == (1 if refused else 0)
    with books.app.database.begin() as conn:
        assert [job.id for job in claim_on(conn, limit=9, lease_ms=1000)] == [first.id]
    assert books.app.jobs.get(second.id).state == "blocked"


def waits(app: sqlq.App) -> bool:
    return bool(waiting_for_locks(app.database.engine))
