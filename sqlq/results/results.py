"""Results of handlers, for callers that wait for them.

A job ends in one of three ways, and each has its answer: a value, `JobFailedError` or `JobCancelledError`.
`waiter` wakes those callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeAlias, overload

from sqlalchemy.exc import DBAPIError

from sqlq.config.durations import Duration, counted, milliseconds, readable
from sqlq.database.database import Database
from sqlq.errors import (
    ArgumentsError,
    ConfigurationError,
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    NoResultError,
    PayloadKeyError,
    WaitTimeoutError,
)
from sqlq.model.checks import checks_arguments
from sqlq.model.flow import FlowDetails
from sqlq.model.flow_parts import EnqueuedFlow
from sqlq.model.handle import Handle, id_of
from sqlq.model.job import Job, JobDetails, R, State, error_line
from sqlq.model.outcome import NOT_NEEDED
from sqlq.model.task import Registry
from sqlq.payload.encryption import Encryption, Unopened
from sqlq.results.waiter import End, Waiting, Watch
from sqlq.store.jobs import lookup
from sqlq.store.jobs.lookup import Seen, result_shown

AnyJob: TypeAlias = "Job[Any] | int"
AnyResult: TypeAlias = (
    "Job[Any] | JobDetails | EnqueuedFlow | FlowDetails | int | list[Job[Any]] | list[int] | list[JobDetails]"
)
AnyJobs: TypeAlias = "Iterable[Job[R] | JobDetails | int] | EnqueuedFlow | FlowDetails"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JobRunHere(Job[R]):
    """The answer of `enqueue` where jobs run at once and nothing is written: this process alone knows its
    end."""

    seen: Callable[[], Seen] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Waited(Generic[R]):
    """The answer of `wait_all`: the jobs that have `ended` in any way, and those still `pending`. Each list
    is in the order given, with the state that was seen last."""

    ended: list[Job[R]]
    pending: list[Job[R]]


class AsCompleted(Generic[R]):
    """Jobs as they end, to be gone through by `for` or by `async for`; see `App.as_completed`.

    Raises `WaitTimeoutError` when the time is over, counted from the first step of the loop. Raises
    `JobNotFoundError` for a job that is not there.
    """

    def __init__(
        self, results: Results, jobs: Mapping[int, AnyJob], timeout: Duration | None, *, whole: bool = False
    ) -> None:
        """`whole` is whether more than their states is wanted."""
        self._results = results
        self._jobs = jobs
        self._seconds = None if timeout is None else milliseconds(timeout, "timeout") / 1000
        self._whole = whole
        self.seen: dict[int, Seen] = {}
        """The last known state of each job."""

    def __iter__(self) -> Generator[Job[R], None, None]:
        rows = self._rows()
        yield from self._ended(self.seen)
        with self._watch(rows) as ends, suppress(TimeoutError):
            for end in as_completed(ends, self._seconds):
                yield self._received(*end.result())
        yield from self._look_at_last(rows)
        self._refuse_pending()

    async def __aiter__(self) -> AsyncGenerator[Job[R], None]:
        rows = self._rows()
        for job in self._ended(self.seen):
            yield job
        with self._watch(rows) as ends, suppress(TimeoutError):
            for end in asyncio.as_completed(map(asyncio.wrap_future, ends), timeout=self._seconds):
                yield self._received(*await end)
        if any(id not in self.seen for id in rows):
            for job in await asyncio.to_thread(self._look_at_last, rows):
                yield job
        self._refuse_pending()

    def job(self, id: int) -> Job[R]:
        """Return a job in its last known state."""
        job, seen = self._jobs[id], self.seen.get(id)
        if isinstance(job, Job):
            return job if seen is None else replace(job, state=seen.state)
        if seen is None:  # the database was away all the time
            raise self._timeout_of([id])
        return Job(id, seen.queue, seen.task, seen.state, created=False)

    def waited(self) -> Waited[R]:
        """Return the jobs that have ended, and the others. Raises `WaitTimeoutError` where nothing is known
        of a job but its id."""
        pending = set(self._pending())
        return Waited(
            ended=[self.job(id) for id in self._jobs if id not in pending],
            pending=[self.job(id) for id in self._jobs if id in pending],
        )

    def _rows(self) -> list[int]:
        """Look at the jobs that ran in this process, and return the others, which are rows."""
        for id, job in self._jobs.items():
            here = job if isinstance(job, JobRunHere) else self._results.job_here(job)
            if here is not None:
                self.seen[id] = here.seen()
        return [id for id in self._jobs if id not in self.seen]

    def _ended(self, ids: Iterable[int]) -> list[Job[R]]:
        return [self.job(id) for id in ids if self.seen[id].is_over]

    def _pending(self) -> list[int]:
        return [id for id in self._jobs if (seen := self.seen.get(id)) is None or not seen.is_over]

    @contextmanager
    def _watch(self, ids: list[int]) -> Iterator[list[Future[End]]]:
        """Have the waiter look for these jobs in the block. Yield the futures of their ends."""
        if not ids or self._seconds == 0:
            yield []
            return
        watch = Watch(ids, whole=self._whole)
        ends = list(watch.waits_for.values())
        self._results.waiter.watch(watch)
        try:
            yield ends
        finally:
            self._results.waiter.stop(watch)
            self.seen = watch.seen | self.seen

    def _look_at_last(self, ids: Iterable[int]) -> list[Job[R]]:
        """Look at the jobs that the waiter never looked at: there was no timeout, or its first connection
        took longer. Return those that have ended."""
        unseen = [id for id in ids if id not in self.seen]
        if not unseen or (self._seconds != 0 and self._results.waiter.is_away):
            return []
        database = self._results.database()
        try:
            database.require_tables()
            with database.read() as conn:
                rows = lookup.look(conn, dict.fromkeys(unseen, self._whole))
        except DBAPIError as error:
            if self._seconds == 0 or not self._results.waiter.may_mend(error):
                raise
            return []
        for id in unseen:
            self._received(id, rows.get(id))
        return self._ended(unseen)  # guard: timeout-checks-for-an-outcome

    def _require_own(self, id: int, seen: Seen | None) -> None:
        job = self._jobs[id]
        if isinstance(job, Job):
            job.require_own(seen and seen.created)

    def _received(self, id: int, seen: Seen | None) -> Job[R]:
        self._require_own(id, seen)
        if seen is None:
            raise JobNotFoundError(
                f"there is no job {id}: it never was, or is kept no more, or its transaction has not been "
                "committed"
            )
        self.seen[id] = seen
        return self.job(id)

    def _refuse_pending(self) -> None:
        """Raise `WaitTimeoutError` where not all have ended."""
        pending = self._pending()
        for id in pending:
            self._require_own(id, self.seen.get(id))
        if pending:
            raise self._timeout_of(pending)

    def _timeout_of(self, pending: list[int]) -> WaitTimeoutError:
        seen = self.seen.get(pending[0])
        state = "has not been seen" if seen is None else f"is {seen.state}"
        after = f" after {readable(self._seconds * 1000)}" if self._seconds else ""
        if isinstance(self._jobs[pending[0]], JobRunHere):
            after = ": it runs in this process when its transaction commits"
        if len(self._jobs) == 1:
            return WaitTimeoutError(f"job {pending[0]} {state} and has no result{after}")
        return WaitTimeoutError(
            f"{len(pending):,} of {len(self._jobs):,} jobs have not ended{after}; job {pending[0]} {state}"
        )


class Results:
    """Results and states of the jobs in a database, and of those that ran in this process."""

    def __init__(
        self,
        database: Callable[[], Database],
        tasks: Registry,
        here: Callable[[], Any],
        encryption: Encryption | None,
    ) -> None:
        """`here` returns the runner of jobs that run in this process, inline or eagerly; None where none
        have. Their results need no database, so it is opened for the first job that is a row."""
        self.database = database
        self._tasks = tasks
        self._here = here
        self._encryption = encryption

    @cached_property
    def waiter(self) -> Waiting:
        """Looks for all jobs that this process waits for."""
        return Waiting(self.database())

    def close(self) -> None:
        """Stop looking."""
        if "waiter" in self.__dict__:
            self.waiter.close(2.0)

    def job_here(self, job: Handle | int) -> Any:
        """Return a job that ran in this process, or is to; None for one that is a row."""
        is_row = isinstance(job, Handle) and not isinstance(job, JobRunHere)
        return None if is_row or (here := self._here()) is None else here.find(id_of(job))

    def value_of(self, job: Seen, *, raw: bool) -> Any:
        """Return the result of a finished job, converted by the return annotation of its task. Raises
        `NoResultError`, and `PayloadKeyError` for an encrypted one that these keys do not open."""
        if job.state is State.FAILED:
            line = error_line(job.reason, job.exception, job.message)
            tries = counted(job.attempts, "attempt")
            raise JobFailedError(f"job {job.id} ({job.task}) failed after {tries}: {line}", job)
        if job.state is State.CANCELLED:
            why = "" if job.reason is None else f": {job.reason}"
            raise JobCancelledError(f"job {job.id} ({job.task}) was cancelled{why}", job)
        if job.reason is not None:
            raise NoResultError(f"job {job.id} has finished, but {job.reason}")
        if job.result is None:
            return None
        result = result_shown(self._encryption, job.task, job.queue, job.result)
        if isinstance(result, Unopened):  # guard: unopened-result-is-none
            raise PayloadKeyError(f"the result of job {job.id} cannot be read: {result.why}")
        task = self._tasks.get(job.task)
        if result is None or raw or task is None or (conversion := task._interface.result_conversion) is None:
            return result
        try:
            return conversion.decode(result, f"the result of job {job.id}")
        except ArgumentsError as error:
            raise NoResultError(f"{error}: app.jobs.get({job.id}) has it as JSON") from None


class _End:
    """The jobs whose end a result needs: one job, or the last steps of a flow."""

    def __init__(self, results: Results, job: AnyResult, timeout: Duration | None) -> None:
        self._results, self._optional = results, set[int]()
        self._is_list = isinstance(job, list)
        self._is_flow = isinstance(job, (EnqueuedFlow, FlowDetails))
        jobs: AnyJobs[Any] = job if isinstance(job, (list, EnqueuedFlow, FlowDetails)) else [job]
        known = distinct(jobs)
        if isinstance(jobs, EnqueuedFlow):
            self._ends = [jobs.jobs[number].id for number in jobs.ends]
            self._is_list = jobs.is_list
            self._optional = {jobs.jobs[number].id for number in jobs.optional}
        elif isinstance(jobs, FlowDetails):
            before = {id for step in jobs.steps for id in step.after}
            self._ends = [id for id in known if id not in before]
            self._is_list = len(self._ends) > 1
            waits = [wait for step in jobs.steps for wait in step.after.items()]
            self._optional = {id for id, when in waits if when == "either"}
        else:
            self._ends = list(map(id_of, jobs))
        self._missing = set(self._ends or known)
        self.jobs: AsCompleted[Any] = AsCompleted(results, known, timeout, whole=True)

    def is_reached_by(self, job: Job[Any]) -> bool:
        """Whether nothing more need be waited for, now that this job has ended."""
        self._missing.discard(job.id)
        if job.state is State.FAILED and job.id not in self._optional:
            self._ends, self._is_list = [job.id], False  # guard: a-failed-step-ends-the-wait
            return True
        return not self._missing

    def value(self, *, raw: bool) -> Any:
        values = [self._value(self.jobs.seen[id], raw=raw) for id in self._ends]
        return values if self._is_list else values[0]

    def _value(self, job: Seen, *, raw: bool) -> Any:
        """Return the result of a job; None for a step of a flow that was optional and failed, or skipped."""
        is_absent = job.id in self._optional and job.state is State.FAILED
        if is_absent or (self._is_flow and job.reason == NOT_NEEDED):
            return None
        return self._results.value_of(job, raw=raw)


class Waits:
    """The methods of an App that wait for jobs."""

    _connected: Any
    """Its `results` have the jobs."""

    @overload
    def result(self, job: Job[Coroutine[Any, Any, R]], timeout: Duration | None = "0s") -> R: ...

    @overload
    def result(self, job: Job[R], timeout: Duration | None = "0s") -> R: ...

    @overload
    def result(self, job: list[Job[R]], timeout: Duration | None = "0s") -> list[R]: ...

    @overload
    def result(self, job: AnyResult, timeout: Duration | None = "0s", *, raw: bool = False) -> Any: ...

    @checks_arguments
    def result(self, job: AnyResult, timeout: Duration | None = "0s", *, raw: bool = False) -> Any:
        """Return the result of a job that has finished, converted by the handler's return annotation.

        - `job`: a job, its id, a flow, or a list of jobs.
        - `timeout`: the longest wait for the end: by default none, with None without end.
        - `raw`: whether to return the decoded JSON of the row, without conversion.

        Raises `JobFailedError` for a job that has failed for good, and `JobCancelledError`. Raises
        `WaitTimeoutError` (a `TimeoutError`) for a job that has not ended by then; it goes on. These are
        kinds of `NoResultError`, which stands for a result that was not kept. Raises `JobNotFoundError` for a
        job that never was, is kept no more, or whose transaction has not committed. With an id the static
        type is Any.

        The result of a flow is that of its last step, or a list where several steps, or a group, come last. A
        step that has failed for good raises at once. The result of a list of jobs is the list of theirs, and
        raises likewise.

        >>> receipt = app.result(app.enqueue(print_receipt.new(7)), timeout="10s")  # doctest: +SKIP
        """
        end = _End(self._connected.results, job, timeout)
        for ended in end.jobs:
            if end.is_reached_by(ended):
                break
        return end.value(raw=raw)

    @overload
    async def aresult(self, job: Job[Coroutine[Any, Any, R]], timeout: Duration | None = "0s") -> R: ...

    @overload
    async def aresult(self, job: Job[R], timeout: Duration | None = "0s") -> R: ...

    @overload
    async def aresult(self, job: list[Job[R]], timeout: Duration | None = "0s") -> list[R]: ...

    @overload
    async def aresult(self, job: AnyResult, timeout: Duration | None = "0s", *, raw: bool = False) -> Any: ...

    @checks_arguments
    async def aresult(self, job: AnyResult, timeout: Duration | None = "0s", *, raw: bool = False) -> Any:
        """`result`, awaited: the event loop goes on meanwhile, and no thread waits for this job alone.

        >>> receipt = await app.aresult(job, timeout="10s")  # doctest: +SKIP
        """
        end = _End(self._connected.results, job, timeout)
        async with aclosing(aiter(end.jobs)) as jobs:
            async for ended in jobs:
                if end.is_reached_by(ended):
                    break
        return end.value(raw=raw)

    @checks_arguments
    def wait_all(self, jobs: AnyJobs[R], timeout: Duration | None = None, *, all: bool = True) -> Waited[R]:
        """Wait for jobs; return those that have ended in any way, and those that have not.

        - `jobs`: jobs, their ids, or a flow.
        - `timeout`: the longest wait; its end is no error. None is without end.
        - `all`: whether to wait for all of them, or for one.

        Raises `JobNotFoundError` for one that is not there, or kept no more.

        >>> done = app.wait_all(app.enqueue_many([ask.new(shop) for shop in shops]), "5s")  # doctest: +SKIP
        >>> prices = [app.result(job) for job in done.ended]  # doctest: +SKIP
        """
        ends = self.as_completed(jobs, timeout)
        with suppress(WaitTimeoutError):
            for _ in ends:
                if not all:
                    break
        return ends.waited()

    @checks_arguments
    async def await_all(
        self, jobs: AnyJobs[R], timeout: Duration | None = None, *, all: bool = True
    ) -> Waited[R]:
        """`wait_all`, awaited.

        >>> done = await app.await_all(jobs, "5s")  # doctest: +SKIP
        """
        ends = self.as_completed(jobs, timeout)
        async with aclosing(aiter(ends)) as ended:
            with suppress(WaitTimeoutError):
                async for _ in ended:
                    if not all:
                        break
        return ends.waited()

    @checks_arguments
    def as_completed(self, jobs: AnyJobs[R], timeout: Duration | None = None) -> AsCompleted[R]:
        """Return these jobs as they end in any way, for `for` or `async for`: each once, in its final state.

        Raises `WaitTimeoutError` where not all have ended when the time is over, which begins with the first
        step of the loop. Raises `JobNotFoundError` as `wait_all` does.

        >>> for job in app.as_completed(jobs, timeout="1m"):  # doctest: +SKIP
        ...     print(app.result(job))
        """
        return AsCompleted(self._connected.results, distinct(jobs), timeout)


def distinct(jobs: AnyJobs[Any]) -> dict[int, AnyJob]:
    """Return jobs by their ids. Raises `ConfigurationError` for anything else."""
    if isinstance(jobs, EnqueuedFlow):
        jobs = jobs.jobs
    elif isinstance(jobs, FlowDetails):
        jobs = [step.id for step in jobs.steps]
    elif isinstance(jobs, (str, Handle)) or not isinstance(jobs, Iterable):
        raise ConfigurationError(f"{jobs!r:.99} is no list of jobs: write app.wait_all([job])")
    known: dict[int, AnyJob] = {}
    for job in jobs:
        if isinstance(job, Job):
            job.require_own()
            known[job.id] = job
        else:
            known.setdefault(id_of(job), id_of(job))
    return known
