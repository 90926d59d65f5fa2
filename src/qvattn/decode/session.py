"""A model made ready for decoding, and one batch being decoded by it.

`LeanModel` is made once per set of weights; it opens sessions. A session holds a batch's cache (and the memory of its
sources) and knows three things: the logits after the prompt, the logits after one more token per row, and how rows are
rearranged or dropped. What to choose from the logits is the business of `greedy`, `beam` and `sample`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..geometry import Geometry
from ..models import CausalLM, Memory, QvattnModel, TranslationModel, positions_of
from ..streams import StreamCache
from .lean import lean
from .step import LeanStack, StepGeometry

FIRST_RESERVATION = 64


class LeanModel:
    """The lean twin of a model, and the token ids that steer decoding.

    It holds copies of the decoder's matrices and shows the weights of the moment it was made.
    """

    def __init__(self, model: QvattnModel) -> None:
        if not isinstance(model, TranslationModel | CausalLM):
            raise UserError(f"model of type {type(model).__name__}: allowed are TranslationModel and CausalLM")
        self.model = model
        config = model.generation_config
        if isinstance(model, TranslationModel):
            embedding = output = model.target_embedding.weight
            self.encoder = lean(model.encoder)
            self.start, self.suppressed = int(config.decoder_start_token_id), list(config.suppress_tokens or ())
        else:
            embedding, output = model.embedding.weight, model.output_weight
            self.start, self.suppressed = 0, []
        self.stack = LeanStack(model.decoder_stack, embedding.detach(), output.detach())
        eos = config.eos_token_id
        self.eos: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        pad = config.pad_token_id
        self.pad: int = pad if pad is not None else self.eos[0] if self.eos else 0
        self.device = embedding.device

    @property
    def is_translation(self) -> bool:
        return isinstance(self.model, TranslationModel)

    def encode(self, input_ids: Tensor, mask: Tensor | None) -> Memory:
        """The memory of sources (B, S): what cross-attention reads, once per source."""
        model = self.model
        assert isinstance(model, TranslationModel)
        positions = model.source_positions(input_ids, None if mask is None else mask.to(input_ids.device))
        encoded = self.encoder.forward(model.get_input_embeddings()(input_ids), positions)
        return model.remember(encoded, positions)

    def head(self, input_ids: Tensor, new: Tensor) -> Tensor:
        """What stands before new tokens: the start token (B, 1), or the prompts (B, S)."""
        if self.is_translation:
            return new.new_full((input_ids.shape[0], 1), self.start)
        return input_ids.to(new.device)

    def open(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, copies: int = 1) -> Session:
        """A session over sources (B, S), or over prompts (B, S) padded on the left; `copies` rows for each."""
        if input_ids.dim() != 2 or not input_ids.numel():
            raise UserError(f"input_ids has shape {tuple(input_ids.shape)}, expected [B, S] with B, S > 0")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise UserError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, expected that of input_ids, "
                f"{tuple(input_ids.shape)}"
            )
        kind = TranslationSession if self.is_translation else PromptSession
        return kind(self, input_ids.to(self.device), attention_mask, copies)


def as_lean(model: QvattnModel | LeanModel) -> LeanModel:
    """`model` itself if it is lean already."""
    return model if isinstance(model, LeanModel) else LeanModel(model)


class Session:
    """One batch being decoded. `copies` rows of each source or prompt stand together."""

    cache: StreamCache

    def __init__(self, lean_model: LeanModel, rows: int) -> None:
        lean_model.stack.lay_out(rows)
        self.lean = lean_model
        self.memory: Memory | None = None
        self.plain = True
        self.last = -1
        self._next: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.cache.batch_size

    @property
    def groups(self) -> int:
        """Sources whose rows must stand together; rows, where every row is its own."""
        return self.rows if self.memory is None else self.memory.positions.shape[0]

    def begin(self) -> Tensor:
        """Logits (rows, V) of the first new token."""
        raise TypeError(f"{type(self).__name__} must begin")

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens (rows,) and give the logits (rows, V) of the next ones."""
        self.last += 1
        cache = self.cache
        if self._next is None:
            positions = torch.full((self.rows, 1), self.last, dtype=torch.int32, device=cache.device)
        else:
            positions = self._next
            self._next = positions + 1
        cache.advance(positions)
        geometry = StepGeometry(
            positions, cache.positions, window=self.lean.stack.window, last=self.last, plain=self.plain
        )
        return self.lean.stack.step(tokens[:, None], geometry, cache, self.memory)

    def suppress(self, logits: Tensor) -> Tensor:
        """Rule out, in place, the tokens that are no words."""
        for token in self.lean.suppressed:
            logits[:, token] = float("-inf")
        return logits

    def reorder(self, index: Tensor) -> None:
        """Row b continues old row index[b] of the same source (beams)."""
        self.cache.reorder(index)
        if self._next is not None:
            self._next = self._next.index_select(0, index)

    def keep(self, sources: Tensor, rows: Tensor) -> None:
        """Go on with these sources (or prompts) and these of their rows only, in this order."""
        self.reorder(rows)
        if self.memory is not None:
            self.memory = self.memory.select(sources)


class TranslationSession(Session):
    """Encodes the sources, makes the cross-attention streams once per source, and decodes from the start token."""

    def __init__(self, lean_model: LeanModel, input_ids: Tensor, mask: Tensor | None, copies: int) -> None:
        super().__init__(lean_model, input_ids.shape[0] * copies)
        self.memory = lean_model.encode(input_ids, mask)
        self.cache = lean_model.model.new_cache(input_ids.shape[0] * copies, capacity=FIRST_RESERVATION)

    def begin(self) -> Tensor:
        return self.step(torch.full((self.rows,), self.lean.start, dtype=torch.long, device=self.cache.device))


class PromptSession(Session):
    """Reads prompts in chunks, once per prompt, and continues them."""

    chunk = 512
    """Tokens read at once: bounds the memory that scores of a long prompt take."""

    def __init__(self, lean_model: LeanModel, input_ids: Tensor, mask: Tensor | None, copies: int) -> None:
        super().__init__(lean_model, input_ids.shape[0] * copies)
        self.cache = lean_model.model.new_cache(input_ids.shape[0], capacity=input_ids.shape[1] + FIRST_RESERVATION)
        self._prompt = input_ids
        real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
        self._positions, self._copies = positions_of(real), copies
        if not bool((self._positions[:, -1] >= 0).all()):
            raise UserError("attention_mask ends in 0: pad prompts on the left, so that every row ends in a token")

    def begin(self) -> Tensor:
        logits = self._read(self._prompt, self._positions)
        last = self._positions[:, -1]
        self.last = int(last.max())
        self.plain = bool((self._positions[:, 0] == 0).all())
        if not self.plain:
            self._next = last[:, None] + 1
        if self._copies > 1:
            index = torch.arange(self.rows, device=logits.device).repeat_interleave(self._copies)
            self.reorder(index)
            logits = logits[index]
        return logits

    def _read(self, ids: Tensor, positions: Tensor) -> Tensor:
        cache, stack = self.cache, self.lean.stack
        logits = torch.empty(0)
        for some, at in zip(ids.split(self.chunk, dim=1), positions.split(self.chunk, dim=1), strict=True):
            cache.advance(at)
            geometry = Geometry(at, cache.positions, causal=True, window=stack.window)
            logits = stack.step(some, geometry, cache)
        return logits


def stop_ids(lean_model: LeanModel, eos: int | Sequence[int] | None) -> list[int]:
    """The ids that end a row: the given ones, or those of the model's generation config."""
    if eos is None:
        return lean_model.eos
    return [eos] if isinstance(eos, int) else list(eos)


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, S) of rows of ids, padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(longest) < lengths[:, None]).long()
