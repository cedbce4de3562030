"""A small web shop with an asynchronous session: an order is placed, and its receipt goes out by a mail
service's HTTP interface."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import String
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlq

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///shop.db"))
new_session = async_sessionmaker(engine, expire_on_commit=False)
queue = sqlq.App(engine=engine)


class Model(DeclarativeBase):
    pass


class Order(Model):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(200))
    item: Mapped[str] = mapped_column(String(200))
    receipt: Mapped[str | None] = mapped_column(String(20))


# -- jobs ----------------------------------------------------------------------------------------------------


def mail_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=os.environ.get("MAIL_URL", "http://localhost:8025"))


@queue.lifespan
async def mail_service() -> AsyncIterator[httpx.AsyncClient]:
    """Share one client, and the engine's connections, between all jobs of a worker process."""
    async with mail_client() as client:
        yield client
    await engine.dispose()


@queue.task(queue="mail", timeout="30s")
async def send_receipt(order_id: int) -> None:
    job = sqlq.current_job()
    async with new_session() as session, session.begin():
        order = await session.get_one(Order, order_id)
    sent = await job.lifespan.post(
        "/mails",
        json={"to": order.email, "subject": f"Your order {order.id}: {order.item}"},
        headers={"Idempotency-Key": f"job-{job.id}"},  # the same at each attempt
    )
    sent.raise_for_status()
    async with new_session() as session, session.begin():
        session.add(order)
        order.receipt = "sent"
        await job.acomplete(session)  # in the same transaction


# -- pages ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Model.metadata.create_all)
    yield
    await engine.dispose()


web = FastAPI(lifespan=lifespan)


async def get_session() -> AsyncIterator[AsyncSession]:
    """A transaction for each request: an exception of a page takes everything back."""
    async with new_session() as session, session.begin():
        yield session


# with scope="function" the commit comes before the response; else a customer could
# learn of an order that the database then refuses
Transaction = Annotated[AsyncSession, Depends(get_session, scope="function")]


class NewOrder(BaseModel):
    email: str
    item: str
    card: str = "good"


@web.post("/orders", status_code=201)
async def place_order(new: NewOrder, session: Transaction) -> dict[str, int]:
    order = Order(email=new.email, item=new.item)
    session.add(order)
    await session.flush()  # gives the order its id
    await queue.aenqueue(send_receipt.new(order.id), session=session)
    if new.card == "declined":  # found out late, as it happens in shops
        raise HTTPException(409, "the card was declined")
    return {"id": order.id}


@web.get("/orders/{order_id}")
async def show_order(order_id: int, session: Transaction) -> dict[str, int | str | None]:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    return {"id": order.id, "item": order.item, "receipt": order.receipt}
