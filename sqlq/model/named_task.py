"""Tasks by their names: jobs for handlers that other processes have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlq.config.constants import DEFAULT_QUEUE
from sqlq.model.callbacks import Follower
from sqlq.model.checks import checked_name
from sqlq.model.flow import results_in
from sqlq.model.job import NewJob
from sqlq.model.task import Task
from sqlq.payload.codec import encode


class NamedTask:
    """A task whose name is known, and perhaps nothing else; see `App.named`."""

    def __init__(self, name: str, known: Task[..., Any] | None = None) -> None:
        self.name = checked_name(name, "the task's name")
        self._known = known

    def new(self, /, *args: Any, **kwargs: Any) -> NewJob[Any]:
        """Return a job of this task with these arguments, for `app.enqueue`.

        Raises `ArgumentsError` where a value is not JSON and has no form in it, naming its path. For a task
        that is registered here it raises as the task's own `new` does.
        """
        if self._known is not None:
            return self._known.new(*args, **kwargs)
        from sqlq.payload.conversion import by_value

        where = f"{self.name}: "
        results = tuple(results_in(args, kwargs))
        unknown = {place for place, _ in results}  # in whose places null stands
        args = tuple(
            None if i in unknown else by_value(value, f"{where}args[{i}]") for i, value in enumerate(args)
        )
        kwargs = {
            name: None if name in unknown else by_value(value, f"{where}{name}")
            for name, value in kwargs.items()
        }
        job: NewJob[Any] = NewJob(self.name, encode(args, kwargs, where), DEFAULT_QUEUE, max_attempts=None)
        return replace(job, results=results)  # guard: a-named-task-takes-results

    def as_follow_up(self, option: str, error: type[Exception]) -> str:
        """Return this task as the rows of other jobs name it, which it follows; see `Task.as_follow_up`."""
        return (
            Follower(self.name).as_text() if self._known is None else self._known.as_follow_up(option, error)
        )

    def __repr__(self) -> str:
        return f"NamedTask({self.name!r})"
