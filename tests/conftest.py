"""The tables of contents of what all tests have: fixtures and hooks of pytest, in files by subject.

A folder with a `conftest.py` of its own changes some of them for its tests alone.
"""

from __future__ import annotations

pytest_plugins = [
    "tests.fixtures.run",  # environment, processes, reports
    "tests.fixtures.choice",  # which tests run by default
    "tests.fixtures.databases",  # servers, `database_url`, `engine`, `app`
    "tests.fixtures.worker",  # no worker outlives its test
    "tests.fixtures.command",  # `sqlq_`, `desk`: the command line, and the pages of the documentation
]
