"""Run directories with invented numbers, as `qvattn train` would have written them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

STEPS = (100, 200, 300, 400, 500)
COLUMNS = (
    "step,epoch,tokens,seconds,train_loss,train_accuracy,learning_rate,grad_norm,tokens_per_second,"
    "valid_loss,valid_perplexity,valid_accuracy"
)


def write_run(
    directory: Path,
    *,
    name: str,
    seed: int,
    accuracy: float = 0.48,
    cache: int = 512,
    speed: float = 5000.0,
    status: str = "complete",
    test: dict[str, Any] | None = None,
    steps: tuple[int, ...] = STEPS,
    variant: str = "mha",
) -> Path:
    """Write one run; a `status` other than "complete" leaves results.json out."""
    directory.mkdir(parents=True, exist_ok=True)
    loss = 2.9 - 2 * accuracy
    lines = [COLUMNS]
    for step in steps:
        reached = accuracy * (1 - math.exp(-4 * step / steps[-1])) / (1 - math.exp(-4))
        nll = 2.9 - 2 * reached
        lines.append(f"{step - 50},0,1,1,{nll + 0.4},0.3,0.001,1.0,{speed},,,")
        lines.append(f"{step},0,1,1,{nll + 0.2},0.3,0.001,1.0,{speed},{nll},{math.exp(nll)},{reached}")
    (directory / "history.csv").write_text("\n".join(lines) + "\n")
    recipe = {
        "name": name,
        "task": "translation",
        "data": {"corpus": "verses", "vocab_size": 2500},
        "model": {"d_model": 96, "n_heads": 8, "attention": {"variant": variant}, "position": "sinusoidal"},
        "train": {"steps": steps[-1], "batch_tokens": 2000, "seed": seed},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    environment = {
        "started": f"2026-01-0{seed}T10:00:00+00:00",
        "command": ["qvattn", "train"],
        "commit": "0123456789abcdef",
        "python": "3.11.9",
        "platform": "Linux-x86_64",
        "versions": {"qvattn": "0.1.0", "torch": "2.13.0"},
        "device": "cpu",
        "device_name": "Invented CPU",
        "threads": 1,
        "seed": seed,
    }
    (directory / "environment.json").write_text(json.dumps(environment))
    results = {
        "status": status,
        "task": "translation",
        "name": name,
        "variant": {"attention": variant},
        "seed": seed,
        "steps": steps[-1],
        "parameters": {"total": 1_234_567, "attention": 345_678},
        "cache_elements_per_token": {"layer": cache, "model": 2 * cache},
        "train_tokens_per_second": speed,
        "decode_tokens_per_second": 2 * speed,
        "seconds": 61.5,
        "valid": {"accuracy": accuracy, "loss": loss, "perplexity": math.exp(loss), "tokens": 1000},
        "best": {"step": steps[-1], "metric": "accuracy", "value": accuracy, "accuracy": accuracy},
        "test": test,
        "data": {},
    }
    if status == "complete":
        (directory / "results.json").write_text(json.dumps(results))
    return directory


def write_comparison(
    root: Path,
    variants: dict[str, tuple[float, int]],
    *,
    baseline: str,
    seeds: tuple[int, ...] = (1, 2, 3),
    noise: float = 0.002,
    title: str = "fake",
) -> Path:
    """A finished comparison directory: `variants` maps a name to its accuracy and cache elements."""
    root.mkdir(parents=True)
    grid = {"variants": [{"name": name} for name in variants], "baseline": baseline, "seeds": list(seeds), "jobs": 2}
    (root / "compare.yaml").write_text(yaml.safe_dump({"name": title, "compare": grid}))
    for number, (name, (accuracy, cache)) in enumerate(variants.items()):
        for seed in seeds:
            random.seed(f"{number} {seed}")
            shared = random.Random(seed).gauss(0, noise)
            write_run(
                root / "runs" / f"v{number}--seed{seed}",
                name=name,
                seed=seed,
                accuracy=accuracy + shared + random.gauss(0, noise / 2),
                cache=cache,
                speed=5000 + random.gauss(0, 300),
                variant=name.split(",")[0].lower(),
            )
    return root
