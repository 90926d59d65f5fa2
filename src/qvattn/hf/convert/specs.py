"""What a model would be after a conversion: the attention specs of its layers, checked before anything is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ...errors import UserError
from ...models import CausalLM, CausalLMConfig
from ...positions import POSITIONS
from ...spec import OPTIONAL_FIELDS, AttentionSpec
from ...variants import ALIASES, VARIANTS
from ...variants.separate_keys import GQA, MHA, MQA

SOURCES = (MHA, GQA, MQA)
"""What can be converted: separate keys and values of one width."""


class Target(BaseModel):
    """What to convert to. Fields a variant does not use must be left unset; unset ones take its defaults.

    variant: a name of ROUTES.  g_width: context width of qv-ka and its kin (default: the head size), and the width of
    the joint low-rank key of a thin-key model that rotates.  key_from: own, all or context.  d_key: width of a thin key
    head (default: half the head).  kv_rank: latent width of mla (default: two thirds of what is cached now).
    kv_heads: heads after pooling (default: half of them).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: str
    g_width: int | None = Field(default=None, ge=1)
    key_from: Literal["own", "all", "context"] | None = None
    d_key: int | None = Field(default=None, ge=1)
    kv_rank: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)


OPTIONS = {
    "g_width": "--g-width",
    "key_from": "--key-from",
    "d_key": "--key-width",
    "kv_rank": "--rank",
    "kv_heads": "--kv-heads",
}


def check_source(model: CausalLM) -> None:
    """Raises UserError for what cannot be converted, by name."""
    config = model.config
    if config.norm != "pre":
        raise UserError(f"norm={config.norm!r}: only models that norm before attention can be converted")
    if config.share_every != 1:
        raise UserError(f"share_every={config.share_every}: layers that share streams cannot be converted one by one")
    for i, spec in enumerate(model.decoder_stack.specs):
        if spec.variant_class not in SOURCES:
            raise UserError(
                f"layer {i} is {spec.variant!r}: convert starts from mha, gqa or mqa; give it the original model"
            )
        if spec.d_key != spec.d_value or spec.d_key != spec.d_head:
            raise UserError(f"layer {i}: d_key={spec.d_key}, d_value={spec.d_value}: allowed are equal widths")
        if spec.groups is not None:
            raise UserError(f"layer {i}: groups={list(spec.groups)}: uneven groups cannot be converted")


def target_specs(model: CausalLM, target: Target) -> list[AttentionSpec]:
    """The spec of each layer after the conversion. Raises UserError naming the option that does not fit."""
    check_source(model)
    name = ALIASES.get(target.variant, target.variant)
    if name not in ROUTES:
        why = "has no conversion" if name in VARIANTS else "is unknown"
        raise UserError(f"--to {target.variant}: this variant {why}; allowed are {', '.join(ROUTES)}")
    for field, option in OPTIONS.items():
        if getattr(target, field) is not None and field not in ROUTES[name].uses:
            used = ", ".join(OPTIONS[one] for one in ROUTES[name].uses) or "no option"
            raise UserError(f"{option} {getattr(target, field)}: --to {name} does not use it (it uses {used})")
    return [_converted(spec, name, target, i) for i, spec in enumerate(model.decoder_stack.specs)]


def _converted(spec: AttentionSpec, name: str, target: Target, layer: int) -> AttentionSpec:
    k_heads, v_heads = spec.variant_class.shared_heads(spec)  # type: ignore[attr-defined]
    rotary = POSITIONS[spec.position.kind].rotary
    common: dict[str, Any] = {
        "d_model": spec.d_model,
        "n_heads": spec.n_heads,
        "d_head": spec.d_head,
        "position": spec.position,
        "window": spec.window,
        "bias": spec.bias,
        "out_bias": spec.out_bias,
        "dropout": spec.dropout,
    }
    fields = ROUTES[name].fields(spec, target, k_heads, v_heads, rotary)
    try:
        return AttentionSpec(**common | fields)
    except UserError as error:
        raise UserError(f"--to {name}, layer {layer}: {error}") from None


def _context(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
    width = target.g_width or spec.d_head
    if width >= k_heads * spec.d_head:
        raise UserError(
            f"--g-width {width}: the keys it replaces have {k_heads * spec.d_head} elements a token; allowed are "
            f"1 to {k_heads * spec.d_head - 1}"
        )
    return {
        "d_ctx": width,
        "key_from": target.key_from or "all",
        "key_bias": rotary,
        "qk_norm": spec.qk_norm,
    }


def _qv_ka(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
    if v_heads != spec.n_heads:
        raise UserError(
            f"--to qv-ka: the model shares {v_heads} value heads among {spec.n_heads} query heads; use --to qv-ka-gqa"
        )
    return {"variant": "qv-ka"} | _context(spec, target, k_heads, v_heads, rotary)


def _qv_ka_gqa(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
    own = _context(spec, target, k_heads, v_heads, rotary)
    return {"variant": "qv-ka-gqa", "k_heads": k_heads, "v_heads": v_heads} | own


def _thin(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
    if rotary or spec.qk_norm is not None:
        if target.d_key is not None:
            raise UserError(
                f"--key-width {target.d_key}: keys that are rotated or normed are rebuilt on read from one low-rank "
                "key of all heads; give its width as --g-width"
            )
        thinner = target.model_copy(update={"key_from": "context"})
        return _qv_ka_gqa(spec, thinner, k_heads, v_heads, rotary)
    if target.g_width is not None:
        raise UserError(f"--g-width {target.g_width}: this model's keys are not rotated; give --key-width per head")
    width = target.d_key or max(1, spec.d_head // 2)
    return {"variant": "thin-key", "k_heads": k_heads, "v_heads": v_heads, "d_key": width}


def _mla(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
    if spec.qk_norm is not None:
        raise UserError("--to mla: keys with a norm per head (qk_norm) cannot be made from a latent; use qv-ka-gqa")
    cached = (k_heads + v_heads) * spec.d_head
    rank = target.kv_rank or cached * 2 // 3
    if rank >= min(cached, spec.d_model + 1):
        raise UserError(f"--rank {rank}: keys and values have {cached} elements a token; allowed are fewer than that")
    return {"variant": "mla", "kv_rank": rank, "rope_dim": 0, "latent_norm": False}


def _pooled(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
    wanted = target.kv_heads or k_heads // next(
        n for n in (2, 3, *range(5, k_heads + 2)) if k_heads % n == 0 or n > k_heads
    )
    if wanted >= k_heads or k_heads % wanted or v_heads % wanted:
        allowed = [str(n) for n in range(1, k_heads) if k_heads % n == 0 and v_heads % n == 0]
        raise UserError(f"--kv-heads {wanted}: allowed are {', '.join(allowed) or 'none'}, which group {k_heads} heads")
    return {"variant": "gqa", "k_heads": wanted, "v_heads": wanted, "qk_norm": spec.qk_norm}


def _mqa(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
    if k_heads == v_heads == 1:
        raise UserError("--to mqa: the model has one key head already")
    return {"variant": "mqa", "qk_norm": spec.qk_norm}


def _value_only(variant: str) -> Any:
    def fields(spec: AttentionSpec, target: Target, k_heads: int, v_heads: int, rotary: bool) -> dict[str, Any]:
        if spec.qk_norm is not None:
            raise UserError(f"--to {variant}: keys with a norm per head (qk_norm) are not values; use qv-ka-gqa")
        wanted = {"qv": spec.n_heads, "qv-mqa": 1}.get(variant, v_heads)
        if v_heads != wanted or k_heads != v_heads:
            raise UserError(f"--to {variant}: the model has {k_heads} key and {v_heads} value heads; use --to qv-gqa")
        return {"variant": variant} | ({"v_heads": v_heads} if variant == "qv-gqa" else {})

    return fields


class Route(NamedTuple):
    """How to come to a variant: its AttentionSpec fields for a layer, and the options of `Target` that it uses."""

    fields: Callable[[AttentionSpec, Target, int, int, bool], dict[str, Any]]
    uses: tuple[str, ...] = ()


ROUTES = {
    "gqa": Route(_pooled, ("kv_heads",)),
    "mqa": Route(_mqa),
    "qv-ka": Route(_qv_ka, ("g_width", "key_from")),
    "qv-ka-gqa": Route(_qv_ka_gqa, ("g_width", "key_from")),
    "thin-key": Route(_thin, ("d_key", "g_width")),
    "mla": Route(_mla, ("kv_rank",)),
    "qv": Route(_value_only("qv")),
    "qv-gqa": Route(_value_only("qv-gqa")),
    "qv-mqa": Route(_value_only("qv-mqa")),
}
"""What can be converted to. The weights of the variant that comes out follow by its entry in `FITS`."""

_DROPPED = "keys are dropped: without healing such a model is expected to be useless"
_POOLED = "pooled heads are a start for healing, not a model to use (arXiv 2305.13245)"
WARNINGS = dict.fromkeys(("qv", "qv-gqa", "qv-mqa"), _DROPPED) | dict.fromkeys(("gqa", "mqa"), _POOLED)
"""What to say of a conversion by the variant that came out."""
INSTEAD = {
    ("thin-key", "qv-ka-gqa"): "the model rotates or norms its keys: the thin key is one for all heads, rebuilt on read"
}
"""What to say where another variant came out than was asked for: (asked for, came out)."""


def converted_config(config: CausalLMConfig, specs: Sequence[AttentionSpec]) -> CausalLMConfig:
    """The config of the converted model: only the attention's description changes."""
    given = config.attention["decoder"]
    old = given if isinstance(given, list) else [given] * len(specs)
    layers = [_description(one, spec) for one, spec in zip(old, specs, strict=True)]
    new: CausalLMConfig = copy.deepcopy(config)
    new.attention = {"decoder": layers[0] if all(one == layers[0] for one in layers) else layers}
    assert new.decoder_specs == tuple(specs)
    return new


def _description(old: dict[str, Any], spec: AttentionSpec) -> dict[str, Any]:
    kept = {name: value for name, value in old.items() if name not in ("variant", *OPTIONAL_FIELDS)}
    own = {name: getattr(spec, name) for name in OPTIONAL_FIELDS if getattr(spec, name) is not None}
    return kept | {"variant": spec.variant} | own
