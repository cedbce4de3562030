"""The outcome of an attempt: backoffs stay within their bounds, and every exception and signal has its
outcome."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlq.config.constants import ERROR_BYTES, MAX_RELEASES
from sqlq.config.durations import MAX_MS, Duration, milliseconds
from sqlq.errors import ConfigurationError, JobTimeoutError
from sqlq.model import retry
from sqlq.model.backoff import Backoff, backoff_from, exponential, fibonacci, fixed, linear, read, stored
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Line, Released, Retried, users_line
from tests.kit import for_each

JOB = ClaimedJob(7, 1, "mail", "shop.send_receipt", "{}", attempts=1, max_attempts=3)
LAST = JOB._replace(attempts=3)

HOUR = 3_600_000
waits = st.integers(0, MAX_MS).map(lambda ms: timedelta(milliseconds=ms))


def ms(wait: Duration) -> int:
    return milliseconds(wait, "the wait")


# -- backoff -------------------------------------------------------------------------------------------------


@for_each(
    ("backoff", "expected"),
    [
        (exponential(jitter=0), [1_000, 2_000, 4_000, 8_000, 16_000, 32_000]),
        (exponential("5s", cap="12s", jitter=0), [5_000, 10_000, 12_000, 12_000]),
        (fixed("30s"), [30_000, 30_000, 30_000]),
        (linear("10s", cap="25s", jitter=0), [10_000, 20_000, 25_000, 25_000]),
        (fibonacci(jitter=0), [1_000, 1_000, 2_000, 3_000, 5_000, 8_000]),
        (backoff_from(["10s", "5m"]), [10_000, 300_000, 300_000]),
        (backoff_from(("10s", timedelta(minutes=5))), [10_000, 300_000, 300_000]),
        (backoff_from("45s"), [45_000, 45_000]),
        (backoff_from(timedelta(seconds=45)), [45_000, 45_000]),
        (backoff_from(lambda attempts: f"{attempts}m"), [60_000, 120_000]),
    ],
)
def test_waits_after_the_first_attempts(backoff: Backoff, expected: list[int]) -> None:
    assert [ms(backoff(attempts)) for attempts in range(1, len(expected) + 1)] == expected


@for_each("kind", [exponential, linear, fibonacci])
@for_each("jitter", [0.0, 0.2, 1.0])
def test_no_attempt_leaves_the_bounds(kind: Callable[..., Backoff], jitter: float) -> None:
    plain, varied = kind("1s", cap="1h", jitter=0.0), kind("1s", cap="1h", jitter=jitter)
    before = 0
    for attempts in range(1, 10_001):
        wait = ms(plain(attempts))
        assert before <= wait <= HOUR
        assert wait * (1 - jitter) - 1 <= ms(varied(attempts)) <= wait * (1 + jitter) + 1
        before = wait
    assert before == HOUR


@given(waits, waits, st.floats(0, 1), st.integers(1, 10_000))
def test_every_backoff_returns_a_duration(first: timedelta, cap: timedelta, jitter: float, n: int) -> None:
    for backoff in (
        exponential(first, cap, jitter),
        linear(first, cap, jitter),
        fibonacci(first, cap, jitter),
        fixed(first, jitter),
    ):
        assert 0 <= ms(backoff(n)) <= MAX_MS


def test_jitter_spreads_jobs_that_failed_together() -> None:
    assert len({ms(exponential()(10)) for _ in range(50)}) > 1


def test_the_default_is_exponential_up_to_an_hour() -> None:
    for backoff in (backoff_from(None), retry.RetryPolicy().backoff):
        assert 800 <= ms(backoff(1)) <= 1_200
        assert HOUR * 0.8 <= ms(backoff(10_000)) <= HOUR * 1.2


SHAPES = [exponential("3s", jitter=0), linear("10s", "25s", 0), fibonacci(jitter=0), fixed("5s")]


@for_each("backoff", [*SHAPES, backoff_from(["1s", "2s"])])
def test_a_row_stores_a_backoff_of_sqlq(backoff: Backoff) -> None:
    again = read(stored(backoff, "backoff"))
    assert again == backoff
    assert [ms(again(n)) for n in range(1, 9)] == [ms(backoff(n)) for n in range(1, 9)]


def test_a_backoff_may_be_stored_as_plain_durations() -> None:
    assert ms(read('"10s"')(1)) == 10_000
    assert ms(read('["10s", "5m"]')(2)) == 300_000
    odd = '{"shape": "square", "waits_ms": [1], "cap_ms": 1, "jitter": 0}'
    none, past = (odd.replace("square", "list").replace("[1]", waits) for waits in ("[]", "[-1]"))
    endless = odd.replace("square", "list").replace('"cap_ms": 1', '"cap_ms": 1e999')
    wrong = ("{", "7", "null", "[]", '"soon"', '{"shape": "exponential"}', '[{"a": 1}]')
    for text in (*wrong, odd, none, past, endless):
        with pytest.raises(ConfigurationError):
            read(text)


def test_a_callable_that_fails_gets_the_default_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def failing(attempts: int) -> Duration:
        raise ZeroDivisionError("no wait")

    def exits(attempts: int) -> Duration:
        raise SystemExit("no more")

    wrong: Any = lambda attempts: 5  # noqa: E731
    past: Backoff = lambda attempts: timedelta(-1)  # noqa: E731
    for backoff, said in (
        (failing, "no wait"),
        (exits, "no more"),
        (wrong, "what the backoff callable returned is 5"),
        (past, "between zero"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sqlq.worker"):
            assert 1_600 <= retry.RetryPolicy(backoff=backoff).wait_ms(2) <= 2_400
        assert said in caplog.text


# -- the decision --------------------------------------------------------------------------------------------


def test_a_failed_attempt_is_retried_until_attempts_are_spent() -> None:
    retried: Any = retry.decide(JOB, ValueError("no"))
    assert retried == Retried(retried.delay_ms, ErrorText("ValueError", "no"), "error")
    assert 800 <= retried.delay_ms <= 1_200
    assert retry.decide(LAST, ValueError("no")) == Failed("error", ErrorText("ValueError", "no"))


def test_listed_exceptions_only_or_never() -> None:
    only, never = retry.RetryPolicy(retry_on=(OSError,)), retry.RetryPolicy(fail_on=(OSError,))
    both = retry.RetryPolicy(retry_on=(OSError,), fail_on=(FileNotFoundError,))
    assert isinstance(retry.decide(JOB, TimeoutError(), only), Retried)
    assert isinstance(retry.decide(JOB, ValueError(), only), Failed)
    assert isinstance(retry.decide(JOB, TimeoutError(), never), Failed)
    assert isinstance(retry.decide(JOB, ValueError(), never), Retried)
    assert isinstance(retry.decide(JOB, TimeoutError(), both), Retried)
    assert isinstance(retry.decide(JOB, FileNotFoundError(), both), Failed)


E = TypeVar("E", bound=BaseException)


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", list(errors))


def test_groups_count_by_their_exceptions_and_a_signal_when_it_is_alone() -> None:
    only, never = retry.RetryPolicy(retry_on=(OSError,)), retry.RetryPolicy(fail_on=(OSError,))
    assert isinstance(retry.decide(JOB, group(group(TimeoutError()), OSError()), only), Retried)
    assert isinstance(retry.decide(JOB, group(TimeoutError(), ValueError()), only), Failed)
    assert isinstance(retry.decide(JOB, group(ValueError(), group(TimeoutError())), never), Failed)
    alone = group(ValueError())
    assert isinstance(retry.decide(JOB, alone, never), Retried)
    assert isinstance(retry.decide(JOB, alone, retry.RetryPolicy(retry_on=(ExceptionGroup,))), Retried)
    assert isinstance(retry.decide(JOB, alone, retry.RetryPolicy(fail_on=(ExceptionGroup,))), Failed)
    assert retry.decide(JOB, group(group(retry.Cancel("order withdrawn")))) == Cancelled("order withdrawn")
    assert retry.decide(JOB, group(retry.Snooze("1h"))) == Released(HOUR, snoozed=True)
    assert isinstance(retry.decide(JOB, group(retry.Cancel(), ValueError())), Retried)


def test_a_slow_down_has_the_time_of_retry_after_in_each_of_its_forms() -> None:
    assert retry.decide(JOB, retry.SlowDown("1h")) == Released(HOUR, snoozed=True, closes=True)
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    date, asctime = format_datetime(in_an_hour, usegmt=True), in_an_hour.strftime("%a %b %d %H:%M:%S %Y")
    past, minute = "Sun, 06 Nov 1994 08:49:37 GMT", 60_000
    waits = {"120": 120_000, " 1.5 ": 1_500, date: HOUR, asctime: HOUR, past: 0, "-5": 0, "9" * 400: MAX_MS}
    waits |= dict.fromkeys(("", "soon", "nan", "Fri, 31 Dec 99999 23:59:59 GMT"), minute)
    for value, expected in waits.items():
        delay_ms = retry.SlowDown.from_headers({"Server": "1", "retry-AFTER": value}).delay_ms
        assert expected - 2_000 <= delay_ms <= expected, value
    assert retry.SlowDown.from_headers({}, "5s").delay_ms == 5_000


def test_a_group_is_described_by_its_first_exception() -> None:
    cause = raised(OSError("no route"))
    text = retry.describe(raised(group(group(cause), ValueError("b"), KeyError("c"))))
    assert (text.exception, text.message) == ("OSError", "no route (and 2 more)")
    assert text.traceback
    assert "KeyError: 'c'" in text.traceback
    assert text.traceback.endswith("OSError: no route\n"), "the cause comes last"
    alone = retry.describe(raised(group(OSError("no route"))))
    assert (alone.exception, alone.message) == ("OSError", "no route")


def test_retry_takes_its_own_delay_and_shows_its_cause() -> None:
    assert retry.decide(JOB, retry.Retry("5m")) == Retried(
        300_000, ErrorText("sqlq.model.retry.Retry", "the handler asked for a retry in 5m")
    )
    asked = retry.Retry("5m")
    asked.__cause__ = OSError("mail server down")
    assert retry.decide(JOB, asked) == Retried(300_000, ErrorText("OSError", "mail server down"))
    assert retry.decide(LAST, asked) == Failed("error", ErrorText("OSError", "mail server down"))
    assert isinstance(retry.decide(JOB, retry.Retry(), retry.RetryPolicy(retry_on=(OSError,))), Retried)
    retried: Any = retry.decide(JOB, retry.Retry(), retry.RetryPolicy(backoff=fixed("7s")))
    assert retried.delay_ms == 7_000


def test_a_snooze_counts_no_attempt_up_to_a_maximum() -> None:
    assert retry.decide(LAST, retry.Snooze("1h")) == Released(HOUR, snoozed=True)
    circling = JOB._replace(releases=MAX_RELEASES)
    assert isinstance(retry.decide(circling, retry.Snooze("1h")), Retried)
    assert isinstance(retry.decide(circling._replace(attempts=3), retry.Snooze("1h")), Failed)


def test_cancel_is_no_failure() -> None:
    assert retry.decide(LAST, retry.Cancel("order withdrawn")) == Cancelled("order withdrawn")
    assert retry.decide(JOB, retry.Cancel()) == Cancelled(None)
    assert retry.decide(JOB, retry.Cancel("a\0b")) == Cancelled("a␀b")


def test_a_timeout_is_retried_unless_fail_on_has_it() -> None:
    error, policy = JobTimeoutError("longer than 30 s"), retry.RetryPolicy(retry_on=(ValueError,))
    failed = Failed("timeout", ErrorText("sqlq.errors.JobTimeoutError", "longer than 30 s"))
    assert isinstance(retry.decide(JOB, error, policy), Retried)
    assert retry.decide(LAST, error, policy) == failed
    assert retry.decide(JOB, error, retry.RetryPolicy(fail_on=(JobTimeoutError,))) == failed
    assert isinstance(retry.decide(JOB, error, retry.RetryPolicy(fail_on=(ValueError,))), Retried)


# -- errors as text ------------------------------------------------------------------------------------------


@given(
    st.text(st.characters()) | st.text("\0\ud800\udfffaä€😀", min_size=1),
    st.integers(32, 400),
    st.integers(1, 60),
)
def test_scrubbed_text_fits_and_can_be_stored(value: str, limit: int, times: int) -> None:
    text = retry.scrubbed(value * times, limit)
    assert len(text.encode()) <= limit
    assert "\0" not in text
    if len((value * times).encode("utf-8", "surrogatepass")) <= limit and value.isprintable():
        assert text == value * times


def test_head_and_tail_of_a_long_text_are_kept() -> None:
    text = retry.scrubbed("begin" + "x" * 50_000_000 + "end", 1_000)
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "... cut ..." in text


def raised(error: E) -> E:
    try:
        raise error
    except BaseException:
        return error


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@for_each(
    "error",
    [
        ValueError("a\0b\ud800"),
        ValueError("x" * 1_000_000),
        MuteError(),
        KeyboardInterrupt(),
        SystemExit(3),
        ExceptionGroup("many", [ValueError("x" * 100_000), MuteError()]),
        type("N" * 100_000, (Exception,), {})("long name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
)
def test_any_exception_can_be_described(error: BaseException) -> None:
    text = retry.describe(raised(error))
    assert text.traceback
    assert len("".join((text.exception, text.message, text.traceback)).encode()) <= ERROR_BYTES
    assert "\0" not in text.exception + text.message + text.traceback
    json.loads(retry.error_record(1, "error", text))


def test_frame_locals_are_not_kept() -> None:
    def handler() -> None:
        card_number = "4111" + "1111"  # noqa: F841
        raise ValueError("declined")

    with pytest.raises(ValueError, match="declined") as caught:
        handler()
    trace = retry.describe(caught.value).traceback
    assert trace
    assert "ValueError: declined" in trace
    assert "41111111" not in trace


def test_an_errors_record_is_one_json_object() -> None:
    record = json.loads(retry.error_record(2, "timeout", ErrorText("OSError", "m" * 9_999)))
    error = {"reason": "timeout", "exception": "OSError", "message": "m" * 500}
    assert {**record, "at": None} == {"attempt": 2, "at": None, **error}
    assert datetime.fromisoformat(record["at"]).utcoffset() == timedelta(0)


# -- the user's own line of a traceback ----------------------------------------------------------------------


TRACE = """\
Traceback (most recent call last):
  File "/opt/venv/lib/python3.13/site-packages/sqlq/worker/attempt/call.py", line 90, in run
    return handler()
  File "/srv/shop/mail.py", line 17, in send
    client.post(text)
  File "/opt/venv/lib/python3.13/site-packages/client/http.py", line 4, in post
    raise ConnectionError(text)
ConnectionError: refused
"""
LIBRARY = "".join(line for line in TRACE.splitlines(keepends=True) if "shop" not in line)


def test_the_users_line_is_the_last_one_outside_of_libraries() -> None:
    assert users_line(TRACE) == Line("shop/mail.py", 17, "send")
    in_a_folder_of_that_name = TRACE.replace("/srv/shop/", "/srv/sqlq/")
    assert users_line(in_a_folder_of_that_name) == Line("sqlq/mail.py", 17, "send")
    assert users_line(LIBRARY) is None
    assert users_line(LIBRARY, or_last=True) == Line("client/http.py", 4, "post")
    assert users_line(None) is None
