"""`qvattn variants`: the computed table, for people and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from qvattn import AttentionSpec, UserError
from qvattn.cli import main
from qvattn.lab.family import family
from qvattn.variants import VARIANTS


def test_rows_are_what_the_specs_say() -> None:
    table = family(64, 8, kv_heads=2, position="agf+pcm-v", dtype=torch.float16, context=100)
    assert [row.variant for row in table.rows] == list(VARIANTS) and not table.refused
    by_name = {row.variant: row for row in table.rows}
    mha, gqa = by_name["mha"], by_name["gqa"]
    spec = AttentionSpec(variant="gqa", d_model=64, n_heads=8, k_heads=2, v_heads=2, position="agf+pcm-v")
    assert gqa.cache_bytes_per_token == 2 * spec.cache_elements_per_token == 2 * 2 * 2 * 8
    assert gqa.parameters == spec.parameters
    assert gqa.attention_flops_per_token == spec.attention_flops_per_token(100)
    assert gqa.bytes_read_per_token == 100 * gqa.cache_bytes_per_token
    assert gqa.cache_share == 0.25 and mha.cache_share == mha.parameters_share == mha.flops_share == 1.0
    assert by_name["mla"].absorbed and not mha.absorbed


def test_the_command_prints_a_table_and_json(capsys: Any) -> None:
    arguments = ["variants", "--d-model", "4096", "--heads", "32", "--kv-heads", "8", "--dtype", "bf16"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in VARIANTS) and "16,384" in shown and "k (8x128, S)" in shown
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["d_model"] == 4096 and data["context"] == 4096
    assert {row["variant"]: row["cache_elements_per_token"] for row in data["rows"]}["mha"] == 8192


def test_refused_variants_are_listed_with_the_reason(capsys: Any) -> None:
    table = family(48, 3, kv_heads=2)
    assert "k_heads=2 does not divide n_heads=3" in table.refused["gqa"]
    assert {row.variant for row in table.rows} | set(table.refused) == set(VARIANTS)
    assert main(["variants", "--d-model", "48", "--heads", "3", "--kv-heads", "2"]) == 0
    assert "does not divide n_heads=3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "5"], "n_heads=5 does not divide d_model=512"),
        (["--dtype", "fp12"], "--dtype fp12: allowed are fp32, bf16, fp16, int8"),
        (["--position", "rop"], "did you mean 'rope'"),
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["variants", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_negative_context_is_refused() -> None:
    with pytest.raises(UserError, match="context=-5"):
        family(64, 8, context=-5)
