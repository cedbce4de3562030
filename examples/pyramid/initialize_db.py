"""Create the shop's tables, and sqlq's beside them."""

from pyramid.paster import get_app
from shop.jobs import queue
from shop.models import Model

Model.metadata.create_all(get_app("development.ini").registry.engine)
queue.migrate()
