"""`qvattn::decode`, the operator that `torch.compile` and export see instead of a call into a library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qvattn.geometry import Geometry
from qvattn.kernels import attend
from qvattn.kernels._native import Native
from qvattn.kernels.cpu import _flatten, _unflatten, attend_cpu
from qvattn.kernels.terms import ScoreTerm, ValueTerm
from qvattn.positions.base import DistanceTables, Rotation

from .requests import stream


class Decode(nn.Module):
    """One call of `attend` as a module of tensors."""

    def forward(self, q: Tensor, v: Tensor, g: Tensor, q_pos: Tensor, k_pos: Tensor, c: Tensor) -> Tensor:
        geometry = Geometry(q_pos, k_pos, causal=True)
        scores = [
            ScoreTerm(q=q, stream=v, groups=(3, 1), rotation=Rotation(k_pos, layout="interleaved")),
            ScoreTerm(q=q[..., :8], stream=g, start=1),
        ]
        tables = DistanceTables(-2, mul=c, value_mul=c)
        return attend(scores, ValueTerm(stream=v, groups=(3, 1)), geometry, scale=0.5, tables=tables, impl="cpu") * 2


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (
        torch.randn(2, 4, 2, 16),
        torch.randn(2, 2, 40, 16),
        torch.randn(2, 1, 40, 12),
        torch.tensor([[38, 39]]),
        torch.arange(40)[None],
        torch.rand(4, 48),
    )


def test_compiles_as_one_graph(library: Native) -> None:
    module = Decode()
    with torch.no_grad():
        expected = module(*inputs())
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs()), expected)


def test_exports(library: Native) -> None:
    with torch.no_grad():
        program = torch.export.export(Decode(), inputs())
        assert any(str(node.target) == "qvattn.decode.default" for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(*inputs()), Decode()(*inputs()))


def test_schema_and_fake_implementation(library: Native) -> None:
    q, v, g, q_pos, k_pos, _ = inputs()
    scores = [ScoreTerm(q=q, stream=v), ScoreTerm(q=q[..., :12], stream=g)]
    request = _flatten(scores, ValueTerm(stream=v, flat=True), Geometry(q_pos, k_pos, causal=True), None)
    torch.library.opcheck(torch.ops.qvattn.decode.default, (*request, 0.5))


def test_a_request_survives_packing() -> None:
    q, _, g, q_pos, k_pos, c = inputs()
    small: Any = stream(2, 2, 40, 16, torch.int8)
    scores = [
        ScoreTerm(q=q, stream=small, gain=torch.rand(16), rotation=Rotation(k_pos, dim=8)),
        ScoreTerm(q=q[..., :4], stream=g, start=2),
    ]
    value = ValueTerm(stream=small, start=4, width=8, groups=(1, 3))
    geometry = Geometry(q_pos, k_pos, causal=False, window=9)
    tables = DistanceTables(-5, add=c)
    again = _unflatten(*_flatten(scores, value, geometry, tables))
    assert again[0][0].groups is None
    assert again[1].groups == (1, 3)
    assert again[2].window == 9
    assert again[3].delta_min == -5
    torch.testing.assert_close(
        attend_cpu(*again[:3], scale=1.0, tables=again[3]),
        attend_cpu(scores, value, geometry, scale=1.0, tables=tables),
    )
