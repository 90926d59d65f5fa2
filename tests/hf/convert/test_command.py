"""`qvattn convert` from a directory with a Llama model to a checkpoint that loads, decodes and is described rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import qvattn
from qvattn.cli import main
from qvattn.hf import adopt
from qvattn.hf.convert import Options, Target, convert, window_losses

WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a word tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("text")
    generator = torch.Generator().manual_seed(1)
    paths = {}
    for name, count in (("train", 900), ("test", 400)):
        ids = torch.randint(0, len(WORDS), (count,), generator=generator).tolist()
        path = folder / f"{name}.txt"
        path.write_text("\n".join(" ".join(WORDS[i] for i in ids[at : at + 20]) for at in range(0, count, 20)))
        paths[name] = str(path)
    return paths


def command(model: Path, out: Path, text: dict[str, str], *more: str) -> list[str]:
    sizes = ["--window", "32", "--tokens", "256", "--heldout-tokens", "128", "--threads", "1"]
    texts = ["--calibration", text["train"], "--heldout", text["test"]]
    return ["convert", str(model), "--to", "qv-ka-gqa", "--g-width", "3", "--out", str(out), *texts, *sizes, *more]


def test_the_checkpoint_is_what_the_report_says(
    llama: Path, text: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "converted"
    assert main([*command(llama, out, text), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    on_disk = json.loads((out / "conversion.json").read_text())
    assert {k: v for k, v in report.items() if k != "out"} == on_disk
    assert [p.name for p in out.parent.iterdir()] == ["converted"]

    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(loaded, qvattn.models.CausalLM) if hasattr(qvattn, "models") else True
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    assert (out / "generation_config.json").is_file()

    ids = torch.arange(4, 60)[None] % 64
    original = adopt(llama).eval()
    cache = loaded.new_cache(1)
    with torch.no_grad():
        full = loaded.eval()(input_ids=ids).logits
        steps = torch.cat(
            [loaded(input_ids=ids[:, a:b], cache=cache).logits for a, b in ((0, 50), (50, 51), (51, 56))], 1
        )
    torch.testing.assert_close(steps, full, rtol=1e-4, atol=1e-4)
    assert cache.nbytes == 56 * report["cache_bytes_per_token"]
    assert report["cache_bytes_per_token"] == 4 * 2 * (2 * 4 + 3)
    assert report["cache_bytes_per_token_before"] == 4 * 2 * (2 * 4 + 2 * 4)

    words = AutoTokenizer.from_pretrained(llama)
    held = torch.tensor(words(Path(text["test"]).read_text(), add_special_tokens=False)["input_ids"])[:128].view(4, 32)
    for model, field in ((original, "perplexity_before"), (loaded, "perplexity")):
        with torch.no_grad():
            logits = model(input_ids=held).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten())
        assert report[field] == pytest.approx(loss.exp().item(), rel=1e-4)
    assert report["change_low"] < report["change_percent"] < report["change_high"]
    assert len(report["layers"]) == 2 and all(0 < row["key_residual"] < 1 for row in report["layers"])


def test_check_and_plan_know_the_checkpoint(
    llama: Path, text: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "converted"
    assert main([*command(llama, out, text), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["plan", str(out), "--dtype", "fp32", "--context", "100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rows"][0]["cache_bytes_per_token"] == report["cache_bytes_per_token"]
    assert main(["check", str(out), "--text", text["test"]]) == 0


def test_the_same_seed_gives_the_same_weights(llama: Path, text: dict[str, str]) -> None:
    options = Options(calibration=text["train"], window=32, tokens=256, seed=4)
    states = [convert(str(llama), Target(variant="qv-ka-gqa", g_width=2), options)[0].state_dict() for _ in range(2)]
    assert all(torch.equal(p, states[1][name]) for name, p in states[0].items())


def test_sensitivity_costs_less_loss_than_activations(llama: Path, text: dict[str, str]) -> None:
    """On text of the calibration's kind, averaged over seeds: what weighing by the loss is for."""
    costs: dict[str, list[float]] = {"sensitivity": [], "activations": []}
    for seed in range(3):
        for weighing, found in costs.items():
            options = Options.model_validate(
                {"calibration": text["train"], "heldout": text["test"], "window": 32, "tokens": 512}
                | {"heldout_tokens": 384, "seed": seed, "weighing": weighing}
            )
            _, report = convert(str(llama), Target(variant="qv-ka-gqa", g_width=2), options)
            assert report.window_losses and report.window_losses_before
            found.append(sum(report.window_losses) - sum(report.window_losses_before))
    assert sum(costs["sensitivity"]) < sum(costs["activations"])


def test_a_measured_budget_keeps_the_total(llama: Path, text: dict[str, str]) -> None:
    options = Options(calibration=text["train"], window=32, tokens=256, measure_budget=True, budget_windows=2)
    model, report = convert(str(llama), Target(variant="qv-ka-gqa", g_width=3), options)
    assert sum(row.elements for row in report.layers) == 2 * (8 + 3)
    assert all(row.effect and len(row.effect) >= 2 for row in report.layers)
    assert model.decoder_stack.specs[0].d_ctx is not None


def test_a_kill_leaves_a_draft_and_nothing_else(
    llama: Path, text: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "converted"
    monkeypatch.setattr("qvattn.hf.convert.saving.flush", _killed)
    with pytest.raises(KeyboardInterrupt):
        convert(str(llama), TARGET, Options(calibration=text["train"], window=32, tokens=256), out=out)
    assert not out.exists()
    monkeypatch.undo()
    convert(str(llama), TARGET, Options(calibration=text["train"], window=32, tokens=256), out=out)
    assert [p.name for p in tmp_path.iterdir()] == ["converted"]


TARGET = Target(variant="qv-ka-gqa", g_width=3)


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "calibration too short": (
        ("--window", "64", "--tokens", "5000", "--calibration", "SHORT"),
        "at least 64 are needed",
    ),
    "too few tokens": (("--tokens", "20"), "--tokens 20"),
    "window beyond the model": (("--window", "128"), "--window 128: the model was made for at most 64"),
    "no such text": (("--calibration", "nowhere.txt"), "nowhere.txt does not exist"),
    "not UTF-8": (("--calibration", "LATIN1"), "not UTF-8"),
    "unknown variant": (("--to", "qv-kb"), "--to qv-kb"),
    "wider than the keys": (("--g-width", "8"), "--g-width 8"),
    "no width": (("--g-width", "0"), "--g-width 0"),
    "unknown source of keys": (("--key-from", "some"), "--key-from some"),
    "unknown budget": (("--budget", "large"), "--budget large"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_exits_with_2_and_one_line(
    case: str, llama: Path, text: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"w1 w2 \xe9\n" * 100)
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3 w4 " * 10)
    options, message = BAD[case]
    more = [{"LATIN1": str(latin), "SHORT": str(short)}.get(one, one) for one in options]
    assert main([*command(llama, tmp_path / "out", text), *more]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_out_that_holds_something_is_refused(
    llama: Path, text: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    assert main(command(llama, tmp_path, text)) == 2
    assert "not empty" in capsys.readouterr().err
    assert main([*command(llama, tmp_path, text), "--overwrite"]) == 2
    assert "conversion.json" in capsys.readouterr().err
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_missing_weight_and_numbers_that_are_not_finite_are_named(
    llama: Path, text: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    for change, message in (("missing", "missing"), ("nan", "finite")):
        broken = tmp_path / change
        broken.mkdir()
        for file in llama.iterdir():
            (broken / file.name).write_bytes(file.read_bytes())
        weights = load_file(llama / "model.safetensors")
        name = "model.layers.1.self_attn.k_proj.weight"
        if change == "missing":
            del weights[name]
        else:
            weights[name] = torch.full_like(weights[name], torch.nan)
        save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
        assert main(command(broken, tmp_path / "out", text)) == 2
        said = capsys.readouterr().err
        assert message in said and (change != "missing" or "layers.1.self_attn.k_proj" in said), said


def test_windows_stand_alone(llama: Path) -> None:
    model = adopt(llama).eval()
    windows = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    together, alone = window_losses(model, windows), [window_losses(model, one[None]) for one in windows]
    assert together.sums == pytest.approx([one.sums[0] for one in alone])
    assert together.tokens == 45
    same = together.against(together)
    assert (same.percent, same.low, same.high) == (0.0, 0.0, 0.0)
