"""A small web shop, made by an application factory: an order is placed, and its receipt is written
afterwards."""

import os

import click
from flask import Flask

from shop.jobs import queue
from shop.models import db
from shop.orders import pages


def create_app(**config: object) -> Flask:
    web = Flask(__name__)
    web.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get("DATABASE_URL", "sqlite:///shop.db")
    web.config.update(config)
    db.init_app(web)
    web.register_blueprint(pages)
    web.cli.add_command(init_db)
    with web.app_context():
        queue.use(engine=db.engine)
    return web


@click.command("init-db")
def init_db() -> None:
    """Create the shop's tables, and sqlq's beside them."""
    db.create_all()
    queue.migrate()
    print("the tables are there")
