"""`app.flows`: to look at flows, retry or cancel their steps, and skip one."""

from __future__ import annotations

import builtins
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlq.admin.batches import Cancellation, cancel, move_back
from sqlq.admin.facet import Facet, audited, for_asyncio
from sqlq.admin.selections import no_job
from sqlq.errors import JobNotFoundError
from sqlq.model.checks import Rows
from sqlq.model.flow import FlowDetails, FlowStatus, OnOutcome, StepDetails
from sqlq.model.flow_parts import EnqueuedFlow
from sqlq.model.job import JobDetails, State
from sqlq.payload.codec import decoded
from sqlq.payload.encryption import Encryption
from sqlq.store.blockers import free_after
from sqlq.store.flows import flows as flow_rows
from sqlq.store.jobs import lookup, settle
from sqlq.store.jobs.lookup import Selection

FlowOrId = EnqueuedFlow | FlowStatus | int
SKIPPED = "it was skipped by an operator"


class Flows(Facet):
    """The flows in a database: `app.flows`."""

    def list(self, *, limit: Rows = 100) -> builtins.list[FlowStatus]:
        """Return the newest flows, and how many steps of each are in which state."""
        rows, counts = self._query(flow_rows.newest, limit)
        return [FlowStatus(row.id, row.name, row.created_at, _counted(counts[row.id])) for row in rows]

    def get(self, id: FlowOrId) -> FlowDetails:
        """Return a flow with its progress, the number of its steps in each state, and the steps. Each step
        has the steps that it waits for, and its result.

        Reads all steps and their results. Raises `JobNotFoundError`.

        >>> app.flows.get(7).progress  # doctest: +SKIP
        Progress(done=3, of=4, note=None)
        """
        number = _number(id)
        flow = self._query(flow_rows.rows_of, number)
        if flow is None:
            raise _no_flow(number)
        row, rows, edges = flow
        after: dict[int, dict[int, OnOutcome]] = {}
        for edge in edges:
            after.setdefault(edge.job_id, {})[edge.depends_on] = edge.on_outcome
        steps = tuple(_step(step, after.get(step.id, {}), self._database.encryption) for step in rows)
        return FlowDetails(
            row.id, row.name, row.created_at, _counted(Counter(step.state for step in rows)), steps
        )

    aget = for_asyncio(get)

    def _arguments(self, job: JobDetails) -> Any:
        """Return the payload of a step as its handler gets it, with the results of the steps before it. A
        text stands for a result that is not there."""
        if not isinstance(job.payload, dict) or "results" not in job.payload:
            return job.payload
        steps = [
            step._replace(result=json.dumps(f"(the result of job {step.id}, not there)"))
            if step.why
            else step
            for step in self._query(flow_rows.before, {job.id: job.queue}).get(job.id, [])
        ]
        return decoded(flow_rows.with_results(json.dumps(job.payload), steps)[0])

    @audited("cancel --flow")
    def cancel(
        self, id: FlowOrId, *, force: bool = False, reason: str | None = None
    ) -> dict[int, Cancellation]:
        """Cancel the live steps of a flow, as `app.jobs.cancel` does; steps that have ended stay. Raises
        `JobNotFoundError`."""
        return cancel(self._database, [Selection(flow_id=self._require(id))], force=force, reason=reason)

    @audited("retry --flow")
    def retry(self, id: FlowOrId) -> builtins.list[int]:
        """Move the failed steps of a flow back to be run again, after which it goes on; return their ids.
        Raises `JobNotFoundError`."""
        return move_back(self._database, [Selection(flow_id=self._require(id))])[0]

    @audited("flows skip")
    def skip(self, id: int) -> FlowStatus:
        """Go on as if a step had finished, without a result: one that has failed, or that waits. Return its
        flow.

        A step that waits for its success runs. One that needs its result fails, with that as its reason.
        Raises `JobNotFoundError` for a job that is no such step, with the reason.
        """
        job = self._query(lookup.details, id, self._database.encryption)
        if job is None:
            raise no_job(id)
        if job.flow_id is None:
            raise JobNotFoundError(
                f"job {id} is a step of no flow: there is nothing that its skip would free"
            )
        if not self._database.run(lambda conn: settle.skip(conn, id, SKIPPED)):
            raise JobNotFoundError(
                f"job {id} is {job.state}: only a step that waits or has failed can be skipped"
            )
        self._database.after_commit(lambda: free_after(self._database.for_claims, [job]))
        return self.get(job.flow_id)

    def _require(self, flow: FlowOrId) -> int:
        id = _number(flow)
        if not self._query(flow_rows.exists, id):
            raise _no_flow(id)
        return id


def _number(flow: FlowOrId) -> int:
    return flow if isinstance(flow, int) else flow.id


def _no_flow(id: int) -> JobNotFoundError:
    return JobNotFoundError(f"there is no flow {id}: it never was, or is kept no more")


def _counted(counts: Mapping[str, int]) -> dict[State, int]:
    return {state: counts[state.value] for state in State if counts.get(state.value)}


def _step(row: Any, after: Mapping[int, OnOutcome], encryption: Encryption | None) -> StepDetails:
    error = row.reason if row.exception is None else f"{row.exception}: {row.message or ''}"
    result = None if row.result is None else lookup.result_shown(encryption, row.task, row.queue, row.result)
    return StepDetails(
        row.id, row.task, row.queue, row.label, State(row.state), row.attempts, after, result, error
    )
