"""Decode time of a model of transformers as shipped against the same model with its lean cache.

    python benchmarks/lean_decode.py                                  # DeepSeek-V3, 16 heads, 4,096 tokens
    python benchmarks/lean_decode.py --family llama --context 2048

Small random weights; both models are decoded in turn in one process, so that a busy machine burdens both alike.
Prints one JSON object to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from qvattn.hf import lean
from qvattn.hf.exact.layers import cache_nbytes

WIDTHS = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 1000}
LATENT = WIDTHS | {
    "num_key_value_heads": 16,
    "intermediate_size": 1024,
    "kv_lora_rank": 256,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "llama": WIDTHS | {"num_key_value_heads": 16, "intermediate_size": 1024},
    "gpt_neox": WIDTHS | {"intermediate_size": 1024},
    "marian": {
        "d_model": 512,
        "encoder_layers": 1,
        "decoder_layers": 4,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 1024,
        "decoder_ffn_dim": 1024,
        "vocab_size": 1000,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    "gpt2": {"n_embd": 512, "n_layer": 4, "n_head": 16, "vocab_size": 1000, "n_positions": 8192},
}


def filled(model: Any, batch: int, context: int) -> dict[str, Any]:
    """What every step is given: a cache of `context` tokens, or encoded sources of that length."""
    generator = torch.Generator().manual_seed(0)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        return {"cache": cache, "encoder_outputs": (torch.randn(batch, context, 512, generator=generator),)}
    cache = DynamicCache(config=model.config)
    for chunk in torch.randint(3, 1000, (batch, context), generator=generator).split(512, dim=1):
        model(input_ids=chunk, cache=cache, use_cache=True)
    return {"cache": cache}


def step_seconds(model: Any, given: dict[str, Any], batch: int) -> tuple[float, torch.Tensor]:
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    token = torch.full((batch, 1), 7)
    start = time.perf_counter()
    logits = model(**{name: token}, **given, use_cache=True).logits
    return time.perf_counter() - start, logits


@torch.inference_mode()
def measure(family: str, context: int, batch: int, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **FAMILIES[family], max_position_embeddings=8192)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    plain = auto.from_config(config, attn_implementation="sdpa").eval()
    other = copy.deepcopy(plain)
    report = lean(other, tolerance=0.1)  # random W_K of this width: condition numbers of 1e3 to 1e5
    print(report, file=sys.stderr)
    given = [filled(model, batch, context) for model in (plain, other)]
    times: tuple[list[float], list[float]] = ([], [])
    worst = 0.0
    for i in range(steps + 2):
        pair = [step_seconds(m, c, batch) for m, c in zip((plain, other), given, strict=True)]
        worst = max(worst, float((pair[0][1] - pair[1][1]).abs().max()))
        if i >= 2:
            for kept, (seconds, _) in zip(times, pair, strict=True):
                kept.append(seconds)
    before, after = (statistics.median(t) for t in times)
    return {
        "family": family,
        "context": context,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "shipped_ms": round(1e3 * before, 2),
        "lean_ms": round(1e3 * after, 2),
        "speedup": round(before / after, 2),
        "speedup_of_the_fastest_steps": round(min(times[0]) / min(times[1]), 2),
        "shipped_cache_bytes": cache_nbytes(given[0]["cache"]),
        "lean_cache_bytes": cache_nbytes(given[1]["cache"]),
        "largest_logit_difference": worst,
        "logit_spread": float(pair[0][1].std()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="deepseek_v3")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(json.dumps(measure(args.family, args.context, args.batch, args.steps, args.seed), indent=1))


if __name__ == "__main__":
    main()
