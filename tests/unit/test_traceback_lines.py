"""Which line of a traceback is the user's own."""

from __future__ import annotations

from sqlq.model.outcome import Line, users_line

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


def test_a_users_file_may_lie_in_a_folder_named_sqlq() -> None:
    assert users_line(TRACE.replace("/srv/shop/", "/srv/sqlq/")) == Line("sqlq/mail.py", 17, "send")


def test_no_line_is_the_users_where_libraries_alone_were_running() -> None:
    assert users_line(LIBRARY) is None
    assert users_line(LIBRARY, or_last=True) == Line("client/http.py", 4, "post")
    assert users_line(None) is None
