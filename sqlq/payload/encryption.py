"""Seals: payloads and results that the database holds signed or encrypted, under keys that it does not have.

    {"seal": "s1.3f9a2c41.<signature>", "args": [7]}    signed: all can read it, who has the key can write it
    {"seal": "e1.3f9a2c41.<nonce and ciphertext>"}      encrypted: who has the key can do either

A seal is bound to the kind (a payload or a result), the task and the queue. So a row cannot be passed off as
another task's. It is not bound to the id of a job: a row that was signed or encrypted once can be written
again. `docs/guide/sealed.md` has the consequences, and the rest that is not covered.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from sqlq.errors import ConfigurationError, SealError

Kind: TypeAlias = Literal["payload", "result"]
How: TypeAlias = Literal["sign", "encrypt", "read"]
"""`read` opens signed and encrypted rows, and writes plain ones: the first step on the way to signed or
encrypted rows."""
Unsealed: TypeAlias = "Literal['take', 'refuse'] | Sequence[str]"
"""Whether plain rows are taken or refused; or the queues whose plain rows are taken."""


# -- what an App says ----------------------------------------------------------------------------------------

HEAD: Final = '{"seal": "'
"""The beginning of each signed or encrypted payload or result, and of no other text that sqlq writes."""
MARK: Final = len("e1.01234567")
"""Characters after the head: whether the text is signed or encrypted, and the id of the key."""
KEY_BYTES: Final = 32
MOST_KEYS: Final = 100
NONCE_BYTES: Final = 12
_LEAST_DIFFERENT_BYTES = 8
"""32 random bytes have fewer different values once in 10^38."""
_SIGNED, _ENCRYPTED = "s1", "e1"
_ID = re.compile("[0-9a-f]{8}")
_SIGNATURE = 43
_RESULT = '"result": '
_OBJECT = re.compile(r'\{\s*".*\}', re.DOTALL)


class Unopened(dict[str, str]):
    """Stands for a payload or result that is not shown. Has the reason, also as JSON."""

    @classmethod
    def of(cls, why: str) -> Unopened:
        return cls(sealed=why)

    @property
    def why(self) -> str:
        return self["sealed"]


class Key:
    """One key, whose id alone is ever shown. Its keys for signing and for encrypting are derived from it."""

    __slots__ = ("_cipher", "_encrypting", "_signing", "id", "text")

    def __init__(self, text: str, what: str) -> None:
        """Raises `ConfigurationError` for text that is no key, without repeating any of it."""
        raw = _raw(text, what)
        self.text = text
        self.id = _derived(raw, "key id")[:4].hex()
        self._signing = _derived(raw, "sign")
        self._encrypting = _derived(raw, "encrypt")
        self._cipher: Any = None

    def __repr__(self) -> str:
        return f"Key({self.id})"

    def signature(self, context: bytes, text: str) -> str:
        """Return the signature of a text in a context, which has no line break in it."""
        digest = hmac.digest(self._signing, b"%b\n%b" % (context, text.encode()), "sha256")
        return base64.urlsafe_b64encode(digest)[:-1].decode()

    def encrypted(self, context: bytes, text: str) -> str:
        nonce = os.urandom(NONCE_BYTES)
        data = nonce + self.cipher().encrypt(nonce, text.encode(), context)
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    def decrypted(self, context: bytes, data: str) -> str | None:
        """Return the text; None where this key, in this context, has not encrypted it."""
        cipher = self.cipher()
        from cryptography.exceptions import InvalidTag

        try:
            raw = base64.urlsafe_b64decode(data + "=" * (-len(data) % 4))
            if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != data:
                return None  # the last character has bits to spare: only one spelling of each text is taken
            text: bytes = cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], context)
            return text.decode()
        except (InvalidTag, ValueError):
            return None

    def cipher(self) -> Any:
        """Return AES-256-GCM under this key. Raises `ConfigurationError` where the library is missing."""
        if self._cipher is None:
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ImportError:
                raise ConfigurationError(
                    "encrypted rows need the library cryptography: pip install 'sqlq[crypto]'"
                ) from None
            self._cipher = AESGCM(self._encrypting)
        return self._cipher


class Encryption:
    """The keys of an App: the first one signs or encrypts, and each of them opens."""

    def __init__(self, keys: Sequence[Key], how: How, unsealed: Unsealed) -> None:
        """Raises `ConfigurationError` where `how` needs a library that is not there."""
        self.keys = {key.id: key for key in keys}
        self.how = how
        self._first = keys[0]
        self._unsealed = unsealed
        self._seal: Callable[[Kind, str, str, str], str] | None = {
            "sign": self._signed,
            "encrypt": self._encrypted,
            "read": None,
        }[how]
        if how == "encrypt":
            self._first.cipher()

    def __repr__(self) -> str:
        return f"Encryption({self.how!r}, keys {', '.join(self.keys)})"

    @classmethod
    def of_facts(cls, facts: dict[str, Any] | None) -> Encryption | None:
        """Return the seal that `facts` describe."""
        if facts is None:
            return None
        return cls([Key(text, "a key") for text in facts["keys"]], facts["how"], facts["unsealed"])

    def facts(self) -> dict[str, Any]:
        """Return all that makes this seal, keys included, as JSON: for a process of the same worker."""
        unsealed = self._unsealed if isinstance(self._unsealed, str) else list(self._unsealed)
        return {"keys": [key.text for key in self.keys.values()], "how": self.how, "unsealed": unsealed}

    # -- sealing ---------------------------------------------------------------------------------------------

    @property
    def begins(self) -> str | None:
        """The beginning of texts that are signed or encrypted as this would do it now; None where it does
        neither."""
        if self._seal is None:
            return None
        return f"{HEAD}{_SIGNED if self.how == 'sign' else _ENCRYPTED}.{self._first.id}."

    def sealed(self, kind: Kind, task: str, queue: str, text: str) -> str:
        """Return a text as it is stored. Raises `SealError` for a payload that cannot be signed, as only SQL
        writes one."""
        return text if self._seal is None else self._seal(kind, task, queue, text)

    def _signed(self, kind: Kind, task: str, queue: str, text: str) -> str:
        if kind == "payload" and text != "{}" and not _OBJECT.fullmatch(text):
            raise SealError("its payload is no JSON object, and cannot be signed")
        key = self._first
        signature = key.signature(_context(_SIGNED, key.id, kind, task, queue), text)
        if kind == "result":
            return f'{HEAD}{_SIGNED}.{key.id}.{signature}", {_RESULT}{text}}}'
        return f'{HEAD}{_SIGNED}.{key.id}.{signature}"{"}" if text == "{}" else f", {text[1:]}"}'

    def _encrypted(self, kind: Kind, task: str, queue: str, text: str) -> str:
        key = self._first
        data = key.encrypted(_context(_ENCRYPTED, key.id, kind, task, queue), text)
        return f'{HEAD}{_ENCRYPTED}.{key.id}.{data}"}}'

    # -- opening ---------------------------------------------------------------------------------------------

    def opened(self, kind: Kind, task: str, queue: str, text: str) -> str:
        """Return the text that was signed or encrypted. Raises `SealError` where these keys have not signed
        or encrypted it for this task and queue. Raises it for a plain text, too, where those are refused."""
        if not isinstance(text, str) or not text.startswith(HEAD):
            if self.refuses_plain(queue):  # guard: plain-rows-are-refused
                raise SealError(
                    f"its {kind} is not sealed, and this App takes sealed rows only: enqueue it with the "
                    'App, or let plain rows in with App(…, unsealed="take") or unsealed=[queue]'
                )
            return text
        found = _parts(text)
        if found is None:
            raise SealError(f"the seal of its {kind} cannot be read: it was cut off, or altered")
        how, id, given, rest = found
        key = self.keys.get(id)
        if key is None:
            raise SealError(unknown_key(kind, id, list(self.keys)), lacks_key=True)
        context = _context(how, id, kind, task, queue)
        try:
            if how == _ENCRYPTED:
                plain = key.decrypted(context, given)
                fits = plain is not None
            else:
                plain = _unwrapped(kind, rest)
                fits = plain is not None and _equal(key.signature(context, plain), given)
        except ConfigurationError as error:  # the library is missing
            raise SealError(f"its {kind} cannot be opened: {error}", lacks_key=True) from None
        except UnicodeError:  # SQLite lets in bytes that are no text
            plain, fits = None, False
        if plain is not None and fits:  # guard: signatures-are-checked
            return plain
        raise SealError(
            f"the seal of its {kind} does not fit: it was altered, or is of another task or queue than "
            f"{task} in {queue}"
        )

    def opens(self, task: str, queue: str, payload: str) -> bool:
        """Whether a payload as its row has it may be run."""
        try:
            self.opened("payload", task, queue, payload)
        except SealError:
            return False
        return True

    def result_for(self, taker: str, task: str, queue: str, text: str) -> str:
        """Return a result, opened, for a step in the queue `taker`. Raises as `opened`. Raises also where the
        job's queue takes plain rows and the taker's queue refuses them. Anybody who writes plain rows may
        have had such a result made."""
        if self.refuses_plain(taker) and not self.refuses_plain(queue):  # guard: plain-queues-feed-no-sealed
            raise SealError(
                f"its queue {queue} takes plain rows, and so nothing it returns goes into sealed ones as in "
                f"{taker}: run it in a queue that unsealed= does not list"
            )
        return self.opened("result", task, queue, text)

    def refuses_plain(self, queue: str) -> bool:
        """Whether plain rows of this queue are refused."""
        return self._unsealed == "refuse" or (
            not isinstance(self._unsealed, str) and queue not in self._unsealed
        )


def opened_without_keys(kind: Kind, text: str) -> str:
    """Return a text that is plain. Raises `SealError` for one that is signed or encrypted."""
    if isinstance(text, str) and text.startswith(HEAD):
        id = text[len(HEAD) : len(HEAD) + MARK].partition(".")[2]
        raise SealError(unknown_key(kind, id, ()), lacks_key=True)  # guard: sealed-without-a-key
    return text


def unknown_key(kind: Kind, id: str, known: Sequence[str]) -> str:
    """Return the sentence about a row whose key is not here."""
    has = f"it has {', '.join(known)}" if known else "it has none"
    return f"its {kind} is sealed with key {id}, which this App does not have ({has}): add it to keys="


class Looked(NamedTuple):
    """A text as it may be shown, or `Unopened`; and how it is signed or encrypted, None where it is plain."""

    text: str | Unopened
    sealed: str | None


def looked_into(seal: Encryption | None, kind: Kind, task: str, queue: str, text: Any) -> Looked:
    """Return a payload or result as it may be shown with these keys, without raising anything. A plain result
    is none where plain rows are refused; a plain payload is shown, for it will never be run."""
    if not isinstance(text, str) or not text.startswith(HEAD):
        refused = seal is not None and kind == "result" and seal.refuses_plain(queue)
        return Looked(
            Unopened.of("it is not sealed, and this App takes sealed rows only") if refused else text, None
        )
    mark = text[len(HEAD) : len(HEAD) + MARK]
    how, _, id = mark.partition(".")
    said = f"{'signed' if how == _SIGNED else 'encrypted'} with key {id}"
    if seal is None or id not in seal.keys:
        return Looked(Unopened.of(f"{said}, which is not here"), said)
    try:
        return Looked(seal.opened(kind, task, queue, text), said)
    except SealError as error:
        return Looked(Unopened.of(str(error)), said)


def new_key() -> str:
    """Return a new key, as text: 32 random bytes in URL-safe base64."""
    while (text := base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode().rstrip("="))[0] == "-":
        pass  # a command line would take it for an option
    return text


def _raw(text: Any, what: str) -> bytes:
    form = "32 random bytes in base64, as `sqlq keys new` prints them"
    if not isinstance(text, str):
        raise ConfigurationError(f"{what} is of type {type(text).__name__}: a key is text of {form}")
    try:
        plain = text.strip().rstrip("=").replace("-", "+").replace("_", "/")
        raw = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise ConfigurationError(f"{what} is no base64: a key is {form}") from None
    if len(raw) != KEY_BYTES:
        raise ConfigurationError(f"{what} has {len(raw)} bytes: a key is {form}")
    if len(set(raw)) < _LEAST_DIFFERENT_BYTES:
        raise ConfigurationError(f"{what} is not random: a key is {form}")
    return raw


def _derived(raw: bytes, purpose: str) -> bytes:
    """Return a key of its own for a purpose: none of them reveals another one, or the key."""
    return hmac.digest(raw, f"sqlq seal 1: {purpose}".encode(), "sha256")


@lru_cache(maxsize=4096)
def _context(how: str, id: str, kind: Kind, task: str, queue: str) -> bytes:
    """Return the context to which a seal is bound. JSON, so that no two contexts are the same bytes."""
    # guard: bound-to-task-and-queue
    return json.dumps(["sqlq", how, id, kind, str(task), str(queue)]).encode()


class _Parts(NamedTuple):
    how: str
    id: str
    given: str
    """The signature, or nonce and ciphertext."""
    rest: str | None
    """The text after a signature; None where there is none."""


def _parts(text: str) -> _Parts | None:
    """Return the parts of a text with the head of a seal; None where they are incomplete, as after a cut. It
    goes by positions: a pattern would look at each character of perhaps a million."""
    start = len(HEAD)
    how, id, data = text[start : start + 2], text[start + 3 : start + MARK], start + MARK + 1
    if (
        text[start + 2 : start + 3] + text[data - 1 : data] != ".."
        or not _ID.fullmatch(id)
        or not text.endswith("}")
    ):
        return None
    if how == _ENCRYPTED:
        return _Parts(how, id, text[data:-2], None) if text.endswith('"}') else None
    if how != _SIGNED:
        return None
    given, after = text[data : data + _SIGNATURE], text[data + _SIGNATURE : -1]
    if after == '"':
        return _Parts(how, id, given, None)
    return _Parts(how, id, given, after[3:]) if after.startswith('", ') else None


def _equal(one: str, other: str) -> bool:
    """Whether two texts are the same, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode(), other.encode(errors="replace"))


def _unwrapped(kind: Kind, rest: str | None) -> str | None:
    """Return the signed text from the text after the signature; None where it is none."""
    if kind == "result":
        return rest[len(_RESULT) :] if rest is not None and rest.startswith(_RESULT) else None
    return "{}" if rest is None else f"{{{rest}}}"
