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
from sqlq.app.options import encryption_of
from sqlq.errors import ConfigurationError, PayloadKeyError
from sqlq.payload.encryption import HEAD, Encryption, Unopened, new_key, readable
from tests.kit import for_each

KEY = "wnIgP-EjW0kBhPaSnlOcSLPyLWxJupaY4uQcInb7QdY"  # names tests, so it is the same in all processes
OTHER = new_key()
PAYLOADS = [
    "{}",
    '{"args": [7]}',
    '{"args": ["\\"signature\\": \\"x\\", ü}"], "kwargs": {"a": {}}}',
    '{\n"args": []}',
]
BOTH = pytest.mark.parametrize("how", ["sign", "encrypt"])


def keyed(*keys: str, how: str = "sign", plain: Any = None) -> Encryption:
    found = encryption_of(list(keys) or [KEY], how, plain)
    assert found is not None
    return found


@BOTH
@for_each("text", PAYLOADS)
def test_a_signed_or_encrypted_text_is_opened(how: str, text: str) -> None:
    protected = keyed(how=how).protect("payload", "t", "q", text)
    assert readable(keyed(), "payload", "t", "q", protected) == (text, keyed(how=how).writes)
    assert "signature" in json.loads(protected)
    assert keyed(OTHER, KEY).opened("payload", "t", "q", protected) == text
    for result in (text, "7", "null", '"ü"', "[1, {}]", '{"signature": "s1"}'):
        protected = keyed(how=how).protect("result", "t", "q", result)
        assert isinstance(json.loads(protected), dict)
        assert keyed().opened("result", "t", "q", protected) == result


def test_sql_reads_signed_payloads_and_not_encrypted_ones() -> None:
    signed = json.loads(keyed().protect("payload", "t", "q", '{"args": ["secret"]}'))
    assert signed["text"]["args"] == ["secret"]
    assert json.loads(keyed().protect("result", "t", "q", "[1]"))["text"] == [1]
    texts = {keyed(how="encrypt").protect("payload", "t", "q", '{"args": ["secret"]}') for _ in range(100)}
    assert len(texts) == 100, "no ciphertext comes twice"
    assert not any("secret" in text for text in texts)


@BOTH
@for_each(("kind", "task", "queue"), [("payload", "new", "q"), ("payload", "t", "new"), ("result", "t", "q")])
def test_a_signature_is_bound_to_task_queue_and_kind(how: str, kind: Any, task: str, queue: str) -> None:
    protected = keyed(how=how).protect("payload", "t", "q", '{"args": [7]}')
    with pytest.raises(PayloadKeyError, match="does not fit: it was altered, or is of another task or queue"):
        keyed().opened(kind, task, queue, protected)
    protected = keyed(how=how).protect("payload", 'a", "b', "c", "{}")
    with pytest.raises(PayloadKeyError):
        keyed().opened("payload", "a", 'b", "c', protected)


@BOTH
def test_a_changed_text_is_refused(how: str) -> None:
    protected = keyed(how=how).protect("payload", "t", "q", '{"args": [7]}')
    changed = [protected[:i] + chr(ord(c) ^ 1) + protected[i + 1 :] for i, c in enumerate(protected)]
    changed += [protected[:i] for i in range(len(protected))]
    changed += [f"{protected} ", f" {protected}", protected[:-1] + ', "args": [8]}']
    changed += [protected.replace(*words) for words in ((": ", ":"), ("s1.", "e1."), ("e1.", "s1."))]
    taken = []
    for text in changed:
        if text == protected:
            continue
        try:
            taken.append(keyed().opened("payload", "t", "q", text))
        except PayloadKeyError:
            pass
    assert taken == []


@for_each("said", ["s1.{id}.\ud800", "e1.{id}.\ud800", "e1.{id}.", "s1.{id}.", "e1.{id}.AAAA", "s1.", ""])
def test_a_broken_signature_or_payload_is_refused(said: str) -> None:
    protected = f"{HEAD}{said.format(id=next(iter(keyed().keys)))}"
    for row in (
        f'{protected}"}}',
        f'{protected}", "text": 7}}',
        f'{protected}{"A" * 42}", "text": ["\ud800"]}}',
    ):
        with pytest.raises(PayloadKeyError):
            keyed().opened("payload", "t", "q", row)
    with pytest.raises(PayloadKeyError):
        keyed().opened("payload", "t", "q", 7)  # type: ignore[arg-type]
    (key,) = keyed().keys.values()
    with pytest.raises(PayloadKeyError, match="cannot be opened"):
        keyed().opened("payload", "t", "q", key.signed("e1", "payload", "t", "q", '"not encrypted"'))


def test_a_row_of_another_key_is_refused_though_its_id_were_the_same() -> None:
    mine, theirs = keyed(), keyed(OTHER)
    protected = theirs.protect("payload", "t", "q", "{}")
    with pytest.raises(PayloadKeyError, match=r"written with key [0-9a-f]{8}, which this App does not"):
        mine.opened("payload", "t", "q", protected)
    mine.keys[next(iter(theirs.keys))] = next(iter(mine.keys.values()))
    with pytest.raises(PayloadKeyError, match="does not fit"):
        mine.opened("payload", "t", "q", protected)


def test_plain_rows_are_refused_unless_they_are_accepted() -> None:
    with pytest.raises(PayloadKeyError, match="its payload is plain, and this App accepts signed rows only"):
        keyed().opened("payload", "t", "q", "{}")
    assert keyed(plain="accept").opened("payload", "t", "q", "{}") == "{}"
    by_queue = keyed(plain=["q"])
    assert by_queue.opened("payload", "t", "q", "{}") == "{}"
    with pytest.raises(PayloadKeyError):
        by_queue.opened("payload", "t", "other", "{}")


def test_the_first_key_signs_and_read_writes_plain_rows() -> None:
    assert keyed(OTHER, KEY).writes == f"signed with key {next(iter(keyed(OTHER).keys))}"
    reading = keyed(how="read")
    assert reading.protect("payload", "t", "q", "{}") == "{}"
    assert reading.opened("payload", "t", "q", "{}") == "{}", "its own rows are plain"
    assert reading.opened("payload", "t", "q", keyed().protect("payload", "t", "q", "{}")) == "{}"


def test_a_payload_that_cannot_be_opened_is_not_shown() -> None:
    protected = keyed().protect("payload", "t", "q", '{"args": ["secret"]}')
    for found in (
        readable(None, "payload", "t", "q", protected),
        readable(keyed(OTHER), "payload", "t", "q", protected),
        readable(keyed(), "payload", "t", "q", protected[:-1]),
        readable(keyed(), "result", "t", "q", "7"),
    ):
        assert isinstance(found[0], Unopened)
        assert "secret" not in json.dumps(found[0])
    assert readable(keyed(), "payload", "t", "q", protected)[0] == '{"args": ["secret"]}'
    assert readable(None, "payload", "t", "q", "{}") == ("{}", None)


def test_a_signature_made_by_the_guide_is_accepted() -> None:
    def mac(key: bytes, text: str) -> bytes:
        return hmac.new(key, text.encode(), hashlib.sha256).digest()

    raw = base64.urlsafe_b64decode(KEY + "=")
    id = mac(raw, "sqlq encryption 1: key id").hex()[:8]
    context = json.dumps(["s1", "payload", "täsk", "q"])
    payload = '{"args": ["ü"]}'
    digest = mac(mac(raw, "sqlq encryption 1: sign"), f"{context}\n{payload}")
    signature = base64.urlsafe_b64encode(digest).decode()
    row = f'{{"signature": "s1.{id}.{signature}", "text": {payload}}}'
    assert keyed().opened("payload", "täsk", "q", row) == payload


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


def test_the_environment_sets_keys_unless_the_app_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sqlq.App().database.encryption is None
    monkeypatch.setenv("SQLQ_ENCRYPTION", "encrypt")
    with pytest.raises(ConfigurationError, match="SQLQ_ENCRYPTION is set, but there is no key"):
        sqlq.App()
    monkeypatch.setenv("SQLQ_KEYS", f"{OTHER}, {KEY}")
    found = sqlq.App().database.encryption
    assert found is not None
    assert list(found.keys) == [*keyed(OTHER).keys, *keyed(KEY).keys]
    assert found.how == "encrypt"
    monkeypatch.setenv("SQLQ_KEYS", f"{OTHER} AAAA")
    with pytest.raises(ConfigurationError, match=r"SQLQ_KEYS\[1\] is no key"):
        sqlq.App()
    given = sqlq.App(keys=[KEY], encryption="sign", plain="accept").database.encryption
    assert given is not None
    assert (list(given.keys), given.how) == (list(keyed().keys), "sign")


def test_a_key_may_be_in_either_alphabet_with_or_without_padding() -> None:
    raw = bytes(range(224, 256))
    forms = [b64(raw), b64(raw).rstrip("="), base64.urlsafe_b64encode(raw).decode(), f" {b64(raw)}\n"]
    assert len({tuple(keyed(form).keys) for form in forms}) == 1


def test_keys_are_in_no_repr() -> None:
    app = sqlq.App(keys=[KEY, OTHER], encryption="encrypt")
    encryption = app.database.encryption
    assert encryption is not None
    held = (app, encryption, encryption.keys, app._connected.address, app.database)
    for shown in map(repr, held):
        assert KEY not in shown
        assert OTHER not in shown
    assert next(iter(encryption.keys)) in repr(encryption)


def test_encryption_is_rebuilt_from_its_facts() -> None:
    first = keyed(KEY, OTHER, how="encrypt", plain=["q"])
    again = Encryption(*json.loads(json.dumps(first.facts)))
    assert (list(again.keys), again.how, again.refuses_plain("q")) == (list(first.keys), "encrypt", False)
    assert again.refuses_plain("other")


def test_new_keys_need_no_quoting_on_a_command_line() -> None:
    keys = {new_key() for _ in range(500)}
    assert len(keys) == 500
    assert all(re.fullmatch(r"[A-Za-z0-9_][\w-]{42}", key) for key in keys)


def test_only_encryption_needs_the_cryptography_package(monkeypatch: pytest.MonkeyPatch) -> None:
    protected = keyed(how="encrypt").protect("payload", "t", "q", "{}")
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sqlq-jobs\[crypto\]'"):
        keyed(how="encrypt")
    assert keyed().opened("payload", "t", "q", keyed().protect("payload", "t", "q", "{}")) == "{}"
    with pytest.raises(PayloadKeyError, match="cryptography"):
        keyed().opened("payload", "t", "q", protected)
