"""Values of annotated types arrive as they were sent, with readable JSON in between, or are refused by their
path."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum, auto
from pathlib import Path, PurePosixPath
from time import process_time
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from sqlq import App
from sqlq.errors import ArgumentsError
from sqlq.model.job import NewJob
from sqlq.model.task import Task, make_task, new_from_json
from sqlq.payload.codec import MismatchError
from tests.kit import for_each

T = TypeVar("T")
OrderId = NewType("OrderId", UUID)
ID = UUID("0b5e6a2e-7f0c-4d5e-9d0e-6f1f6a1b2c3d")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = auto()
    HIGH = auto()


class Kind(StrEnum):
    GIFT = "gift"


class Mixed(Enum):
    ONE = 1
    TWO = "two"


@dataclass
class Line:
    sku: str
    price: Decimal
    count: int = 1


@dataclass(frozen=True, slots=True)
class Order:
    id: UUID
    placed_at: datetime
    lines: list[Line] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BigOrder(Order):
    note: str = ""


@dataclass(eq=False)
class Unequal:
    at: datetime
    price: Decimal = Decimal(0)


@dataclass
class Node:
    at: date
    next: Node | None = None


@dataclass
class Box(Generic[T]):
    inside: T


@dataclass
class Positive:
    number: int
    at: date | None = None

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("the number is negative")
        if self.number == 0:
            raise KeyError("zero")


class Point(NamedTuple):
    x: Decimal
    y: Decimal = Decimal(0)


class Address(TypedDict):
    street: str
    since: date
    until: NotRequired[date]


class Customer(pydantic.BaseModel):
    id: UUID
    born: date
    tags: set[str] = set()


class Strict(pydantic.BaseModel, strict=True, extra="forbid"):
    at: datetime
    size: int = pydantic.Field(alias="Size")


class Parcel(msgspec.Struct, rename="camel"):
    weight_kg: Decimal
    sent_on: date | None = None


class Cat(msgspec.Struct, tag=True):
    born: date


class Dog(msgspec.Struct, tag=True):
    born: date


class Mailer:
    pass


class Base(DeclarativeBase):
    pass


class Row(MappedAsDataclass, Base):
    __tablename__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)


def task_of(hint: Any, *, default: Any = ...) -> Task[..., Any]:
    """A task with one parameter, annotated so."""

    def handler(value: Any = default) -> None: ...

    handler.__annotations__ = {"value": hint}
    if default is ...:
        handler.__defaults__ = None
    return make_task(handler, name="shop.take")


def forms(job: NewJob) -> Any:
    return json.loads(job.payload)["args"]


BERLIN = ZoneInfo("Europe/Berlin")
ROUND_TRIPS: list[tuple[Any, Any, Any]] = [
    (UUID, ID, str(ID)),
    (OrderId, OrderId(ID), str(ID)),
    (datetime, datetime(2030, 1, 31, 8, 0, 0, 5), "2030-01-31T08:00:00.000005"),
    (datetime, datetime(2030, 1, 31, 8, tzinfo=UTC), "2030-01-31T08:00:00Z"),
    (datetime, datetime(2030, 1, 31, 8, tzinfo=BERLIN), "2030-01-31T08:00:00+01:00"),
    (date, date(2030, 1, 31), "2030-01-31"),
    (time, time(8, 30), "08:30:00"),
    (timedelta, timedelta(days=1, seconds=5), "P1DT5S"),
    (timedelta, -timedelta(milliseconds=1), "-PT0.001S"),
    (Decimal, Decimal("1.10"), "1.10"),
    (bytes, b"\0\xff", "AP8="),
    (Color, Color.RED, "red"),
    (Level, Level.HIGH, 2),
    (Kind, Kind.GIFT, "gift"),
    (Path, Path("/srv/a b"), "/srv/a b"),
    (PurePosixPath | None, PurePosixPath("a"), "a"),
    (Line, Line("tea", Decimal("3.50")), {"sku": "tea", "price": "3.50", "count": 1}),
    (Point, Point(Decimal(1), Decimal("2.5")), ["1", "2.5"]),
    (Address, {"street": "High St", "since": date(2020, 1, 1)}, {"street": "High St", "since": "2020-01-01"}),
    (Customer, Customer(id=ID, born=date(1990, 1, 1)), {"id": str(ID), "born": "1990-01-01", "tags": []}),
    (list[Customer], [Customer(id=ID, born=date(1990, 1, 1))], [{"id": str(ID), "born": "1990-01-01", "tags": []}]),
    (Strict, Strict(at=datetime(2030, 1, 1), Size=3), {"at": "2030-01-01T00:00:00", "Size": 3}),
    (Parcel, Parcel(Decimal("1.5")), {"weightKg": "1.5", "sentOn": None}),
    (Cat | Dog, Dog(date(2020, 1, 1)), {"type": "Dog", "born": "2020-01-01"}),
    (UUID | None, ID, str(ID)),
    (UUID | int, 7, 7),
    (UUID | list[UUID] | None, [ID], [str(ID)]),
    (list[UUID], [ID, ID], [str(ID)] * 2),
    (Sequence[date], [date(2030, 1, 1)], ["2030-01-01"]),
    (dict[str, datetime], {"at": datetime(2030, 1, 1)}, {"at": "2030-01-01T00:00:00"}),
    (Mapping[UUID, Decimal], {ID: Decimal(1)}, {str(ID): "1"}),
    (dict[int, str], {7: "seven"}, {"7": "seven"}),
    (dict[Color, list[Point]], {Color.RED: [Point(Decimal(1))]}, {"red": [["1", "0"]]}),
    (tuple[int, date], (1, date(2030, 1, 1)), [1, "2030-01-01"]),
    (tuple[UUID, ...], (ID,), [str(ID)]),
    (set[int], {3}, [3]),
    (frozenset[date], frozenset([date(2030, 1, 1)]), ["2030-01-01"]),
    (Annotated[UUID, "why"], ID, str(ID)),
    (Box[date], Box(date(2030, 1, 1)), {"inside": "2030-01-01"}),
    (Node, Node(date(2030, 1, 1), Node(date(2031, 1, 1))), {"at": "2030-01-01", "next": {"at": "2031-01-01", "next": None}}),
    (Order, Order(ID, datetime(2030, 1, 1, tzinfo=UTC), [Line("tea", Decimal(3))], {"a": [1, None]}),
     {"id": str(ID), "placed_at": "2030-01-01T00:00:00Z", "lines": [{"sku": "tea", "price": "3", "count": 1}], "extra": {"a": [1, None]}}),
]  # fmt: skip


@for_each(("hint", "value", "form"), ROUND_TRIPS)
def test_a_value_of_its_annotation_arrives_by_way_of_readable_json(hint: Any, value: Any, form: Any) -> None:
    task = task_of(hint)
    job = task.new(value)
    assert forms(job) == [form]
    assert task._interface.arguments(job.payload) == ([value], {})
    (arrived,) = task._interface.arguments(job.payload)[0]
    assert type(arrived) is type(value)
    by_name = task.new(value=value)
    assert json.loads(by_name.payload) == {"kwargs": {"value": form}}
    assert task._interface.arguments(by_name.payload) == ([], {"value": value})
    assert forms(new_from_json(task, [form])) == [form]
    if hint is not bytes:  # any text might be meant as base64
        assert forms(task.new(form)) == [form]


# -- what is refused -----------------------------------------------------------------------------------------


@for_each(
    ("hint", "value", "message"),
    [
        (UUID, "7", r"value does not fit its annotation: invalid UUID"),
        (date, datetime(2030, 1, 1), r"value does not fit its annotation: invalid RFC3339 encoded date"),
        (Color, "green", r"value does not fit its annotation: none of the values it may have$"),
        (Path, 7, r"value does not fit its annotation: expected the text of a path, got int"),
        (list[UUID], [ID, "x"], r"value\[1\] does not fit its annotation: invalid UUID"),
        (dict[str, date], {"a": "x"}, r"value\[…\] does not fit"),
        (dict[UUID, int], {"a": 7}, r"value has a key that does not fit its annotation: invalid UUID"),
        (list[Order], [Order(ID, datetime(2030, 1, 1), [Line("a", "x")])], r"value\[0\]\.lines\[0\]\.price does"),  # type: ignore[arg-type]
        (Order, Line("a", Decimal(1)), r"value does not fit its annotation: object missing required field"),
        (Order, BigOrder(ID, datetime(2030, 1, 1)), r"value is a BigOrder, and would arrive as a Order"),
        (Line, {"sku": "a", "price": "1", "cuont": 3}, r"value .* it has the unknown field cuont"),
        (Address, {"street": "a", "since": date.today(), "x": 1}, "it has the unknown field x"),  # noqa: DTZ011
        (list[Customer], [{"id": str(ID)}], r"value\[0\]\.born does not fit its annotation: Field required"),
        (Positive, {"number": -1}, r"value does not fit its annotation: the number is negative"),
        (list[Positive], [{"number": 0}], r"value cannot be read as annotated: KeyError: 'zero'"),
        (tuple[int, date], (1,), r"value does not fit its annotation: expected array of length 2, got 1"),
        (bytes, "text", r"value is text, and is annotated as bytes: pass bytes"),
        (list[UUID], {ID}, r"value is a set, and would arrive as a list"),
        (set[Any], {ID}, r"value holds a UUID"),
        (Order, Order(ID, datetime(2030, 1, 1), extra={"by": [Mailer()]}), r"value\.extra\['by'\]\[0\] is <.*Mailer object .* of type Mailer, which is not JSON: pass an id"),
        (Box[Any], Box({(1, 2): 3}), r"value\.inside has keys that cannot be text"),
        (Box[float], Box(float("nan")), r"value\['inside'\] is nan, which JSON does not have"),
        (Box[str], Box("a\0"), r"value\['inside'\] holds a NUL"),
        (datetime, datetime(1850, 1, 1, tzinfo=timezone(timedelta(seconds=1172))), "value would arrive as .*: pass what JSON holds exactly"),
        (UUID, None, "value is None, but it is annotated as never None"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused_by_its_path(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(ArgumentsError, match=message) as refusal:
        task_of(hint).new(value)
    assert str(refusal.value).startswith("shop.take: ")
    assert "\n" not in str(refusal.value)


def test_a_value_that_holds_itself_is_refused() -> None:
    node = Node(date(2030, 1, 1))
    node.next = node
    with pytest.raises(ArgumentsError, match=r"value is nested too deep, or contains itself"):
        task_of(Node).new(node)
    nest: Any = functools.partial(functools.reduce, lambda inner, _: {"at": "2030-01-01", "next": inner})
    with pytest.raises(ArgumentsError, match="nested too deep"):
        new_from_json(task_of(Node), [nest(range(90_000), None)])
    assert task_of(Node)._interface.arguments(new_from_json(task_of(Node), [nest(range(100), None)]).payload)
    with pytest.raises(ArgumentsError, match=r"value\['next'\].* nested deeper than 100 levels"):
        new_from_json(task_of(Node), [nest(range(101), None)])
    for depth in range(200, 1_100, 100):
        stored = '{"args": [' + '{"at": "2030-01-01", "next": ' * depth + "null" + "}" * depth + "]}"
        with pytest.raises(ArgumentsError, match=r"nested deeper than 100 levels|recursion"):
            task_of(Node)._interface.arguments(stored)


@for_each(
    ("hint", "value", "arrives"),
    [
        (list[UUID], (ID,), [ID]),
        (set[date], [date(2030, 1, 1)], {date(2030, 1, 1)}),
        (tuple[float, ...], [1, 2], (1.0, 2.0)),
        (Box[float], Box(7), Box(7.0)),
        (Decimal, 7, Decimal(7)),
        (Line, {"sku": "a", "price": Decimal("1.5")}, Line("a", Decimal("1.5"))),
        (Order | None, None, None),
    ],
)
def test_a_compatible_value_arrives_as_its_annotation(hint: Any, value: Any, arrives: Any) -> None:
    task = task_of(hint)
    (arrived,) = task._interface.arguments(task.new(value).payload)[0]
    assert (arrived, type(arrived)) == (arrives, type(arrives))


@for_each(
    "value",
    [
        Unequal(datetime(2030, 1, 1)),
        Unequal(datetime(2030, 1, 1), Decimal("NaN")),
        # an hour that comes twice: such a time equals none of another zone
        Unequal(datetime(2030, 10, 27, 2, 30, tzinfo=BERLIN)),
        Unequal(datetime(2030, 10, 27, 2, 30, tzinfo=BERLIN, fold=1)),
    ],
)
def test_a_value_that_equals_nothing_is_not_refused(value: Unequal) -> None:
    task = task_of(list[Unequal])
    (arrived,) = task._interface.arguments(task.new([value]).payload)[0][0]
    assert arrived.at.isoformat() == value.at.isoformat()


@for_each("text", [str(ID), str(ID).upper(), ID.hex])
def test_other_texts_of_a_key_are_accepted(text: str) -> None:
    payload = json.dumps({"args": [{text: {"sku": "tea", "price": "1", "count": 1}}]})
    task, line = task_of(dict[UUID, Line]), Line("tea", Decimal(1))
    assert task._interface.arguments(payload) == ([{ID: line}], {})
    assert new_from_json(task, *json.loads(payload).values()).payload == task.new({ID: line}).payload
    assert forms(task.new({text: line})) == json.loads(payload)["args"]
    with pytest.raises(ArgumentsError, match=r"two keys that are the same text|unknown field"):
        task_of(dict[UUID, Any]).new({ID: 1, text: 2})


# -- annotations that ask for nothing ------------------------------------------------------------------------


@for_each(
    "hint",
    [
        *(Any, object, int, str, float, bool, None, list, dict, T, Sequence, Mapping, int | None),
        *(list[int], dict[str, Any], dict[str, list[dict[str, int]]], list[str | int], Sequence[Any], Mapping[str, object]),
        *(Literal["a", 1, None], NewType("N", int), Annotated[list[int], "why"], Iterable[int]),
    ],
)  # fmt: skip
def test_plain_json_is_stored_unchanged_for_json_annotations(hint: Any) -> None:
    task = task_of(hint)
    for value in ("7", 7, 7.5, True, [1, "a"], {"a": [None]}, (1, 2)):
        assert forms(task.new(value)) == json.loads(json.dumps([value]))
        assert task._interface.arguments(task.new(value).payload) == (json.loads(json.dumps([value])), {})


@for_each(
    ("hint", "why"),
    [
        (UUID | str, "Type unions may not contain more than one str-like type"),
        (UUID | datetime, "Type unions may not contain more than one str-like type"),
        (Line | Order, "Type unions may not contain more than one dataclass or attrs type"),
        (Path | int, "Type unions containing a custom type may not contain any additional types"),
        (Mixed, "Enums must contain either all str or all int values"),
        (Mailer, "JSON has no form for Mailer"),
        (list[Mailer], "JSON has no form for Mailer"),
        (Row, "Row is an ORM class, of which jobs are given the id"),
        (list[Row], "Row is an ORM class, of which jobs are given the id"),
        ("NoSuchType", "name 'NoSuchType' is not defined"),
        (Callable[[int], int], "JSON has no form for Callable"),
        (5, "is not supported"),
    ],
)
def test_an_unsupported_annotation_takes_json_and_explains_refusals(hint: Any, why: str) -> None:
    for task in (task_of(hint), task_of(hint, default=None)):
        for value in ("7", 7, [1, {"a": None}]):
            assert forms(task.new(value)) == [value]
            assert task._interface.arguments(task.new(value).payload) == ([value], {})
    with pytest.raises(ArgumentsError) as refusal:
        task_of(hint).new([ID])
    assert str(refusal.value).startswith(
        f"shop.take: value[0] is {ID!r} of type UUID, which is not JSON: its annotation is of no use here: "
    )
    assert why in str(refusal.value)


LATE = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shop import Nowhere

def declare(app):
    return (
        app.task()(by_type_checkers),
        app.task()(later),
        app.task()(returned),
        app.task(middleware=[surround])(surrounded),
        app.task(limit=app.limit("of:{n}", running=1))(limited),
        app.task(name="shop.Service")(Service()),
        app.middleware(surround),
    )

def by_type_checkers(n: int, order: Nowhere) -> None: ...
def later(order: Order) -> None: ...
def returned(n: int) -> list[Nowhere]: ...
def surround(job: Nowhere | None): yield
def surrounded(n: int) -> None: ...
def limited(n: int, order: Nowhere | None = None) -> None: ...

class Service:
    def __call__(self, n: int, order: Nowhere.Order = None) -> None: ...
"""
"""A module of tasks as Python 3.14 takes it."""
ORDER = """
from dataclasses import dataclass
@dataclass
class Order:
    id: int
"""


def test_annotations_may_name_what_is_not_there_when_a_task_is_declared() -> None:
    app = App("sqlite://")
    module: dict[str, Any] = {"__name__": "shop"}
    future = "from __future__ import annotations" if sys.version_info < (3, 14) else ""
    exec(compile(future + LATE, "shop.py", "exec", dont_inherit=True), module)
    checkers, later, returned, surrounded, limited, service, _ = module["declare"](app)
    exec(compile(ORDER, "shop.py", "exec", dont_inherit=True), module)

    order = module["Order"](1)
    assert later._interface.arguments(later.new(order).payload) == ([order], {})
    with pytest.raises(ArgumentsError, match="it is annotated as never None"):
        later.new(None)
    for task in (returned, surrounded, limited, service):
        assert task._interface.arguments(task.new(7).payload) == ([7], {})
    assert limited.new(7).limit_key == "of:7"
    with pytest.raises(ArgumentsError, match="of no use here: name 'Nowhere' is not defined"):
        checkers.new(7, order)
    with pytest.raises(ArgumentsError, match=r"^shop.by_type_checkers\(n: 'int', order: 'Nowhere'\)"):
        checkers.new()


# -- where the parameters are --------------------------------------------------------------------------------


def everywhere(one: UUID, /, two: int, *more: date, three: UUID | None = None, four: str = "", **others: Decimal) -> None: ...  # fmt: skip


def test_every_kind_of_parameter_is_converted() -> None:
    task = make_task(everywhere)
    args = (ID, 7, date(2030, 1, 1), date(2031, 1, 1))
    kwargs = {"three": ID, "four": "x", "one": Decimal("1.5")}
    job = task.new(*args, **kwargs)  # type: ignore[arg-type]
    assert json.loads(job.payload) == {
        "args": [str(ID), 7, "2030-01-01", "2031-01-01"],
        "kwargs": {"three": str(ID), "four": "x", "one": "1.5"},
    }
    assert task._interface.arguments(job.payload) == ([*args], kwargs)
    with pytest.raises(ArgumentsError, match=r"everywhere: args\[2\] does not fit its annotation"):
        task.new(ID, 7, "x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentsError, match=r"everywhere: five does not fit its annotation"):
        task.new(ID, 7, five="x")  # type: ignore[arg-type]


class Callme:
    def __call__(self, id: UUID) -> None: ...

    def method(self, id: UUID) -> None: ...


class Made:
    def __init__(self, id: UUID) -> None: ...


def decorated(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs)

    return inner


def two(number: int, id: UUID, nowhere: NoSuchType = 0) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@for_each(
    "handler",
    [Callme(), Callme().method, Made, decorated(Callme().method), functools.partial(two, 7), decorated(functools.partial(two, 7))],
)  # fmt: skip
def test_every_kind_of_handler_is_read(handler: Callable[..., Any]) -> None:
    task: Task[..., Any] = make_task(handler, name="shop.take")
    assert task._interface.arguments(task.new(ID).payload) == ([ID], {})


def test_a_default_reaches_the_handler_unchanged() -> None:
    task = task_of(UUID, default=None)
    assert task.new().payload == "{}"
    assert task._interface.arguments(task.new(None).payload) == ([None], {})
    assert task._interface.arguments(task_of(Mailer, default=Mailer()).new().payload) == ([], {})


# -- what arrives --------------------------------------------------------------------------------------------


@for_each(
    ("hint", "form", "message"),
    [
        (Line, {"sku": "a"}, r"value does not fit its annotation: object missing required field price"),
        (Line, {"sku": "a", "price": "1", "gift": True}, r"value does not fit .*: it has the unknown field gift"),
        (Order, {"id": str(ID), "placed_at": "2030-01-01T00:00:00", "lines": [{"sku": "a", "price": "1", "gift": 1}]}, r"value\.lines\[0\] .* unknown field gift"),
        (Parcel, {"weightKg": "1", "weight_g": 1}, "it has the unknown field weight_g"),
        (Strict, {"at": "2030-01-01T00:00:00", "Size": 3, "color": "red"}, r"value\.color .*: Extra inputs are not permitted"),
        (Customer, {"id": str(ID)}, r"value\.born does not fit its annotation: Field required"),
        (Point, ["1", "2", "3"], "expected array of"),
        (Color, "green", "none of the values it may have"),
        (Cat | Dog, {"type": "Cow", "born": "2020-01-01"}, r"value\.type does not fit its annotation: not the tag of"),
    ],
)  # fmt: skip
def test_fields_of_another_release_release_the_job(hint: Any, form: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        task_of(hint)._interface.arguments(json.dumps({"args": [form]}))


@for_each(
    ("hint", "form"),
    [
        *((UUID, "x"), (UUID, None), (bytes, "a"), (Decimal, "1,5")),
        *((Line, {"sku": "a", "price": "x", "count": "y"}), (Customer, {"id": "x", "born": "2030-01-01"})),
        *((Positive, {"number": -1}), (Positive, {"number": 0})),
    ],
)
def test_a_value_of_a_wrong_form_fails_the_job(hint: Any, form: Any) -> None:
    with pytest.raises(ArgumentsError, match=r"^shop.take: value.* (does not fit|cannot be read)") as refusal:
        task_of(hint)._interface.arguments(json.dumps({"args": [form]}))
    assert not isinstance(refusal.value, MismatchError)
    if form is not None:  # which has a sentence of its own there
        with pytest.raises(ArgumentsError) as at_enqueue:
            new_from_json(task_of(hint), [form])
        assert str(at_enqueue.value) == str(refusal.value)


@for_each("secret", ["s3cret", *(f"{end} - at `$.s3cret{end}" for end in ("", "`", "'", "`key` in `$`"))])
def test_a_value_that_looks_like_a_path_is_not_in_the_error(secret: str) -> None:
    for hint, form in (
        *((Color, secret), (list[Color], [secret]), (Cat | Dog, {"type": secret}), (UUID, secret)),
        *((dict[date, int], {secret: 1}), (dict[str, UUID], {secret: secret})),
        (Customer, {"id": secret, "born": secret}),
        (dict[str, Line], {secret: {"sku": secret, "price": "1", "x": 1}}),
    ):
        with pytest.raises(ArgumentsError) as refusal:
            task_of(hint)._interface.arguments(json.dumps({"args": [form]}))
        assert "s3cret" not in str(refusal.value)


def test_a_large_value_that_does_not_fit_is_refused_at_once() -> None:
    began = process_time()
    with pytest.raises(MismatchError):
        task_of(Color)._interface.arguments(json.dumps({"args": [" - at `$" * 120_000]}))
    assert process_time() - began < 1.0


# -- results -------------------------------------------------------------------------------------------------


def test_a_return_annotation_is_read_through_awaitables() -> None:
    async def coroutine() -> UUID:
        return ID

    def awaitable() -> Awaitable[UUID]:
        return coroutine()

    for handler in (coroutine, awaitable):
        conversion = make_task(handler, name="shop.take")._interface.result_conversion
        assert conversion is not None
        assert conversion.shown(ID) == str(ID)
    assert task_of(UUID)._interface.result_conversion is None


# -- what it costs -------------------------------------------------------------------------------------------


PLAIN_AND_TYPED = """
import sys, sqlq
from datetime import date
app = sqlq.App()
@app.task(name="plain")
def plain(id: int, names: list[str], more: "dict[str, int] | None" = None) -> str: ...
plain._interface.arguments(plain.new(7, ["a"]).payload)
assert plain._interface.result_conversion is None
assert "msgspec" not in sys.modules
@app.task(name="typed")
def typed(day: date): ...
assert "msgspec" not in sys.modules
assert typed._interface.arguments(typed.new(date(2030, 1, 1)).payload) == ([date(2030, 1, 1)], {})
assert "msgspec" in sys.modules and "pydantic" not in sys.modules
"""


def test_plain_arguments_import_no_conversion_library() -> None:
    assert subprocess.run([sys.executable, "-c", PLAIN_AND_TYPED], check=False).returncode == 0
