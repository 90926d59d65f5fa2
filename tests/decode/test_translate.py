"""Translation of text, its scores, and the two commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from qvattn import UserError
from qvattn.cli import main
from qvattn.data import DataSpec, Tokenizers, build_tokenizers
from qvattn.data.tokenizer import train_tokenizer
from qvattn.decode import LeanModel
from qvattn.decode.prompt import continue_text
from qvattn.decode.score import corpus_scores, score_translations
from qvattn.decode.text import Search, translate_lines
from qvattn.models import CausalLM, TranslationModel
from qvattn.train.recipe import Recipe, dump_recipe

from .small import language, translation

PAIRS = [(f"a man {verb} the {thing} .", f"ein Mann {verb}t das {thing} .") for verb in "abcde" for thing in "fghij"]
LINES = ["a man b the h .", "", "the f .", "   ", "a man e the i . a man d the j .", "</s> & < > \u2028 é"]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return build_tokenizers(PAIRS, DataSpec(vocab_size=300))


@pytest.fixture(scope="module")
def model(tokenizers: Tokenizers) -> TranslationModel:
    size = len(tokenizers.source)
    made: TranslationModel = translation("qv-ka", source_vocab_size=size, target_vocab_size=size)
    return made


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_order_and_batches_change_nothing(
    model: TranslationModel, tokenizers: Tokenizers, beam: int, rows: int
) -> None:
    made = translate_lines(model, tokenizers, LINES, Search(beam=beam, rows=rows, max_new_tokens=12))
    alone = [
        translate_lines(model, tokenizers, [line], Search(beam=beam, max_new_tokens=12)).texts[0] for line in LINES
    ]
    assert made.texts == alone
    assert made.texts[1] == made.texts[3] == "" and made.empty == 2
    assert all("\n" not in text for text in made.texts) and len({*made.texts}) > 2
    assert made.source_tokens == sum(len(tokenizers.source(line)["input_ids"]) for line in LINES if line.strip())


def test_long_lines_are_refused_by_number_or_cut_and_counted(model: TranslationModel, tokenizers: Tokenizers) -> None:
    search = Search(beam=1, max_new_tokens=5)
    lengths = [len(tokenizers.source(line)["input_ids"]) for line in LINES]
    limit = min(lengths[4:]) - 1
    assert max(lengths[:4]) <= limit
    words = rf"line 5 has {lengths[4]} tokens, allowed are {limit} \(and 1 more\)"
    with pytest.raises(UserError, match=words):
        translate_lines(model, tokenizers, LINES, search, max_source_tokens=limit)
    made = translate_lines(model, tokenizers, LINES, search, max_source_tokens=limit, truncate=True)
    assert made.truncated == 2 and len(made.texts) == len(LINES)
    with pytest.raises(UserError, match="max_source_tokens=1"):
        translate_lines(model, tokenizers, LINES, search, max_source_tokens=1)


def test_nothing_gives_nothing(model: TranslationModel, tokenizers: Tokenizers) -> None:
    assert translate_lines(model, tokenizers, []).texts == []
    assert translate_lines(model, tokenizers, ["", " "]).texts == ["", ""]


def test_scores_carry_their_signatures(model: TranslationModel, tokenizers: Tokenizers) -> None:
    scores = score_translations(model, tokenizers, PAIRS[:4], beam=2, max_new_tokens=8)
    assert scores["sentences"] == 4 and scores["beam"] == 2
    assert 0 <= scores["bleu"] <= 100 and 0 <= scores["chrf"] <= 100
    assert re.search(r"nrefs:1\|case:mixed\|.*tok:13a.*version:", scores["bleu_signature"])
    assert "version:" in scores["chrf_signature"]
    with pytest.raises(UserError, match="nothing to score"):
        score_translations(model, tokenizers, [])


def test_perfect_translations_score_100() -> None:
    texts = ["ein Mann geht über die Straße .", "zwei Hunde laufen im Schnee ."]
    scores = corpus_scores(texts, texts)
    assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    with pytest.raises(UserError, match="1 translations for 2 references"):
        corpus_scores(texts[:1], texts)


# -- the commands ------------------------------------------------------------------------------------------------


def run_of(folder: Path, model: Any, tokenizers: Tokenizers, task: str) -> Path:
    """A run directory as `qvattn train` leaves it."""
    data = {"corpus": "kjv"} if task == "causal-lm" else {"max_length": 20}
    recipe = Recipe.model_validate({"name": "small", "task": task, "data": data})
    checkpoint = folder / "checkpoints" / "step-0000007"
    checkpoint.mkdir(parents=True)
    model.save_pretrained(checkpoint)
    (checkpoint / "state.json").write_text(json.dumps({"step": 7, "best": {"step": 7}}))
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    tokenizers.save(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: TranslationModel, tokenizers: Tokenizers) -> Path:
    return run_of(tmp_path / "run", model, tokenizers, "translation")


def written(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def test_translate_writes_a_file_and_a_summary(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: TranslationModel, tokenizers: Tokenizers
) -> None:
    source, out = written(tmp_path / "in.txt", LINES[:4]), tmp_path / "out.txt"
    options = ["--beam", "2", "--max-new-tokens", "9", "--json"]
    assert main(["translate", str(run), "--input", source, "--output", str(out), *options]) == 0
    expected = translate_lines(model, tokenizers, LINES[:4], Search(beam=2, max_new_tokens=9)).texts
    assert out.read_text(encoding="utf-8") == "".join(f"{text}\n" for text in expected)
    summary = json.loads(capsys.readouterr().out)
    assert (summary["lines"], summary["empty"], summary["truncated"], summary["beam"]) == (4, 2, 0, 2)
    assert summary["checkpoint"].endswith("step-0000007")


def test_translate_reads_and_writes_streams(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the f .\n\na man b the h .\n")))
    assert main(["translate", str(run), "--input", "-", "--output", "-", "--beam", "1", "--max-new-tokens", "6"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 4 and lines[1] == lines[3] == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output", "out.txt"], "line 5 has"),  # the recipe's max_length is 20
        (["--output", "-", "--json"], "both write to standard output"),
        (["--output", "."], "is a directory"),
        (["--output", "out.txt", "--checkpoint", "first"], "allowed are best, last"),
        (["--output", "no/such/folder/out.txt", "--truncate"], "no/such/folder"),
    ],
)
def test_translate_refuses(
    run: Path,
    tmp_path: Path,
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = written(tmp_path / "in.txt", [*LINES[:4], " ".join(LINES[4:5] * 3)])
    command = ["translate", str(run), "--input", source, "--beam", "1", "--max-new-tokens", "4", *options]
    assert main(command) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


def test_translate_names_what_is_missing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", str(run), "--input", str(tmp_path / "no.txt"), "--output", "x"]) == 2
    assert "no.txt does not exist" in capsys.readouterr().err
    source = written(tmp_path / "in.txt", ["a"])
    assert main(["translate", str(tmp_path / "norun"), "--input", source, "--output", "x"]) == 2
    assert "norun" in capsys.readouterr().err


@pytest.fixture
def text_run(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer([" ".join(pair) for pair in PAIRS], 300)
    model: CausalLM = language("qv-ka", "rope", vocab_size=len(tokenizer))
    return run_of(tmp_path / "text", model, Tokenizers(tokenizer, tokenizer), "causal-lm")


def test_generate_continues_a_prompt_with_its_seed(text_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(text_run), "--prompt", "a man", "--max-new-tokens", "12", "--seed", "3", "--top-k", "20"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("a man")
    assert main([*command, "--stream"]) == 0
    assert capsys.readouterr().out == text
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == text[:-1] and result["new_tokens"] <= 12
    assert main([*command, "--json", "--stream"]) == 2
    assert main([*command, "--top-p", "2"]) == 2


def test_commands_name_each_other_for_the_wrong_model(
    run: Path, text_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "--prompt", "a"]) == 2
    assert "qvattn translate" in capsys.readouterr().err
    source = written(tmp_path / "in.txt", ["a"])
    assert main(["translate", str(text_run), "--input", source, "--output", "x"]) == 2
    assert "qvattn generate" in capsys.readouterr().err


def test_text_grows_by_whole_characters() -> None:
    tokenizer = train_tokenizer(["ab"], 264)  # bytes: a character beyond ASCII is several tokens
    model: CausalLM = language("mha", "rope", vocab_size=len(tokenizer))
    pieces: list[str] = []
    made = continue_text(LeanModel(model), tokenizer, "é", max_new_tokens=60, seed=1, on_text=pieces.append)
    assert "".join(pieces) == made.text and made.text.startswith("é") and made.text == "é" + made.continuation
    assert made.cache_bytes > 0 and not torch.is_inference_mode_enabled()
