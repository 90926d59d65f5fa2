"""Decoding speed beside Hugging Face (and CTranslate2), on the same weights, alternating in one process.

    python benchmarks/generate_speed.py translate    greedy translation of the Multi30k test set, batches of 32
    python benchmarks/generate_speed.py context      one token a step after a context of 2048, batch 8, 8 layers
    add --short for seconds instead of minutes, --json for JSON on stdout

translate: `qvattn.decode.greedy_many` (32 rows; a row that ends takes the next sentence) and `greedy` (a batch after
the other) against `MarianMTModel.generate`. Marian gets our model's weights (post-norm, ReLU,
biases, our sinusoids), so both make the very same tokens; this is checked. Weights are random unless --run names a
run of that architecture. With random weights nothing ends by itself, so every sentence ends at the length of its
reference (tokens of the German side): ours by `limits`, Marian's by a stopping criterion. `--lengths fixed` makes all
rows of a batch equally long instead, so that nobody gains by dropping rows that have ended; CTranslate2, which knows
no limits per row, is compared in that mode (or on a trained run). Sentences are sorted by source length for everybody
(`--order corpus`: as they come). Data: QVATTN_DATA/multi30k if set, otherwise lengths like its.

context: our language model against `LlamaForCausalLM` with `DynamicCache` and the same weights (checked), as bare
forward passes with argmax. Other variants stand beside it: their time, cache and the peak memory of a process of
their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MarianConfig, MarianMTModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from qvattn.decode import LeanModel, greedy, greedy_many
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel, initialise

Batch = tuple[Tensor, Tensor, Tensor]
"""Source ids and mask (B, S), and the number of tokens (B,) to make."""
Engine = Callable[[list[Batch]], list[list[int]]]
"""Translates the rows of some batches."""
PAD, BOS, EOS = 0, 1, 2


def each(run: Callable[[Batch], list[list[int]]]) -> Engine:
    """The engine that takes one batch after the other."""
    return lambda group: [row for batch in group for row in run(batch)]


# ---- translation ---------------------------------------------------------------------------------------------------


def our_translation_model(args: argparse.Namespace) -> TranslationModel:
    if args.run:
        from qvattn.train.checkpoint import find_checkpoint

        model: TranslationModel = TranslationModel.from_pretrained(find_checkpoint(args.run))
        return model.eval()
    config = TranslationConfig(
        source_vocab_size=args.vocab,
        target_vocab_size=args.vocab,
        d_model=args.d_model,
        d_ff=args.d_ff or 4 * args.d_model,
        n_heads=args.heads,
        encoder_layers=args.layers,
        decoder_layers=args.layers,
        norm="post",
        activation="relu",
        bias=True,
        attention=args.variant,
        position=args.position,
    )
    model = TranslationModel(config)
    initialise(model, 1)
    return model.eval()


def marian_with_weights_of(model: TranslationModel) -> MarianMTModel:
    """A Marian model that computes what ours computes."""
    c = model.config
    if c.norm != "post" or c.decoder_spec.variant != "mha" or c.decoder_spec.position.kind != "sinusoidal":
        raise SystemExit("Marian is post-norm, mha, sinusoidal: give a run with model.norm=post and QKV sinusoidal")
    config = MarianConfig(
        vocab_size=c.target_vocab_size,
        d_model=c.d_model,
        encoder_layers=c.encoder_layers,
        decoder_layers=c.decoder_layers,
        encoder_attention_heads=c.n_heads,
        decoder_attention_heads=c.n_heads,
        encoder_ffn_dim=c.d_ff,
        decoder_ffn_dim=c.d_ff,
        activation_function=c.activation,
        max_position_embeddings=512,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=c.decoder_start_token_id,
        forced_eos_token_id=None,
        scale_embedding=True,
    )
    marian = MarianMTModel(config).eval()
    ours = model.state_dict()
    theirs: dict[str, Tensor] = {"model.shared.weight": ours["target_embedding.weight"]}
    for side, depth in (("encoder", c.encoder_layers), ("decoder", c.decoder_layers)):
        places = {"self_attn": "self_attn"} | ({"encoder_attn": "cross_attn"} if side == "decoder" else {})
        norms = {f"{theirs_}_layer_norm": f"{ours_.removesuffix('_attn')}_norm" for theirs_, ours_ in places.items()}
        norms["final_layer_norm"] = "ff_norm"
        for i in range(depth):
            maps = {"fc1": "ff.up_proj", "fc2": "ff.down_proj"} | norms
            for t, o in places.items():
                maps |= {f"{t}.{p}_proj": f"{o}.variant.{p}_proj" for p in "qkv"}
                maps[f"{t}.out_proj"] = f"{o}.variant.o_proj"
            for t, o in maps.items():
                for kind in ("weight", "bias"):
                    own = ours.get(f"{side}.layers.{i}.{o}.{kind}")
                    if own is not None:
                        theirs[f"model.{side}.layers.{i}.{t}.{kind}"] = own
        positions = torch.arange(512, dtype=torch.int32)[None]
        stack = model.encoder if side == "encoder" else model.decoder
        assert stack.position_embedding is not None
        theirs[f"model.{side}.embed_positions.weight"] = stack.position_embedding(positions)[0]
    with torch.no_grad():
        parameters = dict(marian.named_parameters())
        for name, value in parameters.items():
            if name in theirs:
                value.copy_(theirs.pop(name))
            elif name.endswith(".bias"):
                value.zero_()
    assert not theirs, sorted(theirs)
    marian.generation_config.suppress_tokens = [PAD]
    return marian


class Lengths(StoppingCriteria):
    """Ends row i after its own number of new tokens."""

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self.limits <= input_ids.shape[1] - 1


def translation_batches(args: argparse.Namespace, rows: int) -> list[Batch]:
    """Source ids and reference lengths of the test set (or like it), in batches."""
    rng = np.random.default_rng(0)
    sentences, lengths = _sentences(args, rng)
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i])) if args.order == "length" else None
    order = order or list(range(len(sentences)))
    made = []
    for start in range(0, len(order), rows):
        some = order[start : start + rows]
        longest = max(len(sentences[i]) for i in some)
        ids = torch.tensor([sentences[i] + [PAD] * (longest - len(sentences[i])) for i in some])
        limits = torch.tensor([lengths[i] for i in some])
        if args.lengths == "fixed":
            limits = torch.full_like(limits, round(float(limits.float().mean())))
        made.append((ids, (ids != PAD).long(), limits))
    return made


def _sentences(args: argparse.Namespace, rng: np.random.Generator) -> tuple[list[list[int]], list[int]]:
    count = 128 if args.short else 1000
    folder = os.environ.get("QVATTN_DATA")
    if not folder:
        pairs = np.clip(rng.normal((14, 15), (4.5, 5), (count, 2)).astype(int), 5, 45)
        return [[*rng.integers(4, args.vocab, n - 1).tolist(), EOS] for n in pairs[:, 0]], pairs[:, 1].tolist()
    from qvattn.data import DataSpec, Tokenizers, build_tokenizers
    from qvattn.data.lines import read_lines

    def pairs_of(split: str) -> list[tuple[str, str]]:
        sides = [read_lines(Path(folder) / "multi30k" / f"{split}.{side}.gz") for side in ("en", "de")]
        return list(zip(*sides, strict=True))

    toks = (
        Tokenizers.load(args.run) if args.run else build_tokenizers(pairs_of("train"), DataSpec(vocab_size=args.vocab))
    )
    test = pairs_of("test_2016_flickr")[:count]
    sources = toks.source([s for s, _ in test])["input_ids"]
    return [list(s) for s in sources], [len(t) for t in toks.target([t for _, t in test])["input_ids"]]


def translate(args: argparse.Namespace) -> dict[str, Any]:
    model = our_translation_model(args)
    batches = translation_batches(args, args.batch)
    trained = bool(args.run)
    most = 128
    engines: dict[str, Engine] = {}
    lean_model = LeanModel(model)

    def ours(batch: Batch) -> list[list[int]]:
        ids, mask, limits = batch
        if trained:
            return _rows(greedy(lean_model, ids, mask, max_new_tokens=most))
        return _rows(greedy(lean_model, ids, mask, max_new_tokens=int(limits.max()), limits=limits, eos_token_id=[]))

    def ours_many(group: list[Batch]) -> list[list[int]]:
        sources = [row[: int(n)] for ids, mask, _ in group for row, n in zip(ids.tolist(), mask.sum(1), strict=True)]
        if trained:
            made = greedy_many(lean_model, sources, rows=args.batch, max_new_tokens=most)
            return [[t for t in row if t != EOS] for row in made]
        limits = [n for _, _, bounds in group for n in bounds.tolist()]
        return greedy_many(lean_model, sources, rows=args.batch, limits=limits, eos_token_id=[])

    engines["ours"] = ours_many
    engines["ours, batch by batch"] = each(ours)
    if args.variant == "mha" and args.position == "sinusoidal":
        marian = marian_with_weights_of(model)
        if not trained:
            marian.generation_config.eos_token_id = None

        def theirs(batch: Batch) -> list[list[int]]:
            ids, mask, limits = batch
            if trained:
                out = marian.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, num_beams=1
                )
                return _rows(out)
            out = marian.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=int(limits.max()),
                do_sample=False,
                num_beams=1,
                stopping_criteria=StoppingCriteriaList([Lengths(limits)]),
            )
            return [row[:n] for row, n in zip(out[:, 1:].tolist(), limits.tolist(), strict=True)]

        engines["marian"] = each(theirs)
        if not args.no_hf_ours:
            engines["ours, generate()"] = each(_our_generate(model, trained, most))
        if trained or args.lengths == "fixed":
            engines |= _ctranslate2(marian, trained, most, args)
    return _race(engines, batches, args)


def _our_generate(model: TranslationModel, trained: bool, most: int) -> Callable[[Batch], list[list[int]]]:
    """Our model through the same `generate()`: what our cache alone brings."""
    from qvattn.models import TranslationModel as Model

    twin = Model(model.config).eval()
    twin.load_state_dict(model.state_dict())
    if not trained:
        twin.generation_config.eos_token_id = None

    def run(batch: Batch) -> list[list[int]]:
        ids, mask, limits = batch
        criteria = None if trained else StoppingCriteriaList([Lengths(limits)])
        longest = most if trained else int(limits.max())
        out = twin.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, stopping_criteria=criteria)
        return _rows(out) if trained else [r[:n] for r, n in zip(out[:, 1:].tolist(), limits.tolist(), strict=True)]

    return run


def _rows(out: Tensor) -> list[list[int]]:
    """New tokens of each row, without padding and end."""
    return [[t for t in row if t not in (PAD, EOS)] for row in out[:, 1:].tolist()]


def _ctranslate2(marian: MarianMTModel, trained: bool, most: int, args: argparse.Namespace) -> dict[str, Engine]:
    """CTranslate2 on the same weights, in float32 and int8, if it is installed."""
    try:
        import ctranslate2
        from ctranslate2.converters.transformers import BartLoader
    except ImportError:
        print("ctranslate2 is not installed: left out", file=sys.stderr)
        return {}
    marian.config.normalize_before = marian.config.normalize_embedding = False
    spec = BartLoader().get_model_spec(marian)
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{i}" for i in range(4, marian.config.vocab_size))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
    spec.config.decoder_start_token = words[marian.config.decoder_start_token_id]
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    folder = tempfile.mkdtemp(prefix="ctranslate2-")
    spec.save(folder)
    number = {word: i for i, word in enumerate(words)}

    def engine(kind: str) -> Callable[[Batch], list[list[int]]]:
        translator = ctranslate2.Translator(folder, compute_type=kind, intra_threads=args.threads, inter_threads=1)

        def run(batch: Batch) -> list[list[int]]:
            ids, mask, limits = batch
            sources = [[words[t] for t in row[: int(n)]] for row, n in zip(ids.tolist(), mask.sum(1), strict=True)]
            fixed = {} if trained else {"min_decoding_length": int(limits[0])}
            made = translator.translate_batch(
                sources,
                beam_size=1,
                max_batch_size=len(sources),
                max_decoding_length=most if trained else int(limits[0]),
                suppress_sequences=[["<pad>"]],
                **fixed,
            )
            return [[number[w] for w in result.hypotheses[0]] for result in made]

        return run

    return {f"ctranslate2 {kind}": each(engine(kind)) for kind in ("float32", "int8")}


def _race(engines: dict[str, Engine], batches: list[Batch], args: argparse.Namespace) -> dict[str, Any]:
    """Every engine in turn on every group of batches, `rounds` times; time of all, median over rounds."""
    groups = [batches[i : i + args.group] for i in range(0, len(batches), args.group)]
    for run in engines.values():
        run(groups[0][:1])
    rounds: dict[str, list[float]] = {name: [] for name in engines}
    same = dict.fromkeys(engines, 0)
    tokens = sentences = 0
    for _ in range(args.rounds):
        spent = dict.fromkeys(engines, 0.0)
        same, tokens, sentences = dict.fromkeys(engines, 0), 0, 0
        for group in groups:
            results = {}
            for name, run in engines.items():
                start = time.perf_counter()
                results[name] = run(group)
                spent[name] += time.perf_counter() - start
            tokens += sum(map(len, results["ours"]))
            sentences += len(results["ours"])
            for name, result in results.items():
                same[name] += sum(a == b for a, b in zip(result, results["ours"], strict=True))
        for name, seconds in spent.items():
            rounds[name].append(seconds)
    base = rounds.get("marian")
    rows = [
        {
            "engine": name,
            "seconds": round(statistics.median(times), 3),
            "tokens_per_second": round(tokens / statistics.median(times)),
            "times_marian": base and round(statistics.median(b / t for b, t in zip(base, times, strict=True)), 2),
            "equal_to_ours": f"{same[name]}/{sentences}",
        }
        for name, times in rounds.items()
    ]
    return {"rows": rows, "tokens": tokens, "sentences": sentences}


# ---- long contexts -------------------------------------------------------------------------------------------------

CONTEXT_VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {"variant": "mha"},
    "gqa 2 of 8": {"variant": "gqa", "k_heads": 2, "v_heads": 2},
    "qv": {"variant": "qv"},
    "qv-ka 2x": {"variant": "qv-ka"},
}


def our_language_model(args: argparse.Namespace, attention: dict[str, Any], position: str) -> CausalLM:
    config = CausalLMConfig(
        vocab_size=args.vocab,
        d_model=args.d_model,
        d_ff=args.d_ff or 3 * args.d_model,
        n_heads=args.heads,
        layers=args.layers,
        attention=attention,
        position=position,
        dropout=0.0,
    )
    model = CausalLM(config)
    initialise(model, 1)
    return model.eval()


def llama_with_weights_of(model: CausalLM) -> LlamaForCausalLM:
    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.layers,
        num_attention_heads=c.n_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
    )
    llama = LlamaForCausalLM(config).eval()
    ours = model.state_dict()
    maps = {f"self_attn.{p}_proj": f"self_attn.variant.{p}_proj" for p in "qkvo"}
    maps |= {f"mlp.{p}_proj": f"ff.{p}_proj" for p in ("up", "gate", "down")}
    maps |= {"input_layernorm": "self_norm", "post_attention_layernorm": "ff_norm"}
    theirs = {
        "model.embed_tokens.weight": ours["embedding.weight"] * c.d_model**0.5,
        "lm_head.weight": ours["embedding.weight"],
        "model.norm.weight": ours["decoder.last_norm.weight"],
    }
    for i in range(c.layers):
        for t, o in maps.items():
            theirs[f"model.layers.{i}.{t}.weight"] = ours[f"decoder.layers.{i}.{o}.weight"]
    llama.load_state_dict(theirs)
    return llama


class OurDecoding:
    """A session whose cache holds random streams of the context's length."""

    def __init__(self, model: CausalLM, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        with torch.inference_mode():
            self.session = LeanModel(model).open(torch.full((args.batch, 1), 5))
            self.session.begin()
            cache, count = self.session.cache, args.context - 1
            cache.reserve(args.context + args.steps + 1)
            cache.advance(torch.arange(1, count + 1, dtype=torch.int32).expand(args.batch, count))
            for layer, streams in enumerate(model.decoder_stack.cache_layers):
                if not isinstance(streams, int):
                    shape = (args.batch, count)
                    cache.write(
                        layer, {s.name: 0.3 * torch.randn(shape[0], s.heads, shape[1], s.width) for s in streams}
                    )
            self.session.last = args.context - 1

    def run(self, steps: int) -> list[list[int]]:
        tokens, made = torch.full((self.args.batch,), 7), []
        with torch.inference_mode():
            for _ in range(steps):
                tokens = self.session.step(tokens).argmax(-1)
                made.append(tokens.tolist())
        return made

    def rewind(self) -> None:
        self.session.cache.crop(self.args.context)
        self.session.last = self.args.context - 1

    @property
    def cache_bytes(self) -> int:
        return self.session.cache.nbytes


class LlamaDecoding:
    """Forward passes of Llama over a DynamicCache that holds what our cache holds."""

    def __init__(self, llama: LlamaForCausalLM, ours: OurDecoding) -> None:
        self.llama, self.ours, self.cache = llama, ours, DynamicCache()
        for layer in range(llama.config.num_hidden_layers):
            streams = ours.session.cache.read(layer)
            self.cache.update(streams["k"].clone(), streams["v"].clone(), layer)

    def run(self, steps: int) -> list[list[int]]:
        tokens, made = torch.full((self.ours.args.batch,), 7), []
        with torch.inference_mode():
            for _ in range(steps):
                out = self.llama(input_ids=tokens[:, None], cache=self.cache, use_cache=True)
                tokens = out.logits[:, -1].argmax(-1)
                made.append(tokens.tolist())
        return made

    def rewind(self) -> None:
        self.cache.crop(self.ours.args.context - self.cache.get_seq_length())

    @property
    def cache_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.cache.layers for t in (layer.keys, layer.values))


def context(args: argparse.Namespace) -> dict[str, Any]:
    if args.child:
        return _alone(args)
    rows = []
    for name in ("mha", "gqa 2 of 8", "qv", "qv-ka 2x"):
        if args.only and name not in args.only.split(","):
            continue
        rows.append(_one_context(name, args))
        gc.collect()
    for row in rows:
        row["peak_rss_mib"] = _peak_of(row["engine"], args)
    if not args.only or "mha" in args.only:
        rows.append({"engine": "llama", "peak_rss_mib": _peak_of("llama", args)} | rows[0].pop("llama"))
    return {"rows": rows}


def _one_context(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One variant's steps alternating with Llama's over the cache of equal weights (of mha)."""
    position = "rope" if name == "mha" else args.context_position
    ours = OurDecoding(our_language_model(args, CONTEXT_VARIANTS[name], position), args)
    base = ours if name == "mha" else OurDecoding(our_language_model(args, CONTEXT_VARIANTS["mha"], "rope"), args)
    llama = LlamaDecoding(llama_with_weights_of(base.model), base)
    if base is not ours:
        base.session.cache = None  # type: ignore[assignment]
    equal = None
    times: dict[str, list[float]] = {"ours": [], "llama": []}
    for warm in range(args.rounds + 1):
        made = {}
        for engine, runner in (("ours", ours), ("llama", llama)):
            start = time.perf_counter()
            made[engine] = runner.run(args.steps)
            if warm:
                times[engine].append((time.perf_counter() - start) / args.steps)
            runner.rewind()
        if name == "mha":
            equal = made["ours"] == made["llama"]
    step = statistics.median(times["ours"])
    row: dict[str, Any] = {
        "engine": name,
        "position": position,
        "milliseconds_per_step": round(1000 * step, 2),
        "tokens_per_second": round(args.batch / step, 1),
        "times_llama": round(statistics.median(b / t for t, b in zip(times["ours"], times["llama"], strict=True)), 2),
        "cache_mib": round(ours.cache_bytes / 2**20, 1),
    }
    if name == "mha":
        theirs = statistics.median(times["llama"])
        row["tokens_equal_to_llama"] = equal
        row["llama"] = {
            "position": "rope",
            "milliseconds_per_step": round(1000 * theirs, 2),
            "tokens_per_second": round(args.batch / theirs, 1),
            "times_llama": 1.0,
            "cache_mib": round(llama.cache_bytes / 2**20, 1),
        }
    return row


def _peak_of(name: str, args: argparse.Namespace) -> int | None:
    """Peak resident memory of a process that decodes with this one only."""
    command = [sys.executable, __file__, "context", "--child", name, "--json", "--steps", "4"]
    for option in ("d_model", "heads", "layers", "vocab", "batch", "context", "threads", "context_position"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-500:], file=sys.stderr)
        return None
    return int(json.loads(done.stdout)["context"]["peak_rss_mib"])


def _alone(args: argparse.Namespace) -> dict[str, Any]:
    if args.child == "llama":
        shape = (args.batch, args.heads, args.context, args.d_model // args.heads)
        llama = llama_with_weights_of(our_language_model(args, CONTEXT_VARIANTS["mha"], "rope"))
        cache = DynamicCache()
        for layer in range(args.layers):
            cache.update(0.3 * torch.randn(shape), 0.3 * torch.randn(shape), layer)
        with torch.inference_mode():
            for _ in range(args.steps):
                llama(input_ids=torch.full((args.batch, 1), 7), cache=cache, use_cache=True)
    else:
        position = "rope" if args.child == "mha" else args.context_position
        OurDecoding(our_language_model(args, CONTEXT_VARIANTS[args.child], position), args).run(args.steps)
    return {"peak_rss_mib": _peak_rss_mib()}


def _peak_rss_mib() -> int:
    """Peak resident memory of this process; `ru_maxrss` would begin with that of the parent at the fork."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


# ---- command line --------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "translate": {"d_model": 256, "layers": 3, "batch": 32, "rounds": 3},
    "context": {"d_model": 512, "layers": 8, "batch": 8, "rounds": 3, "steps": 16, "context": 2048},
}
SHORT: dict[str, dict[str, Any]] = {
    "translate": {"rounds": 1},
    "context": {"rounds": 1, "steps": 4, "context": 512},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("translate", "context"), help="default: both")
    parser.add_argument("--d-model", type=int)
    parser.add_argument("--d-ff", type=int, help="default: 4 x d_model (translate), 3 x d_model (context)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--group", type=int, default=32, help="translate: batches an engine does in its turn (32: all)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--variant", default="mha", help="translate: another variant of ours, without Marian")
    parser.add_argument("--position", default="sinusoidal")
    parser.add_argument("--context-position", default="agf+pcm-v", help="scheme of the variants beside mha")
    parser.add_argument("--lengths", choices=("reference", "fixed"), default="reference")
    parser.add_argument("--order", choices=("length", "corpus"), default="length")
    parser.add_argument("--run", help="translate: a run directory with post-norm QKV sinusoidal")
    parser.add_argument("--no-hf-ours", action="store_true", help="translate: leave our model's generate() out")
    parser.add_argument("--only", help="context: comma-separated names")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {"torch": torch.__version__, "threads": args.threads}
    for what in (args.what,) if args.what else ("translate", "context"):
        torch.manual_seed(0)
        chosen = argparse.Namespace(**vars(args))
        for name, value in (DEFAULTS[what] | (SHORT[what] if args.short else {})).items():
            if getattr(chosen, name) is None:
                setattr(chosen, name, value)
        results[what] = {"translate": translate, "context": context}[what](chosen)
        results[what]["settings"] = {
            k: v for k, v in vars(chosen).items() if k not in ("json", "child") and v is not None
        }
        if not args.json:
            print(f"{what}:")
            for row in results[what]["rows"]:
                print("  " + "  ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    if args.json:
        json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
