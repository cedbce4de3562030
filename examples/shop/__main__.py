"""The shop on the command line: `python -m shop setup`, then `python -m shop order ann@example.org "Blue
teapot" 2400`."""

import argparse
import sys

from sqlalchemy.orm import Session

from shop.models import Model, engine
from shop.orders import PaymentDeclinedError, place_order
from shop.tasks import app


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shop")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup", help="create the shop's tables and sqlq's")
    order = commands.add_parser("order", help="place an order")
    order.add_argument("email")
    order.add_argument("item")
    order.add_argument("cents", type=int)
    order.add_argument(
        "--declined", action="store_true", help="play a card that is declined after all else is done"
    )
    asked = parser.parse_args()

    if asked.command == "setup":
        app.migrate()
        Model.metadata.create_all(engine)
        print("the tables are there")
        return
    try:
        with Session(engine) as session, session.begin():
            placed = place_order(
                session, asked.email, asked.item, asked.cents, card_is_good=not asked.declined
            )
            print(f"order {placed.id} is placed; its receipt will follow")
    except PaymentDeclinedError as error:
        sys.exit(f"{error}: nothing was stored, and no mail will be sent")


if __name__ == "__main__":
    main()
