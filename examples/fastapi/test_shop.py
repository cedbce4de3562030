from functools import partial

import httpx
import pytest
import shop

import sqlq
from sqlq.testing import adrain, assert_enqueued, assert_not_enqueued, inline

pytestmark = pytest.mark.anyio

ORDER = {"email": "ann@example.org", "item": "Blue teapot"}


async def test_an_order_sends_its_receipt(
    database: sqlq.App, client: httpx.AsyncClient, mails: list[httpx.Request]
) -> None:
    order = (await client.post("/orders", json=ORDER)).json()
    assert_enqueued(shop.send_receipt, args=[order["id"]])
    # on this event loop, with this engine
    assert (await adrain(database)).finished == 1
    assert len(mails) == 1
    assert (await client.get(f"/orders/{order['id']}")).json()["receipt"] == "sent"


async def test_a_declined_order_leaves_no_job(database: sqlq.App, client: httpx.AsyncClient) -> None:
    assert (await client.post("/orders", json=ORDER | {"card": "declined"})).status_code == 409
    assert_not_enqueued(shop.send_receipt)


async def test_a_job_of_an_open_session(database: sqlq.App) -> None:
    async with shop.new_session() as session:
        await database.aenqueue(shop.send_receipt.new(7), session=session)
        seen = partial(assert_enqueued, shop.send_receipt, args=[7])
        await session.run_sync(lambda sync: seen(session=sync))
    assert_not_enqueued(shop.send_receipt)  # the session ended without a commit


async def test_the_receipt_at_the_commit(
    database: sqlq.App, client: httpx.AsyncClient, mails: list[httpx.Request]
) -> None:
    async with shop.mail_client() as service:
        with inline(database, at="commit", lifespan=service) as ran:
            await client.post("/orders", json=ORDER)
    assert [job.state for job in ran.jobs] == ["finished"]
    assert len(mails) == 1
