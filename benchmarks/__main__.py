"""The command: `python -m benchmarks` measures everything, `--quick` what has goals, in some minutes, and
`--smoke` only that everything can be measured."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import click

from benchmarks import measures as rooms
from benchmarks.bench import PATIENCE_SECONDS, QUICK, SMOKE, Bench, Size
from benchmarks.environments import Environments
from benchmarks.measures import Measure
from benchmarks.peers import OURS, PEERS, find
from benchmarks.plots import draw
from benchmarks.report import Report, Sample
from benchmarks.servers import Servers, why_no_mariadb

MEASURED_QUICKLY = (
    *("enqueue-one", "enqueue-session", "enqueue-many", "drain", "drain-lines", "drain-two"),
    *("drain-together", "latency", "latency-lone", "slots", "memory", "status"),
)


def _peers(names: str) -> tuple[str, ...]:
    if names in ("all", "none"):
        return PEERS if names == "all" else ()
    asked = tuple(name.strip() for name in names.split(","))
    if unknown := set(asked) - set(PEERS):
        raise click.BadParameter(
            f"there is no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}",
            param_hint="--peers",
        )
    return asked


@click.command()
@click.option("--quick", is_flag=True, help="Measure what has goals: one round, no peers.")
@click.option(
    "--smoke",
    is_flag=True,
    help="Measure nothing of worth: small sizes, one round, no peers, nothing but Python and pip's wheels.",
)
@click.option("--only", multiple=True, metavar="MEASURE", help="Measure only this; may be given again.")
@click.option(
    "--case",
    "only_cases",
    multiple=True,
    metavar="CASE",
    help="Only cases whose name has this in it; may be given again.",
)
@click.option(
    "--database",
    "only_databases",
    multiple=True,
    metavar="DATABASE",
    help="Only on postgresql, sqlite, mariadb or redis.",
)
@click.option(
    "--peers",
    default=None,
    metavar="all|none|NAME,NAME",
    help="The peers to measure beside sqlq  [default: all, or none with --quick or --smoke]",
)
@click.option(
    "--rounds",
    type=int,
    default=None,
    help="How often each case is run, all cases in turn  [default: 3; with --quick or --smoke 1]",
)
@click.option("--jobs", type=int, default=None, help="How many jobs are drained.")
@click.option("--growth", type=float, default=None, help="A factor for the rows of the growth measure.")
@click.option(
    "--database-url",
    default=None,
    help="A PostgreSQL to use, by a superuser's URL  [default: one of its own]",
)
@click.option(
    "--redis-url", default=None, help="A Redis to use, which is emptied  [default: a redis-server from PATH]"
)
@click.option(
    "--environments",
    type=click.Path(path_type=Path),
    default=None,
    help="Where peers are installed  [default: a cache folder]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="A folder for results.json, table.md and the plots.",
)
@click.option(
    "--list", "only_list", is_flag=True, help="Name the measures and their cases, and measure nothing."
)
def main(
    quick: bool,
    smoke: bool,
    only: tuple[str, ...],
    only_cases: tuple[str, ...],
    only_databases: tuple[str, ...],
    peers: str | None,
    rounds: int | None,
    jobs: int | None,
    growth: float | None,
    database_url: str | None,
    redis_url: str | None,
    environments: Path | None,
    out: Path | None,
    only_list: bool,
) -> None:
    """Measure sqlq beside hand-written SQL and beside its peers, all in turn on this machine, and print a
    table.

    Exits with 1 when a measure of sqlq or of the limit broke; a broken peer is reported, and a missed target
    is, too.
    """
    asked = _peers(peers or ("none" if quick or smoke else "all"))
    rounds = rounds or (1 if quick or smoke else 3)
    size = SMOKE if smoke else QUICK if quick else Size()
    size = replace(size, jobs=jobs or size.jobs, growth=growth if growth is not None else size.growth)
    known = rooms.load()
    if unknown := set(only) - {measure.name for measure in known}:
        raise click.BadParameter(
            f"there is no measure {', '.join(sorted(unknown))}; see --list", param_hint="--only"
        )
    only = only or (MEASURED_QUICKLY if quick else ())
    wanted = [measure for measure in known if not only or measure.name in only]
    begun, samples = time.monotonic(), list[Sample]()
    with Servers(database_url, redis_url) as servers:
        absent = why_no_mariadb()
        if absent and "mariadb" in (only_databases or ("mariadb",)):
            click.secho(f"NOTHING IS MEASURED ON MARIADB: {absent}", err=True, bold=True)
        bench = Bench(servers, Environments(environments), size, patience=60.0 if smoke else PATIENCE_SECONDS)
        for measure in wanted:
            cases = [
                (database, case)
                for database, case in measure.cases(bench, asked)
                if (not smoke or only or case in asked or measure.smoke(database, case))
                and (not only_cases or any(part in case for part in only_cases))
                and (not only_databases or database in only_databases)
                and not (absent and database == "mariadb")
            ]
            if only_list:
                click.echo(f"{measure.name}: {measure.title}")
                for database, case in cases:
                    click.echo(f"    {database}: {case}")
                continue
            samples += _run(bench, measure, cases, min(rounds, measure.rounds or rounds))
        if only_list:
            return
        report = Report(wanted, samples, _settings(bench, asked, rounds, time.monotonic() - begun))
    if not samples:
        raise click.ClickException("no case of these measures has such a name on these databases; see --list")
    click.echo("\n" + report.table())
    if out is not None:
        report.write(out)
        draw(report, out)
        click.echo(f"written to {out}")
    if any(sample.broken and sample.case not in PEERS for sample in samples):
        sys.exit(1)


def _run(bench: Bench, measure: Measure, cases: list[tuple[str, str]], rounds: int) -> list[Sample]:
    """Run all cases in turn, A B C A B C; a case that broke is not tried again."""
    samples: list[Sample] = []
    broken: set[tuple[str, str]] = set()
    for number in range(1, rounds + 1):
        for database, case in cases:
            if (database, case) in broken:
                continue
            begun = time.monotonic()
            try:
                sample = Sample(measure.name, database, case, number, measure.run(bench, database, case))
                said = ", ".join(
                    f"{name} {value:,.{measure.figures[name].decimals}f}"
                    for name, value in sample.figures.items()
                )
            except Exception as error:  # whatever it is, it is reported and the others go on
                broken.add((database, case))
                sample = Sample(
                    measure.name, database, case, number, {}, broken=f"{type(error).__name__}: {error}"
                )
                said = f"broken: {sample.broken}"
            samples.append(sample)
            click.echo(
                f"{measure.name} {number}/{rounds} · {database} · {case}: {said}  "
                f"[{time.monotonic() - begun:.1f} s]"
            )
    return samples


def _settings(bench: Bench, peers: tuple[str, ...], rounds: int, seconds: float) -> dict[str, object]:
    """Return the versions, machine and options of a run, by which a reader judges the figures."""
    subjects = {}
    for name in (*OURS, *peers):
        subject = find(name)
        try:
            versions = bench.inside(subject, "versions")
        except Exception as error:  # a peer that could not even be installed
            versions = {"broken": str(error)}
        subjects[name] = {
            "versions": versions,
            "settings": f"{subject.settings}; handlers are {subject.handles}",
        }
    return {
        "machine": (
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores shared with the databases"
        ),
        "Python": platform.python_version(),
        **bench.servers.settings(),
        "rounds": f"{rounds}, all cases in turn; medians, with the least and the most in brackets",
        "took": f"{seconds / 60:.0f} minutes" if seconds > 120 else f"{seconds:.0f} seconds",
        "size": asdict(bench.size),
        "subjects": subjects,
    }


if __name__ == "__main__":
    main()
