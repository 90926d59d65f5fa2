"""`qvattn train` as a user meets it: exit codes, what goes to stdout and stderr, --dry-run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from qvattn.cli import main
from qvattn.models import TranslationModel
from qvattn.train.dry_run import describe, readable
from qvattn.train.history import read_history
from qvattn.train.prepare import encode, model_for
from qvattn.train.recipe import load_recipe, read_recipe
from qvattn.train.run import run_training

from .conftest import MakeRecipe

RESULT_KEYS = {
    "status", "task", "name", "variant", "seed", "steps", "parameters", "cache_elements_per_token",
    "train_tokens_per_second", "decode_tokens_per_second", "seconds", "valid", "best", "test", "data",
}  # fmt: skip


def test_training_from_the_command_line(toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    command = ["train", str(toy_file), "--run-dir", str(run), "train.steps=4", "train.tensorboard=true"]
    assert main([*command, "--json", "--seed", "5"]) == 0
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert results.keys() >= RESULT_KEYS
    assert results == json.loads((run / "results.json").read_text())
    assert (results["status"], results["steps"], results["seed"]) == ("complete", 4, 5)
    assert results["variant"]["variant"] == "qv-ka"
    assert results["cache_elements_per_token"] == {"layer": 24, "model": 24}
    assert "step 3/4  loss " in captured.err
    assert "validation at step 4: acc " in captured.err
    assert (run / "tokenizer.json").is_file()
    assert list((run / "tensorboard").iterdir())
    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert (environment["seed"], environment["device"]) == (5, "cpu")
    assert environment["cpu_model"]
    assert main(command) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["train.stepz=1"], "nearest valid key: 'steps'"), (["--variant", "x"], "variant 'x' is not in the recipe")],
)
def test_bad_recipes_exit_with_2_and_touch_nothing(
    toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["train", str(toy_file), "--run-dir", str(tmp_path / "run"), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "run").exists()


def test_failure_while_training_exits_with_1(
    toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverge = ["train.learning_rate=1e30", "train.clip=null", "train.warmup_steps=0"]
    assert main(["train", str(toy_file), "--run-dir", str(tmp_path / "run"), *diverge]) == 1
    assert "step 2: the loss is" in capsys.readouterr().err
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["status"] == "failed"
    assert "step 2" in results["reason"]


def test_dry_run_counts_what_training_would_use(toy: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = toy("train.accumulate=2")
    facts = describe(recipe)
    encoded = encode(recipe)
    model = model_for(recipe, len(encoded.tokenizers.source), len(encoded.tokenizers.target))
    assert facts["parameters"] == {"total": model.num_parameters(), "attention": model.attention_parameters()}
    assert facts["memory_bytes"]["weights"] == 4 * model.num_parameters()
    assert facts["memory_bytes"]["adam"] == 8 * model.num_parameters()
    assert facts["batches_per_epoch"] == 2 * facts["steps_per_epoch"] > 5
    assert facts["estimated"] is False
    assert f"{model.num_parameters():,} in all" in readable(facts)


def test_dry_run_trains_nothing(toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(toy_file), "--run-dir", str(tmp_path / "run"), "--dry-run"]
    assert main(command) == 0
    assert "batches an epoch:" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] > 1000
    assert not (tmp_path / "run").exists()


def test_dry_run_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be reached is unknown and says why; the rest is printed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    facts = describe(load_recipe("wmt17_en_de_big"))
    assert facts["batches_per_epoch"] is None
    assert "wmt/wmt17" in facts["reason"]
    # 32,000 x 1024 tied; 3 encoder and 3 decoder layers of 4 d^2 an attention and 2 d 4d a feed-forward
    assert facts["parameters"]["attention"] == 9 * 4 * 1024**2
    assert 117e6 < facts["parameters"]["total"] < 123e6
    assert facts["cache_elements_per_token"] == {"layer": 2048, "model": 6144}
    assert "unknown (" in readable(facts)


def test_causal_language_model(tmp_path: Path, corpus_files: dict[str, str]) -> None:
    """The other task: plain text, a decoder only."""
    text = f"""
name: lm
task: causal-lm
data: {{corpus: text, train_text: {corpus_files["train_source"]}, valid_text: {corpus_files["valid_source"]},
  vocab_size: 300, block_size: 16, max_tokens: 128}}
model: {{d_model: 16, d_ff: 32, n_heads: 2, decoder_layers: 1, norm_type: rms, attention: qv, position: agf}}
train: {{steps: 30, warmup_steps: 5, learning_rate: 0.03, label_smoothing: 0, tensorboard: false, device: cpu}}
"""
    results = run_training(read_recipe(text, origin="lm"), tmp_path / "run")
    assert results["status"] == "complete"
    assert results["test"] is None
    assert results["valid"]["perplexity"] < 100
    assert results["valid"]["tokens"] % 15 == 0


@pytest.mark.slow
def test_two_real_steps_of_the_published_recipe(tmp_path: Path) -> None:
    """wmt17_en_de_big at full size: its vocabulary, widths, depth, accumulation and fp16 with the loss scale.

    Only the corpus is another one (12,000 pairs of invented words) and the number of steps.
    """
    draw = random.Random(1)
    for split, count in (("train", 12_000), ("valid", 40)):
        for side in ("en", "de"):
            words = (
                "".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(3, 8))) for _ in range(count * 6)
            )
            lines = (" ".join(next(words) for _ in range(6)) for _ in range(count))
            (tmp_path / f"{split}.{side}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    sides = (("source", "en"), ("target", "de"))
    files = [f"data.{s}_{side}={tmp_path / s}.{end}" for s in ("train", "valid") for side, end in sides]
    data = ["data.corpus=files", "data.hub=null", *files, "data.max_tokens=160"]
    recipe = load_recipe("wmt17_en_de_big", [*data, "train.steps=2", "train.tensorboard=false", "train.report_every=1"])
    torch.set_num_threads(2)
    results = run_training(recipe, tmp_path / "run")
    assert (results["status"], results["steps"]) == ("complete", 2)
    assert results["parameters"]["attention"] == 9 * 4 * 1024**2
    assert results["parameters"]["total"] > 117e6
    first, second = read_history(tmp_path / "run/history.csv")
    assert math.log(32000) < float(first["train_loss"]) < 20  # at first the tied embedding prefers to copy
    assert float(second["grad_norm"]) > 0
    state = json.loads((tmp_path / "run/checkpoints/last/state.json").read_text())
    assert state["scaler"]["scale"] > 0
    TranslationModel.from_pretrained(tmp_path / "run/checkpoints/last")
