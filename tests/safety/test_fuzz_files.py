"""Invented files of every kind the package reads: a value, or UserError; no crash, no hang, no giant allocation."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import resource
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from faults.record import EXAMPLES, count
from qvattn.data import DataSpec, Tokenizers, build_tokenizers, load_corpus, load_text, load_tokenizer
from qvattn.errors import UserError
from qvattn.lab.check.loading import load
from qvattn.lab.experiment import load_experiments
from qvattn.lab.plan.source import shape_of
from qvattn.models import CausalLM, CausalLMConfig, TranslationModel
from qvattn.train.checkpoint import list_checkpoints
from qvattn.train.history import read_history
from qvattn.train.recipe import Recipe, dump_recipe, expand, load_recipe, read_recipe, shipped_recipes
from qvattn.train.run import run_training
from train.conftest import toy_text

from .strategies import changed, scrambled, seeds

fuzzed = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES < 100
)
MEGABYTES = 2**20


@contextlib.contextmanager
def modest(megabytes: int = 64) -> Iterator[None]:
    """Neither Python nor what lies below it takes more than so much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert peak < megabytes * MEGABYTES, f"{peak / MEGABYTES:.0f} MB of Python objects"
    assert grown < 4 * megabytes * 1024, f"{grown / 1024:.0f} MB more resident"


# -- recipes -----------------------------------------------------------------------------------------------------


def recipe_or_refusal(text: str, overrides: tuple[str, ...] = ()) -> Recipe | None:
    with modest():
        try:
            recipe = read_recipe(text, origin="recipe.yaml", overrides=overrides)
        except UserError as error:
            assert str(error)  # noqa: PT017
            assert len(str(error)) < 50_000  # noqa: PT017
            count("fuzzed: recipes", "refused")
            return None
        assert read_recipe(dump_recipe(recipe), origin="again") == recipe
        assert expand(recipe)
    count("fuzzed: recipes", "accepted")
    return recipe


SHIPPED = [yaml.safe_load(dump_recipe(load_recipe(name))) for name in shipped_recipes()]


@fuzzed
@given(seeds)
def test_changed_recipes(seed: int) -> None:
    draw = random.Random(seed)
    content = changed(draw.choice(SHIPPED), draw)
    recipe_or_refusal(yaml.dump(content, allow_unicode=True))


@fuzzed
@given(seeds)
def test_scrambled_recipes(seed: int) -> None:
    draw = random.Random(seed)
    content = scrambled(dump_recipe(load_recipe("demo")).encode(), draw)
    recipe_or_refusal(content.decode("utf-8", errors="replace"))


@fuzzed
@given(st.text())
@example("name: 2001-99-99")
@example("a: " + "9" * 6000)
@example("[" * 5000)
@example("{a: " * 3000)
@example("- " * 3000)
@example("? " * 3000)
@example("&a [*a]")
@example("a: &a {b: *a}")
@example("a: !!binary '*'")
@example("a: !!timestamp x")
@example("a: 1:1:1:1:1:1:1:1:1")
@example("\n".join(["a0: &a0 [x,x]", *(f"a{i + 1}: &a{i + 1} [*a{i},*a{i}]" for i in range(60))]))
@example("\n".join(["a0: &a0 {x: 1}", *(f"a{i + 1}: &a{i + 1} {{<<: [*a{i},*a{i}], y: *a{i}}}" for i in range(60))]))
@example("name: &a [" + "*a," * 10 + "]")
@example("x" * 400_000)
@example("- a\n" * 10_000)
def test_any_text_as_a_recipe(text: str) -> None:
    recipe_or_refusal(text)


@fuzzed
@given(seeds, st.text(max_size=30))
def test_overrides(seed: int, text: str) -> None:
    draw = random.Random(seed)
    keys = draw.choice(["train.steps", "model.attention", "model.attention.encoder.variant", "compare.variants.0.name"])
    value = draw.choice([text, "[" * 2000, "&a [*a]", ".inf", "2001-99-99", "{a: [1, {b: 2}]}", "9" * 5000])
    recipe_or_refusal(dump_recipe(load_recipe("demo")), (draw.choice([text, f"{keys}={value}", f"{text}={value}"]),))


# -- corpora -----------------------------------------------------------------------------------------------------

LINES = [
    b"a b c", b"", b" ",
    b"\x00\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\r", b"\x0c",
    "e\u0301 \u2028 \u200b \u202e".encode(), b"\xef\xbb\xbf", b"<pad> </s> <s>", b"<script>", b"\t",
    b"x\ty", b"\x1f\x8b",
    b"z" * 20_000, "\U0010ffff".encode(), b"a " * 3000,
]  # fmt: skip


def file_of(draw: random.Random, folder: Path, name: str, lines: int) -> str:
    kind = draw.random()
    content = b"\n".join(draw.choice(LINES) if kind < 0.6 else b"a b c d" for _ in range(lines)) + b"\n"
    if kind > 0.9:
        content = scrambled(content, draw)
    path = folder / name
    if draw.random() < 0.2:
        path = path.with_suffix(".gz")
        content = gzip.compress(content)
        content = scrambled(content, draw) if draw.random() < 0.7 else content
    path.write_bytes(content)
    return str(path)


@fuzzed
@given(seeds)
def test_corpora(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("corpus")
    lines = draw.choice([0, 1, 8])
    kind = draw.choice(["files", "tsv", "text"])
    names = {"files": ("train_source", "train_target"), "tsv": ("train_tsv",), "text": ("train_text",)}[kind]
    fields = {name: file_of(draw, folder, name, lines) for name in names}
    valid = {n.replace("train", "valid"): file_of(draw, folder, n.replace("train", "valid"), lines) for n in names}
    spec = DataSpec.model_validate({"corpus": kind, "vocab_size": 300, **fields, **valid})
    try:
        with modest():
            corpus = load_text(spec) if spec.is_text else load_corpus(spec)
            if not spec.is_text:
                tokenizers = build_tokenizers(corpus.train, spec)
                for source, target in [*corpus.train, *corpus.valid]:
                    for text, tokenizer in ((source, tokenizers.source), (target, tokenizers.target)):
                        ids = tokenizer([text])["input_ids"][0]
                        assert ids[-1] == 2
                        assert all(3 < i < len(tokenizer) for i in ids[:-1])
        count("fuzzed: corpora", "accepted")
    except UserError as error:
        assert str(folder) in str(error) or "data" in str(error)  # noqa: PT017
        count("fuzzed: corpora", "refused")
    shutil.rmtree(folder)


@pytest.mark.parametrize("line", [True, False], ids=["one line", "many lines"])
def test_gzip_that_expands_a_thousandfold_is_refused(tmp_path: Path, line: bool) -> None:
    """300 MB of the same in 300 kB."""
    piece = b"a" * 2**20 if line else (b"a" * 63 + b"\n") * 2**14
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(300):
            file.write(piece)
    spec = DataSpec.model_validate({"corpus": "text", "train_text": str(path), "valid_fraction": 0.1})
    with modest(256), pytest.raises(UserError, match=r"bomb\.gz"):
        load_text(spec)
    count("fuzzed: corpora", "refused")


# -- tokenizers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    pairs = [("the old man sees", "a dog"), ("a cat", "the river finds the house")] * 20
    build_tokenizers(pairs, DataSpec(corpus="verses", vocab_size=300)).save(folder)
    assert Tokenizers.load(folder)
    return (folder / "tokenizer.json").read_text()


REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def tokenizer_or_refusal(path: Path) -> None:
    try:
        with modest():
            tokenizer = load_tokenizer(path)
            rows = tokenizer(["the old man", "a" * 300, "\x00 <pad> </s>", ""])["input_ids"]
            tokenizer.batch_decode(rows)
    except UserError as error:
        assert str(path) in str(error)  # noqa: PT017
        count("fuzzed: tokenizer files", "refused")
    else:
        assert all(0 <= i < len(tokenizer) for row in rows for i in row)
        count("fuzzed: tokenizer files", "accepted")


@fuzzed
@given(seeds)
def test_tokenizer_files(tmp_path_factory: pytest.TempPathFactory, tokenizer_text: str, seed: int) -> None:
    draw = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    if draw.random() < 0.3:
        path.write_bytes(scrambled(tokenizer_text.encode(), draw))
    else:
        content = json.loads(tokenizer_text)
        part = draw.choice([*content, "model", "vocab"])
        if part == "vocab":
            word = draw.choice(list(content["model"]["vocab"]))
            content["model"]["vocab"][word] = draw.choice([2**32 - 1, 2**31, 10**6, 0, 5])
        else:
            content[part] = changed(content[part], draw, [REGEX, None, [], {}, 2**40, "x", {"type": "Unigram"}])
        path.write_text(json.dumps(content))
    tokenizer_or_refusal(path)


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = CausalLMConfig(vocab_size=40, d_model=16, n_heads=2, layers=1, d_ff=24, attention="qv-ka")
    CausalLM(config).save_pretrained(folder)
    return folder


def model_or_refusal(folder: Path, what: str) -> None:
    try:
        with modest():
            model = load(folder)
            model(torch.tensor([[1, 2, 3]]))
    except UserError as error:
        assert str(folder) in str(error)  # noqa: PT017
        count(what, "refused")
    else:
        count(what, "accepted")


def header(content: bytes) -> tuple[Any, bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@fuzzed
@given(seeds)
def test_headers_of_checkpoints(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, seed: int) -> None:
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("headers")
    shutil.copy(model_folder / "config.json", folder)
    content = (model_folder / "model.safetensors").read_bytes()
    if draw.random() < 0.3:
        content = scrambled(content[: draw.choice([64, len(content)])], draw)
    else:
        entries, data = header(content)
        name = draw.choice([key for key in entries if key != "__metadata__"])
        odd = [[2**40, 2**40], [0], [-1], [2**63], [], "F64", "F999", [0, 2**50], [5, 1], None, {}]
        if draw.random() < 0.5:
            entries[name][draw.choice(["shape", "dtype", "data_offsets"])] = draw.choice(odd)
        else:
            entries = changed(entries, draw)
        text = json.dumps(entries).encode()
        size = draw.choice([len(text), len(text), len(text), 2**63, 2**40, 0, 10**8])
        content = size.to_bytes(8, "little") + text + data
    (folder / "model.safetensors").write_bytes(content)
    model_or_refusal(folder, "fuzzed: headers of checkpoints")
    shutil.rmtree(folder)


@fuzzed
@given(seeds)
def test_configs_of_checkpoints(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, seed: int) -> None:
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("configs")
    shutil.copy(model_folder / "model.safetensors", folder)
    text = (model_folder / "config.json").read_bytes()
    if draw.random() < 0.2:
        (folder / "config.json").write_bytes(scrambled(text, draw))
    else:
        (folder / "config.json").write_text(json.dumps(changed(json.loads(text), draw)))
    model_or_refusal(folder, "fuzzed: configs of our models")
    shutil.rmtree(folder)


# -- what runs leave behind, read by report and compare ------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(corpus_files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run_training(read_recipe(toy_text(corpus_files), origin="toy", overrides=["train.steps=3"]), folder / "run")
    assert isinstance(load(list_checkpoints(folder / "run")[-1].path), TranslationModel)
    return folder / "run"


@fuzzed
@given(seeds)
def test_files_of_runs(tmp_path_factory: pytest.TempPathFactory, finished: Path, seed: int) -> None:
    from qvattn.lab.report import build_page

    draw, folder = random.Random(seed), tmp_path_factory.mktemp("runs")
    names = ["results.json", "environment.json", "recipe.yaml", "history.csv"]
    for name in names:
        shutil.copy(finished / name, folder)
    name = draw.choice(names)
    content = (folder / name).read_bytes()
    if name.endswith(".csv") or draw.random() < 0.4:
        (folder / name).write_bytes(scrambled(content, draw))
    else:
        tree = changed(json.loads(content) if name.endswith("json") else yaml.safe_load(content), draw)
        text = json.dumps(tree) if name.endswith("json") else yaml.dump(tree)
        (folder / name).write_text(text)
    try:
        with modest(128):
            if (folder / "history.csv").is_file():
                read_history(folder / "history.csv")
            build_page(load_experiments([folder]), title="x")
        count("fuzzed: files of runs", "accepted")
    except UserError as error:
        assert str(folder) in str(error)  # noqa: PT017
        count("fuzzed: files of runs", "refused")
    shutil.rmtree(folder)


# -- configs given to plan ---------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FOREIGN = [
    LLAMA,
    {**LLAMA, "model_type": "mistral", "sliding_window": 16},
    {**LLAMA, "model_type": "qwen3", "head_dim": 8, "layer_types": ["full_attention", "full_attention"]},
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64},
    {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4,
     "qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1},
    {"model_type": "qvattn-causal-lm", "d_model": 32, "n_heads": 4, "layers": 2, "vocab_size": 50},
    {"variant": "gqa", "d_model": 64, "n_heads": 4, "v_heads": 2, "layers": 2},
    {"model_type": "openelm"}, {"model_type": "bert"}, {"model_type": "t5"}, {"model_type": "mamba"},
]  # fmt: skip


@fuzzed
@given(seeds)
def test_configs_given_to_plan(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    draw = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / draw.choice(["config.json", "config.yaml"])
    content = changed(draw.choice(FOREIGN), draw) if draw.random() < 0.9 else draw.choice(FOREIGN)
    text = json.dumps(content) if path.suffix == ".json" else yaml.dump(content)
    path.write_bytes(scrambled(text.encode(), draw) if draw.random() < 0.15 else text.encode("utf-8", "replace"))
    try:
        with modest(128):
            shape_of(str(path))
        count("fuzzed: configs given to plan", "accepted")
    except UserError:
        count("fuzzed: configs given to plan", "refused")
