"""`python -m docs.site.picture` draws docs/img/status.svg: what `sqlq status` and `sqlq failed` print.

A throw-away database is filled as a shop's in the middle of its day.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.text import Text

import sqlq

WIDTH = 110
PLACE = Path(__file__).parents[1] / "img" / "status.svg"
# rich's own form, without the fonts that it would load from elsewhere
FORM = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px monospace; white-space: pre }} {styles}</style>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate(12, 12)" class="{unique_id}-matrix">{backgrounds}{matrix}</g>
</svg>
"""


def main() -> None:
    """Draw the picture."""
    with tempfile.TemporaryDirectory() as place, closing(sqlq.App(f"sqlite:///{place}/shop.db")) as app:
        app.migrate()
        go_on = threading.Event()

        @app.task(name="shop.send_receipt", queue="mail")
        def send_receipt(order: int) -> None: ...

        @app.task(name="shop.charge", queue="billing", max_attempts=1)
        def charge(order: int) -> None:
            if order == 3:
                raise ConnectionError("the bank is closed")

        @app.task(name="shop.export", queue="exports")
        def export(month: str) -> None:
            go_on.wait(60)

        app.enqueue_many([send_receipt.new(order) for order in range(40)])
        app.enqueue_many([charge.new(order) for order in range(6)])
        app.worker(drain=True).run()
        app.enqueue_many([send_receipt.new(order).set(delay="2h") for order in range(12)])
        app.enqueue_many([export.new("2030-05"), export.new("2030-06"), export.new("2030-07")])
        app.enqueue(app.named("shop.tidy").new().set(queue="chores"))
        with app.worker(["exports", "mail", "billing"], concurrency=2, name="larch"):
            while sum(each.running for each in app.queues.list()) < 2:
                threading.Event().wait(0.1)
            draw(place, ("status",), ("failed",))
            go_on.set()


def draw(place: str, *commands: tuple[str, ...]) -> None:
    """Write what some commands print, one below the other."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "sqlq", *words],
            env={"SQLQ_DATABASE_URL": f"sqlite:///{place}/shop.db", "COLUMNS": str(WIDTH)},
            capture_output=True,
            text=True,
            check=True,
        )
        console.print(Text(f"$ sqlq {' '.join(words)}", style="bold green"))
        console.print(Text(done.stdout.replace(f"{place}/", "")))
    PLACE.write_text(console.export_svg(code_format=FORM))


if __name__ == "__main__":
    main()
