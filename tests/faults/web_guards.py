"""Guards of the dashboard, as `tests.faults.mutations` takes them away: strangers' requests, and hostile rows."""

from __future__ import annotations

from typing import Final

ACCESS = "tests/faces/web/test_access.py::"
ACTIONS, COSTS = "tests/faces/web/test_actions.py::", "tests/faces/web/test_costs.py::"
HOSTILE = "tests/faces/web/test_hostile.py::test_no_row_injects_markup_into_a_page[sqlite]"

# ruff: noqa: E501 - a guard is one line
# fmt: off
WEB: Final[list[tuple[str, str | None, str, str]]] = [
    ("host-name-is-checked", None, "if False:", ACCESS + "test_another_host_name_is_refused[sqlite]"),
    ("form-origin-is-checked", None, "if False:", ACCESS + "test_a_form_is_refused_when_another_site_sends_it[sqlite-headers4]"),
    ("forms-have-their-token", None, "if False:", ACCESS + "test_a_form_is_refused_when_its_token_is_wrong[sqlite-guessed]"),
    ("each-verb-has-its-role", None, "if False:", ACCESS + "test_a_visitor_can_do_what_the_table_allows[sqlite-viewer]"),
    ("redirect-stays-on-the-site", None, "return path", ACCESS + "test_a_form_does_not_redirect_to_another_site[sqlite-https://evil.example/]"),
    ("a-link-works-once", None, "pass", ACCESS + "test_a_login_url_works_once[sqlite]"),
    ("guesses-are-slow", None, "if False:", ACCESS + "test_frequent_guesses_of_passwords_are_refused[sqlite]"),
    ("strangers-need-a-login", "users is None", "False", ACCESS + "test_another_address_is_refused_when_nobody_can_log_in[sqlite-example.org]"),
    ("no-search-tells-what-is-hidden", None, "if False:", ACCESS + "test_a_viewer_cannot_search_hidden_arguments[sqlite]"),
    ("no-search-tells-what-is-redacted", None, "return True", ACCESS + "test_no_search_finds_a_job_by_what_is_hidden_of_it[sqlite-compactly]"),
    ("only-a-user-enters", None, "if True:", ACCESS + "test_every_request_is_refused_when_authorize_returns_no_user[sqlite-impostor]"),
    ("no-process-shows-its-url", None, "pass", "tests/faces/test_cli_control.py::test_no_process_shows_the_url_of_its_database[False-postgresql]"),
    ("actors-are-those-of-the-system", None, 'user = __import__("getpass").getuser()', "tests/faces/test_cli_audit.py::test_commands_are_recorded_as_their_users[postgresql]"),
    ("no-health-file-behind-a-symlink", "os.O_NOFOLLOW", "0", "tests/faces/test_cli_work.py::test_a_health_file_is_refused_when_it_is_a_symlink[none]"),
    ("what-is-too-slow-is-kept", "SQLAlchemyError", "ZeroDivisionError", "tests/faces/web/test_pages.py::test_a_query_that_was_too_slow_is_not_repeated_by_each_viewer[sqlite]"),
    ("an-action-keeps-to-the-states-shown", None, "states = [*verb.states]", ACTIONS + "test_an_action_on_a_filter_keeps_to_the_state_of_the_tab[sqlite]"),
    ("a-filter-is-counted-before-it-acts", 'form.get("matching") or ', "", ACTIONS + "test_a_filter_is_counted_even_in_a_confirmed_form[sqlite]"),
    ("lists-read-no-large-field", "null().label(c.name) if c.name in left_out else c", "c", COSTS + "test_lists_of_jobs_read_no_large_field[sqlite]"),
    ("kept-answers-are-bounded", "-KEPT_LIMIT", "0", COSTS + "test_kept_answers_are_bounded[sqlite]"),
    ("rows-are-hostile", "True", "False", HOSTILE),
    ("pages-steer-nothing", "escaped_lines(value)", "value", HOSTILE),
    ("pages-are-bounded", "shortened(escaped_lines(str(value)), TEXT_LIMIT)", "escaped_lines(str(value))", HOSTILE),
]
