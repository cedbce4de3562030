"""The tasks of the shop's workers."""

import os
import smtplib
from email.message import EmailMessage

from sqlalchemy.orm import Session

import sqlq
from shop.models import Order, engine

app = sqlq.App(engine=engine)


@app.task(
    queue="mail",
    max_attempts=int(os.environ.get("SHOP_MAIL_ATTEMPTS", "5")),
    backoff=sqlq.exponential(first=os.environ.get("SHOP_MAIL_BACKOFF", "1s")),
    timeout="30s",
)
def send_receipt(order_id: int) -> str:
    """Send the receipt of an order.

    Any error, be it a mail server that is down, ends the attempt; sqlq tries again. A worker that dies
    between the mail and its bookkeeping sends the mail twice. So every attempt sends the same Message-ID, by
    which mailboxes know the second one.
    """
    with Session(engine) as session:
        order = session.get_one(Order, order_id)
    mail = EmailMessage()
    mail["From"] = "shop@example.org"
    mail["To"] = order.email
    mail["Subject"] = f"Your order {order.id}: {order.item}"
    mail["Message-ID"] = f"<job-{sqlq.current_job().id}@shop.example.org>"
    mail.set_content(f"Thank you for your order.\n\n1 × {order.item}: {order.cents / 100:.2f} €\n")
    host, _, port = os.environ.get("SHOP_SMTP", "localhost:25").partition(":")
    with smtplib.SMTP(host, int(port or 25), timeout=10) as server:
        server.send_message(mail)
    return f"sent to {order.email}"
