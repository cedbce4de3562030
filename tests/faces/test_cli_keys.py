"""`sqlq keys`, and how other commands show signed and encrypted jobs."""

from __future__ import annotations

import json
import re

import pytest
from sqlalchemy import Engine

from tests.kit import execute
from tests.kit.command import Command, Done

KEY = "iVpDmEGzqNKTMHisH6ZAI3_1f1WK0SKuciK6m3GX1po"  # names tests, so it is the same in all processes
SECRET = "4111-1111"


def nothing_of(done: Done, *hidden: str) -> None:
    assert not any(each in done.out + done.err for each in hidden), done


@pytest.fixture(params=["sign", "encrypt"])
def keyed(request: pytest.FixtureRequest, sqlq_: Command) -> Command:
    """`sqlq` with a key."""
    sqlq_.environment |= {"SQLQ_KEYS": KEY, "SQLQ_ENCRYPTION": request.param}
    return sqlq_


WITHOUT = {"SQLQ_KEYS": "", "SQLQ_ENCRYPTION": ""}
"""The environment of somebody who has no key."""


def test_a_new_key_is_printed_alone(bare: Command) -> None:
    first, second = bare("keys", "new"), bare("keys", "new")
    assert re.fullmatch(r"[\w-]{43}\n", first.out)
    assert first.out != second.out
    (id,) = re.findall(r"this is key ([0-9a-f]{8}):", first.err)
    assert first.out.strip() not in first.err
    listed = bare(
        "enqueue", "shop.where", env={"SQLQ_KEYS": first.out, "SQLQ_DATABASE_URL": "sqlite:///a.db"}
    )
    assert "SQLQ_KEYS" not in listed.err, "it is taken as it was printed"
    assert id != first.out[:8]


@pytest.mark.variants
def test_arguments_and_results_are_shown_with_the_key_alone(keyed: Command) -> None:
    keyed.shop("enqueue", "shop.send", "7", "--kwargs", json.dumps({"note": SECRET}))
    how = "signed" if keyed.environment["SQLQ_ENCRYPTION"] == "sign" else "encrypted"
    shown = keyed.ok("show", "1")
    assert SECRET in shown
    assert re.search(rf"encryption +{how} with key [0-9a-f]{{8}}\n", shown)
    keyed.work()
    assert keyed.ok("show", "1").count(SECRET) == 2, "arguments and result"
    assert json.loads(keyed.ok("show", "1", "--json"))["result"] == f"7 False {SECRET}"
    for command in (("show", "1"), ("show", "1", "--json"), ("jobs",), ("jobs", "--json")):
        nothing_of(keyed(*command, env=WITHOUT), SECRET)
    said = keyed("show", "1", env=WITHOUT).out
    for what, kind in (("arguments", "payload"), ("result", "result")):
        assert re.search(
            rf"{what} +\(its {kind} was written with key [0-9a-f]{{8}}, which this App does not", said
        )
    keyed.shop("enqueue", "shop.fail", SECRET)
    keyed.work()
    # of what a handler raised a job that fails keeps the text, as it is
    assert SECRET in keyed("show", "2", env=WITHOUT).out


def test_show_reports_a_row_whose_signature_does_not_fit(keyed: Command, engine: Engine) -> None:
    keyed.shop("enqueue", "shop.send", "7")
    execute(engine, "UPDATE jobs SET task = 'shop.fail'")
    assert "does not fit: it was altered, or is of another task or queue" in keyed.ok("show", "1")
    keyed.work()
    shown = keyed.ok("show", "1")
    assert "error (bad_signature)" in shown
    assert "does not fit" in shown


@pytest.mark.parametrize(
    ("keys", "wrong"), [("c2hvcnQ", "SQLQ_KEYS[0] is no key"), (f"{KEY} ~~~~", "SQLQ_KEYS[1] is no key")]
)
def test_a_key_that_is_none_is_reported_in_one_sentence(sqlq_: Command, keys: str, wrong: str) -> None:
    for command in (("status",), ("doctor",), ("show", "1")):
        done = sqlq_(*command, env={"SQLQ_KEYS": keys})
        assert (
            done.sentence() == f"{wrong}: a key is 32 random bytes in base64, as `sqlq keys new` prints them"
        )
        nothing_of(done, *keys.split())


def test_encryption_without_a_key_is_reported_in_one_sentence(sqlq_: Command) -> None:
    encryption = sqlq_("status", env={"SQLQ_ENCRYPTION": "encrypt"})
    assert encryption.sentence().startswith("SQLQ_ENCRYPTION is set, but there is no key")
