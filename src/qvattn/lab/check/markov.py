"""Decoding is not a Markov chain of the last token: the far past acts on the next token through the cache alone.

And no state of fixed size stands in for the cache: the best linear summary of as many numbers as the model is wide
loses part of what the cache says. Between a token and a later one lies one read of the cache, whatever the distance.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...streams import StreamCache
from .result import CheckResult, Details, Measure, Number, Step, above, at_most, exactly, information, result, shape
from .subject import Reader, Subject

NAME = "not-markov"
Summary = tuple[str, int, int, float, float]
"""Rank, numbers kept and cached per layer, change of the logits, KL divergence: a row of the table."""
ALL = "all"
SENTENCES = 8
RESTORED = 1e-3
"""Largest relative change of the logits that a summary of full rank may leave (rounding of the SVD in float32)."""


@torch.no_grad()
def check(subject: Subject) -> CheckResult:
    """Change the oldest token, compare the logits of the newest; then cut the cache; then summarise it."""
    readers = [r for r in subject.longest(SENTENCES) if subject.oldest_visible(r.length - 1) < r.length - 1]
    changes: list[float] = []
    direct: list[float] = []
    last_only = 0
    for reader in readers:
        full, direct_change, cut = _swap_first(subject, reader)
        changes.append(full)
        direct.append(direct_change)
        last_only += cut
    ranks = summaries(subject, readers) if readers else []
    nll_full, nll_last = _cost_of_forgetting(readers)
    measures: list[Measure] = [
        above("change of logits at t by token 1, least of all sentences", min(changes, default=float("nan")), 0.0),
        above("the same with the cached entry of token 1 alone swapped", min(direct, default=float("nan")), 0.0),
        exactly("logits changed when only the last token is seen", last_only, 0),
        information("nats per token, whole cache", nll_full),
        information("nats per token, last token only", nll_last),
    ]
    return result(
        NAME,
        "The next token depends on the far past through the cache; neither the last token nor d numbers stand in.",
        [*measures, *_summary_measures(subject, ranks)],
        steps=_steps(subject, readers),
        details=Details(
            title="best linear summary of each layer's cache, by rank",
            columns=("rank", "numbers kept", "numbers cached", "change of logits, median", "KL in nats, median"),
            rows=tuple(ranks),
        ),
        notes=(
            "Shown: reading a summary of this size in place of the cache changes what this trained model says. The SVD "
            "is the best linear summary of the entries, and it sees all tokens at once, which a running state cannot.",
            "Not shown: that no network trained with a fixed state could do as well on this text, or that a nonlinear "
            "code could not be smaller. For that one compares trained models.",
        ),
    )


def _swap_first(subject: Subject, reader: Reader) -> tuple[float, float, int]:
    """Change of the last logits by the oldest visible token: through the cache, through its own entry; and without."""
    last = reader.length - 1
    token = subject.oldest_visible(last)
    other_ids = reader.ids[:, :last].clone()
    other_ids[0, token] = subject.other_token(reader, token)
    newest = reader.ids[:, last:]
    one, two = reader.fill(reader.ids[:, :last]), reader.fill(other_ids)
    expected = reader.step(newest, one.fork())
    full = float((reader.step(newest, two.fork()) - expected).abs().max())

    patched = one.fork()
    for layer in subject.owners:
        for name, entries in patched.read(layer).items():
            entries[:, :, token] = two.read(layer)[name][:, :, token]
    direct = float((reader.step(newest, patched) - expected).abs().max())

    cut = [cache.fork() for cache in (one, two)]
    position = one.next_positions(1)
    for cache in cut:
        cache.crop(0)
    alone = [reader.step(newest, cache, positions=position) for cache in cut]
    return full, direct, int((alone[0] != alone[1]).sum())


def _cost_of_forgetting(readers: list[Reader]) -> tuple[float, float]:
    """Mean negative log-likelihood of the real next token: with the whole past, and with the last token only."""
    totals, tokens = [0.0, 0.0], 0
    for reader in readers:
        ids, targets = reader.ids[:, :-1], reader.ids[0, 1:]
        positions = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)[:, None]
        alone = reader.logits(reader.hidden(ids.mT, positions))[:, 0]
        for i, logits in enumerate((reader.full(ids)[0], alone)):
            totals[i] += float(F.cross_entropy(logits, targets, reduction="sum"))
        tokens += len(targets)
    return totals[0] / max(tokens, 1), totals[1] / max(tokens, 1)


def summaries(subject: Subject, readers: list[Reader]) -> list[Summary]:
    """For each rank: numbers kept and cached per layer, and the median effect on the last logits."""
    width, length = widest(subject), min(reader.length for reader in readers) - 1
    wanted = {2**i for i in range(12)} | {state_rank(subject)}
    ranks = [*sorted(rank for rank in wanted if rank < min(length, width)), max(r.length for r in readers)]
    rows = []
    for rank in ranks:
        effects = [_summarised(subject, reader, rank) for reader in readers]
        change, divergence = (float(torch.tensor(x).median()) for x in zip(*effects, strict=True))
        shown = min(rank, length)
        name = str(rank) if rank < length else ALL
        rows.append((name, shown * width, length * width, change, max(divergence, 0.0)))
    return rows


def state_rank(subject: Subject) -> int:
    """Tokens' worth of entries that d_model numbers hold, at least one."""
    return max(1, subject.model.attention_spec.d_model // widest(subject))


def widest(subject: Subject) -> int:
    """Elements that the widest layer caches of a token; where layers are alike, that any layer does."""
    return max(attention.spec.cache_elements_per_token for attention in subject.attentions)


def _summarised(subject: Subject, reader: Reader, rank: int) -> tuple[float, float]:
    """Relative change and KL divergence of the last logits, with every layer's cache at `rank`."""
    past = reader.fill(reader.ids[:, :-1])
    expected = reader.step(reader.ids[:, -1:], past.fork())
    summarise(subject, past, rank)
    given = reader.step(reader.ids[:, -1:], past)
    change = float((given - expected).abs().max() / expected.abs().max())
    divergence = F.kl_div(given.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="sum")
    return change, float(divergence)


def summarise(subject: Subject, cache: StreamCache, rank: int) -> None:
    """Replace each layer's entries by their best approximation of that rank over tokens; NaN stays NaN."""
    for layer in subject.owners:
        streams = cache.read(layer)
        table = tokens_by_elements(streams)
        if not table.isfinite().all():
            continue
        u, s, v = torch.linalg.svd(table, full_matrices=False)
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        for stream, part in zip(
            streams.values(), best.split([s.shape[1] * s.shape[3] for s in streams.values()], dim=1), strict=True
        ):
            stream[0] = part.unflatten(1, (stream.shape[1], stream.shape[3])).transpose(0, 1)


def tokens_by_elements(streams: Mapping[str, Tensor]) -> Tensor:
    """(T, C): what is cached of each token in one layer, side by side."""
    return torch.cat([stream[0].transpose(0, 1).flatten(1) for stream in streams.values()], dim=1)


def _summary_measures(subject: Subject, ranks: list[Summary]) -> list[Measure]:
    if len(ranks) < 2:
        return []
    rank = state_rank(subject)
    restored = ranks[-1][3]
    measures = [at_most("change of logits by a summary of full rank, median", restored, RESTORED)]
    found = [row for row in ranks[:-1] if row[0] == str(rank)]
    if found:
        width = subject.model.attention_spec.d_model
        name = f"change of logits by a summary of {found[0][1]} numbers (model width {width}), median"
        measures.append(above(name, found[0][3], max(10 * restored, RESTORED)))
    longest = max(reader.length for reader in subject.readers)
    path: Number = longest - 1
    measures.append(information("reads between token 1 and t: the cache", 1))
    measures.append(information(f"the same for a recurrent state, t = {longest}", path))
    return measures


def _steps(subject: Subject, readers: list[Reader]) -> tuple[Step, ...]:
    if not readers:
        return ()
    reader = readers[0]
    spec = subject.model.attention_spec
    n = reader.length - 1
    streams = ", ".join(f"{s.name} (1, {s.heads}, {n}, {s.width})" for s in spec.streams)
    return (
        Step(
            what="two histories that differ in the oldest token",
            shapes=f"ids {shape(reader.ids[:, :-1])}, each layer {streams}",
            why="the step that follows gets the same new token; only the cache differs",
        ),
        Step(
            what="swap the cached entry of that token alone",
            shapes="one of " + str(n) + " tokens in every layer",
            why="the new query reads it directly: path length 1; a recurrent state would have carried it t-1 steps",
        ),
        Step(
            what="crop the cache to nothing, same position",
            shapes="streams (1, G, 1, W)",
            why="a model of the last token only: both histories look the same to it",
        ),
        Step(
            what="summary of the cache by SVD over tokens",
            shapes=f"({n}, {widest(subject)}) -> rank {state_rank(subject)}",
            why=f"d = {spec.d_model} numbers hold {state_rank(subject)} tokens' worth of entries, at least one",
        ),
    )
