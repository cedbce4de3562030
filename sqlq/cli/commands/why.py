"""`sqlq why`: what a job waits for."""

from __future__ import annotations

import click

from sqlq.admin.doctor.doctor import findings
from sqlq.admin.why import why as reasons_of
from sqlq.app.app import App
from sqlq.cli.context import Context
from sqlq.cli.options import takes_json
from sqlq.cli.terminal.output import (
    plain,
    queue_name,
    show_json,
    show_part,
    show_wrapped,
)
from sqlq.config.command_hint import command
from sqlq.model.job import JobDetails


@click.command()
@click.argument("id", type=int)
@takes_json
def why(context: Context, id: int, as_json: bool) -> None:
    """Explain why a job does not run now, and when it will.

    For a running job it names the worker, for an ended one the outcome. Beside each reason stands the command
    that changes it. The findings of sqlq doctor about those who should run it come last.
    """

    context.kind = "reader"
    job = context.app().jobs.get(id)
    listed, problems = reasons(context.app(), job), findings(context.app().database, job)
    if as_json:
        show_json(
            {
                **{name: getattr(job, name) for name in ("id", "state", "queue", "task")},
                "reasons": [{"said": words, "command": line} for line, words in listed],
                "findings": [finding.as_json() for finding in problems],
            }
        )
        return
    error = f": {plain(job.error)}" if job.error else ""
    show_wrapped(
        "", f"job {job.id}, {plain(job.task)} in queue {queue_name(job.queue)}, is {job.state}{error}"
    )
    show_reasons(listed)
    if problems:
        show_part("doctor")
    for finding in problems:
        show_wrapped("", plain(str(finding)), before="  ")


def reasons(app: App, job: JobDetails) -> list[tuple[str | None, str]]:
    """Return why a job is in its state, each reason after the command that changes it."""

    return [
        (each.words and command(each.words, needs_app=each.needs_app), each.text)
        for each in reasons_of(app.database, job)
    ]


def show_reasons(reasons: list[tuple[str | None, str]]) -> None:
    width = max(len(line or "") for line, _ in reasons)
    for line, text in reasons:
        show_wrapped(f"{line:<{width}}  " if line else "", text, before="  ")
