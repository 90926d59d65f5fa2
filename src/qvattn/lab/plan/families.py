"""From a Hugging Face config to layers: one small reader a family, everything else refused by name.

What a layer stores is what the library's own cache holds after a forward pass; tests build each family at small size
and compare. A reader never guesses: a config attribute it does not find, or a layer type it does not know, is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UserError
from ...spec import AttentionSpec
from ...streams import Stream
from .layers import Layer, State

Reader = Callable[[Any], list[Layer]]
StateReader = Callable[[Any, str], tuple[State, ...]]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
CUT = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""Layer types whose cache is cut to a window, and the attribute that says how long it is."""
FP32 = 4
"""Bytes of an element of a recurrent state: the library keeps them in fp32, whatever the model's type."""
NOTHING = ("moe", "mlp", "dummy")
"""Layer types that remember nothing."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to read one family.

    alibi: scores carry linear biases.  states: what its layers without a growing cache keep.
    plain: keys and values are linear maps of the layer's input, nothing but RoPE stands between them and attention.
    biased: its projections have biases, whatever the config says.
    nope_full: its full-attention layers beside sliding ones are not rotated.
    """

    alibi: bool = False
    plain: bool = False
    biased: bool = False
    nope_full: bool = False
    states: StateReader | None = None


def decoder(config: Any, family: Family) -> list[Layer]:
    """Layers of a decoder with ordinary attention, layer by layer, as its attributes and `layer_types` say."""
    types, sharing = layer_types(config), getattr(config, "kv_sharing_modes", None) or []
    layers = []
    for index, (kind, one) in enumerate(zip(types, config.per_layer_config, strict=True)):
        if kind in NOTHING:
            layers.append(Layer(kind="no memory"))
        elif kind in (FULL, *CUT):
            borrows = index < len(sharing) and sharing[index] == "reuse"
            layers.append(_attention(config, one, index, kind, family, borrows))
        elif family.states is not None and kind in ("linear_attention", "conv"):
            layers.append(Layer(kind=kind.replace("_", " "), states=family.states(one, kind)))
        else:
            raise UserError(
                f"{config.model_type}: layer {index} is of type {kind!r}, which the planner cannot count; "
                f"for this model it knows {', '.join(_known_types(family))}"
            )
    return layers


def layer_types(config: Any) -> list[str]:
    """The type of every layer, inferred as the library's cache infers it where the config does not list them."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    inferred = []
    for one in config.per_layer_config:
        cut = [kind for kind, attribute in CUT.items() if getattr(one, attribute, None) is not None]
        inferred.append(cut[0] if cut else FULL)
    return inferred


def _known_types(family: Family) -> tuple[str, ...]:
    more = ("linear_attention", "conv") if family.states else ()
    return (FULL, *CUT, *more, *NOTHING)


def _attention(config: Any, one: Any, index: int, kind: str, family: Family, borrows: bool) -> Layer:
    window = window_of(one, kind)
    heads, shared, width = head_counts(one)
    equal = getattr(one, "attention_k_eq_v", False) and kind == FULL
    fields: dict[str, Any] = {} if shared == heads and not equal else {"v_heads": shared}
    spec = _spec(
        variant="k-eq-v" if equal else "mha" if shared == heads else "gqa",
        d_model=one.hidden_size,
        n_heads=heads,
        d_head=width,
        position=position_of(config, index, kind, family),
        window=window,
        bias=family.biased or has_bias(one),
        **fields,
    )
    square = shared == heads and heads * width == one.hidden_size
    layer = Layer.attention(
        kind_name(kind, window, borrows),
        spec,
        borrows=borrows,
        keeps=kept_of(window),
        exact=("k-eq-v",) if equal else ("slim",) if family.plain and square else (),
    )
    if not equal:
        return layer
    streams = (
        Stream(name="k", heads=shared, width=width, scores=True),
        Stream(name="v", heads=shared, width=width, values=True),
    )
    kind = f"{layer.kind}, K = V"  # the library stores both, although V gives K
    return replace(layer, kind=kind, stored=() if borrows else streams, reads=2 * shared * width)


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**fields)


def head_counts(one: Any) -> tuple[int, int, int]:
    """Query heads, shared heads and head width of one layer."""
    heads = _needed(one, "num_attention_heads")
    shared = getattr(one, "num_key_value_heads", None) or heads
    if isinstance(getattr(one, "multi_query", None), bool):  # it decides in GPT-BigCode, whatever else is set
        shared = 1 if one.multi_query else heads
    width = getattr(one, "head_dim", None)
    if width is None:
        if one.hidden_size % heads:
            raise UserError(
                f"{one.model_type}: num_attention_heads={heads} does not divide hidden_size={one.hidden_size}, and the "
                "config has no head_dim"
            )
        width = one.hidden_size // heads
    return heads, shared, width


def _needed(one: Any, name: str) -> int:
    value = getattr(one, name, None)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{one.model_type}: {name}={value!r}: the planner needs a whole number of at least 1")
    return value


def window_of(one: Any, kind: str) -> int | None:
    """Tokens that a query of this layer sees at most."""
    return _needed(one, CUT[kind]) if kind in CUT else None


def kept_of(window: int | None) -> int | None:
    """Tokens that the library's cache keeps for a window: one less, the newest brings itself along."""
    return window - 1 if window is not None and window > 1 else None


def kind_name(kind: str, window: int | None, borrows: bool) -> str:
    name = kind.replace("_", " ") + ("" if window is None else f" {window}")
    return f"{name}, shared" if borrows else name


def position_of(config: Any, index: int, kind: str, family: Family) -> str:
    """What costs depend on: whether keys are rotated."""
    if family.alibi or getattr(config, "alibi", False):
        return "alibi"
    rotated = getattr(config, "no_rope_layers", None)
    if rotated and index < len(rotated) and not rotated[index]:
        return "none"
    if family.nope_full and kind == FULL and SLIDING in layer_types(config):
        return "none"
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rotary_dim", None)
    return "rope" if rotary else "none"


def has_bias(one: Any) -> bool:
    """Whether the config says that the projections of attention have biases."""
    names = ("attention_bias", "qkv_bias", "use_qkv_bias", "bias", "enable_bias")
    return any(getattr(one, name, False) is True for name in names)


def latent(config: Any, family: Family) -> list[Layer]:
    """DeepSeek's latent attention: the library stores the latent and the rotary key, one head each."""
    layers = []
    for kind, one in zip(layer_types(config), config.per_layer_config, strict=True):
        if kind not in (FULL, *CUT):
            raise UserError(f"{config.model_type}: layer type {kind!r} beside latent attention is not supported")
        window = window_of(one, kind)
        spec = _spec(
            variant="mla",
            d_model=one.hidden_size,
            n_heads=one.num_attention_heads,
            d_head=one.qk_nope_head_dim,
            d_key=one.qk_nope_head_dim,
            d_value=one.v_head_dim,
            kv_rank=_needed(one, "kv_lora_rank"),
            q_rank=one.q_lora_rank,
            rope_dim=one.qk_rope_head_dim,
            position="rope",
            window=window,
        )
        layers.append(Layer.attention("latent " + kind_name(kind, window, False), spec, keeps=kept_of(window)))
    return layers


def falcon(config: Any, family: Family) -> list[Layer]:
    """Falcon counts shared heads in its own way, and its new form stores them once per query head."""
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    new = config.new_decoder_architecture
    shared = config.num_kv_heads if new or not config.multi_query else 1
    spec = _spec(
        variant="mha" if shared == heads else "gqa",
        d_model=config.hidden_size,
        n_heads=heads,
        d_head=width,
        position="alibi" if config.alibi else "rope",
        bias=bool(config.bias),
        **({} if shared == heads else {"v_heads": shared}),
    )
    layer = Layer.attention("full attention", spec)
    if new:
        streams = tuple(replace(s, heads=heads) for s in layer.stored)
        layer = replace(layer, kind="full attention, stored per query head", stored=streams)
    return [layer] * config.num_hidden_layers


def openelm(config: Any, family: Family) -> list[Layer]:
    """OpenELM (arXiv 2404.14619): query and shared heads are lists, a number a layer. The library lacks its code."""
    layers = []
    for heads, shared in zip(config.num_query_heads, config.num_kv_heads, strict=True):
        spec = _spec(
            variant="mha" if shared == heads else "gqa",
            d_model=config.model_dim,
            n_heads=heads,
            d_head=config.head_dim,
            position="rope",
            **({} if shared == heads else {"v_heads": shared}),
        )
        layers.append(Layer.attention(f"full attention, {heads}/{shared} heads", spec))
    return layers


def gated_delta(one: Any, kind: str) -> tuple[State, ...]:
    """Qwen3-Next and its kin: the last inputs of a short convolution, and a matrix per value head."""
    keys, values = one.linear_num_key_heads * one.linear_key_head_dim, one.linear_num_value_heads
    mixed = 2 * keys + values * one.linear_value_head_dim
    return (
        State(name="conv", elements=mixed * one.linear_conv_kernel_dim),
        State(
            name="recurrent",
            elements=values * one.linear_key_head_dim * one.linear_value_head_dim,
            itemsize=FP32,
            recurrent=True,
        ),
    )


def short_convolution(one: Any, kind: str) -> tuple[State, ...]:
    """LFM2: the last inputs of a gated convolution."""
    return (State(name="conv", elements=one.hidden_size * one.conv_L_cache),)


def mamba(one: Any, kind: str) -> tuple[State, ...]:
    """Mamba: the last inputs of a convolution, and `state_size` numbers per channel."""
    return (
        State(name="conv", elements=one.intermediate_size * one.conv_kernel),
        State(name="recurrent", elements=one.intermediate_size * one.state_size, itemsize=FP32, recurrent=True),
    )


def mamba2(one: Any, kind: str) -> tuple[State, ...]:
    """Mamba 2: the same over heads, the convolution also over the two shared projections."""
    inner = one.num_heads * one.head_dim
    return (
        State(name="conv", elements=(inner + 2 * one.n_groups * one.state_size) * one.conv_kernel),
        State(name="recurrent", elements=inner * one.state_size, itemsize=FP32, recurrent=True),
    )


_ORDINARY, _PLAIN, _BIASED = Family(), Family(plain=True), Family(biased=True)
_DELTA, _NOPE = Family(states=gated_delta), Family(nope_full=True)

FAMILIES: dict[str, tuple[Callable[[Any, Family], list[Layer]], Family]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "gemma", "granite", "phi3"), (decoder, _PLAIN)),
    **dict.fromkeys(
        (
            *("arcee", "cohere", "dbrx", "ernie4_5", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe"),
            *(
                "gpt_neox",
                "gpt_oss",
                "gptj",
                "hunyuan_v1_dense",
                "llama4_text",
                "ministral3",
                "nemotron",
                "olmo",
                "olmo2",
            ),
            *("olmo3", "olmoe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
        ),
        (decoder, _ORDINARY),
    ),
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "opt", "persimmon", "phi", "qwen2", "qwen2_moe"),
        (decoder, _BIASED),
    ),
    "bloom": (decoder, Family(alibi=True, biased=True)),
    "mpt": (decoder, Family(alibi=True)),
    **dict.fromkeys(("cohere2", "exaone4"), (decoder, _NOPE)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), (latent, _ORDINARY)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), (decoder, _DELTA)),
    "lfm2": (decoder, Family(states=short_convolution)),
    **dict.fromkeys(("mamba", "falcon_mamba"), (decoder, Family(states=mamba))),
    "mamba2": (decoder, Family(states=mamba2)),
    "falcon": (falcon, _ORDINARY),
    "openelm": (openelm, _ORDINARY),
}


def read_layers(config: Any) -> list[Layer]:
    """The layers of a supported config. Raises UserError naming the model type otherwise."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model_type={config.model_type!r} is not supported by the planner; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    reader, family = FAMILIES[config.model_type]
    return reader(config, family)
