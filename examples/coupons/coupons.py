"""A coupon for each of a million merchants: one job, in slices, that may be killed at any time.

Each slice writes its coupons and how far the job has come in one transaction. So the attempt after a kill, or
after a deploy, goes on there. No merchant is left out, and none gets two.
"""

import argparse
import os

from sqlalchemy import ForeignKey, String, create_engine, func, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlq

URL = os.environ.get("SQLQ_DATABASE_URL", "sqlite:///coupons.db")
SLICE = int(os.environ.get("COUPONS_SLICE", "1000"))

engine = create_engine(URL)
if engine.dialect.name == "sqlite":
    sqlq.configure_sqlite(engine, immediate=True)
app = sqlq.App(URL)


class Model(DeclarativeBase):
    pass


class Merchant(Model):
    __tablename__ = "merchants"
    id: Mapped[int] = mapped_column(primary_key=True)


class Coupon(Model):
    """Nothing in this table keeps a merchant from having two."""

    __tablename__ = "coupons"
    id: Mapped[int] = mapped_column(primary_key=True)
    campaign: Mapped[str] = mapped_column(String(100))  # MariaDB wants to know the length
    merchant_id: Mapped[int] = mapped_column(ForeignKey(Merchant.id), index=True)


# a name, because this file is a program, too; and each death of its process is an attempt
@app.task(name="coupons.give_coupons", max_attempts=1_000, backoff="0s")
def give_coupons(campaign: str) -> int:
    job = sqlq.current_job()
    given, last = job.cursor or (0, 0)
    while True:
        with Session(engine) as session, session.begin():
            after = select(Merchant.id).where(Merchant.id > last).order_by(Merchant.id).limit(SLICE)
            ids = session.scalars(after).all()
            if not ids:
                return given
            session.execute(insert(Coupon), [{"campaign": campaign, "merchant_id": id} for id in ids])
            given, last = given + len(ids), ids[-1]
            job.checkpoint(session, [given, last])
        job.progress(given)
        if job.should_stop():
            return given


def setup(merchants: int) -> None:
    app.migrate()
    Model.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        for first in range(1, merchants + 1, 10_000):
            ids = range(first, min(first + 10_000, merchants + 1))
            session.execute(insert(Merchant), [{"id": id} for id in ids])
    print(f"{merchants:,} merchants")


def check() -> str:
    """Return how many merchants have no coupon, and how many have several."""
    per_merchant = (
        select(func.count(Coupon.id).label("number"))
        .select_from(Merchant)
        .outerjoin(Coupon)
        .group_by(Merchant.id)
        .subquery()
    )
    numbers = select(per_merchant.c.number, func.count()).group_by(per_merchant.c.number)
    with Session(engine) as session:
        found = dict(session.execute(numbers).all())
    one = found.pop(1, 0)
    none = found.pop(0, 0)
    return f"{one:,} merchants have one coupon, {none:,} have none, {sum(found.values()):,} have several"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python coupons.py")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup", help="create the tables, and merchants").add_argument(
        "merchants", type=int, nargs="?", default=1_000_000
    )
    commands.add_parser("give", help="enqueue the job").add_argument("campaign")
    commands.add_parser("check", help="count the coupons")
    asked = parser.parse_args()
    if asked.command == "setup":
        setup(asked.merchants)
    elif asked.command == "give":
        print(f"job {app.enqueue(give_coupons.new(asked.campaign)).id}")
    else:
        print(check())


if __name__ == "__main__":
    main()
