"""`qvattn check`: where models and sentences come from, what is printed, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import specimens
import torch

from qvattn.cli import main
from qvattn.lab.check import CHECKS
from qvattn.lab.check.loading import Texts, load_subject
from qvattn.models import QvattnModel
from qvattn.streams import StreamCache

QUICK = "decode-equals-full,memory-arithmetic"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_run_is_checked_on_its_own_validation_data(translation_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(translation_run), "--sentences", "2", "--length", "40", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["passed"] and shown["sentences"] == 2
    assert shown["data"] == "the run's validation data"
    assert shown["attention"]["variant"] == "qv-ka"
    assert [one["name"] for one in shown["checks"]] == list(CHECKS)
    assert all(one["measures"] and one["steps"] and one["claim"] for one in shown["checks"])


def test_a_checkpoint_finds_its_run(translation_run: Path) -> None:
    subject = load_subject(translation_run / "checkpoints" / "step-0000001", sentences=3)
    assert subject.data == "the run's validation data" and len(subject.samples) == 3
    assert all(int(sample.ids[0, 0]) == 1 for sample in subject.samples)


def test_a_saved_model_needs_text(
    saved_language_model: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(saved_language_model)]) == 2
    assert "--text" in capsys.readouterr().err
    arguments = ["--text", str(text_file), "--sentences", "2", "--length", "12", "--only", QUICK]
    assert main(["check", str(saved_language_model), *arguments]) == 0
    plain = capsys.readouterr().out
    assert "2 of 2 checks passed" in plain and "because" not in plain
    assert main(["check", str(saved_language_model), *arguments, "--explain"]) == 0
    assert "because each step reads the streams" in " ".join(capsys.readouterr().out.split())


def test_a_failing_check_fails_the_command(
    saved_language_model: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def new_cache(model: QvattnModel, batch_size: int, *, capacity: int = 64) -> StreamCache:
        return specimens.ForgetfulCache(model.decoder_stack.cache_layers, batch_size, capacity=capacity)

    monkeypatch.setattr(QvattnModel, "new_cache", new_cache)
    arguments = ["--text", str(text_file), "--sentences", "2", "--length", "12", "--only", QUICK]
    assert main(["check", str(saved_language_model), *arguments]) == 1
    assert "failed: decode-equals-full" in capsys.readouterr().out
    assert main(["check", str(saved_language_model), *arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "a"], "no source"),
        (["--only", "nonsense", "--text", "TEXT"], "allowed are decode-equals-full"),
        (["--text", "missing.txt"], "missing.txt does not exist"),
        (["--text", "TEXT", "--length", "100000"], "fill no block"),
    ],
)
def test_bad_input(
    saved_language_model: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    given = [str(text_file) if argument == "TEXT" else argument for argument in arguments]
    assert main(["check", str(saved_language_model), *given]) == 2
    assert message in capsys.readouterr().err


def test_translation_files(translation_run: Path, text_file: Path) -> None:
    reverse = text_file.with_name("reverse.txt")
    subject = load_subject(translation_run, texts=Texts(source=text_file, target=reverse), sentences=2)
    assert subject.data == f"{text_file}, {reverse}"
    assert all(sample.source is not None for sample in subject.samples)


def test_no_model_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "neither a run nor a saved model" in capsys.readouterr().err
