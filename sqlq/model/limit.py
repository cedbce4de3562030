"""Limits: how many jobs of a key may run at a time, how many may start in a period, and in which order. Their
enforcement is in `store.limits`.

A limit is on a key. The key is text: the same for all jobs of a task, or made from the arguments of each. So
each customer can have a waiting list of its own. Limits of one key are one limit, whichever tasks have it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from string import Formatter
from typing import Any, Literal

from sqlq.config.durations import ago, compact, milliseconds, span, until
from sqlq.config.json_text import AsJson
from sqlq.errors import ArgumentsError, ConfigurationError, EnqueueError
from sqlq.model.checks import Rule, checked_name, checked_whole, checked_word, refusing_by
from sqlq.payload.signatures import signature_of

Key = str | Callable[..., str]
OnFailure = Literal["continue", "hold"]

RUNNING_LIMIT = 1_000_000
_RATE = re.compile(r"\s*([0-9]{1,20})\s*/(.+)", re.DOTALL)


class _Filling(Formatter):
    """Fills a key in, but for None: all jobs without a customer would wait in one line, as one of its own."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:  # guard: none-makes-no-key
            raise ValueError(f"{field_name} is None, and would share a line with others that are")
        return value, first


@dataclass(frozen=True)
class Limit:
    """At most `running` jobs of a key at a time, over all workers; or no more than a `rate`; or both.

    - `key`: text, a template of the arguments as in "customer:{customer_id}", or a function of them.
    - `running`: the most jobs that run at a time.
    - `rate`: a number of starts in a period, as in "100/1m"; they are spread evenly, here one each 0.6 s.

    Each text that a key becomes has its own limit. No period of a rate's length, wherever it begins, has more
    starts. A job over the limit is blocked, and holds no slot of a worker. A job that waits for its next
    attempt does not count as running. Raises `ConfigurationError` for a value out of range.

    >>> Limit("stripe", running=5)
    Limit(key='stripe', running=5, rate=None)
    """

    key: Key
    running: int | None = None
    rate: str | None = None

    def __post_init__(self) -> None:
        _check_key(self)
        if self.running is None and self.rate is None:
            raise ConfigurationError(
                f"the limit {self.key!r} says nothing: give running=, rate= or both, as in "
                'sqlq.Limit("stripe", running=5, rate="100/1m")'
            )
        rule_of(self)


@dataclass(frozen=True)
class Serial:
    """One job of a key at a time, in the order in which they were enqueued, retries included. While one waits
    for its next attempt, those after it wait, too.

    - `key`: as in `sqlq.Limit`.
    - `on_failure`: after a failure for good the next job goes on, or with "hold" waits for its retry or end.

    The order is that of ids, among committed jobs. Raises `ConfigurationError` for another word.

    >>> Serial("account:{id}")
    Serial(key='account:{id}', on_failure='continue')
    """

    key: Key
    on_failure: OnFailure = "continue"

    def __post_init__(self) -> None:
        _check_key(self)
        checked_word(self.on_failure, "on_failure", choice=OnFailure)


AnyLimit = Limit | Serial


# -- what a limit means --------------------------------------------------------------------------------------


def rule_of(limit: AnyLimit) -> Rule:
    """Return the rule of a limit. Raises `ConfigurationError` for a number or rate that cannot be."""
    if isinstance(limit, Serial):
        return Rule(max_running=1, in_order=True, holds=limit.on_failure == "hold")
    running = limit.running
    if running is not None:
        running = checked_whole(running, "running", range(1, RUNNING_LIMIT + 1))
    return Rule(running, *((None, None) if limit.rate is None else checked_rate(limit.rate)))


def plain_key(limit: AnyLimit) -> str | None:
    """Return the key that is the same for all jobs; None where each job's arguments make its own."""
    return None if callable(limit.key) or any(_fields(limit.key)) else limit.key.format()


def checked_limit(limit: Any, label: str) -> tuple[str, Rule | None]:
    """Return key and rule of the limit of a single job. Raises `ConfigurationError` for anything but a limit
    whose key is plain text: arguments are JSON by then."""
    if isinstance(limit, str):
        return checked_name(limit, label), None
    if not isinstance(limit, AnyLimit):
        raise ConfigurationError(
            f'limit is {limit!r}: give a limit, as in limit=sqlq.Limit("stripe", running=5), or the name of '
            "one that app.limit has declared"
        )
    if (key := plain_key(limit)) is None:
        raise ConfigurationError(
            f"the key of {limit!r} is made from arguments: .set(limit=…) takes a key as text, as in "
            'sqlq.Limit(f"customer:{id}", …)'
        )
    return key, rule_of(limit)


def suits(limit: Limit, handler: Callable[..., Any]) -> bool:
    """Whether a handler has all the parameters that the limit's key names."""
    names = signature_of(handler).parameters.keys()
    return isinstance(limit.key, str) and names >= set(_fields(limit.key))


def check_parameters(limit: AnyLimit, task: str, signature: inspect.Signature) -> None:
    """Raise `ConfigurationError` where the key names anything but parameters of the task's handler."""
    if callable(limit.key):
        return
    parameters = signature.parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name in _fields(limit.key):
        if name not in names and not (takes_any and name.isidentifier()):
            raise ConfigurationError(
                f"{task}: the key {limit.key!r} of its limit names {name or '{}'!r}, and its parameters "
                f"are {', '.join(names) or 'none'}"
            )


def key_for(
    limit: AnyLimit, task: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the key of a job with these arguments, which fit the signature. Raises `ArgumentsError` where
    they make none."""
    label = f"{task}: the key of its limit"
    if callable(limit.key):
        key = limit.key(*args, **kwargs)
    else:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            key = _Filling().vformat(limit.key, (), {**bound.arguments, **bound.kwargs})
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise ArgumentsError(f"{label} cannot be made from {limit.key!r}: {error!r}") from None
    with refusing_by(ArgumentsError):
        return checked_name(key, label)


class DeclaredLimits(dict[str, AnyLimit]):
    """The limits of an App by their names, which are their keys as they are written."""

    def add(self, limit: AnyLimit) -> AnyLimit:
        """Register a limit, and return it. Raises `ConfigurationError` where one of the same key differs:
        which one counted would be a matter of luck."""
        if isinstance(limit.key, str):
            known = self.setdefault(limit.key, limit)
            if known != limit:
                raise ConfigurationError(
                    f"two limits of the key {limit.key!r} differ: {known!r} and {limit!r}; declare it once, "
                    "and use what that returns"
                )
        return limit

    def find(self, limit: Any) -> AnyLimit:
        """Return the limit that a task's option means. Raises `ConfigurationError`."""
        if isinstance(limit, AnyLimit):
            return limit
        if isinstance(limit, str) and limit in self:
            return self[limit]
        known = f"; declared are {', '.join(sorted(self))}" if self else ""
        raise ConfigurationError(
            f"limit is {limit!r}: give a sqlq.Limit or sqlq.Serial, or the name of one that app.limit has "
            f"declared before{known}"
        )

    def check_key(self, key: str) -> None:
        """Raise `ConfigurationError` for a key as a limit has it that is made from arguments: each job has
        another one."""
        if key in self and self.declared(key) is None:  # guard: a-template-is-no-key
            raise ConfigurationError(
                f"the key {key!r} is made from arguments: name the key that those of a job have made, as "
                f"{re.sub(r'{[^{}]*}', '42', key)!r}"
            )

    def declared(self, key: str) -> Rule | None:
        """Return the rule of a key's limit, where the key alone determines it."""
        limit = self.get(key)
        return rule_of(limit) if limit is not None and plain_key(limit) is not None else None

    def rule_of(self, key: str, rule: Rule | None) -> Rule | None:
        """Return the rule of a job's limit; None where nobody has declared it. Raises `EnqueueError` where
        two differ."""
        declared = self.declared(key)
        if rule is not None and declared is not None and rule != declared:
            raise EnqueueError(
                f"the limit of a job differs from the one declared for the key {key!r}, "
                f"{rule_text(declared)}: use that, as in .set(limit={key!r})"
            )
        return rule or declared


def checked_rate(value: Any) -> tuple[int, int]:
    """Return the number of starts and the length of the period in milliseconds."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        number, period = int(match[1]), match[2].strip()
        ms = milliseconds(period if period[:1].isdigit() else f"1{period}", f"the period of rate {value!r}")
        if 1 <= number <= RUNNING_LIMIT and ms:
            return number, ms
    raise ConfigurationError(
        f"rate is {value!r}: it is a number of starts and a period, neither zero, as in "
        f'"100/1m"; the number is {RUNNING_LIMIT:,} at most'
    )


def rule_text(rule: Rule | LimitStatus) -> str:
    """Return a rule in words: "5 running, 100/1m"."""
    parts = []
    if rule.in_order:
        parts.append("in order, held by failures" if rule.holds else "in order")
    elif rule.max_running is not None:
        parts.append(f"{rule.max_running} running")
    if rule.rate is not None and rule.period_ms is not None:
        parts.append(f"{rule.rate}/{compact(rule.period_ms)}")
    return ", ".join(parts) or "no limit"


def _check_key(limit: AnyLimit) -> None:
    if callable(limit.key):
        return
    checked_name(limit.key, "the key of a limit")
    try:
        list(_fields(limit.key))
    except ValueError as error:
        raise ConfigurationError(
            f"the key {limit.key!r} of a limit is no template: {error}; a brace is written {{{{ or }}}}"
        ) from None


def _fields(template: str) -> Iterator[str]:
    """Yield the names of the arguments that a template takes, without their attributes and items."""
    for _, field, form, _ in Formatter().parse(template):
        if field is not None:
            yield re.split(r"[.\[]", field, maxsplit=1)[0]
            yield from _fields(form or "")


@dataclass(frozen=True, slots=True)
class LimitStatus(AsJson):
    """A key of a limit, and its rule. `running` jobs hold a slot. `waiting` jobs are in its line, and the
    oldest of them could run since `oldest_due_at`. With a rate, the next one may start in
    `next_start_seconds`. `set_at` is when an operator overrode the limit. No job starts before
    `closed_until`. There may be more in line where it `is_capped`. Its rule `is_known` once a worker has
    looked at the key."""

    COLUMNS = (
        "key",
        "limit=says",
        "running",
        "waiting",
        "oldest due=oldest_due_at",
        "next start=next_start",
        "set",
        "opens",
    )
    key: str
    max_running: int | None
    rate: int | None
    period_ms: int | None
    in_order: bool
    holds: bool
    running: int
    waiting: int
    is_capped: bool
    oldest_due_at: datetime | None
    next_start_seconds: float | None
    set_at: datetime | None
    closed_until: datetime | None = None
    is_known: bool = True

    @property
    def says(self) -> str:
        """The rule of the key in words: "5 running, 100/1m"."""
        return rule_text(self) if self.is_known else "as its jobs say, once a worker looks"

    @property
    def capped(self) -> tuple[str, ...]:
        """The counts that were not brought to an end."""
        return ("waiting",) if self.is_capped else ()

    @property
    def next_start(self) -> str | None:
        return None if self.next_start_seconds is None else f"in {span(self.next_start_seconds)}"

    @property
    def set(self) -> str | None:
        return None if self.set_at is None else f"by an operator {ago(self.set_at)}"

    @property
    def opens(self) -> str | None:
        return None if self.closed_until is None else until(self.closed_until)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "says": self.says}
