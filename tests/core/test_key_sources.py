"""QV-Ka whose keys come from all values, or from the context alone, keeps every promise of the contract."""

from __future__ import annotations

from typing import Any

import pytest

from qvattn import UserError

from .contract import CHECKS
from .tiny import tiny_spec

SPECS: dict[str, dict[str, Any]] = {
    "all": {"key_from": "all"},
    "all, more keys than values": {"key_from": "all", "v_heads": 2, "k_heads": 4},
    "context": {"key_from": "context"},
    "all, rotated, a constant": {"key_from": "all", "key_bias": True, "position": "rope"},
    "all, rotated, norms of heads": {"key_from": "all", "position": "rope", "qk_norm": 1e-6},
    "all, times a table over distance": {"key_from": "all", "position": "agf+pcm-v"},
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: str, name: str) -> None:
    CHECKS[check](tiny_spec(**{"variant": "qv-ka-gqa", "v_heads": 2} | SPECS[name]))


def test_streams_say_what_scores() -> None:
    assert [str(s) for s in tiny_spec("qv-ka", key_from="context").streams] == ["v (4x4, V)", "g (1x8, S)"]
    assert tiny_spec("qv-ka", key_from="all").streams == tiny_spec("qv-ka").streams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_from": "none"}, r"key_from='none'.*'own', 'all' or 'context'"),
        ({"key_bias": True}, r"key_bias=True.*position='rope'"),
        ({"variant": "gqa", "key_from": "all"}, r"key_from='all': variant 'gqa' does not use it"),
        ({"v_heads": 4, "k_heads": 2}, r"k_heads=2.*v_heads=4"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_spec(**{"variant": "qv-ka-gqa"} | fields)
    if fields.get("k_heads"):
        assert tiny_spec("qv-ka-gqa", **fields, key_from="all").k_heads == 2  # any number reads all values
