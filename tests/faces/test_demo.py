"""`sqlq demo`: what it shows is what happened, and it leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit.command import Command


def _holds(output: str) -> None:
    assert "40 transactions committed an order each" in output
    assert "one more order and its job were rolled back: 40 orders and 40 jobs are there" in output
    assert re.search(r"demo.charge_card .*attempt 1 of 5\) failed .*TimeoutError", output)
    assert re.search(r"demo.charge_card .*attempt 2 of 5\) finished", output)
    assert re.search(r"demo.ship_abroad .*attempt 2 of 2\) failed for good", output)
    assert "1 failed, 41 finished" in output
    assert re.search(r"^default( +0){4} +1 +- +no worker$", output, re.MULTILINE), "as sqlq status has it"
    assert len(output.splitlines()) <= 60


def test_the_demo_needs_nothing_and_leaves_nothing(bare: Command, tmp_path: Path) -> None:
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    before = sorted(tmp_path.iterdir())
    _holds(
        bare.ok(
            "demo",
            env={"TMPDIR": str(elsewhere), "SQLQ_DATABASE_URL": "postgresql://nobody@nowhere.invalid/none"},
        )
    )
    assert sorted(tmp_path.iterdir()) == before
    assert list(elsewhere.iterdir()) == []


def test_the_demo_refuses_a_database(bare: Command) -> None:
    assert "leave out --database-url" in bare("-d", "sqlite:///shop.db", "demo").misuse()
