"""`sqlq grants`: what each kind of role can do to others, and that one command mends every refusal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError, ProgrammingError, SQLAlchemyError
from sqlalchemy.orm import Session

import sqlq
from sqlq.admin.doctor.doctor import examine
from sqlq.admin.grants import KINDS
from sqlq.cli.root import sqlq as command_line
from sqlq.config.durations import FAR
from sqlq.database.postgresql import online
from sqlq.model.outcome import ErrorText, Finished, Released, Retried
from sqlq.model.schedule import Declared, Schedule
from sqlq.schema import version
from sqlq.store import rights, schedules
from sqlq.store.flows import unblock
from sqlq.store.jobs import lease
from sqlq.store.jobs import operate as operating
from sqlq.store.limits import admit
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify, workers
from tests.kit import BOOM, claim, drain, end, execute, failed, fate, for_each, needs, rescue, settle
from tests.kit.command import Command, Console, grant
from tests.kit.pages import BLOCKS, PAGES, ROOT, block
from tests.kit.postgresql import PostgreSQL

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
    lines = re.findall(r"^\|(.+)\|$", PAGE[PAGE.index("| a role of the kind") :], re.MULTILINE)
    header, _, *rows = lines[: 2 + len(ATTACKS)]
    kinds = [word.strip() for word in header.split("|")][1:]
    assert sorted(kinds) == sorted(KINDS) == sorted(rights.RIGHTS)
    for row in rows:
        what, *says = (word.strip() for word in row.split("|"))
        for kind, said in zip(kinds, says, strict=True):
            yield what, kind, {"yes": True, "no": False}[said]


def test_each_row_of_the_table_is_tried_for_each_kind_of_role() -> None:
    assert {what for what, _, _ in cells()} == ATTACKS.keys()
    kinds = re.findall(r"^sqlq grants \w+ --as ([\w-]+) --apply$", block("sh", "grants"), re.MULTILINE)
    assert sorted(kinds) == sorted(KINDS)


@pytest.fixture
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


@for_each("kind", KINDS)
def test_a_role_can_do_to_others_at_most_the_documented_statements(
    town: dict[str, Engine], kind: str
) -> None:
    mays = [(statement, may) for what, of, may in cells() if of == kind for statement in ATTACKS[what]]
    assert mays
    with town[kind].connect() as conn:
        for statement, may in mays:
            refused = pytest.raises(DBAPIError, match=r"permission denied|must be owner")
            with nullcontext() if may else refused:
                conn.exec_driver_sql(statement)
            conn.rollback()


def test_an_action_has_its_database_user_and_goes_on_when_the_role_may_not_record_how_far_it_came(
    town: dict[str, Engine],
) -> None:
    role = town["operator"].url.username
    execute(town["owner"], f'REVOKE UPDATE (seen_at) ON sqlq_audit FROM "{role}"')
    with closing(sqlq.App(engine=town["operator"])) as app, app.acting_as("ceo"):
        app.enqueue_many([app.named("t").new()] * 600)
        assert len(app.jobs.cancel(all=True)) == 600
        (action,) = app.audit.list(limit=1)
    assert (action.actor, action.database_user, action.number) == ("ceo", role, 600)
    assert action.state == "ended"


def test_an_untrusted_producer_writes_no_row_that_is_too_large_to_claim(town: dict[str, Engine]) -> None:
    with town["untrusted-producer"].connect() as conn:
        for column, most in (("payload", 1_572_864), ("headers", 65_536), ("backoff", 65_536)):
            insert = f"INSERT INTO jobs (task, {column}) VALUES ('t', repeat('x', {{}}))"
            conn.exec_driver_sql(insert.format(most))
            with pytest.raises(DBAPIError, match=r"value for domain sqlq_(payload|short) violates check"):
                conn.exec_driver_sql(insert.format(most + 1))
            conn.rollback()


def enqueue_plainly(engine: Engine) -> None:
    """Enqueue with all options of a plain job, one at a time and several."""
    options: dict[str, Any] = {"priority": 3, "timeout": "5s", "max_attempts": 2, "backoff": "1s"}
    options |= {"retention": "1h", "headers": {"a": 1}, "label": "l", "start_within": "1h"}
    app = sqlq.App(engine=engine)
    new = app.named("shop.note").new("a")
    for some in ({}, options, {**options, "delay": "1h"}, {"available_at": datetime(2031, 1, 1, tzinfo=UTC)}):
        app.enqueue(new.set(**some))
        app.enqueue_many([new.set(**some)])
    app.enqueue_many([new, new.set(**options)])


def enqueue(engine: Engine) -> None:
    enqueue_plainly(engine)
    app = sqlq.App(engine=engine)
    task = app.named("shop.note")
    (first, _) = app.enqueue_many([task.new("a"), task.new("b")])
    assert app.jobs.get(first.id).state == "available"
    app.enqueue(sqlq.chain(task.new("in a flow").set(delay="1h"), task.new()))
    app.enqueue(task.new("in line").set(limit=sqlq.Limit("one", running=1), delay="1h"))
    app.enqueue(task.new("in time").set(unique_key="e", unique_until="pruned", start_within="1h"))
    with Session(engine) as session, session.begin():
        key = str(uuid4())
        assert app.enqueue(task.new("c").set(unique_key=key), session=session).created
        assert not app.enqueue(task.new("d").set(unique_key=key), session=session).created
    execute(engine, "INSERT INTO jobs (task) VALUES ('shop.note')")


def replace(engine: Engine) -> None:
    enqueue(engine)
    app = sqlq.App(engine=engine)
    ways: list[dict[str, Any]] = [{"on_conflict": "replace"}, {"on_conflict": "debounce", "max_wait": "2h"}]
    for options in ways:
        new = app.named("shop.note").new("a").set(unique_key=str(uuid4()), delay="1h", **options)
        app.enqueue(new)
        assert app.enqueue(new).replaced


def work(engine: Engine) -> None:
    """Everything a worker writes, each by its own statement."""
    error = ErrorText("Error", "text")
    app = sqlq.App(engine=engine)
    database = app.database
    with database.begin() as conn:
        version.require(conn, database.schema)
        id = f"w-{uuid4()}"[:36]
        workers.register(conn, id=id, host="h", pid=1, version="1", queues=None, concurrency=1)
        workers.seen(conn, "w")
        workers.leave(conn, "w")
        workers.sweep(conn, silent_ms=1)
        admit.forget_unused(conn, unused_ms=1, limit=10)
        notify.wake_others(conn)
        workers.write_state(conn, "w", "paused")
        workers.end_pauses(conn)
    workers_look.due_in(database, workers_look.KnownQueues())
    task = app.task(name="shop.note")(lambda text: text)
    app.enqueue_many([task.new(str(i)).set(max_attempts=1 + i % 2) for i in range(6)])
    for outcome in (Finished("1"), failed(), Retried(0, error), Released(0)):
        (job,) = claim(app, "w", 1)
        with database.begin() as conn:
            lease.extend(conn, [(job.id, job.lease_token)], lease_ms=1000)
        fate(app, job)
        assert settle(app, job, outcome) == {job.id}
    claim(app, "w", lease_ms=0)
    rescue(app)
    new = Declared(f"n-{uuid4()}", Schedule(every="1h"), task.new("x"))
    schedules.follow(database, {new.name: new}, None, app.tasks, lambda: 0)
    schedules.tick(database, at=datetime(2031, 1, 1, tzinfo=UTC))
    step = task.new("in a flow").set(queue="flows")
    app.enqueue(sqlq.chain(step, step))
    for _ in range(2):
        assert end(app, Finished(), queue="flows")
        unblock.sweep_recent(database, 60_000)
    app.enqueue(task.new("in line").set(limit=sqlq.Limit("one", running=1), queue="limits"))
    assert admit.look(database).number == 1
    admit.sweep(database, "")
    assert end(app, Finished(), queue="limits")
    with database.begin() as conn:
        operating.prune(conn, older_than_ms=0, limit=100)
        operating.prune_expired(conn, limit=100)


def operate(engine: Engine) -> None:
    """Everything an operator's commands do; what they find was put there by the database's owner."""
    app = sqlq.App(engine=engine)
    (running,) = (job.id for job in app.jobs.list(state="running"))
    waiting, _ = (job.id for job in app.jobs.list(state="available"))
    assert app.jobs.cancel([running]) == {running: "requested"}
    assert app.jobs.cancel([running], force=True) == {running: "cancelled"}
    assert app.jobs.cancel([waiting]) == {waiting: "cancelled"}
    queue = f"q-{uuid4()}"
    assert app.queues.pause(queue)
    assert not app.queues.pause(queue)
    assert app.queues.resume(queue)
    assert app.limits.set("one", running=2).set_at is not None
    assert app.limits.clear("one").set_at is None
    assert app.limits.close("one", until="1h").closed_until is not None
    assert app.limits.open("one").closed_until is None
    (first, second) = sorted(job.id for job in app.jobs.list(state="failed"))
    assert app.jobs.retry([first]) == [first]
    assert app.jobs.delete([second]) == [second]
    assert app.jobs.replay(waiting)
    app.jobs.prune(finished="0s", failed="0s")
    schedule = f"s-{uuid4()}"
    app.schedules.add(schedule, app.named("shop.note").new(), every="1h")
    app.schedules.pause(schedule)
    app.schedules.run(schedule)
    app.schedules.remove(schedule)
    look(engine)
    unseen = [finding for finding in examine(app.database) if finding.said.startswith("could not look: ")]
    assert not unseen, unseen


def look(engine: Engine) -> None:
    """Everything that changes nothing."""
    app = sqlq.App(engine=engine)
    for facet in (app.jobs, app.workers, app.flows, app.limits, app.queues, app.audit, app.schedules):
        facet.list()
    app.jobs.failures()
    app.queues.list(exact=True)
    app.queues._vitals()
    with engine.connect() as conn:
        for question in [each.text for each in BLOCKS if each.name == "question"]:
            conn.exec_driver_sql(question)
        conn.exec_driver_sql("SELECT 1 FROM sqlq_edges")


def fill(owner: Engine) -> None:
    """Put jobs in each state for an operator, and no others."""
    execute(owner, "DELETE FROM jobs; DELETE FROM finished_jobs; DELETE FROM failed_jobs")
    app = sqlq.App(engine=owner)
    new = app.named("shop.note").new()
    app.enqueue_many([new] * 5)
    (*failing, _) = claim(app, "w", 3)
    settle(app, failing, BOOM)
    app.enqueue(sqlq.chain(new.set(queue="flows")))
    end(app, Finished(), queue="flows")


WORK: dict[str, Callable[[Engine], None]] = {
    "producer": enqueue,
    "untrusted-producer": enqueue_plainly,
    "replacing-producer": replace,
    "worker": work,
    "operator": operate,
    "reader": look,
}


@for_each("kind", KINDS)
def test_a_role_can_do_the_work_of_its_kind(town: dict[str, Engine], kind: str) -> None:
    fill(town["owner"])
    WORK[kind](town[kind])


def rights_of(kind: str) -> Iterator[tuple[str, list[str], str]]:
    """Yield each right of a kind of role: its name, the columns it is for, none for all, and the table."""
    for each in rights.RIGHTS[kind]:
        said, tables = each.split(" ON ")
        for right, columns in re.findall(r"([A-Z]+)(?: \((.+?)\))?", said):
            for table in tables.split(", "):
                yield right, columns.split(", ") if columns else [], table


def is_refused(flow: Callable[[Engine], None], engine: Engine) -> bool:
    try:
        flow(engine)
    except (ProgrammingError, sqlq.errors.SchemaVersionError) as error:
        return "permission denied" in str(error) or "may not read" in str(error)
    return False


def test_a_workers_role_may_run_every_service_and_mend_failed_jobs(town: dict[str, Engine]) -> None:
    """A drain ends before some services. Each is run twice, since some begin with a wait."""
    with closing(sqlq.App(engine=town["worker"])) as app:
        bad = app.task(name="shop.bad", max_attempts=1)(lambda: 1 / 0)
        app.enqueue_many([bad.new(), bad.new()])
        assert drain(app).failed == 2
        first, second = (job.id for job in app.jobs.list())
        assert app.jobs.retry([first]) == [first]
        assert app.jobs.delete([second]) == [second]
        services = list(app.worker()._maintenance._due)
        assert {type(service).__name__ for service in services} > {"Rescue", "Prune"}
        for service in services * 2:
            service.run()


def test_a_refused_producer_is_told_the_kind_of_role_that_may(town: dict[str, Engine]) -> None:
    engine = town["producer"]
    with pytest.raises(SQLAlchemyError, match="permission denied") as without:
        replace(engine)
    (said,) = without.value.__notes__
    assert " --as replacing-producer`" in said
    owner = town["owner"].url.render_as_string(hide_password=False)
    grant(owner, str(engine.url.username), "replacing-producer")
    replace(engine)
    app = sqlq.App(engine=town["untrusted-producer"])
    new, after = app.named("shop.note").new(), app.task(name="shop.after")(lambda ended: None)
    limit = sqlq.Limit("one", running=1)
    wanting = (new.set(unique_key="k"), new.set(limit=limit), new.set(on_success=after), sqlq.chain(new, new))
    for refused in wanting:
        with pytest.raises(SQLAlchemyError, match="permission denied") as raised:
            app.enqueue(refused)
        (said,) = raised.value.__notes__
        assert " --as producer` prints" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_right_of_a_role_is_needed(town: dict[str, Engine], kind: str) -> None:
    owner, engine = town["owner"], town[kind]
    role = engine.url.username
    for right, columns, table in rights_of(kind):
        if table == "sqlq_audit" and right != "SELECT":
            continue  # an action that cannot be recorded is done
        for column in columns or [""]:
            what = f"{right} ({column}) ON {table}" if column else f"{right} ON {table}"
            execute(owner, f'REVOKE {what} FROM "{role}"')
            fill(owner)
            assert is_refused(WORK[kind], engine), f"{kind} does not need {what}"
            execute(owner, f'GRANT {what} TO "{role}"')


def commands(console: Console) -> list[list[str]]:
    """All that operators do, each with what it needs to have something to do."""
    failed, waiting, running = console.end(BOOM), console.enqueue(delay="1h"), console.enqueue(priority=100)
    (job,) = claim(console.app, "w", 1)
    assert job.id == running
    step = console.app.enqueue(sqlq.chain(console.task.new(1).set(delay="1h"), console.task.new(2)))
    console.app.schedules.add("nightly", console.task.new(), every="24h")
    console.serve()
    ids = [console.end(BOOM) for _ in range(2)]
    words = [
        *("status", "status --exact", "jobs", f"show {failed}", "workers", "jobs --state failed", "failed"),
        *("flows", f"flows show {step.id}", "limits", "schedules", "schedules show nightly", "metrics"),
        *("limits set stripe --running 1", "limits clear stripe"),
        *("limits close stripe --until 1h", "limits open stripe"),
        *("queues pause mail", "queues resume mail", "queues pause --all", "queues resume --all"),
        "workers pause --all",
        *("schedules pause nightly", "schedules run nightly", "schedules remove nightly"),
        *(f"retry {ids[0]}", f"delete {ids[1]}", f"replay {failed}"),
        *(f"cancel {waiting}", f"cancel --force {running}", f"cancel --flow {step.id}"),
        "prune --finished 1s --failed 1s",
    ]
    return [each.split() for each in words]


class Poor(Command):
    """Runs commands as a role without rights, whose name wants quotes in SQL and in a shell."""

    def __init__(self, owner: Engine, directory: Path) -> None:
        self._owner = owner
        self.role = f'we%ird "x:y" {uuid4().hex[:8]}'
        self.quoted = rights.QUOTER.quote(self.role)
        self.url = owner.url.set(username=self.role, password="x").render_as_string(hide_password=False)
        super().__init__(directory, SQLQ_DATABASE_URL=self.url)
        self.as_owner(f"CREATE ROLE {self.quoted} LOGIN PASSWORD 'x'")

    def as_owner(self, sql: str) -> None:
        with self._owner.begin() as conn:
            conn.execution_options(no_parameters=True).exec_driver_sql(sql)

    def forget(self) -> None:
        self.as_owner(f"REVOKE ALL ON {', '.join(rights.TABLES)} FROM {self.quoted}")

    def refusal(self, *arguments: str) -> str:
        done = self(*arguments)
        assert done.code == 1, done
        return done.err or done.out


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
        words = mends(poor.refusal(*arguments))
        assert words[:2] == ["grants", poor.role]
        poor.as_owner(poor.ok(*words))
        poor.ok(*arguments)


@needs("roles")
def test_a_refusal_names_the_kind_of_role_or_the_owner_that_its_command_needs(poor: Poor) -> None:
    looks = [["show", "1"], ["show", "1", "--result"], ["why", "1"], ["flows", "show", "1"], ["metrics"]]
    looks += [["schedules", "show", "nightly"]]
    lists = {name for name, each in command_line.commands.items() if isinstance(each, click.Group)} - {"keys"}
    looks += [[name] for name in sorted(lists | {"status", "jobs", "failed", "audit"})]
    assert len(looks) == 15
    for words in looks:
        assert mends(poor.refusal(*words)) == ["grants", poor.role, "--as", "reader"], words
    assert "--as reader" in poor.refusal("doctor")
    assert mends(poor.refusal("retry", "1"))[-1] == "operator"
    assert "connect as the role that owns the tables" in poor.refusal("prune", "--audit", "1d")
    for words, kind in ((["enqueue", "shop.send", "7"], "producer"), (["work", "--drain"], "worker")):
        poor.forget()
        grants = mends(poor.refusal("-a", "shop:app", *words))
        assert grants == ["grants", poor.role, "--as", kind]
        poor.as_owner(poor.ok(*grants))
        poor.ok("-a", "shop:app", *words)


@needs("roles")
def test_only_the_owner_may_apply_grants(console: Console, poor: Poor) -> None:
    """PostgreSQL only warns, and grants nothing, where a role has a right but not to pass it on."""
    said = poor.refusal("grants", "pg_monitor", "--as", "reader", "--apply")
    assert "connect as the role that owns the tables" in said
    for kind in ("producer", "reader"):
        grant(console.url, poor.role, kind)
        said = poor.refusal("grants", "pg_monitor", "--as", kind, "--apply")
        assert "only the owner of the tables in public grants rights: connect as it" in said


@needs("roles")
def test_only_revokes_rights_beyond_the_kind(console: Console, poor: Poor) -> None:
    poor.as_owner(f"GRANT SELECT, INSERT ON jobs TO {poor.quoted}")
    by_hand = "INSERT INTO jobs (id, task) VALUES (1000, 't')"
    engine = create_engine(poor.url, poolclass=NullPool)
    console("grants", poor.role, "--as", "producer", "--apply")
    execute(engine, by_hand)
    console("grants", poor.role, "--as", "producer", "--only", "--apply")
    with pytest.raises(DBAPIError, match="permission denied"):
        execute(engine, by_hand)
    with closing(sqlq.App(poor.url)) as app:
        assert app.enqueue(app.task(name="t")(lambda: None).new()).created


@needs("roles")
def test_grants_name_a_role_that_does_not_exist_and_the_schema(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = console.sentence("grants", "nobody_here", "--as", "reader", "--apply")
    assert 'role "nobody_here" does not exist; create it, as with createuser' in absent
    monkeypatch.setenv("SQLQ_SCHEMA", "queueing")
    said = console("grants", "select", "--as", "reader").splitlines()
    assert said[0] == 'GRANT USAGE ON SCHEMA queueing TO "select";'
    assert said[-1] == 'GRANT SELECT ON queueing.job_states, queueing.queue_stats TO "select";'
