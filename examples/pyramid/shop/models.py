"""The shop's tables, and `request.dbsession`."""

import os

import zope.sqlalchemy
from pyramid.config import Configurator
from pyramid.request import Request
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker


class Model(DeclarativeBase):
    pass


class Order(Model):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    cents: Mapped[int]
    receipt: Mapped[str | None]


def includeme(config: Configurator) -> None:
    engine = create_engine(os.environ.get("DATABASE_URL", config.get_settings()["sqlalchemy.url"]))
    new_session = sessionmaker(engine)

    def dbsession(request: Request) -> Session:
        session = new_session(info={"request": request})
        zope.sqlalchemy.register(session, transaction_manager=request.tm)
        return session

    config.add_request_method(dbsession, reify=True)
    config.registry.engine = engine
