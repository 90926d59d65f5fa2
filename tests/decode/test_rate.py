"""The decoding speed that stands in a comparison's rows."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from qvattn.decode import rate
from qvattn.decode.rate import ROWS, decode_rate
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel, initialise


def translator(variant: str = "qv") -> TranslationModel:
    model = TranslationModel(
        TranslationConfig(
            source_vocab_size=50,
            target_vocab_size=50,
            d_model=16,
            d_ff=16,
            n_heads=2,
            encoder_layers=1,
            decoder_layers=1,
            attention=variant,
        )
    )
    initialise(model, 1)
    return model


def speaker() -> CausalLM:
    model = CausalLM(CausalLMConfig(vocab_size=50, d_model=16, d_ff=16, n_heads=2, layers=1, position="alibi"))
    initialise(model, 1)
    return model


def pairs(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 50, (rows, 6))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.full((rows, length), 7),
    }


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes 10 ms."""
    ticks = count()
    monkeypatch.setattr(rate.time, "perf_counter", lambda: next(ticks) / 100)


@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize(("rows", "counted"), [(5, 5), (ROWS + 8, ROWS)])
def test_rows_over_the_time_of_a_step(rows: int, counted: int) -> None:
    assert decode_rate(translator(), pairs(rows, 9)) == pytest.approx(counted * 100)


@pytest.mark.usefixtures("_clock")
def test_a_language_model_goes_on_from_half_of_each_block() -> None:
    asked = []
    model = speaker()
    opened = rate.LeanModel.open

    def open_and_note(self: rate.LeanModel, ids: torch.Tensor, mask: torch.Tensor) -> object:
        asked.append(tuple(ids.shape))
        return opened(self, ids, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rate.LeanModel, "open", open_and_note)
        assert decode_rate(model, {"input_ids": torch.randint(4, 50, (3, 20))}, seconds=0) == pytest.approx(300)
    assert asked == [(3, 10)]


def test_one_step_gives_no_speed() -> None:
    assert decode_rate(translator(), pairs(4, 1)) is None


def test_training_mode_and_weights_are_left_alone() -> None:
    model, batch = translator().train(), pairs(4, 5)
    before = [p.clone() for p in model.parameters()]
    state = torch.random.get_rng_state()
    assert decode_rate(model, batch, seconds=0) > 0
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
