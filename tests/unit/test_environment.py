"""A run of the tests in another environment than the one that is meant fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.environment"],
        cwd=ROOT,
        env=os.environ | variables,
        check=False,
        capture_output=True,
        text=True,
    )


def test_an_environment_passes_when_it_is_the_one_meant() -> None:
    assert environment(SQLQ_TEST_ENVIRONMENT=sys.prefix).returncode == 0


def test_an_environment_fails_when_another_folder_is_meant(tmp_path: Path) -> None:
    done = environment(SQLQ_TEST_ENVIRONMENT=str(tmp_path))
    assert done.returncode == 1
    assert f"this runs in {sys.prefix}, not in {tmp_path}" in done.stderr


@pytest.mark.parametrize("pin", ["SQLAlchemy==2.0.0", "click==1.0"])
def test_an_environment_fails_when_a_version_is_not_the_one_meant(tmp_path: Path, pin: str) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text(f"# comments are no pins\n{pin}\n")
    done = environment(SQLQ_TEST_PINS=str(pins))
    assert done.returncode == 1
    assert done.stderr.startswith(f"{pin.partition('=')[0]} is ")
