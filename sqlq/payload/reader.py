"""Reads payloads for workers, in a fourth of the time of `codec.decode`. An enqueue does not bear the time of
its import."""

from __future__ import annotations

from typing import Any

import msgspec

from sqlq.payload.codec import Arguments, decode, is_deep

_FIELDS: list[Any] = [("args", list, []), ("kwargs", dict, {})]
_read = msgspec.json.Decoder(msgspec.defstruct("Payload", _FIELDS, forbid_unknown_fields=True)).decode


def read(payload: str | bytes) -> Arguments:
    """Return the arguments in a payload. Raises as `decode`."""
    try:
        parts: Any = _read(payload)
    except Exception:
        return decode(payload)  # it accepts more texts, or has a better error
    arguments = parts.args, parts.kwargs
    return decode(payload) if is_deep(payload, arguments) else arguments  # guard: depth-is-bounded-in-workers
