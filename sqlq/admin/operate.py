"""What an App has for operators and their programs: to look at jobs, to mend them, and to hold queues up.

Each is done by the room that knows how: `admin`, or `replay`.
"""

from __future__ import annotations

import asyncio
import builtins
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlq.config.durations import Duration
from sqlq.enqueue.prepare import Stamps
from sqlq.events import Events
from sqlq.model.flow_status import FlowDetails
from sqlq.model.handle import AnyJob, AnyJobs
from sqlq.model.job import JobDetails
from sqlq.model.task import Registry

if TYPE_CHECKING:
    from typing import Unpack

    from sqlq.admin.admin import Admin, Pruned, WorkerStatus
    from sqlq.admin.cancel import Cancellation
    from sqlq.admin.replay import Replayed, ReplayOptions
    from sqlq.database.database import Database


class Operates:
    """What an App has for those who look at jobs and mend them."""

    if TYPE_CHECKING:
        tasks: Registry
        events: Events
        _stamps: Stamps

        @property
        def database(self) -> Database: ...

        @property
        def admin(self) -> Admin: ...

        def job_here(self, job: AnyJob) -> Any: ...

    def get(self, id: AnyJob) -> JobDetails:
        """Return everything about a job, whatever its state; where its row does not say how often it may be
        tried and how long an attempt may take, what its task says. Raises `JobNotFoundError`.

        >>> app.get(42).progress  # doctest: +SKIP
        Progress(done=25.0, of=100.0, note='writing')
        """
        here = self.job_here(id)
        return self._with_its_tasks(self.admin.get(id) if here is None else here.details())

    def _with_its_tasks(self, job: JobDetails) -> JobDetails:
        task = self.tasks.get(job.task)
        if task is None or (job.max_attempts is not None and job.timeout_ms is not None):
            return job
        task = task.for_queue(job.queue)
        return replace(
            job,
            max_attempts=task.max_attempts if job.max_attempts is None else job.max_attempts,
            timeout_ms=task.timeout_ms if job.timeout_ms is None else job.timeout_ms,
        )

    def list(
        self, *, state: str | None = None, queue: str | None = None, task: str | None = None, limit: int = 100
    ) -> builtins.list[JobDetails]:
        """Return the newest jobs, of a state, queue or task if given, at most `limit`."""
        return self.admin.list(state=state, queue=queue, task=task, limit=limit)

    def flow(self, id: int) -> FlowDetails:
        """Return a flow: how many of its steps are in which state, how far it is, its steps with what they
        wait for, and their results.

        Reads all its steps and their results. Raises `JobNotFoundError`.

        >>> app.flow(7).progress  # doctest: +SKIP
        Progress(done=3, of=4, note=None)
        """
        return self.admin.flow(id)

    async def aget(self, id: AnyJob) -> JobDetails:
        """`get` in a thread, so that the event loop goes on meanwhile.

        >>> job = await app.aget(42)  # doctest: +SKIP
        """
        return await asyncio.to_thread(self.get, id)

    async def alist(
        self, *, state: str | None = None, queue: str | None = None, task: str | None = None, limit: int = 100
    ) -> builtins.list[JobDetails]:
        """`list` in a thread, so that the event loop goes on meanwhile."""
        return await asyncio.to_thread(self.list, state=state, queue=queue, task=task, limit=limit)

    async def aflow(self, id: int) -> FlowDetails:
        """`flow` in a thread, so that the event loop goes on meanwhile."""
        return await asyncio.to_thread(self.flow, id)

    def retry_failed(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> builtins.list[int]:
        """Move failed jobs back to be run again, with all their attempts, under the same id; return the ids
        moved.

        By ids, by task, by queue, or `all=True`. A job whose unique key a live job holds stays failed.
        """
        return self.admin.retry_failed(ids, task=task, queue=queue, all=all)

    async def aretry_failed(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> builtins.list[int]:
        """`retry_failed` in a thread, so that the event loop goes on meanwhile. Once begun it goes on to its
        end, also where the awaiting task is cancelled."""
        return await asyncio.to_thread(self.retry_failed, ids, task=task, queue=queue, all=all)

    def cancel(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, force: bool = False
    ) -> dict[int, Cancellation]:
        """Cancel live jobs, by ids, by task or by queue, and say what became of each.

        A waiting job is "cancelled". A running one is "requested": its worker sees that within 2 s, and asks
        the handler to stop. With `force` it is cancelled here and now, and
        whatever its worker still writes for it counts for nothing. Of ids also "ended", "unknown", "passed
        over" (not of the task or queue named) and "locked" (try again).

        >>> app.cancel([42, 43]) == {42: "cancelled", 43: "requested"}  # doctest: +SKIP
        True
        """
        return self.admin.cancel(ids, task=task, queue=queue, force=force)

    async def acancel(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, force: bool = False
    ) -> dict[int, Cancellation]:
        """`cancel` in a thread, so that the event loop goes on meanwhile. Once begun it goes on to its end,
        also where the awaiting task is cancelled."""
        return await asyncio.to_thread(self.cancel, ids, task=task, queue=queue, force=force)

    def replay(self, ids: AnyJob | AnyJobs = (), **options: Unpack[ReplayOptions]) -> Replayed:
        """Enqueue ended jobs once more, as new jobs with ids of their own; say which became which.

        By id, by task, by queue, or by when they ended: `since` and `until` are moments with a time zone, or
        how long ago, as in "2h"; all that is given must fit. Without `state` finished and failed jobs are
        meant, by id cancelled ones, too. A replay has the task, arguments, queue, priority, options, headers,
        label and limit of the job whose replay it is (`app.get(id).replay_of`), but no unique key, no time to
        be started in, and no cursor. Of one job `args` and `kwargs` may be changed, each as a whole. With a
        `rate`, as in "10/s", they are due one after the other. A `dry_run` counts, shows the first few, and
        writes nothing.

        What was replayed before, or is a replay, is left out, unless `again` is true; of ids that are named
        only what was replayed before. Steps of flows are left out, and refused by id. Done in batches of 500,
        each in a transaction of its own, after which `progress` is called with how many are done, and of how
        many: a call that was broken off and is repeated goes on where it ended. Raises `JobNotFoundError` for
        an id that is not kept any more, and `ConfigurationError` for one that has not ended, or where all
        that are named have been replayed already, before anything is written.

        >>> app.replay(42, kwargs={"copy": True}).jobs  # doctest: +SKIP
        {42: 97}
        >>> app.replay(task="shop.send_receipt", since="2h", rate="10/s").number  # doctest: +SKIP
        311
        """
        from sqlq.admin.replay import Replays

        replays = Replays(self.database, self.tasks, self.events, self._stamps)
        return replays.replay(self.admin.ids_of(ids), **options)

    async def areplay(self, ids: AnyJob | AnyJobs = (), **options: Unpack[ReplayOptions]) -> Replayed:
        """`replay` in a thread, with the same options, so that the event loop goes on meanwhile. Once begun
        it goes on to its end, also where the awaiting task is cancelled.

        >>> done = await app.areplay(task="shop.send_receipt", since="2h")  # doctest: +SKIP
        """
        return await asyncio.to_thread(self.replay, ids, **options)

    def pause(self, queue: str, *, lasting: Duration | None = None) -> bool:
        """Let no worker claim from a queue until it is resumed, or for as long as `lasting` says; return
        whether it was not paused before. What was said last about the end counts.

        What is claimed already still runs, and enqueueing goes on. A queue that is not known yet may be
        paused, too.

        >>> app.pause("mail", lasting="10m")  # doctest: +SKIP
        True
        """
        return self.admin.pause([queue], lasting=lasting)[0].changed

    def resume(self, queue: str) -> bool:
        """Let workers claim from a queue again; return whether it was paused."""
        return self.admin.resume([queue])[0].changed

    def pause_all(self, *, lasting: Duration | None = None) -> bool:
        """Let no worker claim anything, not even from queues made later, until `resume_all` or for as long as
        `lasting` says; return whether that was not so before. Workers see it within 2 s."""
        return self.admin.pause_all(lasting=lasting)

    def resume_all(self) -> bool:
        """End the pause of all queues; those paused by name stay so. Return whether there was one."""
        return self.admin.resume_all()

    def prune(self, *, finished: Duration | None = None, failed: Duration | None = None) -> Pruned:
        """Delete jobs that finished or were cancelled longer ago than `finished`, and jobs that failed longer
        ago than `failed`; return how many of each. Workers prune finished jobs by themselves, see
        `App(retention=…)`. Jobs with a `retention` of their own are left alone: workers delete them, failed
        ones too, when it is over.

        >>> app.prune(finished="7d", failed="30d")  # doctest: +SKIP
        Pruned(finished=1200, failed=3)
        """
        return self.admin.prune(finished=finished, failed=failed)

    def workers(self) -> builtins.list[WorkerStatus]:
        """Return the workers that are alive and the jobs that each holds, the longest running first."""
        return self.admin.workers()
