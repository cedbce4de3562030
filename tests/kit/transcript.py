"""Transcripts: commands with what they print, as text that people read.

    > app.enqueue(send.new(7))          Python that sets the scene, or prints what became of it
    . more()                            and that goes on
    $ cat > own.py <<EOF                a file is written
    EOF
    $ COLUMNS=60 sqlq show 1            a command; its output stands below
    ! sqlq: there is no job 1           a line of its standard error
    [exit 1]                            its code, if it is not 0

Output ends at a blank line, and all else there is a comment. A placeholder stands for what differs from
run to run, and two blanks for several. SQLQ_TEST_WRITE_GOLDEN=1 writes the output again.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlq
from tests.kit.command import Command

PLACEHOLDERS = (
    (r"20[12]\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d|Z)", "TIME"),
    (r"\b(\d+(\.\d+)? (ms|s|min)( \d+ s)? ago|just now)", "AGO"),
    (r"\bin 5\d min( \d+ s)?", "in 1 h"),
    (r"\bin [\d,]+ d( \d+ h)?", "in DAYS"),
    (r"\b(after|within the last|behind) \d+(\.\d+)? m?s\b", r"\1 SPAN"),
    (r"\bpid \d+", "pid PID"),
    (r"\b\w[-\w]*@HOST\b", "USER@HOST"),
    (r"(?<![-\w])(?=[0-9]*[a-f])[0-9a-f]{12}\b", "FINGERPRINT"),
    (r'(_seconds": )\d[\d.]*', r"\1SPAN"),
    (r"((context\.py|<frozen [\w.]+>), line) \d+", r"\1 N"),
    (r"(?<=\S) {2,}(?=\S)", "  "),
    (r"(?<=  )(\d+ min )?\d+(\.\d+)? m?s(?=  )", "SPAN"),
    (r"(?m)^(Usage: |Try ').*\n", ""),
)


class Transcript:
    """A file of commands and their output."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def run(self, sqlq_: Command, names: dict[str, Any]) -> None:
        """Run its commands, and compare what they print."""
        sqlq_.environment |= {"TZ": "UTC", "COLUMNS": "400"}
        before = self.file.read_text()
        text = "".join(f"{line}\n" for line in self._lines(_statements(before), sqlq_, names))
        if os.environ.get("SQLQ_TEST_WRITE_GOLDEN"):
            self.file.write_text(text)
        else:
            changes = "\n".join(
                difflib.unified_diff(before.splitlines(), text.splitlines(), n=1, lineterm="")
            )
            assert not changes, f"{self.file.name}, which SQLQ_TEST_WRITE_GOLDEN=1 writes again:\n{changes}"

    def _lines(self, lines: Iterator[str], sqlq_: Command, names: dict[str, Any]) -> Iterator[str]:
        """Yield the lines of the file as they should stand there."""
        is_output = False
        for line in lines:
            kind, _, command = line.partition(" ")
            is_output = kind in (">", "$") or (is_output and line != "")
            if kind == ">":
                yield line
                yield from self._evaluated(command.replace("\n. ", "\n"), sqlq_, names)
            elif file := re.fullmatch(r"cat > (\S+) <<EOF", command):
                written = [*iter(lines.__next__, "EOF")]
                (sqlq_.directory / file[1]).write_text("\n".join([*written, ""]))
                yield from [line, *written, "EOF"]
            elif kind == "$":
                yield line
                yield from self._said(shlex.split(command), sqlq_)
            elif not is_output:
                yield line

    def _evaluated(self, line: str, sqlq_: Command, names: dict[str, Any]) -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(line, self.file.name, "exec"), names)
        return normal(out.getvalue(), sqlq_).splitlines()

    def _said(self, words: list[str], sqlq_: Command) -> Iterator[str]:
        env = {}
        while "=" in words[0]:
            name, _, env[name] = words.pop(0).partition("=")
        assert words[0] == "sqlq", words
        done = sqlq_(*words[1:], env=env)
        yield from normal(done.out, sqlq_).splitlines()
        yield from (f"! {line}" for line in normal(done.err, sqlq_).splitlines() if line)
        if done.code:
            yield f"[exit {done.code}]"


def _statements(text: str) -> Iterator[str]:
    """Yield the lines, those of Python that goes on as one."""
    return iter(re.split(r"\n(?!\. )", text.removesuffix("\n")))


def normal(text: str, sqlq_: Command) -> str:
    """Replace what differs from run to run."""
    url = sqlq_.environment.get("SQLQ_DATABASE_URL", "")
    directory = sqlq_.directory
    fixed = {
        url: "URL",
        re.sub(":[^:/]+@", ":***@", url): "URL",
        str(directory): "DIRECTORY",
        directory.name: "HERE",
        socket.gethostname(): "HOST",
        sqlq.__version__: "VERSION",
    }
    for value, name in fixed.items():
        text = text.replace(value, name) if value else text
    for pattern, name in PLACEHOLDERS:
        text = re.sub(pattern, name, text)
    # a blank line would end the output
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
