"""A tiny language model run, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from qvattn.cli import main

RECIPE = """
name: tiny
task: causal-lm
data:
  {{corpus: text, train_text: {text}, valid_text: {text}, test_text: {text}, vocab_size: 280, block_size: 32,
  max_tokens: 256}}
model: {{d_model: 16, d_ff: 16, n_heads: 2, decoder_layers: 1, position: {position}, dropout: 0.0}}
train: {{steps: 3, warmup_steps: 1, validate_every: 3, report_every: 3, threads: 1, tensorboard: false}}
"""


def make_run(folder: Path, position: str = "agf+pcm-v") -> Path:
    """A comparison's directory with one run, `runs/tiny--seed1`."""
    text, recipe = folder / "text.txt", folder / "tiny.yaml"
    text.write_text("".join(f"the {i} of them went to {i * i} and sat down\n" for i in range(60)), encoding="utf-8")
    recipe.write_text(RECIPE.format(text=text, position=position), encoding="utf-8")
    run = folder / "runs" / "tiny--seed1"
    assert main(["train", str(recipe), "--run-dir", str(run)]) == 0
    return run


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("text"))
