"""examples/orders_flow by the commands of its README: a good order, and one that is repaired."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from tests.kit.preloaded import preloaded

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders_flow"


def run(line: str, folder: Path, url: str) -> str:
    program, *arguments = shlex.split(line)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"SQLQ_DATABASE_URL": url, "PYTHONPATH": str(EXAMPLE.parents[1])}
    if program in ("sqlq", "python"):
        words = arguments if program == "sqlq" else [program, *arguments]
        done = preloaded().run(words, folder, environment, timeout=120)
    else:
        done = subprocess.run(
            [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


# its own tables have texts without a length, which MariaDB does not take
@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_an_order_goes_well_and_one_is_repaired(tmp_path: Path, database_url: str, engine: Engine) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)).split(
        "\n"
    )
    said = [run(line, folder, database_url) for line in lines if line]
    migrated, placed, _, shown, *rest = said
    assert "flow 1: 5 steps" in placed
    assert "4 finished, 1 cancelled" in shown
    assert migrated
    _, again, _, alarms, stopped, _, retried, _, listed = rest
    assert "flow 2: 5 steps" in again
    assert alarms == "order 8 was not paid\n"
    assert "failed" in stopped
    assert "DeclinedError: the card for order 8 was declined" in stopped
    assert re.search(r"sqlq .*retry --flow 2", stopped)
    assert "retried 1 job of flow 2" in retried
    assert "5 finished" in listed
    with engine.connect() as conn:
        assert conn.execute(text("SELECT id, state FROM orders ORDER BY id")).all() == [
            (7, "shipped"),
            (8, "shipped"),
        ]
        packed = "SELECT count(*) FROM finished_jobs WHERE task = 'shop.pack' AND attempts = 1"
        assert conn.scalar(text(packed)) == 4
        (parcel,) = conn.execute(
            text("SELECT result FROM finished_jobs WHERE task = 'shop.ship' ORDER BY id LIMIT 1")
        ).one()
    assert parcel == '"order 7: box with teapot, box with cup, receipt 7"'
