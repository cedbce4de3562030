"""The README and the pages of docs/ as tests have them: their blocks, and the small shop of which they all
speak. `Desk` has the quick start's shop.py on disk, `around` what the pages' Python finds around it."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine, String, create_engine, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlq
from tests.kit.command import Command
from tests.kit.preloaded import DJANGO, preloaded

ROOT = Path(__file__).parents[2]
README, COOKBOOK = ROOT / "README.md", ROOT / "docs" / "cookbook.md"
PAGES = {page: page.read_text() for page in [README, *sorted((ROOT / "docs").glob("*.md"))]}
"""Those whose blocks are run."""


@dataclass(frozen=True)
class Block:
    kind: str
    name: str
    text: str
    where: str


BLOCK = re.compile(r"^(?:<!-- (\w+): ([\w.]+) -->\n)?```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page: Path, text: str) -> Iterator[Block]:
    for match in BLOCK.finditer(text):
        kind, name, content = match.groups(default="")
        yield Block(
            kind, name, content, f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        )


BLOCKS = [block for page, text in PAGES.items() for block in _blocks(page, text)]


def block(kind: str, name: str) -> str:
    (found,) = [b.text for b in BLOCKS if (b.kind, b.name) == (kind, name)]
    return found


def commands(name: str, kind: str = "sh") -> list[str]:
    """Return the commands of a block, without the comments above them."""
    whole = re.sub(r"\\\n\s*", "", block(kind, name))
    return [line for line in whole.splitlines() if not line.startswith("#")]


def headings(page: Path) -> set[str]:
    """Return the headings of a page, in the form that URLs name them."""
    prose = BLOCK.sub("", page.read_text())
    return {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in prose.splitlines()
        if line.startswith("#")
    }


# -- commands ------------------------------------------------------------------------------------------------


SHELL = re.compile(r"[|&;<>$`]")


class Desk(Command):
    """A directory with the quick start's shop.py, and a shell in which `sqlq` and `python` are those of this
    environment."""

    def __init__(self, directory: Path, **environment: str) -> None:
        programs = directory / ".programs"
        programs.mkdir()
        for name, command in (("python", ""), ("sqlq", " -m sqlq")):
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{command} "$@"\n')
            (programs / name).chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        super().__init__(directory, PATH=path, PYTHONUNBUFFERED="1", **environment)
        (directory / "shop.py").write_text(block("quickstart", "shop.py"))

    def run(self, script: str, ends_with: int = 0, **environment: str) -> str:
        """Return the standard output of a script, or of commands that stand one a line."""
        script = re.sub(r"\\\n\s*", "", script)
        lines = [line for line in script.splitlines() if not line.startswith("#")]
        if len(lines) > 1 and all(line.startswith("sqlq ") for line in lines):
            return "".join(self.run(line, ends_with, **environment) for line in lines)
        done = self.end_of(script, **environment)
        assert done.returncode == ends_with, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def end_of(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end; a lone command that no shell has to read is forked, which is faster."""
        words = shlex.split(script, comments=True)
        names = self.environment | environment
        is_plain = not SHELL.search(re.sub("'[^']*'", "", script))
        if words[:1] == ["sqlq"] and is_plain:
            return preloaded().run(words[1:], self.directory, names, timeout=120)
        if words[:1] == ["python"] and is_plain:
            imported = ["pytest"] if "pytest" in words else DJANGO if "django" in words else []
            return preloaded(*imported).run(words, self.directory, names, timeout=120)
        return subprocess.run(
            ["sh", "-e", "-c", script],
            cwd=self.directory,
            env=names,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


# -- Python --------------------------------------------------------------------------------------------------


class Model(DeclarativeBase):
    pass


class Order(Model):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(String(40))


class Coupon(Model):
    __tablename__ = "coupons"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    campaign: Mapped[str] = mapped_column(String(40))


def around(app: sqlq.App, engine: Engine) -> dict[str, Any]:
    """Return what the pages' Python finds around it."""
    Model.metadata.create_all(engine)

    @app.task(name="shop.send_receipt", queue="mail")
    def send_receipt(order_id: int) -> None: ...

    return {
        "__name__": "shop",
        "app": app,
        "engine": engine,
        "send_receipt": send_receipt,
        "Coupon": Coupon,
        "Order": Order,
        "Session": Session,
        "AsyncSession": AsyncSession,
        "create_engine": create_engine,
        "datetime": datetime,
        "func": func,
        "select": select,
        "sqlq": sqlq,
        "text": text,
        "timezone": SimpleNamespace(utc=UTC),
    }


def run_python(name: str, names: dict[str, Any], kind: str = "python", **replaced: str) -> None:
    """Run a block, in which each key of `replaced` is replaced by its value."""
    source = block(kind, name)
    for there, here in replaced.items():
        assert there in source
        source = source.replace(there, here)
    code = compile(source, f"the block {name}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)
    if asyncio.iscoroutine(running):
        asyncio.run(running)
