"""No file makes the package run code: no unpickling, no code beside a model, no shell, no unsafe YAML."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import qvattn
from faults.record import count
from qvattn.cli import main
from qvattn.data import DataSpec, load_corpus
from qvattn.errors import UserError
from qvattn.lab.check.loading import load
from qvattn.train.checkpoint import last_checkpoint
from qvattn.train.run import run_training
from train.conftest import MakeRecipe

from .scan import dangers

PACKAGE = Path(qvattn.__file__).parent
BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: "/".join(path.parts[-3:]))
def test_nothing_dangerous_is_called(source: Path) -> None:
    assert list(dangers(source.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "subprocess.run(command, shell=True)",
        "AutoModelForCausalLM.from_pretrained(path)",
        "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path)",
        "archive.extractall(folder)",
    ],
)
def test_the_scan_sees(line: str) -> None:
    assert list(dangers(line))


class Evil:
    """Unpickled, it makes the directory `owned`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "owned"),)


def owned(folder: Path) -> bool:
    return (folder / "owned").exists()


@pytest.fixture
def saved(toy: MakeRecipe, tmp_path: Path) -> Path:
    """The directory of a saved model."""
    run_training(toy("train.steps=1"), tmp_path / "run")
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    (checkpoint.path / "SHA256SUMS").unlink()  # whoever replaces files replaces their sums
    return checkpoint.path


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors", "training_args.bin"])
def test_pickled_weights_are_not_loaded(saved: Path, tmp_path: Path, name: str) -> None:
    (saved / "model.safetensors").unlink()
    torch.save({"weight": Evil(tmp_path)}, saved / name)
    with pytest.raises(UserError, match="safetensors"):
        load(saved)
    assert not owned(tmp_path)
    count("malicious file", "weights as a pickle: refused, not executed")


def test_pickle_of_the_optimizer_is_not_executed(saved: Path, tmp_path: Path, toy: MakeRecipe) -> None:
    for content in (lambda file: torch.save({"state": Evil(tmp_path)}, file), raw_pickle(tmp_path)):
        (tmp_path / "run/results.json").unlink(missing_ok=True)
        content(saved / "optimizer.pt")
        with pytest.raises(UserError, match=r"optimizer\.pt"):
            run_training(toy("train.steps=1"), tmp_path / "run", resume=True)
        assert not owned(tmp_path)
        count("malicious file", "optimizer state as a pickle: refused, not executed")


def raw_pickle(folder: Path) -> Any:
    return lambda file: file.write_bytes(pickle.dumps(Evil(folder)))


CODE = "from pathlib import Path\nPath({folder!r}, 'owned').mkdir()\nclass Model: pass\nclass Config: pass\n"
MAP = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}


@pytest.mark.parametrize("model_type", ["llama", "bert", "evil", "qvattn-causal-lm"])
def test_code_beside_a_model_is_not_run(tmp_path: Path, model_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(CODE.format(folder=str(tmp_path)))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": MAP}))
    for arguments in (["plan", str(folder)], ["generate", str(folder), "--prompt", "a"], ["check", str(folder)]):
        assert main(arguments) in (0, 2), capsys.readouterr().err
        assert not owned(tmp_path)
    count("malicious file", "code beside a model: not run")


def test_code_of_a_data_set_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "corpus.py").write_text(CODE.format(folder=str(tmp_path)))
    spec = DataSpec.model_validate({"corpus": "hub", "hub": {"name": str(folder)}})
    with pytest.raises(UserError):
        load_corpus(spec)
    assert not owned(tmp_path)
    count("malicious file", "a data set's script: not run")


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.mkdir ['{folder}/owned']",
        "name: !!python/object/apply:os.mkdir ['{folder}/owned']",
        "name: !!python/name:os.system",
        "? !!python/object/apply:os.mkdir ['{folder}/owned']\n: 1",
    ],
)
def test_yaml_makes_no_objects(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text.format(folder=tmp_path))
    for arguments in (["train", str(file), "--dry-run"], ["plan", str(file)], ["compare", str(file)]):
        assert main(arguments) == 2
        assert not owned(tmp_path)
    assert main(["train", "demo", "--dry-run", f"name={text.format(folder=tmp_path)}"]) == 2
    assert not owned(tmp_path)
    count("malicious file", "YAML that names Python objects: refused")


def test_all_weights_are_safetensors(saved: Path) -> None:
    kinds = {path.suffix for path in saved.iterdir()} - {".json", ".md", ""}
    assert kinds == {".safetensors", ".pt"}
    assert [path.name for path in saved.glob("*.pt")] == ["optimizer.pt"]
