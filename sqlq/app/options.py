"""Options in layers: first those of the call, then of the task, the queue and the App, then sqlq's own.

The App's layer is its argument `defaults`, then the environment (SQLQ_TIMEOUT and the like), then
`[tool.sqlq.defaults]` in pyproject.toml. A queue's is the argument `queues`, then `[tool.sqlq.queues.NAME]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from sqlq.config import pyproject
from sqlq.config.constants import DEFAULT_QUEUE
from sqlq.config.durations import Duration
from sqlq.errors import ConfigurationError
from sqlq.model.backoff import backoff_from
from sqlq.model.checks import FOR_EVER_MS, checked_bool, checked_queue, checked_word
from sqlq.model.foreign_names import hints
from sqlq.model.job_options import JOB_OPTIONS, checked_retention
from sqlq.payload import headers
from sqlq.payload.encryption import Encryption, How

Check = Callable[[Any, str], object]


OPTIONS: Mapping[str, Check] = {
    **{name: option.fields for name, option in JOB_OPTIONS.items()},
    "backoff": lambda value, _: backoff_from(value),
    "headers": lambda value, source: headers.encode(headers.checked(value, source), f"the {source}"),
}
"""The options that have defaults, each with a function that refuses a wrong value."""

VARIABLES: Mapping[str, Callable[[str], Any]] = {
    "max_attempts": lambda text: int(text) if text.strip().isdigit() else text,
    "timeout": lambda text: None if text.strip().lower() == "none" else text,
    "backoff": lambda text: [part.strip() for part in text.split(",")] if "," in text else text,
}
"""Those that an operator may set by variables of the environment, SQLQ_TIMEOUT and so on."""

RETENTION = "7d"
QUEUE_OPTIONS = {name: check for name, check in OPTIONS.items() if name != "queue"} | {
    "order": partial(checked_word, choice=Literal["fifo", "lifo"])
}
"""Those of queues, which alone have an order in which workers of this App claim from them."""


class Defaults:
    """The defaults of an App for options that jobs and tasks do not set."""

    def __init__(
        self,
        defaults: Mapping[str, Any] | None = None,
        queues: Mapping[str, Mapping[str, Any]] | None = None,
        service: str | None = None,
    ) -> None:
        """A `service` is the default queue where no layer sets one. Raises `ConfigurationError` for an
        unknown option, or a value out of range."""
        self._app: dict[str, Any] = {} if service is None else {"queue": service}
        self._queues: dict[str, dict[str, Any]] = {}
        if (project := pyproject.find()) is not None:
            self._app |= _checked(project.defaults, f"{project.file}: {pyproject.DEFAULTS}")
            self._add_queues(project.queues, f"{project.file}: {pyproject.QUEUES}", ".{}")
        for option, read in VARIABLES.items():
            name = f"SQLQ_{option.upper()}"
            if text := os.environ.get(name):
                self._app |= _checked({option: read(text)}, name)
        self._app |= _checked(defaults or {}, "defaults")
        self._add_queues(queues or {}, "queues", "[{!r}]")
        self.queue = str(self._app.get("queue", DEFAULT_QUEUE))
        """The queue of jobs that name none."""
        self.queues = frozenset(self._queues)
        """The queues with options."""

    def _add_queues(self, queues: Any, source: str, item: str) -> None:
        """Add options of queues; `item` is how messages name those of one."""
        if not isinstance(queues, Mapping):
            raise ConfigurationError(
                f"{source} is {queues!r}: it maps names of queues to their options, as in "
                "{'mail': {'timeout': '30s'}}"
            )
        for name, options in queues.items():
            known = self._queues.setdefault(checked_queue(name), {})
            known |= _checked(options, source + item.format(name), QUEUE_OPTIONS)

    @property
    def newest_first(self) -> frozenset[str]:
        """The queues whose newest job comes first, within a priority."""
        return frozenset(name for name, options in self._queues.items() if options.get("order") == "lifo")

    def over(self, options: Mapping[str, Any], queue: str | None = None) -> dict[str, Any]:
        """Return the options of a task, over those of its queue and of the App. With `queue` that takes the
        place of its queue."""
        home = queue or options.get("queue") or self.queue
        merged: dict[str, Any] = {**self._app, **self._queues.get(home, {}), **options}
        if "headers" in merged:  # they come together, and each name is looked for from the top
            layers = (self._app, self._queues.get(home, {}), options)
            merged["headers"] = {
                name: value for layer in layers for name, value in (layer.get("headers") or {}).items()
            }
        if queue is not None:
            merged["queue"] = queue
        merged.pop("order", None)  # which is for workers
        return merged


def _checked(options: Any, source: str, known: Mapping[str, Check] = OPTIONS) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            f"{source} is {options!r}: it maps options to values, as in {{'timeout': '5m'}}"
        )
    for option, value in options.items():
        if option not in known:
            raise ConfigurationError(
                f"{source} has no option {option!r}; {hints([option], known)}it has {', '.join(known)}"
            )
        try:
            known[option](value, option)
        except ConfigurationError as error:
            raise ConfigurationError(f"{source}: {error}") from None
    return dict(options)


DirectCalls = Literal["allow", "warn", "refuse"]
"""How a task takes a call as a function: in silence, with a warning, or not at all."""
checked_eager = partial(checked_bool, more=", as a variable 1 or 0")


def is_eager(argument: bool | None = None) -> bool:
    """Return whether jobs run in the process that enqueues them: the argument, else SQLQ_EAGER, else `eager`
    in [tool.sqlq], else not. Raises `ConfigurationError` for any other value."""
    source, value = pyproject.setting(argument, "eager", "SQLQ_EAGER", "eager")
    if source == "SQLQ_EAGER" and isinstance(value, str):
        value = {"1": True, "0": False}.get(value, value)
    return value is not None and checked_eager(value, source)


def retention_ms(argument: Duration | None) -> int | None:
    """Return how long finished jobs without a retention are kept, None for ever. It is the argument, else
    SQLQ_RETENTION, else `retention` in [tool.sqlq], else 7 days."""
    source, value = pyproject.setting(argument, "retention", "SQLQ_RETENTION", "retention")
    ms = checked_retention(RETENTION if value is None else value, source)
    return None if ms == FOR_EVER_MS else ms


def encryption_of(keys: Any = None, how: Any = None, plain: Any = None) -> Encryption | None:
    """Return the encryption of an App, by its arguments or else SQLQ_KEYS, SQLQ_ENCRYPTION and SQLQ_PLAIN;
    None without keys. Raises `ConfigurationError` for values that cannot be, and repeats nothing of a key."""
    keys_name, keys = pyproject.setting(keys, "keys", "SQLQ_KEYS")
    if keys_name == "SQLQ_KEYS":
        keys = (keys or "").replace(",", " ").split()
    elif not isinstance(keys, (list, tuple)):
        raise ConfigurationError(
            f"{keys_name} is no list: give the keys in one, the one that writes first, as in [new, old]"
        )
    how_name, how = pyproject.setting(how, "encryption", "SQLQ_ENCRYPTION")
    plain_name, plain = pyproject.setting(plain, "plain", "SQLQ_PLAIN")
    if not keys:
        for name, value in ((how_name, how), (plain_name, plain)):
            if value is not None:  # guard: no-encryption-without-a-key
                raise ConfigurationError(
                    f"{name} is set, but there is no key: give keys or SQLQ_KEYS what `sqlq keys new` prints"
                )
        return None
    how = "sign" if how is None else checked_word(how, how_name, choice=How)
    if plain is None:
        plain = "accept" if how == "read" else "refuse"
    elif how == "read" and plain != "accept":
        raise ConfigurationError(
            f'{plain_name} is {plain!r}, but with encryption="read" this App itself writes plain rows: '
            "leave it out"
        )
    elif isinstance(plain, (list, tuple)):
        plain = tuple(map(checked_queue, plain))
    elif plain not in ("accept", "refuse"):
        raise ConfigurationError(
            f'{plain_name} is {plain!r}: it is "accept", "refuse", or in the App a list of the queues whose '
            "plain rows are accepted"
        )
    return Encryption(keys, how, plain, keys_name)
