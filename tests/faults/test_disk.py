"""A full disk and a read-only one, as real mounts of their own; where nobody may mount, these tests are skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from train.test_resume import assert_same_run

from .processes import Forker
from .record import count

OVERRIDES = ["train.steps=6", "train.save_every=2", "train.report_every=1"]

Mount = Callable[[str], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Mount]]:
    """A file system of its own, and a way to change its options (`size=100k`, `ro`)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a file system is not allowed here")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    yield folder, remount
    subprocess.run(["umount", "-l", str(folder)], check=True)


def command(toy_file: Path, run: Path, *more: str) -> list[str]:
    return ["train", str(toy_file), *OVERRIDES, "--run-dir", str(run), *more]


@pytest.mark.parametrize("kilobytes", [4, 24, 60, 120, 250, 400])
def test_full_disk(forker: Forker, disk: tuple[Path, Mount], toy_file: Path, tmp_path: Path, kilobytes: int) -> None:
    """Whatever the disk has room for: a clear end, and with more room the same run goes on."""
    folder, remount = disk
    remount(f"size={kilobytes}k")
    tensorboard = "train.tensorboard=true"
    code = forker.run(command(toy_file, folder / "run", "--resume", tensorboard), tmp_path / "log")
    said = (tmp_path / "log").read_text()
    if code == 0:
        pytest.skip("the run fits")
    assert code in (1, 2), said
    last = said.strip().splitlines()[-1]
    assert "No space left on device" in last, said
    assert str(folder / "run") in last
    assert "Traceback" not in said
    remount("size=50m")
    assert forker.run(command(toy_file, folder / "run", "--resume", tensorboard), tmp_path / "log2") == 0
    assert forker.run(command(toy_file, tmp_path / "whole", tensorboard), tmp_path / "log3") == 0
    assert_same_run(tmp_path / "whole", folder / "run")
    count("disk full", "clear error; with room the run goes on, equal bit for bit")


def test_full_disk_under_a_comparison(forker: Forker, disk: tuple[Path, Mount], tmp_path: Path, toy_file: Path) -> None:
    folder, remount = disk
    remount("size=4k")
    grid = 'compare={"baseline": "a", "seeds": [1], "variants": [{"name": "a"}, {"name": "b", "attention": "qkv"}]}'
    arguments = ["compare", str(toy_file), grid, "--out", str(folder / "out")]
    assert forker.run(arguments, tmp_path / "log") in (1, 2)
    last = (tmp_path / "log").read_text().strip().splitlines()[-1]
    assert "No space left on device; make room on the disk" in last
    assert str(folder / "out") in last
    count("disk full", "comparison: clear error")


def test_read_only_directory(forker: Forker, disk: tuple[Path, Mount], toy_file: Path, tmp_path: Path) -> None:
    """Nothing new can be written there; a finished run can still be used."""
    folder, remount = disk
    run = folder / "run"
    assert forker.run(command(toy_file, run), tmp_path / "log") == 0
    remount("ro")
    grid = 'compare={"baseline": "a", "seeds": [1], "variants": [{"name": "a"}]}'
    source = tmp_path / "source.txt"
    source.write_text("the old man\n", encoding="utf-8")
    refused = {
        "train, a new run": command(toy_file, folder / "new"),
        "train --resume": command(toy_file, run, "--resume"),
        "compare": ["compare", str(toy_file), grid, "--out", str(folder / "out")],
        "report": ["report", str(run), "-o", str(folder / "report.html")],
        "translate": ["translate", str(run), "--input", str(source), "--output", str(folder / "out.txt")],
    }
    for what, arguments in refused.items():
        log = tmp_path / what.replace(" ", "-")
        code = forker.run(arguments, log)
        last = log.read_text().strip().splitlines()[-1]
        assert code in (1, 2), (what, last)
        assert "Read-only file system" in last, (what, last)
        assert str(folder) in last, (what, last)
        count("read-only directory", f"{what}: clear error")
    output = tmp_path / "out.txt"
    arguments = ["translate", str(run), "--input", str(source), "--output", str(output)]
    assert forker.run(arguments, tmp_path / "log4") == 0, (tmp_path / "log4").read_text()
    assert output.read_text().count("\n") == 1
    assert forker.run(["report", str(run), "-o", str(tmp_path / "report.html")], tmp_path / "log5") == 0
    count("read-only directory", "translate and report from it: work")
