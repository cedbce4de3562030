"""`sqlq keys`, and how other commands show signed and encrypted jobs."""

from __future__ import annotations

import json
import re

import pytest
from sqlalchemy import Engine, text

from sqlq.payload.encryption import new_key
from tests.faces.command import Command, Done

KEY = "iVpDmEGzqNKTMHisH6ZAI3_1f1WK0SKuciK6m3GX1po"  # names tests, so it is the same in all processes
OLD = new_key()
SECRET = "4111-1111"


def nothing_of(done: Done, *hidden: str) -> None:
    assert not any(each in done.out + done.err for each in hidden), done


@pytest.fixture(params=["sign", "encrypt"])
def sealed(request: pytest.FixtureRequest, sqlq_: Command) -> Command:
    """`sqlq` with a key, which seals."""
    sqlq_.environment |= {"SQLQ_KEYS": KEY, "SQLQ_SEAL": request.param}
    return sqlq_


WITHOUT = {"SQLQ_KEYS": "", "SQLQ_SEAL": ""}
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
def test_arguments_and_results_are_shown_with_the_key_alone(sealed: Command) -> None:
    sealed.shop("enqueue", "shop.send", "7", "--kwargs", json.dumps({"note": SECRET}))
    how = "signed" if sealed.environment["SQLQ_SEAL"] == "sign" else "encrypted"
    shown = sealed.ok("show", "1")
    assert SECRET in shown
    assert re.search(rf"sealed +{how} with key [0-9a-f]{{8}}\n", shown)
    sealed.work()
    assert sealed.ok("show", "1").count(SECRET) == 2, "arguments and result"
    assert json.loads(sealed.ok("show", "1", "--json"))["result"] == f"7 False {SECRET}"
    for command in (("show", "1"), ("show", "1", "--json"), ("jobs",), ("jobs", "--json")):
        nothing_of(sealed(*command, env=WITHOUT), SECRET)
    said = sealed("show", "1", env=WITHOUT).out
    assert re.search(rf"arguments +\({how} with key [0-9a-f]{{8}}, which is not here\)\n", said)
    assert re.search(rf"result +\({how} with key [0-9a-f]{{8}}, which is not here\)\n", said)
    sealed.shop("enqueue", "shop.fail", SECRET)
    sealed.work()
    # of what a handler raised a job that fails keeps the text, as it is
    assert SECRET in sealed("show", "2", env=WITHOUT).out


def test_show_reports_a_row_whose_signature_does_not_fit(sealed: Command, engine: Engine) -> None:
    sealed.shop("enqueue", "shop.send", "7")
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET task = 'shop.fail'"))
    assert "does not fit: it was altered, or is of another task or queue" in sealed.ok("show", "1")
    sealed.work()
    shown = sealed.ok("show", "1")
    assert "error (bad_signature)" in shown
    assert "does not fit" in shown


def test_rotate_rewrites_rows_with_the_new_key(sqlq_: Command) -> None:
    sqlq_.environment |= {"SQLQ_KEYS": OLD}
    assert sqlq_.ok("keys").startswith("there are no rows in ")
    for n in range(3):
        sqlq_.shop("enqueue", "shop.send", str(n))
    both = {"SQLQ_KEYS": f"{KEY},{OLD}"}
    assert [each["state"] for each in json.loads(sqlq_.ok("keys", "--json", env=both))] == ["known"]
    assert re.search(r"jobs\.payload +3 +signed +[0-9a-f]{8} +not here", sqlq_.ok("keys", env=WITHOUT))
    unopened = sqlq_("keys", "rotate", "--check", env={"SQLQ_KEYS": KEY})
    assert (unopened.code, unopened.out) == (1, "0 sealed texts opened, 3 did not\n")
    assert unopened.err.count("which this App does not have") == 3
    assert sqlq_.ok("keys", "rotate", env=both) == "sealed anew: 3 in jobs.payload\n"
    assert sqlq_.ok("keys", "rotate", env=both) == (
        "sealed anew: nothing, all is sealed with the first key\n"
    )
    new = {"SQLQ_KEYS": KEY}
    assert sqlq_.ok("keys", "rotate", "--check", env=new) == "3 sealed texts opened, 0 did not\n"
    assert json.loads(sqlq_.ok("keys", "rotate", "--check", "--json", env=new))["opened"] == {
        "jobs.payload": 3
    }
    wrong = sqlq_("keys", "rotate", env={"SQLQ_KEYS": OLD})
    assert (wrong.code, wrong.out) == (1, "sealed anew: nothing\n")
    assert wrong.err.count("which this App does not have") == 3
    failed = sqlq_("keys", "rotate", "--json", env={"SQLQ_KEYS": OLD})
    assert (failed.code, json.loads(failed.out)["bad"]) == (1, 3)


@pytest.mark.parametrize(
    ("keys", "wrong"), [("c2hvcnQ", "SQLQ_KEYS[0] has 5 bytes"), (f"{KEY} ~~~~", "SQLQ_KEYS[1] is no base64")]
)
def test_a_key_that_is_none_is_reported_in_one_sentence(sqlq_: Command, keys: str, wrong: str) -> None:
    for command in (("status",), ("keys", "rotate"), ("doctor",), ("show", "1")):
        done = sqlq_(*command, env={"SQLQ_KEYS": keys})
        assert (
            done.sentence() == f"{wrong}: a key is 32 random bytes in base64, as `sqlq keys new` prints them"
        )
        nothing_of(done, *keys.split())


def test_rotate_without_a_key_is_reported_in_one_sentence(sqlq_: Command) -> None:
    assert sqlq_("keys", "rotate").sentence().startswith("there are no keys: name the App that has them")
    assert sqlq_("keys", "rotate", "--check").sentence().startswith("there are no keys")
    seal = sqlq_("status", env={"SQLQ_SEAL": "encrypt"})
    assert seal.sentence().startswith("SQLQ_SEAL is set, but there is no key")
