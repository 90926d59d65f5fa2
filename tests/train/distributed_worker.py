"""One of several processes, started by torchrun: does a list of training runs and notes which examples it was given.

    torchrun --nproc_per_node 2 distributed_worker.py JOBS.json

JOBS.json: a list of {name, recipe: YAML text, overrides, run_dir, resume, stop_at, losses}, or {variants: FILE}. The
examples of a run go to NAME.ids.RANK.json beside JOBS.json, as a list of lists of indices, one for each batch of this
process. losses: what validations say, instead of what they find.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from qvattn.errors import UserError
from qvattn.models import CausalLM, CausalLMConfig, initialise
from qvattn.train.loop import Batch, Trainer
from qvattn.train.processes import Processes
from qvattn.train.recipe import read_recipe
from qvattn.train.run import run_training
from qvattn.train.sharding import divide, whole_weights
from qvattn.variants import VARIANTS


def main(jobs_file: Path) -> None:
    torch.set_num_threads(1)
    for job in json.loads(jobs_file.read_text()):
        if "variants" in job:
            every_variant(Path(job["variants"]))
            continue
        seen = watch()
        evaluate = Trainer.evaluate
        if "losses" in job:
            script(job["losses"])
        recipe = read_recipe(job["recipe"], origin="job", overrides=job["overrides"])
        try:
            run_training(recipe, job["run_dir"], resume=job.get("resume", False), stop_at=job.get("stop_at"))
        finally:
            Trainer.evaluate = evaluate  # type: ignore[method-assign]
        rank = torch.distributed.get_rank()
        jobs_file.with_name(f"{job['name']}.ids.{rank}.json").write_text(json.dumps(seen))


def script(losses: Sequence[float]) -> None:
    """Validations say these losses, in turn, and then what they find."""
    values, real = iter(losses), Trainer.evaluate

    def scripted(self: Trainer, batches: Sequence[Batch]) -> Any:
        scores = real(self, batches)
        loss = next(values, None)
        return scores if loss is None else type(scores)(**{**scores.as_dict(), "loss": loss})

    Trainer.evaluate = scripted  # type: ignore[method-assign]


def every_variant(out: Path) -> None:
    """Train a tiny language model of every variant divided and whole, side by side, and note how far they are apart."""
    processes = Processes(Accelerator(cpu=True))
    found = {name: apart(name, processes) for name in VARIANTS}
    if processes.is_main:
        out.write_text(json.dumps(found))


def apart(variant: str, processes: Processes) -> dict[str, float]:
    """The largest difference of a weight after three steps, and of the validation losses before and after each."""
    whole, divided = (tiny(variant) for _ in range(2))
    divide(divided, processes, torch.device("cpu"), precision="fp32", reshard=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (whole, divided)]
    ids = torch.randint(4, 40, (5, 9), generator=torch.Generator().manual_seed(3))
    mine = ids[processes.index :: processes.count]
    gaps = [validation(whole, ids) - validation(divided, ids)]
    for _ in range(3):
        (whole(ids, labels=ids, reduction="sum").loss / 40).backward()
        (divided(mine, labels=mine, reduction="sum").loss * processes.count / 40).backward()
        for optimizer in optimizers:
            optimizer.step()
            torch.autograd.graph.increment_version(optimizer.param_groups[0]["params"])
            optimizer.zero_grad()
        gaps.append(validation(whole, ids) - validation(divided, ids))
    weights = whole_weights(divided, keep=True)
    far = max(float((weights[name] - tensor).abs().max()) for name, tensor in whole.state_dict().items())
    return {"weights": far, "loss": max(map(abs, gaps))}


def tiny(variant: str) -> CausalLM:
    """Two layers, with a position scheme that has parameters where the variant allows one."""
    for position in ("agf+pcm-v", "rope", "none"):
        with suppress(UserError):
            config = CausalLMConfig(
                vocab_size=40, d_model=16, d_ff=32, n_heads=2, layers=2, attention=variant, position=position, dropout=0
            )
            model = CausalLM(config)
            initialise(model, 1)
            return model
    raise AssertionError(f"{variant} allows no position scheme")


def validation(model: CausalLM, ids: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(ids, labels=ids, reduction="mean").loss)
    model.train()
    return loss


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
    main(Path(sys.argv[1]))
