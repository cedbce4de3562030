"""The views: the stable read contract over tables that may change. The migrations make them.

A user's views may depend on these, which then cannot be dropped, or only with the user's. So a revision
recreates a view only if it changes its definition, and names it, as in `views = ("queue_stats",)`.
"""

from __future__ import annotations

NAMES = ("queue_stats", "job_states")
"""In an order in which they can be dropped."""
