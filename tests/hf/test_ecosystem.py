"""Our models where Hugging Face's tools expect a model: Auto classes, pipelines, PEFT, torch.compile, model cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)
from typer.testing import CliRunner

from qvattn.cli import app
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel, initialise

WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(37))]
ATTENTION: dict[str, Any] = {
    "gqa": {"variant": "gqa", "k_heads": 2, "v_heads": 2},
    "qv-ka-gqa": {"variant": "qv-ka-gqa", "v_heads": 2, "d_ctx": 6},
    "layers that differ": {"decoder": [{"variant": "qv-ka-gqa", "v_heads": 2, "d_ctx": c} for c in (4, 6)]},
}
IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def language(attention: Any, **fields: Any) -> CausalLM:
    widths: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "d_ff": 48, "n_heads": 4, "layers": 2, "dropout": 0.0}
    model = CausalLM(CausalLMConfig(**widths | {"attention": attention} | fields))
    initialise(model, 1)
    return model.eval()


def words() -> PreTrainedTokenizerFast:
    table = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    table.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=table, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


@pytest.fixture(params=list(ATTENTION))
def model(request: pytest.FixtureRequest) -> CausalLM:
    return language(ATTENTION[request.param])


@torch.no_grad()
def test_auto_classes(model: CausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is CausalLMConfig
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is CausalLM and torch.equal(again(IDS).logits, model(IDS).logits)
    assert type(AutoModelForCausalLM.from_config(model.config)) is CausalLM
    both = TranslationModel(TranslationConfig(d_model=32, d_ff=48, n_heads=4, encoder_layers=1, decoder_layers=1))
    both.save_pretrained(tmp_path / "translation")
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "translation")) is TranslationModel


def test_text_generation_pipeline(model: CausalLM, tmp_path: Path) -> None:
    model.tokenizer = words()
    model.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(pipe.model) is CausalLM
    texts = ["w1 w2 w3", "w4"]
    made = pipe(texts, max_new_tokens=5, do_sample=False, batch_size=2, return_full_text=False)
    for text, answer in zip(texts, made, strict=True):
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        expected = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        assert answer[0]["generated_text"].split() == [WORDS[i] for i in expected if i > 2]


def test_lora_trains_and_merges(model: CausalLM) -> None:
    peft = pytest.importorskip("peft")
    before = model(IDS).logits.detach()
    targets = ["q_proj", "v_proj", "o_proj", "up_proj"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    named = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert len(named) == 2 * 2 * len(targets) and all("lora_" in name for name in named)
    optimizer = torch.optim.Adam([p for p in wrapped.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    wrapped.eval()
    with torch.no_grad():
        trained = wrapped(input_ids=IDS).logits
        merged = wrapped.merge_and_unload()
        assert type(merged) is CausalLM
        assert not torch.allclose(trained, before, atol=1e-3)
        torch.testing.assert_close(merged(IDS).logits, trained, atol=1e-5, rtol=1e-5)
        step = torch.cat([merged(i, cache=c).logits for c in [merged.new_cache(2)] for i in IDS.split(3, 1)], dim=1)
        torch.testing.assert_close(step, trained, atol=1e-5, rtol=1e-5)


def decoded(model: Any, own: CausalLM) -> Tensor:
    """Logits of a prefill of 5 and then single tokens, through a cache."""
    cache = own.new_cache(2, capacity=16)
    return torch.cat([model(piece, cache=cache).logits for piece in IDS.split([5, 1, 1, 1, 1], dim=1)], dim=1)


@pytest.mark.slow  # the compiler takes longer than everything else here
@pytest.mark.parametrize("attention", ["gqa", "qv-ka-gqa"])
def test_compiled(attention: str) -> None:
    own = language(ATTENTION[attention])
    torch._dynamo.reset()
    compiled = torch.compile(own, backend="inductor", fullgraph=True)  # no graph breaks, or it raises
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, own(IDS).logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decoded(compiled, own), decoded(own, own), atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(own, backend="aot_eager")  # with gradients there are breaks, and the same numbers
    loss, expected = compiled(IDS, labels=IDS).loss, own(IDS, labels=IDS).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_a_card_says_what_is_cached(tmp_path: Path) -> None:
    model = language(
        ATTENTION["layers that differ"], base_model={"name": "x/y", "model_type": "llama", "licence": "mit"}
    )
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for said in (
        "license: mit",
        "`x/y`",
        f"{2 * 16 + 10} elements, {4 * (2 * 16 + 10)} bytes in float32",
        "| 0 | qv-ka-gqa | v 2 x 8 S+V, g 1 x 4 S | 20 |",
        "| 1 | qv-ka-gqa | v 2 x 8 S+V, g 1 x 6 S | 22 |",
        "import qvattn",
        "AutoModelForCausalLM",
        f"{100 * 42 / 128:.1f} % of 128 elements",
    ):
        assert said in card, said
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"


def test_a_card_without_a_base_model(tmp_path: Path) -> None:
    language("mqa", layers=3).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "license: unknown" in card and "| 0 to 2 | mqa |" in card and "come from" not in card


def test_the_tokenizer_is_saved_along(tmp_path: Path) -> None:
    model = language("qv")
    model.tokenizer = words()
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == model.tokenizer.chat_template
    assert again("w5 w6")["input_ids"] == [8, 9]


def test_generate_continues_with_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    model = language(ATTENTION["qv-ka-gqa"])
    model.tokenizer = words()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[4, 5, 6]])
    expected = [WORDS[i] for i in model.generate(ids, max_new_tokens=5, do_sample=False)[0] if i > 2]
    arguments = ["generate", str(tmp_path), "--prompt", "w1 w2 w3", "--max-new-tokens", "5", "--temperature", "0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.split()[: len(expected)] == expected
    empty = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", ""])
    assert "prompt is empty" in str(empty.exception)
