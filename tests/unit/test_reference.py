"""The reference has all that the code has and equals its files, and commands exit with its codes."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import sqlq
from docs.site import navigation, reference
from sqlq.admin.verbs import VERBS
from sqlq.app.options import VARIABLES
from sqlq.cli.root import _COMMANDS
from sqlq.cli.root import sqlq as command_line
from sqlq.config.pyproject import _KEYS
from sqlq.metrics.collectors import OF_THE_DATABASE, OF_WORKERS
from sqlq.model.job_options import JobOptions
from sqlq.worker.options import OPTIONS, SETTINGS, WORK, WORKERS, WorkerOptions
from tests.kit.preloaded import preloaded
from tests.kit.processes import run_program

ROOT = Path(__file__).parents[2]
PYTHON, DIFFERING = reference.python(), reference.differing()
"""As the code is before a fixture replaces methods."""
KEY = "q6XhB8p9w2QxF0dS3kL7mN1vC5zR4tYbU8iOeP6aG0w"


def commands_below(group: click.Group, words: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if not command.hidden:
            yield f"{words} {name}", command
            if isinstance(command, click.Group):
                yield from commands_below(command, f"{words} {name}")


def test_the_reference_has_each_command_with_its_options() -> None:
    page = re.split(r"^## (.+)$", reference.commands(), flags=re.MULTILINE)
    parts = dict(zip(page[1::2], page[2::2], strict=True))
    known = dict(commands_below(command_line, "sqlq"))
    assert parts.keys() == {"sqlq", *known}
    for words, command in known.items():
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        assert not [each.opts[0] for each in options if each.opts[0] not in parts[words]], words


def test_help_has_the_first_sentence_of_each_command() -> None:
    """It has them from a table, and imports no command."""
    assert {name: each.get_short_help_str(200) for name, each in command_line.commands.items()} == _COMMANDS
    program = "import sys; from sqlq.cli import main\ntry: main()\nfinally: print(*sys.modules, sep='\\n')"
    usual = {"sqlq.cli.root", "sqlq.cli.context", "sqlq.cli.processes", "sqlq.cli.commands"}
    for words, imported in (("--help", set()), ("health --help", {"sqlq.cli.commands.health"})):
        modules = {*run_program("-c", program, *words.split()).stdout.splitlines()}
        assert {name for name in modules if name.startswith("sqlq.cli.")} - usual == imported
        assert "sqlalchemy" not in modules


def options_of(*commands: click.Command) -> set[str]:
    options = [each for command in commands for each in command.params if isinstance(each, click.Option)]
    return {name for each in options for name in (*each.opts, *each.secondary_opts)} | {"--help", "--json"}


def test_each_command_that_a_page_names_exists_with_its_options() -> None:
    named = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for said in re.findall(r"`(?:manage\.py )?sqlq ([a-z][^`]*)`", prose):
            command: click.Command = command_line
            words = [word for word in said.split() if word not in ("-a", "shop:app")]
            while words and isinstance(command, click.Group) and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            assert command is not command_line, f"{page.name}: sqlq {said}"
            options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert options <= options_of(command_line, command), f"{page.name}: sqlq {said}"
            named += 1
    assert named > 200


def test_the_reference_has_each_public_name_with_its_docstring() -> None:
    assert "0x" not in PYTHON
    for name in sqlq.__all__:
        if name not in vars(sqlq.errors):
            (first, *_) = (inspect.getdoc(getattr(sqlq, name)) or "").splitlines()
            assert first in part_of(f"sqlq.{name}"), name
    assert "enqueue(\n    job: JobOrFlow[J],\n    session: AnySession = None,\n" in part_of("App.enqueue")
    assert "```pycon\n>>> with Session(engine)" in part_of("App.enqueue")


DESCRIBED = {
    *(sqlq.App, sqlq.App.use, sqlq.App.worker, sqlq.App.result, sqlq.App.wait_all, sqlq.Flow.add, sqlq.Limit),
    *(sqlq.Serial, sqlq.Schedule, sqlq.Retry, sqlq.exponential, sqlq.linear, sqlq.fibonacci),
    sqlq.NewJob.set,
}


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda each: each.__qualname__)
def test_a_docstring_has_a_line_for_each_parameter_in_their_order(described: Callable[..., Any]) -> None:
    lines = re.findall(r"^- `(\w+)`: ", inspect.getdoc(described) or "", re.MULTILINE)
    if described == sqlq.NewJob.set:
        assert lines == list(JobOptions.__annotations__)
        return
    assert lines == [name for name in inspect.signature(described).parameters if name not in ("self", "_")]


def part_of(name: str) -> str:
    return re.split(r"^#{2,4} ", PYTHON.partition(f"### {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_reference_has_each_argument_variable_and_key() -> None:
    said = [each.argument for each in reference.SETTINGS]
    arguments = {each.partition("[")[0] for each in said if each and " " not in each}
    assert arguments == inspect.signature(sqlq.App).parameters.keys()
    sources = "".join(path.read_text() for path in (ROOT / "sqlq").rglob("*.py"))
    read = set(re.findall(r"\bSQLQ_[A-Z_]*[A-Z]\b", sources))
    read |= {f"SQLQ_{name.upper()}" for name in (*VARIABLES, *SETTINGS)}
    assert {each.variable for each in reference.SETTINGS if each.variable} == read
    assert {each.key for each in reference.SETTINGS if each.key} == _KEYS.keys()
    assert all(f"`{each.variable}`" in reference.settings() for each in reference.SETTINGS if each.variable)


def use(app: sqlq.App) -> None:
    """Read what an App reads at its first task, and where it connects to."""
    app.task(name="t")(lambda: None)
    assert app._connected.address is not None


@pytest.mark.parametrize(
    "setting", [each for each in reference.SETTINGS if each.variable], ids=lambda each: each.variable
)
def test_a_variable_is_read_by_whom_its_row_names(
    setting: reference.Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It complains of a value that no setting has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQLQ_KEYS", KEY if setting.variable in ("SQLQ_ENCRYPTION", "SQLQ_PLAIN") else "")
    monkeypatch.setenv(setting.variable, "?")
    refused = pytest.raises(sqlq.errors.ConfigurationError, match=rf"^{setting.variable} is '\?'")
    url = () if setting.variable == "SQLQ_DATABASE_URL" else ("postgresql://nowhere/none",)
    if setting.reader == "each App":
        with pytest.raises(sqlq.errors.ConfigurationError):
            use(sqlq.App(*url))
    elif setting.reader == WORKERS:
        app = sqlq.App(*url)
        with refused:
            app.worker()
    elif setting.reader == WORK:
        with refused:
            WorkerOptions.of(None, WORK)
    else:
        files = {
            reference.COMMANDS: ("cli/context.py", f'"{setting.variable}"'),
            reference.LOOKS: ("web/reading.py", "read_url"),
            reference.TESTS: ("testing/fixtures.py", f'"{setting.variable}"'),
        }
        file, reads = files[setting.reader]
        assert reads in (ROOT / "sqlq" / file).read_text()


def test_each_option_of_workers_is_an_option_of_the_command_and_an_argument() -> None:
    arguments = inspect.signature(sqlq.App.worker).parameters.keys() - {"self", "queues"}
    of_the_command = {name for name in OPTIONS if OPTIONS[name].read_by == WORK} - {"max_jobs", "max_rss"}
    assert arguments == OPTIONS.keys() - of_the_command - {"isolate", "start_timeout", "stuck_after"}
    options = options_of(command_line.commands["work"])
    assert options >= {f"--{name.replace('_', '-')}" for name in OPTIONS}


def kinds_of(error: type[Exception]) -> set[type[Exception]]:
    return {error}.union(*map(kinds_of, error.__subclasses__()))


def test_the_reference_has_each_error_and_each_metric() -> None:
    public = {each for each in kinds_of(sqlq.SqlqError) if each.__module__ == "sqlq.errors"}
    assert set(reference.each_error()) == public
    assert all(f"## {each.__name__}\n" in reference.errors() for each in public)
    assert reference.WHAT_TO_DO.keys() == {each.__name__ for each in public}
    assert reference.errors().count("**Remedy.** ") == len(public)
    page = reference.metrics()
    for metric in (*OF_WORKERS, *OF_THE_DATABASE):
        assert f"`{metric.name}`" in page or f"`{metric.name}_total`" in page


def test_each_command_that_exits_with_a_code_of_its_own_is_listed() -> None:
    listed = {command.split()[0] for command, *_ in reference.EXIT_CODES}
    commands = (ROOT / "sqlq" / "cli" / "commands").glob("*.py")
    with_codes = {path.stem for path in commands if "raise SystemExit" in path.read_text()}
    assert with_codes == {"migrate", "enqueue", "doctor"}
    with_codes |= {words for words, verb in VERBS.items() if verb.is_of_jobs and not verb.group}
    assert listed > with_codes, f"EXIT_CODES in reference.py lacks {with_codes - listed}"


@pytest.mark.parametrize(
    ("words", "command", "code"),
    [
        *(("--version", "all", 0), ("jobs", "all", 1), ("jobs --nonsense", "all", 2)),
        *(("cancel 99", "cancel", 1), ("show 99", "show", 1), ("health nowhere", "health", 1)),
        *(("migrate --check", "migrate", 1), ("doctor", "doctor", 1)),
    ],
)
def test_a_command_exits_with_its_code(words: str, command: str, code: int, tmp_path: Path) -> None:
    assert (command, code) in {(each, number) for each, number, _ in reference.EXIT_CODES}
    environment = os.environ | {"SQLQ_DATABASE_URL": f"sqlite:///{tmp_path}/q.db"}
    if command in ("cancel", "show"):
        assert preloaded().run(["migrate"], tmp_path, environment, timeout=60).returncode == 0
    done = preloaded().run(words.split(), tmp_path, environment, timeout=60)
    assert done.returncode == code, done.stderr


def test_the_files_of_the_reference_are_equal_to_the_code() -> None:
    assert DIFFERING == [], "run `poe reference`"
    assert {path.stem for path in reference.FOLDER.iterdir()} == reference.PAGES.keys()


def test_the_check_names_a_page_that_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(reference.PAGES, "errors", lambda: "another text")
    assert reference.main(["--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "docs/reference/errors.md differs from the code: run `poe reference`" in lines


def test_the_navigation_has_each_page_by_its_title() -> None:
    listed = [page for _, pages in navigation.groups() for page in pages]
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in (*docs.glob("*.md"), *reference.FOLDER.glob("*.md"))}
    assert set(listed) >= written
    assert len(listed) == len(set(listed))
    pages = sorted(path.name for path in docs.glob("*.md"))
    names = {page: re.sub(r"\W+", "-", navigation.title_of(page).lower()) for page in pages}
    assert {page: name for page, name in names.items() if page != f"{name}.md"} == {}
    assert len(pages) <= 26


def test_the_readmes_table_is_the_navigation() -> None:
    """`python -m docs.site.navigation` writes it."""
    readme = (ROOT / "README.md").read_text()
    assert navigation.with_table(readme) == readme
