"""What Hugging Face's `generate()` needs of our models: a cache it can handle, and sources that beams share.

`generate()` asks a cache for little: its length, to follow the beams, to roll back. `GenerationCache` answers with the
model's own `StreamCache`. An encoder-decoder's source is encoded once and its cross-attention streams are made once;
beams and returned sequences of one source become further rows of queries, so nothing of a source is ever repeated.
Must never hold attention maths, nor be needed by the lean loops of `decode/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils import ModelOutput

from ..errors import UserError
from ..streams import PADDING, StreamCache

CACHE_NAME: str = ALL_CACHE_NAMES[0]
"""The keyword under which this version of transformers hands its cache around ("cache", once "past_key_values")."""
DEFAULT_NEW_TOKENS = 256
"""Tokens generated where the caller sets no limit; transformers' own default of 20 cuts sentences."""
FIRST_RESERVATION = 256


@dataclass
class EncoderOutput(ModelOutput):
    """Encoded sources: last_hidden_state (B, S, E), and what was asked for; `memory` are the decoder's streams."""

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    memory: Any = None


class GenerationCache:
    """A `StreamCache` as `generate()` sees it; the streams themselves are in `.streams`."""

    is_compileable = False
    is_croppable = True
    is_initialized = True

    def __init__(self, streams: StreamCache) -> None:
        self.streams = streams
        self.is_linear = self.is_sliding = self.is_dummy = [False]

    @property
    def batch_size(self) -> int:
        return self.streams.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache."""
        return self.streams.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: it grows as needed."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.streams.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens (transformers counts them negatively)."""
        if tokens_to_remove > 0:
            raise UserError(f"tokens_to_remove={tokens_to_remove}: transformers passes 0 or a negative number")
        self.streams.crop(self.streams.length + tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.streams.batch_size, device=self.streams.device)
        self.streams.reorder(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.streams.reorder(indices)

    def activate_past_recording(self) -> None:
        """Nothing to do: the whole past is kept."""

    def reset(self) -> None:
        self.streams.crop(0)


def stream_cache(cache: Any) -> StreamCache | None:
    """The streams behind what a caller passed as a cache. Raises UserError for a foreign cache."""
    if cache is None or isinstance(cache, StreamCache):
        return cache
    if isinstance(cache, GenerationCache):
        return cache.streams
    raise UserError(
        f"cache of type {type(cache).__name__}: these models keep a StreamCache (`model.new_cache(batch_size)`)"
    )


class SourceEncoder:
    """The encoder as `generate()` calls it."""

    def __init__(self, call: Callable[..., EncoderOutput]) -> None:
        self._call = call

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
    ) -> EncoderOutput:
        return self._call(
            input_ids,
            attention_mask,
            output_attentions=bool(output_attentions),
            output_hidden_states=bool(output_hidden_states),
        )

    __call__ = forward


class StreamGenerationMixin(GenerationMixin):
    """`generate()` over stream caches: greedy, sampling, beams, streaming, continued caches, returned attention."""

    new_cache: Callable[..., StreamCache]

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *_: Any,
    ) -> None:
        given = model_kwargs.get(CACHE_NAME)
        if given is not None:
            streams = stream_cache(given)
            assert streams is not None
            model_kwargs[CACHE_NAME] = given if isinstance(given, GenerationCache) else GenerationCache(streams)
        elif generation_config.cache_implementation is not None:
            raise UserError(
                f"cache_implementation={generation_config.cache_implementation!r}: these models keep a StreamCache; "
                "leave it unset"
            )
        elif generation_config.use_cache:
            rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            capacity = min(max_cache_length, FIRST_RESERVATION)
            model_kwargs[CACHE_NAME] = GenerationCache(self.new_cache(rows, capacity=capacity))

    def _prepare_generated_length(
        self, generation_config: Any, has_default_max_length: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if has_default_max_length and generation_config.max_new_tokens is None:
            generation_config.max_new_tokens = DEFAULT_NEW_TOKENS
        return super()._prepare_generated_length(generation_config, has_default_max_length, *args, **kwargs)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Rows of the decoder multiply, sources do not: cross-attention folds the rows of a source into its queries."""
        if not is_encoder_decoder:
            expanded: tuple[Tensor | None, dict[str, Any]] = super()._expand_inputs_for_generation(
                expand_size, False, input_ids, **model_kwargs
            )
            return expanded

        def repeated(x: Any) -> Any:
            return x.repeat_interleave(expand_size, dim=0) if isinstance(x, Tensor) else x

        kept = {name: repeated(x) if name.startswith("decoder_") else x for name, x in model_kwargs.items()}
        return repeated(input_ids), kept


def continued_positions(real: Tensor, cache: StreamCache | None) -> Tensor:
    """Positions (B, M) int32 of new tokens after those in the cache, -1 where `real` (B, M) is false."""
    counted = real.cumsum(dim=1, dtype=torch.int32) - 1
    if cache is not None and cache.length:
        counted = counted + cache.next_positions(1)
    return counted.masked_fill(~real, PADDING)
