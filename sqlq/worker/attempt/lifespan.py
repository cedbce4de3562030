"""The lifespan of an App (`App.lifespan`). Each process that runs handlers enters it before its first job,
and leaves it after the last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlq.errors import SqlqError
from sqlq.model.middleware import Scope
from sqlq.worker.attempt.call import Run
from sqlq.worker.log import log

LOOK_SECONDS = 0.1


@contextmanager
def entered(scope: Scope, run: Run, fell: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """Enter a lifespan, and leave it after the block. It lives in this thread, or, if asynchronous, on the
    loop on which `run` runs coroutines.

    `fell` is called when an asynchronous one ends before it is left. Raises `SqlqError` when entering fails;
    a failure to leave is logged.
    """
    manager = _OnLoop(scope, run, fell) if scope.is_async else scope
    opened = None
    try:
        opened = manager.open()
        value = opened.__enter__()
    except BaseException as error:
        log.error("the lifespan %s failed", scope.name, exc_info=error)
        said = str(error).partition("\n")[0]
        raise SqlqError(f"the lifespan {scope.name} failed: {type(error).__name__}: {said}") from error
    try:
        yield value
    finally:
        try:
            opened.__exit__(None, None, None)
        except BaseException as error:
            log.error("the lifespan %s failed when it was left", scope.name, exc_info=error)


@dataclass(eq=False)
class _OnLoop:
    """An asynchronous lifespan as a synchronous context manager.

    It lives in one asyncio task: the task that enters a task group or a cancel scope must also leave it.
    """

    _scope: Scope
    _run: Run
    _fell: Callable[[], None]

    def open(self) -> _OnLoop:
        return self

    def __enter__(self) -> Any:
        return self._run(self._enter())

    def __exit__(self, *error: object) -> None:
        self._run(self._end())

    async def _enter(self) -> Any:
        self._leave = asyncio.Event()
        entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(entered))
        await asyncio.wait([self._task, entered], return_when=asyncio.FIRST_COMPLETED)
        if not entered.done():
            self._task.result()  # which raises
        self._task.add_done_callback(self._ended)
        return entered.result()

    async def _live(self, entered: asyncio.Future[Any]) -> None:
        async with self._scope.open() as value:
            entered.set_result(value)
            await self._leave.wait()

    async def _end(self) -> None:
        self._leave.set()
        await self._task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._leave.is_set():
            self._fell()


class Lifespan:
    """The lifespan of a worker process, if the App has one. It has a thread, so that a stop need not wait for
    its end."""

    value: Any = None
    """The value that it yielded."""
    _error: SqlqError | None = None

    def __init__(self, scope: Scope | None, run: Run, fell: Callable[[], None]) -> None:
        self.exists = scope is not None
        self.name = "" if scope is None else scope.name
        self._entered = threading.Event()
        self._leave = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(scope, run, fell), name="sqlq-lifespan", daemon=True
        )

    def enter(self, may_wait: Callable[[], bool]) -> bool:
        """Enter it; return False when that took longer than one may wait. Raises `SqlqError` when it
        fails."""
        if not self.exists:
            return True
        self._thread.start()
        while not self._entered.wait(LOOK_SECONDS):
            if not may_wait():
                return False
        if self._error is not None:
            raise self._error
        return True

    def leave(self, may_wait: Callable[[], bool]) -> bool:
        """Leave it; return whether it has ended while one might wait."""
        self._leave.set()
        while self._thread.is_alive() and may_wait():
            self._thread.join(LOOK_SECONDS)
        return not self._thread.is_alive()

    def is_open(self) -> bool:
        """Return whether it has been entered, or is being entered, and has not ended."""
        return self._thread.is_alive()

    def _run(self, scope: Scope, run: Run, fell: Callable[[], None]) -> None:
        try:
            with entered(scope, run, fell) as self.value:
                self._entered.set()
                self._leave.wait()
        except SqlqError as error:
            self._error = error
        finally:
            self._entered.set()
