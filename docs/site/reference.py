"""The reference, made of the code: commands, Python, settings, errors, exit codes and metrics.

    python -m docs.site.reference           writes docs/reference/*.md: `poe reference`
    python -m docs.site.reference --check   fails where a file differs from the code: a part of `poe check`

`PAGES` maps the name of each page to the function that writes it. Signatures and help texts are formatted
here, since releases of Python and of click format them differently.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final, ForwardRef, NamedTuple

import click
from sqlalchemy import Table

import sqlq
from sqlq import errors as of_errors
from sqlq.app.options import RETENTION, VARIABLES
from sqlq.cli.root import sqlq as command_line
from sqlq.config.constants import MAX_ATTEMPTS
from sqlq.config.urls import DEFAULT_URL
from sqlq.metrics.collectors import OF_THE_DATABASE, OF_WORKERS, Described
from sqlq.model.foreign_names import NameOfAnotherQueue
from sqlq.worker.options import OPTIONS
from sqlq.worker.options import SETTINGS as OF_WORK

FOLDER = Path(__file__).parents[1] / "reference"
WIDEST = 100

# -- commands ------------------------------------------------------------------------------------------------


def each_command(
    command: click.Command = command_line, name: str = "sqlq", parent: click.Context | None = None
) -> Iterator[tuple[click.Context, click.Command]]:
    """Yield each command that people see, with the context of its words."""
    context = click.Context(command, info_name=name, parent=parent)
    yield context, command
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None and not found.hidden:
                yield from each_command(found, below, context)


def commands() -> str:
    """Return the page of all commands."""
    parts = [
        "# Commands\n\nThese are the texts of `sqlq COMMAND --help`. The options of `sqlq` stand before the "
        "command or after it. [Exit codes](exit-codes.md) have a page.\n"
    ]
    for context, command in each_command():
        words = context.command_path
        usage = " ".join((words, *command.collect_usage_pieces(context)))
        parts += [f"## {words}\n\n```text\n{usage}\n```\n", f"{_help(command.help or '')}\n"]
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        if options:
            parts.append("".join(map(_option, options)))
    return "\n".join(parts)


def _help(text: str) -> str:
    """Return a help text as Markdown: a paragraph after \\b as a block of code."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        is_code = paragraph.startswith("\b")
        body = paragraph.removeprefix("\b\n")
        parts.append(f"```text\n{body}\n```" if is_code else _escaped(body))
    return "\n\n".join(parts)


def _option(option: click.Option) -> str:
    """Return the list item of an option: its names, the form of its value, and its help."""
    value = "" if option.is_flag else f" {option.metavar or _form(option.type)}"
    words = [f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts)]
    default = option.default if option.show_default and isinstance(option.default, str | int) else None
    text = (option.help or "") + (f" Default: {default}." if default is not None else "")
    return f"- {', '.join(words)}: {_escaped(text.strip())}\n"


def _form(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(map(str, kind.choices))
    return kind.name.partition(" ")[0].upper()


def _escaped(text: str) -> str:
    return re.sub(r"(?<!`)([*<])(?!`)", r"\\\1", text)


# -- Python --------------------------------------------------------------------------------------------------

OBJECTS: Final = (
    *("sqlq.admin.jobs.Jobs", "sqlq.admin.queues.Queues", "sqlq.admin.workers.Workers"),
    *("sqlq.admin.flows.Flows", "sqlq.admin.limits.Limits", "sqlq.admin.schedules.Schedules"),
    *("sqlq.admin.facet.Audit", "sqlq.worker.worker.Worker"),
)
"""Classes that have no public name: an App returns their objects."""

MODULES: Final = (
    *("sqlq.testing", "sqlq.metrics", "sqlq.otel", "sqlq.alembic", "sqlq.tables"),
    "sqlq.types",
    "sqlq.web",
)
"""Public modules beside `sqlq` and `sqlq.errors`. `sqlq.django` needs settings, and has a guide."""


def names_of(module: str) -> list[str]:
    """Return the public names of a module: those that it lists, else those that it defines."""
    found = import_module(module)
    listed: list[str] | None = getattr(found, "__all__", None)
    if listed is not None:
        return sorted(listed)
    return sorted(
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module and callable(value)
    )


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods and properties of a class that have docstrings, without those of other packages."""
    for name in sorted(dir(owner)):
        value = inspect.getattr_static(owner, name)
        if name.startswith("_") or isinstance(value, NameOfAnotherQueue):
            continue
        value = getattr(value, "__func__", value)
        if not inspect.getdoc(value):
            continue
        if isinstance(value, property | cached_property) or (
            inspect.isfunction(value) and value.__module__.startswith("sqlq")
        ):
            yield name, value


def signature(value: Any, name: str) -> str:
    """Return how something is called, one parameter a line where the line is long."""
    called = inspect.signature(value)
    parameters = [
        each for each in called.parameters.values() if each.name != "self" and not each.name.startswith("_")
    ]
    shown, kinds = list(map(_parameter, parameters)), [each.kind for each in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    if only := kinds.count(inspect.Parameter.POSITIONAL_ONLY):
        shown.insert(only, "/")
    returns = "" if inspect.isclass(value) else f" -> {_annotation(called.return_annotation)}"
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= WIDEST:
        return line
    lines = "".join(f"    {each},\n" for each in shown)
    return f"{name}(\n{lines}){returns}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    return f"{text} = {_default(parameter.default)}"


def _annotation(found: Any) -> str:
    """Return an annotation, which each module of sqlq has as text."""
    text = found.__forward_arg__ if isinstance(found, ForwardRef) else str(found)
    return text.replace("builtins.", "").replace(" | Kept", "")


def _default(value: Any) -> str:
    if isinstance(value, str) and not isinstance(value, Enum):
        return json.dumps(value)
    is_plain = isinstance(value, int | float | tuple | None) and not isinstance(value, Enum)
    return repr(value) if is_plain else "…"


def prose(value: Any) -> str:
    """Return a docstring as Markdown: its examples as blocks of code."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", inspect.getdoc(value) or ""):
        if paragraph.lstrip().startswith(">>>"):
            paragraph = f"```pycon\n{re.sub(r'  # doctest:.*', '', paragraph)}\n```"
        parts.append(paragraph)
    return "\n\n".join(parts)


def _described(name: str, value: Any, level: int, *, is_made: bool = False) -> Iterator[str]:
    """Yield the part of a name. An object that `is_made` by an App is not called by people."""
    yield f"{'#' * level} {name}\n"
    if not is_made and (code := _code(name, value)):
        yield f"```python\n{code}\n```\n"
    if inspect.isclass(value) and issubclass(value, Enum):
        yield f"{prose(value)}\n\nOne of {', '.join(f'`{each.value}`' for each in value)}.\n"
        return
    if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, property | cached_property):
        yield f"{prose(value)}\n"
    elif isinstance(value, Table):
        columns = textwrap.fill(" ".join(column.name for column in value.columns), WIDEST)
        yield f"Its columns:\n\n```text\n{columns}\n```\n"
    if inspect.isclass(value) and not issubclass(value, Exception):
        for each, member in members(value):
            yield from _described(f"{value.__name__}.{each}", member, level + 1)


def _code(name: str, value: Any) -> str:
    """Return how a name is called, or the value of a constant; nothing for a member that is not called."""
    short = name.rpartition(".")[2]
    if isinstance(value, property | cached_property | Table) or _is_builtin(value):
        return ""
    if inspect.isclass(value) or inspect.isroutine(value):
        return signature(value, short)
    return f"{short} = {value if isinstance(value, str) else repr(value).removeprefix('typing.')}"


def _is_builtin(value: Any) -> bool:
    """Whether it is an Enum, or else a class that is called as a class of Python's own."""
    if not inspect.isclass(value) or issubclass(value, Enum):
        return inspect.isclass(value)
    own = [vars(each) for each in value.__mro__ if each.__module__.startswith("sqlq")]
    return not any("__init__" in each or "__new__" in each for each in own)


def python() -> str:
    """Return the page of all public names, with their signatures and docstrings."""
    parts = ["# Python\n\nAll public names, as their docstrings describe them.\n"]
    parts += ["## sqlq\n"]
    for name in sqlq.__all__:
        if name not in vars(of_errors):  # these have a page
            parts += _described(f"sqlq.{name}", getattr(sqlq, name), 3)
    parts += ["## Parts of an App\n"]
    for path in OBJECTS:
        module, _, name = path.rpartition(".")
        parts += _described(name, getattr(import_module(module), name), 3, is_made=True)
    for module in MODULES:
        found = import_module(module)
        parts += [f"## {module}\n\n{prose(found)}\n"]
        for name in names_of(module):
            parts += _described(f"{module}.{name}", getattr(found, name), 3)
    return "\n".join(parts)


# -- settings ------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Where one thing is set, who reads it, and what holds where it is not set."""

    about: str
    argument: str = ""
    variable: str = ""
    key: str = ""
    default: str = ""
    reader: str = "each App"


COMMANDS, LOOKS, TESTS = "commands", "commands that only look, and the dashboard", "tests"


def _of_workers() -> Iterator[Setting]:
    for name in OF_WORK:
        option, key = OPTIONS[name], name.replace("_", "-")
        about = option.help[0].lower() + option.help[1:]
        variable, reader = f"SQLQ_{name.upper()}", str(option.read_by)
        yield Setting(about, f"work --{key}", variable, key, option.default or "none", reader)


SETTINGS: Final = (
    Setting("the App of the commands", "sqlq -a", "SQLQ_APP", "app", "none", COMMANDS),
    Setting("the database", "url", "SQLQ_DATABASE_URL", "database-url", DEFAULT_URL),
    Setting("the engine whose way of connecting sqlq takes", "engine"),
    Setting("the schema of the tables", "schema", "SQLQ_SCHEMA", "", "the connection's"),
    Setting("how long finished jobs are kept", "retention", "SQLQ_RETENTION", "retention", RETENTION),
    Setting("the replica that looks read from", "", "SQLQ_READ_URL", "read-url", "none", LOOKS),
    Setting("where idle workers listen", "listen_url", "SQLQ_LISTEN_URL", "", "the database's URL"),
    *_of_workers(),
    Setting("the session of jobs that are enqueued without one", "session", default="their own transaction"),
    Setting("whether jobs run in the process that enqueues them", "eager", "SQLQ_EAGER", "eager", "no"),
    Setting("options of all jobs", "defaults", "", "defaults", "none"),
    Setting("options of the jobs of a queue", "queues", "", "queues", "none"),
    Setting("attempts of a job", 'defaults["max_attempts"]', "SQLQ_MAX_ATTEMPTS", "", str(MAX_ATTEMPTS)),
    Setting("time of an attempt", 'defaults["timeout"]', "SQLQ_TIMEOUT", "", "no limit"),
    Setting("the wait before the next attempt", 'defaults["backoff"]', "SQLQ_BACKOFF", "", "1 s, doubling"),
    Setting("context variables that travel with a job", "carry", default="none"),
    Setting("the name of the application on its database", "service", default="none"),
    Setting("keys that sign and encrypt", "keys", "SQLQ_KEYS", "", "none"),
    Setting("whether they sign or encrypt", "encryption", "SQLQ_ENCRYPTION", "", "sign"),
    Setting("which plain rows run where there are keys", "plain", "SQLQ_PLAIN", "", "refuse"),
    Setting("calls of a task as a function", "direct_calls", default="allow"),
    Setting("where `sqlq_app` is", "", "SQLQ_TEST_DATABASE_URL", "", "a file for each test", TESTS),
)
"""All settings of an App, its workers and its commands. Arguments of one word are those of `sqlq.App`."""


def settings() -> str:
    """Return the page of all settings."""
    parts = [
        "# Settings\n\nAn argument comes before the variable of the environment, the variable before the key "
        "of `[tool.sqlq]` in `pyproject.toml`. "
        "[Settings and retention](../settings-and-retention.md) explains them.\n\n"
        "| what | argument | variable | key | default | who reads it |\n|---|---|---|---|---|---|\n"
    ]
    for each in SETTINGS:
        cells = [f"`{cell}`" if cell else "" for cell in (each.argument, each.variable, each.key)]
        parts.append(f"| {each.about} | {' | '.join(cells)} | {each.default} | {each.reader} |\n")
    options = ", ".join(f"`SQLQ_{name.upper()}`" for name in VARIABLES)
    parts.append(
        "\nAn argument of one word is that of `sqlq.App`; those of `sqlq work` are those of `app.worker`, "
        "too. An App is that of a producer, a worker or a command. "
        f"{options} are defaults for jobs. `[tool.sqlq.defaults]` and `[tool.sqlq.queues.NAME]` take all "
        "options of jobs: see "
        "[their order](../settings-and-retention.md#options-of-jobs-tasks-queues-and-the-app).\n"
    )
    return "".join(parts)


# -- errors, exit codes, metrics -----------------------------------------------------------------------------


def each_error() -> list[type[Exception]]:
    """Return the error classes in the order in which they are defined."""
    found = [value for value in vars(of_errors).values() if inspect.isclass(value)]
    return [value for value in found if issubclass(value, of_errors.SqlqError)]


WHAT_TO_DO: Final = {
    "SqlqError": "Catch a kind of it. Catch this one where any error of sqlq is handled alike.",
    "ConfigurationError": "Mend the setting that the message names. The transaction is still usable.",
    "UnsupportedDatabaseError": "Take a database, or a version, "
    "that [is supported](../databases-and-connections.md).",
    "MissingFileError": "Run `sqlq migrate`, which makes the file, or mend the path in the URL.",
    "SchemaVersionError": "Run `sqlq migrate`, or install the version of sqlq that the message names.",
    "EnqueueError": "Mend the call: nothing was written, and the transaction is still usable.",
    "UnknownTaskError": "Import the module that defines the task, or enqueue it by `app.named`.",
    "ArgumentsError": "Give the handler's arguments, as JSON or as what its annotations name.",
    "ExecutionError": "Wait: the job is tried again while it has attempts. `sqlq show ID` has its history.",
    "JobTimeoutError": "Give it more time by `timeout=`, or cut it into slices by "
    "[checkpoints](../idempotency-and-checkpoints.md#checkpoints).",
    "LeaseLostError": "Let it pass: roll back, and stop. Another worker has the job, or it was cancelled.",
    "WorkerLostError": "Look why the process died: memory, a signal, a crash. The job is tried again.",
    "JobNotFoundError": "Commit first, or look into the database that has it. Rows are kept for a time.",
    "ScheduleNotFoundError": "Take a name that `sqlq schedules` lists.",
    "NoResultError": "Wait longer, or have the handler return what can be kept.",
    "JobFailedError": "Read `exception` and `message`; mend the cause, then `sqlq retry ID`.",
    "JobCancelledError": "Enqueue it anew, or `sqlq replay ID`, if it was cancelled by mistake.",
    "WaitTimeoutError": "Wait again with the same job: it goes on. `sqlq why ID` says what it waits for.",
    "PayloadKeyError": "Give this process the key: [signed and encrypted payloads](../encryption.md).",
}
"""The remedy for each error class."""


def errors() -> str:
    """Return the page of all error classes."""
    parts = [f"# Errors\n\n{prose(of_errors)}\n"]
    for each in each_error():
        bases = ", ".join(f"`{base.__name__}`" for base in each.__bases__)
        where = "sqlq" if each.__name__ in sqlq.__all__ else "sqlq.errors"
        parts.append(
            f"## {each.__name__}\n\n`{where}.{each.__name__}`, a kind of {bases}.\n\n{prose(each)}\n\n"
            f"**Remedy.** {WHAT_TO_DO[each.__name__]}\n"
        )
    return "\n".join(parts)


EXIT_CODES: Final = (
    ("all", 0, "done"),
    ("all", 1, "it could not be done; one sentence on standard error says why"),
    ("all", 2, "the command line is wrong"),
    ("all", 130, "interrupted by Ctrl-C"),
    ("migrate", 1, "with `--check`: this sqlq does not work with the tables"),
    ("enqueue", 3, "nothing was enqueued: a live job holds the unique key"),
    ("cancel", 1, "one of the named jobs was not cancelled"),
    ("reschedule", 1, "one of the named jobs does not wait"),
    ("change", 1, "one of the named jobs was not changed"),
    ("retry", 1, "one of the ids has not failed, or a live job holds its unique key"),
    ("replay", 1, "one of the ids has not ended, or is a step of a flow"),
    ("delete", 1, "one of the named jobs has not ended"),
    ("show", 1, "there is no such job; with `--result`: it has no result"),
    ("why", 1, "there is no such job"),
    ("doctor", 1, "there is something to do"),
    ("health", 1, "the worker is not alive"),
    ("work", 1, "the App, its lifespan or five worker processes in a row failed at their start"),
    ("work", 128, "plus the number of the signal: it was told to stop at once"),
)
"""The exit codes: command, code, meaning."""


def exit_codes() -> str:
    """Return the page of the exit codes."""
    rows = "".join(f"| `{command}` | {code} | {said} |\n" for command, code, said in EXIT_CODES)
    return f"# Exit codes\n\n| command | code | meaning |\n|---|---|---|\n{rows.replace('`all`', 'all')}"


def _metrics(title: str, described: tuple[Described, ...]) -> Iterator[str]:
    yield f"\n## {title}\n\n| name | kind | labels | |\n|---|---|---|---|\n"
    for each in described:
        name = f"{each.name}_total" if each.kind == "counter" else each.name
        labels = " ".join(f"`{label}`" for label in each.labels)
        yield f"| `{name}` | {each.kind} | {labels} | {each.help} |\n"


def metrics() -> str:
    """Return the page of all metrics."""
    parts = ["# Metrics\n\n[Observability](../observability.md) says how they are counted.\n"]
    parts += _metrics("sqlq work --metrics-port", OF_WORKERS)
    parts += _metrics("sqlq metrics", OF_THE_DATABASE)
    return "".join(parts)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "commands": commands,
    "python": python,
    "settings": settings,
    "errors": errors,
    "exit-codes": exit_codes,
    "metrics": metrics,
}


def differing() -> list[str]:
    """Return the pages whose file is not equal to the code."""
    return [name for name, write in PAGES.items() if _written(FOLDER / f"{name}.md") != write()]


def _written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def main(arguments: Sequence[str]) -> int:
    if arguments == ["--check"]:
        for name in (names := differing()):
            print(f"docs/reference/{name}.md differs from the code: run `poe reference`")
        return int(bool(names))
    for name, write in PAGES.items():
        (FOLDER / f"{name}.md").write_text(write())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
