"""What every variant with every position scheme promises. Each check takes a causal spec and builds what it needs.

`CHECKS` is run over the product of the tables by test_contract.py; a new variant or scheme needs nothing here.
The tolerance is 1e-5 in float32 throughout (DESIGN 4).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from qvattn import Attention, AttentionSpec, Geometry, StreamCache, UserError
from qvattn.kernels import IMPLS
from qvattn.streams import cache_elements

from .tiny import close, left_padded, right_padded, scramble, step_by_step, tiny, tokens


def cached_equals_full(spec: AttentionSpec) -> None:
    """Any split into prefill and steps gives one full forward, whichever route and kernel is chosen (CASES 1, 2)."""
    layer, x = tiny(spec), tokens(2, 21)
    full = layer(x)
    draw = random.Random(spec.variant)
    for splits in ([18, 1, 2], [5, 1, 3, 12], [1] * 21, _random_split(draw, 21)):
        close(step_by_step(layer, x, splits), full)


def _random_split(draw: random.Random, total: int) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(draw.randint(1, total - sum(sizes)))
    return sizes


def expand_equals_absorb(spec: AttentionSpec) -> None:
    """Materialised keys and values, and factors folded away, give the same numbers and gradients; or are refused."""
    x = tokens(2, 6).requires_grad_()
    expand = tiny(spec, route="expand")
    if not spec.can_absorb:
        if spec.variant_class.two_routes:
            with pytest.raises(UserError, match=r"route='absorb'.*use route='expand'"):
                Attention(spec, route="absorb")
        else:
            close(tiny(spec, route="absorb")(x), expand(x))
        return
    absorb = tiny(spec, route="absorb")
    y, z = expand(x), absorb(x)
    close(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    for (name, p), q in zip(expand.named_parameters(), absorb.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def kernels_equal_reference(spec: AttentionSpec) -> None:
    """Every kernel gives the reference's numbers, in prefill, decoding and with padding; or says why it cannot."""
    x, positions = tokens(2, 8), left_padded([8, 5], 8)
    reference = tiny(spec, impl="reference")
    splits = [5, 1, 2]
    full, steps = reference(x), step_by_step(reference, x, splits, positions)
    for impl in IMPLS:
        if impl == "reference":
            continue
        layer = tiny(spec, impl=impl)
        for run, expected in (
            (lambda layer=layer: layer(x), full),
            (lambda layer=layer: step_by_step(layer, x, splits, positions), steps),
        ):
            with torch.no_grad():
                served = answer(run)
            if isinstance(served, Tensor):
                close(served, expected)
            else:
                assert impl != "auto" and f"impl={impl!r}" in served and "use impl=" in served


def answer(run: Callable[[], Tensor]) -> Tensor | str:
    """What `run` gives, or the message with which it refuses."""
    try:
        return run()
    except UserError as refusal:
        return str(refusal)


def gradients_match_differences(spec: AttentionSpec) -> None:
    """`gradcheck` in float64 over the input and every parameter, with a padding row and a query that sees nothing."""
    layer = tiny(spec).double()
    names = [name for name, _ in layer.named_parameters()]
    x = tokens(2, 4).double().requires_grad_()
    positions = left_padded([4, 2], 4)

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        y: Tensor = functional_call(layer, dict(zip(names, parameters, strict=True)), (x,), {"positions": positions})
        return y

    torch.manual_seed(0)
    assert torch.autograd.gradcheck(
        forward, (x, *(p.detach().requires_grad_() for p in layer.parameters())), fast_mode=True
    )


def padded_rows_equal_solo(spec: AttentionSpec) -> None:
    """Rows of a padded batch, in full, and left-padded through four cached steps, equal their solo runs (CASES 3)."""
    layer, lengths, x = tiny(spec), [6, 2], tokens(2, 6)
    solo = [layer(x[i : i + 1, :n]) for i, n in enumerate(lengths)]
    right = layer(x, positions=right_padded(lengths, 6))
    shifted = torch.stack([x[i].roll(6 - n, 0) for i, n in enumerate(lengths)])
    left = layer(shifted, positions=left_padded(lengths, 6))
    stepped = step_by_step(layer, shifted, [2, 1, 1, 1, 1], left_padded(lengths, 6))
    for i, n in enumerate(lengths):
        close(right[i, :n], solo[i][0])
        close(left[i, 6 - n :], solo[i][0])
        close(stepped[i, 6 - n :], solo[i][0])


def padding_has_no_influence(spec: AttentionSpec) -> None:
    """What stands in padding changes nothing, in causal, bidirectional and cross-attention."""
    positions = right_padded([5, 3], 5)
    x, noise = tokens(2, 5), 100 * tokens(2, 5, seed=9)
    dirty = torch.where(positions[..., None] >= 0, x, noise)
    real = positions >= 0
    for layer in (tiny(spec), tiny(spec.replace(causal=False))):
        close(layer(x, positions=positions)[real], layer(dirty, positions=positions)[real])
    q = tokens(2, 3, seed=4)
    close(layer(q, memory=x, memory_positions=positions), layer(q, memory=dirty, memory_positions=positions))


def blind_rows_are_zero(spec: AttentionSpec) -> None:
    """A row of padding only gives zeros and finite gradients, also in half precision (CASES 4)."""
    positions = torch.tensor([[-1, -1, -1], [0, 1, 2]])
    for dtype in (torch.float32, torch.float16):
        layer = tiny(spec).to(dtype)
        x = tokens(2, 3).to(dtype).requires_grad_()
        y = layer(x, positions=positions)
        assert torch.equal(y[0], torch.zeros_like(y[0]))
        assert y[1].abs().sum() > 0
        y.float().square().sum().backward()
        gradients = [x.grad, *(p.grad for p in layer.parameters())]
        assert all(g is not None and g.isfinite().all() for g in gradients)
        assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))


def half_precision_is_near(spec: AttentionSpec) -> None:
    """bf16 and fp16 layers stay near float32, keep their dtype, and cache in it (CASES 13)."""
    x = tokens(2, 8)
    full = tiny(spec)(x)
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        layer = tiny(spec).to(dtype)
        y = layer(x.to(dtype))
        assert y.dtype == dtype
        assert (y.float() - full).abs().max() < tolerance * full.abs().max()
        cache = layer.new_cache(2)
        z = step_by_step(layer, x.to(dtype), [5, 1, 2], cache=cache)
        assert z.dtype == dtype and cache.dtype == dtype
        assert (z.float() - full).abs().max() < tolerance * full.abs().max()


def future_is_hidden(spec: AttentionSpec) -> None:
    """Causal without any mask given: later tokens change no earlier output; bidirectional ones do (CASES 8)."""
    x = tokens(1, 6)
    changed = x.clone()
    changed[:, 4:] += 1
    layer = tiny(spec)
    y, z = layer(x), layer(changed)
    close(y[:, :4], z[:, :4], 1e-6)
    assert not torch.allclose(y[:, 4:], z[:, 4:])
    layer = tiny(spec.replace(causal=False))
    assert not torch.allclose(layer(x)[:, :4], layer(changed)[:, :4])


def window_slides(spec: AttentionSpec) -> None:
    """With a window, cached == full, tokens before it have no influence, and a wide one changes nothing."""
    layer, x = tiny(spec.replace(window=3)), tokens(2, 20)
    full = layer(x)
    close(step_by_step(layer, x, [18, 1, 1]), full)
    close(step_by_step(layer, x, [2, 3, 1, 14], left_padded([20, 16], 20))[0], full[0])
    changed = x.clone()
    changed[:, :4] += 1
    close(layer(changed)[:, 6:], full[:, 6:], 1e-6)
    assert not torch.allclose(layer(changed)[:, 5], full[:, 5])
    close(tiny(spec.replace(window=20))(x), tiny(spec)(x))
    assert not torch.allclose(full[:, 5:], tiny(spec)(x)[:, 5:])


def bidirectional_sees_everything(spec: AttentionSpec) -> None:
    """Without causality both routes agree, a cache is refused, and a window has two sides."""
    spec = spec.replace(causal=False)
    x = tokens(2, 6)
    y = tiny(spec, route="expand")(x)
    if spec.can_absorb:
        close(tiny(spec, route="absorb")(x), y)
    with pytest.raises(UserError, match="causal=True"):
        tiny(spec)(x, cache=tiny(spec).new_cache(2))
    layer = tiny(spec.replace(window=2))
    changed = x.clone()
    changed[:, 0] += 1
    close(layer(x)[:, 2:], layer(changed)[:, 2:], 1e-6)
    changed = x.clone()
    changed[:, 5] += 1
    close(layer(x)[:, :4], layer(changed)[:, :4], 1e-6)
    assert not torch.allclose(layer(x)[:, 4], layer(changed)[:, 4])


def rows_are_independent(spec: AttentionSpec) -> None:
    """Permuting the batch permutes the output; a cache reordered, cropped or forked continues rightly (CASES 10)."""
    layer, x = tiny(spec), tokens(3, 6)
    full, order = layer(x), torch.tensor([2, 0, 1])
    close(layer(x[order]), full[order])
    with torch.no_grad():
        cache = layer.new_cache(3, capacity=1)
        layer(x[:, :4], cache=cache)
        twin = cache.fork()
        layer(x[:, 4:] + 1, cache=twin)
        cache.reorder(order)
        close(layer(x[order][:, 4:], cache=cache), full[order][:, 4:])
        cache.crop(2)
        close(layer(x[order][:, 2:], cache=cache), full[order][:, 2:])


def entries_never_change(spec: AttentionSpec) -> None:
    """Later steps neither move nor touch what is cached, and it holds exactly the predicted bytes (CASES 6, 9)."""
    layer, x = tiny(spec), tokens(2, 7)
    cache = layer.new_cache(2, capacity=16)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        before = {name: s.clone() for name, s in cache.read(0).items()}
        for t in range(3, 7):
            layer(x[:, t : t + 1], cache=cache)
    after = cache.read(0)
    assert set(after) == {s.name for s in spec.streams}
    for stream in spec.streams:
        assert after[stream.name].shape == (2, stream.heads, 7, stream.width)
        assert torch.equal(after[stream.name][:, :, :3], before[stream.name])
    assert cache.nbytes == 2 * 7 * spec.cache_bytes_per_token(torch.float32)
    assert spec.cache_elements_per_token == cache_elements(spec.streams)
    assert spec.parameters == sum(p.numel() for p in layer.parameters())


def borrowing_equals_owning(spec: AttentionSpec) -> None:
    """A layer that reuses the streams of an equal layer gives that layer's output, full and cached, and drops what
    makes streams; the cache counts them once."""
    owner, borrower = tiny(spec), tiny(spec, borrows=True)
    shared = dict(owner.state_dict())
    missing, unexpected = borrower.load_state_dict(shared, strict=False)
    assert not missing
    dropped = {name.split(".")[1] for name in unexpected}
    assert dropped <= set(spec.variant_class.stream_parameters)
    x, z = tokens(2, 19), tokens(2, 19, seed=5)
    geometry = Geometry.contiguous(19, causal=True)
    _, streams, _ = owner.over_past(x, geometry)
    same, _, _ = borrower.over_past(x, geometry, lent=streams)
    close(same, owner(x))
    other, _, _ = borrower.over_past(z, geometry, lent=streams)
    cache, parts = StreamCache([spec.streams, 0], 2, capacity=1), []
    with torch.no_grad():
        for piece in (slice(0, 17), slice(17, 18), slice(18, 19)):
            cache.advance(cache.next_positions(x[:, piece].shape[1]))
            here = Geometry(cache.positions[:, piece], cache.positions, causal=True)
            owner.over_past(x[:, piece], here, cache=cache, layer=0)
            parts.append(borrower.over_past(z[:, piece], here, cache=cache, layer=1)[0])
    close(torch.cat(parts, dim=1), other)
    assert cache.nbytes == 2 * 19 * spec.cache_bytes_per_token()


def cross_attention_reads_memory(spec: AttentionSpec) -> None:
    """Streams of the memory are made once; beams are further queries; neither positions nor causality matter
    (CASES 11)."""
    layer, memory, x = tiny(spec), tokens(2, 18, seed=3), tokens(2, 3)
    positions = right_padded([2, 18], 18)
    y = layer(x, memory=memory, memory_positions=positions)
    close(layer(x.flip(1), memory=memory, memory_positions=positions).flip(1), y)
    mixed = torch.stack([memory[0], memory[1].flip(0)])
    close(layer(x, memory=mixed, memory_positions=positions), y)
    close(layer(x[:1], memory=memory[:1, :2]), y[:1])
    streams = layer.memory_streams(memory)
    beams = x.repeat_interleave(2, 0) + tokens(4, 3, seed=8)
    geometry = Geometry(torch.zeros(1, 6, dtype=torch.int32), positions, causal=False)
    z = layer.over_memory(beams, streams, geometry)
    for i in range(4):
        source = slice(i // 2, i // 2 + 1)
        close(z[i : i + 1], layer(beams[i : i + 1], memory=memory[source], memory_positions=positions[source]))


def biases_are_kept(spec: AttentionSpec) -> None:
    """With biases, cached == full and expand == absorb as well; or they are refused with the reason."""
    x = tokens(2, 19)
    refusal = answer(lambda: tiny(spec.replace(bias=True))(x))
    if isinstance(refusal, str):
        assert "bias=True" in refusal and "bias=False" in refusal
        return
    spec = spec.replace(bias=True)
    layer = tiny(spec)
    full = layer(x)
    close(step_by_step(layer, x, [17, 1, 1]), full)
    if spec.can_absorb:
        close(tiny(spec, route="absorb")(x), full)
    biases = [p for name, p in layer.named_parameters() if name.endswith("bias") and "proj" in name]
    assert biases
    for p in biases:
        with torch.no_grad():
            p.zero_()
    assert not torch.allclose(layer(x), full)


def weights_sum_to_one(spec: AttentionSpec) -> None:
    """Weights asked for belong to the same output and sum to one wherever a query sees something."""
    layer, x = tiny(spec), tokens(2, 4)
    positions = left_padded([4, 2], 4)
    geometry = Geometry(positions, positions, causal=True)
    y, _, a = layer.over_past(x, geometry, weights=True)
    assert a is not None and a.shape == (2, spec.n_heads, 4, 4)
    close(y, layer(x, positions=positions))
    close(a.sum(-1), (positions >= 0)[:, None].expand(-1, spec.n_heads, -1).float())


def parameters_are_all_used(spec: AttentionSpec) -> None:
    """Every parameter gets a gradient, is saved, loaded, and noticed by inference after it has changed (CASES 12)."""
    layer, x = tiny(spec), tokens(2, 5)
    with torch.no_grad():
        before = layer(x)
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
        p.grad = None
    other = tiny(spec, seed=3)
    with torch.no_grad():
        assert not torch.allclose(other(x), before)
        other.load_state_dict(layer.state_dict())
        close(other(x), before)
        scramble(layer, seed=7)
        close(layer(x), tiny(spec, seed=7)(x))
    with torch.inference_mode():
        close(layer(x), tiny(spec, seed=7)(x))


CHECKS: dict[str, Callable[[AttentionSpec], None]] = {
    check.__name__: check
    for check in (
        cached_equals_full,
        expand_equals_absorb,
        kernels_equal_reference,
        gradients_match_differences,
        padded_rows_equal_solo,
        padding_has_no_influence,
        blind_rows_are_zero,
        half_precision_is_near,
        future_is_hidden,
        window_slides,
        bidirectional_sees_everything,
        rows_are_independent,
        entries_never_change,
        borrowing_equals_owning,
        cross_attention_reads_memory,
        biases_are_kept,
        weights_sum_to_one,
        parameters_are_all_used,
    )
}
