"""Encryption: payloads and results that the database holds signed or encrypted, under keys that it does not
have.

    {"signature": "s1.3f9a2c41.<signature>", "text": {"args": [7]}}    signed: all can read it
    {"signature": "e1.3f9a2c41.<signature>", "text": "<ciphertext>"}   encrypted: who has the key can read it

The signature covers the text, the kind (a payload or a result), the task and the queue. So a row cannot be
passed off as another task's. It does not cover the id of a job: a row that was signed or encrypted once can
be written again. `docs/encryption.md` has the consequences, and the rest that is not covered.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

from sqlq.errors import ConfigurationError, PayloadKeyError

Kind = Literal["payload", "result"]
How = Literal["sign", "encrypt", "read"]
"""`read` opens signed and encrypted rows, and writes plain ones: the first step on the way to signed or
encrypted rows."""
Plain: TypeAlias = "Literal['accept', 'refuse'] | Sequence[str]"
"""Whether plain rows are accepted or refused; or the queues whose plain rows are accepted."""

HEAD = '{"signature": "'
"""The beginning of each signed or encrypted payload or result, and of no other text that sqlq writes."""
KEY_BYTES = 32
_LEAST_DIFFERENT_BYTES = 8
"""32 random bytes have fewer different values once in 10^38."""
_MARKS = {"sign": "s1", "encrypt": "e1"}
_ROW = re.compile(
    r'\{"signature": "(?P<mark>s1|e1)\.(?P<key>[0-9a-f]{8})\.[\w=-]{44}", "text": (?P<text>.*)\}', re.DOTALL
)


class Unopened(dict[str, str]):
    """Stands for a payload or result that is not shown. Has the reason, also as JSON."""

    @property
    def why(self) -> str:
        return self["unreadable"]


class Key:
    """One key, whose id alone is ever shown. Its keys for signing and for encrypting are derived from it."""

    def __init__(self, text: str, name: str) -> None:
        """Raises `ConfigurationError` for text that is no key, without repeating any of it."""
        raw = _raw(text, name)
        self.id = _derived(raw, "key id")[:4].hex()
        self._signing = _derived(raw, "sign")
        self._encrypting = _derived(raw, "encrypt")

    def signed(self, mark: str, kind: Kind, task: str, queue: str, text: str) -> str:
        """Return a JSON text with its signature for this task and queue."""
        signed = f"{_context(mark, kind, task, queue)}\n{text}".encode()
        signature = base64.urlsafe_b64encode(hmac.digest(self._signing, signed, "sha256")).decode()
        return f'{HEAD}{mark}.{self.id}.{signature}", "text": {text}}}'

    def has_signed(self, row: re.Match[str], kind: Kind, task: str, queue: str) -> bool:
        """Whether a text as a row has it is what this key signs. No other spelling of it is."""
        try:
            signed = self.signed(row["mark"], kind, task, queue, row["text"]).encode()
            return hmac.compare_digest(signed, row[0].encode())
        except UnicodeError:  # SQLite lets in bytes that are no text
            return False

    @cached_property
    def cipher(self) -> Any:
        """Fernet under this key. Raises `ConfigurationError` where the library is missing."""
        try:
            from cryptography.fernet import Fernet
        except ImportError:
            raise ConfigurationError(
                "encrypted rows need the library cryptography: pip install 'sqlq-jobs[crypto]'"
            ) from None
        return Fernet(base64.urlsafe_b64encode(self._encrypting))


class Encryption:
    """The keys of an App: the first one signs or encrypts, and each of them opens."""

    def __init__(
        self, keys: Sequence[str], how: How = "sign", plain: Plain = "refuse", called: str = "keys"
    ) -> None:
        """Raises `ConfigurationError` for text that is no key, and where `how` needs a library that is not
        there."""
        self.keys: dict[str, Key] = {}
        for i, text in enumerate(keys):
            key = Key(text, f"{called}[{i}]")
            self.keys[key.id] = key
        self._plain = plain
        self.how = how
        self.facts = [list(keys), how, plain]
        """All that makes this, keys included, as JSON: for a process of the same worker."""
        self._key = None if how == "read" else next(iter(self.keys.values()), None)
        if how == "encrypt" and self._key is not None:
            _ = self._key.cipher
        self.writes = self._key and _described(_MARKS[how], self._key.id)
        """How new texts are signed or encrypted, as `readable` returns it; None for plain ones."""

    def __repr__(self) -> str:
        return f"Encryption({self.how!r}, keys {', '.join(self.keys)})"

    def protect(self, kind: Kind, task: str, queue: str, text: str) -> str:
        """Return a text as it is stored."""
        if self._key is None:
            return text
        if self.how == "encrypt":
            text = f'"{self._key.cipher.encrypt(text.encode()).decode()}"'
        return self._key.signed(_MARKS[self.how], kind, task, queue, text)

    def opened(self, kind: Kind, task: str, queue: str, text: str) -> str:
        """Return the text that was signed or encrypted. Raises `PayloadKeyError` where these keys have not
        signed or encrypted it for this task and queue. Raises it for a plain text, too, where those are
        refused."""
        if not is_protected(text):
            if self.refuses_plain(queue):  # guard: plain-rows-are-refused
                raise PayloadKeyError(
                    f"its {kind} is plain, and this App accepts signed rows only: enqueue it with the "
                    'App, or accept plain rows with App(…, plain="accept") or plain=[queue]'
                )
            return text
        row = _ROW.fullmatch(text)
        key = row and self.keys.get(row["key"])
        # guard: protected-without-a-key
        if row is not None and key is None:
            raise PayloadKeyError(
                f"its {kind} was written with key {row['key']}, which this App does not have (it has "
                f"{', '.join(self.keys) or 'none'}): add it to keys=",
                lacks_key=True,
            )
        # guard: signatures-are-checked
        if row is None or key is None or not key.has_signed(row, kind, task, queue):
            raise PayloadKeyError(
                f"the signature of its {kind} does not fit: it was altered, or is of another task or queue "
                f"than {task} in {queue}"
            )
        if row["mark"] == _MARKS["sign"]:
            return row["text"]
        try:
            return str(key.cipher.decrypt(row["text"][1:-1]).decode())
        except Exception as error:
            raise PayloadKeyError(
                f"its {kind} cannot be opened: {error}", lacks_key=isinstance(error, ConfigurationError)
            ) from None

    def opens(self, task: str, queue: str, payload: str) -> bool:
        """Whether a payload as its row has it may be run."""
        try:
            self.opened("payload", task, queue, payload)
        except PayloadKeyError:
            return False
        return True

    def result_for(self, taker: str, task: str, queue: str, text: str) -> str:
        """Return a result, opened, for a step in the queue `taker`. Raises as `opened`. Raises also where the
        job's queue accepts plain rows and the taker's queue refuses them. Anybody who writes plain rows may
        have had such a result made."""
        if self.refuses_plain(taker) and not self.refuses_plain(queue):  # guard: plain-feeds-no-signed
            raise PayloadKeyError(
                f"its queue {queue} accepts plain rows, and so nothing it returns goes into signed ones as "
                f"in {taker}: run it in a queue that plain= does not list"
            )
        return self.opened("result", task, queue, text)

    def refuses_plain(self, queue: str) -> bool:
        """Whether plain rows of this queue are refused."""
        return self._plain == "refuse" or (self._plain != "accept" and queue not in self._plain)


NO_KEYS = Encryption((), "read", "accept")
"""Opens plain texts alone."""


def is_protected(text: Any) -> bool:
    """Whether a text in a row is signed or encrypted."""
    return isinstance(text, str) and text.startswith(HEAD)


def readable(
    encryption: Encryption | None, kind: Kind, task: str, queue: str, text: Any
) -> tuple[str | Unopened, str | None]:
    """Return a payload or result as it may be shown with these keys, else `Unopened`. Beside it stands how it
    is signed or encrypted, None where it is plain. Raises nothing.

    A plain result is none where plain rows are refused; a plain payload is shown, for it will never be run.
    """
    if kind == "payload" and not is_protected(text):
        return text, None
    row = _ROW.fullmatch(text) if is_protected(text) else None
    protected = row and _described(row["mark"], row["key"])
    try:
        return (encryption or NO_KEYS).opened(kind, task, queue, text), protected
    except PayloadKeyError as error:
        return Unopened(unreadable=str(error)), protected


def _described(mark: str, id: str) -> str:
    return f"{'signed' if mark == _MARKS['sign'] else 'encrypted'} with key {id}"


def new_key() -> str:
    """Return a new key, as text: 32 random bytes in URL-safe base64."""
    while (text := secrets.token_urlsafe(KEY_BYTES))[0] == "-":
        pass  # a command line would take it for an option
    return text


def _raw(text: Any, name: str) -> bytes:
    try:
        plain = text.strip().rstrip("=").replace("-", "+").replace("_", "/")
        raw = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (AttributeError, TypeError, ValueError):
        raw = b""
    if len(raw) != KEY_BYTES or len(set(raw)) < _LEAST_DIFFERENT_BYTES:
        raise ConfigurationError(
            f"{name} is no key: a key is {KEY_BYTES} random bytes in base64, as `sqlq keys new` prints them"
        )
    return raw


def _derived(raw: bytes, purpose: str) -> bytes:
    """Return a key of its own for a purpose: none of them reveals another one, or the key."""
    return hmac.digest(raw, f"sqlq encryption 1: {purpose}".encode(), "sha256")


@lru_cache(maxsize=4096)
def _context(mark: str, kind: Kind, task: str, queue: str) -> str:
    """Return the context to which a signature is bound. JSON, so that no two contexts are the same text."""
    return json.dumps([mark, kind, str(task), str(queue)])  # guard: bound-to-task-and-queue
