"""Training speed of our translation model beside Hugging Face's MarianMTModel, alternating in one process.

Same widths, layers, vocabulary, dropout, label smoothing and batches; whole optimisation steps (forward, backward,
clipping, Adam). Batches are random ids with the lengths of a corpus: real ones if QVATTN_DATA is set, else drawn.
Prints medians of target tokens/s and ratios to Marian and to our own QKV at the same position scheme.

    python benchmarks/train_speed.py [--json] [--d-model 128 --heads 8 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from qvattn.models import TranslationConfig, TranslationModel, initialise

Batch = dict[str, Tensor]
OURS = {
    "qkv sinusoidal": ({"variant": "mha"}, "sinusoidal"),
    "qv sinusoidal": ({"variant": "qv"}, "sinusoidal"),
    "qv-ka 2x sinusoidal": ({"variant": "qv-ka"}, "sinusoidal"),
    "qkv agf+pcm-v": ({"variant": "mha"}, "agf+pcm-v"),
    "qv agf+pcm-v": ({"variant": "qv"}, "agf+pcm-v"),
    "qv-ka 1x agf+pcm-v": ({"variant": "qv-ka", "d_ctx": "1x"}, "agf+pcm-v"),
    "qv-ka 2x agf+pcm-v": ({"variant": "qv-ka"}, "agf+pcm-v"),
}


def lengths(count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, 2) source and target lengths in tokens."""
    folder = os.environ.get("QVATTN_DATA")
    if folder:
        from qvattn.data.lines import read_lines

        sides = [read_lines(Path(folder) / "multi30k" / f"train.{side}.gz") for side in ("en", "de")]
        words = np.array([[len(s.split()) + 4 for s in pair] for pair in zip(*sides, strict=True)])
        return words[rng.choice(len(words), count, replace=False)]
    return np.clip(rng.normal(16, 5, (count, 2)).astype(int), 4, 40)


def batches(args: argparse.Namespace) -> list[Batch]:
    rng = np.random.default_rng(0)
    pairs = lengths(args.tokens * args.batches // 14, rng)
    pairs = pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]
    made: list[Batch] = []
    start = 0
    while start < len(pairs) - 1:
        stop = start + 1
        while stop < len(pairs) and pairs[start : stop + 1].max(0).max() * (stop + 1 - start) <= args.tokens:
            stop += 1
        rows = pairs[start:stop]
        S, T = rows.max(0)
        source = torch.from_numpy(rng.integers(4, args.vocab, (len(rows), S)))
        target = torch.from_numpy(rng.integers(4, args.vocab, (len(rows), T)))
        mask = torch.arange(S)[None] < torch.from_numpy(rows[:, :1].copy())
        real = torch.arange(T)[None] < torch.from_numpy(rows[:, 1:].copy())
        made.append(
            {
                "input_ids": source.masked_fill(~mask, 0),
                "attention_mask": mask.long(),
                "decoder_input_ids": target.masked_fill(~real, 0),
                "labels": target.masked_fill(~real, -100),
            }
        )
        start = stop
    rng.shuffle(made)
    return made[: args.batches]


def marian(args: argparse.Namespace) -> nn.Module:
    config = MarianConfig(
        vocab_size=args.vocab,
        d_model=args.d_model,
        encoder_layers=args.layers,
        decoder_layers=args.layers,
        encoder_attention_heads=args.heads,
        decoder_attention_heads=args.heads,
        encoder_ffn_dim=args.d_ff,
        decoder_ffn_dim=args.d_ff,
        activation_function="relu",
        dropout=args.dropout,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        decoder_start_token_id=1,
        scale_embedding=True,
    )
    return MarianMTModel(config)


def ours(args: argparse.Namespace, attention: dict[str, object], position: str) -> nn.Module:
    attention = dict(attention)
    if attention.get("d_ctx") == "1x":
        attention["d_ctx"] = args.d_model // args.heads
    config = TranslationConfig(
        source_vocab_size=args.vocab,
        target_vocab_size=args.vocab,
        d_model=args.d_model,
        d_ff=args.d_ff,
        n_heads=args.heads,
        encoder_layers=args.layers,
        decoder_layers=args.layers,
        norm="post",  # as Marian has it
        activation="relu",
        dropout=args.dropout,
        attention=attention,
        position=position,
        bias=True,
    )
    model = TranslationModel(config)
    initialise(model, 1)
    return model


def marian_loss(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)


def our_loss(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
    loss: Tensor = model(**batch, label_smoothing=smoothing).loss
    return loss


def stepper(model: nn.Module, loss: Callable[[nn.Module, Batch, float], Tensor]) -> Callable[[Batch], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9, fused=True)
    model.train()

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model, batch, 0.1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("d-model", 128), ("heads", 8), ("d-ff", 512), ("layers", 2), ("vocab", 3000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=2000, help="padded tokens a batch, on the longer side")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="times every model sees every batch")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", help="comma-separated names, beside marian")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    data = batches(args)
    names = args.only.split(",") if args.only else list(OURS)
    steps = {"marian": stepper(marian(args), marian_loss)}
    steps |= {name: stepper(ours(args, *OURS[name]), our_loss) for name in names}
    for step in steps.values():
        step(data[0])
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for batch in data:
            tokens = int((batch["labels"] >= 0).sum())
            for name, step in steps.items():
                start = time.perf_counter()
                step(batch)
                rates[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(r) for name, r in rates.items()}
    rows = [
        {
            "model": name,
            "tokens_per_second": round(m),
            "ratio_to_marian": round(
                statistics.median(a / b for a, b in zip(rates[name], rates["marian"], strict=True)), 3
            ),
        }
        for name, m in medians.items()
    ]
    if args.json:
        json.dump({"settings": vars(args), "torch": torch.__version__, "rows": rows}, sys.stdout, indent=1)
        return
    for row in rows:
        speed = f"{row['tokens_per_second']:>8,} target tokens/s"
        print(f"{row['model']:24s} {speed}   {row['ratio_to_marian']:.2f} x Marian")


if __name__ == "__main__":
    main()
