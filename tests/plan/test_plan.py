"""The plan's own rules: the front, budgets, conversions, states, sources and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, PreTrainedConfig

from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab.plan import TABLE, Hardware, Workload, choose, plan, quantity, shape_of, shape_of_config, table
from qvattn.lab.plan.convert import AS_IS, EXACT
from qvattn.lab.plan.costs import FAR, attention_flops, decode_step, largest, layer_parameters, row_cache_bytes
from qvattn.lab.plan.layers import Weights
from qvattn.lab.plan.planning import dominates
from qvattn.models import CausalLM, CausalLMConfig
from qvattn.spec import AttentionSpec
from qvattn.train.checkpoint import write_checkpoint

from .small import CASES, config_of

SPEC = "variant=gqa,d_model=64,n_heads=4,v_heads=2,layers=3,parameters=100000"
DEVICE = Hardware(name="d", memory=1e6, bandwidth=1e9, flops={"bf16": 1e12, "fp32": 1e11}, source="test")
WORK = Workload(context=100, batch=2)


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1))
def test_a_front_covers_everything(rows: list[tuple[float, ...]]) -> None:
    front = [row for row in rows if not any(dominates(other, row) for other in rows)]
    assert front
    assert all(row in front or any(dominates(one, row) for one in front) for row in rows)


@given(st.integers(0, 10**9))
def test_the_largest_that_fits(limit: int) -> None:
    assert largest(lambda n: n <= limit) == limit
    assert largest(lambda n: False) == 0
    assert largest(lambda n: n <= FAR) is None


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(10**4, 10**8), st.integers(1, 5))
def test_budgets_are_exact(case: str, memory: int, batch: int) -> None:
    shape = shape_of_config(config_of(case))
    work = Workload(context=37, batch=batch)
    row = plan(shape, work, [DEVICE], memory=memory, variants=[]).rows[0]
    room = memory - row.weight_bytes
    one = row_cache_bytes(shape.layers, work)
    assert row.largest_batch is not None
    assert row.largest_batch * one <= max(room, 0) and (row.largest_batch + 1) * one > room
    if row.longest_context is not None:
        after = batch * row_cache_bytes(shape.layers, work, row.longest_context + 1)
        assert after > room
        assert row.longest_context == 0 or batch * row_cache_bytes(shape.layers, work, row.longest_context) <= room


def test_every_variant_comes_from_the_table() -> None:
    """Against the specs themselves: cache, parameters and operations of a conversion."""
    shape = shape_of(SPEC)
    for row in plan(shape, WORK, [DEVICE]).rows[1:]:
        spec = AttentionSpec(variant=row.name, d_model=64, n_heads=4)
        used = {name: 2 for name in ("k_heads", "v_heads") if getattr(spec, name) is not None}
        spec = spec.replace(**used)
        assert row.cache_bytes_per_token == 3 * 2 * spec.cache_elements_per_token, row.name
        base = AttentionSpec(variant="gqa", d_model=64, n_heads=4, v_heads=2)
        assert row.parameters == 100000 + 3 * (spec.parameters - base.parameters), row.name
        wanted = 3 * (spec.projection_flops_per_token + spec.attention_flops_per_token(100))
        assert row.attention_flops_per_token == wanted, row.name


def test_exact_form_of_k_equals_v() -> None:
    shape = shape_of_config(config_of("gemma4 k = v"))
    result = plan(shape, WORK, [DEVICE])
    rows = {row.name: row for row in result.rows}
    assert rows[EXACT].exact and not rows["k-eq-v"].exact  # its sliding layers have keys of their own
    # two global layers keep one of two streams: 100 tokens x 1 head x 32 elements x 2 bytes, 2 rows
    assert rows[AS_IS].cache_bytes - rows[EXACT].cache_bytes == 2 * 2 * 100 * 32 * 2
    assert rows[EXACT].parameters == rows[AS_IS].parameters


def test_borrowed_streams_are_read_not_stored() -> None:
    shape = shape_of_config(config_of("gemma4 shared"))
    own = [layer for layer in shape.layers if not layer.borrows]
    assert [layer.borrows for layer in shape.layers] == [False, False, True, True]
    work = Workload(context=4, batch=1)
    assert row_cache_bytes(shape.layers, work) == row_cache_bytes(own, work)
    step = decode_step(shape.layers, shape.weights, work)
    assert step.cache_bytes_read == 2 * row_cache_bytes(own, work)


def test_a_borrower_has_no_stream_weights() -> None:
    spec = AttentionSpec(variant="gqa", d_model=64, n_heads=4, v_heads=2)
    made = 2 * 64 * 32
    assert layer_parameters(spec) - layer_parameters(spec, True) == made
    assert attention_flops(spec, 9) - attention_flops(spec, 9, True) == 2 * made


def test_states_do_not_grow() -> None:
    shape = shape_of_config(config_of("mamba"))
    rows = plan(shape, WORK, [DEVICE]).rows
    assert [row.name for row in rows] == [AS_IS]  # no attention to convert
    assert row_cache_bytes(shape.layers, WORK, 10) == row_cache_bytes(shape.layers, WORK, 10**6) > 0
    assert rows[0].longest_context is None


def test_experts_touched() -> None:
    weights = Weights(total=1000, read=200, experts=800, expert_count=8, experts_per_token=2)
    assert weights.experts_touched(1) == pytest.approx(200)
    assert weights.experts_touched(2) == pytest.approx(800 * (1 - 0.75**2))
    assert weights.experts_touched(1000) == pytest.approx(800)
    with pytest.raises(UserError, match="experts_per_token=0"):
        Weights(total=1000, read=200, experts=800, expert_count=8)


def test_compute_bound_when_the_batch_is_large() -> None:
    shape = shape_of(SPEC)
    slow = Hardware(name="s", memory=None, bandwidth=1e12, flops={"bf16": 1e9}, source="test")
    row = plan(shape, WORK, [slow], variants=[]).rows[0]
    assert row.rooflines[0].bound == "compute" and row.rooflines[0].fits is None
    assert row.rooflines[0].tokens_per_second == pytest.approx(1e9 / row.flops_per_token)
    assert row.largest_batch is None and row.longest_context is None  # no budget


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("3.35TB/s", 3.35e12), ("989TFLOPS", 989e12), ("1e9", 1e9)],
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text, "x") == value


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1.2.3GB", "80 bananas", "nan"])
def test_no_quantities(text: str) -> None:
    with pytest.raises(UserError, match="x="):
        quantity(text, "x")


def test_the_table_has_a_source_for_every_entry() -> None:
    for one in table().values():
        assert len(one.source) > 20 and one.memory and one.bandwidth < 1e14 and set(one.flops) == {"bf16", "fp32"}


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    fields = yaml.safe_load(TABLE.read_text())["l4"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"mine": fields}))
    assert choose(["mine"], path=path, memory=1.0)[0].memory == 1.0
    path.write_text(yaml.safe_dump({"mine": fields | {"price": 1}}))
    with pytest.raises(UserError, match="mine: expected memory"):
        choose(["mine"], path=path)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("falcon_h1", {}, "'falcon_h1' is not supported"),
        ("rwkv", {}, "'rwkv' is not supported"),
        ("t5", {}, "'t5': encoder-decoder models"),
        ("llama", {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}, "llama: layer 0 is of type"),
    ],
)
def test_refused_by_name(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of_config(CONFIG_MAPPING[kind](**fields))


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gemma3")
    config.save_pretrained(tmp_path)
    wanted = shape_of_config(config).layers
    assert shape_of(str(tmp_path)).layers == shape_of(str(tmp_path / "config.json")).layers == wanted
    stored = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", classmethod(lambda cls, name, **kwargs: (stored, {})))
    assert shape_of("someone/some-model").layers == wanted
    spec = tmp_path / "spec.yaml"
    spec.write_text("variant: qv-ka\nd_model: 64\nn_heads: 4\nlayers: 2\n")
    assert shape_of(str(spec)).layers == shape_of("variant=qv-ka,d_model=64,n_heads=4,layers=2").layers


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not a readable JSON"),
        ("a.json", "[]", "expected a mapping"),
        ("a.json", "{}", "no model_type"),
        ("a.json", '{"model_type": "deci", "auto_map": {"AutoConfig": "x.Y"}}', "no code that comes with a model"),
        ("a.json", '{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}', "llama"),
        ("a.yaml", "variant: qvv\nd_model: 64\nn_heads: 4", "did you mean"),
        ("a.yaml", "variant: qv\nd_model: 64\nn_heads: 4\nlayers: 0", "layers=0"),
        ("a.yaml", "variant: qv\nd_model: 64\nn_heads: 4\nparameters: 5", "parameters=5"),
    ],
)
def test_bad_files_exit_2(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    code, out, err = run(str(tmp_path / name), capsys=capsys)
    assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./nothing.json",), "no such file"),
        (("d_model=64,width=2,n_heads=4",), "width: no such field"),
        (("d_model=64,",), "FIELD=VALUE"),
        ((SPEC, "--hardware", "abacus"), "'abacus': the table has h100-sxm"),
        ((SPEC, "--dtype", "fp7"), "--dtype fp7"),
        ((SPEC, "--memory", "lots"), "--memory='lots'"),
        ((SPEC, "--variant", "qvv"), "variant 'qvv'"),
    ],
)
def test_bad_usage_exits_2(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 2 and out == "" and message in err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(SPEC, "--context", "10", "--bandwidth", "1GB/s", "--flops", "1TFLOPS", "--json", capsys=capsys)
    result = json.loads(out)
    assert code == 0 and result["hardware"][0]["name"] == "given"
    as_is = result["rows"][0]
    assert as_is["cache_bytes"] == 10 * 3 * 2 * 2 * 2 * 16 and as_is["largest_batch"] is None
    assert {row["name"] for row in result["rows"] if row["on_front"]} >= {result["choice"]}


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(SPEC, "--memory", "1MB", "--hardware", "l4", "--hardware", "h200-sxm", capsys=capsys)
    assert code == 0
    for text in ("qv-ka-gqa", "l4 (changed) tok/s", "does not know accuracy", "docs/results", "1 MB of memory"):
        assert text in out


@pytest.mark.parametrize(("kind", "shown"), [("slim", ["slim"]), ("qkv", []), ("mha", []), (EXACT, []), (AS_IS, [])])
def test_one_variant(kind: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A variant that the model is already has no row of its own."""
    _, out, _ = run("d_model=64,n_heads=4", "--variant", kind, "--json", capsys=capsys)
    assert [row["name"] for row in json.loads(out)["rows"]] == [AS_IS, *shown]


def test_a_run_directory(tmp_path: Path) -> None:
    config = CausalLMConfig(vocab_size=32, layers=2, attention="qv-ka", d_model=48, d_ff=64, n_heads=4)
    CausalLM(config).save_pretrained(tmp_path / "saved")
    shape = shape_of(str(tmp_path / "saved"))
    write_checkpoint(
        tmp_path,
        3,
        save_model=lambda path: CausalLM(config).save_pretrained(path),
        optimizer_state={},
        state={"step": 3},
        keep_last=1,
    )
    assert shape_of(str(tmp_path)).layers == shape.layers
    assert shape_of(str(tmp_path)).weights == shape.weights


def test_help_names_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "qvattn.cli", "--help"], capture_output=True, text=True, check=True)
    assert "plan" in done.stdout
