"""The App for `sqlq work`: the queue, with the application's context around every job."""

from collections.abc import Iterator

from shop import create_app
from shop.jobs import queue

import sqlq

web = create_app()


@queue.middleware
def in_web_context(running: sqlq.JobContext) -> Iterator[None]:
    with web.app_context():
        yield
