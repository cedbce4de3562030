"""Tasks: names, options, what `.new()` refuses, and arguments that arrive as they were sent or not at all."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import re
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, Protocol, TypedDict, TypeVar
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sqlq
import sqlq.testing
from sqlq.config.constants import PAYLOAD_BYTES
from sqlq.errors import ArgumentsError, ConfigurationError, UnknownTaskError
from sqlq.model.task import Registry, make_task
from sqlq.payload import headers
from sqlq.payload.codec import check_json, decode, decoded, encode, encode_plain
from sqlq.payload.reader import read
from sqlq.worker.attempt.own_row import decode_cursor
from tests.kit import for_each

T = TypeVar("T")
OrderId = NewType("OrderId", int)


def send(order_id: int, *, copy: bool = False) -> str:
    """Send a receipt."""
    return f"{order_id} {copy}"


async def send_async(order_id: int) -> int:
    return order_id


def generate() -> Iterator[int]:
    yield 1


async def generate_async() -> AsyncIterator[int]:
    yield 1


def anything(*args: Any, **kwargs: Any) -> None: ...


class Callme:
    def __call__(self, order_id: int) -> int:
        return order_id


class CallmeAsync:
    async def __call__(self, order_id: int) -> int:
        return order_id


class Sender:
    def send(self, order_id: int) -> int:
        return order_id

    @staticmethod
    def dispatch(order_id: int) -> int:
        return order_id


# -- names and options ---------------------------------------------------------------------------------------


def test_a_task_is_named_after_its_function() -> None:
    assert make_task(send).name == f"{__name__}.send"
    assert make_task(Sender.dispatch).name == f"{__name__}.Sender.dispatch"
    assert make_task(send, name="shop.send").name == "shop.send"


def test_handlers_that_no_worker_could_import_need_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested() -> None: ...

    handlers: list[Any] = [lambda: None, functools.partial(send, 7), Callme(), make_task(send), nested]
    for handler in handlers:
        with pytest.raises(ConfigurationError, match="cannot be imported by its name: define it"):
            make_task(handler)
        assert make_task(handler, name="shop.send").name == "shop.send"
    monkeypatch.setattr(send, "__module__", "__main__")
    with pytest.raises(ConfigurationError, match=r"^send of __main__ cannot be imported by its name"):
        make_task(send)


@for_each(
    ("handler", "is_async"),
    [
        *((send, False), (send_async, True), (functools.partial(send_async, 7), True)),
        *((CallmeAsync(), True), (Callme(), False), (Sender().send, False)),
    ],
)
def test_async_handlers_are_known_as_such(handler: Callable[..., Any], is_async: bool) -> None:
    assert make_task(handler, name="shop.send").is_async is is_async


def test_jobs_have_the_options_of_their_task() -> None:
    several: Any = [ValueError]
    task = make_task(
        send, queue="mail", max_attempts=9, priority=10, timeout="30s", retry_on=OSError, fail_on=several
    )
    job = task.new(7, copy=True)
    assert (job.task, job.queue, job.max_attempts) == (task.name, "mail", 9)
    assert (job.priority, job.timeout_ms) == (10, 30_000)
    assert (task.retry.retry_on, task.retry.fail_on) == ((OSError,), (ValueError,))
    assert decode(job.payload) == ([7], {"copy": True})


def test_both_forms_of_the_decorator_and_a_call_of_the_task() -> None:
    app = sqlq.App("sqlite:///shop.db")
    plain, named = app.task(send), app.task(name="shop.send", queue="mail")(send_async)
    assert plain(7, copy=True) == "7 True"
    assert asyncio.run(named(7)) == 7
    assert dict(app.tasks) == {plain.name: plain, "shop.send": named}
    with pytest.raises(ConfigurationError, match=r"@app.task was given 'mail': options are named"):
        app.task("mail")  # type: ignore[call-overload]


def test_a_task_is_found_by_its_name_and_its_aliases() -> None:
    registry = Registry()
    with pytest.raises(UnknownTaskError, match=r"no task is named 'shop.sent': the App has no tasks; import"):
        registry.find("shop.sent")
    task = make_task(send, name="shop.send", aliases=["mail.send"])
    registry.add(task)
    assert registry["mail.send"] is registry.find("mail.send") is registry.find("shop.send") is task
    assert (list(registry), len(registry)) == (["shop.send"], 1)
    assert task.new(7).task == "shop.send"
    for wrong, near in (("shop.sent", "shop.send"), ("mail.sent", "mail.send")):
        with pytest.raises(UnknownTaskError, match=rf"no task is named '{wrong}'; did you mean {near}\?"):
            registry.find(wrong)


@for_each(
    ("options", "twice"),
    [
        ({"name": "shop.send"}, "shop.send"),
        ({"name": "mail.send"}, "mail.send"),
        ({"name": "new", "aliases": ["mail.send"]}, "mail.send"),
        ({"name": "new", "aliases": ["shop.send"]}, "shop.send"),
    ],
)
def test_names_and_aliases_are_registered_once(options: dict[str, Any], twice: str) -> None:
    registry = Registry()
    registry.add(make_task(send, name="shop.send", aliases=["mail.send"]))
    places = r".*test_task.py:\d+ and .*test_task.py:\d+"
    with pytest.raises(ConfigurationError, match=rf"two tasks are named '{twice}' \({places}"):
        registry.add(make_task(send_async, **options))
    assert "new" not in registry
    assert registry["shop.send"].handler is send


# -- new -----------------------------------------------------------------------------------------------------


@for_each(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"order_id": 1}), ((1,), {"coppy": True})])
def test_arguments_must_fit_the_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = r"test_task\.send\(order_id: 'int', \*, copy: 'bool' = False\) -> 'str': "
    with pytest.raises(ArgumentsError, match=signature):
        make_task(send).new(*args, **kwargs)


def test_parameters_may_have_any_name() -> None:
    def named(self: int, args: int, kwargs: int, task: int, name: int) -> tuple[int, ...]:
        return (self, args, kwargs, task, name)

    task = make_task(named, name="shop.named")
    arguments = {"self": 1, "args": 2, "kwargs": 3, "task": 4, "name": 5}
    assert decode(task.new(**arguments).payload) == ([], arguments)
    assert task(**arguments) == (1, 2, 3, 4, 5)


class HasName(Protocol):
    name: str


def taking(hint: Any, default: Any = 0) -> sqlq.Task[..., Any]:
    """A task with one parameter, annotated so."""

    def handler(value: Any = default) -> None: ...

    handler.__annotations__ = {} if hint is ... else {"value": hint}
    return make_task(handler, name="shop.take")


@for_each("hint", [int, str | int, OrderId, Annotated[int, "why"], list[int], Literal["x"], dict[str, Any]])
def test_none_is_refused_for_a_parameter_that_excludes_it(hint: Any) -> None:
    with pytest.raises(ArgumentsError, match=r"take: value is None, .* call session.flush\(\) first$"):
        taking(hint).new(value=None)


@for_each(
    ("hint", "default"),
    [
        *((hint, 0) for hint in (int | None, Optional[int], Any, Annotated[int | None, "why"], ...)),  # noqa: UP045
        *((hint, 0) for hint in (Literal["x", None], object, T, Hashable, HasName, None)),
        (int, None),
    ],
)
def test_none_is_accepted_for_an_optional_parameter(hint: Any, default: Any) -> None:
    assert decode(taking(hint, default).new(value=None).payload) == ([], {"value": None})


def test_none_may_be_an_item_of_variable_arguments() -> None:
    def variable(*numbers: int, **named: int) -> None: ...

    new = make_task(variable, name="shop.variable").new(None, x=None)  # type: ignore[arg-type]
    assert decode(new.payload) == ([None], {"x": None})


# -- the codec -----------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
anything_at_all = st.recursive(
    st.one_of(
        *(leaves, st.floats(), st.text("\0\ud800a"), st.binary(), st.datetimes(), st.decimals()),
        *(st.complex_numbers(), st.uuids()),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts | st.integers() | st.none() | st.booleans(), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=10,
)


@given(anything_at_all)
def test_a_value_arrives_equal_or_is_refused(value: Any) -> None:
    try:
        payload = encode((value,), {})
    except ArgumentsError:
        return
    payload.encode()
    arrived, expected = decode(payload), json.loads(json.dumps([value]))
    assert repr(read(payload)) == repr(arrived)
    assert repr(arrived) == repr((expected, {}))  # 1, 1.0 and True are equal, but not the same


bad_leaves = st.sampled_from(
    [
        *(float("nan"), float("inf"), "a\0b", "\udfff", b"x", bytearray(b"x"), {1}, object(), 10**5_000),
        *(Decimal(1), 1j, range(3), {7: 1}, {None: 1}, {(1, 2): 1}),
    ]
)


@given(bad_leaves, st.lists(st.integers(0, 3) | texts, max_size=8))
def test_a_refused_argument_is_named_by_its_path(leaf: Any, steps: list[int | str]) -> None:
    value, path = leaf, ""
    for step in reversed(steps):
        value = [0] * step + [value, 0] if isinstance(step, int) else {"other": 1, step: value}
        path = f"[{step!r}]{path}"
    with pytest.raises(ArgumentsError) as refusal:
        encode((0, value), {}, "shop.send: ")
    assert str(refusal.value).startswith(f"shop.send: args[1]{path} ")
    with pytest.raises(ArgumentsError) as refusal:
        encode((), {"order": value}, "shop.send: ")
    assert str(refusal.value).startswith(f"shop.send: order{path} ")


def test_cycles_and_depth_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    with pytest.raises(ArgumentsError, match=r"args\[0\]\[0\]\['again'\].* 100 levels, or contains itself"):
        encode((cycle,), {})
    deep: list[Any] = []
    for _ in range(99):
        deep = [deep]
    assert decode(encode((deep,), {})) == ([deep], {})
    with pytest.raises(ArgumentsError, match="is nested deeper than 100 levels"):
        encode(([deep],), {})


@for_each("levels", [104, 520, 900])
@for_each("brackets", ["[]", ('{"a":', "}")])
def test_json_nested_too_deep_is_neither_read_nor_shown(levels: int, brackets: Any) -> None:
    begin, end = brackets
    text = f'{{"args": [{begin * levels}{"1" if begin != "[" else ""}{end * levels}]}}'
    for each in (decode, read, headers.decode, decode_cursor):
        with pytest.raises(ArgumentsError, match="nested deeper than 100 levels"):
            each(text)
    assert decoded(text) == "(nested too deep)"


@for_each(
    "text",
    [
        '{"args": [7, -0.0, 5e-324, 1e400, 18446744073709551616, -9223372036854775809, null, true]}',
        '{"args": [123456789012345678901234567890], "kwargs": {"a": 1, "a": {"b": [0.1]}}}',
        '{"args": ["\\ud800", "\u2028\\u00e4\U0001f600\\""]}',
        '{"args": [1], "args": [2]}',
        ' {"kwargs": {}} ',
        "{}",
        *("[1]", '{"args": {}}', '{"args": [], "more": 1}', '{"signature": "x"}', '{"args": [}', "", None, 7),
    ],
)
def test_payloads_are_read_alike_in_workers(text: Any) -> None:
    def outcome(reader: Callable[[Any], Any]) -> Any:
        try:
            return repr(reader(text))
        except sqlq.SqlqError as error:
            return type(error), str(error)

    assert outcome(read) == outcome(decode)


def test_arguments_that_are_too_large_are_refused() -> None:
    room = PAYLOAD_BYTES - len(encode(("",), {}))
    assert len(encode(("x" * room,), {})) == PAYLOAD_BYTES
    assert encode(("ä" * (room // 2),), {})
    too_large = "the arguments take .* bytes as JSON, more than the 1,048,576 allowed"
    for large in ("x" * (room + 1), "ä" * (room // 2 + 1), [0] * 1_000_000):
        with pytest.raises(ArgumentsError, match=too_large):
            encode((large,), {})


class Mail(str, Enum):  # noqa: UP042  # what people had before StrEnum
    NOW = "now"
    BROKEN = "\ud800"


class Level(IntEnum):
    HIGH = 3


class Name(StrEnum):
    ONE = "one"


class Text(str):
    def __str__(self) -> Text:
        return self


@dataclass(slots=True)
class Slotted:
    order_id: int


Point = namedtuple("Point", "x y")


def test_subclasses_of_json_types_arrive_as_plain_values() -> None:
    sent = [Mail.NOW, Level.HIGH, Name.ONE, Text("text"), OrderedDict(a=1), {Name.ONE: 1}, Point(1, 2)]
    assert decode(encode(tuple(sent), {})) == (["now", 3, "one", "text", {"a": 1}, {"one": 1}, [1, 2]], {})
    with pytest.raises(ArgumentsError, match="lone surrogate"):
        check_json(Mail.BROKEN, "args[0]")
    with pytest.raises(ArgumentsError, match="of type Slotted, which is not JSON"):
        check_json(Slotted(7), "args[0]")


def test_a_task_can_be_copied_and_refuses_unknown_attributes() -> None:
    task = make_task(print, name="shop.print")
    assert copy.copy(task) == task
    assert not hasattr(task, "send")
    with pytest.raises(AttributeError, match="'Task' object has no attribute 'quue'") as caught:
        _ = task.quue  # type: ignore[attr-defined]  # a slip
    assert caught.value.name == "quue"


# -- the usual arguments, in a fifth of the time -------------------------------------------------------------


@given(
    st.lists(st.integers() | st.text() | st.booleans() | st.floats() | st.none() | st.lists(st.integers()))
)
def test_plain_arguments_are_encoded_as_others(args: list[Any]) -> None:
    try:
        expected = encode(args, {})
    except ArgumentsError:
        assert encode_plain(args) is None
    else:
        assert encode_plain(args) in (None, expected)


@for_each(
    ("args", "is_plain"),
    [
        *(((), True), ((7, 'shop "quoted"\n\x01', True, -(2**62)), True), ((2**63,), False)),
        *((("Größe",), False), (("\0",), False), ((None,), False), ((Level.HIGH,), False)),
        *(((Name.ONE,), False), (("x" * 1_001,), False), ((1,) * 101, False)),
    ],
)
def test_plain_arguments_are_recognized(args: tuple[Any, ...], is_plain: bool) -> None:
    found = encode_plain(args)
    assert (found is not None) == is_plain
    assert found is None or found == encode(args, {})


def paying(direct_calls: Any = "allow") -> tuple[sqlq.App, sqlq.Task[[], int]]:
    app = sqlq.App("sqlite:///shop.db", direct_calls=direct_calls)
    return app, app.task(name="shop.pay")(lambda: 7)


def test_a_direct_call_runs_the_handler_warns_or_is_refused() -> None:
    with warnings.catch_warnings(action="error"):
        assert paying()[1]() == 7
    with pytest.warns(RuntimeWarning, match="shop.pay was called as a function") as warned:
        assert paying("warn")[1]() == 7
    assert [warning.filename for warning in warned] == [__file__]
    _, task = paying("refuse")
    said = "which runs it here and now: enqueue it with app.enqueue(task.new(…)), or call task.handler(…)"
    with pytest.raises(ConfigurationError, match=f"^shop.pay .*{re.escape(said)} if here and now is meant"):
        task()
    assert task.handler() == 7


def test_a_handler_may_call_another_task(tmp_path: Path) -> None:
    app, task = paying("refuse")
    outer = app.task(name="shop.outer")(lambda: task() + 1)
    assert app.result(app.enqueue(outer.new(), eager=True)) == 8
    with sqlq.testing.inline(app):
        assert app.result(app.enqueue(outer.new())) == 8
        assert task() == 7
    with sqlq.testing.on_database(app, f"sqlite:///{tmp_path / 'test.db'}"):
        job = app.enqueue(outer.new())
        assert (task(), sqlq.testing.drain(app).finished) == (7, 1)
        assert app.result(job) == 8
    with pytest.raises(ConfigurationError, match=r"shop\.pay was called"):
        task()


def test_the_running_job_or_a_default() -> None:
    app = sqlq.App("sqlite:///shop.db")
    seen: list[Any] = []
    task = app.task(name="t")(lambda: seen.append(sqlq.current_job(None)))
    task()
    app.enqueue(task.new(), eager=True)
    assert (seen[0], seen[1].task) == (None, "t")
    assert sqlq.current_job("nothing") == "nothing"
    with pytest.raises(ConfigurationError, match=r"outside a handler: .*current_job\(None\) is None"):
        sqlq.current_job()


# -- callbacks by their annotations, and middleware by its kind ----------------------------------------------


class Typed(TypedDict, total=False):
    id: int


@dataclass
class Part:
    """Some of what is known of an ending."""

    id: int
    task: str


FITS = (sqlq.JobOutcome | None, dict[str, Any], Mapping[str, Any], Typed, Any, object, int | dict, "NotHere")
FITS_NOT = (Part, int, "str", list[Any], bool | None, None, UUID, Literal["failed"], Annotated[int, "an id"])


@for_each(("hint", "fits"), [*((hint, True) for hint in FITS), *((hint, False) for hint in FITS_NOT)])
def test_a_task_with_another_annotation_cannot_be_a_callback(hint: Any, fits: bool) -> None:
    app = sqlq.App("sqlite://")

    def handler(ended: Any) -> None: ...

    handler.__annotations__["ended"] = hint
    follows = app.task(name="follows")(handler)
    pay = app.task(name="pay")(lambda: None)
    ways: list[Callable[[], Any]] = [
        lambda: app.task(name=f"f{len(app.tasks)}", on_failure=follows)(lambda: None),
        lambda: pay.new().set(on_failure=follows),
        lambda: pay.new().set(on_failure=app.named("follows")),
    ]
    for way in ways:
        if fits:
            way()
            continue
        with pytest.raises(sqlq.SqlqError, match=r"^on_failure is follows, whose ended is") as error:
            way()
        assert isinstance(error.value, (sqlq.errors.ConfigurationError, sqlq.EnqueueError))


async def asynchronous(running: sqlq.JobContext) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("first", ["task", "middleware"])
def test_asynchronous_middleware_is_refused_beside_a_def_task(first: str) -> None:
    app = sqlq.App("sqlite://")
    app.task(name="without", middleware=None)(lambda: None)
    declare: list[Callable[[], Any]] = [
        lambda: app.task(name="t")(lambda: None),
        lambda: app.middleware(asynchronous),
    ]
    one, other = declare if first == "task" else reversed(declare)
    one()
    with pytest.raises(ConfigurationError, match="cannot run around t, which is a def: make"):
        other()
    assert [*app.tasks] == (["without", "t"] if first == "task" else ["without"])
    with pytest.raises(ConfigurationError, match="cannot run around own, which is a def: make"):
        app.task(name="own", middleware=[asynchronous])(lambda: None)
