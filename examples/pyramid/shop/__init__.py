"""A small web shop, whose requests are transactions of pyramid_tm: an order is placed, and its receipt is
written afterwards."""

from typing import Any

from pyramid.config import Configurator
from pyramid.router import Router

from shop.jobs import queue


def main(global_config: dict[str, str], **settings: Any) -> Router:
    """Make the WSGI application from the settings of an .ini file."""
    with Configurator(settings=settings) as config:
        config.include("pyramid_tm")
        config.include("shop.models")
        config.include("shop.views")
        queue.use(engine=config.registry.engine)
        return config.make_wsgi_app()
