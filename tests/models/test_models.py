"""The two models: paired initial values, padding, sharing of streams, saving and loading that leaves nothing random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qvattn import UserError
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel, Watched, initialise
from qvattn.variants import VARIANTS

SMALL: dict[str, Any] = {
    "source_vocab_size": 50,
    "target_vocab_size": 50,
    "d_model": 32,
    "d_ff": 48,
    "n_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]])
LABELS = torch.tensor([[11, 12, 13, 2], [14, 2, -100, -100]])


def translation(**fields: Any) -> TranslationModel:
    model = TranslationModel(TranslationConfig(**SMALL | fields))
    initialise(model, 1)
    return model.eval()


def logits(model: TranslationModel, source: Tensor = SOURCE, labels: Tensor = LABELS) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=source, labels=labels, return_logits=True).logits
    return out


def test_equal_names_start_equal_across_variants() -> None:
    models = {name: dict(translation(attention=name).named_parameters()) for name in VARIANTS}
    base = models["mha"]
    for name, other in models.items():
        shared = [n for n in base if n in other and base[n].shape == other[n].shape]
        assert len(shared) > 20, name
        for parameter in shared:
            assert torch.equal(base[parameter], other[parameter]), (name, parameter)


def test_initial_values_depend_on_the_seed_and_leave_the_global_stream_alone() -> None:
    one, two = translation(), translation()
    initialise(two, 2)
    assert not torch.equal(one.target_embedding.weight, two.target_embedding.weight)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    initialise(one, 5)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_initialise_reaches_every_parameter(variant: str) -> None:
    model = TranslationModel(TranslationConfig(**SMALL, attention=variant, position="agf+pcm-v"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialise(model, 1)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope", "agf+pcm-v"])
def test_padding_changes_nothing(norm: str, activation: str, position: str) -> None:
    model = translation(norm=norm, activation=activation, position=position, attention="qv-ka")
    both = logits(model)
    alone = logits(model, SOURCE[1:, :3], LABELS[1:, :2])
    torch.testing.assert_close(both[1:, :2], alone, atol=1e-5, rtol=1e-5)
    left = logits(model, torch.tensor([[0, 0, 9, 10, 2]]), LABELS[1:, :2])
    torch.testing.assert_close(left, alone, atol=1e-5, rtol=1e-5)


def test_the_decoder_is_causal_and_the_encoder_is_not() -> None:
    model = translation(attention="qv", position="agf+pcm-v")
    changed = LABELS.clone()
    changed[0, 2] = 20  # enters the decoder at position 3
    torch.testing.assert_close(logits(model)[0, :3], logits(model, labels=changed)[0, :3], atol=1e-6, rtol=0)
    later = SOURCE.clone()
    later[0, 3] = 21
    assert not torch.allclose(model.encode(SOURCE)[0, 0], model.encode(later)[0, 0])


@pytest.mark.parametrize("share", [True, False])
def test_save_and_load(tmp_path: Any, share: bool) -> None:
    model = translation(attention={"decoder": "qv-ka", "cross": "mqa"}, share_embeddings=share)
    model.save_pretrained(tmp_path)
    again = TranslationModel.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    assert again.config.decoder_spec == model.config.decoder_spec


@pytest.mark.parametrize("kind", ["missing", "unexpected", "mismatched"])
def test_a_broken_checkpoint_is_refused_by_name(tmp_path: Any, kind: str) -> None:
    translation().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "decoder.layers.1.self_attn.variant.v_proj.weight"
    if kind == "missing":
        weights.pop(name)
    elif kind == "unexpected":
        name = "decoder.layers.9.surplus"
        weights[name] = torch.zeros(1)
    else:
        weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        TranslationModel.from_pretrained(tmp_path)


def test_shared_streams_are_made_and_counted_once() -> None:
    every, half = (translation(decoder_layers=4, share_every=n, attention="gqa") for n in (1, 2))
    assert half.cache_elements_per_token() * 2 == every.cache_elements_per_token()
    assert half.decoder_stack.cache_layers[1] == 0 and half.decoder_stack.cache_layers[3] == 2
    borrowed = half.decoder_stack.layers[1].self_attn.variant
    assert not hasattr(borrowed, "k_proj") and hasattr(borrowed, "q_proj")


def test_the_short_form_sets_all_three_places() -> None:
    config = TranslationConfig(**SMALL, attention={"variant": "qv-ka", "d_ctx": 8}, position="agf+pcm-v")
    specs = (config.encoder_spec, config.decoder_spec, config.cross_spec)
    assert {s.variant for s in specs} == {"qv-ka"} and {s.d_ctx for s in specs} == {8}
    assert [s.position.kind for s in specs] == ["agf+pcm-v", "agf+pcm-v", "none"]
    assert [s.causal for s in specs] == [False, True, False]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm": "middle"}, ["norm", "middle", "pre, post"]),
        ({"activation": "tanh"}, ["activation", "tanh", "swiglu"]),
        ({"target_vocab_size": 60}, ["share_embeddings", "50", "60"]),
        ({"attention": {"decoder": "qv", "middle": "qv"}}, ["attention.middle", "encoder"]),
        ({"attention": 7}, ["attention", "7"]),
        ({"n_heads": 5}, ["n_heads", "5", "32"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"share_every": 0}, ["share_every", "0"]),
    ],
)
def test_impossible_configs_fail_at_construction(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        TranslationConfig(**SMALL | fields)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", ["mha", "qv-ka", "mla"])
def test_the_language_model_shifts_its_labels_and_ignores_padding(tied: bool, variant: str) -> None:
    config = CausalLMConfig(
        vocab_size=40, d_model=32, d_ff=48, n_heads=4, layers=2, attention=variant, tie_word_embeddings=tied
    )
    model = CausalLM(config)
    initialise(model, 1)
    model.eval()
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    labels = ids.masked_fill(ids == 0, -100)
    out = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels, reduction="sum", return_logits=True)
    expected = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    torch.testing.assert_close(out.loss, expected)
    assert int(out.tokens) == 4


def test_watching_keeps_weights_and_changes_nothing() -> None:
    model = translation(attention="qv-ka", position="agf+pcm-v")
    watched = Watched()
    with torch.no_grad():
        seen = model.encode(SOURCE, watched=watched)
        real = SOURCE != 0  # what a padding token itself becomes means nothing
        torch.testing.assert_close(seen[real], model.encode(SOURCE)[real], atol=1e-6, rtol=1e-5)
    assert len(watched.self_weights) == 2 and watched.self_weights[0].shape == (2, 4, 5, 5)
    torch.testing.assert_close(watched.self_weights[0][0].sum(-1), torch.ones(4, 5))
