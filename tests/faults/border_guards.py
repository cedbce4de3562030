"""Guards of the border, as `tests.faults.mutations` takes them away: messages, queries and rows of strangers."""

from __future__ import annotations

from typing import Final

HEARD, LINKS = "tests/faults/test_notifications.py::", "tests/faults/test_bad_messages.py::"
QUEUES = "tests/conformance/test_admin_queues.py::"
FLOODS = "tests/faults/test_floods.py::"
COSTS = "tests/faces/web/test_costs.py::"
STAFF = "tests/faces/django/test_inside.py::"
STEERING, METRICS = "tests/faces/test_cli_control_characters.py::", "tests/faces/test_metrics.py::"

SETTINGS = "tests/conformance/test_session_settings.py::test_jobs_run_and_are_shown_whatever_is_set"
LOST = "tests/faults/test_idle_transactions.py::test_a_host_that_is_lost_in_mid_transaction_frees_its_jobs"

# ruff: noqa: E501 - a guard is one line
# fmt: off
BORDER: Final[list[tuple[str, str | None, str, str]]] = [
    ("own-sessions-have-own-settings", "_at_once(driver, in_catalog(statement))", "leads_to_one_server(driver)", SETTINGS + "[postgresql-database-datestyle-SQL-DMY-]"),
    ("own-sessions-speak-utf8mb4", None, "pass", SETTINGS + "[mariadb-url-charset-latin1]"),
    ("what-an-encoding-lacks-is-escaped", "_escaped(result)", "result", SETTINGS + "[postgresql-encoding-LATIN1]"),
    ("depth-is-bounded", "is_deep(text, value)", "False", "tests/unit/test_task.py::test_json_nested_too_deep_is_neither_read_nor_shown"),
    ("depth-is-bounded-in-workers", "is_deep(payload, arguments)", "False", "tests/unit/test_task.py::test_json_nested_too_deep_is_neither_read_nor_shown"),
    ("errors-hold-no-value", r"(.*) - at `(key` in `)?\$([^`]*)", r"(.*?) - at `(key` in `)?\$(.*)", "tests/unit/test_annotations.py::test_a_value_that_looks_like_a_path_is_not_in_the_error"),
    ("idle-transactions-end", "str(IDLE_TRANSACTION_MS)", '"0"', LOST + "[frozen-postgresql]"),
    ("idle-transactions-end-mariadb", "{IDLE_TRANSACTION_MS // 1000}", "0", LOST + "[frozen-mariadb]"),
    ("idle-transactions-end-behind-a-pooler", None, "pass", "tests/faults/test_pgbouncer.py::test_settings_of_own_sessions_stay_with_them_behind_a_pooler[postgresql]"),
    ("notifications-are-read-strictly", "not notification.extra", "True", HEARD + "test_only_an_empty_text_is_a_notification_of_jobs"),
    ("ignored-are-logged-rarely", None, "if True:", HEARD + "test_notifications_of_a_stranger_are_ignored[postgresql]"),
    ("notifications-are-read-before-a-poll", "and (not listens or self._hearing.is_dry)", "", HEARD + "test_the_poller_reads_all_notifications_before_the_next_poll[postgresql]"),
    ("old-wakes-hold-up-no-new-ones", None, "if False:", FLOODS + "test_old_wakes_hold_up_no_limit[postgresql]"),
    ("statements-end-with-their-client", '_CHECKS_CLIENT if driver.info.server_version >= 140000 else "NULL"', '"NULL"', FLOODS + "test_a_statement_ends_when_its_client_gives_up[postgresql]"),
    ("partial-indexes-need-literals", """literal_column(f"'{reason}'")""", "reason", "tests/sql/test_statements.py::test_a_generic_plan_finds_the_indexes[postgresql]"),
    ("a-task-is-put-back-in-one-line", None, "if True:", FLOODS + "test_many_rows_of_unknown_tasks_are_few_lines_of_the_log[postgresql]"),
    ("what-is-put-back-has-one-line", " and not (isinstance(outcome, Released) and outcome.unknown_task)", "", FLOODS + "test_many_rows_of_unknown_tasks_are_few_lines_of_the_log[postgresql]"),
    ("looks-reach-every-queue", "window[len(window)] if len(window) == LARGEST_WINDOW else ", "", QUEUES + "test_looks_read_all_queues_in_turn_when_there_are_more_than_a_window[sqlite]"),
    ("known-queues-are-bounded", "[:LARGEST_WINDOW]", "", QUEUES + "test_known_queues_keep_those_with_the_latest_claims"),
    ("stopped-child-is-called-once", "droppable=True, ", "", LINKS + "test_notifications_do_not_pile_up_for_a_stopped_child"),
    ("supervisor-survives-a-bad-message", "Exception", "KeyboardInterrupt", LINKS + "test_no_message_ends_a_supervisor"),
    ("unreadable-isolate-is-refused", "strictly:", "False:", "tests/worker/test_subprocesses.py::test_a_subprocess_with_an_unreadable_message_is_killed_and_its_job_lost[no JSON\\n]"),
    ("an-isolate-says-outcomes", "not isinstance(outcome, Outcome)", "False", LINKS + "test_messages_of_a_subprocess_are_an_outcome_or_its_end"),
    ("few-scrape-at-a-time", "CONNECTIONS", "500", METRICS + "test_the_endpoint_bounds_connections_of_strangers[sqlite]"),
    ("lines-steer-no-terminal", "escaped(", "str(", STEERING + "test_the_line_of_a_finished_job_steers_no_terminal[Lines]"),
    ("tracebacks-steer-no-terminal", "escaped_lines(", "str(", STEERING + "test_a_worker_prints_no_control_characters[sqlite-text]"),
    ("looks-steer-no-terminal", "escaped(label), escaped(text)", "label, text", STEERING + "test_wrapped_text_steers_no_terminal"),
    ("labels-steer-no-terminal", "escaped(label)", "label", STEERING + "test_reading_commands_print_no_control_characters[sqlite]"),
    ("new-tasks-are-named", "tasks != self._named", "len(tasks) != len(self._named)", "tests/worker/test_events.py::test_a_task_that_takes_the_place_of_another_is_named"),
    ("looks-take-a-small-share", "max(seconds, min(took * SHARE, MAX_KEPT_SECONDS))", "seconds", COSTS + "test_a_slow_query_is_cached_longer[sqlite]"),
    ("large-numbers-are-estimates", "of <= ROWS and estimates[key] < 1.2 * EXACT", "True", "tests/conformance/test_admin_listings.py::test_a_number_beyond_the_bound_is_an_estimate[sqlite]"),
    ("statements-of-others-are-hidden", "query=None", "", "tests/faces/web/test_pages.py::test_statements_of_other_sessions_are_shown_to_operators_alone[postgresql]"),
    ("each-database-has-its-own-outages", "setdefault(key,", "setdefault(None,", "tests/worker/test_outage.py::test_two_databases_have_each_their_own_outage[sqlite]"),
    ("only-staff-sees-jobs", None, "if False:", STAFF + "test_the_dashboard_works_inside_a_project[sqlite-plain]"),
    ("no-transaction-around-forms", "transaction.non_atomic_requests", "csrf_exempt", STAFF + "test_the_dashboard_works_inside_a_project[sqlite-atomic]"),
    ("the-orm-changes-nothing", None, "pass", STAFF + "test_the_admin_works_inside_a_project[sqlite-plain]"),
    ("actions-by-djangos-permissions", None, "if True:", STAFF + "test_the_admin_works_inside_a_project[sqlite-plain]"),
    ("a-project-has-one-app", "_apps or [app]", "[app]", "tests/faces/django/test_manage.py::TestCommand::test_a_worker_by_the_name_of_the_app_knows_the_tasks[sqlite]"),
    ("no-transaction-around-actions", "transaction.non_atomic_requests", "admin.display", STAFF + "test_the_admin_works_inside_a_project[sqlite-atomic]"),
]
