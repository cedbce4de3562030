"""Finished jobs in partitions by time: taken there while jobs end, made ahead, dropped behind."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

import sqlq
import sqlq.alembic
from sqlq.admin.doctor.doctor import Doctor
from sqlq.admin.doctor.finding import Finding
from sqlq.admin.storage import storage
from sqlq.database import migrate
from sqlq.database.postgresql import partitions
from sqlq.errors import ConfigurationError
from sqlq.store import rights
from sqlq.worker.maintain.services import PRUNE_SECONDS, Prune
from tests.kit import drain, execute
from tests.migrations.catalogue import catalogue, own_names, run_script

on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
on_nothing = pytest.mark.parametrize("empty_database_url", ["postgresql"], indirect=True)
DAY_MS = 86_400_000


@pytest.fixture
def history(app: sqlq.App) -> sqlq.App:
    """An App whose finished jobs are in daily partitions."""
    app.migrate(partition_finished="daily")
    return app


def parts(engine: Engine) -> list[str]:
    with engine.connect() as conn:
        return list(
            conn.scalars(
                text(
                    "SELECT inhrelid::regclass::text FROM pg_inherits "
                    "WHERE inhparent = 'finished_jobs'::regclass ORDER BY 1"
                )
            )
        )


def make_past(engine: Engine, days: int = 5) -> None:
    """Let the partitions begin some days ago, as if they had been made then."""
    execute(engine, "DROP TABLE finished_jobs_before")
    execute(
        engine,
        f"""DO $$
        DECLARE today timestamp := date_trunc('day', now() AT TIME ZONE 'UTC');
        BEGIN
            FOR n IN -3..{days} LOOP
                EXECUTE format('CREATE TABLE %I PARTITION OF finished_jobs FOR VALUES FROM (%L) TO (%L)',
                               'finished_jobs_' || to_char(today - n * interval '1 day', 'YYYYMMDD'),
                               (today - n * interval '1 day') AT TIME ZONE 'UTC',
                               (today - (n - 1) * interval '1 day') AT TIME ZONE 'UTC');
            END LOOP;
        END $$""",
    )


def finish(app: sqlq.App, engine: Engine, *, days_ago: int = 0, **options: object) -> int:
    """Run a job, as if so many days ago."""
    task = app.task(name=f"t{time.monotonic_ns()}")(lambda: None)
    job = app.enqueue(task.new().set(**options))  # type: ignore[arg-type]  # options of any kind
    drain(app)
    move_back(engine, job.id, days_ago)
    return job.id


def move_back(engine: Engine, id: int, days_ago: int) -> None:
    execute(
        engine,
        f"UPDATE finished_jobs SET finished_at = finished_at - interval '{days_ago} days' WHERE id = {id}",
    )


def prune(app: sqlq.App, older_ms: int | None = DAY_MS) -> None:
    """Do what maintenance does until nothing is left to do."""
    service = Prune(app.database, older_ms)
    service.run()  # which only waits, so that hosts do not prune together
    while service.run() < PRUNE_SECONDS / 10:
        pass


def ids(engine: Engine) -> list[int]:
    with engine.connect() as conn:
        return list(conn.scalars(text("SELECT id FROM finished_jobs ORDER BY id")))


def diagnosis(app: sqlq.App) -> list[Finding]:
    return [each for each in Doctor(app.database).examine() if each.check == "partitions"]


# ── There ───────────────────────────────────────────────────────────────────────────────────────────────────


@on_postgresql
def test_a_table_with_rows_becomes_the_first_partition(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="t")(lambda: 7)
    job, waiting = app.enqueue(task.new()), app.enqueue(task.new().set(delay="1h"))
    drain(app)
    execute(engine, "CREATE VIEW mine AS SELECT id, outcome FROM finished_jobs")
    execute(engine, "ALTER VIEW mine SET (security_barrier)")
    execute(engine, "CREATE INDEX mine_by_label ON finished_jobs (label)")
    execute(engine, "CREATE ROLE sqlq_looker")
    execute(engine, "GRANT SELECT ON finished_jobs TO sqlq_looker WITH GRANT OPTION")
    execute(engine, "GRANT UPDATE (result) ON finished_jobs TO sqlq_looker")
    file = execute(engine, "SELECT pg_relation_filenode('finished_jobs')")
    before = catalogue(engine)
    app.migrate(partition_finished="daily")
    after = catalogue(engine)
    assert execute(engine, "SELECT pg_relation_filenode('finished_jobs_before')") == file, "it is rewritten"
    assert [row for row in after["columns"] if row[0] in migrate.OWN_NAMES | {"mine"}] == before["columns"]
    assert after["views"] == before["views"]
    names = {row[1] for row in before["indexes"]} - {row[1] for row in after["indexes"]}
    assert names == set()
    assert execute(engine, "SELECT reloptions::text FROM pg_class WHERE relname = 'mine'")
    assert execute(
        engine, "SELECT has_table_privilege('sqlq_looker', 'finished_jobs', 'SELECT WITH GRANT OPTION')"
    )
    assert execute(engine, "SELECT has_column_privilege('sqlq_looker', 'finished_jobs', 'result', 'UPDATE')")
    execute(engine, "DROP OWNED BY sqlq_looker; DROP ROLE sqlq_looker")
    assert execute(engine, "SELECT outcome FROM mine") == "completed"
    assert (app.jobs.get(job.id).result, app.result(job.id)) == (7, 7)
    assert app.jobs.replay(ids=[job.id]).number == 1
    drain(app)
    assert {each.state for each in app.jobs.list()} == {"finished", "scheduled"}
    assert app.jobs.cancel(ids=[waiting.id])
    assert migrate.check(engine, None).standing == "up to date"
    assert [each.verdict for each in diagnosis(app)] == ["ok"]
    assert execute(engine, "SELECT count(*) FROM pg_constraint WHERE conname = 'finished_jobs_until'") == 0
    app.migrate(partition_finished="daily")
    app.migrate()
    assert catalogue(engine) == after


@on_postgresql
@on_nothing
def test_the_script_makes_the_same_tables(empty_database_url: str, database_url: str) -> None:
    with closing(sqlq.App(database_url)) as app:
        app.migrate(partition_finished="weekly")
        with_traffic = catalogue(app.database.engine)
    engine = create_engine(empty_database_url)
    run_script(engine, migrate.render_sql("postgresql", None, "weekly"))
    migrate.upgrade(engine, None)
    assert catalogue(engine) == with_traffic
    engine.dispose()


@on_nothing
def test_partitions_in_a_schema_of_their_own(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    with closing(sqlq.App(empty_database_url, schema="of_jobs")) as app:
        app.migrate(partition_finished="monthly")
        app.enqueue(app.task(name="t")(lambda: None).new())
        drain(app)
        prune(app)
        assert [each.verdict for each in diagnosis(app)] == ["ok"]
        assert app.jobs.list()[0].state == "finished"
        assert (
            sum(each.rows or 0 for each in storage(app.database).tables if each.name == "finished_jobs") <= 1
        )
    engine.dispose()


@on_postgresql
def test_partitioning_waits_for_a_transaction_without_blocking_jobs(app: sqlq.App, engine: Engine) -> None:
    finish(app, engine)
    task = app.task(name="t")(lambda: None)
    migrating = threading.Thread(target=lambda: app.migrate(partition_finished="daily"))
    took = []
    with engine.connect() as open_one:
        open_one.execute(text("SELECT count(*) FROM finished_jobs"))
        migrating.start()
        for _ in range(20):
            app.enqueue(task.new())
            began = time.monotonic()
            drain(app)
            took.append(time.monotonic() - began)
        assert migrating.is_alive()
        assert len(parts(engine)) == 0
    migrating.join(60)
    assert len(ids(engine)) == 21
    assert parts(engine)[:1] == ["finished_jobs_20261129"] or parts(engine)
    assert max(took) < 1.5, "a drain here takes some 50 ms, and a lock was waited for 50 ms at most"


@on_postgresql
def test_downgrade_drops_the_partitions(history: sqlq.App, engine: Engine) -> None:
    migrate.downgrade(engine, None, "base")
    assert own_names(engine) == set()
    assert execute(engine, "SELECT count(*) FROM pg_class WHERE relname LIKE 'finished%'") == 0


@on_postgresql
def test_partitioning_refuses_to_lose_a_publication_a_view_or_a_row(app: sqlq.App, engine: Engine) -> None:
    execute(engine, "CREATE MATERIALIZED VIEW kept AS SELECT id FROM finished_jobs")
    execute(engine, "CREATE PUBLICATION told FOR TABLE finished_jobs")
    with pytest.raises(ConfigurationError, match=r"cannot be partitioned: it would lose .*told, .*kept"):
        app.migrate(partition_finished="daily")
    assert parts(engine) == []
    execute(engine, "DROP PUBLICATION told")
    execute(engine, "DROP MATERIALIZED VIEW kept")
    execute(engine, "UPDATE finished_jobs SET finished_at = now()")
    job = finish(app, engine)
    execute(engine, f"UPDATE finished_jobs SET finished_at = '2100-01-01' WHERE id = {job}")
    with pytest.raises(ConfigurationError, match=r"finished_jobs_until.* is violated by some row"):
        app.migrate(partition_finished="daily")
    assert execute(engine, "SELECT count(*) FROM pg_constraint WHERE conname = 'finished_jobs_until'") == 0
    with pytest.raises(ConfigurationError, match="'hourly': it is daily, weekly, monthly, off"):
        app.migrate(partition_finished="hourly")


@on_postgresql
def test_the_check_of_a_migration_that_was_killed_is_dropped(app: sqlq.App, engine: Engine) -> None:
    """By maintenance, and by the next migration."""
    left = "ALTER TABLE finished_jobs ADD CONSTRAINT finished_jobs_until CHECK (finished_at < '2100-01-01')"
    execute(engine, left)
    (found,) = diagnosis(app)
    assert found.verdict == "to do"
    assert "public.finished_jobs refuses jobs" in found.said
    with migrate.transaction(engine, None):  # one that is under way
        prune(app)
        assert diagnosis(app) == [found]
    prune(app)
    assert diagnosis(app) == []
    execute(engine, left)
    app.migrate()
    assert diagnosis(app) == []


@on_postgresql
def test_another_owners_view_is_refused_in_a_sentence(
    app: sqlq.App, engine: Engine, database_url: str
) -> None:
    execute(engine, "CREATE ROLE sqlq_owner LOGIN")
    execute(engine, "GRANT ALL ON SCHEMA public TO sqlq_owner")
    try:
        for table in (*migrate.OWN_NAMES, "sqlq_version"):
            execute(engine, f"ALTER TABLE {table} OWNER TO sqlq_owner")
        execute(engine, "CREATE VIEW others AS SELECT id FROM finished_jobs")
        url = make_url(database_url).set(username="sqlq_owner").render_as_string(hide_password=False)
        with closing(sqlq.App(url)) as owner:
            with pytest.raises(
                ConfigurationError, match="cannot be partitioned: must be owner of view others"
            ):
                owner.migrate(partition_finished="daily")
            execute(engine, "DROP VIEW others")
            owner.migrate(partition_finished="daily")
        assert [each.verdict for each in diagnosis(app)] == ["ok"]
    finally:
        execute(engine, "DROP OWNED BY sqlq_owner CASCADE; DROP ROLE sqlq_owner")


# ── Behind and ahead ────────────────────────────────────────────────────────────────────────────────────────


@on_postgresql
def test_a_partition_is_dropped_once_all_its_jobs_are_too_old(history: sqlq.App, engine: Engine) -> None:
    make_past(engine)
    _, _, young = (finish(history, engine, days_ago=n) for n in (3, 5, 0))
    before = parts(engine)
    prune(history, 2 * DAY_MS)
    assert ids(engine) == [young]
    gone = set(before) - set(parts(engine))
    assert len(gone) == 3, "those of the days 3 to 5, and not of the day in which the retention ends"
    assert len(set(parts(engine))) == partitions.AHEAD["day"] + 4, (
        "today and two days before, and the default"
    )


@on_postgresql
def test_a_job_that_has_to_stay_keeps_its_partition_alone(history: sqlq.App, engine: Engine) -> None:
    make_past(engine)
    kept = finish(history, engine, days_ago=4, retention="30d")
    finish(history, engine, days_ago=4)
    finish(history, engine, days_ago=5, retention="1d")
    flow = sqlq.Flow()
    first = flow.add(history.task(name="first")(lambda: None).new())
    flow.add(history.task(name="second")(lambda: None).new().set(delay="1h"), after=first)
    done = sqlq.Flow()
    done.add(history.task(name="alone")(lambda: None).new())
    history.enqueue(flow)
    history.enqueue(done)
    drain(history)
    (step, ended) = (each.id for each in reversed(history.jobs.list()) if each.task in ("first", "alone"))
    for each in (step, ended):
        move_back(engine, each, 4)
    before = len(parts(engine))
    prune(history)
    assert ids(engine) == [kept, step], "the step after it may still ask for its result"
    assert execute(engine, "SELECT count(*) FROM sqlq_flows") == 1
    assert before - len(parts(engine)) == 3, "the days 2, 3 and 5 went as a whole"


@on_postgresql
def test_a_partition_is_not_dropped_while_a_transaction_reads_it(history: sqlq.App, engine: Engine) -> None:
    make_past(engine)
    finish(history, engine, days_ago=4)
    before = parts(engine)
    with engine.connect() as open_one:
        open_one.execute(text("SELECT count(*) FROM finished_jobs"))
        began = time.monotonic()
        prune(history)
        assert time.monotonic() - began < 5
        assert set(before) <= set(parts(engine))
        assert len(ids(engine)) == 1, "nor are its rows deleted one by one"
        finish(history, engine)
    prune(history)
    assert len(ids(engine)) == 1
    assert not set(before) <= set(parts(engine))


@on_postgresql
def test_a_job_without_a_partition_is_in_the_default_one_until_pruned(
    history: sqlq.App, engine: Engine
) -> None:
    make_past(engine, days=-1)  # none for today
    job = finish(history, engine)
    assert execute(engine, "SELECT count(*) FROM finished_jobs_default") == 1
    assert history.jobs.get(job).state == "finished"
    prune(history)
    assert ids(engine) == [job]
    move_back(engine, job, 3)
    prune(history)
    assert ids(engine) == []


@on_postgresql
def test_migrate_makes_a_partition_for_jobs_of_the_default_one(history: sqlq.App, engine: Engine) -> None:
    for name in parts(engine):  # maintenance has not run for long
        if name != "finished_jobs_default":
            execute(engine, f"DROP TABLE {name}")
    jobs = [finish(history, engine, days_ago=n) for n in (1, 0)]
    execute(engine, "ANALYZE finished_jobs_default")
    (found,) = diagnosis(history)
    assert found.verdict == "to do"
    assert "8 of the next ones are missing" in found.said
    prune(history, None)
    history.migrate()
    assert ids(engine) == jobs
    assert execute(engine, "SELECT count(*) FROM finished_jobs_default") == 0
    assert "finished_jobs_before" in parts(engine) or len(parts(engine)) > 2
    finish(history, engine)
    assert execute(engine, "SELECT count(*) FROM finished_jobs_default") == 0
    assert [each.verdict for each in diagnosis(history)] == ["ok"]


@on_postgresql
def test_partitions_made_by_hand_are_completed(history: sqlq.App, engine: Engine) -> None:
    last = parts(engine)[-3]
    execute(engine, f"DROP TABLE {last}")
    day = last[-8:]
    execute(
        engine,
        "CREATE TABLE of_mine PARTITION OF finished_jobs "
        f"FOR VALUES FROM ('{day} 06:00Z') TO ('{day} 18:00Z')",
    )
    execute(engine, "ALTER TABLE finished_jobs DETACH PARTITION finished_jobs_default")
    execute(engine, "DROP TABLE finished_jobs_default")
    prune(history)
    made = {"of_mine", "finished_jobs_default", f"finished_jobs_{day}", f"finished_jobs_{day}_1800"}
    assert made <= set(parts(engine))
    assert [each.verdict for each in diagnosis(history)] == ["ok"]


@on_postgresql
def test_off_stops_making_partitions(history: sqlq.App, engine: Engine) -> None:
    history.migrate(partition_finished="off")
    execute(engine, f"DROP TABLE {parts(engine)[0]}")
    before = parts(engine)
    prune(history)
    assert parts(engine) == before
    assert diagnosis(history) == []
    history.migrate(partition_finished="daily")
    assert set(parts(engine)) > set(before)


@on_postgresql
def test_a_role_that_owns_nothing_prunes_by_rows(
    history: sqlq.App, engine: Engine, database_url: str
) -> None:
    make_past(engine)
    execute(engine, "CREATE ROLE sqlq_partitioned LOGIN")
    try:
        with history.database.begin() as conn:
            rights.apply(conn, "worker", "sqlq_partitioned", "public")
            rights.apply(conn, "reader", "sqlq_partitioned", "public")
        url = make_url(database_url).set(username="sqlq_partitioned")
        with closing(sqlq.App(url.render_as_string(hide_password=False))) as app:
            finish(app, engine, days_ago=4)
            execute(engine, f"DROP TABLE {parts(engine)[1]}")
            before = parts(engine)
            prune(app)
            assert (ids(engine), parts(engine)) == ([], before)
            job = app.enqueue(app.task(name="t")(lambda: None).new())
            assert drain(app).completed == 1
            assert ids(engine) == [job.id]
            app.migrate()
            with pytest.raises(
                ConfigurationError, match=r"only postgres, who owns public\.finished_jobs, may"
            ):
                app.migrate(partition_finished="off")
            (found,) = diagnosis(app)
            assert "as postgres" in str(found.remedy)
    finally:
        execute(engine, "DROP OWNED BY sqlq_partitioned; DROP ROLE sqlq_partitioned")


@on_postgresql
def test_autogenerate_leaves_partitions_alone(history: sqlq.App, engine: Engine) -> None:
    for name in (*parts(engine), "finished_jobs"):
        assert not sqlq.alembic.include_name(name, "table", {"schema_name": None})
    assert sqlq.alembic.include_name("finished_jobs_archive", "table", {"schema_name": None})
