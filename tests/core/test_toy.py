"""A new variant needs one class and one line in the table: the contract, presets, table and counts pick it up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from qvattn import AttentionSpec, Stream, presets
from qvattn.cli import main
from qvattn.kernels import ScoreTerm, ValueTerm
from qvattn.positions import POSITIONS, Rotation
from qvattn.variants import VARIANTS, Streams, Terms, Variant

from .contract import CHECKS
from .tiny import tiny_spec


class Toy(Variant):
    """The first half of V scores, all of it is summed."""

    also_called = "half-blind"

    @classmethod
    def query_width(cls, spec: AttentionSpec) -> int:
        return spec.d_head // 2

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        return (Stream(name="v", heads=spec.n_heads, width=spec.d_head, scores=True, values=True),)

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.v_proj = self.linear(spec.d_model, spec.n_heads * spec.d_head)

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {"v": self.heads(self.v_proj(x), self.n_heads)}

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        return Terms([ScoreTerm(q=q["q"], stream=s["v"], rotation=rotation)], ValueTerm(stream=s["v"]))


@pytest.fixture
def _with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "toy", Toy)


@pytest.mark.usefixtures("_with_toy")
@pytest.mark.parametrize("position", POSITIONS)
def test_toy_keeps_the_contract(position: str) -> None:
    for check in CHECKS.values():
        check(tiny_spec("toy", position))


@pytest.mark.usefixtures("_with_toy")
def test_toy_is_in_presets_and_in_the_table(capsys: Any) -> None:
    spec = presets(16, 4)["toy"]
    assert spec.cache_elements_per_token == 16
    assert spec.attention_flops_per_token(10) == 2 * 4 * (2 + 4) * 10
    assert spec.parameters == 16 * 8 + 16 * 16 * 2
    assert main(["variants", "--d-model", "16", "--heads", "4", "--json"]) == 0
    rows = {row["variant"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["toy"]["cache_share"] == 0.5 and rows["toy"]["also_called"] == "half-blind"


@pytest.mark.usefixtures("_with_toy")
def test_the_contract_catches_a_broken_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that rotates its value at write as well is not what its streams say: some check fails."""

    def broken(self: Toy, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        v = self.heads(self.v_proj(x), self.n_heads)
        return {"v": v + torch.arange(v.shape[2])[:, None]}  # depends on where the chunk begins

    monkeypatch.setattr(Toy, "entries", broken)
    with pytest.raises(AssertionError):
        CHECKS["cached_equals_full"](tiny_spec("toy"))
