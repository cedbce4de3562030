"""How long a worker's loop waits for one answer of its database."""

from __future__ import annotations

from sqlq.database.timeouts import AnswerTimeout


def test_the_timeout_grows_with_slow_answers_up_to_its_maximum() -> None:
    patience = AnswerTimeout(4.0, 20.0)
    assert patience.seconds() == float("inf"), (
        "outside of the block there is no end: a migration may take its time"
    )
    with patience:
        assert patience.seconds() == 4.0
        patience.gave_up()
        assert patience.seconds() == 8.0
        patience.gave_up()
        patience.gave_up()
        assert patience.seconds() == 20.0
        patience.start_over()
        assert patience.seconds() == 4.0
    assert patience.seconds() == float("inf")
