"""The lifespan of an App (`App.lifespan`). Each process that runs handlers enters it before its first job,
and leaves it after the last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from sqlq.errors import SqlqError
from sqlq.model.middleware import Scope
from sqlq.worker.attempt.call import Run
from sqlq.worker.threads.log import log

LOOK_SECONDS = 0.1


@contextmanager
def entered(scope: Scope, run: Run, ended: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """Enter a lifespan, and leave it after the block. It lives in this thread, or, if asynchronous, on the
    loop on which `run` runs coroutines.

    `ended` is called when an asynchronous one ends before it is left. Raises `SqlqError` when entering fails;
    a failure to leave is logged.
    """
    try:
        opened = _on_loop(scope, run, ended) if scope.is_async else scope.open()
        value = opened.__enter__()
    except BaseException as error:
        log.error("the lifespan %s failed", scope.name, exc_info=error)
        text = str(error).partition("\n")[0]
        raise SqlqError(f"the lifespan {scope.name} failed: {type(error).__name__}: {text}") from error
    try:
        yield value
    finally:
        try:
            opened.__exit__(None, None, None)
        except BaseException as error:
            log.error("the lifespan %s failed when it was left", scope.name, exc_info=error)


@contextmanager
def _on_loop(scope: Scope, run: Run, ended: Callable[[], None]) -> Iterator[Any]:
    """Enter an asynchronous lifespan, and leave it after the block.

    It lives in one asyncio task: the task that enters a task group or a cancel scope must also leave it.
    """
    leaving = asyncio.Event()

    async def live(entered: asyncio.Future[Any]) -> None:
        async with scope.open() as value:
            entered.set_result(value)
            await leaving.wait()

    async def enter() -> tuple[asyncio.Task[None], Any]:
        entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(live(entered))
        await asyncio.wait([task, entered], return_when=asyncio.FIRST_COMPLETED)
        if not entered.done():
            task.result()  # which raises
        task.add_done_callback(lambda _: None if leaving.is_set() else ended())
        return task, entered.result()

    async def leave(task: asyncio.Task[None]) -> None:
        leaving.set()
        await task

    task, value = run(enter())
    try:
        yield value
    finally:
        run(leave(task))


class Lifespan:
    """The lifespan of a worker process, if the App has one. It has a thread, so that a stop need not wait for
    its end."""

    value: Any = None
    """The value that it yielded."""

    def __init__(self, scope: Scope | None, run: Run, ended: Callable[[], None]) -> None:
        self._scope = scope
        self._entered: Future[Any] = Future()
        self._leave = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(scope, run, ended), name="sqlq-lifespan", daemon=True
        )

    def enter(self, may_wait: Callable[[], bool]) -> bool:
        """Enter it; return False when that took longer than one may wait. Raises `SqlqError` when it
        fails."""
        if self._scope is None:
            return True
        self._thread.start()
        while True:
            try:
                self.value = self._entered.result(LOOK_SECONDS)
                return True
            except TimeoutError:
                if not may_wait():
                    return False

    def leave(self, may_wait: Callable[[], bool]) -> None:
        """Leave it. It is left behind where it does not end while one may wait."""
        self._leave.set()
        while self._thread.is_alive() and may_wait():
            self._thread.join(LOOK_SECONDS)
        if self._scope is not None and self._thread.is_alive():
            log.error("the lifespan %s does not end, and is left behind", self._scope.name)

    def is_open(self) -> bool:
        """Return whether it has been entered, or is being entered, and has not ended."""
        return self._thread.is_alive()

    def _run(self, scope: Scope, run: Run, ended: Callable[[], None]) -> None:
        try:
            with entered(scope, run, ended) as value:
                self._entered.set_result(value)
                self._leave.wait()
        except SqlqError as error:
            self._entered.set_exception(error)
