"""Signatures and encryption: their context, the accepted keys, and no key in any output."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import sys
from typing import Any

import pytest

import sqlq
from sqlq.app.options import seal_of
from sqlq.errors import ConfigurationError, SealError
from sqlq.payload.encryption import HEAD, Encryption, Unopened, looked_into, new_key
from tests.kit import for_each

KEY = "wnIgP-EjW0kBhPaSnlOcSLPyLWxJupaY4uQcInb7QdY"  # names tests, so it is the same in all processes
OTHER = new_key()
PAYLOADS = [
    "{}",
    '{"args": [7]}',
    '{"args": ["\\"seal\\": \\"x\\", ü}"], "kwargs": {"a": {}}}',
    '{\n"args": []}',
]
BOTH = pytest.mark.parametrize("how", ["sign", "encrypt"])


def seal(*keys: str, how: str = "sign", unsealed: Any = None) -> Encryption:
    found = seal_of(list(keys) or [KEY], how, unsealed)
    assert found is not None
    return found


@BOTH
@for_each("text", PAYLOADS)
def test_a_signed_or_encrypted_text_is_opened(how: str, text: str) -> None:
    sealed = seal(how=how).sealed("payload", "t", "q", text)
    assert looked_into(seal(), "payload", "t", "q", sealed) == (text, seal(how=how).writes)
    assert "seal" in json.loads(sealed)
    assert seal(OTHER, KEY).opened("payload", "t", "q", sealed) == text


@BOTH
@for_each("text", ["7", "null", '"ü"', "[1, {}]", '{"args": 1}', '{"seal": "s1"}'])
def test_results_are_any_json(how: str, text: str) -> None:
    sealed = seal(how=how).sealed("result", "t", "q", text)
    assert isinstance(json.loads(sealed), dict)
    assert seal().opened("result", "t", "q", sealed) == text


def test_sql_reads_signed_payloads_and_not_encrypted_ones() -> None:
    signed = json.loads(seal().sealed("payload", "t", "q", '{"args": ["secret"]}'))
    assert signed["text"]["args"] == ["secret"]
    assert json.loads(seal().sealed("result", "t", "q", "[1]"))["text"] == [1]
    texts = {seal(how="encrypt").sealed("payload", "t", "q", '{"args": ["secret"]}') for _ in range(100)}
    assert len(texts) == 100, "no ciphertext comes twice"
    assert not any("secret" in text for text in texts)


@BOTH
@for_each(
    ("kind", "task", "queue"), [("payload", "other", "q"), ("payload", "t", "other"), ("result", "t", "q")]
)
def test_a_signature_is_bound_to_task_queue_and_kind(how: str, kind: Any, task: str, queue: str) -> None:
    sealed = seal(how=how).sealed("payload", "t", "q", '{"args": [7]}')
    with pytest.raises(SealError, match="does not fit: it was altered, or is of another task or queue"):
        seal().opened(kind, task, queue, sealed)


def test_a_signature_distinguishes_task_from_queue() -> None:
    sealed = seal().sealed("payload", 'a", "b', "c", "{}")
    with pytest.raises(SealError):
        seal().opened("payload", "a", 'b", "c', sealed)


@BOTH
def test_a_changed_text_is_refused(how: str) -> None:
    sealed = seal(how=how).sealed("payload", "t", "q", '{"args": [7]}')
    changed = [sealed[:i] + chr(ord(c) ^ 1) + sealed[i + 1 :] for i, c in enumerate(sealed)]
    changed += [sealed[:i] for i in range(len(sealed))] + [
        sealed + " ",
        sealed.replace(": ", ":"),
        f" {sealed}",
    ]
    changed += [sealed[:-1] + ', "args": [8]}', sealed.replace("s1.", "e1."), sealed.replace("e1.", "s1.")]
    taken = []
    for text in changed:
        if text == sealed:
            continue
        try:
            taken.append(seal().opened("payload", "t", "q", text))
        except SealError:
            pass
    assert taken == []


@for_each("said", ["s1.{id}.\ud800", "e1.{id}.\ud800", "e1.{id}.", "s1.{id}.", "e1.{id}.AAAA", "s1.", ""])
def test_a_broken_signature_or_payload_is_refused(said: str) -> None:
    sealed = f"{HEAD}{said.format(id=next(iter(seal().keys)))}"
    for row in (f'{sealed}"}}', f'{sealed}", "text": 7}}', f'{sealed}{"A" * 42}", "text": ["\ud800"]}}'):
        with pytest.raises(SealError):
            seal().opened("payload", "t", "q", row)
    with pytest.raises(SealError):
        seal().opened("payload", "t", "q", 7)  # type: ignore[arg-type]


def test_a_signed_text_that_is_no_ciphertext_is_refused() -> None:
    (key,) = seal().keys.values()
    row = key.signed("e1", "payload", "t", "q", '"not encrypted"')
    with pytest.raises(SealError, match="cannot be opened"):
        seal().opened("payload", "t", "q", row)


def test_the_error_names_the_missing_key() -> None:
    sealed = seal(OTHER).sealed("payload", "t", "q", "{}")
    with pytest.raises(
        SealError, match=r"its payload is sealed with key [0-9a-f]{8}, which this App does not"
    ):
        seal().opened("payload", "t", "q", sealed)


def test_a_key_of_the_same_id_does_not_help() -> None:
    mine, theirs = seal(), seal(OTHER)
    sealed = theirs.sealed("payload", "t", "q", "{}")
    mine.keys[next(iter(theirs.keys))] = next(iter(mine.keys.values()))
    with pytest.raises(SealError, match="does not fit"):
        mine.opened("payload", "t", "q", sealed)


def test_plain_rows_are_refused_unless_unsealed_takes_them() -> None:
    with pytest.raises(SealError, match="its payload is not sealed, and this App takes sealed rows only"):
        seal().opened("payload", "t", "q", "{}")
    assert seal(unsealed="take").opened("payload", "t", "q", "{}") == "{}"
    by_queue = seal(unsealed=["q"])
    assert by_queue.opened("payload", "t", "q", "{}") == "{}"
    with pytest.raises(SealError):
        by_queue.opened("payload", "t", "other", "{}")


def test_the_first_key_signs_and_read_writes_plain_rows() -> None:
    assert seal(OTHER, KEY).writes == f"signed with key {next(iter(seal(OTHER).keys))}"
    reading = seal(how="read")
    assert reading.sealed("payload", "t", "q", "{}") == "{}"
    assert reading.opened("payload", "t", "q", "{}") == "{}", "its own rows are plain"
    assert reading.opened("payload", "t", "q", seal().sealed("payload", "t", "q", "{}")) == "{}"


def test_a_payload_that_cannot_be_opened_is_not_shown() -> None:
    sealed = seal().sealed("payload", "t", "q", '{"args": ["secret"]}')
    for found in (
        looked_into(None, "payload", "t", "q", sealed),
        looked_into(seal(OTHER), "payload", "t", "q", sealed),
        looked_into(seal(), "payload", "t", "q", sealed[:-1]),
        looked_into(seal(), "result", "t", "q", "7"),
    ):
        assert isinstance(found[0], Unopened)
        assert "secret" not in json.dumps(found[0])
    assert looked_into(seal(), "payload", "t", "q", sealed)[0] == '{"args": ["secret"]}'
    assert looked_into(None, "payload", "t", "q", "{}") == ("{}", None)


def test_a_signature_made_by_the_guide_is_accepted() -> None:
    def mac(key: bytes, text: str) -> bytes:
        return hmac.new(key, text.encode(), hashlib.sha256).digest()

    raw = base64.urlsafe_b64decode(KEY + "=")
    id = mac(raw, "sqlq seal 1: key id").hex()[:8]
    context = json.dumps(["s1", "payload", "täsk", "q"])
    payload = '{"args": ["ü"]}'
    digest = mac(mac(raw, "sqlq seal 1: sign"), f"{context}\n{payload}")
    signature = base64.urlsafe_b64encode(digest).decode()
    row = f'{{"seal": "s1.{id}.{signature}", "text": {payload}}}'
    assert seal().opened("payload", "täsk", "q", row) == payload


# -- keys ----------------------------------------------------------------------------------------------------


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@for_each(
    ("keys", "sentence"),
    [
        ([b64(bytes(range(31)))], "keys[0] is no key: a key is 32 random bytes in base64"),
        ([KEY, b64(bytes(range(33)))], "keys[1] is no key"),
        (["not base64: $$$$"], "keys[0] is no key"),
        (["ключ"], "keys[0] is no key"),
        ([b64(bytes(32))], "keys[0] is no key"),
        ([None], "keys[0] is no key: a key is"),
        ([KEY.encode()], "keys[0] is no key"),
        ([KEY, KEY], "twice"),
        (KEY, "keys is no list"),
        ("", "keys is no list"),
        ({KEY: 1}, "keys is no list"),
    ],
)
def test_a_bad_key_is_refused_without_showing_it(keys: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)) as caught:
        sqlq.App(keys=keys)
    said = str(caught.value)
    assert "\n" not in said
    for key in keys if isinstance(keys, list) else [keys]:
        assert not isinstance(key, str) or not key or key not in said


@for_each(
    ("options", "sentence"),
    [
        ({"seal": "sign"}, "seal is set, but there is no key"),
        ({"keys": [], "unsealed": "refuse"}, "unsealed is set, but there is no key"),
        ({"keys": [KEY], "seal": "rot13"}, 'seal is \'rot13\': it is "sign", "encrypt" or "read"'),
        ({"keys": [KEY], "unsealed": "maybe"}, "unsealed is 'maybe'"),
        ({"keys": [KEY], "unsealed": ["a,b"]}, "a comma separates queues"),
        ({"keys": [KEY], "seal": "read", "unsealed": "refuse"}, "this App itself writes plain rows"),
    ],
)
def test_wrong_encryption_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        sqlq.App(**options)


def test_the_environment_sets_keys_unless_the_app_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sqlq.App().database.seal is None
    monkeypatch.setenv("SQLQ_SEAL", "encrypt")
    with pytest.raises(ConfigurationError, match="SQLQ_SEAL is set, but there is no key"):
        sqlq.App()
    monkeypatch.setenv("SQLQ_KEYS", f"{OTHER}, {KEY}")
    found = sqlq.App().database.seal
    assert found is not None
    assert list(found.keys) == [*seal(OTHER).keys, *seal(KEY).keys]
    assert found.how == "encrypt"
    monkeypatch.setenv("SQLQ_KEYS", f"{OTHER} AAAA")
    with pytest.raises(ConfigurationError, match=r"SQLQ_KEYS\[1\] is no key"):
        sqlq.App()
    given = sqlq.App(keys=[KEY], seal="sign", unsealed="take").database.seal
    assert given is not None
    assert (list(given.keys), given.how) == (list(seal().keys), "sign")


def test_a_key_may_be_in_either_alphabet_with_or_without_padding() -> None:
    raw = bytes(range(224, 256))
    forms = [b64(raw), b64(raw).rstrip("="), base64.urlsafe_b64encode(raw).decode(), f" {b64(raw)}\n"]
    assert len({tuple(seal(form).keys) for form in forms}) == 1


def test_keys_are_in_no_repr() -> None:
    app = sqlq.App(keys=[KEY, OTHER], seal="encrypt")
    assert app.database.seal is not None
    seal = app.database.seal
    assert seal is not None
    for shown in map(
        str, (repr(app), repr(seal), seal.keys, repr(app._connected.address), repr(app.database))
    ):
        assert KEY not in shown
        assert OTHER not in shown
    assert next(iter(app.database.seal.keys)) in repr(app.database.seal)


def test_encryption_is_rebuilt_from_its_facts() -> None:
    first = seal(KEY, OTHER, how="encrypt", unsealed=["q"])
    again = Encryption(*json.loads(json.dumps(first.facts)))
    assert (list(again.keys), again.how, again.refuses_plain("q")) == (list(first.keys), "encrypt", False)
    assert again.refuses_plain("other")


def test_new_keys_need_no_quoting_on_a_command_line() -> None:
    keys = {new_key() for _ in range(500)}
    assert len(keys) == 500
    assert all(re.fullmatch(r"[A-Za-z0-9_][\w-]{42}", key) for key in keys)


def test_only_encryption_needs_the_cryptography_package(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = seal(how="encrypt").sealed("payload", "t", "q", "{}")
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sqlq-jobs\[crypto\]'"):
        seal(how="encrypt")
    assert seal().opened("payload", "t", "q", seal().sealed("payload", "t", "q", "{}")) == "{}"
    with pytest.raises(SealError, match="cryptography"):
        seal().opened("payload", "t", "q", sealed)
