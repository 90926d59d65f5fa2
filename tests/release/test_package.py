"""What is released: complete, without junk, and of use with and without a compiler."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import qvattn

from .conftest import ROOT, Environment

NOT_RELEASED = (".ci/", ".github/", ".gitignore")
KERNEL = "qvattn/kernels/_native_cpu.so"
TINY_LAYER = """
import torch, qvattn
from qvattn import Attention, AttentionSpec
from qvattn.kernels._native import native, why_missing
attn, x = Attention(AttentionSpec(variant="qv-ka", d_model=32, n_heads=4)).eval(), torch.randn(2, 5, 32)
with torch.inference_mode():
    cache = attn.new_cache(batch_size=2)
    parts = [attn(part, cache=cache) for part in (x[:, :4], x[:, 4:])]
    assert torch.allclose(torch.cat(parts, 1), attn(x), atol=1e-5)
print(qvattn.__file__)
print(native() and native().path)
print(why_missing())
"""
"""A decoded token; then where the package and its kernel were found, and why not."""
TINY_RUN = (
    *("data.controlled.train=200", "data.controlled.valid=20", "data.controlled.test=20"),
    *("model.d_model=16", "model.d_ff=16", "model.n_heads=2", "model.attention=qv", "model.position=agf+pcm-v"),
    *("train.steps=3", "train.warmup_steps=1", "train.validate_every=3"),
)


def test_the_version_is_written_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", qvattn.__version__)
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text
    assert not re.search(r"^version\s*=", text, re.MULTILINE)
    assert f"\n## {qvattn.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf'^version: "?{re.escape(qvattn.__version__)}"?$', citation, re.MULTILINE)


def test_the_source_archive_is_what_is_committed(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sdist.name == f"qvattn-{qvattn.__version__}.tar.gz"
    needed = ["LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CMakeLists.txt", "pyproject.toml", "Makefile"]
    needed += ["csrc/decode.cpp", "csrc/decode_body.inl", "src/qvattn/recipes/demo.yaml", "src/qvattn/py.typed"]
    needed += ["src/qvattn/lab/assets/report.css", "docs/choosing.md", "tests/release/test_package.py"]
    assert names >= set(needed)
    junk = [
        n for n in names if re.search(r"\.(so|o|pyc|whl|log)$|__pycache__|/\.|^\.|egg-info|^(build|dist|runs|site)/", n)
    ]
    assert junk == []
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        committed = {n for n in listed.stdout.splitlines() if not n.startswith(NOT_RELEASED) and (ROOT / n).exists()}
        assert committed - names == set(), "committed, but not in the archive"


@pytest.fixture(scope="module")
def plain(wheel_without_compiler: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("plain") / "env", wheel_without_compiler)


@pytest.fixture(scope="module")
def native(native_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("native") / "env", native_wheel)


def test_without_a_compiler_the_wheel_serves_everybody(wheel_without_compiler: Path) -> None:
    assert wheel_without_compiler.name == f"qvattn-{qvattn.__version__}-py3-none-any.whl"
    holds_the_package(wheel_without_compiler, kernel=False)


def test_without_a_compiler_the_kernel_says_that_it_is_missing(plain: Environment) -> None:
    where, kernel, why = plain.python_prints(TINY_LAYER).splitlines()
    assert Path(where).is_relative_to(plain.packages)
    assert kernel == "None"
    assert "not installed" in why
    assert "compiler" in why
    refused = plain.qvattn("bench", "decode", "--shapes", "1,2,64,16", "--dtypes", "fp32", ok=False)
    assert "the native kernel is not installed" in refused.stderr


def test_without_a_compiler_the_commands_work(plain: Environment) -> None:
    the_commands_work(plain)


@pytest.mark.slow
def test_the_native_wheel_runs_where_its_tag_says(native_wheel: Path) -> None:
    match = re.fullmatch(
        rf"qvattn-{re.escape(qvattn.__version__)}-py3-none-manylinux_2_(\d+)_x86_64\.whl", native_wheel.name
    )
    assert match
    assert int(match[1]) <= 28, "PyTorch's own wheels ask for glibc 2.28: ours must not ask for more"
    holds_the_package(native_wheel, kernel=True)


@pytest.mark.slow
def test_the_native_wheel_shares_the_openmp_runtime_of_torch(native: Environment) -> None:
    where, kernel, why = native.python_prints(TINY_LAYER).splitlines()
    assert Path(where).is_relative_to(native.packages)
    assert Path(kernel).is_relative_to(native.packages)
    assert why == "None"
    code = "; print({l.split()[-1] for l in open('/proc/self/maps') if 'gomp' in l or 'iomp' in l or 'libomp' in l})"
    runtimes = native.python_prints("from qvattn.kernels._native import native; native()" + code)
    assert len(eval(runtimes)) == 1, runtimes


@pytest.mark.slow
def test_the_native_wheel_commands_work(native: Environment) -> None:
    the_commands_work(native)
    rows = json.loads(
        native.qvattn(
            "bench", "decode", "--shapes", "1,2,64,16", "--dtypes", "fp32", "--seconds", "0.1", "--json"
        ).stdout
    )["rows"]
    assert {"sdpa", "qv"} <= {row["case"] for row in rows}


def holds_the_package(wheel: Path, *, kernel: bool) -> None:
    """`wheel` holds the files of src/qvattn, its metadata, the kernel if it should, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {one.filename for one in archive.infolist() if not one.is_dir()}  # auditwheel adds the directories
    assert (KERNEL in names) is kernel
    packaged = {n for n in names if n.startswith("qvattn/")} - {KERNEL}
    present = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*") if p.is_file()}
    present = {n for n in present if "__pycache__" not in n and not n.endswith((".so", ".pyc"))}
    assert packaged == present
    rest = {n for n in names if not n.startswith("qvattn/")}
    assert all(n.startswith(f"qvattn-{qvattn.__version__}.dist-info/") for n in rest), rest
    assert any(n.endswith("licenses/LICENSE") for n in rest)


def the_commands_work(env: Environment) -> None:
    """Version, the two computed tables, and a tiny training run from text to results."""
    assert env.qvattn("--version").stdout.strip() == f"qvattn {qvattn.__version__}"
    assert len(json.loads(env.qvattn("variants", "--json").stdout)["rows"]) > 10
    walk = env.qvattn("explain", "shapes", "--d-model", "64", "--heads", "4", "--history", "10").stdout
    assert "(10,16) + (1,16) -> (11,16)" in walk
    run = env.home / "run"
    env.qvattn("train", "controlled", "--run-dir", run, *TINY_RUN)
    assert json.loads((run / "results.json").read_text())
