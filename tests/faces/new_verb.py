"""A verb that is not sqlq's own, and the command line with it: `python new_verb.py touch 1`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from sqlq.admin.facet import audited
from sqlq.admin.jobs import Jobs
from sqlq.admin.verb import Option, Outcome
from sqlq.admin.verbs import QUEUE, WAITING, on_jobs, verb


@audited("touch")
def _touch(jobs: Jobs, ids: Sequence[int] = (), *, queue: str | None = None, by: str = "") -> list[int]:
    return sorted(job.id for job in jobs.list(queue=queue) if not ids or job.id in ids)


Jobs.touch = _touch  # type: ignore[attr-defined]


@verb(
    "touch",
    selectors=(QUEUE,),
    options=(Option("by", "How much.", "duration", example="2h"),),
    states=WAITING,
    button="Touch",
)
def touch(app: Any, ids: Sequence[int], **options: Any) -> Outcome:
    """Touch jobs."""
    return on_jobs("touched", ids, app.jobs.touch(ids, **options), options)


def _see_the_dashboard() -> None:
    import sqlq
    from tests.kit.visitor import Visitor

    visitor = Visitor(sqlq.App())
    page = visitor.page("/jobs")
    assert re.search('formaction="/act/touch" class="" title="sqlq touch ID[^>]*>Touch</button>', page)
    assert "touched 2 jobs: 1, 2." in visitor.done("touch", id=[1, 2])
    page = visitor.page("/jobs/1")
    assert '<form class="act" method="post" action="/act/touch">' in page
    assert '<label title="How much.">by<input name="by" size="7" placeholder="2h"></label>' in page
    assert re.search('title="sqlq touch 1[ "]', page)
    assert "touched 1 job: 1." in visitor.done("touch", id=1, by="2h")


if __name__ == "__main__":
    if sys.argv[1] == "dashboard":
        _see_the_dashboard()
    else:
        from sqlq.cli import main

        sys.modules.pop("sqlq.cli.root", None)  # a forked process has made its commands already
        sys.argv[0] = "sqlq"
        main()
