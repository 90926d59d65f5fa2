"""Which parameter of a foreign model becomes which of ours: one table per family, read from left to right.

A row names a module; `*` stands for the number of a layer, and the parameter's own name (weight, bias) goes along.
Where one matrix holds several of ours, the row says how it is taken apart. Must never invent a weight: what is missing,
left over or of another shape is named and refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import UserError

Take = Callable[[Tensor, Any], Sequence[Tensor]]
"""A foreign parameter and the foreign config -> our parameters, in the order of `Row.ours`."""


def as_it_is(t: Tensor, config: Any) -> Sequence[Tensor]:
    return [t]


def transposed(t: Tensor, config: Any) -> Sequence[Tensor]:
    """GPT-2 keeps matrices input first."""
    return [t.mT if t.dim() == 2 else t]


def thirds(t: Tensor, config: Any) -> Sequence[Tensor]:
    """GPT-2: queries, keys and values side by side, input first."""
    return transposed(t, config)[0].chunk(3)


def thirds_of_heads(t: Tensor, config: Any) -> Sequence[Tensor]:
    """GPT-NeoX: for each head its query, key and value."""
    heads = t.unflatten(0, (config.num_attention_heads, 3, -1))
    return [heads[:, i].flatten(0, 1) for i in range(3)]


class Row(NamedTuple):
    """One line of a table: a foreign module, ours, and how to get from one to the other."""

    theirs: str
    ours: tuple[str, ...]
    take: Take = as_it_is


LAYER = "decoder.layers.*"
ATTENTION = f"{LAYER}.self_attn.variant"

LLAMA = (
    Row("model.embed_tokens", ("embedding",)),
    Row("model.layers.*.input_layernorm", (f"{LAYER}.self_norm",)),
    Row("model.layers.*.self_attn.q_proj", (f"{ATTENTION}.q_proj",)),
    Row("model.layers.*.self_attn.k_proj", (f"{ATTENTION}.k_proj",)),
    Row("model.layers.*.self_attn.v_proj", (f"{ATTENTION}.v_proj",)),
    Row("model.layers.*.self_attn.o_proj", (f"{ATTENTION}.o_proj",)),
    Row("model.layers.*.self_attn.q_norm", (f"{ATTENTION}.q_head_norm",)),
    Row("model.layers.*.self_attn.k_norm", (f"{ATTENTION}.k_head_norm",)),
    Row("model.layers.*.post_attention_layernorm", (f"{LAYER}.ff_norm",)),
    Row("model.layers.*.mlp.gate_proj", (f"{LAYER}.ff.gate_proj",)),
    Row("model.layers.*.mlp.up_proj", (f"{LAYER}.ff.up_proj",)),
    Row("model.layers.*.mlp.down_proj", (f"{LAYER}.ff.down_proj",)),
    Row("model.norm", ("decoder.last_norm",)),
    Row("lm_head", ("lm_head",)),
)
"""Llama, Mistral, Qwen 2 and 3 (whose head norms Llama lacks), SmolLM 1 to 3."""

GPT2 = (
    Row("transformer.wte", ("embedding",)),
    Row("transformer.wpe", ("decoder.position_embedding",)),
    Row("transformer.h.*.ln_1", (f"{LAYER}.self_norm",)),
    Row("transformer.h.*.attn.c_attn", (f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"), thirds),
    Row("transformer.h.*.attn.c_proj", (f"{ATTENTION}.o_proj",), transposed),
    Row("transformer.h.*.ln_2", (f"{LAYER}.ff_norm",)),
    Row("transformer.h.*.mlp.c_fc", (f"{LAYER}.ff.up_proj",), transposed),
    Row("transformer.h.*.mlp.c_proj", (f"{LAYER}.ff.down_proj",), transposed),
    Row("transformer.ln_f", ("decoder.last_norm",)),
    Row("lm_head", ("lm_head",)),
)

GPT_NEOX = (
    Row("gpt_neox.embed_in", ("embedding",)),
    Row("gpt_neox.layers.*.input_layernorm", (f"{LAYER}.self_norm",)),
    Row(
        "gpt_neox.layers.*.attention.query_key_value",
        (f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
        thirds_of_heads,
    ),
    Row("gpt_neox.layers.*.attention.dense", (f"{ATTENTION}.o_proj",)),
    Row("gpt_neox.layers.*.post_attention_layernorm", (f"{LAYER}.ff_norm",)),
    Row("gpt_neox.layers.*.mlp.dense_h_to_4h", (f"{LAYER}.ff.up_proj",)),
    Row("gpt_neox.layers.*.mlp.dense_4h_to_h", (f"{LAYER}.ff.down_proj",)),
    Row("gpt_neox.final_layer_norm", ("decoder.last_norm",)),
    Row("embed_out", ("lm_head",)),
    Row("lm_head", ("lm_head",)),
)


def renamed(state: Mapping[str, Tensor], table: Sequence[Row], config: Any) -> dict[str, Tensor]:
    """Foreign parameters under our names. Raises UserError naming those that the table does not know."""
    rows = {row.theirs: row for row in table}
    ours: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        module, parameter = name.rsplit(".", 1)
        number = re.search(r"\.(\d+)\.", module)
        row = rows.get(re.sub(r"\.\d+\.", ".*.", module))
        if row is None:
            unknown.append(name)
            continue
        for target, part in zip(row.ours, row.take(tensor, config), strict=True):
            place = target if number is None else target.replace("*", number[1])
            ours[f"{place}.{parameter}"] = part
    if unknown:
        raise UserError(f"weights with no place in our model: {_some(unknown)}")
    return ours


def check_complete(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises UserError naming weights (by our names) that are missing, left over, or of another shape."""
    for what, names in (("missing", wanted.keys() - given.keys()), ("unexpected", given.keys() - wanted.keys())):
        if names:
            raise UserError(f"{what} weights: {_some(sorted(names))}")
    for name, tensor in wanted.items():
        if given[name].shape != tensor.shape:
            raise UserError(f"{name}: shape {tuple(given[name].shape)} given, {tuple(tensor.shape)} expected")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(list(names)[:5]) + more
