"""Operators: residuals that are known are found, on factors, on layers and against brute force."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qvattn import Attention, AttentionSpec
from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab import operators as ops
from qvattn.lab.operators import EVERY_OFFSET, OFFSET_0, Heads, heads_of, residuals, target
from qvattn.models.block import initialise


def layer(variant: str, **fields: object) -> Heads:
    spec = AttentionSpec(variant=variant, **{"d_model": 24, "n_heads": 4, "d_head": 4, **fields})
    attention = Attention(spec)
    initialise(attention, seed=3)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return heads_of(attention, "decoder", 0)


def operator(heads: Heads, h: int) -> torch.Tensor:
    return heads.query[h] @ heads.key[h].mT


@pytest.mark.parametrize("position", ["none", "rope"])
@pytest.mark.parametrize(
    ("variant", "fields", "name"),
    [
        ("mha", {}, "gqa keys, 4 groups"),
        ("gqa", {"k_heads": 2, "v_heads": 2}, "gqa keys, 2 groups"),
        ("mqa", {}, "mqa keys"),
        ("qv", {}, "qv"),
        ("keyless", {}, "qv"),
        ("qv-gqa", {"v_heads": 2}, "qv"),
        ("thin-key", {"k_heads": 4, "v_heads": 4, "d_key": 2}, "latent keys 8"),
    ],
)
def test_what_a_variant_is_it_can_represent(variant: str, fields: dict[str, int], name: str, position: str) -> None:
    heads = layer(variant, position=position, **fields)
    found = residuals(heads, [8])
    assert set(found) == ({OFFSET_0, EVERY_OFFSET} if position == "rope" else {OFFSET_0})
    for by_name in found.values():
        assert max(by_name[name]) < 1e-6
        assert all(0 <= value <= 1 + 1e-9 for values in by_name.values() for value in values)


@pytest.mark.parametrize("position", ["none", "rope"])
def test_qv_ka_is_found_by_alternating_least_squares(position: str) -> None:
    heads = layer("qv-ka", d_ctx=3, position=position)
    for by_name in residuals(heads, [1, 2, 3, 8]).values():
        means = [np.mean(by_name[name]) for name in ("qv", "qv-ka 1", "qv-ka 2", "qv-ka 3")]
        assert means == sorted(means, reverse=True)
        assert means[-1] < 0.03 * means[0] and max(by_name["qv-ka 8"]) < 0.02


def test_residuals_against_brute_force() -> None:
    heads = layer("mha")
    found = residuals(heads, [6])[OFFSET_0]
    stacked = np.concatenate([operator(heads, h).numpy() for h in range(4)])
    tail = np.linalg.svd(stacked, compute_uv=False)
    for name, rank in (("mqa keys", 4), ("latent keys 6", 6)):
        sizes = np.array([float(operator(heads, h).norm()) for h in range(4)])
        together = np.sqrt(np.sum((np.array(found[name]) * sizes) ** 2))
        assert together == pytest.approx(np.sqrt(np.sum(tail[rank:] ** 2)), rel=1e-9)
    for h in range(4):
        m, v = operator(heads, h).numpy(), heads.value[h].numpy()
        best = m @ v @ np.linalg.pinv(v)  # the nearest M' = A V^T
        assert found["qv"][h] == pytest.approx(np.linalg.norm(m - best) / np.linalg.norm(m), rel=1e-9)


def test_every_offset_is_the_mean_over_rotations() -> None:
    heads = layer("mha", position="rope")
    assert heads.pairs.tolist() == [[0, 2], [1, 3]]  # Llama's layout
    key = heads.key[0] - heads.value[0] @ torch.linalg.lstsq(heads.value[0], heads.key[0]).solution
    draw = torch.Generator().manual_seed(0)
    squares, whole = [], []
    for _ in range(4000):
        turn = torch.zeros(4, 4, dtype=torch.float64)
        for a, b in heads.pairs.tolist():
            phase = torch.rand((), generator=draw, dtype=torch.float64) * 2 * torch.pi
            turn[a, a] = turn[b, b] = phase.cos()
            turn[a, b], turn[b, a] = -phase.sin(), phase.sin()
        turned = heads.query[0] @ turn
        squares.append(float((turned @ key.mT).norm() ** 2))
        whole.append(float((turned @ heads.key[0].mT).norm() ** 2))
    t = target(heads, rotated=True)
    assert float(t.sizes[0]) == pytest.approx(np.mean(whole), rel=0.03)
    found = residuals(heads, [2])[EVERY_OFFSET]["qv"][0]
    assert found**2 == pytest.approx(np.mean(squares) / np.mean(whole), rel=0.03)


def test_partial_rotation_leaves_elements_alone() -> None:
    heads = layer("gqa", k_heads=2, v_heads=2, position={"kind": "rope", "dim": 2})
    assert heads.pairs.tolist() == [[0, 1]]
    assert max(residuals(heads, [2])[EVERY_OFFSET]["gqa keys, 2 groups"]) < 1e-6


def test_ranks_angles_and_weights() -> None:
    heads = layer("gqa", k_heads=2, v_heads=2)
    assert heads.shared == [0, 0, 2, 2]
    singular = np.linalg.svd(operator(heads, 1).numpy(), compute_uv=False)[:4]
    p = singular / singular.sum()
    assert ops.ranks(heads)[1] == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    first = ops.angles(heads)[0]
    assert first.heads == (0, 1) and 0 <= first.smallest <= first.median <= first.largest <= 90
    a, b = operator(heads, 0), operator(heads, 1)
    assert first.alike == pytest.approx(float((a * b).sum() / a.norm() / b.norm()))
    x = torch.randn(5000, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.5
    moment = torch.cat([x.mT @ x, x.sum(dim=0)[:, None]], dim=1) / len(x)
    scores = x @ operator(heads, 0) @ (x - x.mean(dim=0)).mT
    weighed = heads.weighed(moment)
    assert float(operator(weighed, 0).norm() ** 2) == pytest.approx(float((scores**2).mean()), rel=1e-6)


@pytest.mark.parametrize("variant", ["k-eq-v", "mla"])
def test_scores_that_are_not_bilinear_are_refused(variant: str) -> None:
    with pytest.raises(UserError, match="not bilinear"):
        layer(variant)
    layer("mla", latent_norm=False)


def test_a_hugging_face_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "llama")
    page = tmp_path / "out" / "page.html"
    assert main(["operators", str(tmp_path / "llama"), "-o", str(page), "--sizes", "2,6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(page.with_suffix(".json").read_text())
    assert found["model"] == "llama" and len(found["layers"]) == 2
    attention = theirs.model.layers[1].self_attn
    q, k = attention.q_proj.weight.detach().double()[18:24], attention.k_proj.weight.detach().double()[6:12]
    singular = np.linalg.svd((q.T @ k).numpy(), compute_uv=False)[:6]
    p = singular / singular.sum()
    assert found["layers"][1]["ranks"][3] == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-5)
    assert found["summary"][0]["residual"][EVERY_OFFSET]["most"] < 1e-5
    assert main(["operators", str(tmp_path / "llama"), "--sizes", "0"]) == 2
    assert main(["operators", str(tmp_path / "nothing")]) == 2
