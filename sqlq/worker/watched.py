"""Who looks for a worker that rests: its own lookout, or its supervisor's for all of a host; and whether it
has looked of late."""

from __future__ import annotations

import time

from sqlq.worker.child import Unsupervised
from sqlq.worker.lookout import STAND_BY_SECONDS, TRUSTED_SECONDS, Lookout


class Watched:
    """When it was looked last for one worker, by the monotonic clock."""

    def __init__(self, supervision: Unsupervised) -> None:
        self._supervision = supervision
        self.looked_at = self._began_at = float("-inf")
        self.lookout: Lookout | None = None
        """The worker's own; None where connections see commits."""

    def begin(self) -> None:
        """Note that the worker begins to work."""
        self._began_at = time.monotonic()

    def has_looked(self) -> None:
        """Note that its own lookout has looked."""
        self.looked_at = time.monotonic()

    def at(self) -> float:
        """Return when anybody has looked for jobs for this worker last."""
        return max(self.looked_at, self._supervision.looked_at())

    def own_leases_at(self) -> float:
        """Return when its own lookout has looked for leases that have run out."""
        return float("-inf") if self.lookout is None else self.lookout.leases_looked_at

    def leases_at(self) -> float:
        """Return when anybody has looked for leases that have run out."""
        return max(self.own_leases_at(), self._supervision.looked_at())

    def supervisor_looks(self) -> bool:
        """Say whether the supervisor's lookout can be relied on."""
        return time.monotonic() - self._supervision.looked_at() < TRUSTED_SECONDS

    def stands_by(self) -> bool:
        """Say whether this worker's own lookout is not needed, or may not be: the supervisor's looks, or is
        about to."""
        since = max(self._supervision.looked_at(), self._began_at)
        # guard: who-is-alone-looks
        return not self._supervision.is_alone and time.monotonic() - since < STAND_BY_SECONDS
