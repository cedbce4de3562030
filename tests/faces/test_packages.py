"""The wheel and the source distribution have what they should, and a page for an index that reads well.

SQLQ_TEST_PACKAGES names a folder with both, as `.ci/run` builds them. Without it they are built here."""

from __future__ import annotations

import email
import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import sqlq
from tests import pythons

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("SQLQ_TEST_PACKAGES"):
        return Path(built)
    made = tmp_path_factory.mktemp("packages")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(made), str(ROOT)], check=True)
    return made


@pytest.fixture(scope="module")
def wheel(folder: Path) -> zipfile.ZipFile:
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


def tracked(*paths: str) -> set[str]:
    """Return the files of the repository below these paths."""
    files = subprocess.check_output(["git", "ls-files", "-z", *paths], cwd=ROOT, text=True)
    return set(files.split("\0")) - {""}


@pytest.mark.slow
def test_a_wheel_has_the_package_and_its_migrations(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    history = {f"sqlq/{name}" for name in tracked("migrations")}
    assert names == tracked("sqlq") | history
    assert {"sqlq/py.typed", "sqlq/web/static/style.css"} < names
    assert [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]


@pytest.mark.slow
def test_a_source_distribution_has_the_tracked_files(folder: Path) -> None:
    (found,) = folder.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - {"PKG-INFO"} == tracked()


@pytest.mark.slow
def test_an_index_gets_the_fields_and_a_page_without_relative_urls(wheel: zipfile.ZipFile) -> None:
    (name,) = [each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")]
    found = email.message_from_string(wheel.read(name).decode())
    assert (found["Name"], found["Version"]) == ("sqlq-jobs", sqlq.__version__)
    assert (found["License-Expression"], found["Requires-Python"]) == ("MIT", ">=3.11")
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert {"web", "metrics", "mariadb", "django"} < set(found.get_all("Provides-Extra", []))
    page = str(found.get_payload())
    assert page.startswith("# sqlq\n")
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", page)
    assert "<!--" not in page
    assert "](" not in page.replace("](http", "")
    assert "pip install sqlq-jobs" in page
    assert "checkout" not in page
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings[0] == "Quick start"
    assert headings[-3:] == ["More", "How it compares", "Licence"]


OLD_NAME = re.compile(r"pip install\s+(?:-\S+\s+)*['\"]?sqlq(?![\w-])|(?<![\w./-])sqlq\[[a-z]+[],]")
"""The distribution by its import name, which is another project's on the package index."""


def test_texts_install_the_distribution_by_its_own_name() -> None:
    for name in sorted(tracked()):
        content = (ROOT / name).read_bytes().decode(errors="replace")
        assert OLD_NAME.findall(content) == [], name


def test_files_for_a_forge_are_read() -> None:
    yaml: Any = importlib.import_module("yaml")
    forge = ROOT / ".github"
    (job,) = yaml.safe_load((forge / "workflows" / "gate.yml").read_text())["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    versions = job["steps"][1]["with"]["python-version"].split()
    classifiers = re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert versions == classifiers
    assert versions == list(pythons.VERSIONS)
    assert set(re.findall(r"python_of (3\.\d+)", (ROOT / ".ci" / "run").read_text())) <= set(versions)
    for path in (forge / "ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(path.read_text())
        assert template["name"]
        assert all(each["type"] == "markdown" or each["attributes"]["label"] for each in template["body"])
