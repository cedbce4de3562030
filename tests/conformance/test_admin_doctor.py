"""The findings of the doctor: each trouble it knows, made on purpose, and a healthy database."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import URL, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

import sqlq
from sqlq.admin.doctor import finding, postgresql, sqlite
from sqlq.admin.doctor.doctor import by_verdict, examine
from sqlq.admin.doctor.finding import Case, Finding, Verdict, check, ok, to_do
from sqlq.admin.doctor.sqlite import filesystem
from sqlq.admin.storage import Reading, Storage, storage
from sqlq.cli.context import Context
from sqlq.cli.root import sqlq as command
from sqlq.config.durations import written
from sqlq.database.mariadb import health as mariadb_health
from sqlq.database.postgresql import health
from sqlq.database.values import Rows
from sqlq.model.outcome import Finished, Released
from sqlq.store import health as queue_health
from sqlq.store import rights
from sqlq.store.workers import workers
from tests.kit import Hand, execute, needs, span, wait_until
from tests.kit.callers import dsn
from tests.kit.command import other_distribution
from tests.kit.standby import Pair, pair_of_servers

pytestmark = pytest.mark.each_database

OK, CHECK, TO_DO = Verdict.OK, Verdict.CHECK, Verdict.TO_DO


class Patient(Hand):
    """A worker's hand, and the findings of the doctor."""

    def __init__(self, app: sqlq.App) -> None:
        super().__init__(app)
        self.kind = app.database.dialect.name

    def examine(self) -> list[Finding]:
        return examine(self.app.database)

    def finds(self, check: str, verdict: Verdict, *words: str) -> Finding:
        (found,) = (finding for finding in self.examine() if finding.check == check)
        assert found.verdict is verdict
        for each in words:
            assert each in f"{found.said} {found.remedy}"
        return found

    def claimed(self) -> Any:
        """Enqueue a job and claim it."""
        self.enqueue(queue="mail")
        (job,) = self.claim("mail")
        return job

    def serve(self, names: Sequence[str] | None = None, **columns: str) -> None:
        row: dict[str, Any] = {"host": "here", "pid": 1, "version": sqlq.__version__, "concurrency": 1}
        with self.app.database.begin() as conn:
            workers.register(conn, id=str(uuid4()), queues=names, **{**row, **columns})

    def set_back(self, column: str, hours: int = 1) -> None:
        """Move a time of all jobs into the past."""
        engine = self.app.database.engine
        was = f"coalesce({column}, created_at)"
        execute(engine, f"UPDATE jobs SET {column} = {was} - {span(engine, hours * 3_600)}")


def answer(monkeypatch: pytest.MonkeyPatch, query: Callable[..., Any], value: Any) -> None:
    """Let one query of the doctor return a value, or raise it; a dict has the values of settings."""
    ask = Case.query

    def answered(case: Case, asked: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if asked is not query or (isinstance(value, dict) and args[0] not in value):
            return ask(case, asked, *args, **options)
        if isinstance(value, Exception):
            raise value
        return value[args[0]] if isinstance(value, dict) else value

    monkeypatch.setattr(Case, "query", answered)


def about(check: str, url: str | URL, **options: Any) -> Finding:
    with closing(sqlq.App(url, **options)) as app:
        (found,) = (finding for finding in examine(app.database) if finding.check == check)
        return found


def unseen(found: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found if finding.said.startswith("could not look: ")}


@pytest.fixture
def patient(app: sqlq.App) -> Patient:
    return Patient(app)


def test_the_doctor_finds_every_check_ok_in_a_healthy_database(patient: Patient) -> None:
    patient.serve()
    patient.claimed()
    patient.enqueue()
    found = patient.examine()
    checks = {"postgresql": 20, "mariadb": 20, "sqlite": 18}[patient.kind]
    assert len(found) == len({finding.check for finding in found}) == checks
    # the tests' own servers save the disk that trouble
    assert not [each for each in found if each.verdict is not OK and each.check != "durability"]
    assert all(finding.remedy for finding in found if finding.verdict is TO_DO)
    names = [finding.check for finding in found if finding.verdict is OK]
    assert names[:2] == ["connection", "migrations"]
    order = ["workers", "schedules", "queues", "failed", "file" if "file" in names else "transactions"]
    assert [name for name in names if name in order] == order
    some = [ok("fine", check="a"), check("old", check="b"), to_do("off", check="c"), check("new", check="d")]
    assert [row.check for row in by_verdict(some)] == ["c", "b", "d", "a"]


@needs("cheap")
def test_the_doctor_finds_another_distribution_of_the_same_name(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    other_distribution(tmp_path, "sqlq_jobs")
    assert "package" not in {finding.check for finding in patient.examine()}
    other_distribution(tmp_path)
    patient.finds("package", TO_DO, "sqlq 1.6.0 is another project's, and overwrites files of sqlq-jobs")


def test_the_doctor_finds_due_jobs_without_a_worker(patient: Patient) -> None:
    patient.finds("workers", CHECK)
    patient.enqueue(queue="mail")
    due = "no worker is alive, and 1 job is due"
    patient.finds("workers", TO_DO, due, "start one with sqlq work -a module:attribute")
    patient.app.queues.pause("mail")
    patient.finds("workers", CHECK)  # nothing is to be run from a paused queue
    patient.app.queues.resume("mail")
    patient.serve(["other"])
    patient.finds("queues", TO_DO, "no worker serves mail (1 due)", "-q mail")
    patient.serve()
    patient.finds("queues", OK)
    patient.set_back("available_at")
    patient.finds("queues", CHECK, "due for 1 h")


def test_the_doctor_finds_paused_queues_and_workers(patient: Patient) -> None:
    patient.serve()
    patient.serve(state="paused")
    patient.finds("paused", CHECK, "1 of 2 workers are paused", "sqlq workers resume --all")
    patient.enqueue(queue="mail")
    patient.app.queues.pause("mail")
    patient.app.queues.pause("empty")
    rows = [row for row in patient.examine() if row.check == "paused" and "workers" not in row.said]
    since = {name: written(pause.since) for name, pause in patient.app.queues.pauses().named.items()}
    assert {row.verdict for row in rows} == {CHECK}
    assert [(row.said, row.remedy) for row in rows] == [
        (f"empty is paused, since {since['empty']}", "sqlq queues resume empty"),
        (f"mail is paused, since {since['mail']}, and 1 job waits in it", "sqlq queues resume mail"),
    ]


@pytest.mark.parametrize(
    ("seconds", "said"), [(7_204, "is 2 h ahead of"), (-60, "is 60 s behind"), (-4, None)]
)
def test_the_doctor_finds_a_host_whose_clock_differs(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, seconds: int, said: str | None
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls.fromtimestamp(time.time() + seconds, tz)

    monkeypatch.setattr(workers, "datetime", Clock)
    patient.serve()
    (worker,) = patient.app.workers.list()
    with patient.app.database.begin() as conn:
        conn.execute(text("UPDATE sqlq_workers SET clock_at = NULL"))
        assert workers.seen(conn, worker.id)
    if said is not None:
        found = patient.finds("clocks", CHECK)
        assert found.said == f"the clock of here {said} the database's: its logs have other times"
        with patient.app.database.begin() as conn:
            monkeypatch.undo()
            workers.stand_in(conn, [worker.id], lease_ms=30_000)  # the supervisor's heartbeat writes it, too
    patient.finds("clocks", OK)


def test_the_doctor_finds_hosts_that_cannot_load_the_app(patient: Patient) -> None:
    for host in "abcde":
        patient.serve(host=host)
    error = "the App's module 'shop' cannot be imported: ModuleNotFoundError: No module named 'nope'"
    ids = {row.host: row.id for row in patient.app.workers.list()}
    with patient.app.database.begin() as conn:
        some = [ids[host] for host in "ace"]
        workers.write_start_error(conn, some, f"{error}; see all of it with: python -c …")
    found = patient.finds("imports", TO_DO)
    assert found.said == f"3 of 5 hosts cannot start a new worker: {error}"
    assert found.remedy == "mend it on a, c, e, then sqlq workers restart --all"
    patient.app.database.run(lambda conn: workers.write_start_error(conn, [*ids.values()], None))
    patient.finds("imports", OK)


def test_the_doctor_finds_expired_leases(patient: Patient) -> None:
    ids = patient.enqueue(7)
    patient.claim()
    patient.finds("leases", OK)
    patient.set_back("lease_expires_at")
    lost = "7 running jobs have lost their workers, the first 59 min"
    found = patient.finds("leases", TO_DO, lost, "start a worker")
    assert found.said.endswith(", ".join(map(str, ids)))
    patient.serve()
    patient.finds("leases", TO_DO, "logs")


def test_the_doctor_finds_unknown_tasks_and_a_missing_index(patient: Patient, engine: Engine) -> None:
    patient.ended(outcome=Finished(None))
    execute(engine, f"UPDATE finished_jobs SET finished_at = finished_at - {span(engine, 6 * 3_600)}")
    patient.settle(patient.claimed(), Released(0, unknown_task=True))
    patient.set_back("unknown_since", hours=4)
    put_back = "1 job was put back, first 4 h ago, and will fail in 20 h"
    patient.finds("tasks", TO_DO, f"no worker takes jobs of the task send: {put_back}")
    execute(engine, f"DROP INDEX jobs_claim{' ON jobs' if patient.kind == 'mariadb' else ''}")
    patient.finds("indexes", TO_DO, "these indexes are missing: jobs_claim; claims read whole tables")


def test_the_doctor_names_workers_of_two_apps_that_share_a_queue(patient: Patient) -> None:
    for names in (None, ["other"], ["mail", "other"]):
        patient.serve(names)
    released, completed = patient.claimed(), patient.claimed()
    patient.settle(released, Released(0, unknown_task=True))
    patient.set_back("unknown_since")
    patient.finds("tasks", TO_DO)
    patient.settle(completed, Finished(None))
    share = "their Apps share the queue mail (served by here pid 1, here pid 1)"
    said = f"a worker puts back jobs of the task send, which another one runs: {share}"
    assert patient.finds("tasks", CHECK, "App(service=…)").said == said


@pytest.mark.parametrize("revision", [None, "0000", "9999"])
def test_other_revisions_end_the_examination(patient: Patient, engine: Engine, revision: str | None) -> None:
    update = f"UPDATE sqlq_version SET version_num = '{revision}'"
    execute(engine, "DROP TABLE sqlq_version" if revision is None else update)
    rows = patient.examine()
    assert (rows[0].check, rows[0].verdict, "migrate" in rows[0].said) == ("migrations", TO_DO, True)
    assert "workers" not in {row.check for row in rows}, "the tables are not looked into"


NO_CONNECTION = "QueuePool limit of size 1 overflow 0 reached"
READS = mariadb_health.setting
SOUND: dict[str, Any] = {"log_bin": 1, "innodb_doublewrite": 1, "innodb_flush_log_at_trx_commit": 1}
ANSWERS: dict[str, list[tuple[Callable[..., Any], Any, str, Verdict, str]]] = {
    "postgresql": [
        (health.setting, {"fsync": "off"}, "durability", TO_DO, "lose acknowledged jobs"),
        (health.dead_rows, Rows(10, 60_000, None), "dead rows", CHECK, "about 10 live and 60,000 dead rows"),
    ],
    "mariadb": [
        (mariadb_health.unpurged_transactions, 123_456, "purge", CHECK, "123,456 transactions are not"),
        (READS, SOUND | {"read_only": 1}, "primary", TO_DO, "as a replica is: nothing can be enqueued"),
        (READS, SOUND | {"binlog_format": "STATEMENT"}, "binlog", TO_DO, "and cannot write then"),
        (READS, SOUND | {"innodb_doublewrite": 0}, "durability", TO_DO, "can damage tables"),
        (READS, SOUND | {"innodb_flush_log_at_trx_commit": 2}, "durability", CHECK, "can lose the jobs"),
    ],
    "sqlite": [],
}
"""The answer of a query on each kind of database, and the finding that the doctor makes of it."""


def test_the_doctor_finds_what_the_server_answers(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = (queue_health.indexes, PoolTimeoutError(NO_CONNECTION), "indexes", CHECK, NO_CONNECTION)
    for query, value, name, verdict, words in [refused, *ANSWERS[patient.kind]]:
        with monkeypatch.context() as patch:
            answer(patch, query, value)
            patient.finds(name, verdict, words)


@needs("server")
def test_the_doctor_finds_transactions_that_hold_back_vacuum(
    patient: Patient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as conn:
        if patient.kind == "postgresql":
            conn.execute(text("SET application_name = 'report'"))
            number = conn.scalar(text("SELECT pg_backend_pid() FROM pg_current_xact_id()"))
            said = f"session {number} (report, idle in transaction) has had a transaction open"
            remedy = f"pg_terminate_backend({number})"
        else:
            number = conn.scalar(text("SELECT CONNECTION_ID()"))
            conn.execute(text("SET time_zone = '+09:00'"))
            conn.execute(text("SELECT * FROM jobs"))
            said, remedy = f"session {number} (", f"KILL {number}"
        patient.finds("transactions", OK)  # it is young
        for bound, verdict in (("OLD_TRANSACTION_S", CHECK), ("VERY_OLD_TRANSACTION_S", TO_DO)):
            monkeypatch.setattr(finding, bound, 0.0)
            found = [each for each in patient.examine() if said in each.said]
            assert [(each.verdict, remedy in str(each.remedy)) for each in found] == [(verdict, True)]
        assert patient.app.queues._vitals()[1].oldest_transaction_seconds is not None


@needs("postgresql")
def test_the_doctor_finds_an_invalid_index(patient: Patient, engine: Engine) -> None:
    patient.enqueue(2)
    outside = engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(IntegrityError):
        execute(outside, "CREATE UNIQUE INDEX CONCURRENTLY jobs_once ON jobs (task)")
    patient.finds("indexes", TO_DO, "REINDEX INDEX CONCURRENTLY jobs_once")


@needs("postgresql")
def test_the_doctor_checks_the_settings_of_postgresql(database_url: str, monkeypatch: Any) -> None:
    answer(monkeypatch, health.setting, {"fsync": "on"})
    for option, name, verdict, words in (
        ("synchronous_commit=off", "durability", CHECK, "synchronous_commit is off"),
        ("default_transaction_read_only=on", "primary", TO_DO, "read-only"),
    ):
        found = about(name, make_url(database_url).update_query_dict({"options": f"-c {option}"}))
        assert (found.verdict, words in found.said) == (verdict, True)


@needs("listen")
def test_the_doctor_finds_a_listen_that_is_deaf(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a pooler that gives each statement another session: the LISTEN is gone."""
    monkeypatch.setattr(postgresql, "LISTEN_SECONDS", 0.1)

    def swallow(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        return ("SELECT 1" if statement.startswith("LISTEN") else statement), parameters

    event.listen(Engine, "before_cursor_execute", swallow, retval=True)
    try:
        patient.finds("listen", CHECK, "PgBouncer in transaction mode", "SQLQ_LISTEN_URL")
    finally:
        event.remove(Engine, "before_cursor_execute", swallow)


@needs("listen")
def test_the_doctor_checks_listen_at_its_url(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel of another database receives nothing of this one, and psycopg2 cannot listen."""
    elsewhere = make_url(database_url).set(database="postgres")
    psycopg2 = make_url(database_url).set(drivername="postgresql+psycopg2")
    assert about("listen", database_url, listen_url=database_url).verdict is OK
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=1)
    with closing(sqlq.App(engine=engine)) as app:
        found = examine(app.database)
    assert not unseen(found)
    assert [finding.verdict for finding in found if finding.check == "listen"] == [OK]
    monkeypatch.setattr(postgresql, "LISTEN_SECONDS", 0.1)
    assert about("listen", database_url, listen_url=elsewhere).verdict is CHECK
    assert about("listen", psycopg2).verdict is CHECK


@needs("roles")
def test_the_doctor_reports_tables_that_its_role_may_not_read(database_url: str, engine: Engine) -> None:
    role = f"poor_{uuid4().hex[:12]}"
    execute(engine, f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    with closing(sqlq.App(make_url(database_url).set(username=role, password=role))) as app:
        with engine.connect() as conn:
            conn.execute(text("SELECT 1"))  # a session of another role
            without = examine(app.database)
            assert (without[0].verdict, without[0].check) == (TO_DO, "migrations")
            assert "may not read" in without[0].said
            assert any("sessions of other roles" in each.said for each in without)
            execute(engine, f"GRANT SELECT ON sqlq_version TO {role}")
            found = examine(app.database)
        denied, some = unseen(found), "workers stuck queues paused leases tasks schedules limits flows"
        assert denied.keys() == {*some.split(), "failed", "imports", "clocks"}
        assert {each.verdict for each in denied.values()} == {CHECK}
        assert all("look: permission denied" in each.said for each in denied.values())
        (remedy,) = {finding.remedy for finding in denied.values()}
        assert f"sqlq grants {role} --as reader` prints" in str(remedy)
        with engine.begin() as conn:
            rights.apply(conn, "reader", role, "public")
        assert not unseen(examine(app.database))
    execute(engine, f"DROP OWNED BY {role}; DROP ROLE {role}")
    sound = {finding.check for finding in found if finding.verdict is OK}
    assert sound > {"connection", "migrations", "listen", "indexes"}


@needs("mariadb")
def test_the_doctor_and_an_enqueue_name_a_row_with_the_largest_id(patient: Patient, engine: Engine) -> None:
    """MariaDB allows no CHECK on such an id, and remembers it after the row is gone."""
    execute(engine, "INSERT INTO jobs (id, queue, task) VALUES (9223372036854775807, 'q', 't')")
    remedy = str(patient.finds("tables", TO_DO).remedy)
    with pytest.raises(sqlq.EnqueueError, match="AUTO_INCREMENT = 1"):
        patient.enqueue()
    for statement in remedy.split(", then "):
        execute(engine, statement)
    patient.enqueue()
    patient.finds("tables", OK)
    other = "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
    execute(engine, "ALTER TABLE sqlq_edges ENGINE = MyISAM")
    execute(engine, f"ALTER TABLE sqlq_limits CONVERT TO {other}")
    execute(engine, "ALTER TABLE jobs ALTER INDEX jobs_flow IGNORED")
    tables = [(each.verdict, each.remedy) for each in patient.examine() if each.check == "tables"]
    assert tables == [
        (TO_DO, "ALTER TABLE sqlq_edges ENGINE = InnoDB"),
        (TO_DO, "ALTER TABLE sqlq_limits CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"),
    ]
    patient.finds("indexes", TO_DO, "the index jobs_flow is INVALID")


@needs("mariadb")
def test_an_account_that_may_only_look_sees_the_queue(database_url: str, engine: Engine) -> None:
    account = f"poor_{uuid4().hex[:12]}"
    execute(engine, f"CREATE USER {account}@'%' IDENTIFIED BY '{account}'")
    execute(engine, f"GRANT SELECT ON {engine.url.database}.* TO {account}@'%'")
    try:
        with closing(sqlq.App(make_url(database_url).set(username=account, password=account))) as app:
            assert app.queues._vitals()[1].oldest_transaction_seconds is None
            found = [each for each in examine(app.database) if each.said.startswith("could not look")]
        remedy = "GRANT PROCESS ON *.* to the account in the URL"
        assert [(each.check, each.remedy) for each in found] == [("transactions", remedy)]
    finally:
        execute(engine, f"DROP USER {account}@'%'")


PRAGMAS = {"synchronous = OFF": TO_DO, "synchronous = NORMAL": CHECK, "synchronous = EXTRA": OK}


@needs("file")
@pytest.mark.parametrize(("pragma", "verdict"), [*PRAGMAS.items(), ("journal_mode = DELETE", TO_DO)])
def test_the_doctor_checks_the_settings_of_sqlite(patient: Patient, pragma: str, verdict: Verdict) -> None:
    @event.listens_for(patient.app.database.engine, "connect")
    def careless(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.execute(f"PRAGMA {pragma}").close()

    patient.finds(re.split("[ _]", pragma)[0], verdict)


@needs("file")
def test_the_doctor_finds_a_large_wal_an_nfs_and_damage(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LARGE_LOG_BYTES", 1)
    monkeypatch.setattr(sqlite, "filesystem", lambda file, mounts: "nfs4")
    patient.enqueue()
    patient.finds("journal", CHECK)
    patient.finds("file", TO_DO, "nfs4")
    patient.app.enqueue_many([patient.tasks["send"].new().set(queue=f"queue {i:0200}") for i in range(300)])
    with patient.app.database.engine.connect() as conn:
        conn.exec_driver_sql("ROLLBACK")
        conn.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
        place = "SELECT i.rootpage, s.page_size FROM sqlite_master i, pragma_page_size s WHERE name = :of"
        (page, size) = conn.execute(text(place), {"of": "jobs_claim"}).one()
    patient.app.close()
    with Path(str(patient.app.database.engine.url.database)).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    patient.finds("integrity", TO_DO, "the file is damaged")
    monkeypatch.setattr(sqlite, "CHECKED_BYTES", 1)
    patient.finds("integrity", OK)  # a large file is not read


def test_the_filesystem_of_a_file() -> None:
    mounts = """/dev/sda1 / ext4 rw 0 0
/dev/sda2 /srv xfs rw 0 0
host:/shop /srv/shop nfs4 rw,vers=4.2 0 0
//host/share /srv/two\\040words cifs rw 0 0
/dev/sda3 /over ext4 rw 0 0
me@host: /over fuse.sshfs rw 0 0
odd
"""
    files = {"/x": "ext4", "/srv/shop": "nfs4", "/srv/shopping": "xfs", "/srv/two words": "cifs"}
    for folder, kind in {**files, "/over": "fuse.sshfs"}.items():
        assert filesystem(Path(folder, "jobs.db"), mounts) == kind
        assert filesystem(Path(folder, "jobs.db"), "") is None


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with pair_of_servers() as pair:
        yield pair


def tell(pair: Pair, *statements: str) -> None:
    with psycopg.connect(dsn(pair.primary.url(pair.database)), autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement.encode())


def test_the_doctor_reports_whether_commits_wait_for_a_standby(servers: Pair) -> None:
    primary, standby = (server.url(servers.database) for server in (servers.primary, servers.standby))

    def said() -> tuple[Verdict, str]:
        found = about("standbys", primary)
        return found.verdict, found.said

    lost = "a failover loses the jobs acknowledged in its last moments"
    assert said() == (CHECK, f"1 standby follows, and commits wait for none: {lost}")
    tell(servers, "CREATE ROLE poor LOGIN")
    found = about("standbys", make_url(primary).set(username="poor"))
    assert found.remedy == "GRANT pg_read_all_stats to the role in the URL"
    try:
        servers.standby.configure("synchronous_standby_names = '*'")
        wait_until(lambda: said()[0] is OK, what="the standby being synchronous")
        assert said()[1] == "commits wait for a standby (synchronous_standby_names is *)"
        servers.standby.configure("synchronous_standby_names = 'elsewhere'")
        wait_until(lambda: said()[0] is TO_DO, what="the standby being none of these")
        assert "a standby that is away (synchronous_standby_names is elsewhere)" in said()[1]
        assert about("standbys", standby).verdict is OK, "it is the primary that knows"
    finally:
        servers.standby.configure("synchronous_standby_names = ''")


def test_the_server_that_answers_and_commits_that_wait_for_less_are_named(
    servers: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = about("primary", servers.standby.list_url(servers.database, first=True))
    assert (found.verdict, found.said) == (OK, f"the server 127.0.0.1:{servers.primary.port} takes writes")
    found = about("primary", servers.standby.url(servers.database))
    assert found.verdict is TO_DO
    assert found.said.startswith(f"the server 127.0.0.1:{servers.standby.port} is a standby")
    monkeypatch.setitem(postgresql.DURABILITY, "fsync", {})  # which is off, and hides every other finding
    tell(servers, "CREATE ROLE weak")
    name = servers.database
    for whose, said in (
        ("ROLE weak", "for the role weak: "),
        (f"ROLE weak IN DATABASE {name}", f"for the role weak in the database {name}: "),
        (f"DATABASE {name}", "synchronous_commit is remote_write: "),
    ):
        tell(servers, f"ALTER {whose} SET synchronous_commit = remote_write")
        found = about("durability", servers.primary.url(servers.database))
        assert (found.verdict, said in found.said) == (CHECK, True)
        assert "set synchronous_commit = on" in str(found.remedy)
        tell(servers, f"ALTER {whose} RESET synchronous_commit")


NAMES = {
    "postgresql": ("size", "tables", "connections", "oldest transaction"),
    "mariadb": ("size", "tables", "connections", "oldest transaction", "history list"),
    "sqlite": ("file", "size", "journal mode", "WAL file"),
}


def reading(found: Storage, name: str) -> Reading:
    (each,) = (each for each in found.readings if each.name == name)
    return each


def test_each_database_is_read_in_full(app: sqlq.App, database_url: str) -> None:
    task = app.task(name="send")(lambda n: None)
    app.enqueue_many([task.new(i) for i in range(50)])
    found, kind = storage(app.database), app.database.dialect.name
    assert found.database.startswith(app.database.dialect.title)
    assert tuple(each.name for each in found.readings) == NAMES[kind]
    assert not [each for each in found.readings if each.value.startswith("could not look")]
    assert all(each.meaning for each in found.readings)
    assert (reading(found, "size").number or 0) > 10_000
    sizes: Mapping[str, int] = {}
    if kind != "sqlite":
        (jobs,) = (table for table in found.tables if table.name == "jobs")
        assert jobs.bytes > 0
        sizes = jobs.largest_indexes or {}
        assert [*sizes.values()] == sorted(sizes.values(), reverse=True)
        assert len(sizes) == (3 if kind == "postgresql" else 0)
        assert 0 < jobs.index_bytes >= sum(sizes.values())
        assert {"finished_jobs", "failed_jobs", "sqlq_workers"} <= {table.name for table in found.tables}
    outputs = []
    for options in ([], ["--json"]):
        context, words = Context(), ["-d", database_url, "doctor", "--sizes", *options]
        done = CliRunner(env={"COLUMNS": "300"}).invoke(command, words, obj=context)
        context.app().close()
        assert done.exit_code == 0, done.output
        outputs.append(done.output)
    assert app.database.dialect.title in outputs[0]
    assert {name for name in {*NAMES[kind], *sizes} if name not in outputs[0]} == set()
    assert [each["name"] for each in json.loads(outputs[1])["readings"]] == list(NAMES[kind])


@needs("postgresql")
def test_a_reading_that_is_slow_ends(app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_health, "STATEMENT_TIMEOUT_MS", 100)
    assert app.database.schema == "public"
    with engine.begin() as conn:
        conn.execute(text("LOCK TABLE finished_jobs IN ACCESS EXCLUSIVE MODE"))
        pid = conn.execute(text("SELECT pg_backend_pid() /* mine */")).scalar()
        found = storage(app.database)
    oldest = reading(found, "oldest transaction")
    assert f"{pid} " in oldest.value
    assert oldest.query == "SELECT pg_backend_pid() /* mine */"
    assert "statement timeout" in reading(found, "tables").value
    assert found.tables == ()
    assert "iB" in reading(found, "size").value
