"""The command line's root: lazy commands, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

from qvattn import cli
from qvattn.cli.output import print_json
from qvattn.errors import UserError


def test_help_lists_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    script = (
        "import sys; from qvattn.cli import main, COMMANDS; main(['--help']);"
        "print([e.target for e in COMMANDS.values() if e.target.split(':')[0] in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_loads_and_helps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"qvattn {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("qvattn ")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["report"], ["report", "--nonsense"], ["compare", "x", "--jobs", "a"]]
)
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Install a command `fail` that raises what it is given."""

    def install(error: BaseException) -> None:
        def fail() -> None:
            raise error

        module = ModuleType("qvattn_failing")
        module.fail = fail  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "qvattn_failing", module)
        monkeypatch.setitem(cli.COMMANDS, "fail", cli.CommandEntry("qvattn_failing:fail", "Fails."))

    return install


def test_user_error_is_one_line_and_2(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(UserError("d_ctx must be at least 1, not 0"))
    assert cli.main(["fail"]) == 2
    assert capsys.readouterr().err == "qvattn: error: d_ctx must be at least 1, not 0\n"


def test_unexpected_error_is_short_and_1(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cli.TRACEBACK_VARIABLE, raising=False)
    failing(RuntimeError("broken"))
    assert cli.main(["fail"]) == 1
    assert capsys.readouterr().err == "qvattn: RuntimeError: broken (set QVATTN_TRACEBACK=1 to see where)\n"
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    assert cli.main(["fail"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("qvattn: RuntimeError: broken\n")


def test_interrupt_is_130(failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    assert cli.main(["fail"]) == 130


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    class Model(BaseModel):
        value: float

    print_json({"a": float("nan"), "b": (1, Path("x")), 3: Model(value=float("inf")), "ü": None})
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": None, "b": [1, "x"], "3": {"value": None}, "ü": None}
    assert "ü" in text
