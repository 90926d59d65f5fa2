"""Hugging Face configs of our models: widths, depths, and one attention description per place it stands in.

`attention` is either one description (a variant's name, or a dict of AttentionSpec fields without d_model and causal),
used everywhere, or a dict of such descriptions by place: "encoder", "decoder", "cross". A description's fields beat the
top-level `n_heads` and `position`. Cross-attention carries no relative position and no window (as in T5).
Where layers differ, a place holds a list of descriptions, one for each layer from bottom to top.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..errors import UserError
from ..positions import POSITIONS
from ..spec import AttentionSpec, PositionSpec

ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "swiglu")
NORMS = ("pre", "post")
NORM_TYPES = ("layer", "rms")


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{field}={value!r}: allowed are {', '.join(allowed)}")


def _by_place(attention: Any, places: tuple[str, ...]) -> dict[str, Any]:
    """The long form of `attention`: place -> AttentionSpec fields, or a list of them, one for each layer."""

    def fields(one: Any) -> Any:
        if isinstance(one, list | tuple):
            return [fields(layer) for layer in one]
        if isinstance(one, str):
            return {"variant": one}
        if not isinstance(one, dict):
            raise UserError(f"attention={one!r}: give a variant's name or a mapping of AttentionSpec fields")
        return dict(one)

    if isinstance(attention, dict) and attention.keys() & set(places):
        unknown = attention.keys() - set(places)
        if unknown:
            raise UserError(f"attention.{min(unknown)}: by place, allowed are {', '.join(places)}")
        return {place: fields(attention.get(place, "mha")) for place in places}
    return {place: fields(attention) for place in places}


class _Config(PreTrainedConfig):
    """What translation models and language models have in common.

    norm: before ("pre") or after ("post") each part.  norm_type: "layer" or "rms".  norm_eps: unset, that of the type.
    activation: of the feed-forward part; "gelu-tanh" is GPT-2's, "swiglu" is gated.  ff_bias: biases in it.
    parallel_residual: attention and feed-forward read the same input and are added to it together (GPT-J, GPT-NeoX).
    embedding_scale: multiplies embeddings; unset, the square root of d_model (arXiv 1706.03762, section 3.4).
    bias: of the attention's projections.  dropout: on embeddings and on what each part adds.
    """

    d_model: int = 256
    d_ff: int = 1024
    n_heads: int = 8
    attention: Any = "mha"
    position: Any = "sinusoidal"
    share_every: int = 1
    norm: str = "pre"
    norm_type: str = "layer"
    activation: str = "relu"
    bias: bool = False
    norm_eps: float | None = None
    ff_bias: bool = True
    parallel_residual: bool = False
    embedding_scale: float | None = None
    dropout: float = 0.1
    use_cache: bool = True

    def _check(self) -> None:
        _one_of("norm", self.norm, NORMS)
        _one_of("norm_type", self.norm_type, NORM_TYPES)
        _one_of("activation", self.activation, ACTIVATIONS)
        if self.norm_eps is not None and not self.norm_eps > 0:
            raise UserError(f"norm_eps={self.norm_eps}: allowed is a small positive number, or unset")
        if self.parallel_residual and self.norm == "post":
            raise UserError(
                "parallel_residual=True: there is no norm='post' between parts side by side; use norm='pre'"
            )
        if self.share_every < 1:
            raise UserError(f"share_every={self.share_every}: 1 (every layer has streams of its own) or more")
        for field in ("d_model", "d_ff", "n_heads"):
            if getattr(self, field) < 1:
                raise UserError(f"{field}={getattr(self, field)}: allowed are positive widths")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout={self.dropout}: allowed is 0 <= dropout < 1")

    def specs(self, place: str, depth: int, *, causal: bool, memory: bool = False) -> tuple[AttentionSpec, ...]:
        """The attention specs at one place, one for each of `depth` layers.

        memory: they read a memory, so relative position and window are dropped.
        """
        given = self.attention[place]
        if not isinstance(given, list):
            return (self._spec(given, causal=causal, memory=memory),) * depth
        if len(given) != depth:
            raise UserError(
                f"attention.{place}: a list of {len(given)} descriptions for {depth} layers; give one for each layer, "
                "or one description for all"
            )
        specs = tuple(self._spec(one, causal=causal, memory=memory) for one in given)
        self._check_layers(place, specs)
        return specs

    def _check_layers(self, place: str, specs: tuple[AttentionSpec, ...]) -> None:
        """What layers that differ must agree in: an absolute position, and streams that are shared."""
        for i, spec in enumerate(specs):
            if spec.position != specs[0].position and any(
                POSITIONS[s.position.kind].absolute for s in (spec, specs[0])
            ):
                raise UserError(
                    f"attention.{place}: layer {i} has position={spec.position.kind!r}, layer 0 "
                    f"{specs[0].position.kind!r}; an absolute position is added below all layers, so it must be one"
                )
            owner = i - i % self.share_every
            if place == "decoder" and spec.streams != specs[owner].streams:
                raise UserError(
                    f"attention.{place}: layer {i} shares the streams of layer {owner} (share_every="
                    f"{self.share_every}), whose streams differ; describe both alike"
                )

    def _spec(self, fields: dict[str, Any], *, causal: bool, memory: bool) -> AttentionSpec:
        own = dict(fields)
        if memory:
            position = own.pop("position", None)
            own.pop("window", None)
            kind = position.get("kind") if isinstance(position, dict) else position
            if kind is not None and kind not in POSITIONS:
                PositionSpec(kind=kind)  # raises, naming the field
            own["position"] = "none"
        complete = {"n_heads": self.n_heads, "position": self.position, "bias": self.bias} | own
        return AttentionSpec(d_model=self.d_model, causal=causal, **complete)


class TranslationConfig(_Config):
    """Encoder-decoder Transformer. Widths in elements, depths in layers.

    source_vocab_size, target_vocab_size: tokens.  share_embeddings: one table for source and target (equal sizes).
    The target embedding and the output projection are always one matrix.
    """

    model_type = "qvattn-translation"
    is_encoder_decoder: bool = True
    source_vocab_size: int = 8000
    target_vocab_size: int = 8000
    encoder_layers: int = 3
    decoder_layers: int = 3
    share_embeddings: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    attribute_map = {  # noqa: RUF012 - the base class's own declaration
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "decoder_layers",
        "vocab_size": "target_vocab_size",
    }

    def __post_init__(self, **kwargs: Any) -> None:
        self.attention = _by_place(self.attention, ("encoder", "decoder", "cross"))
        self._check()
        if self.parallel_residual:
            raise UserError("parallel_residual=True: attention to a source has no place in it; leave it unset")
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            raise UserError(
                f"share_embeddings=True: source_vocab_size={self.source_vocab_size} and target_vocab_size="
                f"{self.target_vocab_size} differ; use one vocabulary or share_embeddings=False"
            )
        for spec in (*self.encoder_specs, *self.decoder_specs, *self.cross_specs):
            assert spec.streams
        super().__post_init__(**kwargs)

    @property
    def encoder_specs(self) -> tuple[AttentionSpec, ...]:
        return self.specs("encoder", self.encoder_layers, causal=False)

    @property
    def decoder_specs(self) -> tuple[AttentionSpec, ...]:
        return self.specs("decoder", self.decoder_layers, causal=True)

    @property
    def cross_specs(self) -> tuple[AttentionSpec, ...]:
        return self.specs("cross", self.decoder_layers, causal=False, memory=True)

    @property
    def encoder_spec(self) -> AttentionSpec:
        """Of the lowest layer, which is that of every layer unless they differ."""
        return self.encoder_specs[0]

    @property
    def decoder_spec(self) -> AttentionSpec:
        """Of the lowest layer."""
        return self.decoder_specs[0]

    @property
    def cross_spec(self) -> AttentionSpec:
        """Of the lowest layer."""
        return self.cross_specs[0]


class CausalLMConfig(_Config):
    """Decoder-only Transformer language model.

    max_position_embeddings: the longest context it was made for, where known; nothing is cut or refused by it.
    base_model: where the weights came from, if from elsewhere: name, model_type, licence as far as known.
    """

    model_type = "qvattn-causal-lm"
    vocab_size: int = 8000
    layers: int = 4
    max_position_embeddings: int | None = None
    base_model: dict[str, Any] | None = None
    norm_type: str = "rms"
    activation: str = "swiglu"
    position: Any = "rope"
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    attribute_map = {  # noqa: RUF012 - the base class's own declaration
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "layers",
    }

    def __post_init__(self, **kwargs: Any) -> None:
        self.attention = _by_place(self.attention, ("decoder",))
        self._check()
        assert all(spec.streams for spec in self.decoder_specs)
        super().__post_init__(**kwargs)

    @property
    def decoder_specs(self) -> tuple[AttentionSpec, ...]:
        """One for each layer, from bottom to top."""
        return self.specs("decoder", self.layers, causal=True)

    @property
    def decoder_spec(self) -> AttentionSpec:
        """Of the lowest layer, which is that of every layer unless they differ."""
        return self.decoder_specs[0]
