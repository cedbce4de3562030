"""`sqlq doctor`: examines the database and the queue in it. Reports for each check whether all is well, and
what to do.

Each check runs on its own. If the role may not read something, or the server does not answer in time, the
check reports that, and the others go on. Nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module, metadata
from typing import Any

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
from sqlq.config.durations import span
from sqlq.config.urls import masked
from sqlq.database.database import Database
from sqlq.database.dialects import missing_grant, refusal
from sqlq.errors import SqlqError
from sqlq.model.job import JobDetails, State
from sqlq.schema import version
from sqlq.store.health import reading


def examine(database: Database) -> list[Finding]:
    """Return the findings, those that harm most first. Raises whatever keeps from connecting at all."""
    connection, *server = examine_server(database)
    return by_verdict([connection, *examine_queue(database), *server])


def by_verdict(rows: Sequence[Finding]) -> list[Finding]:
    """Return findings in the order of their verdicts; those of one verdict stay in the order of the checks,
    by the harm that each does."""
    return sorted(rows, key=lambda row: [*Verdict].index(row.verdict), reverse=True)


def examine_server(database: Database) -> list[Finding]:
    """Return what is found of the database and its server, which may take a second."""
    case = Case(database)
    # the checks of the other databases are not imported
    module = import_module(f"sqlq.admin.doctor.{database.dialect.name}")
    checks = (*module.CHECKS, Check("package", _package))
    rows = [replace(_connection(case), check="connection")]
    return [*rows, *(row for each in checks for row in _findings(each, case))]


def examine_queue(database: Database, **known: Any) -> list[Finding]:
    """Return what is found of the tables, the workers, and the jobs that wait for them. `known` has the
    answers of the case that the caller has read."""
    case = Case(database)
    vars(case).update(known)
    rows = _findings(MIGRATIONS, case)
    if any(row.verdict is not Verdict.OK for row in rows):  # nothing else can be looked at
        return [replace(row, verdict=Verdict.TO_DO) for row in rows]
    return [*rows, *(row for each in queue.CHECKS for row in _findings(each, case))]


def findings(database: Database, job: JobDetails) -> list[Finding]:
    """Return what the doctor finds that keeps a job from running, or from ending."""
    subjects = {"tasks": f"the task {job.task}:", "flows": f"flow {job.flow_id} "}
    names, case = _CHECKS.get(job.state, ()), Case(database)
    rows = [row for each in queue.CHECKS if each.name in names for row in _findings(each, case)]
    return [row for row in rows if row.verdict is not Verdict.OK and subjects.get(row.check, "") in row.said]


def unanswered(database: Database, error: Exception) -> Finding:
    """Return the answer of a check whose query the database refused."""
    text = refusal(error)
    if "malformed" in text:
        return to_do(f"the file is damaged: {text}", DAMAGED)
    return check(f"could not look: {text}", missing_grant(error, database.engine.url, "reader"))


def _findings(each: Check, case: Case) -> list[Finding]:
    try:
        answers = [*each.judge(case)] or ([] if each.well is None else [ok(each.well)])
    except (SQLAlchemyError, SqlqError) as error:
        answers = [unanswered(case.database, error)]
    return [replace(answer, check=each.name) for answer in answers]


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
    took = span(time.monotonic() - began)
    return ok(f"{masked(database.engine.url)}, {database.dialect.title} {number}, connected in {took}")


def _package(case: Case) -> Answers:
    # the distribution that pip installs is `sqlq-jobs`
    for each in metadata.distributions(name="sqlq"):
        if all(script.value != "sqlq.cli:main" for script in each.entry_points):
            yield to_do(
                f"sqlq {each.version} is another project's, and overwrites files of sqlq-jobs",
                "pip uninstall -y sqlq && pip install --force-reinstall --no-deps sqlq-jobs",
            )


def _migrations(case: Case) -> Answers:
    schema = case.database.schema
    with reading(case.database) as conn:
        revision = version.read(conn, schema)
    if revision != version.HEAD:
        yield to_do(version.complaint(case.database.engine, schema, revision), None)


MIGRATIONS = Check("migrations", _migrations, f"the tables are at revision {version.HEAD}, the one needed")
