"""`sqlq keys`: counts the signed or encrypted rows of each key, checks that each row opens, and rotates to
another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection

from sqlq.admin.facet import audited
from sqlq.config.durations import counted
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError, SealError
from sqlq.payload.encryption import HEAD, Encryption
from sqlq.store import keys
from sqlq.store.keys import Place

SHOWN = 20
"""Only the first rows that do not open have their reason shown: at most this many."""
LOOKED_AT = 10_000
"""The doctor reads at most this many of the newest rows of each table."""
PASSES = 3
"""A rotation passes over all rows at most this often, since others may have locked some."""


@dataclass(frozen=True, slots=True)
class KeyUse:
    """How many texts of a column are signed or encrypted with a key. `key` is its id, None for plain texts.
    `how` is "signed" or "encrypted". `state` is "first" (the key for new texts), "known", "unknown" or
    "plain"."""

    where: str
    key: str | None
    how: str | None
    number: int
    state: str


@dataclass(slots=True)
class Rotated:
    """The result of a rotation. `sealed` has the number of texts that it signed or encrypted anew, by column.
    `bad` counts those that it could not open, and `why` has the reasons for the first 20. `left` counts those
    that remain because others had locked them."""

    sealed: dict[str, int] = field(default_factory=dict)
    bad: int = 0
    why: list[str] = field(default_factory=list)
    left: int = 0


class Rotation:
    """The signed or encrypted rows of a database, for an operator who has the keys."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seal = database.seal

    def uses(self, *, places: Sequence[Place] = keys.EVERYWHERE, within: int | None = None) -> list[KeyUse]:
        """Return which keys the rows are signed or encrypted with, even if the App has no key. Reads all
        rows, or `within` of the newest of each table."""
        self._database.require_tables()
        found = []
        with self._database.read() as conn:
            for place in places:
                found += [self._use(place, each) for each in keys.counts(conn, place, within=within)]
        return found

    def _use(self, place: Place, sealed: keys.Sealed) -> KeyUse:
        if sealed.mark is None:
            return KeyUse(place.name, None, None, sealed.number, "plain")
        how, _, id = sealed.mark.partition(".")
        known = [] if self._seal is None else list(self._seal.keys)
        state = "unknown" if id not in known else "first" if id == known[0] else "known"
        return KeyUse(place.name, id, "signed" if how == "s1" else "encrypted", sealed.number, state)

    def check(self, *, finished: bool = False) -> Rotated:
        """Open every signed or encrypted row, and return which do not open. Nothing is changed. Raises
        `ConfigurationError` without keys."""
        seal = self._required()
        done = Rotated()
        for place in _places(finished):
            for row in self._rows(place):
                try:
                    seal.opened(place.kind, row.task, row.queue, row.text)
                    done.sealed[place.name] = done.sealed.get(place.name, 0) + 1
                except SealError as error:
                    _note(done, place, row, error)
        return done

    def _rows(self, place: Place) -> Iterator[keys.Row]:
        last = None
        while True:
            with self._database.read() as conn:
                batch = keys.rows(conn, place, after=last)
            if not batch:
                return
            yield from batch
            last = batch[-1].key

    @audited("keys rotate")
    def rotate(
        self,
        *,
        finished: bool = False,
        plain: bool = False,
        told: Callable[[str, int], None] = lambda where, number: None,
    ) -> Rotated:
        """Sign or encrypt rows anew, with the first key and the App's current `seal`. These are all that may
        still run: waiting, running and failed jobs, and schedules. With `finished` it takes finished jobs and
        their results, too.

        It works in transactions of 100 rows, and skips rows that others have locked. It may be broken off at
        any time, and begun again. With `plain` it signs or encrypts plain rows as well: the caller trusts
        them. Texts that do not open stay as they are. `told` is called after each batch that changed rows,
        with the column and the number of rows. Raises `ConfigurationError` without keys, and with
        `seal="read"`.
        """
        seal = self._required()
        if seal.begins is None:
            raise ConfigurationError(
                'with seal="read" nothing is sealed: set it to "sign" or "encrypt" first'
            )
        done = Rotated()
        for place in _places(finished):
            for turn in range(PASSES):
                sealed = self._pass(place, seal, plain, Rotated() if turn else done, told)
                done.sealed[place.name] = done.sealed.get(place.name, 0) + sealed
                if turn and not sealed:
                    break
        with self._database.read() as conn:
            number = partial(keys.number, conn, but=seal.begins, plain=plain)
            done.left = max(0, sum(number(place) for place in _places(finished)) - done.bad)
        return done

    def _pass(
        self, place: Place, seal: Encryption, plain: bool, done: Rotated, told: Callable[[str, int], None]
    ) -> int:
        sealed, last = 0, None
        while True:
            work = partial(_seal_batch, place=place, seal=seal, plain=plain, after=last)
            batch, number, bad = self._database.run(work)
            for row, error in bad:
                _note(done, place, row, error)
            if not batch:
                return sealed
            sealed, last = sealed + number, batch[-1].key
            if number:
                told(place.name, number)

    def _required(self) -> Encryption:
        self._database.require_tables()
        if self._seal is None:
            raise ConfigurationError(
                "there are no keys: name the App that has them, or set SQLQ_KEYS to what `sqlq keys new` "
                "prints"
            )
        return self._seal


def unreadable(database: Database) -> str | None:
    """Return a text on those of the newest waiting or running rows whose keys the App does not have; None if
    there are none."""
    found = Rotation(database).uses(places=keys.WAITING, within=LOOKED_AT)
    unknown = [use for use in found if use.state == "unknown"]
    if not unknown:
        return None
    number, ids = sum(use.number for use in unknown), sorted({use.key or "" for use in unknown})
    here = "it has none" if database.seal is None else f"it has {', '.join(database.seal.keys)}"
    rows = counted(number, "row is", "rows are")
    return f"{rows} sealed with key {', '.join(ids)}, which this App does not have ({here})"


def _places(finished: bool) -> Sequence[Place]:
    return keys.EVERYWHERE if finished else keys.LIVE


Bad = list[tuple[keys.Row, SealError]]


def _seal_batch(
    conn: Connection, *, place: Place, seal: Encryption, plain: bool, after: object
) -> tuple[list[keys.Row], int, Bad]:
    """Sign or encrypt a batch of rows anew. Return them, how many changed, and those that did not open."""
    batch = keys.rows(conn, place, after=after, but=seal.begins, plain=plain, lock=True)
    texts: list[tuple[object, str]] = []
    bad: Bad = []
    for row in batch:
        try:
            texts.append(
                (row.key, seal.sealed(place.kind, row.task, row.queue, _opened(place, seal, row, plain)))
            )
        except SealError as error:
            bad.append((row, error))  # guard: rotation-leaves-what-does-not-open
    if texts:
        keys.write(conn, place, texts)
    return batch, len(texts), bad


def _opened(place: Place, seal: Encryption, row: keys.Row, plain: bool) -> str:
    if not isinstance(row.text, str):
        raise SealError(f"its {place.kind} is no text")
    if plain and not row.text.startswith(HEAD):
        return row.text
    return seal.opened(place.kind, row.task, row.queue, row.text)


def _note(done: Rotated, place: Place, row: keys.Row, error: SealError) -> None:
    done.bad += 1
    if len(done.why) < SHOWN:
        what = f"the schedule {row.key!r}" if place.table.name.endswith("schedules") else f"job {row.key}"
        done.why.append(f"{what} ({place.table.name}): {error}")
