"""The tasks of the shop's workers. The factory sets the URL of the database later."""

from flask import render_template

import sqlq
from shop.models import Order, db

queue = sqlq.App()


@queue.task(queue="receipts", timeout="30s")
def write_receipt(order_id: int) -> None:
    """Write the receipt of an order, in the application context that worker.py enters: the session and the
    templates are those of a view."""
    order = db.session.get_one(Order, order_id)
    order.receipt = render_template("receipt.txt", order=order)
    sqlq.current_job().complete(db.session)  # in the same transaction as the receipt
    db.session.commit()
