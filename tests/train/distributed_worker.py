"""One of several processes, started by torchrun: does a list of training runs and notes which examples it was given.

    torchrun --nproc_per_node 2 distributed_worker.py JOBS.json

JOBS.json: a list of {recipe: YAML text, overrides, run_dir, resume, stop_at}. The examples of each run go to
RUN_DIR.ids.RANK.json, as a list of lists of indices, one for each batch of this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qvattn.train.loop import Batch, Trainer
from qvattn.train.recipe import read_recipe
from qvattn.train.run import run_training


def main(jobs_file: str) -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(jobs_file).read_text()):
        seen = watch()
        recipe = read_recipe(job["recipe"], origin="job", overrides=job["overrides"])
        run_training(recipe, job["run_dir"], resume=job.get("resume", False), stop_at=job.get("stop_at"))
        rank = torch.distributed.get_rank()
        Path(f"{job['run_dir']}.ids.{job.get('name', 'all')}.{rank}.json").write_text(json.dumps(seen))


def watch() -> list[list[int]]:
    """From now on every batch that training takes is noted in the list returned."""
    seen: list[list[int]] = []
    original = ORIGINAL

    def step(self: Trainer, batches: Any) -> None:
        collate = self.data.collate

        def noting(indices: Sequence[int]) -> Batch:
            seen.append([int(index) for index in indices])
            return collate(indices)

        self.data.collate = noting  # type: ignore[method-assign]
        try:
            original(self, batches)
        finally:
            self.data.collate = collate  # type: ignore[method-assign]

    Trainer._step = step  # type: ignore[method-assign]
    return seen


ORIGINAL = Trainer._step

if __name__ == "__main__":
    main(sys.argv[1])
