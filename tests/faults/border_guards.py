"""Guards of the border, as `tests.faults.mutations` takes them away: messages, queries and rows of strangers."""

from __future__ import annotations

from typing import Final

HEARD, LINKS = "tests/faults/test_notifications.py::", "tests/faults/test_bad_messages.py::"
COSTS = "tests/faces/web/test_costs.py::"
STAFF = "tests/faces/django/test_staff.py::"
STEERING, METRICS = "tests/faces/test_cli_control_characters.py::", "tests/faces/test_metrics.py::"

# ruff: noqa: E501 - a guard is one line
# fmt: off
BORDER: Final[list[tuple[str, str | None, str, str]]] = [
    ("notifications-are-read-strictly", "not _IDS.fullmatch(words)", "not words", HEARD + "test_bytes_are_read_as_ids_or_as_nothing"),
    ("floods-stand-for-any-job", "self._left < 0 or", "", HEARD + "test_too_many_ids_at_once_stand_for_any_job[postgresql]"),
    ("ignored-is-told-seldom", None, "if True:", HEARD + "test_notifications_of_a_stranger_end_no_wait[postgresql]"),
    ("what-is-remembered-is-bounded", "or len(self._until) + len(ids) > MOST_REMEMBERED", "", HEARD + "test_expired_requests_are_removed_once_a_second[sqlite]"),
    ("a-flood-is-read-before-a-look", "and (not listens or self._hearing.is_dry)", "", HEARD + "test_the_poller_reads_all_notifications_before_the_next_poll[postgresql]"),
    ("a-stopped-child-is-called-once", "droppable=True, ", "", LINKS + "test_notifications_do_not_pile_up_for_a_stopped_child"),
    ("no-word-ends-a-supervisor", "MISFITS", "KeyboardInterrupt", LINKS + "test_no_message_ends_a_supervisor"),
    ("what-an-isolate-says-can-be-read", "strictly:", "False:", "tests/worker/test_subprocesses.py::test_a_subprocess_with_an_unreadable_message_is_killed_and_its_job_lost[no JSON\\n]"),
    ("an-isolate-says-outcomes", "not isinstance(outcome, Outcome)", "False", LINKS + "test_messages_of_a_subprocess_are_an_outcome_or_its_end"),
    ("few-scrape-at-a-time", None, "return True", METRICS + "test_the_endpoint_bounds_connections_of_strangers[sqlite]"),
    ("no-connection-stays", "time.monotonic() > end", "False", METRICS + "test_the_endpoint_closes_a_slow_client[sqlite]"),
    ("lines-steer-no-terminal", "escaped(", "str(", STEERING + "test_a_worker_prints_no_control_characters[sqlite-text]"),
    ("tracebacks-steer-no-terminal", "escaped_lines(", "str(", STEERING + "test_a_worker_prints_no_control_characters[sqlite-text]"),
    ("looks-steer-no-terminal", "escaped(label), escaped(text)", "label, text", STEERING + "test_reading_commands_print_no_control_characters[sqlite]"),
    ("labels-steer-no-terminal", "escaped(label)", "label", STEERING + "test_reading_commands_print_no_control_characters[sqlite]"),
    ("claims-know-new-tasks", "tasks != self._seen_tasks", "len(tasks) != len(self._seen_tasks)", "tests/worker/test_sql_rows.py::test_a_claimer_sees_that_a_task_took_the_place_of_another[sqlite]"),
    ("new-tasks-are-named", "tasks != self._named", "len(tasks) != len(self._named)", "tests/worker/test_meter.py::test_a_task_that_takes_the_place_of_another_is_named"),
    ("looks-take-a-small-share", "max(seconds, min(took * SHARE, LONGEST_SECONDS))", "seconds", COSTS + "test_a_slow_query_is_cached_longer[sqlite]"),
    ("tracebacks-are-read-once", "if row not in known", "", COSTS + "test_a_traceback_is_read_once[sqlite]"),
    ("statements-of-others-are-hidden", "query=None", "", "tests/faces/web/test_pages.py::test_statements_of_other_sessions_are_shown_to_operators_alone[postgresql]"),
    ("each-database-has-its-own-outages", "setdefault(place,", "setdefault(None,", "tests/worker/test_outage.py::test_two_databases_have_each_their_own_outage[sqlite]"),
    ("only-staff-sees-jobs", None, "if False:", STAFF + "test_the_dashboard_works_inside_a_project[sqlite-plain]"),
    ("no-transaction-around-forms", "transaction.non_atomic_requests", "csrf_exempt", STAFF + "test_the_dashboard_works_inside_a_project[sqlite-atomic]"),
    ("the-orm-changes-nothing", None, "pass", STAFF + "test_the_admin_works_inside_a_project[sqlite-plain]"),
    ("actions-by-djangos-permissions", None, "if True:", STAFF + "test_the_admin_works_inside_a_project[sqlite-plain]"),
    ("a-project-has-one-app", "globals().setdefault(name, project_app())", "globals().__setitem__(name, project_app()) or globals()[name]", "tests/faces/django/test_manage.py::TestCommand::test_a_worker_by_the_name_of_the_app_knows_the_tasks[sqlite]"),
    ("no-transaction-around-actions", "transaction.non_atomic_requests", "admin.display", STAFF + "test_the_admin_works_inside_a_project[sqlite-atomic]"),
]
