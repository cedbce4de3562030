"""Tasks of Django's own kind, from Django 6 on."""

from django.tasks import task

from shop.models import Order
from sqlq.django import app


@task
def pay(order_id: int) -> int:
    Order.objects.filter(id=order_id).update(paid=True)
    return order_id


@task
async def apay(order_id: int) -> int:
    await Order.objects.filter(id=order_id).aupdate(paid=True)
    return order_id


@task
def echo(*args, **kwargs):
    return [*args, kwargs]


@task(takes_context=True)
def about_itself(context, *, fail_until: int = 1) -> list:
    if context.attempt < fail_until:
        raise LookupError(f"attempt {context.attempt}")
    result = context.task_result
    return [result.id, context.attempt, result.status, len(result.errors), result.args]


@task(takes_context=True, queue_name="mail", priority=5)
async def aabout_itself(context) -> list:
    return [context.task_result.id, context.attempt]


@task(backend="once")
def fail(why: str) -> None:
    raise ValueError(why)


@task(backend="once")
def exit_at_once() -> None:
    raise SystemExit("this task has left")


@task
def useless():
    return lambda: True


app.fair(by="tenant:{tenant}", window=1)


@task
def bill(tenant: str) -> str:
    return tenant
