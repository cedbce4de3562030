"""The shop's own database: plain SQLAlchemy. sqlq's tables stand beside these in the same database."""

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlq

engine = create_engine(os.environ.get("SQLQ_DATABASE_URL", "sqlite:///shop.db"))
if engine.dialect.name == "sqlite":
    sqlq.configure_sqlite(engine, immediate=True)


class Model(DeclarativeBase):
    pass


class Order(Model):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    item: Mapped[str]
    cents: Mapped[int]
