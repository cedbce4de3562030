"""The doorbell of a poller, and a flood of rings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from uuid import uuid4

import pytest
from sqlalchemy import URL, make_url

from sqlq.database.doorbell import MAX_RINGS, NAMES, Doorbell, ring

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's abstract names")


@pytest.fixture
def url() -> URL:
    return make_url(f"mariadb://shop@db/{uuid4().hex}")


@pytest.fixture
def bells(url: URL) -> Iterator[list[Doorbell]]:
    """The doorbells of more pollers than there are names."""
    with ExitStack() as open_:
        yield [open_.enter_context(closing(Doorbell(url))) for _ in range(NAMES + 1)]


def test_a_ring_reaches_each_poller_of_its_database_once(url: URL, bells: list[Doorbell]) -> None:
    """Whatever name the server has; a poller beyond the names is not reached."""
    ring(url.set(database="other"))
    assert not any(bell.read() for bell in bells)
    for alike in (url, url.set(host="127.0.0.1", username="other")):
        ring(alike)
        assert [bell.read() for bell in bells] == [True] * NAMES + [False]
        assert not any(bell.read() for bell in bells)


def test_a_doorbell_without_a_url_is_never_rung() -> None:
    with closing(Doorbell(None)) as bell:
        ring(make_url("mariadb://"))
        assert not bell.read()


def test_a_name_is_free_again_when_its_poller_ends(url: URL, bells: list[Doorbell]) -> None:
    bells.pop(0).close()
    with closing(Doorbell(url)) as successor:
        ring(url)
        assert successor.read()


def test_a_ring_is_lost_without_an_error_when_nobody_listens_or_reads(url: URL) -> None:
    ring(url)
    with closing(Doorbell(url)) as bell:
        for _ in range(2 * MAX_RINGS):  # more than the socket holds
            ring(url)
        assert bell.read()
