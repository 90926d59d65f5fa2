"""What `impl` resolves to: "auto" takes the native kernel for decoding, an explicit "cpu" refuses with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qvattn.errors import UserError
from qvattn.geometry import Geometry
from qvattn.kernels import _native, attend, choose, cpu
from qvattn.kernels._native import Native
from qvattn.kernels.terms import ScoreTerm, ValueTerm
from qvattn.positions.base import DistanceTables


def request_of(M: int = 1, T: int = 20, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    k = torch.randn(1, 2, T, 8, dtype=dtype)
    geometry = Geometry(torch.arange(T - M, T)[None], torch.arange(T)[None], causal=True)
    return [ScoreTerm(q=torch.randn(1, 4, M, 8, dtype=dtype), stream=k)], ValueTerm(stream=k), geometry


def test_auto_takes_it_for_few_queries_without_gradients(library: Native) -> None:
    scores, value, _ = request_of()
    assert choose("auto", scores, value).impl == "cpu"
    tables = DistanceTables(0, mul=torch.ones(4, 20), value_mul=torch.ones(4, 20))
    assert choose("auto", scores, value, tables=tables).impl == "cpu"
    many, value, _ = request_of(M=17)
    assert choose("auto", many, value).impl == "sdpa"
    scores[0].q.requires_grad_()
    assert choose("auto", scores, value).impl == "sdpa"
    with torch.no_grad():
        assert choose("auto", scores, value).impl == "cpu"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"M": 17}, "M=17 queries, allowed are up to 16"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_explicit_cpu_refuses_sizes_and_dtypes(library: Native, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        attend(*request_of(**change), scale=1.0, impl="cpu")


def test_explicit_cpu_refuses_gradients_dropout_and_strides(library: Native) -> None:
    scores, value, geometry = request_of()
    with pytest.raises(UserError, match="dropout"):
        attend(scores, value, geometry, scale=1.0, impl="cpu", dropout=0.1)
    wrong = ScoreTerm(q=scores[0].q, stream=torch.randn(1, 2, 8, 20).mT)
    with pytest.raises(UserError, match="stride 20 between the elements"):
        attend([wrong], value, geometry, scale=1.0, impl="cpu")
    plain = ScoreTerm(q=scores[0].q, stream=torch.zeros(1, 2, 20, 8, dtype=torch.int8))
    with pytest.raises(UserError, match="QuantisedStream"):
        attend([plain], value, geometry, scale=1.0, impl="cpu")
    scores[0].q.requires_grad_()
    with pytest.raises(UserError, match="gradient"):
        attend(scores, value, geometry, scale=1.0, impl="cpu")


def test_without_the_library_auto_works_and_cpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_candidates", list)
    monkeypatch.setattr(_native, "_load", _native._load.__wrapped__)
    assert _native.native() is None
    scores, value, geometry = request_of()
    assert choose("auto", scores, value).impl == "sdpa"
    attend(scores, value, geometry, scale=1.0)
    with pytest.raises(UserError, match="no C\\+\\+17 compiler"):
        attend(scores, value, geometry, scale=1.0, impl="cpu")


def test_a_library_of_another_version_is_refused(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "LAYOUT_VERSION", -1)
    with pytest.raises(OSError, match="another version"):
        Native(library.path)


def test_unknown_instruction_set(library: Native) -> None:
    with pytest.raises(UserError, match="QVATTN_ISA='sse9': allowed here are portable"):
        library.use_isa("sse9")


def test_the_pool_of_threads_is_torchs(library: Native) -> None:
    """Two OpenMP runtimes in one process would fight over the cores."""
    with open("/proc/self/maps") as maps:
        runtimes = {path for line in maps if (path := line.split()[-1]).endswith("libgomp.so.1")}
    assert len(runtimes) <= 1


def test_refusals_are_cheap_to_ask_for(library: Native) -> None:
    scores, value, _ = request_of()
    assert cpu.cpu_refuses(scores, value, None, 0.0) is None
