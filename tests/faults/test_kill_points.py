"""`kill -9` before every single file operation of what writes: no point in between leaves a state that cannot go on.

A fork repeats the operation and kills itself before its n-th file operation, for n = 1, 2, ... until it lives to the
end. What Python does not see (the writing of weights and moments) the random moments of `test_kill_training` hit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qvattn.data import Tokenizers
from qvattn.data.tokenizer import train_tokenizer
from qvattn.hf.convert.saving import check_out, save
from qvattn.lab.compare import _check_directory, _write
from qvattn.models import CausalLM, CausalLMConfig
from qvattn.train.checkpoint import discard_after, find_checkpoint, list_checkpoints, whole_checkpoint, write_checkpoint
from qvattn.train.history import History, read_history
from qvattn.train.recipe import dump_recipe
from qvattn.train.run import _finished, _open_run_dir

from .record import count

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod", "os.scandir")


def die_before(number: int, folder: Path) -> None:
    """Kill this process before its `number`-th file operation below `folder`."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in EVENTS and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_everywhere(
    tmp_path: Path,
    what: str,
    prepare: Callable[[Path], None],
    act: Callable[[Path], None],
    check: Callable[[Path], Any],
) -> int:
    """Kill `act(folder)` before each file operation; `check` every state it leaves, and that `act` then succeeds."""
    for number in range(1, 500):
        folder = tmp_path / f"at{number}"
        folder.mkdir()
        prepare(folder)
        child = os.fork()
        if child == 0:
            try:
                die_before(number, folder)
                act(folder)
            except BaseException:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -9), (what, number, code)
        check(folder)
        act(folder)
        check(folder)
        shutil.rmtree(folder)
        if code == 0:
            count("kill -9 before every file operation", what, number - 1)
            return number - 1
    raise AssertionError("it never ends")


def checkpoint(run_dir: Path, step: int, best: int) -> None:
    def save_model(folder: Path) -> None:
        save_file({"weight": torch.full((8,), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    moments = {"step": torch.tensor(step)}
    state = {"step": step, "best": {"step": best}}
    write_checkpoint(run_dir, step, save_model=save_model, optimizer_state=moments, state=state, keep_last=2)


def test_writing_a_checkpoint(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        for step, best in ((1, 1), (2, 2), (3, 2)):
            checkpoint(folder, step, best)

    def check(folder: Path) -> None:
        newest, damaged = whole_checkpoint(folder)
        assert newest is not None
        assert (newest.step in (3, 4), damaged) == (True, [])
        assert int(newest.optimizer()["step"]) == newest.step
        assert find_checkpoint(folder).name == ("step-0000002" if newest.step == 3 else "step-0000004")

    def act(folder: Path) -> None:
        checkpoint(folder, 4, 4)

    points = killed_everywhere(tmp_path, "writing a checkpoint", prepare, act, check)
    assert points > 15


def test_going_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        for step in (1, 2, 3):
            checkpoint(folder, step, 1)

    def check(folder: Path) -> None:
        newest, damaged = whole_checkpoint(folder)
        assert newest is not None
        assert damaged == []
        assert find_checkpoint(folder).name == "step-0000001"

    def act(folder: Path) -> None:
        discard_after(folder, 2)
        assert list_checkpoints(folder)[-1].step == 2

    assert killed_everywhere(tmp_path, "discarding newer checkpoints", prepare, act, check) > 5


def test_overwriting_a_run(tmp_path: Path, toy: Any) -> None:
    """What a killed --overwrite leaves is never taken for the complete run; both --overwrite and --resume go on."""
    recipe = toy()

    def prepare(folder: Path) -> None:
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        (folder / "results.json").write_text('{"status": "complete"}')
        (folder / "history.csv").write_text("step\n1\n")
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").write_text("x")
        checkpoint(folder, 1, 1)

    def check(folder: Path) -> None:
        finished = _finished(folder) is not None
        whole, damaged = whole_checkpoint(folder)
        assert damaged == []
        assert not finished or whole is not None
        twin = folder.with_name(folder.name + "twin")
        shutil.copytree(folder, twin, symlinks=True)
        _open_run_dir(twin, recipe, resume=True, overwrite=False)
        shutil.rmtree(twin)

    def act(folder: Path) -> None:
        _open_run_dir(folder, recipe, resume=False, overwrite=True)

    assert killed_everywhere(tmp_path, "overwriting a run", prepare, act, check) > 10


def test_small_files(tmp_path: Path) -> None:
    """The tokenizer, the history cut back on resume, and a comparison's files: the old or the new, never a half."""
    tokenizer = train_tokenizer(["a b c d"], 264)
    tokenizers = Tokenizers(tokenizer, tokenizer)

    def prepare(folder: Path) -> None:
        with History(folder / "history.csv") as history:
            for step in (1, 2, 3):
                history.append({"step": step})
        _write(folder / "compare.yaml", "name: old\n")
        tokenizers.save(folder)

    def act(folder: Path) -> None:
        tokenizers.save(folder)
        History(folder / "history.csv", resume_step=2).close()
        _write(folder / "compare.yaml", "name: new\n")

    def check(folder: Path) -> None:
        Tokenizers.load(folder)
        assert [r["step"] for r in read_history(folder / "history.csv")] in (["1", "2"], ["1", "2", "3"])
        assert (folder / "compare.yaml").read_text() in ("name: old\n", "name: new\n")

    assert killed_everywhere(tmp_path, "tokenizer, history, comparison's files", prepare, act, check) > 8


def test_first_file_of_a_comparison(tmp_path: Path) -> None:
    """Killed before compare.yaml is there: the directory still counts as empty."""

    def act(folder: Path) -> None:
        _check_directory(folder)
        _write(folder / "compare.yaml", "name: new\n")

    assert killed_everywhere(tmp_path, "the first file of a comparison", lambda _: None, act, _check_directory) > 1


def test_replacing_a_conversion(tmp_path: Path) -> None:
    """`qvattn convert --overwrite`: the earlier conversion or the new one, each whole."""
    config = CausalLMConfig(vocab_size=20, d_model=8, n_heads=2, layers=1, d_ff=8)
    models = [CausalLM(config) for _ in range(2)]

    def prepare(folder: Path) -> None:
        save(models[0], {"number": 0}, folder / "out")

    def check(folder: Path) -> None:
        check_out(folder / "out", overwrite=True)
        number = json.loads((folder / "out" / "conversion.json").read_text())["number"]
        loaded = CausalLM.from_pretrained(folder / "out")
        assert torch.equal(loaded.embedding.weight, models[number].embedding.weight)

    def act(folder: Path) -> None:
        save(models[1], {"number": 1}, folder / "out")
        assert [path.name for path in folder.iterdir()] == ["out"]

    assert killed_everywhere(tmp_path, "replacing a converted model", prepare, act, check) > 10
