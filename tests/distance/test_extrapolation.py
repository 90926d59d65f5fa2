"""Extrapolation: the same tokens at every length, losses against the model's own logits, results kept and read back."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab import extrapolation
from qvattn.lab.extrapolation import Settings, markdown, passage_losses, passages, summary
from qvattn.models import CausalLM, CausalLMConfig, initialise

WIDTHS = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "n_heads": 2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model(**fields: object) -> CausalLM:
    made = CausalLM(CausalLMConfig(**{**WIDTHS, "layers": 2, **fields}))
    initialise(made, 1)
    return made.eval()


def test_passages_do_not_overlap_and_pieces_cover_them() -> None:
    ids = np.arange(1000)
    settings = Settings(lengths=(20, 50, 200), scored=32, passages=11)
    found = passages(ids, settings)
    assert settings.reach == 200 and found.shape == (11, 200)
    assert found[0, -1] == 199 and found[-1, -1] == 999
    scored = found[:, -32:].ravel()
    assert len(set(scored.tolist())) == len(scored)
    assert (np.diff(found, axis=1) == 1).all()
    for length in settings.lengths:
        pieces = settings.pieces(length)
        assert [i for first, end in pieces for i in range(first, end)] == list(range(32))
        assert all(end - first <= length // 2 for first, end in pieces)
    assert Settings(lengths=(20, 40), scored=100).reach == 100 - 20 + 40


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lengths": (64, 2000)}, "lower --lengths"),
        ({"lengths": (64, 128), "passages": 500}, "at most"),
        ({"lengths": (128, 64)}, "from short to long"),
        ({"lengths": (1, 64)}, "of 2 and more"),
        ({"lengths": ()}, "different lengths"),
    ],
)
def test_impossible_settings_say_why(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        passages(np.arange(1000), Settings(**{"scored": 16, "passages": 4, **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize("position", ["rope", "agf+pcm-v", "t5", "sinusoidal"])
def test_losses_are_those_of_the_models_logits(position: str) -> None:
    """Every scored token, in the window that is said to score it, from the logits of that window alone."""
    ids = np.random.default_rng(1).integers(3, 32, 300)
    settings = Settings(lengths=(12, 24, 96), scored=16, passages=3)
    lm, tokens = model(position=position), passages(ids, settings)
    found = passage_losses(lm, tokens, settings)
    for row, length in enumerate(settings.lengths):
        half = length // 2
        for column, text in enumerate(tokens):
            nll = []
            for i in range(16):
                end = len(text) - 16 + min((i // half + 1) * half, 16)
                own = torch.from_numpy(text[end - length : end])[None]
                at = len(text) - 16 + i - (end - length)
                assert at >= half  # every scored token sees half the window or more
                with torch.no_grad():
                    nll.append(-float(lm(input_ids=own).logits.log_softmax(-1)[0, at - 1, own[0, at]]))
            assert found[row, column] == pytest.approx(np.mean(nll), rel=1e-5)


def test_a_layer_that_sees_a_window_only_cannot_tell_lengths_apart() -> None:
    ids = np.random.default_rng(2).integers(3, 32, 400)
    settings = Settings(lengths=(16, 32, 128), scored=24, passages=4)
    tokens = passages(ids, settings)
    near = passage_losses(model(layers=1, position="rope", attention={"variant": "mha", "window": 8}), tokens, settings)
    np.testing.assert_allclose(near, np.broadcast_to(near[0], near.shape), atol=1e-5)
    far = passage_losses(model(layers=1, position="rope"), tokens, settings)
    assert np.abs(far[0] - far[2]).max() > 1e-4


def result(name: str, seed: int, nll: list[float]) -> dict[str, object]:
    settings = Settings(lengths=(128, 256)).as_dict()
    return {"name": name, "seed": seed, "trained_length": 128, "nll": nll, "settings": settings}


def test_differences_are_paired_by_seed() -> None:
    results = [
        result("base", 1, [4.0, 5.0]),
        result("base", 2, [4.2, 5.4]),
        result("other", 1, [4.1, 4.2]),
        result("other", 2, [4.3, 4.4]),
    ]
    base, other = summary(results)
    assert base.is_baseline and base.cells[1].difference is None
    assert base.cells[1].change.mean == pytest.approx(1.1)
    assert other.cells[0].difference.mean == pytest.approx(0.1)  # type: ignore[union-attr]
    assert other.cells[0].difference.half_width == pytest.approx(0.0, abs=1e-9)  # type: ignore[union-attr]
    assert other.cells[1].perplexity.mean == pytest.approx((math.exp(4.2) + math.exp(4.4)) / 2)
    assert "| other | " in markdown([base, other])
    assert summary(results, baseline="other")[1].is_baseline
    with pytest.raises(UserError, match="allowed: base, other"):
        summary(results, baseline="nobody")


def test_command_keeps_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text_run: Path
) -> None:
    grid = tmp_path / "grid"
    shutil.copytree(text_run.parent.parent, grid)
    page = tmp_path / "page.html"
    asked = ["extrapolate", str(grid), "--lengths", "32,64,128", "--scored", "16", "--passages", "6", "-o", str(page)]
    assert main(asked) == 0
    assert "| tiny | " in capsys.readouterr().out
    stored = json.loads((grid / "extrapolation" / "tiny--seed1.json").read_text(encoding="utf-8"))
    assert stored["position"] == "agf+pcm-v" and len(stored["nll"]) == 3 and len(stored["passage_nll"][0]) == 6

    def again(*_: object) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(extrapolation, "measure", again)
    assert main([*asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["runs"][0]["nll"] == stored["nll"]
    assert printed["variants"][0]["cells"][0]["perplexity"]["mean"] == pytest.approx(math.exp(stored["nll"][0]))
    monkeypatch.undo()
    assert main([*asked, "--scored", "8"]) == 0  # other settings are measured anew
    assert main(["extrapolate", str(grid), "--lengths", "32,x"]) == 2
    assert main(["extrapolate", str(grid), "--lengths", "32,99999", "--scored", "8"]) == 2
    assert main(["extrapolate", str(tmp_path / "none")]) == 2
