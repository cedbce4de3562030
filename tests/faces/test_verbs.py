"""A new verb is one function in the list of verbs, and one method of a facet."""

from __future__ import annotations

import json
from pathlib import Path

import sqlq
from tests.kit import needs
from tests.kit.command import Command, Done

NEW = Path(__file__).with_name("new_verb.py")


def touched(sqlq_: Command, *words: str) -> Done:
    """Run `sqlq` with the new verb in its list."""
    return sqlq_.python(str(NEW), *words)


@needs("cheap")
def test_a_new_verb_is_a_command_and_is_in_the_audit(sqlq_: Command, app: sqlq.App) -> None:
    send = app.named("send")
    one, two = (job.id for job in app.enqueue_many([send.new(), send.new().set(queue="mail")]))
    assert "  touch       Touch jobs.\n" in touched(sqlq_, "--help").out
    words = touched(sqlq_, "touch", "--help").out
    assert "Usage: sqlq touch [OPTIONS] [IDS]..." in words
    assert "--queue TEXT   Jobs of this queue.\n" in words
    assert "--by DURATION  How much.\n" in words
    assert touched(sqlq_, "touch", "--queue", "mail").out == f"touched 1 job in queue mail: {two}\n"
    done = touched(sqlq_, "touch", str(one), "99", "--by", "2h", "--json")
    assert (done.code, json.loads(done.out)) == (1, {"touched": [one], "not_touched": [99]})
    assert done.err == "sqlq: job 99: there is no such job\n"
    assert touched(sqlq_, "touch").misuse() == "name the jobs, or give --queue"
    rows = [(row.action, row.target, row.number) for row in app.audit.list()]
    assert rows == [("touch", f"touch {one} 99 --by 2h", 1), ("touch", "touch --queue mail", 1)]


@needs("cheap")
def test_a_new_verb_is_a_button_of_the_dashboard(sqlq_: Command, app: sqlq.App) -> None:
    app.enqueue_many([app.named("send").new()] * 2)
    done = touched(sqlq_, "dashboard")
    assert (done.code, done.out) == (0, ""), done
    assert [row.target for row in app.audit.list(actor="ada")] == ["touch 1 --by 2h", "touch 1 2"]
