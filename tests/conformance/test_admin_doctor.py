"""The findings of the doctor: each trouble it knows, made on purpose, and a healthy database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

import sqlq
from sqlq.admin.doctor import finding, postgresql, queue, sqlite
from sqlq.admin.doctor.doctor import by_verdict, examine
from sqlq.admin.doctor.finding import Case, Finding, Verdict, check, ok, to_do
from sqlq.admin.doctor.sqlite import filesystem
from sqlq.config.durations import written
from sqlq.database.mariadb import health as mariadb_health
from sqlq.database.postgresql import health
from sqlq.database.values import Rows
from sqlq.model.outcome import ErrorText, Failed, Finished, Released, Settlement
from sqlq.store import health as queue_health
from sqlq.store import rights
from sqlq.store.jobs import settle as settling
from sqlq.store.workers import workers
from tests.kit import claim_on, for_each, needs, received, span
from tests.kit.command import other_distribution

pytestmark = pytest.mark.each_database


class Patient:
    """An App, a task, and the findings of the doctor."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.task = app.task(name="send")(lambda: None)
        self.kind = app.database.dialect.name

    def examine(self) -> list[Finding]:
        return examine(self.app.database)

    def about(self, check: str) -> Finding:
        (found,) = (finding for finding in self.examine() if finding.check == check)
        return found

    def finds(self, check: str, verdict: Verdict, *words: str) -> None:
        found = self.about(check)
        assert found.verdict is verdict
        for each in words:
            assert each in f"{found.said} {found.remedy}"

    def enqueue(self, queue: str = "mail") -> int:
        return self.app.enqueue(self.task.new().set(queue=queue)).id

    def claim(self, queue: str = "mail") -> Any:
        with self.app.database.begin() as conn:
            (job,) = claim_on(conn, [queue], limit=1, owner="w")
        return job

    def settle(self, job: Any, outcome: Any) -> None:
        with self.app.database.begin() as conn:
            assert settling.settle(conn, [Settlement(job.id, job.lease_token, job.attempts, outcome)])

    def serve(self, names: Sequence[str] | None = None, **columns: str) -> None:
        row: dict[str, Any] = {"host": "here", "pid": 1, "version": sqlq.__version__, "concurrency": 1}
        with self.app.database.begin() as conn:
            workers.register(conn, id=str(uuid4()), queues=names, **{**row, **columns})

    def set_back(self, column: str, hours: int = 1) -> None:
        """Move a time of all jobs into the past."""
        with self.app.database.begin() as conn:
            earlier = f"- {span(conn, hours * 3_600)}"
            conn.execute(text(f"UPDATE jobs SET {column} = coalesce({column}, created_at) {earlier}"))


def answer(
    monkeypatch: pytest.MonkeyPatch, query: Callable[..., Any], value: Any = None, **by_name: Any
) -> None:
    """Let one query of the doctor return a value, or raise it; or return the values of these settings."""
    ask = Case.query

    def answered(case: Case, asked: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if asked is not query or (by_name and args[0] not in by_name):
            return ask(case, asked, *args, **options)
        if isinstance(value, Exception):
            raise value
        return by_name[args[0]] if by_name else value

    monkeypatch.setattr(Case, "query", answered)


@pytest.fixture
def patient(app: sqlq.App) -> Patient:
    return Patient(app)


def test_the_doctor_finds_every_check_ok_in_a_healthy_database(patient: Patient) -> None:
    patient.serve()
    patient.enqueue()
    patient.claim()
    patient.enqueue()
    found = patient.examine()
    checks = {"postgresql": 20, "mariadb": 20, "sqlite": 18}[patient.kind]
    assert len(found) == len({finding.check for finding in found}) == checks
    # the tests' own servers save the disk that trouble
    amiss = [
        finding for finding in found if finding.verdict is not Verdict.OK and finding.check != "durability"
    ]
    assert amiss == []
    assert all(finding.remedy for finding in found if finding.verdict is Verdict.TO_DO)


@needs("cheap")
def test_the_doctor_finds_another_distribution_of_the_same_name(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    other_distribution(tmp_path, "sqlq_jobs")
    assert "package" not in {finding.check for finding in patient.examine()}
    other_distribution(tmp_path)
    patient.finds(
        "package", Verdict.TO_DO, "sqlq 1.6.0 is another project's, and overwrites files of sqlq-jobs"
    )


# -- the queue -----------------------------------------------------------------------------------------------


def test_the_doctor_finds_due_jobs_without_a_worker(patient: Patient) -> None:
    assert patient.about("workers").verdict is Verdict.CHECK
    patient.enqueue()
    patient.finds(
        "workers",
        Verdict.TO_DO,
        "no worker is alive, and 1 job is due",
        "start one with sqlq work -a module:attribute",
    )
    patient.app.queues.pause("mail")
    assert patient.about("workers").verdict is Verdict.CHECK, "nothing is to be run from a paused queue"


def test_the_doctor_finds_a_queue_without_a_worker(patient: Patient) -> None:
    patient.serve(["other"])
    patient.enqueue()
    patient.finds("queues", Verdict.TO_DO, "no worker serves mail (1 due)", "-q mail")
    patient.serve()
    assert patient.about("queues").verdict is Verdict.OK


def test_the_doctor_finds_a_served_queue_that_waits_too_long(patient: Patient) -> None:
    patient.serve()
    patient.enqueue("other")
    patient.enqueue()
    with patient.app.database.begin() as conn:
        conn.execute(text("UPDATE jobs SET priority = 1 WHERE queue = 'other'"))
    patient.set_back("available_at")
    patient.finds("queues", Verdict.CHECK, "due for 1 h")


def test_the_doctor_finds_jobs_in_a_paused_queue(patient: Patient) -> None:
    patient.serve()
    patient.enqueue()
    patient.app.queues.pause("mail")
    patient.app.queues.pause("empty")
    rows = [row for row in patient.examine() if row.check == "paused"]
    since = {name: written(pause.since) for name, pause in patient.app.queues.pauses().named.items()}
    assert {row.verdict for row in rows} == {Verdict.CHECK}
    assert [(row.said, row.remedy) for row in rows] == [
        (f"empty is paused, since {since['empty']}", "sqlq queues resume empty"),
        (f"mail is paused, since {since['mail']}, and 1 job waits in it", "sqlq queues resume mail"),
    ]


def test_the_doctor_finds_paused_workers(patient: Patient) -> None:
    patient.serve()
    patient.serve(state="paused")
    patient.finds("paused", Verdict.CHECK, "1 of 2 workers are paused", "sqlq workers resume --all")


@for_each(("seconds", "said"), [(7_204, "is 2 h ahead of"), (-60, "is 60 s behind"), (4, None), (-4, None)])
def test_the_doctor_finds_a_host_whose_clock_differs(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, seconds: int, said: str | None
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls.fromtimestamp(time.time() + seconds, tz)

    with patient.app.database.begin() as conn:
        conn.execute(text("DELETE FROM sqlq_workers"))
    monkeypatch.setattr(workers, "datetime", Clock)
    patient.serve()
    (worker,) = patient.app.workers.list()
    with patient.app.database.begin() as conn:
        conn.execute(text("UPDATE sqlq_workers SET clock_at = NULL"))
        assert workers.seen(conn, worker.id)
    found = patient.about("clocks")
    if said is None:
        assert found.verdict is Verdict.OK
    else:
        assert found.verdict is Verdict.CHECK
        assert found.said == f"the clock of here {said} the database's: its logs have other times"
        with patient.app.database.begin() as conn:
            monkeypatch.undo()
            workers.stand_in(conn, [worker.id], lease_ms=30_000)
        assert patient.about("clocks").verdict is Verdict.OK, "the supervisor's heartbeat writes it, too"


def test_the_doctor_finds_hosts_that_cannot_load_the_app(patient: Patient) -> None:
    for host in "abcde":
        patient.serve(host=host)
    error = "the App's module 'shop' cannot be imported: ModuleNotFoundError: No module named 'nope'"
    rows = patient.app.workers.list()
    with patient.app.database.begin() as conn:
        workers.write_start_error(
            conn, [row.id for row in rows if row.host in "ace"], f"{error}; see all of it with: python -c …"
        )
    found = patient.about("imports")
    assert (found.verdict, found.said) == (Verdict.TO_DO, f"3 of 5 hosts cannot start a new worker: {error}")
    assert found.remedy == "mend it on a, c, e, then sqlq workers restart --all"
    with patient.app.database.begin() as conn:
        workers.write_start_error(conn, [row.id for row in rows], None)
    assert patient.about("imports").verdict is Verdict.OK


def test_the_worst_verdicts_come_first_and_keep_their_order() -> None:
    rows = [ok("fine", check="workers"), check("old", check="queues"), to_do("off", check="durability")]
    rows += [to_do("late", check="standbys"), check("failed", check="failed")]
    assert [row.check for row in by_verdict(rows)] == [
        *("durability", "standbys"),
        *("queues", "failed"),
        "workers",
    ]


def test_checks_of_the_queue_are_ordered_by_their_harm() -> None:
    """No worker beats an overdue schedule, which beats a queue that nobody serves."""
    names = [each.name for each in queue.CHECKS]
    assert names[:3] == ["workers", "schedules", "queues"]
    assert names.index("queues") < names.index("failed")


def test_findings_of_the_queue_come_before_those_of_the_server(patient: Patient) -> None:
    rows = [row.check for row in examine(patient.app.database) if row.verdict is Verdict.OK]
    assert rows[:2] == ["connection", "migrations"]
    assert rows.index("schedules") < rows.index("file" if "file" in rows else "transactions")


def test_the_doctor_finds_expired_leases(patient: Patient) -> None:
    ids = [patient.enqueue() for _ in range(7)]
    for _ in ids:
        patient.claim()
    assert patient.about("leases").verdict is Verdict.OK
    patient.set_back("lease_expires_at")
    found = patient.about("leases")
    assert found.verdict is Verdict.TO_DO
    assert "7 running jobs have lost their workers, the first 59 min" in found.said
    assert found.said.endswith(", ".join(map(str, ids)))
    assert "start a worker" in str(found.remedy)
    patient.serve()
    assert "logs" in str(patient.about("leases").remedy)


def test_the_doctor_finds_unknown_tasks(patient: Patient) -> None:
    patient.enqueue()
    patient.settle(patient.claim(), Released(0, unknown_task=True))
    patient.set_back("unknown_since", hours=4)
    found = patient.about("tasks")
    assert found.verdict is Verdict.TO_DO
    assert (
        found.said
        == "no worker takes jobs of the task send: 1 job was put back, first 4 h ago, and will fail in "
        "20 h"
    )


def test_the_doctor_names_workers_of_two_apps_that_share_a_queue(patient: Patient) -> None:
    patient.serve()
    patient.serve(["other"])
    patient.serve(["mail", "other"])
    released, completed = (patient.enqueue(), patient.claim()), (patient.enqueue(), patient.claim())
    patient.settle(released[1], Released(0, unknown_task=True))
    patient.set_back("unknown_since")
    assert patient.about("tasks").verdict is Verdict.TO_DO
    patient.settle(completed[1], Finished(None))
    found = patient.about("tasks")
    assert found.verdict is Verdict.CHECK
    assert found.said == (
        "a worker puts back jobs of the task send, which another one runs: their Apps share the queue mail "
        "(served by here pid 1, here pid 1)"
    )
    assert "App(service=…)" in str(found.remedy)


def test_the_doctor_finds_a_task_that_no_worker_knows_any_more(patient: Patient) -> None:
    patient.enqueue()
    patient.settle(patient.claim(), Finished(None))
    with patient.app.database.begin() as conn:
        conn.execute(text(f"UPDATE finished_jobs SET finished_at = finished_at - {span(conn, 3_600)}"))
    patient.enqueue()
    patient.settle(patient.claim(), Released(0, unknown_task=True))
    assert patient.about("tasks").verdict is Verdict.TO_DO


def test_the_doctor_finds_failed_jobs(patient: Patient) -> None:
    patient.enqueue()
    patient.settle(patient.claim(), Failed("error", ErrorText("ValueError", "no")))
    patient.finds("failed", Verdict.CHECK, "1 job has failed for good")


def test_the_doctor_finds_a_missing_index(patient: Patient, engine: Engine) -> None:
    with engine.begin() as conn:
        on = " ON jobs" if patient.kind == "mariadb" else ""
        conn.execute(text(f"DROP INDEX jobs_claim{on}"))
    patient.finds("indexes", Verdict.TO_DO, "these indexes are missing: jobs_claim; claims read whole tables")


@pytest.mark.parametrize("revision", [None, "0000", "9999"])
def test_tables_at_another_revision_end_the_examination(
    patient: Patient, engine: Engine, revision: str | None
) -> None:
    with engine.begin() as conn:
        conn.execute(
            text("DROP TABLE sqlq_version")
            if revision is None
            else text(f"UPDATE sqlq_version SET version_num = '{revision}'")
        )
    rows = patient.examine()
    assert (rows[0].check, rows[0].verdict) == ("migrations", Verdict.TO_DO)
    assert "migrate" in rows[0].said
    assert "workers" not in {row.check for row in rows}, "the tables are not looked into"


# -- PostgreSQL ----------------------------------------------------------------------------------------------


@needs("sessions")
def test_the_doctor_finds_transactions_that_hold_back_vacuum(
    patient: Patient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as conn:
        conn.execute(text("SET application_name = 'report'"))
        pid = conn.scalar(text("SELECT pg_backend_pid() FROM pg_current_xact_id()"))
        assert patient.about("transactions").verdict is Verdict.OK, "it is young"
        monkeypatch.setattr(finding, "OLD_TRANSACTION_S", 0.0)
        found = patient.about("transactions")
        assert found.verdict is Verdict.CHECK
        assert f"session {pid} (report, idle in transaction) has had a transaction open" in found.said
        assert f"pg_terminate_backend({pid})" in str(found.remedy)
        monkeypatch.setattr(finding, "VERY_OLD_TRANSACTION_S", 0.0)
        assert patient.about("transactions").verdict is Verdict.TO_DO


@needs("postgresql")
def test_the_doctor_finds_an_invalid_index(patient: Patient, engine: Engine) -> None:
    patient.enqueue()
    patient.enqueue()
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn,
        pytest.raises(IntegrityError),
    ):
        conn.exec_driver_sql("CREATE UNIQUE INDEX CONCURRENTLY jobs_once ON jobs (task)")
    patient.finds("indexes", Verdict.TO_DO, "REINDEX INDEX CONCURRENTLY jobs_once")


@needs("postgresql")
@pytest.mark.parametrize(
    ("options", "check", "verdict", "words"),
    [
        ("-c synchronous_commit=off", "durability", Verdict.CHECK, "synchronous_commit is off"),
        ("-c default_transaction_read_only=on", "primary", Verdict.TO_DO, "read-only"),
    ],
)
def test_the_doctor_checks_the_settings_of_postgresql(
    database_url: str, options: str, check: str, verdict: Verdict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, health.setting, fsync="on")
    app = sqlq.App(make_url(database_url).update_query_dict({"options": options}))
    (found,) = (finding for finding in examine(app.database) if finding.check == check)
    assert found.verdict is verdict
    assert words in found.said
    app.close()


@needs("postgresql")
def test_the_doctor_finds_fsync_off(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, health.setting, fsync="off")
    patient.finds("durability", Verdict.TO_DO, "lose acknowledged jobs")


@needs("postgresql")
def test_the_doctor_finds_dead_rows(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, health.dead_rows, Rows(10, 60_000, None))
    patient.finds("dead rows", Verdict.CHECK, "the table jobs has about 10 live and 60,000 dead rows")


@needs("listen")
def test_the_doctor_finds_a_listen_that_receives_nothing(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a pooler that gives each statement another session: the LISTEN is gone."""
    monkeypatch.setattr(postgresql, "LISTEN_SECONDS", 0.1)

    def swallow(
        conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> tuple[str, Any]:
        return ("SELECT 1" if statement.startswith("LISTEN") else statement), parameters

    event.listen(Engine, "before_cursor_execute", swallow, retval=True)
    try:
        found = patient.about("listen")
    finally:
        event.remove(Engine, "before_cursor_execute", swallow)
    assert found.verdict is Verdict.CHECK
    assert "PgBouncer in transaction mode" in found.said
    assert "SQLQ_LISTEN_URL" in str(found.remedy)


@needs("listen")
def test_the_doctor_checks_listen_at_the_listen_url(database_url: str) -> None:
    """A channel of another database receives nothing of this one."""
    elsewhere = make_url(database_url).set(database="postgres")
    with closing(sqlq.App(database_url, listen_url=elsewhere)) as app:
        app.database.require_tables()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgresql, "LISTEN_SECONDS", 0.1)
            (found,) = (each for each in examine(app.database) if each.check == "listen")
    assert found.verdict is Verdict.CHECK
    with closing(sqlq.App(database_url, listen_url=database_url)) as app:
        (found,) = (each for each in examine(app.database) if each.check == "listen")
    assert found.verdict is Verdict.OK


@needs("postgresql")
def test_a_pool_of_one_connection_is_enough(database_url: str) -> None:
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=1)
    with closing(sqlq.App(engine=engine)) as app:
        found = examine(app.database)
    assert not [finding for finding in found if finding.said.startswith("could not look: ")]
    assert [finding.verdict for finding in found if finding.check == "listen"] == [Verdict.OK]


def test_the_doctor_reports_a_pool_without_a_free_connection(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(
        monkeypatch, queue_health.indexes, PoolTimeoutError("QueuePool limit of size 1 overflow 0 reached")
    )
    patient.finds("indexes", Verdict.CHECK, "could not look: QueuePool limit of size 1 overflow 0 reached")


def test_the_queue_is_counted_once(patient: Patient) -> None:
    patient.enqueue()
    with received(patient.app.database.engine) as got:
        patient.examine()
    asked = [statement for statement, _ in got]
    of_failures = [one for one in asked if "failed_jobs" in one and "sqlq_flows" not in one]
    assert len(of_failures) == 1, "the line of flows asks for failed steps alone"
    assert not [statement for statement in asked if "queue_stats" in statement], "the view counts every job"


def test_the_doctor_reports_an_incomplete_count(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_health, "COUNT_LIMIT", 3)
    patient.serve(["other"])
    for _ in range(4):
        patient.enqueue()
    assert patient.about("queues").said == "no worker serves mail (3+ due)"
    patient.app.queues.pause("mail")
    assert patient.about("paused").said.endswith(", and 3+ jobs wait in it")


@needs("listen")
def test_the_doctor_finds_a_driver_that_cannot_listen(database_url: str) -> None:
    app = sqlq.App(make_url(database_url).set(drivername="postgresql+psycopg2"))
    (found,) = (finding for finding in examine(app.database) if finding.check == "listen")
    assert found.verdict is Verdict.CHECK
    app.close()


@pytest.fixture
def poor(database_url: str) -> Iterator[Callable[[str], sqlq.App]]:
    """Makes Apps of a role with no rights but those given."""
    owner = create_engine(database_url, poolclass=NullPool)
    role = f"poor_{uuid4().hex[:12]}"
    apps: list[sqlq.App] = []

    def make(grants: str) -> sqlq.App:
        with owner.begin() as conn:
            conn.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
            if grants:
                conn.exec_driver_sql(f"{grants} TO {role}")
        apps.append(sqlq.App(make_url(database_url).set(username=role, password=role)))
        return apps[0]

    yield make
    for app in apps:
        app.close()
    with owner.begin() as conn:
        conn.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


@needs("roles")
def test_the_doctor_reports_tables_that_its_role_may_not_read(
    poor: Callable[[str], sqlq.App], engine: Engine
) -> None:
    with engine.connect():  # a session of another role
        app = poor("GRANT SELECT ON sqlq_version")
        found = examine(app.database)
    unseen = {
        finding.check: finding
        for finding in found
        if finding.said.startswith("could not look: permission denied")
    }
    assert unseen.keys() == {
        *("workers", "stuck", "queues", "paused", "leases", "tasks"),
        *("schedules", "limits", "flows", "failed", "imports", "clocks"),
    }
    assert {finding.verdict for finding in unseen.values()} == {Verdict.CHECK}
    (remedy,) = {finding.remedy for finding in unseen.values()}
    role = str(app.database.engine.url.username)
    assert f"sqlq grants {role} --as reader` prints" in str(remedy)
    with engine.begin() as conn:
        rights.apply(conn, "reader", role, "public")
    again = examine(app.database)
    assert not [finding for finding in again if finding.said.startswith("could not look: ")]
    assert {finding.check for finding in found if finding.verdict is Verdict.OK} > {
        "connection",
        "migrations",
        "listen",
        "indexes",
    }


@needs("roles")
def test_the_doctor_reports_a_role_without_rights(poor: Callable[[str], sqlq.App], engine: Engine) -> None:
    with engine.connect() as conn:
        conn.execute(text("SELECT 1"))
        found = examine(poor("").database)
    first = found[0]
    assert (first.verdict, first.check) == (Verdict.TO_DO, "migrations")
    assert "may not read" in first.said
    assert any("sessions of other roles" in finding.said for finding in found)


# -- MariaDB -------------------------------------------------------------------------------------------------


@needs("mariadb")
@pytest.mark.parametrize(
    ("name", "value", "check", "verdict", "words"),
    [
        ("read_only", 1, "primary", Verdict.TO_DO, "as a replica is: nothing can be enqueued"),
        ("binlog_format", "STATEMENT", "binlog", Verdict.TO_DO, "READ COMMITTED, and cannot write then"),
        ("innodb_doublewrite", 0, "durability", Verdict.TO_DO, "can damage tables"),
        ("innodb_flush_log_at_trx_commit", 2, "durability", Verdict.CHECK, "can lose the jobs"),
    ],
)
def test_the_doctor_checks_the_settings_of_mariadb(
    patient: Patient, name: str, value: Any, check: str, verdict: Verdict, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sound = {"log_bin": 1, "innodb_doublewrite": 1, "innodb_flush_log_at_trx_commit": 1}
    answer(monkeypatch, mariadb_health.setting, **sound | {name: value})
    patient.finds(check, verdict, words)


@needs("mariadb")
def test_the_doctor_and_an_enqueue_name_a_row_that_has_the_largest_id(patient: Patient) -> None:
    """MariaDB allows no CHECK on such an id, and remembers it after the row is gone."""

    @patient.app.task(name="shop.late")
    def late() -> None: ...

    with patient.app.database.begin() as conn:
        conn.execute(text("INSERT INTO jobs (id, queue, task) VALUES (9223372036854775807, 'q', 't')"))
    assert patient.about("tables").verdict is Verdict.TO_DO
    with pytest.raises(sqlq.EnqueueError, match="AUTO_INCREMENT = 1"):
        patient.app.enqueue(late.new())
    remedy = patient.about("tables").remedy
    assert remedy is not None
    with patient.app.database.begin() as conn:
        for command in remedy.split(", then "):
            conn.execute(text(command))
    patient.app.enqueue(late.new())
    assert patient.about("tables").verdict is Verdict.OK


@needs("mariadb")
def test_the_doctor_finds_transactions_that_hold_back_the_purge(
    patient: Patient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as conn:
        number = conn.scalar(text("SELECT CONNECTION_ID()"))
        conn.execute(text("SET time_zone = '+09:00'"))
        conn.execute(text("SELECT * FROM jobs"))
        assert patient.about("transactions").verdict is Verdict.OK, "it is young"
        monkeypatch.setattr(finding, "OLD_TRANSACTION_S", 0.0)
        said = [found for found in patient.examine() if f"session {number} (" in found.said]
        assert [found.verdict for found in said] == [Verdict.CHECK]
        assert f"KILL {number}" in str(said[0].remedy)
        assert patient.app.queues._vitals()[1].oldest_transaction_seconds is not None
        monkeypatch.setattr(finding, "VERY_OLD_TRANSACTION_S", 0.0)
        said = [found for found in patient.examine() if f"session {number} (" in found.said]
        assert [found.verdict for found in said] == [Verdict.TO_DO]


@needs("mariadb")
def test_the_doctor_finds_unpurged_rows(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, mariadb_health.unpurged_transactions, 123_456)
    patient.finds("purge", Verdict.CHECK, "123,456 transactions are not purged yet")


@needs("mariadb")
def test_the_doctor_finds_tables_of_another_engine_or_collation(patient: Patient, engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(text("ALTER TABLE sqlq_edges ENGINE = MyISAM"))
        other = "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        conn.execute(text(f"ALTER TABLE sqlq_limits CONVERT TO {other}"))
        conn.execute(text("ALTER TABLE jobs ALTER INDEX jobs_flow IGNORED"))
    found = patient.examine()
    tables = [(each.verdict, each.remedy) for each in found if each.check == "tables"]
    assert tables == [
        (Verdict.TO_DO, "ALTER TABLE sqlq_edges ENGINE = InnoDB"),
        (Verdict.TO_DO, "ALTER TABLE sqlq_limits CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"),
    ]
    (ignored,) = (each for each in found if each.check == "indexes")
    assert ignored.said.startswith("the index jobs_flow is INVALID")


@needs("mariadb")
def test_an_account_that_may_only_look_sees_the_queue(database_url: str) -> None:
    account, owner = f"poor_{uuid4().hex[:12]}", create_engine(database_url, poolclass=NullPool)
    name = make_url(database_url).database
    with owner.connect() as conn:
        conn.execute(text(f"CREATE USER {account}@'%' IDENTIFIED BY '{account}'"))
        conn.execute(text(f"GRANT SELECT ON {name}.* TO {account}@'%'"))
    try:
        with closing(sqlq.App(make_url(database_url).set(username=account, password=account))) as app:
            found = examine(app.database)
            assert app.queues._vitals()[1].oldest_transaction_seconds is None
        (unseen,) = (each for each in found if each.said.startswith("could not look"))
        assert (unseen.check, unseen.remedy) == (
            "transactions",
            "GRANT PROCESS ON *.* to the account in the URL",
        )
    finally:
        with owner.connect() as conn:
            conn.execute(text(f"DROP USER {account}@'%'"))


# -- SQLite --------------------------------------------------------------------------------------------------


@needs("file")
@pytest.mark.parametrize(
    ("level", "verdict"), [("OFF", Verdict.TO_DO), ("NORMAL", Verdict.CHECK), ("EXTRA", Verdict.OK)]
)
def test_the_doctor_checks_the_synchronous_setting_of_sqlite(
    patient: Patient, level: str, verdict: Verdict
) -> None:
    @event.listens_for(patient.app.database.engine, "connect")
    def careless(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.execute(f"PRAGMA synchronous = {level}").close()

    found = patient.about("synchronous")
    assert found.verdict is verdict


@needs("file")
def test_the_doctor_finds_a_file_outside_wal_mode(patient: Patient) -> None:
    @event.listens_for(patient.app.database.engine, "connect")
    def another(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.execute("PRAGMA journal_mode = DELETE").close()

    assert patient.about("journal").verdict is Verdict.TO_DO


@needs("file")
def test_the_doctor_finds_a_large_wal_file(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LARGE_LOG_BYTES", 1)
    patient.enqueue()
    assert patient.about("journal").verdict is Verdict.CHECK


@needs("file")
def test_the_doctor_finds_a_file_on_a_network_filesystem(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "filesystem", lambda file, mounts: "nfs4")
    patient.finds("file", Verdict.TO_DO, "nfs4")


@for_each(
    ("file", "kind"),
    [
        ("/x/jobs.db", "ext4"),
        ("/srv/shop/jobs.db", "nfs4"),
        ("/srv/shopping/jobs.db", "xfs"),
        ("/srv/two words/jobs.db", "cifs"),
        ("/over/jobs.db", "fuse.sshfs"),
    ],
)
def test_the_filesystem_of_a_file(file: str, kind: str) -> None:
    mounts = """/dev/sda1 / ext4 rw 0 0
/dev/sda2 /srv xfs rw 0 0
host:/shop /srv/shop nfs4 rw,vers=4.2 0 0
//host/share /srv/two\\040words cifs rw 0 0
/dev/sda3 /over ext4 rw 0 0
me@host: /over fuse.sshfs rw 0 0
odd
"""
    assert filesystem(Path(file), mounts) == kind
    assert filesystem(Path(file), "") is None


@needs("file")
def test_the_doctor_finds_a_damaged_file(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    with patient.app.database.begin() as conn:
        for i in range(300):
            conn.execute(
                text("INSERT INTO jobs (task, queue, payload) VALUES ('t', :queue, '{}')"),
                {"queue": f"queue {i:0200}"},
            )
    with patient.app.database.engine.connect() as conn:
        conn.exec_driver_sql("ROLLBACK")
        conn.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
        (page, size) = conn.exec_driver_sql(
            "SELECT i.rootpage, s.page_size FROM sqlite_master i, pragma_page_size s WHERE name = "
            "'jobs_claim'"
        ).one()
    patient.app.close()
    with Path(str(patient.app.database.engine.url.database)).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    patient.finds("integrity", Verdict.TO_DO, "the file is damaged")
    monkeypatch.setattr(sqlite, "CHECKED_BYTES", 1)
    assert patient.about("integrity").verdict is Verdict.OK, "a large file is not read"
