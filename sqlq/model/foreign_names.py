"""Names that other job queues have for things: the error for one has the name here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any


class NameOfAnotherQueue:
    """An attribute that other job queues have and this class has not. Its error names the attribute to write
    instead.

    A `__getattr__` would serve as well, but type checkers would then take every name for an attribute.
    """

    def __init__(self, name: str, advice: str) -> None:
        self._name = name
        self._advice = advice

    def __get__(self, instance: Any, owner: type) -> Any:
        named = getattr(instance, "name", None)
        whose = owner.__name__ if named is None else f"the {owner.__name__.lower()} {named}"
        raise AttributeError(f"{whose} has no {self._name!r}: write {self._advice}", name=self._name)

    @classmethod
    def answer(cls, owner: type, advice: Mapping[str, str]) -> None:
        """Have `owner` answer names with advice. A key has the names, with blanks between them."""
        for names, instead in advice.items():
            for name in names.split():
                setattr(owner, name, cls(name, instead))


_OPTIONS = {
    "autoretry_for": "retry_on",
    "countdown": "delay",
    "cron": "schedule",
    "default_retry_delay": "backoff",
    "eta": "available_at",
    "job_id": "unique_key",
    "job_timeout": "timeout",
    "max_retries": "max_attempts",
    "min_backoff": "backoff",
    "queue_name": "queue",
    "rate_limit": "limit",
    "result_ttl": "retention",
    "retries": "max_attempts",
    "retry": "max_attempts",
    "retry_backoff": "backoff",
    "retry_delay": "backoff",
    "throws": "fail_on",
    "time_limit": "timeout",
    "tries": "max_attempts",
    "expires": "start_within",
    "ttl": "start_within",
}
"""Options of other job queues, by the name here."""


def hints(unknown: Iterable[str], known: Collection[str]) -> str:
    """Return what unknown options of other job queues are called among the `known` ones, as the beginning of
    a sentence."""
    names = {name: _OPTIONS[name] for name in unknown if _OPTIONS.get(name, "") in known}
    counts = {"max_attempts": ", which counts the first one"}
    return "".join(f"{name} is {here} here{counts.get(here, '')}; " for name, here in names.items())
