import logging
import os

from django.utils.translation import gettext_lazy

import sqlq
from shop.models import Order
from sqlq.django import app

IMPORTED_BY = os.getpid()


@app.task(queue="mail", max_attempts=2, backoff="10ms")
def pay(order_id: int) -> int:
    Order.objects.filter(id=order_id).update(paid=True)
    return order_id


@app.task(queue="mail", max_attempts=1)
async def apay(order_id: int) -> int:
    await Order.objects.filter(id=order_id).aupdate(paid=True)
    return order_id


@app.task(isolate="fresh")
def isolated(order_id: int) -> tuple[int, int]:
    Order.objects.filter(id=order_id).update(paid=True)
    return IMPORTED_BY, os.getpid()


@app.task
def remind(subject: str, parts=(), **more) -> list:
    job = sqlq.current_job(None)  # None where it is called as a function
    logging.getLogger("django.shop").info("a reminder of %s", subject)
    return [job is not None, subject, *parts, more, gettext_lazy("Yes")]


@app.task(max_attempts=1)
def fail() -> None:
    raise LookupError("no such order")


@app.task
def pay_in_turn(order_id: int) -> None:
    app.enqueue(pay.new(order_id))
