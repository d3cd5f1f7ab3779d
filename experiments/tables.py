"""Tables for the paper, made from rows and from nothing else: Markdown and LaTeX."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness import (
    ROOT,
    Config,
    Experiment,
    Row,
    config_hash,
    problems,
    read_rows,
    results_path,
)

TABLES = ROOT / "paper" / "tables"

# Marks of a cell that is not measured, where the column holds several kinds.
MARKS = {"simulated": "s", "analytic": "a", "cited": "c"}
MARK_TEXT = {
    "simulated": "simulated, not measured",
    "analytic": "from a formula, not measured",
    "cited": "as published by others",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """Text of one cell and the kind of the row it comes from."""

    text: str
    kind: str = "measured"


@dataclasses.dataclass(frozen=True)
class Table:
    """A rendered table before its output format. Numeric columns are aligned right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    numeric: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table row: expected {len(self.columns)} cells, got {len(row)}")


# -- cells


def number(value: Any, digits: int = 3) -> str:
    """A number at `digits` significant digits, "–" where it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"


def estimate(value: Mapping[str, Any] | None, digits: int = 3, scale: float = 1.0) -> str:
    """ "median [low, high]" of an estimate, multiplied by `scale` (1e3 for milliseconds)."""
    if value is None or value["value"] is None:
        return "–"
    middle, low, high = (number(value[k] * scale, digits) for k in ("value", "low", "high"))
    return middle if low == high == middle else f"{middle} [{low}, {high}]"


def provenance(rows: Sequence[Row]) -> tuple[str, ...]:
    """The notes every table ends with: machine, versions, commits, n, what an interval is."""

    def each(values: Any) -> str:
        return ", ".join(sorted({str(v) for v in values}))

    if not rows:
        return ("No rows.",)
    devices = (f"{r['device']['count']} {r['device']['kind']} devices" for r in rows)
    return (
        f"{each(r['cpu']['model'] + ', ' + str(r['cpu']['cores']) + ' cores' for r in rows)}; "
        f"{each(devices)}; jax {each(r['versions']['jax'] for r in rows)}; "
        f"commit {each(r['commit'][:12] for r in rows)}; n = {each(r['n'] for r in rows)}; "
        "brackets are 95 % bootstrap intervals of the median.",
    )


# -- formats


def _marked(table: Table) -> tuple[list[list[str]], list[str]]:
    """Cell texts, with marks in the columns that mix kinds, and the marks' legend."""
    mixed = {
        column
        for column in range(len(table.columns))
        if len({row[column].kind for row in table.rows}) > 1
    }
    used = set()
    texts = []
    for row in table.rows:
        line = []
        for column, cell in enumerate(row):
            mark = MARKS.get(cell.kind, "") if column in mixed else ""
            if mark:
                used.add(cell.kind)
            line.append(cell.text + (f" ({mark})" if mark else ""))
        texts.append(line)
    kinds = {cell.kind for row in table.rows for cell in row}
    legend = [f"({MARKS[kind]}) {MARK_TEXT[kind]}." for kind in MARKS if kind in used]
    if len(kinds) == 1 and kinds != {"measured"}:
        legend.append(f"All cells {MARK_TEXT[kinds.pop()]}.")
    return texts, legend


def markdown(table: Table) -> str:
    """The table as a Markdown document."""
    texts, legend = _marked(table)
    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
    lines = [list(table.columns), rule, *texts]
    body = "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in lines)
    notes = "".join(f"\n{note}\n" for note in (*legend, *table.notes))
    return f"**{table.caption}**\n\n{body}\n{notes}"


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
}


def latex_text(text: str) -> str:
    """Text with LaTeX's own characters escaped."""
    return "".join(_LATEX.get(c, c) for c in text)


def latex(table: Table, label: str) -> str:
    """The table as a LaTeX float that needs the `booktabs` package."""
    texts, legend = _marked(table)
    align = "".join("r" if i in table.numeric else "l" for i in range(len(table.columns)))

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(latex_text, cells)) + r" \\"

    notes = " ".join(map(latex_text, (*legend, *table.notes)))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_text(table.caption)}}}",
            rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            line(table.columns),
            r"\midrule",
            *map(line, texts),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\par\smallskip{{\footnotesize {notes}\par}}",
            r"\end{table}",
            "",
        ]
    )


# -- writing and checking


def render(experiment: Experiment, rows: Sequence[Row]) -> dict[str, str]:
    """File name -> text, for every table of an experiment."""
    files = {}
    for name, build in experiment.tables.items():
        table = build(rows)
        files[f"{name}.md"] = markdown(table)
        files[f"{name}.tex"] = latex(table, name)
    return files


def ordered(experiment: Experiment, configs: Sequence[Config], rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of the experiment's configs; others keep theirs, at the end."""
    place = {h: i for i, h in enumerate(config_hash(experiment.name, c) for c in configs)}
    return sorted(rows, key=lambda row: place.get(row["config_hash"], len(place)))


def write(
    experiments: Mapping[str, Experiment],
    results: pathlib.Path,
    tables: pathlib.Path = TABLES,
    smoke: bool = False,
) -> list[pathlib.Path]:
    """Writes the tables of every experiment that has rows; the files written."""
    written = []
    tables.mkdir(parents=True, exist_ok=True)
    for files in _rendered(experiments, results, smoke).values():
        for name, text in files.items():
            (tables / name).write_text(text, encoding="utf-8")
            written.append(tables / name)
    return written


def check(
    experiments: Mapping[str, Experiment],
    results: pathlib.Path,
    tables: pathlib.Path = TABLES,
    smoke: bool = False,
) -> list[str]:
    """What stands between these rows and tables and a paper; nothing when all is well."""
    found = []
    for experiment in experiments.values():
        rows = read_rows(results_path(results, experiment.name))
        found += problems(experiment, experiment.configs(smoke), rows, smoke)
    expected = {
        name: text
        for files in _rendered(experiments, results, smoke).values()
        for name, text in files.items()
    }
    for name, text in expected.items():
        path = tables / name
        if not path.exists():
            found.append(f"missing table: {name}")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"table differs from its rows: {name}")
    for path in sorted([*tables.glob("*.md"), *tables.glob("*.tex")]):
        if path.name not in expected:
            found.append(f"table of no experiment: {path.name}")
    return found


def _rendered(
    experiments: Mapping[str, Experiment], results: pathlib.Path, smoke: bool
) -> dict[str, dict[str, str]]:
    out = {}
    for name, experiment in experiments.items():
        rows = read_rows(results_path(results, name))
        if rows:
            out[name] = render(experiment, ordered(experiment, experiment.configs(smoke), rows))
    return out
