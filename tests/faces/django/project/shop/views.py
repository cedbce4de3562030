from django.db import transaction
from django.http import HttpRequest, JsonResponse

from shop.models import Order
from shop.tasks import pay
from sqlq.django import app


@transaction.atomic
def order(request: HttpRequest) -> JsonResponse:
    made = Order.objects.create()
    job = app.enqueue(pay.new(made.id))
    if "fail" in request.GET:
        raise RuntimeError("after the job was enqueued")
    return JsonResponse({"order": made.id, "job": job.id})


async def aorder(request: HttpRequest) -> JsonResponse:
    made = await Order.objects.acreate()
    job = await app.aenqueue(pay.new(made.id))
    return JsonResponse({"order": made.id, "job": job.id})
