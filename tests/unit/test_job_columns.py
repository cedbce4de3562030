"""A column of jobs is declared once, and a job option has few places; each missing one is named."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import sqlq
from sqlq.model import job_options
from sqlq.model.job import JobDetails, NewJob
from sqlq.schema.tables import names_of
from sqlq.schema.version import HEAD
from sqlq.store.blockers import BLOCKERS
from sqlq.store.jobs.rows import FIELDS
from tests.kit.processes import run_program

ROOT = Path(sqlq.__file__).parents[1]
NEXT = f"{int(HEAD) + 1:04}"


def test_each_option_of_a_column_has_its_places() -> None:
    options = names_of("option")
    missing = {FIELDS[name] for name in options} - {field.name for field in fields(NewJob)}
    assert not missing, f"model/job.py: NewJob has no {missing}"
    missing = {*names_of("option", "written")} - {field.name for field in fields(JobDetails)}
    assert not missing, f"model/job.py: JobDetails has no {missing}"
    text = (ROOT / "sqlq/cli/commands/show.py").read_text("utf-8")
    missing = {name for name in options if f"job.{name}" not in text}
    assert not missing, f"cli/commands/show.py: _fields shows no {missing}"
    assert job_options._OPTIONS.keys() == job_options.JobOptions.__annotations__.keys()


def test_each_reason_to_wait_is_explained() -> None:
    for name in ("sqlite", "mariadb"):
        script = (ROOT / f"migrations/versions/0001/{name}.sql").read_text("utf-8")
        (allowed,) = set(re.findall(r"blocked_by IN \(([^)]*)\)", script))
        assert {blocker.name for blocker in BLOCKERS} == {*re.findall(r"'(\w+)'", allowed)}


# -- a new one -----------------------------------------------------------------------------------------------

MIGRATION = """
revision, down_revision, branch_labels, depends_on = "NEXT", "HEAD", None, None


def upgrade(op, schema):
    for table in ("jobs", "finished_jobs", "failed_jobs"):
        op.execute(f"ALTER TABLE {table} ADD COLUMN note VARCHAR(255)")
    view = op.get_bind().exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'job_states'").scalar()
    op.execute("DROP VIEW job_states")
    op.execute(view.replace("replay_of, batch_key", "replay_of, batch_key, note"))
"""
PROGRAM = """
import re, sqlq, sqlq.tables, sqlq.testing
from sqlalchemy import create_engine, select, text
from sqlq.schema import version
from sqlq.store import rights
from tests.kit import claim_on

engine = create_engine("sqlite:///jobs.db")
app = sqlq.App(engine=engine)
app.migrate()
task = app.task(name="t", max_attempts=1)(lambda fails=False: 1 / 0 if fails else None)

def note_of(job):
    id = getattr(job, "id", job)
    note = app.jobs.get(id).note
    with engine.connect() as conn:
        states = sqlq.tables.job_states
        assert conn.scalar(select(states.c.note).where(states.c.id == id)) == note
        tables = ("jobs", "finished_jobs", "failed_jobs")
        rows = [row for name in tables for row in conn.execute(text(f"SELECT id, note FROM {name}"))]
        assert (id, note) in rows
    return note

job = app.enqueue(task.new().set(note="one"))
assert note_of(job) == "one"
many = app.enqueue_many([task.new().set(note="many"), task.new(), task.new(True).set(note="fails")])
assert [note_of(each) for each in many] == ["many", None, "fails"]
flow = sqlq.Flow()
flow.add(task.new().set(note="step"))
assert note_of(app.enqueue(flow).jobs[0]) == "step"
app.schedules.add("s", task.new().set(note="ticked"), every="1h")
assert note_of(app.schedules.run("s")) == "ticked"

keyed = task.new().set(unique_key="k", delay="1h")
waiting = app.enqueue(keyed.set(note="old"))
assert note_of(app.enqueue(keyed.set(note="new", on_conflict="replace"))) == "new"

sqlq.testing.drain(app)
assert note_of(job) == "one"
assert note_of(app.jobs.replay(job)[job.id]) == "one"
failed = many[2]
assert app.jobs.get(failed).state == "failed" and note_of(failed) == "fails"
app.jobs.retry([failed])
assert note_of(failed) == "fails"
with app.database.begin() as conn:
    assert version.read(conn, None) == version.HEAD, "HEAD is not the migration of the note"
    assert "fails" in {job.note for job in claim_on(conn, ["default"], limit=9, owner="w", lease_ms=60_000)}

for role, rights_on_it in (("untrusted-producer", 1), ("replacing-producer", 2)):
    granted = " ".join(rights.statements(role, "r", "public"))
    assert len(re.findall(r"\\bnote\\b", granted)) == rights_on_it, role
"""


def before(anchor: str, line: str) -> Callable[[str], str]:
    """Insert a line before the first one that matches."""
    return lambda text: re.sub(f"(?ms){anchor}", lambda found: f"{found[1]}{line}\n{found[2]}", text, count=1)


def of_class(name: str, line: str) -> Callable[[str], str]:
    return before(rf"(^class {name}\b.*?)(^    label: )", f"    {line}")


PLACES: dict[str, tuple[str, Callable[[str], str]]] = {
    "column": (
        "sqlq/schema/tables.py",
        before(r'()(^    _of_job\("label")', '    _of_job("note", NAME, *USUAL, "plain", "viewed"),'),
    ),
    "option": ("sqlq/model/job_options.py", of_class("JobOptions", "note: str | None")),
    "field": ("sqlq/model/job.py", of_class("NewJob", "note: str | None = None")),
    "check": (
        "sqlq/model/job_options.py",
        before(
            r'()(^    "label": JobOption)',
            '    "note": JobOption("note", checked_name, none={"note": None}),',
        ),
    ),
    "details": ("sqlq/model/job.py", of_class("JobDetails", "note: str | None = None")),
    "claim": ("sqlq/model/job.py", of_class("ClaimedJob", "note: str | None = None")),
    "HEAD": ("sqlq/schema/version.py", lambda text: text.replace(f'HEAD = "{HEAD}"', f'HEAD = "{NEXT}"')),
    "migration": (
        f"migrations/versions/{NEXT}_note.py",
        lambda text: MIGRATION.replace("NEXT", NEXT).replace("HEAD", HEAD),
    ),
}
"""The changes for a job option `note`, as the table in CONTRIBUTING.md names them."""


def run(tmp_path: Path, without: str | None) -> subprocess.CompletedProcess[str]:
    """Enqueue, look, replace, retry and replay with a tree that has the option, but for one place."""
    for name in ("sqlq", "migrations", "tests/kit"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for place, (name, change) in PLACES.items():
        if place != without:
            file = tmp_path / name
            text = file.read_text("utf-8") if file.exists() else ""
            changed = change(text)
            assert changed != text, f"{name}: PLACES finds the place of the {place} there no more"
            file.write_text(changed, "utf-8")
    return run_program("-c", PROGRAM, cwd=tmp_path, PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize("place", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in PLACES)])
def test_a_new_job_option_works_or_names_its_missing_place(tmp_path: Path, place: str | None) -> None:
    done = run(tmp_path, place)
    assert (done.returncode == 0) == (place is None), done.stderr
    error = done.stderr.rpartition("Error: ")[2]
    assert place is None or re.search("note|no migrations", error), done.stderr


def test_contributing_names_the_places_of_a_job_option() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()
    rows = "".join(line for line in lines if line.startswith(("| a job option |", "| another column")))
    named = {file.removeprefix("sqlq/") for file, _ in PLACES.values() if file.endswith(".py")}
    assert named - {PLACES["migration"][0]} <= {*re.findall(r"`([\w/]+\.py)`", rows)}
    assert all(f"`{name}`" in rows for name in ("JobOptions", "NewJob", "JobDetails", "ClaimedJob", "HEAD"))
