"""The verbs on jobs, by their list: which jobs each changes, how many at a time, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sqlq.admin.batches import watched
from sqlq.admin.verbs import VERBS
from sqlq.errors import ConfigurationError
from sqlq.model.outcome import Finished, Outcome
from sqlq.store.jobs import lookup, operate
from tests.kit import BOOM, Hand, for_each

pytestmark = pytest.mark.each_database

ACTS_ON: dict[str, Outcome] = {"retry": BOOM, "delete": BOOM, "replay": Finished()}
"""The outcome of the jobs that a verb is for; the other verbs are for jobs that wait."""
each_verb = pytest.mark.parametrize(
    "verb", [words for words, verb in VERBS.items() if verb.is_of_jobs and verb.selectors]
)


def ready(hand: Hand, verb: str, count: int = 1, task: str = "send", **options: Any) -> list[int]:
    """Make jobs that a verb is for."""
    if verb in ACTS_ON:
        return hand.ended(count, ACTS_ON[verb], task, **options)
    return hand.enqueue(count, task, **options)


def changed(hand: Hand, verb: str, **options: Any) -> list[int]:
    """Do it, and return the ids that the answer reports as changed."""
    answer = getattr(hand.app.jobs, verb)(**options)
    if isinstance(answer, dict):
        return [id for id, effect in answer.items() if effect == "cancelled" or isinstance(effect, int)]
    return list(answer)


@each_verb
def test_a_verb_changes_the_jobs_that_fit_all_that_is_given(hand: Hand, verb: str) -> None:
    sent = ready(hand, verb, 3)
    packed = ready(hand, verb, 2, "pack")
    boxes = ready(hand, verb, 2, "pack", queue="boxes")
    (imported,) = ready(hand, verb, batch="import")
    others = {*sent, *packed, *boxes}
    for options, ids in (
        ({"ids": [sent[0], 4711]}, sent[:1]),
        ({"ids": [*sent, *packed], "task": "pack", "queue": "default"}, packed),
        ({"ids": boxes, "batch": "import"}, []),
        ({"batch": "import"}, [imported]),
        ({"task": "pack", "queue": "boxes"}, boxes),
        ({"task": "nothing"}, []),
        ({"queue": "nowhere"}, []),
    ):
        assert changed(hand, verb, **options) == ids, options
        others -= {*ids}
    everything = [*sent, *packed, *boxes, imported] if verb == "reschedule" else sorted(others)
    assert changed(hand, verb, all=True) == everything, "which moves what waits as often as it is told"


@each_verb
def test_a_verb_works_in_batches_and_leaves_newer_jobs(
    hand: Hand, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((lookup, "BATCH"), (operate, "BATCH"), (operate, "CARRIED_BATCH")):
        monkeypatch.setattr(module, name, 3)
    ids, late = ready(hand, verb, 7), list[int]()

    def see(_: int) -> bool:
        if len(late) < 5:
            late.extend(ready(hand, verb, queue="late"))
        return True

    with watched(see):
        assert changed(hand, verb, all=True) == ids
    assert len(late) >= 3, "one after each batch"
    assert changed(hand, verb, ids=late) == late, "none of them was touched"


@each_verb
@for_each(
    ("options", "says"),
    [
        ({}, "name the .*jobs that are meant"),
        ({"ids": []}, "name the .*jobs that are meant"),
        ({"ids": [1], "all": True}, "or all of them, and not both"),
        ({"ids": "7"}, "ids is '7'|give a list"),
        ({"ids": [1, "2"]}, "'2' is not the id of a job"),
        ({"ids": [1, True]}, "True is not the id of a job"),
        ({"ids": [1], "task": ""}, "task is '': it must be text"),
        ({"queue": "a\0b"}, "NUL"),
        ({"queue": "x" * 256}, "queue has 256 characters"),
        ({"batch": ""}, "batch is ''"),
        ({"batch": 7}, "batch is 7"),
    ],
)
def test_a_verb_refuses_a_choice_in_a_sentence(
    hand: Hand, verb: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as refusal:
        changed(hand, verb, **options)
    assert "\n" not in str(refusal.value)
