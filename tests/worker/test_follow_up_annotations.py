"""A task follows others where its annotation takes how a job ended, and is refused at their declaration where
it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import pytest

import sqlq
from tests.kit import for_each


@dataclass
class Part:
    """Some of what is known of an ending."""

    id: int
    task: str


@dataclass
class Other:
    order: int


class Typed(TypedDict, total=False):
    id: int


TAKING: dict[str, tuple[Any, bool]] = {
    "a JobOutcome": (sqlq.JobOutcome, True),
    "a JobOutcome or none": (sqlq.JobOutcome | None, True),
    "a dict": (dict, True),
    "a dict of a type": (dict[str, Any], True),
    "a mapping": (Mapping[str, Any], True),
    "a dict of a known form": (Typed, True),
    "anything": (Any, True),
    "any object": (object, True),
    "one of several": (int | sqlq.JobOutcome, True),
    "a number or a dict": (int | dict[str, Any], True),
    "what is not known here": ("NotHere", True),
    "a class that has some of it": (Part, False),
    "a number": (int, False),
    "a text": (str, False),
    "a text in quotes": ("str", False),
    "a list": (list[Any], False),
    "a truth or none": (bool | None, False),
    "nothing": (None, False),
    "an id": (UUID, False),
    "a moment": (datetime, False),
    "a class of another form": (Other, False),
    "a word": (Literal["failed"], False),
    "an annotated number": (Annotated[int, "of the order"], False),
}


@for_each("what", TAKING)
def test_a_task_with_another_annotation_cannot_be_a_callback(what: str) -> None:
    app = sqlq.App("sqlite://")
    hint, fits = TAKING[what]

    def handler(ended: Any) -> None: ...

    handler.__annotations__["ended"] = hint
    follows = app.task(name="follows")(handler)
    pay = app.task(name="pay")(lambda: None)
    ways: list[tuple[str, Callable[[], Any]]] = [
        ("on_failure", lambda: app.task(name=f"f{len(app.tasks)}", on_failure=follows)(lambda: None)),
        ("on_success", lambda: app.task(name=f"s{len(app.tasks)}", on_success=follows)(lambda: None)),
        ("on_failure", lambda: pay.new().set(on_failure=follows)),
        ("on_success", lambda: pay.new().set(on_success=app.named("follows"))),
    ]
    for option, way in ways:
        if fits:
            way()
            continue
        with pytest.raises(
            sqlq.SqlqError, match=f"^{option} is follows, whose ended is annotated as "
        ) as error:
            way()
        assert isinstance(error.value, (sqlq.errors.ConfigurationError, sqlq.EnqueueError))


def test_the_annotation_of_a_callback_may_be_defined_later(app: sqlq.App) -> None:
    """Its own are read anew when it is called."""

    def handler(ended: Late) -> None:  # type: ignore[name-defined]  # noqa: F821
        heard.append(ended)

    heard: list[Any] = []
    follows = app.task(name="follows")(handler)
    pay = app.task(name="pay", on_success=follows)(lambda: None)
    globals()["Late"] = sqlq.JobOutcome
    try:
        app.enqueue(pay.new())
        app.worker(drain=True).run()
    finally:
        del globals()["Late"]
    assert [type(each) for each in heard] == [sqlq.JobOutcome]
