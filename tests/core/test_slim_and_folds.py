"""What inference remembers of parameters: slim's inverse and keyless's folded query."""

from __future__ import annotations

import warnings

import pytest
import torch

from qvattn import UserError

from .tiny import close, tiny, tiny_spec, tokens


def with_condition(condition: float, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    """A slim layer whose W_K has that condition number."""
    layer = tiny(tiny_spec("slim"))
    u, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
    scales = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 16, dtype=torch.float64)
    with torch.no_grad():
        layer.variant.k_proj.weight.copy_(u @ torch.diag(scales) @ v)
    return layer.to(dtype)


def test_slim_warns_and_refuses_by_condition() -> None:
    """Condition x epsilon: silent below 1e-2, a warning from there, refused from 1 on."""
    x = tokens(1, 3)
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with_condition(1e3)(x)
        with pytest.warns(UserWarning, match=r"slim: W_K has condition number .*e\+0[56].*float32"):
            with_condition(1e6)(x)
        with pytest.raises(UserError, match=r"slim: W_K has condition number .*use a wider dtype or mha"):
            with_condition(1e9)(x)
        with pytest.raises(UserError, match=r"bfloat16.*use a wider dtype or mha"):
            with_condition(1e3, torch.bfloat16)(x.bfloat16())


def test_slim_refuses_a_singular_projection() -> None:
    layer, x = tiny(tiny_spec("slim")), tokens(1, 3)
    with torch.no_grad():
        layer.variant.k_proj.weight[0] = 0
        with pytest.raises(UserError, match="slim: W_K"):
            layer(x)
    with pytest.raises(UserError, match="slim: W_K is singular"):
        layer(x)


def test_slim_stays_near_mha_up_to_its_warning() -> None:
    """The stated error bound holds: condition 1e4 in float32 is off by less than 1e4 x epsilon of the values' size."""
    layer = with_condition(1e4)
    mha = tiny(tiny_spec("mha"))
    mha.load_state_dict(layer.state_dict())
    x = tokens(2, 8)
    with torch.no_grad():
        y, z = layer(x), mha(x)
    assert (y - z).abs().max() <= 1e4 * torch.finfo(torch.float32).eps * z.abs().max()


@pytest.mark.parametrize("variant", ["slim", "keyless"])
def test_folds_follow_the_optimizer(variant: str) -> None:
    """Steps between inference calls, moves of dtype and fresh state are noticed."""
    layer, x = tiny(tiny_spec(variant)), tokens(2, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    for _ in range(3):
        with torch.no_grad():
            before = layer(x)
        close(before, layer(x))
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.allclose(layer(x), before)
    layer.double()
    with torch.no_grad():
        after = layer(x.double())
    close(after, layer(x.double()))
    assert after.dtype == torch.float64


def test_keyless_starts_as_qv() -> None:
    from qvattn import Attention

    torch.manual_seed(0)
    keyless, qv = Attention(tiny_spec("keyless")), Attention(tiny_spec("qv"))
    keyless.load_state_dict(qv.state_dict(), strict=False)
    close(keyless(tokens(1, 4)), qv(tokens(1, 4)))
