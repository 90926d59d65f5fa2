"""`qvattn explain shapes`: the shapes are those of the layer itself, and the cache is what a cache really holds."""

from __future__ import annotations

import json

import pytest
import torch

from qvattn import Attention
from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab.explain import spec_for, walk
from qvattn.spec import AttentionSpec
from qvattn.variants import VARIANTS


def shapes(name: str, *, history: int = 100, heads: int = 8, kv_heads: int | None = 2, d_model: int = 4096) -> set[str]:
    return {line.shapes for line in walk(spec_for(name, d_model, heads, kv_heads), history).lines}


def test_the_worked_example() -> None:
    one = walk(spec_for("gqa", 4096, 8, 2), 100)
    lines = {line.what: line for line in one.lines}
    assert lines["scores over k"].shapes == "(1,512) x (512,101) -> (1,101)"
    assert lines["values from v"].shapes == "(1,101) x (101,512) -> (1,512)"
    assert lines["output"].shapes == "(1,4096) x (4096,4096) -> (1,4096)"
    assert lines["scores over k"].count == 8 and lines["stream k"].count == 2
    assert [str(line) for line in one.cache] == ["2 x (101,512)"] * 2
    assert [str(line) for line in one.baseline] == ["8 x (101,512)"] * 2
    assert one.saved == 75


@pytest.mark.parametrize("position", ["none", "rope", "agf+pcm-v"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_walks_to_the_cache_it_keeps(variant: str, position: str) -> None:
    spec = AttentionSpec(variant=variant, d_model=32, n_heads=4, position=position)
    one = walk(spec, 6)
    attention = Attention(spec)
    torch.manual_seed(0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    cache = attention.new_cache(1)
    attention(torch.randn(1, 7, 32), cache=cache)
    held = {name: f"{s.shape[1]} x ({s.shape[2]},{s.shape[3]})" for name, s in cache.read(0).items()}
    assert {line.stream: str(line) for line in one.cache} == held
    assert one.elements * 4 == cache.nbytes
    assert any(line.shapes.endswith("-> (1,32)") for line in one.lines)
    assert sum(line.what.startswith("scores over") for line in one.lines) >= 1


def test_folding_shows_and_rebuilding_shows() -> None:
    folded = [line.what for line in walk(AttentionSpec(variant="qv-ka", d_model=32, n_heads=4), 6).lines]
    assert {"query folded for v", "query folded for g", "scores over v", "scores over g"} <= set(folded)
    rotated = walk(AttentionSpec(variant="qv-ka", d_model=32, n_heads=4, position="rope"), 6)
    assert rotated.route == "expand"
    assert any("rebuilt on read" in line.why for line in rotated.lines)


def test_an_empty_history_and_a_negative_one() -> None:
    assert "(1,512) x (512,1) -> (1,1)" in shapes("gqa", history=0)
    with pytest.raises(UserError, match="history=-1"):
        shapes("gqa", history=-1)


def test_shared_heads_where_there_are_some() -> None:
    assert spec_for("shared-v", 64, 8, 2).v_heads == 2
    assert spec_for("mha", 64, 8, 2).cache_elements_per_token == 128
    with pytest.raises(UserError, match="no shared heads"):
        spec_for("qv", 64, 8, 2)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "180")
    size = ["--d-model", "4096", "--heads", "8", "--history", "100"]
    assert main(["explain", "shapes", *size, "--kv-heads", "2"]) == 0
    shown = capsys.readouterr().out
    assert "(1,512) x (512,101) -> (1,101)" in shown
    assert "k 2 x (101,512), v 2 x (101,512)" in shown and "75 % less" in shown
    assert (
        main(["explain", "shapes", *size, "--variant", "qv-ka", "--variant", "mla", "--set", "d_head=64", "--json"])
        == 0
    )
    walks = json.loads(capsys.readouterr().out)
    assert [one["variant"] for one in walks] == ["qv-ka", "mla"]
    assert walks[0]["elements"] == 101 * (8 * 64 + 128)
    assert main(["explain", "shapes", "--set", "d_ctx"]) == 2
    assert main(["explain", "shapes", "--variant", "nonsense"]) == 2
