"""The application that the browser looks at: a shop with receipts, invoices and an import."""

from __future__ import annotations

import time

import sqlq

app = sqlq.App()


class MailboxError(Exception):
    """A customer's mailbox is gone."""


@app.task(name="shop.send_receipt", queue="mail", max_attempts=1)
def send_receipt(order: int) -> dict[str, int]:
    if order % 17 == 0:
        raise MailboxError(f"no mailbox for order {order} of 'customer-{order}'")
    if order % 29 == 0:
        raise ValueError(f"order {order} has no total")
    return {"order": order}


@app.task(name="shop.charge", queue="billing", limit=sqlq.Limit("bank", running=2))
def charge(order: int, card_token: str = "") -> None:
    time.sleep(0.01)  # noqa: TID251 - plays slow work


@app.task(name="shop.export", queue="reports")
def export(rows: int, seconds: float = 0.2) -> None:
    job = sqlq.current_job()
    for row in range(rows):
        job.progress(row, rows, note="writing orders.csv")
        if job.should_stop():
            raise sqlq.Cancel("an operator asked for it")
        time.sleep(seconds)  # noqa: TID251 - plays slow work


@app.task(name="shop.step")
def step(number: int) -> int:
    return number
