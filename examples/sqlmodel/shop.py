"""A small web shop with SQLModel: an order is placed, and its receipt is written afterwards."""

import os
from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import Depends, FastAPI, HTTPException
from sqlmodel import Field, Session, SQLModel, create_engine

import sqlq

engine = create_engine(os.environ.get("DATABASE_URL", "sqlite:///shop.db"))
queue = sqlq.App(engine=engine)


class NewOrder(SQLModel):
    item: str
    cents: int


class Order(NewOrder, table=True):
    __tablename__ = "orders"

    id: UUID = Field(default_factory=uuid4, primary_key=True)
    receipt: str | None = None


# -- jobs ----------------------------------------------------------------------------------------------------


@queue.task(queue="receipts", timeout="30s")
def write_receipt(order_id: UUID, placed_at: datetime) -> None:
    """Arguments arrive as annotated: a UUID and a datetime, though the database holds them as JSON."""
    with Session(engine) as session:
        order = session.get_one(Order, order_id)
        order.receipt = f"{placed_at:%Y-%m-%d} 1 × {order.item}: {order.cents / 100:.2f} €"
        session.add(order)
        sqlq.current_job().complete(session)  # in the same transaction as the receipt
        session.commit()


# -- pages ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(web: FastAPI) -> Any:
    SQLModel.metadata.create_all(engine)
    yield
    engine.dispose()


web = FastAPI(lifespan=lifespan)


def get_session() -> Iterator[Session]:
    with Session(engine) as session:
        yield session


RequestSession = Annotated[Session, Depends(get_session)]


@web.post("/orders", status_code=201)
def place_order(new: NewOrder, session: RequestSession, card: str = "good") -> Order:
    order = Order.model_validate(new)
    session.add(order)
    queue.enqueue(write_receipt.new(order.id, datetime.now(UTC)), session=session)
    if card == "declined":  # found out late, as it happens in shops
        # the session ends without a commit
        raise HTTPException(409, "the card was declined")
    session.commit()
    session.refresh(order)
    return order


@web.get("/orders/{order_id}")
def show_order(order_id: UUID, session: RequestSession) -> Order:
    order = session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    return order
