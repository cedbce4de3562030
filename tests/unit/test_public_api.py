"""The names of `import sqlq`, and the time that it takes."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest

import sqlq
from sqlq import errors
from tests.kit.processes import run_program

ROOT = Path(__file__).parents[2]
ERRORS = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
PROMISED = """
    App AttemptRecord Cancel EnqueueError EnqueuedFlow Flow FlowDetails Job JobCancelledError JobContext
    JobDetails JobEvent JobFailedError JobNotFoundError JobOutcome JobTimeoutError LeaseLostError Limit
    NewJob NoResultError Progress Retry Schedule Serial SlowDown Snooze SqlqError State Step StepDetails Task
    WaitFor WaitTimeoutError chain configure_sqlite current_job exponential fibonacci fixed group linear
"""


def test_the_names_are_those_promised() -> None:
    assert sqlq.__all__ == PROMISED.split()
    assert set(sqlq.__all__) <= set(dir(sqlq))


def test_each_name_can_be_imported() -> None:
    for name in sqlq.__all__:
        found = getattr(sqlq, name)
        assert found.__name__ == name
        assert found.__module__.startswith("sqlq.")
        assert found.__doc__
        assert getattr(sqlq, name) is found


def test_unknown_names_raise_pythons_errors() -> None:
    with pytest.raises(AttributeError, match="module 'sqlq' has no attribute 'Ap'"):
        _ = sqlq.Ap
    with pytest.raises(AttributeError, match=r"no sqlq\.task: make an App, .*, and write @app\.task"):
        _ = sqlq.task
    with pytest.raises(ImportError, match=r"no sqlq\.shared_task: make an App"):
        from sqlq import shared_task  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Ap' from 'sqlq'"):
        from sqlq import Ap  # noqa: F401
    assert not hasattr(sqlq, "task")
    assert all(issubclass(getattr(sqlq.errors, name), errors.SqlqError) for name in ERRORS)


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import sqlq", ["sqlalchemy", "alembic", "asyncio", "sqlq.app.app"]),
        (
            "import sqlq; sqlq.App('sqlite:///shop.db')",
            ["alembic", "sqlalchemy.ext.asyncio", "asyncpg", "click", "rich", "sqlq.worker"],
        ),
        (
            "import sqlq, sqlq.admin.doctor.doctor; sqlq.App('sqlite:///shop.db').database",
            ["sqlalchemy.dialects.postgresql", "sqlalchemy.dialects.mysql", "sqlq.database.mariadb.dialect"],
        ),
        (
            "import sqlq, sqlq.admin.doctor.doctor; sqlq.App('postgresql://here/shop').database",
            ["sqlalchemy.dialects.mysql", "sqlq.database.mariadb.dialect"],
        ),
    ],
)
def test_an_import_brings_no_more_than_is_needed(program: str, absent: list[str]) -> None:
    shown = f"{program}; import sys; print([name for name in {absent} if name in sys.modules])"
    done = run_program("-c", shown)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_version_is_that_of_the_project() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == sqlq.__version__
