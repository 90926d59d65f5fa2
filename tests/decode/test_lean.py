"""Lean twins and lean steps: the same numbers, fewer products, and the original untouched."""

from __future__ import annotations

import pytest
import torch

from qvattn import UserError
from qvattn.decode import LeanModel
from qvattn.decode.lean import Part, lean
from qvattn.decode.session import PromptSession

from .small import COMBINATIONS, language, prompts, sources, translation


@pytest.mark.parametrize(("variant", "position"), COMBINATIONS)
def test_lean_steps_equal_the_model(variant: str, position: str) -> None:
    model, (ids, mask) = translation(variant, position), sources((8, 2))
    target = torch.randint(3, 40, (4, 20))
    target[:, 0] = 1
    with torch.inference_mode():
        expected = model(ids, mask, decoder_input_ids=target).logits
        session = LeanModel(model).open(ids, mask, copies=2)
        got = [session.begin(), *(session.step(target[:, t]) for t in range(1, 20))]
    torch.testing.assert_close(torch.stack(got, dim=1), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("fields", [{"norm": "post"}, {"norm_type": "rms"}, {"activation": "swiglu"}, {"bias": True}])
def test_other_blocks_too(fields: dict[str, object]) -> None:
    model, (ids, mask) = language("qv-ka", "rope", **fields), prompts((6, 3))
    with torch.inference_mode():
        session = LeanModel(model).open(ids, mask)
        session.begin()
        got = session.step(torch.tensor([4, 5]))
        longer = torch.cat((ids, torch.tensor([[4], [5]])), dim=1)
        expected = model(longer, attention_mask=torch.cat((mask, mask.new_ones(2, 1)), dim=1)).logits[:, -1]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 50])
@pytest.mark.parametrize("lengths", [(6, 6), (6, 2)])
def test_windows(window: int, lengths: tuple[int, int]) -> None:
    model, (ids, mask) = language({"variant": "mha", "window": window}, "alibi"), prompts(lengths)
    with torch.inference_mode():
        session = LeanModel(model).open(ids, mask)
        session.begin()
        for token in (4, 5, 6):
            got = session.step(torch.tensor([token, token]))
            ids = torch.cat((ids, torch.tensor([[token]] * 2)), dim=1)
            mask = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
        expected = model(ids, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = language("qv-ka", "t5"), prompts((11, 4))
    with torch.inference_mode():
        whole = LeanModel(model).open(ids, mask).begin()
        monkeypatch.setattr(PromptSession, "chunk", 3)
        pieces = LeanModel(model).open(ids, mask).begin()
    torch.testing.assert_close(whole, pieces, rtol=1e-5, atol=1e-5)


def test_maps_of_one_input_are_one_product() -> None:
    stack = LeanModel(translation({"decoder": "mha", "cross": "mha"})).stack
    own, cross = stack.layers[0].attention.variant, stack.layers[0].cross
    assert all(isinstance(own.__dict__[name], Part) for name in ("q_proj", "k_proj", "v_proj"))
    assert cross is not None and not isinstance(cross.variant.__dict__["q_proj"], Part)


def test_a_twin_leaves_its_original_alone_and_shows_the_moment_it_was_made() -> None:
    model, (ids, mask) = translation("qv"), sources()
    model.train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    twin = LeanModel(model)
    with torch.inference_mode():
        first = twin.open(ids, mask).begin()
    assert model.training and not lean(model.decoder).training
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not any(p.is_inference() for p in model.parameters())
    with torch.no_grad():
        model.decoder.layers[0].self_attn.variant.q_proj.weight.zero_()
    with torch.inference_mode():
        assert torch.equal(twin.open(ids, mask).begin(), first)


def test_half_precision_follows_the_model() -> None:
    model, (ids, mask) = translation("qv-ka").to(torch.bfloat16), sources()
    session = LeanModel(model).open(ids, mask)
    with torch.inference_mode():
        assert session.begin().dtype == session.cache.dtype == torch.bfloat16


def test_only_our_models_are_made_lean() -> None:
    with pytest.raises(UserError, match="model of type Linear"):
        LeanModel(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
