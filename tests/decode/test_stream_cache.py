"""The stream cache: growth, rows, rollback, forks, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qvattn import Attention, AttentionSpec, Stream, StreamCache, UserError

STREAMS = (Stream(name="v", heads=2, width=3, values=True), Stream(name="g", heads=1, width=5, scores=True))


def filled(rows: int, tokens: int, *, capacity: int = 2, layers: list[object] | None = None) -> StreamCache:
    cache = StreamCache([STREAMS, STREAMS, 0] if layers is None else layers, rows, capacity=capacity)
    for step in range(tokens):
        append(cache, step)
    return cache


def entry(cache: StreamCache, layer: int, name: str, step: int) -> Tensor:
    s = next(s for s in STREAMS if s.name == name)
    rows = torch.arange(cache.batch_size, dtype=torch.float)[:, None, None, None]
    return torch.zeros(cache.batch_size, s.heads, 1, s.width) + 100 * rows + 10 * layer + step


def append(cache: StreamCache, step: int) -> None:
    cache.advance(cache.next_positions(1))
    for layer in (0, 1):
        cache.write(layer, {name: entry(cache, layer, name, step) for name in ("v", "g")})


def addresses(cache: StreamCache) -> list[int]:
    return [stream.data_ptr() for layer in (0, 1) for stream in cache.read(layer).values()]


def test_appending_moves_nothing_until_the_reservation_is_full() -> None:
    cache = filled(2, 0, capacity=8)
    append(cache, 0)
    first = addresses(cache)
    for step in range(1, 8):
        append(cache, step)
        assert addresses(cache) == first
    append(cache, 8)
    assert addresses(cache) != first
    assert cache.allocated_nbytes == 16 / 9 * cache.nbytes


def test_it_grows_by_doubling_and_keeps_what_it_held() -> None:
    cache = filled(3, 37)
    assert cache.length == 37 and cache.allocated_nbytes <= 2 * cache.nbytes
    assert torch.equal(cache.positions, torch.arange(37, dtype=torch.int32).expand(3, 37))
    for layer in (0, 1):
        for name, stream in cache.read(layer).items():
            expected = torch.cat([entry(cache, layer, name, step) for step in range(37)], dim=2)
            assert torch.equal(stream, expected)


def test_bytes_are_elements_times_rows_and_length_and_shared_layers_count_once() -> None:
    cache = filled(3, 5)
    assert cache.nbytes == 2 * (2 * 3 + 5) * 3 * 5 * 4
    assert cache.read(2)["v"].data_ptr() == cache.read(0)["v"].data_ptr() and not cache.owns(2)


@pytest.mark.parametrize("index", [[2, 0, 0], [1, 1, 1], [0, 2, 1], [2], [0, 0, 1, 1, 2, 2]])
def test_reorder_copies_rows_and_may_change_their_number(index: list[int]) -> None:
    cache = filled(3, 5)
    before = {name: s.clone() for name, s in cache.read(1).items()}
    for _ in range(2):  # the second round uses the buffers that the first left over
        cache.reorder(torch.tensor(index))
        assert cache.batch_size == len(index)
        cache.reorder(torch.tensor([0] * 3)) if len(index) < 3 else None
        cache.crop(5)
        if len(index) >= 3:
            break
    for name, stream in cache.read(1).items():
        assert torch.equal(stream, before[name][index if len(index) >= 3 else [index[0]] * 3])
    append(cache, 5)
    assert cache.positions.shape == (cache.batch_size, 6)


def test_the_identity_order_copies_nothing() -> None:
    cache = filled(3, 5)
    before = addresses(cache)
    cache.reorder(torch.arange(3))
    assert addresses(cache) == before


def test_reorder_touches_the_used_length_only_and_keeps_one_spare_of_each_shape() -> None:
    cache = filled(3, 5, capacity=1000)
    allocated = cache.allocated_nbytes
    for _ in range(4):
        cache.reorder(torch.tensor([1, 0, 2]))
    spare = 3 * 1000 * (2 * 3 + 5) * 4
    assert cache.allocated_nbytes == allocated + spare


def test_rows_do_not_leak_into_each_other_after_reordering() -> None:
    cache = filled(2, 3)
    cache.reorder(torch.tensor([1, 1]))
    append(cache, 3)
    v = cache.read(0)["v"]
    assert torch.equal(v[0, :, :3], v[1, :, :3]) and not torch.equal(v[0, :, 3], v[1, :, 3])


def test_crop_forgets_the_end_and_keeps_the_rest_bit_by_bit() -> None:
    cache = filled(2, 6)
    kept = cache.read(0)["v"][:, :, :4].clone()
    cache.crop(4)
    assert cache.length == 4 and torch.equal(cache.read(0)["v"], kept)
    assert cache.next_positions(1).tolist() == [[4], [4]]
    with pytest.raises(UserError, match=r"length=5: allowed 0 to 4"):
        cache.crop(5)


def test_forks_go_separate_ways() -> None:
    cache = filled(2, 4)
    fork = cache.fork()
    append(cache, 50)
    append(fork, 60)
    append(fork, 61)
    assert (cache.length, fork.length) == (5, 6)
    assert torch.equal(cache.read(0)["v"][:, :, :4], fork.read(0)["v"][:, :, :4])
    assert not torch.equal(cache.read(0)["v"][:, :, 4], fork.read(0)["v"][:, :, 4])


def test_positions_continue_each_row_and_padding_stays_padding() -> None:
    cache = StreamCache([STREAMS], 3)
    assert cache.next_positions(2).tolist() == [[0, 1]] * 3
    cache.advance(torch.tensor([[-1, -1, 0], [-1, 0, 1], [-1, -1, -1]]))
    assert cache.next_positions(2).tolist() == [[1, 2], [2, 3], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_entries_have_the_dtype_asked_for(dtype: torch.dtype) -> None:
    cache = StreamCache([STREAMS], 1, dtype=dtype)
    cache.advance(cache.next_positions(1))
    cache.write(0, {s.name: torch.ones(1, s.heads, 1, s.width) for s in STREAMS})
    assert {s.dtype for s in cache.read(0).values()} == {dtype}
    assert cache.nbytes == 11 * dtype.itemsize


def test_entries_keep_no_graph() -> None:
    cache = StreamCache([STREAMS], 1)
    cache.advance(cache.next_positions(1))
    cache.write(0, {s.name: torch.ones(1, s.heads, 1, s.width, requires_grad=True) for s in STREAMS})
    assert not any(s.requires_grad for s in cache.read(0).values())


@pytest.mark.parametrize(
    ("layers", "rows", "words"),
    [([STREAMS], 0, "batch_size=0"), ([1, STREAMS], 1, "layer 0 shares"), ([STREAMS, 0, 1], 1, "layer 2 shares")],
)
def test_impossible_caches_are_refused(layers: list[object], rows: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        StreamCache(layers, rows)  # type: ignore[arg-type]


def test_a_cache_filled_in_inference_mode_goes_on_outside() -> None:
    attention = Attention(AttentionSpec(variant="qv-ka", d_model=16, n_heads=2))
    x = torch.randn(2, 9, 16)
    with torch.inference_mode():
        cache = attention.new_cache(2, capacity=2)
        attention(x[:, :5], cache=cache)
        cache.reorder(torch.tensor([1, 0]))
        twin = cache.fork()
    for one in (cache, twin):
        one.crop(4)
        y = attention(x[:, 4:].flip(0), cache=one)
        torch.testing.assert_close(y, attention(x)[:, 4:].flip(0), atol=1e-5, rtol=1e-5)
        y.sum().backward()
