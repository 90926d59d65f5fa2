"""The table of docs/results/smollm2_convert.md: SmolLM2-135M converted in several ways, perplexity on WikiText-2.

Each row is what `qvattn convert smollm2-135m` does, on the first 8 windows of the validation text instead of 8 drawn
with a seed. The sensitivities, which are the same for all rows, and the held-out losses of every window are kept in
WORK, so that the script goes on where it was stopped and several processes may share the rows (a row is claimed by a
lock file).

    python benchmarks/convert_smollm2.py weigh --data $QVATTN_DATA/wikitext-2 --work WORK
    python benchmarks/convert_smollm2.py rows --data $QVATTN_DATA/wikitext-2 --work WORK [--only NAME]
    python benchmarks/convert_smollm2.py table --work WORK --out docs/results/smollm2_convert
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qvattn.hf import adopt
from qvattn.hf.convert import Options, Target, WindowLosses, convert_layers, weighed, window_losses
from qvattn.hf.convert.budget import measure, spend
from qvattn.hf.convert.run import assembled
from qvattn.hf.convert.saving import REPORT, save
from qvattn.hf.convert.specs import target_specs
from qvattn.hf.convert.weighing import Weighing, by_activations
from qvattn.hf.heal.text import cut, read_ids
from qvattn.models import CausalLM

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "original": ("untouched", {}),
    "all-64": ("qv-ka-gqa, all V, G 64", {"g_width": 64}),
    "all-32": ("qv-ka-gqa, all V, G 32", {"g_width": 32}),
    "context-64": ("thin key (G alone), 64", {"g_width": 64, "key_from": "context"}),
    "own-64": ("qv-ka-gqa, own V, G 64", {"g_width": 64, "key_from": "own"}),
    "measured-64": ("qv-ka-gqa, all V, G 64 on average, by measured effect", {"g_width": 64, "budget": "measured"}),
    "activations-64": ("qv-ka-gqa, all V, G 64, activations only", {"g_width": 64, "weighing": "activations"}),
    "mla-256": ("mla, latent 256", {"variant": "mla", "kv_rank": 256}),
    "own-32": ("qv-ka-gqa, own V, G 32", {"g_width": 32, "key_from": "own"}),
    "context-32": ("thin key (G alone), 32", {"g_width": 32, "key_from": "context"}),
    "all-16": ("qv-ka-gqa, all V, G 16", {"g_width": 16}),
    "all-96": ("qv-ka-gqa, all V, G 96", {"g_width": 96}),
    "measured-32": ("qv-ka-gqa, all V, G 32 on average, by measured effect", {"g_width": 32, "budget": "measured"}),
    "context-128": ("thin key (G alone), 128", {"g_width": 128, "key_from": "context"}),
    "mla-224": ("mla, latent 224", {"variant": "mla", "kv_rank": 224}),
}


HEAD = (
    "| model | cache, bytes a token (float32) | share | windows | perplexity | change | keys left |\n"
    "|:--|--:|--:|--:|--:|--:|--:|"
)
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
"""Where the table stands in the page."""
WINDOW, CALIBRATION, HELDOUT = 2048, 8, 16
"""Tokens of a window; windows from the start of the validation text to fit on, and of the test text to measure on."""


def texts(model: CausalLM, data: Path) -> tuple[Tensor, Tensor]:
    """Calibration and held-out windows."""
    found = []
    for file, count in (("wiki.valid.raw.gz", CALIBRATION), ("wiki.test.raw.gz", HELDOUT)):
        path = str(data / file)
        found.append(
            torch.from_numpy(cut(read_ids(path, "data", model.tokenizer), WINDOW, path, "data")[:count]).long()
        )
    return found[0], found[1]


def say(*what: Any) -> None:
    print(time.strftime("%H:%M:%S"), f"cpu {time.process_time():.0f} s:", *what, flush=True)


def original(work: Path) -> CausalLM:
    """SmolLM2-135M in our classes; read from the package's file once."""
    kept = work / "models" / "smollm2-135m"
    if not kept.is_dir():
        save(adopt("smollm2-135m"), {}, kept)
    return adopt(str(kept))


def weigh(data: Path, work: Path) -> None:
    model = original(work)
    calibration, _ = texts(model, data)
    found = weighed(model, calibration, Options(calibration=str(data)), say)
    torch.save(found, work / "weighings.draft")
    (work / "weighings.draft").rename(work / "weighings.pt")


def row(name: str, data: Path, work: Path) -> None:
    given = dict(ROWS[name][1])
    model, converted = original(work), work / "models" / name
    calibration, heldout = texts(model, data)
    info: dict[str, Any] = {"options": dict(given)}
    if given and (converted / REPORT).is_file():
        model = adopt(str(converted))
        info |= json.loads((converted / REPORT).read_text())
    elif given:
        budget, weighing = given.pop("budget", "equal"), given.pop("weighing", "sensitivity")
        target = Target(**{"variant": "qv-ka-gqa"} | given)
        if weighing == "activations":
            weighings = by_activations(model, calibration)
        else:
            with torch.serialization.safe_globals([Weighing]):
                weighings = torch.load(work / "weighings.pt", weights_only=True)
        specs = target_specs(model, target)
        if budget == "measured":
            specs = spend(measure(model, specs, calibration, weighings, scored=1, progress=say), specs)
        residuals = convert_layers(model, specs, calibration, weighings, say)
        model = assembled(model, specs).eval()
        info["key_residuals"] = [r.keys for r in residuals]
        info["value_residuals"] = [r.values for r in residuals]
        info["widths"] = [spec.d_ctx or spec.kv_rank for spec in specs]
        save(model, info, converted)
    info["cache_bytes_per_token"] = model.cache_elements_per_token() * model.dtype.itemsize
    write(work / f"{name}.json", info)
    for i in range(len(heldout)):
        kept = work / f"{name}.w{i}.json"
        if not kept.is_file():
            write(kept, window_losses(model, heldout[i : i + 1]).sums[0])
            say(name, "window", i + 1)
    say("row", name, "done")


def write(path: Path, value: Any) -> None:
    path.with_suffix(".draft").write_text(json.dumps(value))
    path.with_suffix(".draft").rename(path)


def rows(data: Path, work: Path, only: str | None) -> None:
    for name in [only] if only else list(ROWS):
        if len(measured(work, name)) == HELDOUT:
            continue
        lock = work / f"{name}.lock"
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        try:
            row(name, data, work)
        finally:
            lock.unlink()


def measured(work: Path, name: str) -> dict[int, float]:
    """Window -> summed loss, as far as it was measured."""
    files = {i: work / f"{name}.w{i}.json" for i in range(HELDOUT)}
    return {i: json.loads(file.read_text()) for i, file in files.items() if file.is_file()}


def table(work: Path, out: Path) -> None:
    """A row where at least half of the windows are measured, on those windows that the original has too."""
    base, results = measured(work, "original"), []
    share = json.loads((work / "original.json").read_text())["cache_bytes_per_token"]
    for name in ROWS:
        mine = measured(work, name)
        if len(mine) < HELDOUT // 2:
            continue
        info, windows = json.loads((work / f"{name}.json").read_text()), sorted(mine.keys() & base.keys())
        own, original = (
            WindowLosses(sums=tuple(sums[i] for i in windows), per_window=WINDOW - 1) for sums in (mine, base)
        )
        change = own.against(original)
        results.append(
            {"row": name, "name": ROWS[name][0], "options": ROWS[name][1], "widths": info.get("widths")}
            | {"cache_bytes_per_token": info["cache_bytes_per_token"], "windows": len(windows)}
            | {"cache_share": info["cache_bytes_per_token"] / share, "perplexity": own.perplexity}
            | {"percent": change.percent, "low": change.low, "high": change.high}
            | {
                "mean_key_residual": mean(info.get("key_residuals")),
                "losses": dict(zip(windows, own.sums, strict=True)),
            }
        )
    out.with_suffix(".json").write_text(json.dumps({"window": WINDOW, "rows": results}, indent=1) + "\n")
    lines = [HEAD]
    for one in sorted(results, key=lambda r: (-r["cache_share"], r["perplexity"])):
        interval = f"{one['percent']:+.2f} % ({one['low']:+.2f} to {one['high']:+.2f})"
        left = "" if one["mean_key_residual"] is None else f"{100 * one['mean_key_residual']:.2f} %"
        cells = (one["name"], f"{one['cache_bytes_per_token']:,}", f"{100 * one['cache_share']:.1f} %")
        cells += (str(one["windows"]), f"{one['perplexity']:.3f}", "" if one["row"] == "original" else interval, left)
        lines.append(f"| {' | '.join(cells)} |")
    page = out.with_suffix(".md")
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text("\n".join((before + BEGIN, *lines, END)) + rest.partition(END)[2], encoding="utf-8")
    print("\n".join(lines))


def mean(values: list[float] | None) -> float | None:
    return None if not values else sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weigh", "rows", "table"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.what == "weigh":
        weigh(given.data, given.work)
    elif given.what == "rows":
        rows(given.data, given.work, given.only)
    else:
        table(given.work, given.out)


if __name__ == "__main__":
    main()
