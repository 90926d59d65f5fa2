"""Whole healing runs of a tiny converted model."""

from __future__ import annotations

import csv
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import qvattn.hf.heal.run as run_module
from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.hf.heal import heal
from qvattn.hf.heal.choose import Learner, choose_weights
from qvattn.hf.heal.models import load_student, load_teacher
from qvattn.hf.heal.pair import DistilledPair
from qvattn.models import CausalLM
from qvattn.train.loop import TrainingError

from .conftest import MakeSpec, Toy

TIMES = ("seconds", "tokens_per_second")


def history(out: Path) -> list[dict[str, str]]:
    """The rows without what depends on the clock."""
    with (out / "history.csv").open(encoding="utf-8", newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMES} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def healed(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 20 steps."""
    torch.set_num_threads(1)
    from .conftest import recipe

    out = tmp_path_factory.mktemp("healed") / "out"
    make = recipe.__wrapped__(toy)  # type: ignore[attr-defined]
    return out, heal(make(steps=20, hidden_weight=0.5), out)


def test_divergence_falls_and_held_out_perplexity_improves(healed: tuple[Path, dict[str, Any]]) -> None:
    out, result = healed
    rows = [row for row in history(out) if row["valid_perplexity"]]
    assert [int(row["step"]) for row in rows] == [0, 7, 14, 20]
    assert float(rows[-1]["valid_kl"]) < float(rows[0]["valid_kl"]) / 2
    assert float(rows[-1]["valid_hidden"]) < float(rows[0]["valid_hidden"])
    assert float(rows[-1]["train_kl"]) < float(rows[1]["train_kl"])
    assert result["best"]["metric"] == "valid_kl"
    assert result["best"]["value"] == pytest.approx(min(float(row["valid_kl"]) for row in rows[1:]), rel=1e-6)
    test = result["test"][0]
    assert test["after"] < test["before"] and test["after_against_before"]["high"] < 0
    assert test["kl"]["after"]["mean"] < test["kl"]["before"]["mean"] / 2


def test_the_healed_checkpoint_is_a_checkpoint(healed: tuple[Path, dict[str, Any]], toy: Toy) -> None:
    out, result = healed
    model = CausalLM.from_pretrained(out)
    words = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([words("the old man sees a dog .")["input_ids"]])
    assert model(ids).logits.shape == (1, ids.shape[1], model.config.vocab_size)
    assert json.loads((out / "conversion.json").read_text()) == {"to": "qv-ka-gqa"}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# A converted toy") and "## Healing" in card and "train.txt" in card
    assert str(toy.text.parent) not in card + (out / "healing.json").read_text()
    assert json.loads((out / "healing.json").read_text())["tokens"] == result["tokens"]
    assert "plotly" in (out / "healing.html").read_text(encoding="utf-8")


def test_the_scores_are_those_of_the_saved_models(healed: tuple[Path, dict[str, Any]], toy: Toy) -> None:
    """Perplexity by transformers' own loss, from the saved folders and the text file."""
    out, result = healed
    words = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor(words(toy.test.read_text(), add_special_tokens=False)["input_ids"])[:320].view(-1, 32)
    for folder, key in ((toy.teacher, "teacher"), (toy.converted, "before"), (out, "after")):
        model = CausalLM.from_pretrained(folder).eval()
        with torch.inference_mode():
            logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        assert math.exp(loss) == pytest.approx(result["test"][0][key], rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"lora": 2, "what": "attention"}, {"what": "new"}])
def test_a_resumed_run_equals_an_uninterrupted_one(recipe: MakeSpec, tmp_path: Path, changes: dict[str, Any]) -> None:
    if "lora" in changes:
        pytest.importorskip("peft")
    spec = recipe(test=(), **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    heal(spec, whole)
    assert heal(spec, parts, stop_at=3)["status"] == "interrupted"
    assert heal(spec, parts)["status"] == "complete"
    assert history(parts) == history(whole)
    ours, theirs = (load_file(out / "model.safetensors") for out in (parts, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(toy: Toy, tmp_path: Path) -> None:
    options = ["--teacher", str(toy.teacher), "--text", str(toy.text), "--steps", "30", "--validations", "6"]
    options += [
        "--tokens",
        "512",
        "--micro-tokens",
        "256",
        "--context",
        "32",
        "--valid-tokens",
        "256",
        "--threads",
        "1",
    ]

    def start(out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "qvattn.cli", "heal", str(toy.converted), "--out", str(out), *options]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for least in (7, 13, 26):  # rows of history.csv to wait for: within the run, each time further on
        process = start(killed)
        while process.poll() is None:
            if (killed / "history.csv").is_file() and len((killed / "history.csv").read_text().splitlines()) > least:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        assert process.wait() == -signal.SIGKILL
    assert start(killed).wait() == 0
    assert start(whole).wait() == 0
    assert history(killed) == history(whole)
    ours, theirs = (load_file(out / "model.safetensors") for out in (killed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_complete_run_is_returned_as_it_is(healed: tuple[Path, dict[str, Any]], recipe: MakeSpec) -> None:
    out, result = healed
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert heal(recipe(steps=20, hidden_weight=0.5), out)["tokens"] == result["tokens"]
    assert (out / "model.safetensors").stat().st_mtime_ns == written


def test_merged_lora_gives_the_logits_of_the_unmerged(toy: Toy) -> None:
    pytest.importorskip("peft")
    student, _ = load_student(str(toy.converted))
    teacher = load_teacher(str(toy.teacher))
    learner = Learner(student, teacher, "all", rank=2, seed=1)
    names = set(learner.learning)
    assert any("lora_A" in name for name in names) and any("value_to_key" in name for name in names)
    assert not any("norm" in name or name.startswith("embedding") for name in names)
    with torch.no_grad():
        for number, parameter in enumerate(learner.learning.values()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    ids = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        before = student(ids).logits
        merged = learner.merge()
        after = merged(ids).logits
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    untouched, _ = load_student(str(toy.converted))
    assert (untouched(ids).logits - after).abs().max() > 1e-2


def test_what_learns(toy: Toy) -> None:
    student, _ = load_student(str(toy.converted))
    teacher = load_teacher(str(toy.teacher))
    new = choose_weights(student, teacher, "new")
    assert {name.rpartition("variant.")[2] for name in new} == {"g_proj.weight", "context_to_key", "value_to_key"}
    attention = choose_weights(student, teacher, "attention")
    assert new < attention < choose_weights(student, teacher, "all")
    with pytest.raises(UserError, match="no weight that the teacher lacks"):
        choose_weights(teacher, teacher, "new")


def test_only_the_chosen_weights_change(recipe: MakeSpec, toy: Toy, tmp_path: Path) -> None:
    heal(recipe(what="new", test=()), tmp_path / "out")
    before, after = load_file(toy.converted / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    student, _ = load_student(str(toy.converted))
    assert changed == choose_weights(student, load_teacher(str(toy.teacher)), "new")


def test_a_loss_that_is_not_finite_stops_with_the_last_good_state(
    recipe: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = DistilledPair.forward
    calls = 0

    def poisoned(self: DistilledPair, **batch: Any) -> Any:
        nonlocal calls
        output = forward(self, **batch)
        calls += self.training
        if self.training and calls == 9:  # the first micro-batch of step 5
            output.loss = output.loss * math.nan
        return output

    monkeypatch.setattr(DistilledPair, "forward", poisoned)
    spec, out = recipe(test=()), tmp_path / "out"
    with pytest.raises(TrainingError, match=r"step 5: the loss is nan.*learning rate"):
        heal(spec, out)
    assert (out / "checkpoints" / "last").resolve().name == "step-0000004"
    assert not (out / "model.safetensors").exists()
    monkeypatch.undo()
    assert heal(spec, out)["status"] == "complete"
    heal(spec, tmp_path / "whole")
    assert history(out) == history(
        tmp_path / "whole"
    )  # nothing of the failed step, or of one killed in the middle, stays
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, tmp_path / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_changed_recipe_or_text_is_refused(recipe: MakeSpec, toy: Toy, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text(toy.text.read_text(), encoding="utf-8")
    spec, out = recipe(test=(), text=(str(text),)), tmp_path / "out"
    heal(spec, out, stop_at=2)
    with pytest.raises(UserError, match=r"the recipe changed \(learning_rate: 0.003 -> 0.001\)"):
        heal(recipe(test=(), text=(str(text),), learning_rate=1e-3), out)
    text.write_text(toy.text.read_text().replace("dog", "cat"), encoding="utf-8")
    with pytest.raises(UserError, match="not what it was: text"):
        heal(spec, out)
    assert heal(spec, out, overwrite=True, stop_at=1)["status"] == "interrupted"


def test_minutes_become_steps_once(recipe: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_time_a_step", lambda run: (1.5, 0.5))
    spec, out = recipe(test=(), steps=None, minutes=0.2), tmp_path / "out"
    assert heal(spec, out, stop_at=1)["planned_steps"] == 6  # (12 - 4 * 0.5) / 1.5
    monkeypatch.setattr(run_module, "_time_a_step", lambda run: (9.0, 0.5))
    assert heal(spec, out)["steps"] == 6


def test_bf16_and_several_texts(recipe: MakeSpec, toy: Toy, tmp_path: Path) -> None:
    spec = recipe(dtype="bf16", text=(str(toy.text), str(toy.test)), valid=str(toy.test), steps=8, layers=(1,))
    result = heal(spec, tmp_path / "out")
    assert result["test"][0]["kl"]["after"]["mean"] < result["test"][0]["kl"]["before"]["mean"]
    assert load_file(tmp_path / "out" / "model.safetensors")["embedding.weight"].dtype == torch.float32


def test_the_stored_precision_is_kept(recipe: MakeSpec, toy: Toy, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    model = CausalLM.from_pretrained(toy.converted, dtype=torch.bfloat16)
    model.save_pretrained(narrow)
    AutoTokenizer.from_pretrained(toy.converted).save_pretrained(narrow)
    heal(recipe(converted=str(narrow), test=()), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["embedding.weight"].dtype == torch.bfloat16


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_text_that_cannot_be_used(recipe: MakeSpec, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\nnot \xff fine\n")
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        heal(recipe(text=(str(bad),)), tmp_path / "a")
    bad.write_text("too short\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"text: .*bad.txt holds \d+ tokens; at least 64 are needed"):
        heal(recipe(text=(str(bad),)), tmp_path / "b")
    with pytest.raises(UserError, match=r"test: .* does not exist"):
        heal(recipe(test=(str(tmp_path / "none.txt"),)), tmp_path / "c")


def test_models_that_do_not_fit(recipe: MakeSpec, toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a converted checkpoint"):
        heal(recipe(converted=str(tmp_path)), tmp_path / "a")
    config = CausalLM.from_pretrained(toy.teacher).config
    config.layers = 1
    CausalLM(config).save_pretrained(tmp_path / "flat")
    with pytest.raises(UserError, match=r"layers=1 differs from the converted model's 2; set the hidden weight to 0"):
        heal(recipe(teacher=str(tmp_path / "flat")), tmp_path / "b")
    with pytest.raises(UserError, match="layers: 7 is not one of"):
        heal(recipe(layers=(7,)), tmp_path / "c")


def test_folders_that_are_no_healing_run(recipe: MakeSpec, toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'notes.txt' and is no healing run"):
        heal(recipe(), tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="it is the converted checkpoint"):
        heal(recipe(), toy.converted)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"minutes": 1.0}, "give one of them"),
        ({"micro_tokens": 16}, "micro_tokens=16: at least one window"),
        ({"tokens": 600}, "a multiple of micro_tokens"),
        ({"kl_weight": 0.0, "hidden_weight": 0.0}, "nothing to learn from"),
        ({"what": "keys"}, "what='keys'"),
        ({"layers": ("x",)}, "layers"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
    ],
)
def test_specs_fail_early(recipe: MakeSpec, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        recipe(**changes)


def test_the_command(toy: Toy, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--teacher", str(toy.teacher), "--out", str(tmp_path / "out"), "--text", str(toy.text)]
    small = ["--steps", "2", "--tokens", "256", "--context", "32", "--valid-tokens", "64", "--layers", "0,1"]
    assert main(["heal", str(toy.converted), *options, *small, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["status"] == "complete" and result["steps"] == 2 and "test_windows" not in result
    assert main(["heal", str(toy.converted), *options, *small, "--what", "new"]) == 2
    assert "the recipe changed (what: attention -> new)" in capfd.readouterr().err
    assert main(["heal", str(toy.converted), *options, "--layers", "some"]) == 2
    assert "layers" in capfd.readouterr().err
