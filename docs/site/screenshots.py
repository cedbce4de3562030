"""`python -m docs.site.screenshots`: the pictures of the dashboard in the README and the guide.

It needs the Debian packages chromium and chromium-driver.
"""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import psycopg
from sqlalchemy import text

import sqlq
from tests.faces.web import shop
from tests.kit import wait_until
from tests.kit.browser import chromium
from tests.kit.command import Command
from tests.kit.postgresql import OwnPostgreSQL

PLACE = Path(__file__).parents[1] / "img"
PAGES = {"overview": "", "jobs": "jobs", "failures": "failures", "flow": "flows/1"}


def fill(app: sqlq.App) -> None:
    """Enqueue a day of orders, and an import that waits for one of its steps."""
    app.enqueue_many([shop.send_receipt.new(order) for order in range(1, 900)])
    app.enqueue_many([shop.charge.new(order) for order in range(1, 40)])
    app.enqueue_many([shop.send_receipt.new(order).set(delay="2h", label="tenant-7") for order in range(12)])
    app.enqueue_many([shop.export.new(400) for _ in range(2)])
    flow = sqlq.Flow("import of orders.csv")
    first = flow.add(shop.step.new(1))
    parts = [flow.add(shop.step.new(number), after=[first]) for number in (2, 3, 4)]
    receipt = flow.add(shop.send_receipt.new(17), after=parts)
    flow.add(shop.step.new(5), after=[receipt])
    app.enqueue(flow)
    app.schedules.add("nightly report", shop.export.new(3), sqlq.Schedule(cron="0 3 * * *"))


def spread(app: sqlq.App) -> None:
    """Move the ends of jobs over the last hour, as if they had not all ended just now."""
    wave = "58 * (0.5 + 0.5 * sin(id * 12.9898) * abs(sin(id * 78.233)))"
    wait = f"interval '1 minute' * ({wave})"
    waited = "interval '1 ms' * (20 + 400 * abs(sin(id * 3.7)))"
    with app.database.begin() as conn:
        for table, ended in (("finished_jobs", "finished_at"), ("failed_jobs", "failed_at")):
            moved = f"reserved_at = reserved_at - {wait}, {ended} = {ended} - {wait}"
            moved += f", available_at = reserved_at - {wait} - {waited}"
            conn.execute(text(f"UPDATE {table} SET {moved} WHERE flow_id IS NULL"))


def main() -> None:
    with tempfile.TemporaryDirectory() as place, closing(OwnPostgreSQL(on_disk=True)) as server:
        url = server.create_database()
        with closing(psycopg.connect(url.replace("+psycopg", ""), autocommit=True)) as conn:
            conn.execute("ALTER SYSTEM SET fsync = on")  # the doctor would report it
            conn.execute("SELECT pg_reload_conf()")
        shop.app.use(url)
        shop.app.migrate()
        fill(shop.app)
        run = Command(Path(place), SQLQ_DATABASE_URL=url, SQLQ_APP="shop:app")
        shutil.copy(shop.__file__, place)
        with run.running("work", "-c", "8", "--name", "shop-1"):
            busy = ("mail", "billing", "default")
            rows = partial(filter, lambda row: row.queue in busy)
            # until all receipts and charges have ended
            wait_until(lambda: all(row.available + row.running == 0 for row in rows(shop.app.queues.list())))
            spread(shop.app)
            with run.running("web", "--port", "0", output="web.log"):
                log = Path(place, "web.log")
                (link, *_) = wait_until(lambda: re.findall(r"http://\S+token=\S+", log.read_text()))
                with chromium(Path(place) / "profile", 1280, 980) as browser:
                    browser.open(link)
                    for scheme, (name, path) in itertools.product(("light", "dark"), PAGES.items()):
                        browser.choose_scheme(scheme)
                        browser.open(link.partition("?")[0] + path)
                        browser.find("h1")
                        browser.driver.save_screenshot(str(PLACE / f"dashboard-{name}-{scheme}.png"))


if __name__ == "__main__":
    main()
