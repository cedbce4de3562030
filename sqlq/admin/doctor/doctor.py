"""`sqlq doctor`: examines the database and the queue in it. Reports for each check whether all is well, and
what to do.

Each check runs on its own. If the role may not read something, or the server does not answer in time, the
check reports that, and the others go on. Nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from importlib import import_module

from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor import queue
from sqlq.admin.doctor.finding import (
    DAMAGED,
    Answers,
    Case,
    Check,
    Finding,
    Verdict,
    check,
    ok,
    to_do,
)
from sqlq.config import distribution
from sqlq.config.durations import span
from sqlq.config.urls import masked, read_url
from sqlq.database.database import Database
from sqlq.database.dialects import missing_grant, refusal
from sqlq.errors import SqlqError
from sqlq.model.job import JobDetails, State
from sqlq.schema import version
from sqlq.store.health import reading


class Doctor:
    """Examines one database."""

    def __init__(self, database: Database, *, deep: bool = False) -> None:
        self._case = Case(database, deep=deep)
        # the checks of the other databases are not imported
        of_place = import_module(f"sqlq.admin.doctor.{database.dialect.name}").CHECKS
        self._checks: tuple[Check, ...] = (*of_place, *GENERAL, *queue.CHECKS)

    def examine(self) -> list[Finding]:
        """Return the findings, in the order in which they matter. Raises whatever keeps from connecting at
        all."""
        found = [replace(_connection(self._case), check="connection")]
        for each in self._checks:
            found += self._findings(each)
            if each is MIGRATIONS and found[-1].verdict is not Verdict.OK:
                break
        return found

    def troubles(self, names: Collection[str]) -> list[Finding]:
        """Return the findings of these checks, without those where all is well."""
        found = (self._findings(each) for each in self._checks if each.name in names)
        return [finding for some in found for finding in some if finding.verdict is not Verdict.OK]

    def _findings(self, each: Check) -> list[Finding]:
        try:
            answers = [*each.judge(self._case)] or ([] if each.well is None else [ok(each.well)])
        except (SQLAlchemyError, SqlqError) as error:
            answers = [self.unanswered(error)]
        return [replace(answer, check=each.name) for answer in answers]

    def unanswered(self, error: Exception) -> Finding:
        """Return the answer of a check whose query the database refused."""
        said = refusal(error)
        if "malformed" in said:
            return to_do(f"the file is damaged: {said}", DAMAGED)
        grant = missing_grant(error, self._case.database.engine.url, "reader")
        return check(f"could not look: {said}", grant)


def findings(database: Database, job: JobDetails) -> list[Finding]:
    """Return what the doctor finds that keeps a job from running, or from ending."""
    concerns = {
        "tasks": f"the task {job.task}:",
        "flows": f"flow {job.flow_id} ",
    }
    found = Doctor(database).troubles(_CHECKS.get(job.state, ()))
    return [each for each in found if concerns.get(each.check, "") in each.said]


_CHECKS = {
    State.BLOCKED: ("workers", "tasks", "flows"),
    State.SCHEDULED: ("workers", "tasks"),
    State.AVAILABLE: ("workers", "stuck", "tasks"),
    State.RUNNING: ("workers", "stuck", "leases"),
}
"""The checks of the doctor that concern a job in a state."""


def _connection(case: Case) -> Finding:
    began = time.monotonic()
    database = case.database
    database.require_version()
    with reading(database) as conn:
        number = ".".join(map(str, conn.dialect.server_version_info or ()))
    took, name = span(time.monotonic() - began), database.dialect.title
    return ok(f"{masked(database.engine.url)}, {name} {number}, connected in {took}")


def _package(case: Case) -> Answers:
    if (said := distribution.intruder()) is not None:
        yield to_do(said, distribution.REMEDY)


def _replica(case: Case) -> Answers:
    url = read_url(of=case.database.engine.url)
    if url is None:
        return
    with Database.open(url, case.database.requested_schema) as other, reading(other) as conn:
        seconds = other.dialect.health.burden(conn).behind_seconds
    behind = "" if seconds is None else f", {span(seconds)} behind"
    yield ok(f"looks read from {masked(url)}{behind}")


def _migrations(case: Case) -> Answers:
    schema = case.database.schema
    with reading(case.database) as conn:
        stamp = version.find(conn, schema)
        # older ones may lack what the next revision adds
        differs = version.difference(conn, schema) if stamp is not None and stamp.usable else None
    revision = None if stamp is None else stamp.revision
    if differs is not None:
        yield to_do(differs, None)
    elif revision != version.HEAD:
        yield to_do(version.complaint(case.database.engine, schema, revision), None)


MIGRATIONS = Check("migrations", _migrations, f"the tables are at revision {version.HEAD}, the one needed")
GENERAL = (Check("package", _package), Check("replica", _replica), MIGRATIONS)
