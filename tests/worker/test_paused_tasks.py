"""Pauses of one task, on every database: its jobs are blocked, keep their places, and are freed again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

import sqlq
from sqlq.admin.doctor.doctor import Doctor
from sqlq.errors import ConfigurationError
from sqlq.model.outcome import Paused, Settlement
from sqlq.schema.tables import jobs, tasks, wakes
from sqlq.schema.types import far, now
from sqlq.store.jobs import settle
from sqlq.store.limits import admit
from sqlq.store.workers import pauses
from sqlq.store.workers.workers import Wanted
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.maintain.control import Control
from sqlq.worker.maintain.pauses import EndPauses, FreePaused
from sqlq.worker.run.executor import Executor
from sqlq.worker.supervise.dispatch import Dispatcher
from sqlq.worker.supervise.heartbeat import Heartbeat
from tests.kit import claim, drain, working
from tests.waiting import wait_until

HEARD_SECONDS = 2.0
BUSY_MACHINE = 6.0


class Post:
    """An App with two tasks that note which jobs they ran, in their order."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.ran: list[int] = []
        self.mail = app.task(name="mail")(self.ran.append)
        self.fax = app.task(name="fax")(self.ran.append)

    def mails(self, *numbers: int, **options: Any) -> list[int]:
        return [job.id for job in self.app.enqueue_many([self.mail.new(n).set(**options) for n in numbers])]

    def faxes(self, *numbers: int, **options: Any) -> list[int]:
        return [job.id for job in self.app.enqueue_many([self.fax.new(n).set(**options) for n in numbers])]

    def seen(self, ids: Sequence[int]) -> list[tuple[str, str | None, int, int]]:
        """Return the state of each of these jobs, by what it is blocked, its attempts and releases."""
        found = [self.app.jobs.get(id) for id in ids]
        return [(job.state.value, job.blocked_by, job.attempts, job.releases) for job in found]

    def block(self, count: int) -> list[int]:
        """Enqueue jobs that the pause has blocked."""
        ids = self.mails(*range(count))
        with self.app.database.begin() as conn:
            values = {"blocked_by": "pause", "due_at": jobs.c.available_at, "available_at": far()}
            conn.execute(update(jobs).values(values))
        return ids


@pytest.fixture
def post(app: sqlq.App) -> Post:
    return Post(app)


def looks(app: sqlq.App) -> int:
    """Return how many looks at keys of limits are scheduled."""
    with app.database.begin() as conn:
        return int(conn.scalar(select(func.count()).select_from(wakes)) or 0)


BLOCKED = ("blocked", "pause", 0, 0)


def test_a_job_of_a_paused_task_does_not_run_and_counts_no_attempt(post: Post) -> None:
    assert post.app.queues.pause(task="mail") == ["mail"]
    assert post.app.queues.pause(task="mail") == []
    assert list(post.app.queues.pauses().tasks) == ["mail"]
    mails = post.mails(1, 2)
    post.faxes(3)
    assert drain(post.app).completed == 1
    assert (post.ran, post.seen(mails)) == ([3], [BLOCKED, BLOCKED])
    assert drain(post.app).completed == 0, "nothing claims them again"
    (status,) = post.app.queues.status()
    assert (status.blocked, status.paused) == (2, False)
    assert post.app.queues.resume(task="mail") == ["mail"]
    assert post.app.queues.resume(task="mail") == []
    assert drain(post.app).completed == 2
    assert post.app.jobs.get(mails[0]).attempts == 1


def test_a_running_worker_observes_the_pause_of_a_task_within_two_seconds(post: Post) -> None:
    with working(post.app):
        post.mails(0)
        wait_until(lambda: post.ran == [0], what="the first job")
        post.app.queues.pause(task="mail")
        asked: list[int] = []

        def is_blocked() -> bool:
            asked.extend(post.mails(len(asked) + 1))
            return any(state == BLOCKED for state in post.seen(asked))

        wait_until(is_blocked, timeout=HEARD_SECONDS + BUSY_MACHINE, what="a job that is blocked")
        before = list(post.ran)
        last = post.mails(*range(100, 110))
        wait_until(lambda: set(post.seen(last)) == {BLOCKED}, what="ten jobs that are blocked")
        assert post.ran == before
        post.app.queues.resume(task="mail")
        wait_until(lambda: set(range(100, 110)) <= set(post.ran), what="their runs")


def test_a_plain_insert_of_a_paused_task_is_blocked(post: Post) -> None:
    post.app.queues.pause(task="mail")
    with post.app.database.begin() as conn:
        conn.execute(insert(jobs).values(task="mail", payload='{"args": [1]}'))
    drain(post.app)
    (job,) = post.app.jobs.list()
    assert post.seen([job.id]) == [BLOCKED]


def test_a_job_keeps_its_place_through_a_pause(post: Post) -> None:
    post.app.queues.pause(task="mail")
    mails = post.mails(1, 2, delay="0s")
    due = [post.app.jobs.get(id).available_at for id in mails]
    drain(post.app)
    assert [post.app.jobs.get(id).due_at for id in mails] == due
    post.faxes(3)
    post.app.queues.resume(task="mail")
    assert [post.app.jobs.get(id).available_at for id in mails] == due
    drain(post.app, concurrency=1)
    assert post.ran == [1, 2, 3]


def test_a_resume_frees_two_thousand_jobs(post: Post) -> None:
    post.app.queues.pause(task="mail")
    post.block(2_000)
    post.app.queues.resume(task="mail")
    (status,) = post.app.queues.status()
    assert (status.available, status.blocked) == (2_000, 0)


def test_a_sweep_frees_jobs_that_a_killed_resume_left(post: Post) -> None:
    post.app.queues.pause(task="mail")
    post.app.queues.pause(task="fax")
    left = post.block(3)
    with post.app.database.begin() as conn:
        pauses.resume(conn, "mail", of=tasks)
    told: list[bool] = []
    service = FreePaused(post.app.database, lambda: told.append(True))
    service.run()
    assert (told, {state for state, *_ in post.seen(left)}) == ([True], {"available"})
    post.app.queues.pause(task="mail")
    drain(post.app)
    service.run()
    assert post.seen(left) == [BLOCKED] * 3, "a sweep leaves what is paused"


def test_a_worker_sweeps_jobs_that_a_killed_resume_left(post: Post) -> None:
    post.block(1)
    with working(post.app):
        wait_until(lambda: post.ran == [0], what="the job that was left")


def test_a_paused_job_holds_no_slot_of_its_limit(post: Post) -> None:
    limit = sqlq.Limit("post", running=1)
    mail = post.app.task(name="slow_mail", limit=limit)(post.ran.append)
    fax = post.app.task(name="slow_fax", limit=limit)(post.ran.append)
    post.app.queues.pause(task="slow_mail")
    waits = post.app.enqueue(mail.new(1)).id
    post.app.enqueue(fax.new(2))
    drain(post.app)
    assert (post.ran, post.seen([waits])) == ([2], [BLOCKED])
    assert looks(post.app) == 0
    post.app.queues.resume(task="slow_mail")
    assert post.seen([waits]) == [("blocked", "limit", 0, 0)]
    assert looks(post.app) == 1
    drain(post.app)
    assert post.ran == [2, 1]


def test_a_paused_serial_job_is_not_overtaken(post: Post) -> None:
    limit = sqlq.Serial("post")
    mail = post.app.task(name="slow_mail", limit=limit)(post.ran.append)
    fax = post.app.task(name="slow_fax", limit=limit)(post.ran.append)
    waits = post.app.enqueue(mail.new(1)).id
    post.app.enqueue(fax.new(2))
    with post.app.database.begin() as conn:
        conn.execute(insert(tasks).values(task="slow_mail", paused_at=now()))
    drain(post.app)
    assert (post.ran, post.seen([waits])) == ([], [("blocked", "limit", 0, 0)])
    assert looks(post.app) == 0
    post.app.queues.resume(task="slow_mail")
    assert looks(post.app) == 1
    drain(post.app)
    assert post.ran == [1, 2]


def test_a_claimed_serial_job_of_a_paused_task_is_blocked_again(post: Post) -> None:
    mail = post.app.task(name="slow_mail", limit=sqlq.Serial("post"))(post.ran.append)
    waits = post.app.enqueue(mail.new(1)).id
    admit.look(post.app.database)
    (job,) = claim(post.app)
    settlement = Settlement(job.id, job.lease_token, job.attempts, Paused(), limit_key=job.limit_key)
    with post.app.database.begin() as conn:
        assert settle.settle(conn, [settlement]) == {(job.id, job.lease_token)}
    assert post.seen([waits]) == [("blocked", "limit", 0, 0)]


def test_a_pause_of_a_task_ends_by_itself(post: Post) -> None:
    post.app.queues.pause(task="mail", lasting="1s")
    assert post.app.queues.pauses().tasks["mail"].until is not None
    post.mails(1)
    with working(post.app):
        wait_until(lambda: post.ran == [1], what="the job of the resumed task")
    assert post.app.queues.pauses().tasks == {}


def test_the_end_of_a_pause_frees_the_jobs_of_its_task(post: Post) -> None:
    post.app.queues.pause(task="mail", lasting="1ms")
    blocked = post.block(2)
    told: list[bool] = []
    free = FreePaused(post.app.database, lambda: told.append(True))
    service = EndPauses(post.app.database, lambda names: None, free)

    def is_over() -> bool:
        service.expect(0)
        service.run()
        service.run()
        return bool(told)

    wait_until(is_over, timeout=20, what="the end of the pause")
    assert {state for state, *_ in post.seen(blocked)} == {"available"}


def test_a_worker_that_has_not_observed_a_resume_blocks_nothing(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heed(control: Control, wanted: Wanted) -> None:
        control.pause_tasks(["mail"])

    monkeypatch.setattr(Control, "heed", heed)
    post.mails(1)
    assert drain(post.app).completed == 1


def test_a_pause_blocks_claimed_jobs_that_wait_for_a_slot(post: Post) -> None:
    ended: list[tuple[int, Any]] = []
    executor = Executor(
        1, lambda job: None, lambda job, how: ended.append((job.id, how)), may_start=lambda: False
    )
    mails, faxes = post.mails(1, 2), post.faxes(3)
    executor.offer([Attempt(job, None, float("inf")) for job in claim(post.app)])
    executor.put_off({"mail"})
    assert ended == [(id, Paused()) for id in mails]
    assert executor.load() == (0, len(faxes))


def test_a_supervisor_notifies_its_workers_of_paused_tasks() -> None:
    said: list[list[str]] = []

    def offer(*, paused_tasks: list[str]) -> None:
        said.append(paused_tasks)

    link = SimpleNamespace(offer=offer)
    child: Any = SimpleNamespace(worker="w", all_paused=False, knows_paused_tasks=True, link=link)
    host = Dispatcher(lambda: [child], Heartbeat(30_000))
    for paused_tasks in ((), (), ("mail",), ("mail",), (), ()):
        host._relay(Wanted(paused_tasks=paused_tasks))
    assert said == [[], ["mail"], ["mail"], []]


def test_blocked_jobs_are_cancelled_and_moved_as_others_are(post: Post) -> None:
    post.app.queues.pause(task="mail")
    one, two = post.mails(1, 2)
    drain(post.app)
    post.app.jobs.cancel([one])
    post.app.jobs.reschedule([two], delay="1h")
    assert post.seen([one, two]) == [("cancelled", None, 0, 0), BLOCKED]
    post.app.queues.resume(task="mail")
    assert post.seen([two]) == [("scheduled", None, 0, 0)]


def test_pause_takes_a_task_or_queues_and_not_both(post: Post) -> None:
    for switch in (post.app.queues.pause, post.app.queues.resume):
        for names, options in ((("q",), {"task": "mail"}), ((), {"task": "mail", "all": True}), ((), {})):
            with pytest.raises(ConfigurationError, match="and not both"):
                switch(*names, **options)
        with pytest.raises(ConfigurationError, match="task is"):
            switch(task=" ")


def test_the_doctor_names_a_paused_task(post: Post) -> None:
    post.app.queues.pause(task="mail")
    found = [f for f in Doctor(post.app.database).examine() if "the task mail is paused" in f.said]
    assert [finding.remedy for finding in found] != []
    post.app.queues.pause(task="mail", lasting="1h")
    assert not [f for f in Doctor(post.app.database).examine() if "the task mail is paused" in f.said]
