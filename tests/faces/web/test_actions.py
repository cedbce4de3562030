"""The forms act as the command line does."""

from __future__ import annotations

import html
import threading
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

import sqlq
from sqlq.admin import batches
from sqlq.admin.verbs import VERBS
from sqlq.model.job import State
from sqlq.model.outcome import Finished
from sqlq.store.workers import workers
from sqlq.web import actions
from tests.kit import claim_on, end, failed, wait_until
from tests.kit.visitor import Visitor

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "retry": ({"id": "failed"}, "retried 1 job: "),
    "cancel": ({"id": "waiting"}, "cancelled 1 job: "),
    "reschedule": ({"id": "later", "delay": "2h"}, "rescheduled 1 job: "),
    "delete": ({"id": "deleted"}, "deleted 1 job: "),
    "replay": ({"id": "finished"}, "replayed 1 job as "),
    "flows skip": ({"id": "step"}, "skipped step "),
    "queues pause": ({"name": "default", "duration": "10m"}, "paused default for 10m."),
    "queues resume": ({"name": "default"}, "resumed default."),
    "workers pause": ({"name": "box"}, "asked box pid 7 to pause"),
    "workers resume": ({"name": "box"}, "asked box pid 7 to resume"),
    "workers restart": ({"name": "box"}, "asked box pid 7 to restart"),
    "workers stop": ({"name": "box"}, "asked box pid 7 to stop"),
    "schedules pause": ({"name": "nightly"}, "paused nightly."),
    "schedules resume": ({"name": "nightly"}, "resumed nightly."),
    "schedules run": ({"name": "nightly"}, "enqueued job "),
    "schedules remove": ({"name": "nightly"}, "removed nightly."),
    "limits set": ({"name": "stripe", "running": "2"}, "2 running"),
    "limits clear": ({"name": "stripe"}, "until a job is enqueued"),
    "limits close": ({"name": "stripe", "until": "10m"}, "stripe: closed; it opens in "),
    "limits open": ({"name": "stripe"}, "stripe: open, "),
    "audit stop": ({"name": "1"}, "action 1 has ended, or stops already"),
}
"""The form of each verb, and the sentence of the next page. The ids are those of jobs by these names."""


@pytest.fixture
def shop(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> sqlq.App:
    monkeypatch.setattr(actions, "ANSWER_SECONDS", 60.0)
    app.task(name="send", max_attempts=1)(lambda n=0: None)
    return app


def enqueue(app: sqlq.App, number: int = 1, **options: Any) -> list[int]:
    new = [app.named("send").new(i).set(**options) for i in range(number)]
    return [job.id for job in app.enqueue_many(new)]


def test_each_verb_that_has_a_button_is_done_by_its_form(shop: sqlq.App) -> None:
    enqueue(shop, 3)
    jobs = dict(zip(("failed", "deleted"), end(shop, failed(), 2), strict=True))
    (jobs["finished"],) = end(shop, Finished())
    (jobs["waiting"],), (jobs["later"],) = enqueue(shop), enqueue(shop, delay="1h")
    new = shop.named("send").new()
    jobs["step"] = shop.enqueue(sqlq.chain(new, new)).jobs[1].id
    shop.schedules.add("nightly", shop.tasks["send"].new(), cron="@daily")
    shop.limits.set("stripe", running=5)
    with shop.database.begin() as conn:
        workers.register(conn, id="w", host="box", pid=7, version="0", queues=None, concurrency=1)
    assert FORMS.keys() == {words for words, verb in VERBS.items() if verb.button}
    admin = Visitor(shop)
    for words, (form, said) in FORMS.items():
        form = {**form, "id": jobs[form["id"]]} if "id" in form else form
        sure = {"confirmed": "yes"} if VERBS[words].asks else {}
        assert said in admin.done(words, **form, **sure), words
    rows = shop.audit.list(limit=len(FORMS), actor="ada")
    assert [row.action for row in reversed(rows)] == list(FORMS)
    states = {name: str(shop.jobs.get(id).state) for name, id in jobs.items() if name != "deleted"}
    assert (states["failed"], states["waiting"], states["later"]) == ("available", "cancelled", "scheduled")


def test_all_matching_jobs_are_changed_after_a_confirmation(shop: sqlq.App) -> None:
    for number, options in ((60, {"label": "red"}), (4, {})):
        enqueue(shop, number, **options)
    end(shop, failed("box 1 is gone"), 64)
    enqueue(shop)
    end(shop, failed("no van"))
    error = max(shop.jobs.failures()[0], key=lambda group: group.number).fingerprint
    admin = Visitor(shop)
    for option, value, number in (("label", "red", 60), ("error", error, 4)):
        form: dict[str, Any] = {"matching": "yes", option: value}
        page, answer = admin.asked("retry", **form)
        assert f"<b>{number} failed jobs with the {option} {value}</b> would be acted on" in page
        assert f"sqlq retry --{option} {value}" in page
        assert "id" not in answer
        enqueue(shop, 1, label="red", queue="later")
        end(shop, failed("box 2 is gone"), 1, queue="later")
        assert f"retried {number + 1} jobs with the {option} {value}" in admin.done("retry", **answer)
        action = shop.audit.list()[0]
        assert (action.target, action.number) == (f"retry --{option} {value}", number + 1)
        assert "nothing was done" in admin.done("retry", **form)
    assert len(shop.jobs.list(state="failed")) == 1


def test_an_action_on_many_jobs_goes_on_behind_its_answer(
    shop: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(shop, 350)
    end(shop, failed(), 350)
    stopped, may_proceed = threading.Event(), batches.may_proceed

    def slow(changed: int) -> bool:
        may_go_on = may_proceed(changed)
        assert stopped.wait(300)
        return may_go_on

    monkeypatch.setattr(batches, "may_proceed", slow)
    monkeypatch.setattr(actions, "ANSWER_SECONDS", 0.01)
    admin = Visitor(shop)
    _, answer = admin.asked("retry", matching="yes", state="failed", queue="default")
    assert "Retry goes on, and each page shows how far it came." in admin.done("retry", **answer)
    (action,) = wait_until(lambda: [each for each in shop.audit.list() if each.number])
    admin.site.reading.forget()
    page = admin.page("/jobs")
    assert "<b>100</b> until now" in page
    assert 'title="the command line that does the same">retry --queue default</code>' in page
    assert "stops after its batch" in admin.done("audit stop", name=action.id)
    assert "stopping" in admin.page("/audit")
    stopped.set()
    wait_until(lambda: [each.state for each in shop.audit.list()] == ["ended", "stopped"])
    assert len(shop.jobs.list(state="failed", limit=350)) == 150
    assert shop.audit.list()[-1].number == 200
    assert "stopped" in admin.page("/audit")


def test_an_action_on_a_filter_keeps_to_the_state_of_the_tab(shop: sqlq.App) -> None:
    enqueue(shop, 4)
    end(shop, failed(), 1)
    end(shop, Finished(), 1)
    shop.jobs.cancel(enqueue(shop, 1))
    enqueue(shop, 2, delay="1h")
    enqueue(shop, 2, limit=sqlq.Limit("stripe", running=1))
    with shop.database.begin() as conn:
        claim_on(conn, limit=1, owner="w")
    admin = Visitor(shop)
    tried = set()
    for state in State:
        chosen = [job.id for job in shop.jobs.list(state=state)]
        for words in (words for words, verb in VERBS.items() if state in verb.states and verb.is_of_jobs):
            page, answer = admin.asked(words, state=state, matching="yes")
            assert f"<b>{len(chosen)} {state} job" in page or f"({len(chosen)} {state})" in page
            assert ("id" in answer) == (VERBS[words].filter_of({}) is None)
            tried.add(state)
    assert tried == {*State}, "each state has a job and a verb"
    assert "nothing was done" in admin.done("cancel", state="failed", matching="yes")
    page, answer = admin.asked("cancel", state="scheduled", matching="yes")
    assert "sqlq cancel --state scheduled" in page
    before = shop.jobs.list()
    assert "cancelled 2 jobs that are scheduled: " in admin.done("cancel", **answer)
    changed = [old.state for new, old in zip(shop.jobs.list(), before, strict=True) if new.state != old.state]
    assert changed == ["scheduled"] * 2


def test_a_confirmed_action_leaves_alone_what_has_changed_since(shop: sqlq.App) -> None:
    ids = enqueue(shop, 3, delay="1h")
    admin = Visitor(shop)
    page, answer = admin.asked("cancel", state="scheduled", id=ids)
    assert "<b>3</b> jobs would be acted on (3 scheduled)" in page
    shop.jobs.reschedule(ids[:1])
    said = admin.done("cancel", **answer)
    assert "cancelled 2 jobs: " in said
    assert "; 1 job stayed as before." in said
    assert shop.jobs.get(ids[0]).state == "available"
    shop.jobs.retry(all=True)
    assert "nothing was done" in admin.done("cancel", **{**answer, "id": ids[:1]})
    assert "nothing was done" in admin.done("cancel", state="failed", id=ids[:1], confirmed="yes")


def test_a_filter_is_counted_even_in_a_confirmed_form(shop: sqlq.App) -> None:
    ids = enqueue(shop, 2)
    answer = Visitor(shop).send("cancel", matching="yes", confirmed="yes")
    assert "<b>2 available jobs</b> would be acted on" in answer.text
    assert [shop.jobs.get(id).state for id in ids] == ["available"] * 2


def test_a_filter_is_confirmed_when_it_cannot_be_counted_in_time(shop: sqlq.App) -> None:
    def slow(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "count(*)" in statement and "label" in statement:
            raise OperationalError(statement, {}, Exception("canceling statement due to statement timeout"))

    enqueue(shop, 2, label="red")
    admin = Visitor(shop)
    engine = admin.site.reading.own.database.engine
    event.listen(engine, "before_cursor_execute", slow)
    page, answer = admin.asked("cancel", label="red", matching="yes")
    event.remove(engine, "before_cursor_execute", slow)
    assert "<b>All jobs with the label red</b> would be acted on" in page
    assert "canceling statement due to statement timeout" in page
    assert "cancelled 2 jobs" in admin.done("cancel", **answer)


@pytest.mark.parametrize(
    ("verb", "form", "status", "said"),
    [
        ("explode", {}, 400, "there is no action 'explode' here"),
        ("retry", {"id": "x"}, 400, "the id is 'x': give a whole number"),
        ("workers stop", {"name": "nobody", "confirmed": "yes"}, 400, "no worker that is alive is called"),
        ("schedules run", {"name": "nope"}, 400, "nope"),
        ("limits set", {"name": "k", "rate": "often"}, 400, "rate"),
        ("queues pause", {"name": "default", "duration": "a while"}, 400, "duration"),
        ("retry", {"flow": "99"}, 404, "no flow 99"),
    ],
)
def test_a_form_is_refused_in_one_sentence_when_it_is_wrong(
    shop: sqlq.App, verb: str, form: dict[str, Any], status: int, said: str
) -> None:
    answer = Visitor(shop).send(verb, **form)
    assert answer.status_code == status
    assert said in html.unescape(answer.text)
