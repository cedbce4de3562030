"""Several services on one database: each has queues of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import sqlq
from sqlq.errors import ConfigurationError
from tests.kit import drain


class Services:
    def __init__(self, app: sqlq.App) -> None:
        self.looking = app
        url = app.database.engine.url
        self.shop, self.billing = (sqlq.App(url, service=name) for name in ("shop", "billing"))


@pytest.fixture
def services(app: sqlq.App) -> Iterator[Services]:
    services = Services(app)
    yield services
    services.shop.close()
    services.billing.close()


def test_a_worker_of_a_service_leaves_the_jobs_of_another_one(services: Services) -> None:
    send = services.shop.task(name="send")(lambda: None)
    charge = services.billing.task(name="charge")(lambda: None)
    services.shop.enqueue_many([send.new()] * 5)
    charges = services.billing.enqueue_many([charge.new()] * 5)
    assert drain(services.shop) == drain(services.billing)
    assert {services.looking.jobs.get(job.id).releases for job in charges} == {0}
    assert {job.queue for job in services.looking.jobs.list()} == {"shop", "billing"}
    assert {job.state for job in services.looking.jobs.list()} == {"finished"}


def test_a_worker_of_a_service_serves_the_queues_that_its_app_names(database_url: str) -> None:
    app = sqlq.App(database_url, service="shop", queues={"bulk": {"timeout": "1m"}})
    send = app.task(name="send", queue="mail")(lambda: None)
    plain = app.task(name="plain")(lambda: None)
    new = send.new()
    jobs = app.enqueue_many([new, new.set(queue="bulk"), plain.new(), new.set(queue="elsewhere")])
    assert app.jobs.get(jobs[2].id).queue == "shop"
    assert drain(app).finished == 3
    assert app.jobs.get(jobs[3].id).state == "available"
    assert drain(app, queues=["elsewhere"]).finished == 1
    app.close()


def test_a_default_queue_comes_before_the_service(database_url: str) -> None:
    app = sqlq.App(database_url, service="shop", defaults={"queue": "jobs-of-shop"})
    job = app.enqueue(app.task(name="t")(lambda: None).new())
    assert (job.queue, drain(app).finished) == ("jobs-of-shop", 1)
    app.close()


def test_a_service_that_could_be_no_queue_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^service is 'a,b': a comma separates queues"):
        sqlq.App("sqlite:///x.db", service="a,b")
