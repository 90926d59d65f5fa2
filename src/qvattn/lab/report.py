"""One self-contained HTML page from experiments: tables, learning curves, accuracy against cache, provenance.

The page works offline: styles, script and plotly.js are in it, and its content policy forbids any request.
Everything that comes from data is escaped here or in the script, never trusted as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from qvattn.files import write_atomically
from qvattn.lab import page
from qvattn.lab.curves import Curve, difference_curve, learning_curve, pareto_front
from qvattn.lab.experiment import Experiment, settings
from qvattn.lab.provenance import common_and_own
from qvattn.lab.runs import RunRecord, flatten
from qvattn.lab.statistics import Estimate
from qvattn.lab.summary import Comparison, Row
from qvattn.lab.table import MISSING, Column, columns_of, provenance_lines, whole

_CURVES = {
    "accuracy": "validation token accuracy %",
    "difference": "accuracy, difference to baseline",
    "perplexity": "validation perplexity",
    "loss": "training loss",
}
_SCALE = {"accuracy": 100.0, "difference": 100.0}


def write_report(
    experiments: Sequence[Experiment], path: Path, *, title: str, analyses: Sequence[page.Section] = ()
) -> None:
    """Write the page to `path`, making its directory. analyses: further sections, see `lab.analyses`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, build_page(experiments, title=title, analyses=analyses))


def build_page(experiments: Sequence[Experiment], *, title: str, analyses: Sequence[page.Section] = ()) -> str:
    """The whole page as HTML text."""
    from plotly.offline import get_plotlyjs

    alone = len(experiments) == 1
    sections = [_section(index, experiment, alone=alone) for index, experiment in enumerate(experiments)]
    pictures = [_pictures(experiment) for experiment in experiments]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(page.POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{page.styles(analyses)}</style></head><body><main>",
            f"<header><p class=brand>qvattn</p><h1>{escape(title)}</h1>{_lead(experiments)}</header>",
            *sections,
            *(page.wrapped(index, analysis) for index, analysis in enumerate(analyses)),
            "</main>",
            f"<script>{get_plotlyjs()}</script>",
            f'<script type="application/json" id="pictures">{page.script_json(pictures)}</script>',
            f"<script>{page.asset('report.js')}</script>",
            *(page.scripts(analyses) if analyses else ()),
            "</body></html>\n",
        ]
    )


def _lead(experiments: Sequence[Experiment]) -> str:
    rows = sum(len(experiment.comparison.rows) for experiment in experiments)
    runs = [run for experiment in experiments for run in experiment.runs]
    done = sum(run.complete for run in runs)
    text = f"{_count(rows, 'variant')}, {_count(done, 'finished run')}"
    if done < len(runs):
        text += f", {len(runs) - done} not finished"
    return f"<p class=lead>{escape(text)}</p>"


def _section(index: int, experiment: Experiment, *, alone: bool) -> str:
    comparison = experiment.comparison
    heading = "" if alone else f"<h2>{escape(comparison.title)}</h2>"
    return (
        f"<section>{heading}{_table(comparison)}{_failures(comparison)}{_notes(comparison)}"
        f"{_figures(index, comparison)}{_provenance(experiment)}</section>"
    )


def _table(comparison: Comparison) -> str:
    columns = columns_of(comparison)
    head = "".join(
        f'<th scope=col title="{escape(column.hint)}"><button type=button>{escape(column.title)}</button></th>'
        for column in columns
    )
    body = "".join(_table_row(row, columns) for row in comparison.rows)
    return (
        '<div class=scroll tabindex=0 role=region aria-label="Summary table"><table class="summary sortable">'
        f"<caption>Click a column's head to sort.</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _table_row(row: Row, columns: Iterable[Column]) -> str:
    cells = []
    for index, column in enumerate(columns):
        key = column.key(row)
        order = "" if key is None else escape(str(key))
        kind = f' class="{_tone(row.difference)}"' if column.title.startswith("Δ") else ""
        if index == 0:
            cells.append(f'<th scope=row data-key="{order}">{escape(column.text(row))}</th>')
        else:
            text = escape(column.text(row)).replace(" ± ", " <small>± ") + "</small>" * (" ± " in column.text(row))
            cells.append(f'<td data-key="{order}"{kind}>{text}</td>')
    return f"<tr{' class=baseline' if row.is_baseline else ''}>{''.join(cells)}</tr>"


def _tone(difference: Estimate | None) -> str:
    """How a difference is coloured: only one whose interval leaves out zero is called better or worse."""
    if difference is None or not difference.excludes_zero:
        return "open"
    return "better" if difference.mean > 0 else "worse"


def _failures(comparison: Comparison) -> str:
    items = "".join(
        f"<li><b>{escape(failure.name)}</b>, seed {failure.seed}: {escape(failure.reason)} "
        f"<code>{escape(failure.log)}</code></li>"
        for failure in comparison.failed
    )
    return f"<div class=failed role=alert><p>Failed runs, not in the table:</p><ul>{items}</ul></div>" if items else ""


def _notes(comparison: Comparison) -> str:
    return "<ul class=notes>" + "".join(f"<li>{escape(note)}</li>" for note in comparison.notes) + "</ul>"


def _figures(index: int, comparison: Comparison) -> str:
    """Places for the pictures; the script draws what there is data for and removes the rest."""
    switch = "".join(
        f'<button type=button data-metric="{key}" aria-pressed="{str(key == "accuracy").lower()}">'
        f"{escape(label.removesuffix(' %'))}</button>"
        for key, label in _CURVES.items()
    )
    base = escape(comparison.baseline or "")
    several = any(len(row.seeds) > 1 for row in comparison.rows)
    band = "Line: mean over seeds. Band: lowest to highest seed." if several else "One seed each."
    bars = "Bars: 95 % interval over seeds." if several else "One seed each, so no interval."
    zero = " A bar that crosses zero leaves open which is better." if several else ""
    return f"""
<div class=figures data-experiment="{index}">
<figure class="wide" data-picture="curves"><h3>Learning curves</h3><div class=switch role=group
 aria-label="metric">{switch}</div><div class=plot></div>
<figcaption>{band} Click a name to hide it.</figcaption></figure>
<figure data-picture="pareto"><h3>Accuracy against cache</h3><div class=plot></div>
<figcaption>Further left caches less, further up is more accurate. The dotted line joins the variants that no other
beats on both. Variants that cache the same stand side by side. {bars}</figcaption></figure>
<figure data-picture="differences"><h3>Difference to {base}</h3><div class=plot></div>
<figcaption>Validation token accuracy, percentage points, paired by seed. {bars}{zero}</figcaption></figure>
</div>"""


def _pictures(experiment: Experiment) -> dict[str, Any]:
    comparison = experiment.comparison
    names = [row.name for row in comparison.rows]
    groups = {name: [run for run in experiment.runs if run.name == name] for name in names}
    base = groups.get(comparison.baseline or "", [])
    made: dict[str, Callable[[str], Curve | None]] = {
        "accuracy": lambda name: learning_curve(name, groups[name], "valid_accuracy"),
        "difference": lambda name: difference_curve(name, groups[name], base, "valid_accuracy"),
        "perplexity": lambda name: learning_curve(name, groups[name], "valid_perplexity"),
        "loss": lambda name: learning_curve(name, groups[name], "train_loss"),
    }
    curves = {
        key: {
            "label": label,
            "lines": [
                {"index": index, **_curve_json(curve, scale=_SCALE.get(key, 1.0))}
                for index, name in enumerate(names)
                if (curve := made[key](name)) is not None
            ],
        }
        for key, label in _CURVES.items()
    }
    return {"names": names, "curves": curves, "pareto": _pareto(comparison), "differences": _differences(comparison)}


def _curve_json(curve: Curve, scale: float) -> dict[str, Any]:
    band = curve.seeds > 1
    return {
        "seeds": curve.seeds,
        "x": list(curve.steps),
        "y": [scale * value for value in curve.mean],
        "low": [scale * value for value in curve.low] if band else [],
        "high": [scale * value for value in curve.high] if band else [],
    }


def _pareto(comparison: Comparison) -> dict[str, Any]:
    points = [
        {"index": index, "x": row.cache_elements_per_token_layer, **_bar(row.accuracy)}
        for index, row in enumerate(comparison.rows)
        if row.accuracy is not None and row.cache_elements_per_token_layer is not None
    ]
    front = pareto_front([(point["x"], point["y"]) for point in points])
    return {"points": points, "front": front}


def _differences(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {"index": index, **_bar(row.difference)}
        for index, row in enumerate(comparison.rows)
        if row.difference is not None
    ]


def _bar(value: Estimate) -> dict[str, Any]:
    return {"y": 100 * value.mean, "error": None if value.half_width is None else 100 * value.half_width}


def _provenance(experiment: Experiment) -> str:
    lines = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in provenance_lines(experiment.comparison)
    )
    common, own = common_and_own([settings(run) for run in experiment.runs])
    shared = yaml.safe_dump(_unflatten(common), sort_keys=False, allow_unicode=True) if common else ""
    recipe = f"<details><summary>Recipe shared by all runs</summary><pre>{escape(shared)}</pre></details>"
    rows = "".join(_provenance_row(run, mine) for run, mine in zip(experiment.runs, own, strict=True))
    titles = ("run", "seed", "status", "steps", "accuracy %", "seconds", "commit", "own settings", "directory")
    head = "".join(f"<th scope=col><button type=button>{title}</button></th>" for title in titles)
    return (
        f"<h3>Provenance</h3><dl>{lines}</dl>{recipe if shared else ''}"
        f"<details><summary>{_count(len(experiment.runs), 'run')}</summary><div class=scroll tabindex=0 role=region"
        f' aria-label="Runs"><table class="runs sortable"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )


def _provenance_row(run: RunRecord, own: dict[str, Any]) -> str:
    accuracy, seconds = run.number("valid", "accuracy"), run.number("seconds")
    steps = run.number("steps") or (run.history[-1].step if run.history else None)
    commit = str(run.environment.get("commit") or MISSING)
    cells: list[tuple[str, Any]] = [
        (run.name, run.name),
        (str(run.seed), run.seed),
        ("complete" if run.complete else "not finished", run.complete),
        (whole(steps), steps),
        (MISSING if accuracy is None else f"{100 * accuracy:.2f}", accuracy),
        (whole(seconds), seconds),
        (commit[:10] + ("+changes" if commit.endswith("+changes") else ""), commit),
        ("\n".join(f"{key}: {value}" for key, value in own.items()) or MISSING, str(own)),
        (str(run.directory), str(run.directory)),
    ]
    texts = [f'<td data-key="{escape("" if key is None else str(key))}">{escape(text)}</td>' for text, key in cells]
    return f'<tr title="{escape(_environment_text(run))}">{"".join(texts)}</tr>'


def _environment_text(run: RunRecord) -> str:
    return "\n".join(f"{key}: {value}" for key, value in flatten(run.environment).items()) if run.environment else ""


def _unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
