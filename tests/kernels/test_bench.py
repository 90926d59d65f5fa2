"""`qvattn bench decode` on sizes that take no time: every case and dtype runs, and what it prints is JSON."""

from __future__ import annotations

import json

import pytest
import torch

from qvattn.cli import main
from qvattn.kernels import attend, attend_with_weights
from qvattn.kernels._native import Native
from qvattn.lab.bench_decode import CASES, DTYPES, Bench, measure


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_is_measured(library: Native, dtype: str) -> None:
    rows = measure(CASES, dtype, (1, 8, 32, 16), seconds=0.01)
    expected = [c for c in CASES if not (c.startswith("sdpa") and dtype == "int8")]
    assert [row.case for row in rows] == expected
    for row in rows:
        assert row.median > 0
        assert row.samples >= 5
        assert row.as_dict()["share"] > 0
        assert (row.to_sdpa is None) == (dtype == "int8" or row.case == "sdpa")


@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("sdpa")])
def test_cases_measure_what_they_say(library: Native, case: str) -> None:
    """The timed call computes attention, over exactly the bytes it is charged with."""
    workload = Bench(2, 8, 40, 16, torch.float32).workload(case)
    assert workload is not None
    scores, value, geometry = workload.call.args  # type: ignore[attr-defined]
    tables = workload.call.keywords["tables"]  # type: ignore[attr-defined]
    expected, _ = attend_with_weights(scores, value, geometry, scale=0.125, tables=tables)
    torch.testing.assert_close(workload.call(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        attend(scores, value, geometry, scale=0.125, tables=tables), expected, rtol=1e-4, atol=1e-4
    )
    elements = {
        "mha": 2 * 8 * 16,
        "gqa": 2 * 16,
        "qv": 8 * 16,
        "qv+agf+pcm-v": 8 * 16,
        "qv-ka": 8 * 16 + 32,
        "mla": 576,
    }
    assert workload.bytes == 2 * 40 * 4 * elements[case]


def test_command_prints_json(library: Native, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "decode", "--shapes", "1,8,32,16", "--dtypes", "bf16", "--cases", "sdpa,qv"]
    assert main([*arguments, "--seconds", "0.1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in result["rows"]] == ["sdpa", "qv"]
    assert result["machine"]["isa"] == library.isa
    assert main(["bench", "decode", "--dtypes", "fp8"]) == 2
    assert main(["bench", "decode", "--shapes", "1,8"]) == 2
