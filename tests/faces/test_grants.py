"""`sqlq grants`: what each kind of role can do to others, and that one command mends every refusal."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import click
import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.admin.grants import KINDS
from sqlq.cli.root import sqlq as command_line
from sqlq.config.durations import FAR
from sqlq.database.postgresql import online
from sqlq.store import rights
from tests.kit import claim, needs
from tests.kit.command import Console, grant
from tests.kit.hand import BOOM
from tests.kit.pages import PAGES, ROOT
from tests.kit.postgresql import PostgreSQL
from tests.kit.preloaded import preloaded

PAGE = PAGES[ROOT / "docs" / "deploy.md"]
ATTACKS = {
    "enqueue any task with any arguments, before others' jobs, and without end": (
        "INSERT INTO jobs (task, payload, priority, available_at) VALUES ('t', '{}', 100, '1970-01-01')",
    ),
    "make any number of queues, which a worker without `-q` reads in turn": (
        "INSERT INTO jobs (queue, task, payload) SELECT 'q' || i, 't', '{}' FROM generate_series(1, 1000) i",
    ),
    "make any number of lines of limits": (
        "INSERT INTO jobs (task, blocked_by, limit_key, available_at) "
        f"SELECT 't', 'limit', 'k' || i, '{FAR}' FROM generate_series(1, 1000) i",
    ),
    "notify without end, so that workers poll": (
        "SELECT pg_notify('sqlq_1', 'x' || i) FROM generate_series(1, 1000) i",
    ),
    "keep a migration waiting": (f"SELECT pg_try_advisory_xact_lock({online.MIGRATIONS})",),
    "read arguments, results and errors of others' jobs": (
        "SELECT payload FROM jobs",
        "SELECT result FROM finished_jobs",
        "SELECT traceback FROM failed_jobs",
    ),
    "choose an id, so that others' enqueues fail": ("INSERT INTO jobs (id, task) VALUES (100, 't')",),
    "mark a job as running, and set its owner": (
        "INSERT INTO jobs (task, reserved_at, reserved_by, lease_expires_at) VALUES ('t', now(), 'w', now())",
        "UPDATE jobs SET reserved_at = now(), reserved_by = 'w', lease_expires_at = now(), lease_token = 7",
    ),
    "enqueue a job whose attempts are used up": ("INSERT INTO jobs (task, attempts) VALUES ('t', 1000)",),
    "hold a unique key that others need": (
        "INSERT INTO jobs (task, unique_key, available_at) VALUES ('t', 'k', '9000-01-01')",
    ),
    "take the slots of a limit": ("INSERT INTO jobs (task, limit_key) VALUES ('t', 'stripe')",),
    "change a limit": ("INSERT INTO sqlq_wakes (limit_key, max_running) VALUES ('stripe', 1)",),
    "add steps to others' flows, and edges between their steps": (
        "INSERT INTO sqlq_edges (job_id, depends_on) VALUES (1, 2)",
    ),
    "have a worker enqueue, and sign, a job that follows another": (
        'INSERT INTO jobs (task, on_success) VALUES (\'t\', \'{"task": "pay", "queue": "pay"}\')',
    ),
    "change the arguments of others' jobs": ("UPDATE jobs SET payload = '{}'",),
    "postpone, cancel or fail others' jobs": (
        "UPDATE jobs SET available_at = '9000-01-01'",
        "UPDATE jobs SET cancel_requested_at = now()",
        "UPDATE jobs SET attempts = 1000",
    ),
    "delete others' jobs": ("DELETE FROM jobs",),
    "change the results of others' jobs": ("UPDATE finished_jobs SET result = '1'",),
    "pause queues": ("UPDATE sqlq_queues SET paused_at = now()",),
    "change schedules": ("UPDATE sqlq_schedules SET task = 't'",),
    "stop workers": ("UPDATE sqlq_workers SET asked = 'stop'",),
    "write into the audit under any name, or over another one's numbers": (
        "INSERT INTO sqlq_audit (actor, action, target) VALUES ('ceo', 'delete', 'delete 1')",
        "UPDATE sqlq_audit SET number = 0",
    ),
    "write into the audit as another user of the database": (
        "INSERT INTO sqlq_audit (actor, action, target, database_user) VALUES ('a', 'b', 'c', 'ceo')",
        "UPDATE sqlq_audit SET database_user = 'ceo'",
    ),
    "see the list of workers": ("SELECT host FROM sqlq_workers",),
    "change the tables, or their recorded revision": (
        "UPDATE sqlq_version SET version_num = '0'",
        "ALTER TABLE jobs ADD COLUMN x int",
        "DROP TABLE jobs",
    ),
}
"""Each row of the page's table as statements, which a role may run all of or none of."""


def cells() -> Iterator[tuple[str, str, bool]]:
    """Yield the cells of the page's table: what is done, the kind of role, and whether it may."""
    header, _, *rows = re.findall(r"^\|(.+)\|$", PAGE[PAGE.index("| a role of the kind") :], re.MULTILINE)[
        : 2 + len(ATTACKS)
    ]
    kinds = [word.strip() for word in header.split("|")][1:]
    assert sorted(kinds) == sorted(KINDS) == sorted(rights.RIGHTS)
    for row in rows:
        what, *says = (word.strip() for word in row.split("|"))
        for kind, said in zip(kinds, says, strict=True):
            yield what, kind, {"yes": True, "no": False}[said]


def test_each_row_of_the_table_is_tried() -> None:
    assert {what for what, _, _ in cells()} == ATTACKS.keys()


@pytest.fixture(scope="module")
def town(postgresql: PostgreSQL, migrated_postgresql: str) -> Iterator[dict[str, Engine]]:
    """A database with a role of each kind, by the command, and the engines of the roles."""
    url = postgresql.create_database(migrated_postgresql)
    owner, mark = create_engine(url, poolclass=NullPool), uuid4().hex[:12]
    engines = {}
    for kind in KINDS:
        role = f"{kind}_{mark}"
        with owner.begin() as conn:
            conn.exec_driver_sql(f"""CREATE ROLE "{role}" LOGIN PASSWORD '{mark}'""")
        grant(url, role, kind)
        engines[kind] = create_engine(make_url(url).set(username=role, password=mark))
    yield {**engines, "owner": owner}
    for kind, engine in engines.items():
        engine.dispose()
        with owner.begin() as conn:
            conn.exec_driver_sql(f'DROP OWNED BY "{kind}_{mark}"; DROP ROLE "{kind}_{mark}"')
    postgresql.drop_database(url)


@pytest.mark.parametrize("kind", KINDS)
def test_a_role_can_do_to_others_at_most_the_documented_statements(
    town: dict[str, Engine], kind: str
) -> None:
    mays = [(statement, may) for what, of, may in cells() if of == kind for statement in ATTACKS[what]]
    assert mays
    with town[kind].connect() as conn:
        for statement, may in mays:
            if may:
                conn.exec_driver_sql(statement)
            else:
                with pytest.raises(DBAPIError, match=r"permission denied|must be owner"):
                    conn.exec_driver_sql(statement)
            conn.rollback()


def test_the_audit_has_the_database_user_of_an_operator(town: dict[str, Engine]) -> None:
    with closing(sqlq.App(engine=town["operator"])) as app, app.acting_as("ceo"):
        app.queues.pause("mail")
        (action,) = app.audit.list(limit=1)
    assert (action.actor, action.database_user) == ("ceo", town["operator"].url.username)


def test_an_action_goes_on_when_its_role_may_not_record_how_far_it_came(town: dict[str, Engine]) -> None:
    column, role = "UPDATE (seen_at) ON sqlq_audit", town["operator"].url.username
    with closing(sqlq.App(engine=town["operator"])) as app:
        app.enqueue_many([app.named("t").new()] * 600)
        for statement in (f'REVOKE {column} FROM "{role}"', f'GRANT {column} TO "{role}"'):
            with town["owner"].begin() as conn:
                conn.exec_driver_sql(statement)
            if statement.startswith("REVOKE"):
                with app.acting_as("ada"):
                    assert len(app.jobs.cancel(all=True)) == 600
                assert [(each.number, each.state) for each in app.audit.list(limit=1)] == [(600, "ended")]


def test_an_untrusted_producer_writes_no_row_that_is_too_large_to_claim(town: dict[str, Engine]) -> None:
    with town["untrusted-producer"].connect() as conn:
        for column, most in (("payload", 1_572_864), ("headers", 65_536), ("backoff", 65_536)):
            insert = f"INSERT INTO jobs (task, {column}) VALUES ('t', repeat('x', {{}}))"
            conn.exec_driver_sql(insert.format(most))
            with pytest.raises(DBAPIError, match=r"value for domain sqlq_(payload|short) violates check"):
                conn.exec_driver_sql(insert.format(most + 1))
            conn.rollback()


# -- one command mends every refusal -------------------------------------------------------------------------


def commands(console: Console) -> list[tuple[str, ...]]:
    """All that operators do, each with what it needs to have something to do."""
    failed, waiting, running = console.end(BOOM), console.enqueue(delay="1h"), console.enqueue(priority=100)
    (job,) = claim(console.app, "w", 1)
    assert job.id == running
    step = console.app.enqueue(sqlq.chain(console.task.new(1).set(delay="1h"), console.task.new(2)))
    console.app.schedules.add("nightly", console.task.new(), every="24h")
    console.serve()
    ids = [console.end(BOOM) for _ in range(2)]
    return [
        ("status",),
        ("status", "--exact"),
        ("jobs",),
        ("show", str(failed)),
        ("workers",),
        ("jobs", "--state", "failed"),
        ("failed",),
        ("flows",),
        ("flows", "show", str(step.id)),
        ("limits",),
        ("schedules",),
        ("schedules", "show", "nightly"),
        ("metrics",),
        ("limits", "set", "stripe", "--running", "1"),
        ("limits", "clear", "stripe"),
        ("queues", "pause", "mail"),
        ("queues", "resume", "mail"),
        ("queues", "pause", "--all"),
        ("queues", "resume", "--all"),
        ("workers", "pause", "--all"),
        ("schedules", "pause", "nightly"),
        ("schedules", "run", "nightly"),
        ("schedules", "remove", "nightly"),
        ("retry", str(ids[0])),
        ("delete", str(ids[1])),
        ("replay", str(failed)),
        ("cancel", str(waiting)),
        ("cancel", "--force", str(running)),
        ("cancel", "--flow", str(step.id)),
        ("prune", "--finished", "1s", "--failed", "1s"),
    ]


class Poor:
    """Runs the real command as a role without rights, whose name wants quotes in SQL and in a shell."""

    def __init__(self, owner: Engine, directory: Path) -> None:
        self._owner, self._directory = owner, directory
        self.role = f'we%ird "x:y" {uuid4().hex[:8]}'
        self.quoted = rights.QUOTER.quote(self.role)
        self.url = owner.url.set(username=self.role, password="x").render_as_string(hide_password=False)
        self.as_owner(f"CREATE ROLE {self.quoted} LOGIN PASSWORD 'x'")

    def as_owner(self, sql: str) -> None:
        with self._owner.begin() as conn:
            conn.execution_options(no_parameters=True).exec_driver_sql(sql)

    def forget(self) -> None:
        every = ", ".join(rights.TABLES)
        self.as_owner(f"REVOKE ALL ON {every} FROM {self.quoted}")

    def __call__(self, *arguments: str, ends_with: int = 0) -> str:
        """Run a command; return its output, or else its error."""
        environment = os.environ | {"SQLQ_DATABASE_URL": self.url}
        done = preloaded().run([*arguments], self._directory, environment, timeout=60)
        assert done.returncode == ends_with, f"{arguments}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return (done.stderr or done.stdout) if ends_with == 1 else done.stdout


@pytest.fixture
def poor(database_url: str, tmp_path: Path) -> Iterator[Poor]:
    owner = create_engine(database_url, poolclass=NullPool)
    poor = Poor(owner, tmp_path)
    yield poor
    poor.as_owner(f"DROP OWNED BY {poor.quoted}; DROP ROLE {poor.quoted}")


def mends(said: str) -> list[str]:
    """Return the words of the one command that a refusal names."""
    (command,) = re.findall(r"`sqlq (grants .+?)(?: -[ad] .+)?` prints$", said, re.MULTILINE)
    assert "GRANT" not in said
    return shlex.split(command)


@pytest.mark.slow
@needs("roles")
def test_one_command_mends_any_refusal(console: Console, poor: Poor) -> None:
    for arguments in commands(console):
        poor.forget()
        words = mends(poor(*arguments, ends_with=1))
        assert words[:2] == ["grants", poor.role]
        poor.as_owner(poor(*words))
        poor(*arguments)


@needs("roles")
def test_an_enqueue_and_a_worker_name_their_own_kinds(poor: Poor, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import sqlq\napp = sqlq.App()\n@app.task\ndef send(n: int): ...\n")
    for arguments, kind in (
        (("-a", "shop:app", "enqueue", "shop.send", "7"), "producer"),
        (("-a", "shop:app", "work", "--drain"), "worker"),
    ):
        poor.forget()
        words = mends(poor(*arguments, ends_with=1))
        assert words == ["grants", poor.role, "--as", kind]
        poor.as_owner(poor(*words))
        poor(*arguments)


@needs("roles")
def test_commands_that_look_name_the_reader_and_the_audits_end_its_owner(poor: Poor) -> None:
    looks = [["show", "1"], ["show", "1", "--result"], ["why", "1"], ["flows", "show", "1"], ["metrics"]]
    looks += [["schedules", "show", "nightly"]]
    lists = {name for name, each in command_line.commands.items() if isinstance(each, click.Group)} - {"keys"}
    looks += [[name] for name in sorted(lists | {"status", "jobs", "failed", "audit"})]
    assert len(looks) == 15
    for words in looks:
        assert mends(poor(*words, ends_with=1)) == ["grants", poor.role, "--as", "reader"], words
    assert "--as reader" in poor("doctor", ends_with=1)
    assert mends(poor("retry", "1", ends_with=1))[-1] == "operator"
    assert "connect as the role that owns the tables" in poor("prune", "--audit", "1d", ends_with=1)


# -- --apply and --only --------------------------------------------------------------------------------------


@needs("roles")
def test_only_the_owner_may_apply_grants(console: Console, poor: Poor) -> None:
    """PostgreSQL only warns, and grants nothing, where a role has a right but not to pass it on."""
    said = poor("grants", "pg_monitor", "--as", "reader", "--apply", ends_with=1)
    assert "connect as the role that owns the tables" in said
    for kind in ("producer", "reader"):
        grant(console.url, poor.role, kind)
        said = poor("grants", "pg_monitor", "--as", kind, "--apply", ends_with=1)
        assert "only the owner of the tables in public grants rights: connect as it" in said


@needs("roles")
def test_grants_names_a_role_that_does_not_exist(console: Console) -> None:
    assert 'role "nobody_here" does not exist; create it, as with createuser' in console.sentence(
        "grants", "nobody_here", "--as", "reader", "--apply"
    )


@needs("roles")
def test_only_revokes_rights_beyond_the_kind(console: Console, poor: Poor) -> None:
    poor.as_owner(f"GRANT SELECT, INSERT ON jobs TO {poor.quoted}")
    by_hand = text("INSERT INTO jobs (id, task) VALUES (1000, 't')")
    engine = create_engine(poor.url, poolclass=NullPool)
    console("grants", poor.role, "--as", "producer", "--apply")
    with engine.begin() as conn:
        conn.execute(by_hand)
    console("grants", poor.role, "--as", "producer", "--only", "--apply")
    with engine.connect() as conn, pytest.raises(DBAPIError, match="permission denied"):
        conn.execute(by_hand)
    with closing(sqlq.App(poor.url)) as app:
        assert app.enqueue(app.task(name="t")(lambda: None).new()).created


@needs("roles")
def test_grants_name_the_schema(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLQ_SCHEMA", "queueing")
    said = console("grants", "select", "--as", "reader").splitlines()
    assert said[0] == 'GRANT USAGE ON SCHEMA queueing TO "select";'
    assert said[-1] == 'GRANT SELECT ON queueing.job_states, queueing.queue_stats TO "select";'


@needs("file")
def test_grants_refuses_sqlite(console: Console) -> None:
    assert "has no roles: who may write the file may do everything" in console.sentence(
        "grants", "web", "--as", "producer"
    )
