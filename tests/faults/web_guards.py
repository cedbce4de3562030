"""Guards of the dashboard, as `tests.faults.mutations` takes them away: strangers' requests, and hostile rows."""

from __future__ import annotations

from typing import Final

ACCESS = "tests/faces/web/test_access.py::"
HOSTILE = "tests/faces/web/test_hostile.py::test_no_row_injects_markup_into_a_page[sqlite]"

# ruff: noqa: E501 - a guard is one line
# fmt: off
WEB: Final[list[tuple[str, str | None, str, str]]] = [
    ("another-name-is-refused", None, "if False:", ACCESS + "test_another_host_name_is_refused[sqlite]"),
    ("another-site-posts-nothing", None, "if False:", ACCESS + "test_a_form_is_refused_when_another_site_sends_it[sqlite-headers4]"),
    ("forms-have-their-token", None, "if False:", ACCESS + "test_a_form_is_refused_when_its_token_is_wrong[sqlite-guessed]"),
    ("each-verb-has-its-role", None, "if False:", ACCESS + "test_a_viewer_sees_no_buttons_and_can_do_nothing[sqlite]"),
    ("nobody-is-sent-elsewhere", None, "return path", ACCESS + "test_the_login_does_not_redirect_to_another_site[sqlite-https://evil.example/]"),
    ("a-link-works-once", None, "pass", ACCESS + "test_a_login_url_works_once[sqlite]"),
    ("guesses-are-slow", None, "if False:", ACCESS + "test_frequent_guesses_of_tokens_are_refused[sqlite]"),
    ("strangers-need-a-login", None, "return", ACCESS + "test_another_address_is_refused_when_nobody_can_log_in[sqlite-example.org]"),
    ("no-search-tells-what-is-hidden", None, "if False:", ACCESS + "test_a_viewer_cannot_search_hidden_arguments[sqlite]"),
    ("what-is-too-slow-is-kept", "SQLAlchemyError", "ZeroDivisionError", "tests/faces/web/test_pages.py::test_a_query_that_was_too_slow_is_not_repeated_by_each_viewer[sqlite]"),
    ("rows-are-hostile", "True", "False", HOSTILE),
    ("pages-steer-nothing", "escaped_lines(value)", "value", HOSTILE),
    ("pages-are-bounded", "cut(escaped_lines(str(value)), LONGEST_TEXT)", "escaped_lines(str(value))", HOSTILE),
]
