"""The way of an enqueue through the modules: a reader who follows it opens few files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
from tests.kit.callers import async_session_of

pytestmark = pytest.mark.each_database

PACKAGE = str(Path(sqlq.__file__).parent)
MOST_FILES = 8


def files_of(call: Callable[[], object]) -> list[str]:
    """Return the files of sqlq whose code a warm call runs, in their order. After a pause a call checks more,
    so this takes the one with the fewest."""
    call()
    found = []
    for _ in range(5):
        files: dict[str, None] = {}

        def entered(frame: FrameType, event: str, argument: Any, files: dict[str, None] = files) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                files[frame.f_code.co_filename.removeprefix(PACKAGE)] = None

        sys.setprofile(entered)
        try:
            call()
        finally:
            sys.setprofile(None)
        found.append(list(files))
    return min(found, key=len)


@contextmanager
def no_session(engine: Engine) -> Iterator[None]:
    yield None


@pytest.mark.parametrize("opened", [Session, Engine.connect, no_session])
def test_an_enqueue_runs_through_few_files(
    app: sqlq.App, engine: Engine, opened: Callable[[Engine], Any]
) -> None:
    job = app.task(name="t")(print).new()
    with opened(engine) as session:
        files = files_of(lambda: app.enqueue(job, session=session))
    assert len(files) <= MOST_FILES, "\n".join(files)


def test_an_enqueue_of_an_asyncio_session_runs_through_the_same_files(
    app: sqlq.App, engine: Engine, database_url: str
) -> None:
    job = app.task(name="t")(print).new()
    with Session(engine) as session:
        files = files_of(lambda: app.enqueue(job, session=session))
    with async_session_of(database_url)(database_url) as caller:
        assert set(files_of(lambda: caller.enqueue(app, job))) == set(files)
