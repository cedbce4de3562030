"""The command line and arguments of annotated types: enqueued as text, run in processes of every kind."""

from __future__ import annotations

import pytest

import sqlq
from tests.kit import needs
from tests.kit.command import Command

TYPED = """
from dataclasses import dataclass
from datetime import date
from uuid import UUID

import sqlq

app = sqlq.App()

@dataclass
class Line:
    sku: str
    due: date

@app.task
def order(id: UUID, line: Line, *, data: bytes = b"") -> Line:
    assert isinstance(id, UUID) and isinstance(line, Line), (id, line)
    return Line(f"{line.sku} {data!r}", line.due)

@app.task(isolate=True)
async def alone(line: Line) -> dict[UUID, Line]:
    return {UUID(int=7): line}
"""
ID = "0b5e6a2e-7f0c-4d5e-9d0e-6f1f6a1b2c3d"
LINE = '{"sku": "tea", "due": "2030-01-31"}'


@pytest.fixture
def typed(sqlq_: Command) -> Command:
    (sqlq_.directory / "typed.py").write_text(TYPED)
    return sqlq_


def test_json_arguments_arrive_as_annotated(typed: Command, app: sqlq.App) -> None:
    order = typed(
        *["-a", "typed:app", "enqueue", "--json", "typed.order"], ID, LINE, "--kwargs", '{"data": "AP8="}'
    )
    alone = typed(*["-a", "typed:app", "enqueue", "--json", "typed.alone"], LINE)
    assert app.jobs.get(order.json()["id"]).payload == {
        "args": [ID, {"sku": "tea", "due": "2030-01-31"}],
        "kwargs": {"data": "AP8="},
    }
    assert typed("-a", "typed:app", "work", "--drain").code == 0
    assert app.jobs.get(order.json()["id"]).result == {"sku": "tea b'\\x00\\xff'", "due": "2030-01-31"}
    result = {"00000000-0000-0000-0000-000000000007": {"sku": "tea", "due": "2030-01-31"}}
    assert app.jobs.get(alone.json()["id"]).result == result


@needs("cheap")
def test_enqueue_takes_label_headers_timeout_and_retention(typed: Command, app: sqlq.App) -> None:
    enqueue = ["-a", "typed:app", "enqueue", "--json", "typed.alone", LINE]
    options = ["--label", "a b", "--headers", '{"tenant": "blue"}', "--timeout", "none", "--retention", "1h"]
    job = app.jobs.get(typed(*enqueue, *options).json()["id"])
    assert (job.label, job.headers, job.timeout_ms) == ("a b", {"tenant": "blue"}, 0)
    assert job.retention_ms == 3_600_000
    plain = app.jobs.get(typed(*enqueue).json()["id"])
    assert (plain.label, plain.headers, plain.timeout_ms, plain.retention_ms) == (None, {}, None, None)
    for wrong in ("[1]", "{"):
        assert "--headers" in typed(*enqueue, "--headers", wrong).err


@needs("cheap")
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("7", LINE), "typed.order: id does not fit its annotation: expected uuid, got int"),
        (
            (ID, '{"sku": "tea"}'),
            "typed.order: line does not fit its annotation: object missing required field due",
        ),
        (
            (ID, LINE.replace("31", "32")),
            "typed.order: line.due does not fit its annotation: invalid RFC3339",
        ),
        (
            (ID, LINE.replace("}", ', "dew": 1}')),
            "typed.order: line does not fit its annotation: it has the unknown",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_sentence(
    typed: Command, args: tuple[str, ...], sentence: str
) -> None:
    assert typed("-a", "typed:app", "enqueue", "typed.order", *args).sentence().startswith(sentence)
