"""Medians and spread, ratios, targets reached and missed: as JSON, and as a table for people."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measures import Figure, Measure, Medians, ratio
from benchmarks.peers import PEERS


@dataclass(frozen=True)
class Sample:
    """One run of one case; `broken` is the reason why it has no figures."""

    measure: str
    database: str
    case: str
    round: int
    figures: dict[str, float]
    broken: str | None = None


class Report:
    def __init__(
        self, measures: Sequence[Measure], samples: Sequence[Sample], settings: dict[str, Any]
    ) -> None:
        self.measures = measures
        self.samples = samples
        self.settings = settings
        self.values: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
        self.broken: dict[tuple[str, str, str], str] = {}
        for sample in samples:
            if sample.broken is not None:
                self.broken[sample.measure, sample.database, sample.case] = sample.broken
            for figure, value in sample.figures.items():
                self.values[sample.measure, sample.database, sample.case, figure].append(value)
        self.medians = Medians({key: median(values) for key, values in self.values.items()})

    # -- for machines ----------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write results.json and table.md."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "settings": self.settings,
            "targets": self.targets(),
            "samples": [asdict(sample) for sample in self.samples],
        }
        (folder / "results.json").write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
        (folder / "table.md").write_text(self.table())

    def targets(self) -> list[dict[str, Any]]:
        """Return every target whose figures were measured, with what was found."""
        found = []
        for measure in self.measures:
            for target in measure.targets:
                value = target.value(self.medians)
                broken = self.broken.get((measure.name, target.database, target.case))
                if value is None and broken is None:
                    continue
                found.append(
                    {
                        "measure": measure.name,
                        "database": target.database,
                        "case": target.case,
                        "text": target.text,
                        "least": target.least,
                        "most": target.most,
                        "value": value,
                        "reached": value is not None and broken is None and target.reached(value),
                    }
                )
        return found

    # -- for people ------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Return everything as Markdown."""
        lines = ["# What was measured", ""]
        lines += [
            f"- {name}: {value}" for name, value in self.settings.items() if not isinstance(value, dict)
        ]
        lines += [
            "",
            "## Targets",
            "",
            "| measure | database | case | wanted | found | |",
            "|---|---|---|---|---|---|",
        ]
        for target in self.targets():
            bound = f"≥ {target['least']:g}" if target["least"] is not None else f"≤ {target['most']:g}"
            found = "–" if target["value"] is None else f"{target['value']:.2f}"
            verdict = "reached" if target["reached"] else "**missed**"
            wanted = f"{bound} {target['text']}"
            lines.append(
                f"| {target['measure']} | {target['database']} | {target['case']} | {wanted} | {found} | "
                f"{verdict} |"
            )
        for measure in self.measures:
            lines += self._section(measure)
        lines += ["", "## Settings", "", "| subject | versions | how it is run |", "|---|---|---|"]
        for name, subject in self.settings.get("subjects", {}).items():
            versions = ", ".join(f"{package} {version}" for package, version in subject["versions"].items())
            lines.append(f"| {name} | {versions} | {subject['settings']} |")
        return "\n".join(lines) + "\n"

    def _section(self, measure: Measure) -> Iterable[str]:
        cases = list(
            dict.fromkeys(
                (sample.database, sample.case) for sample in self.samples if sample.measure == measure.name
            )
        )
        if not cases:
            return
        yield from ("", f"## {measure.title}", "", measure.what.format(**self.settings.get("size", {})), "")
        compared = ["of the limit", "of the lean limit", "of the best peer"] if measure.subjects else []
        heads = [
            "database",
            "case",
            *(
                f"{name}{f' ({figure.unit})' if figure.unit else ''}"
                for name, figure in measure.figures.items()
            ),
        ]
        yield "| " + " | ".join(heads + compared) + " |"
        yield "|---" * len(heads + compared) + "|"
        for database, case in cases:
            broken = self.broken.get((measure.name, database, case))
            cells = [database, case]
            if broken is not None:
                cells += [f"**broken**: {_cell(broken)}"] + [""] * (len(heads) + len(compared) - 3)
            else:
                cells += [
                    self._figure(measure, database, case, name, figure)
                    for name, figure in measure.figures.items()
                ]
                cells += self._compared(measure, database, case) if compared else []
            yield "| " + " | ".join(cells) + " |"

    def _figure(self, measure: Measure, database: str, case: str, name: str, figure: Figure) -> str:
        values = self.values.get((measure.name, database, case, name), [])
        if not values:
            return "–"
        found = f"{median(values):,.{figure.decimals}f}"
        return (
            found
            if len(values) == 1
            else f"{found} ({min(values):,.{figure.decimals}f} to {max(values):,.{figure.decimals}f})"
        )

    def _compared(self, measure: Measure, database: str, case: str) -> list[str]:
        """The first figure beside those of the limits and of the best peer."""
        name, figure = next(iter(measure.figures.items()))
        own = self.medians.get(measure.name, database, case, name)
        limits = [self.medians.get(measure.name, database, limit, name) for limit in ("limit", "lean")]
        peer = (
            None
            if case in PEERS
            else self.medians.best_peer(measure.name, database, name, more_is_better=figure.more_is_better)
        )
        return ["–" if (r := ratio(own, other)) is None else f"{r:.2f}" for other in (*limits, peer)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]
