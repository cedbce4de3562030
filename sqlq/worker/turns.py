"""Which queue comes first in the next claim, where queues have turns by weights and not an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlq.errors import ConfigurationError

LARGEST_WEIGHT = 1_000


def checked_weights(weights: Mapping[Any, Any]) -> dict[str, int]:
    """Return the weights of queues. Raises `ConfigurationError` for what is no whole number in range."""
    for name, weight in weights.items():
        whole = isinstance(weight, int) and not isinstance(weight, bool)
        if not whole or not 1 <= weight <= LARGEST_WEIGHT:
            raise ConfigurationError(
                f"queues[{name!r}] is {weight!r}: a weight is a whole number from 1 to {LARGEST_WEIGHT:,}"
            )
    return dict(weights)


class Turns:
    """Gives queues turns by their weights, evenly mixed: a queue of weight 3 beside one of weight 1 comes
    first in three of four claims. What it leaves of a claim is for the others, in the order of their next
    turns."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self._credit = dict.fromkeys(weights, 0)

    def order(self, names: Sequence[str]) -> list[str]:
        """Return these queues in the order for the next claim. A queue that is not among them has no turn,
        and saves none up."""
        for name in names:
            self._credit[name] += self._weights[name]
        ordered = sorted(names, key=lambda name: -self._credit[name])  # of equals the first named
        if ordered:
            self._credit[ordered[0]] -= sum(self._weights[name] for name in names)
        return ordered
