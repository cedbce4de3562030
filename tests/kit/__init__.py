"""The kit of all tests. Most need only names of this package, which stand in these modules:

    abilities  `needs`: the mark by which a test names what it needs of a database; `for_each`: a table of
               values as one case
    hand       claims, renews and settles jobs as a worker does, without running anything
    workers    runs a worker, or a part of one, while a test goes on
    sql        runs a statement; the clock of each kind of database, the rows it read, the locks it waits for
    waiting    waits for a condition until a deadline, never for a time to pass

The other modules are imported by their names:

    databases              URLs, and a new database of each kind that the tests run on
    postgresql, mariadb    servers of the tests' own, or somebody else's
    standby, pgbouncer, proxy    servers that fail over, and programs before a server
    callers                who enqueue in a transaction of their own: by SQLAlchemy, by a driver, by Django
    notifications          who hears what an enqueue sends to idle workers
    command, processes     `sqlq` as people run it; `preloaded` starts these processes fast
    plans                  what PostgreSQL reads for a statement
    transcript             commands with what they print, as text files
    scenario               a program of `tests/programs` with workers, a producer, and faults that meet them
    isolated               subprocesses for single jobs, with programs of a test's own
    flows                  Apps with tasks, and what their handlers did
    pages                  the blocks of the documentation
    service                a server of somebody else's, which notes what it is sent
    visitor, browser       the dashboard without and with a browser

Fixtures are in `tests/fixtures/`. A test module imports no other one: helpers of several modules stand here,
or in a module beside them.
"""

from __future__ import annotations

from tests.kit.abilities import for_each, needs
from tests.kit.hand import (
    BOOM,
    Hand,
    blocked,
    claim,
    claim_on,
    end,
    expire,
    failed,
    fate,
    ids,
    rescue,
    settle,
)
from tests.kit.sql import (
    NOW,
    committed,
    count,
    execute,
    insert_many,
    locked,
    received,
    refuse,
    rows_read,
    span,
    waiting_for_locks,
)
from tests.kit.waiting import let_pass, wait_until
from tests.kit.workers import (
    claim_size_of,
    deaths,
    drain,
    handler_of,
    refuse_threads,
    renew,
    run_isolated,
    run_one,
    supervised,
    supervising,
    worker_of,
    working,
)
