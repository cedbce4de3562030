"""The shop's pages."""

from typing import Any

from pyramid.config import Configurator
from pyramid.httpexceptions import HTTPConflict, HTTPNotFound
from pyramid.request import Request
from pyramid.view import view_config

from shop.jobs import queue, write_receipt
from shop.models import Order


@view_config(route_name="orders", request_method="POST", renderer="json")
def place_order(request: Request) -> dict[str, Any]:
    wanted = request.json_body
    order = Order(item=wanted["item"], cents=wanted["cents"])
    request.dbsession.add(order)
    request.dbsession.flush()  # gives the order its id
    queue.enqueue(write_receipt.new(order.id), session=request.dbsession)
    if wanted.get("card") == "declined":  # found out late, as it happens in shops
        raise HTTPConflict  # and pyramid_tm rolls back: no order, no job
    request.response.status = 201
    return {"id": order.id}


@view_config(route_name="order", request_method="GET", renderer="json")
def show_order(request: Request) -> dict[str, Any]:
    order = request.dbsession.get(Order, int(request.matchdict["id"]))
    if order is None:
        raise HTTPNotFound
    return {"id": order.id, "item": order.item, "receipt": order.receipt}


def includeme(config: Configurator) -> None:
    config.add_route("orders", "/orders")
    config.add_route("order", r"/orders/{id:\d+}")
    config.scan(__name__)
