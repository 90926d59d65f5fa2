"""AttentionSpec: which attention, said once, checked at construction.

A frozen, keyword-only description from which modules, caches, planner and reports follow. Fields a variant does not use
must be left unset; unset fields take the variant's defaults. Impossible combinations raise here, never later.

(This module stands above `variants/` and `positions/`, because a spec is checked by the variant and scheme it names.)
"""

from __future__ import annotations

import difflib
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import UserError
from .flops import decode_flops
from .positions import POSITIONS
from .streams import Stream, cache_elements
from .variants import ALIASES, VARIANTS, Variant


def _known(field: str, value: str, table: dict[str, Any], aliases: dict[str, str] | None = None) -> str:
    name = (aliases or {}).get(value, value)
    if name not in table:
        near = difflib.get_close_matches(value, [*table, *(aliases or {})], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{field}={value!r}: allowed are {', '.join(table)}{hint}")
    return name


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise UserError(_readable(type(self), error)) from None

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _readable(model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for e in error.errors():
        where = ".".join(str(part) for part in e["loc"])
        if e["type"] == "extra_forbidden":
            near = difflib.get_close_matches(where, list(model.model_fields), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(model.model_fields)}"
            lines.append(f"{where}: no such field{hint}")
        elif e["type"] == "value_error":
            lines.append(str(e["ctx"]["error"]))
        else:
            lines.append(f"{where}={e.get('input')!r}: {e['msg']}")
    return f"{model.__name__}: " + "; ".join(lines)


class PositionSpec(_Spec):
    """A position scheme with its options; options the scheme does not have must be left unset.

    agf, agf+pcm-v: flattest, steepest, tau, learn_tau, learn, floor, two_sided.
    rope: base, dim, layout, proportional, frequencies, gain.
    sinusoidal: base.  learned: max_length.  t5: buckets, max_distance.
    """

    kind: str = "none"
    base: float | None = None
    dim: int | None = Field(default=None, ge=2)
    layout: Literal["half", "interleaved"] | None = None
    proportional: bool | None = None
    frequencies: tuple[float, ...] | None = None
    gain: float | None = None
    max_length: int | None = Field(default=None, ge=1)
    buckets: int | None = Field(default=None, ge=4)
    max_distance: int | None = Field(default=None, ge=2)
    flattest: float | None = None
    steepest: float | None = None
    tau: float | None = None
    learn_tau: bool | None = None
    learn: bool | None = None
    floor: float | None = None
    two_sided: bool | None = None

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        return _known("position", value, dict(POSITIONS))

    @model_validator(mode="after")
    def _resolve(self) -> PositionSpec:
        scheme = POSITIONS[self.kind]
        for name in type(self).model_fields:
            if name == "kind":
                continue
            value = getattr(self, name)
            if name not in scheme.options:
                if value is not None:
                    raise ValueError(f"position.{name}={value!r}: {self.kind!r} has no such option; leave it unset")
            elif value is None:
                self._set(name, scheme.options[name])
        reason = scheme.check(self.options)
        if reason:
            raise ValueError(reason)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options of this scheme, complete."""
        return {name: getattr(self, name) for name in POSITIONS[self.kind].options}

    def __str__(self) -> str:
        return self.kind


OPTIONAL_FIELDS = (
    "k_heads",
    "v_heads",
    "d_key",
    "d_value",
    "d_ctx",
    "kv_rank",
    "q_rank",
    "rope_dim",
    "latent_norm",
    "qk_norm",
    "key_from",
    "key_bias",
    "groups",
)
"""Fields that must be left unset where a variant does not use them."""


class AttentionSpec(_Spec):
    """One attention layer.

    variant: a name of VARIANTS (or alias).  d_model: E.  n_heads: query heads H.
    k_heads, v_heads: shared heads of K and V.  d_head: D, default d_model / n_heads.  d_key, d_value: head widths.
    d_ctx: context width C of QV-Ka.  kv_rank, q_rank: latent ranks.  rope_dim: width of a decoupled rotary part.
    latent_norm: RMSNorm on the latents of MLA and its kin (True as in DeepSeek).
    qk_norm: epsilon of an RMSNorm over every head of queries and keys, before rotation (Qwen 3); unset: no norm.
    key_from: what QV-Ka makes a key from beside the context: the values of its "own" head, of "all", or the "context"
        alone.  key_bias: a constant added to those keys before they are rotated.
    groups: query heads per shared head, if uneven (e.g. [4, 2]).
    position: PositionSpec or its name.  causal, window: visibility (window in tokens).
    bias: of all projections.  out_bias: of the output projection, where it differs from `bias` (Qwen 2).
    dropout: on attention weights, in training.

    Raises UserError naming the field, its value and what is allowed.
    """

    variant: str = "mha"
    d_model: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    k_heads: int | None = Field(default=None, ge=1)
    v_heads: int | None = Field(default=None, ge=1)
    d_head: int = Field(default=0, ge=0)
    d_key: int | None = Field(default=None, ge=1)
    d_value: int | None = Field(default=None, ge=1)
    d_ctx: int | None = Field(default=None, ge=1)
    kv_rank: int | None = Field(default=None, ge=1)
    q_rank: int | None = Field(default=None, ge=1)
    rope_dim: int | None = Field(default=None, ge=0)
    latent_norm: bool | None = None
    qk_norm: float | None = Field(default=None, gt=0)
    key_from: Literal["own", "all", "context"] | None = None
    key_bias: bool | None = None
    groups: tuple[int, ...] | None = None
    position: PositionSpec = Field(default_factory=PositionSpec)
    causal: bool = True
    window: int | None = Field(default=None, ge=1)
    bias: bool = False
    out_bias: bool | None = None
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @field_validator("variant")
    @classmethod
    def _variant(cls, value: str) -> str:
        return _known("variant", value, dict(VARIANTS), ALIASES)

    @field_validator("position", mode="before")
    @classmethod
    def _position(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _resolve(self) -> AttentionSpec:
        if self.d_head == 0:
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"n_heads={self.n_heads} does not divide d_model={self.d_model}; set d_head or change one of them"
                )
            self._set("d_head", self.d_model // self.n_heads)
        variant = VARIANTS[self.variant]
        defaults = variant.defaults(self)
        for name in OPTIONAL_FIELDS:
            value = getattr(self, name)
            if name not in defaults:
                if value is not None:
                    used = ", ".join(defaults) or "no optional field"
                    raise ValueError(
                        f"{name}={value!r}: variant {self.variant!r} does not use it (it uses {used}); leave it unset"
                    )
            elif value is None:
                self._set(name, defaults[name])
        self._check_heads()
        self._check_rotation()
        reason = variant.check(self)
        if reason:
            raise ValueError(reason)
        return self

    def _check_heads(self) -> None:
        if self.groups is not None:
            if min(self.groups, default=0) < 1 or sum(self.groups) != self.n_heads:
                raise ValueError(
                    f"groups={list(self.groups)}: give at least one query head to every shared head, "
                    f"{self.n_heads} (n_heads) in total"
                )
            if self.v_heads is not None and self.v_heads != len(self.groups):
                raise ValueError(
                    f"v_heads={self.v_heads}: groups={list(self.groups)} name {len(self.groups)} heads; "
                    "leave v_heads unset or name as many groups"
                )
        # what was given is named before what followed from it
        for name in sorted(("k_heads", "v_heads"), key=lambda name: name not in self.model_fields_set):
            heads = getattr(self, name)
            if heads is not None and self.groups_of(heads) is None and self.n_heads % heads:
                raise ValueError(
                    f"{name}={heads} does not divide n_heads={self.n_heads}; use a divisor, or name the group sizes "
                    "in groups"
                )

    def _check_rotation(self) -> None:
        if not POSITIONS[self.position.kind].rotary:
            return
        width = self.rope_dim or VARIANTS[self.variant].query_width(self)
        dim = self.position.dim or width
        if dim % 2 or dim > width:
            raise ValueError(
                f"position.dim={dim}: RoPE turns pairs; give an even number up to the rotated width {width}"
            )
        frequencies = self.position.frequencies
        if frequencies is not None and 2 * len(frequencies) != dim:
            raise ValueError(
                f"position.frequencies: {len(frequencies)} of them for a rotated width of {dim}; give one for each pair"
            )

    def groups_of(self, heads: int, among: int | None = None) -> tuple[int, ...] | None:
        """The uneven group sizes of a stream with `heads` heads, or None where groups are even.

        among: count the groups over this many heads instead of the query heads.
        """
        if among is not None and among != self.n_heads:
            return None
        return self.groups if self.groups is not None and len(self.groups) == heads else None

    @property
    def variant_class(self) -> type[Variant]:
        return VARIANTS[self.variant]

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """What is cached per token."""
        return self.variant_class.streams(self)

    @property
    def cache_elements_per_token(self) -> int:
        """Elements cached per token and layer."""
        return cache_elements(self.streams)

    def cache_bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes cached per token and layer."""
        return self.cache_elements_per_token * dtype.itemsize

    @cached_property
    def parameters(self) -> int:
        """Parameters of one layer, its position scheme included, counted on the modules themselves."""
        with torch.device("meta"):
            variant = self.variant_class(self)
            position = POSITIONS[self.position.kind](self.n_heads, self.causal, self.position.options)
        return sum(p.numel() for module in (variant, position) for p in module.parameters())

    @cached_property
    def can_absorb(self) -> bool:
        """Whether factors fold into queries and output, so that attention reads the streams as they are cached."""
        return self.variant_class.absorbs(self)

    @cached_property
    def projection_flops_per_token(self) -> int:
        """Operations per decoded token and layer that do not depend on the context (a multiply-add is 2)."""
        return decode_flops(self, 0)

    def attention_flops_per_token(self, context: int) -> int:
        """Operations per decoded token and layer over `context` cached tokens, without the projections.

        Keys that have to be rebuilt on read (RoPE on a rebuilt key) are rebuilt for every token, and counted.
        """
        if context < 0:
            raise UserError(f"context={context}: allowed are 0 or more tokens")
        return decode_flops(self, self.tokens_read(context)) - self.projection_flops_per_token

    def tokens_read(self, context: int) -> int:
        """Cached tokens that a query at the end of `context` tokens sees."""
        return context if self.window is None else min(context, self.window)

    def bytes_read_per_token(self, context: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the cache that decoding one token reads, per layer and row: every visible element once."""
        return self.tokens_read(context) * self.cache_bytes_per_token(dtype)

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with fields replaced, checked again; fields set to None take their defaults."""
        given = {name: getattr(self, name) for name in self.model_fields_set} | changes
        return AttentionSpec(**given)


def presets(d_model: int, n_heads: int, *, kv_heads: int | None = None, **fields: Any) -> dict[str, AttentionSpec]:
    """Every variant at its defaults for a width: name -> spec.

    kv_heads: shared heads of those variants that share any by default.  fields: go to all (position, bias, ...).
    """
    return {name: preset(name, d_model, n_heads, kv_heads=kv_heads, **fields) for name in VARIANTS}


def preset(variant: str, d_model: int, n_heads: int, *, kv_heads: int | None = None, **fields: Any) -> AttentionSpec:
    """One variant at its defaults, see `presets`."""
    spec = AttentionSpec(variant=variant, d_model=d_model, n_heads=n_heads, **fields)
    shared = {name: kv_heads for name in ("k_heads", "v_heads") if getattr(spec, name) is not None}
    return spec if kv_heads is None or not shared else spec.replace(**shared)
