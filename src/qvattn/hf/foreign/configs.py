"""What a foreign config says, in the fields of ours: one function per family.

Whatever a config can ask for and our model does not do is refused here, by the name of the field. Must never read
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import UserError
from .weights import GPT2, GPT_NEOX, LLAMA, Row

Fields = dict[str, Any]
FIXED_SCALINGS = ("linear", "llama3", "yarn")
"""Kinds of scaled RoPE whose frequencies do not change while a text grows."""
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}
"""Their name of an activation without a gate -> ours."""


def refuse(config: Any, field: str, value: Any, allowed: str) -> UserError:
    return UserError(f"model_type={config.model_type!r}, {field}={value!r}: not supported; allowed: {allowed}")


def rope(config: Any, width: int) -> Fields:
    """RoPE of a config for heads of `width`. Scaled kinds are taken over as the frequencies they come to."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise refuse(config, "rope_parameters", parameters, "one set of parameters for all layers")
    dim = int(width * (parameters.get("partial_rotary_factor") or 1.0))
    part = {"dim": dim} if dim != width else {}
    if kind == "default":
        return {"kind": "rope", "base": float(parameters["rope_theta"])} | part
    if kind not in FIXED_SCALINGS:
        raise refuse(config, "rope_type", kind, f"default, {', '.join(FIXED_SCALINGS)}")
    frequencies, gain = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return {"kind": "rope", "frequencies": frequencies.tolist(), "gain": float(gain)} | part


def heads(config: Any, **more: Any) -> Fields:
    """Query, key and value heads: one description of attention."""
    H = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or H
    width = getattr(config, "head_dim", None) or config.hidden_size // H
    if shared == H:
        fields: Fields = {"variant": "mha"}
    elif shared == 1:
        fields = {"variant": "mqa"}
    else:
        fields = {"variant": "gqa", "k_heads": shared, "v_heads": shared}
    if width * H != config.hidden_size:
        fields["d_head"] = width
    return fields | {name: value for name, value in more.items() if value is not None}


def common(config: Any) -> Fields:
    """What every family says alike."""
    quantised = getattr(config, "quantization_config", None)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    if quantised and method != "gguf":  # a GGUF file has been dequantised by now
        raise refuse(config, "quantization_config.quant_method", str(method), "weights that are not quantised, or GGUF")
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "layers": config.num_hidden_layers,
        "norm": "pre",
        "embedding_scale": 1.0,
        "dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "base_model": {"name": config.name_or_path or None, "model_type": config.model_type},
    }


def llama_kind(
    config: Any,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: float | None = None,
    windows: Sequence[int | None] = (),
    turned: Sequence[bool] = (),
) -> Fields:
    """RMSNorm, SwiGLU, RoPE. windows, turned: of each layer; default: none has a window, all have RoPE."""
    if config.hidden_act not in ("silu", "swish"):
        raise refuse(config, "hidden_act", config.hidden_act, "silu")
    dropout = config.attention_dropout or None
    one = heads(config, bias=bias or None, out_bias=out_bias, qk_norm=qk_norm, dropout=dropout)
    depth = config.num_hidden_layers
    each = [
        one
        | ({} if not windows or windows[i] is None else {"window": windows[i]})
        | ({} if not turned or turned[i] else {"position": "none"})
        for i in range(depth)
    ]
    width = one.get("d_head", config.hidden_size // config.num_attention_heads)
    return common(config) | {
        "d_ff": config.intermediate_size,
        "attention": {"decoder": each[0] if all(layer == each[0] for layer in each) else each},
        "position": rope(config, width),
        "norm_type": "rms",
        "norm_eps": config.rms_norm_eps,
        "activation": "swiglu",
        "ff_bias": bool(getattr(config, "mlp_bias", False)),
    }


def windows_by_type(config: Any) -> list[int | None]:
    """The window of each layer, from `layer_types`."""
    found: list[int | None] = []
    for kind in config.layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise refuse(config, "layer_types", kind, "full_attention, sliding_attention")
        found.append(config.sliding_window if kind == "sliding_attention" else None)
    return found


def llama(config: Any) -> Fields:
    return llama_kind(config, bias=config.attention_bias)


def mistral(config: Any) -> Fields:
    return llama_kind(config, windows=[config.sliding_window] * config.num_hidden_layers)


def qwen2(config: Any) -> Fields:
    return llama_kind(config, bias=True, out_bias=False, windows=windows_by_type(config))


def qwen3(config: Any) -> Fields:
    windows = windows_by_type(config)
    return llama_kind(config, bias=config.attention_bias, qk_norm=config.rms_norm_eps, windows=windows)


def smollm3(config: Any) -> Fields:
    turned = [bool(flag) for flag in config.no_rope_layers]
    return llama_kind(config, bias=config.attention_bias, windows=windows_by_type(config), turned=turned)


def activation(config: Any, name: str) -> str:
    if name not in ACTIVATIONS:
        raise refuse(config, "activation", name, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def gpt2(config: Any) -> Fields:
    for field, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if getattr(config, field) != wanted:
            raise refuse(config, field, getattr(config, field), str(wanted))
    return common(config) | {
        "d_ff": config.n_inner or 4 * config.n_embd,
        "attention": {"decoder": heads(config, bias=True, dropout=config.attn_pdrop or None)},
        "position": {"kind": "learned", "max_length": config.n_positions},
        "norm_type": "layer",
        "norm_eps": config.layer_norm_epsilon,
        "activation": activation(config, config.activation_function),
        "ff_bias": True,
        "dropout": config.resid_pdrop,
    }


def gpt_neox(config: Any) -> Fields:
    width = config.hidden_size // config.num_attention_heads
    attention = heads(config, bias=config.attention_bias or None, dropout=config.attention_dropout or None)
    return common(config) | {
        "d_ff": config.intermediate_size,
        "attention": {"decoder": attention},
        "position": rope(config, width),
        "norm_type": "layer",
        "norm_eps": config.layer_norm_eps,
        "activation": activation(config, config.hidden_act),
        "ff_bias": True,
        "parallel_residual": config.use_parallel_residual,
        "dropout": config.hidden_dropout,
    }


class Family(NamedTuple):
    """How models of one `model_type` are read."""

    fields: Callable[[Any], Fields]
    table: tuple[Row, ...]


FAMILIES: dict[str, Family] = {
    "llama": Family(llama, LLAMA),
    "mistral": Family(mistral, LLAMA),
    "qwen2": Family(qwen2, LLAMA),
    "qwen3": Family(qwen3, LLAMA),
    "smollm3": Family(smollm3, LLAMA),
    "gpt2": Family(gpt2, GPT2),
    "gpt_neox": Family(gpt_neox, GPT_NEOX),
}
"""model_type -> how to read it. SmolLM, SmolLM2 and many others are of type llama; Pythia is gpt_neox."""


def family(config: Any) -> Family:
    """Raises UserError naming an unsupported architecture."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"model_type={model_type!r}: this architecture is not supported; supported are {known}")
    return FAMILIES[model_type]
