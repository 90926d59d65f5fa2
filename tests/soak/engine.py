"""Thousands of decoding requests of mixed kinds on small models: is memory flat, are results those of solo runs?

A request is drawn from a seed: prompts or sources of random lengths, then one of the ways to decode. Every so often a
request's rows are decoded again one by one, alone, without padding, and must come out equal.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qvattn.decode import beam_search, greedy, greedy_many
from qvattn.decode.sample import sample
from qvattn.decode.session import LeanModel, padded
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel, initialise

VOCABULARY = 60


@dataclass
class Report:
    """requests by kind; compared: rows equal to their solo runs.  resident: (requests done, bytes) samples."""

    requests: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    tokens: int = 0
    seconds: float = 0.0
    resident: list[tuple[int, int]] = field(default_factory=list)

    def slope(self) -> float:
        """Bytes that a request adds to the resident memory, least squares over the second half of the samples."""
        later = self.resident[len(self.resident) // 2 :]
        x = torch.tensor([a for a, _ in later], dtype=torch.float64)
        y = torch.tensor([b for _, b in later], dtype=torch.float64)
        x, y = x - x.mean(), y - y.mean()
        return float((x * y).sum() / (x * x).sum())


def models() -> tuple[list[CausalLM], list[TranslationModel]]:
    """Small models of several variants and positions, with weights large enough that tokens differ."""
    common = {"d_model": 32, "n_heads": 4, "d_ff": 48, "dropout": 0.0}
    places = [
        ("rope", "mha"),
        ("agf+pcm-v", "qv"),
        ("alibi", "qv-ka"),
        ("none", "mla"),
        ("rope", "slim"),
        ("rope", "gta"),
    ]
    language = [
        CausalLM(CausalLMConfig(vocab_size=VOCABULARY, layers=2, attention=variant, position=position, **common))
        for position, variant in places
    ]
    translation = [
        TranslationModel(
            TranslationConfig(
                source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY, encoder_layers=1, decoder_layers=2,
                attention=variant, position=position, **common,
            )
        )
        for position, variant in (("sinusoidal", "mha"), ("agf+pcm-v", "qv-ka"))
    ]  # fmt: skip
    for seed, model in enumerate([*language, *translation]):
        initialise(model, seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
        model.eval()
    return language, translation


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


class Engine:
    """Serves requests; `serve(number)` is a function of the number alone."""

    def __init__(self) -> None:
        language, translation = models()
        self.language, self.translation = [LeanModel(m) for m in language], [LeanModel(m) for m in translation]
        self.report = Report()
        self.kinds: dict[str, Callable[[random.Random, bool], None]] = {
            "greedy": self._greedy,
            "beams": self._beams,
            "sampling": self._sampling,
            "rows that take the next source": self._many,
            "beams over sources": self._translate,
            "crops": self._crops,
            "forks": self._forks,
        }

    @torch.inference_mode()
    def serve(self, number: int, *, compare: bool) -> None:
        draw = random.Random(number)
        kind = draw.choice(list(self.kinds))
        self.kinds[kind](draw, compare)
        self.report.requests[kind] += 1

    # -- the ways to decode --------------------------------------------------------------------------------------

    def _greedy(self, draw: random.Random, compare: bool) -> None:
        model, rows, count = draw.choice(self.language), self._rows(draw, 4), draw.randint(1, 16)
        ids, mask = left(rows)
        made = greedy(model, ids, mask, max_new_tokens=count)[:, ids.shape[1] :]
        self.report.tokens += made.numel()
        if compare:
            for row, new in zip(rows, made, strict=True):
                solo = greedy(model, torch.tensor([row]), max_new_tokens=count)[0, len(row) :]
                self._same(until_end(new, model), until_end(solo, model))

    def _beams(self, draw: random.Random, compare: bool) -> None:
        model, rows, beam, count = (
            draw.choice(self.language),
            self._rows(draw, 3),
            draw.randint(2, 4),
            draw.randint(1, 10),
        )
        ids, mask = left(rows)
        made = beam_search(model, ids, mask, beam=beam, max_new_tokens=count)
        self.report.tokens += made.sequences[:, :, ids.shape[1] :].numel()
        if compare:
            for row, found, scores in zip(rows, made.sequences, made.scores, strict=True):
                solo = beam_search(model, torch.tensor([row]), beam=beam, max_new_tokens=count)
                assert torch.allclose(scores, solo.scores[0], atol=1e-4), (scores, solo.scores)
                self._same(
                    until_end(found[0, ids.shape[1] :], model), until_end(solo.sequences[0, 0, len(row) :], model)
                )

    def _sampling(self, draw: random.Random, compare: bool) -> None:
        model, rows = draw.choice(self.language), self._rows(draw, 4)
        ids, mask = left(rows)
        made = sample(model, ids, mask, max_new_tokens=draw.randint(1, 10), top_k=8, seed=draw.randrange(99))
        self.report.tokens += made[:, ids.shape[1] :].numel()

    def _many(self, draw: random.Random, compare: bool) -> None:
        model, sources = draw.choice(self.translation), self._rows(draw, 8)
        limits = [draw.randint(1, 12) for _ in sources]
        made = greedy_many(model, sources, rows=draw.randint(1, 5), limits=limits)
        self.report.tokens += sum(map(len, made))
        if compare:
            for source, limit, new in zip(sources, limits, made, strict=True):
                solo = greedy(model, torch.tensor([source]), max_new_tokens=limit)[0, 1:]
                self._same(new, until_end(solo, model))

    def _translate(self, draw: random.Random, compare: bool) -> None:
        model, sources, beam, count = (
            draw.choice(self.translation),
            self._rows(draw, 3),
            draw.randint(2, 4),
            draw.randint(1, 10),
        )
        made = beam_search(model, *padded(sources, 0), beam=beam, max_new_tokens=count)
        self.report.tokens += made.sequences.numel()
        if compare:
            for source, found in zip(sources, made.sequences, strict=True):
                solo = beam_search(model, torch.tensor([source]), beam=beam, max_new_tokens=count)
                self._same(until_end(found[0, 1:], model), until_end(solo.sequences[0, 0, 1:], model))

    def _crops(self, draw: random.Random, compare: bool) -> None:
        """Guesses that are taken back: after every crop the cache goes on as if they had never been."""
        model, row = draw.choice(self.language), self._rows(draw, 1)[0]
        session = model.open(torch.tensor([row]))
        logits, taken = session.begin(), list(row)
        for _ in range(draw.randint(1, 6)):
            length, last = session.cache.length, session.last
            for _ in range(draw.randint(1, 5)):
                session.step(torch.tensor([draw.randrange(4, VOCABULARY)]))
            session.cache.crop(length)
            session.last = last
            token = int(logits.argmax())
            taken.append(token)
            logits = session.step(torch.tensor([token]))
        self.report.tokens += len(taken) - len(row)
        if compare:
            self._close(logits, whole(model, taken))

    def _forks(self, draw: random.Random, compare: bool) -> None:
        """Two continuations of one prefix, side by side; one of them in other rows."""
        model, row = draw.choice(self.language), self._rows(draw, 1)[0]
        session = model.open(torch.tensor([row]))
        session.begin()
        here, last = session.cache, session.last
        branches = []
        for _ in range(draw.randint(2, 4)):
            session.cache, session.last = here.fork(), last
            tokens = [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, 8))]
            for token in tokens:
                logits = session.step(torch.tensor([token]))
            branches.append((tokens, logits))
            self.report.tokens += len(tokens)
        if compare:
            for tokens, logits in branches:
                self._close(logits, whole(model, [*row, *tokens]))

    # -- comparing -----------------------------------------------------------------------------------------------

    def _rows(self, draw: random.Random, most: int) -> list[list[int]]:
        return [
            [draw.randrange(4, VOCABULARY) for _ in range(draw.choice([1, 2, 5, 17, 33]))]
            for _ in range(draw.randint(1, most))
        ]

    def _same(self, one: list[int], other: list[int]) -> None:
        assert one == other, (one, other)
        self.report.compared += 1

    def _close(self, one: Tensor, other: Tensor) -> None:
        assert torch.allclose(one, other, atol=1e-3), (one - other).abs().max()
        self.report.compared += 1


def left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, and their mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


def until_end(row: Tensor, model: LeanModel) -> list[int]:
    ids = row.tolist()
    ends = [i for i, token in enumerate(ids) if token in model.eos]
    return ids[: ends[0] + 1] if ends else ids


def whole(model: LeanModel, ids: list[int]) -> Tensor:
    """Logits after `ids` of one forward pass of the model itself, without a cache."""
    logits: Tensor = model.model(torch.tensor([ids])).logits[:, -1]
    return logits


def soak(
    requests: int,
    *,
    compare_every: int = 10,
    sample_every: int = 50,
    most_seconds: float = math.inf,
    say: Callable[[str], None] = print,
) -> Report:
    """Serve `requests` requests, or as many as `most_seconds` allow; every so many are compared with solo runs."""
    engine, begun = Engine(), time.perf_counter()
    for number in range(requests):
        engine.serve(number, compare=number % compare_every == 0)
        if number % sample_every == sample_every - 1:
            gc.collect()
            engine.report.resident.append((number + 1, resident()))
        if number % 500 == 499:
            say(f"{number + 1} requests, {resident() / 2**20:.1f} MiB resident")
        if time.perf_counter() - begun > most_seconds:
            break
    engine.report.seconds = time.perf_counter() - begun
    return engine.report
