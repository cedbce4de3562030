"""The tasks of the shop's workers. Handlers find the request that worker.py makes for each job."""

from pyramid.threadlocal import get_current_request

import sqlq
from shop.models import Order

queue = sqlq.App()


@queue.task(queue="receipts", timeout="30s")
def write_receipt(order_id: int) -> None:
    session = get_current_request().dbsession
    order = session.get_one(Order, order_id)
    order.receipt = f"1 × {order.item}: {order.cents / 100:.2f} €"
    # request.tm commits it together with the receipt
    sqlq.current_job().complete(session)
