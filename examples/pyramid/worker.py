"""The App for `sqlq work`: the queue, with a request and a transaction of pyramid_tm around every job."""

from collections.abc import Iterator

from pyramid.paster import get_app
from pyramid.scripting import prepare
from shop.jobs import queue

import sqlq

web = get_app("development.ini")


@queue.middleware
def in_request(running: sqlq.JobContext) -> Iterator[None]:
    with prepare(registry=web.registry) as made, made["request"].tm:
        yield
