"""Tiny models with real-looking sentences, and ways to break them that each violate one statement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qvattn.lab.check import Sample, Subject
from qvattn.models import CausalLM, CausalLMConfig, QvattnModel, TranslationConfig, TranslationModel, initialise
from qvattn.streams import PADDING, Stream, StreamCache

VOCABULARY = 40


def language_model(attention: Any = "mha", layers: int = 2, **fields: Any) -> CausalLM:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 32, "n_heads": 4, "layers": layers}
    model = CausalLM(CausalLMConfig(attention=attention, **(sizes | fields)))
    initialise(model, 3)
    return model.eval()


def translation_model(attention: Any = "mha", layers: int = 2, **fields: Any) -> TranslationModel:
    sizes = {"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY, "d_model": 16, "d_ff": 32, "n_heads": 4}
    config = TranslationConfig(attention=attention, encoder_layers=1, decoder_layers=layers, **(sizes | fields))
    model = TranslationModel(config)
    initialise(model, 3)
    return model.eval()


def subject_of(model: QvattnModel, lengths: tuple[int, ...] = (9, 7)) -> Subject:
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> Tensor:
        return torch.randint(4, VOCABULARY, (1, count), generator=generator)

    if isinstance(model, CausalLM):
        return Subject(model=model, samples=[Sample(ids=ids(n)) for n in lengths])
    start = torch.ones(1, 1, dtype=torch.long)
    samples = [Sample(ids=torch.cat((start, ids(n - 1)), dim=1), source=ids(6)) for n in lengths]
    return Subject(model=model, samples=samples)


# -- broken caches ------------------------------------------------------------------------------------------------


class ForgetfulCache(StreamCache):
    """Hides the past from every new token: decoding that drops the past."""

    def advance(self, positions: Tensor) -> None:
        self._positions[:, : self.length] = PADDING
        super().advance(positions)


class DriftingCache(StreamCache):
    """Alters old entries a little whenever a new token comes."""

    def write(self, layer: int, entries: Mapping[str, Tensor]) -> None:
        super().write(layer, entries)
        new = next(iter(entries.values())).shape[2]
        for stream in self.read(layer).values():
            stream[:, :, : self.length - new] *= 1.001


class RottenCache(StreamCache):
    """Gives back nothing that is a number."""

    def write(self, layer: int, entries: Mapping[str, Tensor]) -> None:
        super().write(layer, {name: entry * float("nan") for name, entry in entries.items()})


class LyingCache(StreamCache):
    """Reports half of what it holds."""

    @property
    def nbytes(self) -> int:
        return super().nbytes // 2


def with_cache(model: QvattnModel, kind: type[StreamCache], *extra: Stream) -> QvattnModel:
    """The model with another cache, `extra` streams stored beside its own."""

    def new_cache(batch_size: int, *, capacity: int = 64) -> StreamCache:
        layers = [own if isinstance(own, int) else (*own, *extra) for own in model.decoder_stack.cache_layers]
        return kind(layers, batch_size, capacity=capacity)

    model.new_cache = new_cache  # type: ignore[method-assign]
    return model


# -- broken models ------------------------------------------------------------------------------------------------


def remembering_queries(model: QvattnModel, keep: Callable[[list[Tensor], Tensor], None]) -> QvattnModel:
    """The model whose first layer blends the last past query into a new one; `keep` decides how it is stored."""
    variant = next(model.decoder_stack.blocks()).self_attn.variant
    original, kept = variant.queries, []

    def queries(x: Tensor, rotation: Any) -> dict[str, Tensor]:
        q = original(x, rotation)["q"]
        blended = q + 0.1 * kept[-1][:, :, -1:] if kept and q.shape[2] == 1 else q
        keep(kept, q)
        return {"q": blended}

    variant.queries = queries  # type: ignore[method-assign]
    return model


def by_reference(kept: list[Tensor], q: Tensor) -> None:
    kept.append(q)


def by_copy(kept: list[Tensor], q: Tensor) -> None:
    kept.append(q.clone())


def in_place(kept: list[Tensor], q: Tensor) -> None:
    if not kept:
        kept.append(torch.zeros_like(q[:, :, :1]))
    kept[0].copy_(q[:, :, -1:])


def remembering_scores(model: QvattnModel) -> QvattnModel:
    """The model whose first layer lets the last past weights into its output, wherever it makes them."""
    attention = next(model.decoder_stack.blocks()).self_attn
    original, kept = attention.over_past, []

    def over_past(*arguments: Any, **named: Any) -> Any:
        y, streams, a = original(*arguments, **named)
        if a is not None:
            if kept:
                y = y + kept[-1][..., -1:, :1].sum()
            kept.append(a)
        return y, streams, a

    attention.over_past = over_past  # type: ignore[method-assign]
    return model


def bidirectional(model: QvattnModel) -> QvattnModel:
    stack = model.decoder_stack
    stack.spec = stack.spec.replace(causal=False)
    return model


def queries_in_entries(model: QvattnModel, *, hidden: bool) -> QvattnModel:
    """W_Q enters the streams of its own layer. hidden: in a way that automatic differentiation does not see."""
    for block in model.decoder_stack.blocks():
        _mix_queries(block.self_attn.variant, hidden)
    return model


def _mix_queries(variant: Any, hidden: bool) -> None:
    original = variant.entries

    def entries(x: Tensor, rotation: Any) -> dict[str, Tensor]:
        weight = variant.q_proj.weight
        shift = (weight.detach() if hidden else weight).mean()
        return {name: entry + shift for name, entry in original(x, rotation).items()}

    variant.entries = entries


def one_query_for_all(model: QvattnModel) -> QvattnModel:
    """Every token asks the same: a new row over old keys is what the last row was, and could be predicted."""
    for block in model.decoder_stack.blocks():
        _same_queries(block.self_attn.variant)
    return model


def _same_queries(variant: Any) -> None:
    original = variant.queries

    def queries(x: Tensor, rotation: Any) -> dict[str, Tensor]:
        made: dict[str, Tensor] = original(torch.ones_like(x), rotation)
        return made

    variant.queries = queries


def with_second_memory(model: QvattnModel) -> QvattnModel:
    """A model that carries its past outside the cache."""
    state = torch.zeros(())

    def remember(module: Any, arguments: Any, output: Tensor) -> Tensor:
        nonlocal state
        given = output + state
        state = state + output.mean()
        return given

    model.decoder_stack.register_forward_hook(remember)
    return model
