"""The findings of `sqlq doctor`, and short ways to make them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sqlq.config.durations import readable


class Verdict(StrEnum):
    """OK: as it should be. CHECK: works, but an operator should know. TO_DO: something does not work, or will
    not for long."""

    OK = "ok"
    CHECK = "check"
    TO_DO = "to do"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and the remedy."""

    check: str
    verdict: Verdict
    said: str
    remedy: str | None = None


def ok(about: str, said: str) -> Finding:
    return Finding(about, Verdict.OK, said)


def check(about: str, said: str, remedy: str | None = None) -> Finding:
    return Finding(about, Verdict.CHECK, said, remedy)


def to_do(about: str, said: str, remedy: str | None) -> Finding:
    return Finding(about, Verdict.TO_DO, said, remedy)


def span(seconds: float) -> str:
    return readable(max(0.0, seconds) * 1000)


def counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
