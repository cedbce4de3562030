"""[tool.sqlq] in pyproject.toml: where it is found, which keys it has, and what comes before it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sqlq
from sqlq.config import pyproject
from sqlq.config.urls import database_url
from tests.kit import for_each

BOTH = '[tool.sqlq]\napp = "shop:app"\ndatabase-url = "sqlite:///dev.db"\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a project, two levels below its pyproject.toml, as the current one."""
    (tmp_path / "pyproject.toml").write_text(BOTH)
    inner = tmp_path / "src" / "shop"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return inner


def test_the_nearest_pyproject_with_the_table_counts(here: Path, tmp_path: Path) -> None:
    assert pyproject.find() == pyproject.Project(tmp_path / "pyproject.toml", "shop:app", "sqlite:///dev.db")
    for other in ('[project]\nname = "x"\n', "# [tool.sqlq] is in the file above\n"):
        (here / "pyproject.toml").write_text(other)
        found = pyproject.Project(tmp_path / "pyproject.toml", "shop:app", "sqlite:///dev.db")
        assert pyproject.find() == found
    (here.parent / "pyproject.toml").write_text('[tool.sqlq]\napp = "other:app"\n')
    assert pyproject.find() == pyproject.Project(here.parent / "pyproject.toml", "other:app")


def test_no_pyproject_is_found_from_a_deleted_directory(here: Path) -> None:
    here.rmdir()
    assert pyproject.find() is None


def test_a_relative_path_is_relative_to_its_pyproject(here: Path, tmp_path: Path) -> None:
    assert database_url().database == str(tmp_path / "dev.db")
    assert sqlq.App().database.engine.url.database == str(tmp_path / "dev.db")


def test_an_argument_and_the_variable_come_before_pyproject(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database_url("sqlite:///mine.db").database == "mine.db"
    monkeypatch.setenv("SQLQ_DATABASE_URL", "sqlite:///variable.db")
    assert database_url().database == "variable.db"


def test_a_server_url_of_pyproject_is_used_unchanged(here: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.sqlq]\ndatabase-url = "postgresql://u@h/shop"\n')
    assert database_url().render_as_string() == "postgresql+psycopg://u@h/shop"


WRONG = {
    "[tool.sqlq]\ndefaults = 7\n": 'tool.sqlq.defaults is 7: it must be like {"timeout": "5m"}',
    "[tool.sqlq.queues]\nmail = 7\n": "tool.sqlq.queues.mail is 7: it maps options to values",
    '[tool.sqlq.defaults]\ndelay = "1s"\n': "tool.sqlq.defaults has no option 'delay'",
    "[tool.sqlq]\nretention = 7\n": "tool.sqlq.retention is 7: it must be like",
    "[tool.sqlq]\napp = 7\n": 'tool.sqlq.app is 7: it must be like "shop.tasks:app"',
    '[tool.sqlq]\napp = ""\n': "tool.sqlq.app is '': it must be like",
    "[tool.sqlq]\nlease = 30\n": 'tool.sqlq.lease is 30: it must be like "1m"',
    "[tool.sqlq]\nprocesses = true\n": "tool.sqlq.processes is True: it must be like 2",
    '[tool.sqlq]\ndatabase_url = "sqlite:///x.db"\n': "[tool.sqlq] has no key 'database_url'; it has app,",
    "[tool.sqlq]\napp = \n": "cannot be read as TOML",
    '[[tool.sqlq]]\napp = "shop:app"\n': "tool.sqlq is [{'app': 'shop:app'}]: it must be a table",
    f"[tool.sqlq]\napp = {'7' * 5000}\n": "cannot be read as TOML: Exceeds the limit",
    f"[tool.sqlq]\napp = {'[' * 5000}\n": "cannot be read as TOML",
    '[tool.sqlq]\napp = "caf\udce9:app"\n': "cannot be read as TOML: 'utf-8' codec can't decode byte 0xe9",
    '[tool.sqlq]\ndatabase-url = "nonsense"\n': "cannot be read: it has the form postgresql://",
}


@for_each("text", WRONG)
def test_a_wrong_table_in_pyproject_is_refused(here: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(sqlq.errors.ConfigurationError) as raised:
        sqlq.App()
    assert WRONG[text] in str(raised.value)
    assert str(file) in str(raised.value)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
NOBODY = 65534


@needs_root
@pytest.mark.parametrize("owned", ["the file", "its directory", "a link to it"])
def test_a_pyproject_of_another_user_is_passed_over(
    here: Path, tmp_path: Path, owned: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = here / "pyproject.toml"
    if owned == "a link to it":
        (tmp_path / "mine.toml").write_text('[tool.sqlq]\napp = "evil:app"\n')
        file.symlink_to(tmp_path / "mine.toml")
    else:
        file.write_text('[tool.sqlq]\napp = "evil:app"\n')
    assert pyproject.find() == pyproject.Project(file, "evil:app")
    path = here if owned == "its directory" else file
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for _ in range(2):
        found = pyproject.find()
        assert found is not None
        assert found.file == tmp_path / "pyproject.toml"
    assert sqlq.App().database.engine.url.database == str(tmp_path / "dev.db")
    (said,) = caplog.messages
    assert said.startswith(
        f"[tool.sqlq] in {file} is passed over: {path} belongs to another user (uid 65534)"
    )
    assert "chown it, or name App and database by -a and -d" in said


@needs_root
def test_a_pyproject_of_the_sudo_user_is_used(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path / "pyproject.toml", NOBODY, NOBODY)
    assert pyproject.find() is None
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    assert pyproject.find() is not None


@needs_root
def test_a_pyproject_of_root_is_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: NOBODY)
    assert pyproject.find() is not None


def test_a_pyproject_without_the_table_is_not_parsed(here: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("this is no TOML [[[")
    assert pyproject.find() is None
    assert database_url().database == "sqlq.db"
