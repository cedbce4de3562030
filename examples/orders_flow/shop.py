"""An order as a flow: charge and pack side by side, ship when both have finished, and raise an alarm when the
card is declined. `order.py` enqueues one."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlq

app = sqlq.App()
DECLINED = Path("declined")
"""As long as this file is there, the bank declines every card."""


class Model(DeclarativeBase):
    pass


class Order(Model):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="placed")


class DeclinedError(Exception):
    """The bank declines."""


def engine_of_the_shop() -> Engine:
    """Return an engine on the App's database."""
    engine = create_engine(app.url)
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    return engine


@app.task(max_attempts=1)
def charge(order_id: int) -> str:
    if DECLINED.exists():
        raise DeclinedError(f"the card for order {order_id} was declined")
    return f"receipt {order_id}"


@app.task
def pack(item: str) -> str:
    return f"box with {item}"


@app.task
def ship(order_id: int, receipt: str, boxes: list[str]) -> str:
    engine = engine_of_the_shop()
    parcel = f"order {order_id}: {', '.join(boxes)}, {receipt}"
    with sqlq.current_job().completing(engine, result=parcel) as session:
        session.get_one(Order, order_id).state = "shipped"
    engine.dispose()
    return parcel


@app.task
def alarm(order_id: int) -> None:
    with Path("alarms.txt").open("a") as file:
        file.write(f"order {order_id} was not paid\n")


def place(session: Session, order_id: int) -> sqlq.EnqueuedFlow:
    """Write an order and its flow, both or neither."""
    session.add(Order(id=order_id))
    flow = sqlq.Flow(f"order {order_id}")
    paid = flow.add(charge.new(order_id))
    packed = flow.add(pack.map(["teapot", "cup"]))
    flow.add(ship.new(order_id, paid.result, packed.results))
    paid.catch(alarm.new(order_id))
    return app.enqueue(flow, session=session)
