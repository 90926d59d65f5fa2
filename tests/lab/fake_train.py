"""Stands in for `qvattn train PLAN --run-dir DIR`: writes an invented run at once, and fails for names with "bad"."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from fakes import write_run

ACCURACY = {"QKV": 0.49, "QV": 0.48}


def main(plan: str, directory: str) -> None:
    recipe = yaml.safe_load(Path(plan).read_text())
    name, seed = recipe["name"], recipe["train"]["seed"]
    if "bad" in name:
        print("Traceback ...")
        print("qvattn: error: n_heads must divide d_model")
        sys.exit(2)
    write_run(Path(directory), name=name, seed=seed, accuracy=ACCURACY.get(name, 0.4) + 0.001 * seed, cache=64)


if __name__ == "__main__":
    main(*sys.argv[1:3])
