"""The calls of the shop's web pages."""

from sqlalchemy.orm import Session

from shop.models import Order
from shop.tasks import app, send_receipt


class PaymentDeclinedError(Exception):
    """The customer's card was declined."""


def place_order(session: Session, email: str, item: str, cents: int, *, card_is_good: bool = True) -> Order:
    """Store an order and enqueue its receipt, both in the session's transaction: they are there together, or
    not at all."""
    order = Order(email=email, item=item, cents=cents)
    session.add(order)
    session.flush()  # gives the order its id
    app.enqueue(send_receipt.new(order.id), session=session)
    if not card_is_good:  # found out late, as it happens in shops
        raise PaymentDeclinedError(f"the card for order {order.id} was declined")
    return order
