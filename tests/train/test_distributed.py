"""Two gloo processes, each with a whole model or with a part of one, train what one process trains.

All two-process runs are done once, by one torchrun. Tolerances are stated where they are used: the sums are the same,
their order is not, so float32 differs in the last digits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qvattn.data import BatchPlan
from qvattn.errors import UserError
from qvattn.models import CausalLM, TranslationModel
from qvattn.train.checkpoint import find_checkpoint, last_checkpoint
from qvattn.train.dry_run import memory
from qvattn.train.export import export_run
from qvattn.train.history import read_history
from qvattn.train.prepare import encode
from qvattn.train.recipe import Recipe, read_recipe
from qvattn.train.run import run_training
from qvattn.train.sharding import read_shards
from qvattn.variants import VARIANTS

from .conftest import toy_text

pytestmark = pytest.mark.xdist_group("two processes")  # one worker, so that the runs are done once

WORKER = Path(__file__).with_name("distributed_worker.py")
STEPS = 14
TOY = (
    f"train.steps={STEPS}",
    "train.accumulate=2",
    "model.dropout=0",
    "train.validate_every=7",
    "train.report_every=2",
)
TOY += ("train.eps=1e-6",)
LM = ("train.steps=6", "model.dropout=0", "train.validate_every=3", "train.report_every=1", "train.eps=1e-6")
FSDP = ("train.parallel=fsdp2",)


@pytest.fixture(scope="module")
def toy_yaml(corpus_files: dict[str, str]) -> str:
    return toy_text(corpus_files)


@pytest.fixture(scope="module")
def lm_yaml(corpus_files: dict[str, str]) -> str:
    """A language model over the toy's source side; blocks of 16, a batch of 12 of them."""
    return f"""
name: toy lm
task: causal-lm
data: {{corpus: text, train_text: {corpus_files["train_source"]}, valid_text: {corpus_files["valid_source"]},
       vocab_size: 300, block_size: 16, max_tokens: 192}}
model: {{d_model: 16, d_ff: 32, n_heads: 2, decoder_layers: 2, norm_type: rms, activation: swiglu,
        attention: {{variant: k-eq-v, v_heads: 1}}, position: none}}
train: {{learning_rate: 0.01, warmup_steps: 2, tensorboard: false, device: cpu}}
"""


def recipe_of(text: str, *overrides: str) -> Recipe:
    return read_recipe(text, origin="test", overrides=overrides)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, toy_yaml: str, lm_yaml: str) -> Path:
    """The directory in which two processes have done every run of this file; one process's runs are added to it."""
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    run_training(recipe_of(toy_yaml, *TOY), folder / "one-to-two", stop_at=4)

    def job(name: str, text: str, *overrides: str, run: str | None = None, **more: Any) -> dict[str, Any]:
        return {"name": name, "recipe": text, "overrides": overrides, "run_dir": str(folder / (run or name)), **more}

    jobs = [
        job("ddp", toy_yaml, *TOY),
        job("fsdp", toy_yaml, *TOY, *FSDP),
        job("fsdp-part", toy_yaml, *TOY, *FSDP, stop_at=5),
        job("fsdp-rest", toy_yaml, *TOY, *FSDP, run="fsdp-part", resume=True),
        job("one-to-two", toy_yaml, *TOY, *FSDP, resume=True),
        job("two-to-one", toy_yaml, *TOY, *FSDP, stop_at=5),
        job("lm-ddp", lm_yaml, *LM),
        job("lm-fsdp", lm_yaml, *LM, *FSDP),
        job("bf16-ddp", lm_yaml, *LM, "train.precision=bf16"),
        job("bf16-fsdp", lm_yaml, *LM, *FSDP, "train.precision=bf16"),
        job(
            "scored", toy_yaml, *TOY, *FSDP, "train.steps=6", "train.validate_every=2", "train.best_metric=loss",
            "train.score_valid=3", "train.score_test=true", "train.score_beam=2", losses=[2.0, 1.0, 3.0],
        ),
        {"variants": str(folder / "variants.json")},
    ]  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(WORKER, folder / "jobs.json")
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr
    run_training(recipe_of(toy_yaml, *TOY), folder / "one")
    return folder


def torchrun(*command: str | Path) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launch, *map(str, command)], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )


def assert_alike(left: Path, right: Path, *, loss: float, weights: float) -> None:
    """The loss curves within a relative, the last weights within an absolute tolerance."""
    one, two = read_history(left / "history.csv"), read_history(right / "history.csv")
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for a, b in zip(one, two, strict=True):
        assert (a["tokens"], a["epoch"]) == (b["tokens"], b["epoch"])
        for column in ("train_loss", "grad_norm", "valid_loss"):
            assert (a[column] == "") == (b[column] == "")
            if a[column]:
                assert float(a[column]) == pytest.approx(float(b[column]), rel=loss), (a["step"], column)
    for name, tensor in last_weights(left).items():
        torch.testing.assert_close(last_weights(right)[name], tensor, rtol=0, atol=weights, msg=name)


def last_weights(run: Path) -> dict[str, Tensor]:
    return load_file(find_checkpoint(run, "last") / "model.safetensors")


# Measured here: losses apart by 2e-7, weights by 4e-6 (of about 0.3). Adam divides by the root of the second moment,
# which enlarges a difference in the last digit of a gradient near zero.
SAME = {"loss": 1e-5, "weights": 5e-5}


@pytest.mark.parametrize("run", ["ddp", "fsdp", "fsdp-part", "one-to-two"])
def test_two_processes_train_what_one_trains(root: Path, run: str) -> None:
    """Whole, divided, divided and resumed, begun by one process and resumed by two that divide the model."""
    assert_alike(root / "one", root / run, **SAME)


def test_one_process_resumes_what_two_saved_in_shards(root: Path, toy_yaml: str) -> None:
    begun = last_checkpoint(root / "two-to-one")
    assert begun is not None and begun.sharded and not begun.exported
    with pytest.raises(UserError, match=r"lies in shards.*qvattn export .*two-to-one --which last"):
        find_checkpoint(root / "two-to-one", "last")
    run_training(recipe_of(toy_yaml, *TOY), root / "two-to-one", resume=True)
    assert_alike(root / "one", root / "two-to-one", **SAME)


def test_language_model(root: Path, lm_yaml: str) -> None:
    run_training(recipe_of(lm_yaml, *LM), root / "lm-one")
    assert_alike(root / "lm-one", root / "lm-ddp", **SAME)
    assert_alike(root / "lm-one", root / "lm-fsdp", **SAME)
    CausalLM.from_pretrained(find_checkpoint(root / "lm-fsdp"))


def test_bf16(root: Path) -> None:
    """Divided, weights are rounded to bf16 before they are used, norms and position schemes too: 8 bits of mantissa."""
    assert_alike(root / "bf16-ddp", root / "bf16-fsdp", loss=2e-2, weights=3e-2)
    assert {tensor.dtype for tensor in last_weights(root / "bf16-fsdp").values()} == {torch.float32}
    apart = abs(final_loss(root / "bf16-ddp") - final_loss(root / "lm-ddp"))
    assert abs(final_loss(root / "bf16-fsdp") - final_loss(root / "lm-ddp")) < 10 * apart + 1e-3
    assert apart > 0


def final_loss(run: Path) -> float:
    return float(json.loads((run / "results.json").read_text())["valid"]["loss"])


def test_every_variant_divided(root: Path) -> None:
    """Three steps of every variant, divided and whole; nothing is remembered of weights that have changed since."""
    found = json.loads((root / "variants.json").read_text())
    assert found.keys() == VARIANTS.keys()
    for name, apart in found.items():
        assert apart["weights"] < 1e-5, (name, apart)
        assert apart["loss"] < 1e-5, (name, apart)


# -- who reads what ----------------------------------------------------------------------------------------------


def given(root: Path, name: str) -> list[list[int]]:
    """The examples that the two processes were given together, batch by batch."""
    each = [json.loads((root / f"{name}.ids.{rank}.json").read_text()) for rank in range(2)]
    assert len(each[0]) == len(each[1])
    assert all(not set(a) & set(b) for a, b in zip(*each, strict=True))
    return [a + b for a, b in zip(*each, strict=True)]


@pytest.mark.parametrize("names", [("ddp",), ("fsdp",), ("fsdp-part", "fsdp-rest")])
def test_every_example_once_an_epoch(root: Path, toy_yaml: str, names: tuple[str, ...]) -> None:
    """No example twice or missing in an epoch, resumed in its middle or not; neither process does most of the work."""
    recipe = recipe_of(toy_yaml, *TOY)
    lengths = encode(recipe).train.lengths
    plan = BatchPlan(lengths, max_tokens=recipe.data.max_tokens, seed=recipe.train.seed)
    batches = [batch for name in names for batch in given(root, name)]
    assert len(batches) == 2 * STEPS
    first, second = len(plan.epoch(0)), len(plan.epoch(1))
    assert first + second < len(batches)
    for epoch, part in enumerate((batches[:first], batches[first : first + second])):
        assert Counter(i for batch in part for i in batch) == Counter(range(len(lengths)))
        assert [sorted(batch) for batch in part] == [sorted(batch) for batch in plan.epoch(epoch)]


def test_corpus_is_encoded_by_one_process(root: Path) -> None:
    """While it trains the others map it; complete, the run does not keep it. One process of two says anything."""
    assert not (root / "ddp/encoded").exists()
    assert (root / "said.txt").read_text().count(f"step {STEPS}/{STEPS} ") == 4


# -- shards ------------------------------------------------------------------------------------------------------


def test_shards_are_safetensors_of_both_processes(root: Path) -> None:
    checkpoint = last_checkpoint(root / "fsdp")
    assert checkpoint is not None
    files = sorted(path.relative_to(checkpoint.path).as_posix() for path in checkpoint.path.rglob("*.*"))
    assert files == [
        "config.json",
        "model.safetensors",
        *(f"model/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)),
        *(f"optimizer/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)),
        "state.json",
    ]
    assert checkpoint.damage(resume=True) is None
    sizes = [(checkpoint.path / "model" / name).stat().st_size for name in os.listdir(checkpoint.path / "model")]
    assert max(sizes) < 1.2 * min(sizes)


def test_estimated_memory_is_what_a_process_holds(root: Path, toy_yaml: str) -> None:
    """Weights and moments of each of two processes, as counted from their shards, within a tenth of the dry run's."""
    recipe = recipe_of(toy_yaml, *TOY, *FSDP)
    checkpoint = find_checkpoint(root / "fsdp", "last")
    expected = memory(recipe, TranslationModel.from_pretrained(checkpoint), length=8.0, processes=2)
    for folder, kept, name in (("model", "", "weights"), ("optimizer", "exp_avg", "adam")):
        for file in (checkpoint / folder).iterdir():
            tensors = load_file(file)
            held = sum(t.numel() * t.element_size() for key, t in tensors.items() if key.startswith(kept))
            assert held == pytest.approx(expected[name], rel=0.1)


def test_exported_equals_the_shards(root: Path, tmp_path: Path) -> None:
    file = export_run(root / "fsdp", "last", tmp_path / "model")
    saved, whole = load_file(file), last_weights(root / "fsdp")
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    read_shards(find_checkpoint(root / "fsdp", "last") / "model", again)
    for name, tensor in whole.items():
        assert torch.equal(saved[name], tensor) and torch.equal(again[name], tensor), name
    model = TranslationModel.from_pretrained(tmp_path / "model")
    assert model.state_dict().keys() == whole.keys()
    with pytest.raises(UserError, match="exists already"):
        export_run(root / "fsdp", "last", tmp_path / "model")


def test_best_checkpoint_of_a_divided_run_is_scored(root: Path) -> None:
    """The best is not the last: its shards are read back for the test split, and translations are scored."""
    results = json.loads((root / "scored/results.json").read_text())
    assert (results["best"]["step"], results["test"]["step"], results["steps"]) == (4, 4, 6)
    assert {"bleu", "chrf"} <= results["test"].keys()
    assert all(row["valid_bleu"] for row in read_history(root / "scored/history.csv") if row["valid_loss"])
    model = TranslationModel.from_pretrained(root / "scored/checkpoints/best").eval()
    last = TranslationModel.from_pretrained(root / "scored/checkpoints/last").eval()
    encoded = encode(read_recipe((root / "scored/recipe.yaml").read_text(), origin="scored"))
    assert encoded.test is not None
    batch = encoded.test.collate(range(len(encoded.test.lengths)))
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(results["test"]["loss"], rel=1e-5)
        assert float(last(**batch).loss) != pytest.approx(results["test"]["loss"], rel=1e-3)


@pytest.mark.parametrize("damage", ["missing", "short", "flipped name"])
def test_damaged_shards_are_named(root: Path, tmp_path: Path, damage: str) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(find_checkpoint(root / "fsdp", "last") / "model", folder)
    file = folder / "shard-00002-model-00001-of-00001.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.write_bytes(file.read_bytes().replace(b"up_proj", b"xp_proj"))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in last_weights(root / "fsdp").items()}
    with pytest.raises(UserError, match=r"shards in .*model"):
        read_shards(folder, tensors)


def test_fp16_cannot_be_divided(toy_yaml: str) -> None:
    with pytest.raises(UserError, match=r"train\.precision: fp16 cannot be sharded"):
        recipe_of(toy_yaml, *FSDP, "train.precision=fp16")
