"""Comparisons as jobs: through submitit's local executor for real, and through commands that stand in for SLURM's."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import stat
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab import cluster
from qvattn.lab import compare as lab
from qvattn.lab.cluster import parse_options, read_jobs

pytest.importorskip("submitit")

# Runs named "bad" fail until there is a file `mended` beside their plan; "slow" ones sleep until they are ended.
SCRIPT = """
import sys, time
from pathlib import Path
from typing import Any
sys.path.insert(0, {here!r})
import yaml
from fakes import write_run

plan, directory = Path(sys.argv[1]), Path(sys.argv[2])
recipe = yaml.safe_load(plan.read_text())
name, seed = recipe["name"], recipe["train"]["seed"]
print("begins with", sys.argv[3:], flush=True)
if "bad" in name and not plan.with_name("mended").exists():
    print("qvattn: error: no luck today")
    sys.exit(2)
while "slow" in name and not plan.with_name("mended").exists():
    time.sleep(0.05)
write_run(directory, name=name, seed=seed, accuracy=0.4 + 0.01 * seed, cache=64)
"""


@pytest.fixture(autouse=True)
def _invented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    monkeypatch.setattr(lab, "train_command", lambda plan, run: (sys.executable, str(script), str(plan), str(run)))


def recipe(root: Path, *names: str) -> str:
    variants = [{"name": name, "attention": "qkv"} for name in names]
    content = {
        "name": "tiny",
        "data": {"corpus": "verses", "vocab_size": 300},
        "train": {"steps": 6, "warmup_steps": 2},
        "compare": {"baseline": names[0], "seeds": [1], "threads": 1, "variants": variants},
    }
    path = root / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def wait_for(out: Path, *slugs: str) -> None:
    """Until the jobs of these runs have ended."""
    deadline = time.monotonic() + 120
    while not all((out / "cluster" / f"{slug}.exit").exists() for slug in slugs):
        assert time.monotonic() < deadline, "a job did not end in time"
        time.sleep(0.05)


def test_submit_collect_retry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = recipe(tmp_path, "QKV", "QV", "bad <one>"), tmp_path / "out"
    assert main(["compare", path, "--out", str(out), "--cluster", "local", "--json"]) == 0
    printed = capsys.readouterr()
    assert [(run["name"], run["seed"]) for run in json.loads(printed.out)] == [("QKV", 1), ("QV", 1), ("bad <one>", 1)]
    assert f"qvattn compare --collect {out}" in printed.err
    jobs = read_jobs(out)
    assert jobs is not None and jobs.cluster == "local"
    wait_for(out, "qkv--seed1", "qv--seed1", "bad-one--seed1")

    # what is finished is gathered; what failed is named with its last log line
    assert main(["compare", "--collect", str(out), "--json"]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert [row["name"] for row in result["rows"]] == ["QKV", "QV", "bad <one>"]
    (failed,) = result["failed"]
    assert failed["name"] == "bad <one>"
    assert failed["reason"] == "exit code 2; last log line: qvattn: error: no luck today"
    assert "3 runs: 2 complete, 1 failed" in printed.err
    assert "bad &lt;one&gt;" in (out / "compare.html").read_text()
    assert "begins with ['--resume']" in (out / failed["log"]).read_text()

    # the failed one alone is submitted again
    (out / "plans/mended").touch()
    assert main(["compare", "--retry-failed", str(out)]) == 0
    again = read_jobs(out)
    assert again is not None
    assert {slug for slug, job in again.jobs.items() if job != jobs.jobs[slug]} == {"bad-one--seed1"}
    wait_for(out, "bad-one--seed1")
    capsys.readouterr()
    assert main(["compare", "--collect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []

    # the same command submits what is new, and nothing twice
    assert main(["compare", path, "--out", str(out), "--cluster", "local", "--seeds", "2"]) == 0
    more = read_jobs(out)
    assert more is not None
    assert {slug for slug, job in more.jobs.items() if again.jobs.get(slug) != job} == {
        "qkv--seed2", "qv--seed2", "bad-one--seed2",
    }  # fmt: skip
    wait_for(out, "qkv--seed2", "qv--seed2", "bad-one--seed2")


@pytest.fixture
def slow_job(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A comparison whose only job runs until it is told to end."""
    path, out = recipe(tmp_path, "slow"), tmp_path / "out"
    assert main(["compare", path, "--out", str(out), "--cluster", "local"]) == 0
    log = out / "logs/slow--seed1.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and "begins" in log.read_text()):
        assert time.monotonic() < deadline, "the job did not begin in time"
        time.sleep(0.05)
    yield path, out
    (out / "plans/mended").touch()


def test_a_living_job_is_never_doubled(slow_job: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, out = slow_job
    before = read_jobs(out)
    assert before is not None
    assert main(["compare", path, "--out", str(out), "--cluster", "local"]) == 0
    assert read_jobs(out) == before
    assert "slow, seed 1: running, job" in capsys.readouterr().err
    assert main(["compare", path, "--out", str(out), "--cluster", "local", "--overwrite"]) == 2
    assert main(["compare", path, "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("(slow, seed 1) still waits or runs; cancel it first") == 2
    assert main(["compare", "--collect", str(out)]) == 0
    assert "1 runs: 1 running" in capsys.readouterr().err
    assert main(["compare", "--retry-failed", str(out)]) == 0
    assert read_jobs(out) == before
    (out / "plans/mended").touch()
    wait_for(out, "slow--seed1")
    capsys.readouterr()
    assert main(["compare", "--collect", str(out)]) == 0
    assert "1 runs: 1 complete" in capsys.readouterr().err


def test_a_killed_job_is_named(slow_job: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the job nor the shell that notes its exit code is left: as when a node goes down."""
    _, out = slow_job
    jobs = read_jobs(out)
    assert jobs is not None
    for process in descendants(int(jobs.jobs["slow--seed1"].id)):
        os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while main(["compare", "--collect", str(out), "--json"]) == 0 and time.monotonic() < deadline:
        capsys.readouterr()
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert "is gone without an exit code (killed, or cancelled); last log line: begins with" in failed["reason"]


def descendants(process: int) -> list[int]:
    """A process and all that it started, from the top."""
    found = [process]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def test_nothing_of_ours_is_pickled(tmp_path: Path) -> None:
    path, out = recipe(tmp_path, "QKV"), tmp_path / "out"
    assert main(["compare", path, "--out", str(out), "--cluster", "local"]) == 0
    wait_for(out, "qkv--seed1")
    (file,) = (out / "cluster").glob("*_submitted.pkl")
    modules = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            modules.add(module.split(".")[0])
            return super().find_class(module, name)

    Noting(io.BytesIO(file.read_bytes())).load()
    assert modules == {"submitit"}


# -- SLURM, played by scripts ------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch keeps what it is given, as job 70; sacct and squeue say what `sacct.txt` and `squeue.txt` say."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    scripts = {
        "sbatch": f"cp $1 {folder}/script.sh; echo Submitted batch job 70",
        "sacct": f"cat {folder}/sacct.txt 2>/dev/null || exit 1",
        "squeue": f"cat {folder}/squeue.txt 2>/dev/null || exit 1",
        "srun": "true",
    }
    for name, text in scripts.items():
        file = folder / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_slurm(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = recipe(tmp_path, "QKV", "QV", "MQA", "GQA"), tmp_path / "out"
    options = ["timeout_min=90", "gpus_per_node=2", "cpus_per_task=6", "slurm_partition=long",
               "slurm_additional_parameters={account: lab}"]  # fmt: skip
    arguments = [text for option in options for text in ("--cluster-options", option)]
    command = ["compare", path, "--out", str(out), "--cluster", "slurm", "--jobs", "3", *arguments]
    assert main([*command, "--launcher", "torchrun --standalone --nproc_per_node 2"]) == 0
    script = (slurm / "script.sh").read_text()
    for line in ("--time=90", "--partition=long", "--account=lab", "--array=0-3%3", "--cpus-per-task=6"):
        assert f"#SBATCH {line}" in script
    assert "#SBATCH --gpus-per-node=2" in script or "gpu:2" in script
    jobs = read_jobs(out)
    assert jobs is not None
    assert {slug: job.id for slug, job in jobs.jobs.items()} == {
        "qkv--seed1": "70_0", "qv--seed1": "70_1", "mqa--seed1": "70_2", "gqa--seed1": "70_3",
    }  # fmt: skip
    assert yaml.safe_load((out / "plans/qv--seed1.yaml").read_text())["train"]["threads"] == 6
    pickled = (out / "cluster").rglob("*.pkl")
    assert all(b"torchrun" in file.read_bytes() and b"OMP_NUM_THREADS=6" in file.read_bytes() for file in pickled)

    # nothing is known yet: the jobs wait
    assert main(["compare", "--collect", str(out)]) == 0
    assert "4 runs: 4 waiting" in capsys.readouterr().err

    # one of each: waiting (squeue, for accounting is slow), running, cancelled, out of memory
    (slurm / "squeue.txt").write_text("70_0|PENDING\n")
    (slurm / "sacct.txt").write_text("70_1|RUNNING\n70_2|CANCELLED by 1000\n70_3|OUT_OF_MEMORY\n")
    (out / "logs").mkdir(exist_ok=True)
    (out / "logs/gqa--seed1.log").write_text("step 3/6  loss 1.0\n")
    assert main(["compare", "--collect", str(out), "--json"]) == 1
    printed = capsys.readouterr()
    assert "4 runs: 1 waiting, 1 running, 2 failed" in printed.err
    assert [run["reason"] for run in json.loads(printed.out)["failed"]] == [
        "job 70_2 ended as CANCELLED; its log is empty",
        "job 70_3 ended as OUT_OF_MEMORY; last log line: step 3/6  loss 1.0",
    ]

    # long after submission, and nobody knows the job
    for name in ("sacct.txt", "squeue.txt"):
        (slurm / name).unlink()
    monkeypatch.setattr(cluster, "QUEUE_SECONDS", 0.0)
    assert main(["compare", "--collect", str(out)]) == 1
    assert "job 70_0 is gone without an exit code" in capsys.readouterr().err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = recipe(tmp_path, "QKV"), str(tmp_path / "out")

    def refused(*arguments: str) -> str:
        assert main(["compare", *arguments]) == 2
        return capsys.readouterr().err

    assert "--cluster 'pbs': allowed are slurm, local" in refused(path, "--out", out, "--cluster", "pbs")
    assert "give each job a limit" in refused(path, "--out", out, "--cluster", "slurm")
    local = [path, "--out", out, "--cluster", "local", "--cluster-options"]
    assert "not submitted: Unknown executor 'no'" in refused(*local, "no_such=1")
    assert 'Parameter "timeout_min" expected type' in refused(*local, "timeout_min=long")
    assert "expected NAME=VALUE" in refused(*local, "timeout_min")
    assert "--cluster-options without --cluster" in refused(path, "--cluster-options", "timeout_min=1")
    assert "RECIPE is missing" in refused("--out", out)
    assert "stand alone" in refused(path, "--collect", out)
    assert "holds no comparison" in refused("--collect", str(tmp_path))
    assert "holds no comparison" in refused("--retry-failed", str(tmp_path))
    assert read_jobs(Path(out)) is None
    assert "was not submitted to a cluster" in refused("--retry-failed", out)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'qvattn[cluster]'" in refused(path, "--out", out, "--cluster", "local")


def test_half_a_file_of_jobs(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"cluster": "slurm", "jobs": {"a": 3}}')
    with pytest.raises(UserError, match=r"cluster\.json is not what `qvattn compare --cluster` writes"):
        read_jobs(tmp_path)


def test_options() -> None:
    given = ["timeout_min=60", "slurm_partition=gpu", "slurm_additional_parameters={account: a=b, qos: 1}"]
    assert parse_options(given) == {
        "timeout_min": 60,
        "slurm_partition": "gpu",
        "slurm_additional_parameters": {"account": "a=b", "qos": 1},
    }


def test_the_shell_of_a_job(tmp_path: Path) -> None:
    """It outlives a signal to the whole group until the run has ended, and says how."""
    import subprocess

    run = lab.GridRun(
        name="x", slug="x", seed=1, directory=tmp_path / "x", log=tmp_path / "x.log",
        command=(sys.executable, "-c", textwrap.dedent("""
            import signal, sys, time
            signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(130)))
            print("ready", flush=True)
            time.sleep(60)
        """)),
    )  # fmt: skip
    (tmp_path / "cluster").mkdir()
    process = subprocess.Popen(cluster.job_command(run, tmp_path, 1), start_new_session=True)
    deadline = time.monotonic() + 60
    while not (run.log.exists() and "\nready" in run.log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 130
    jobs = cluster.Jobs(
        cluster="local", options={}, launcher=(), jobs={"x": cluster.Job(id=str(process.pid), submitted=0)}
    )
    (status,) = cluster.statuses_of([run], jobs, tmp_path)
    assert status.reason == "stopped before its end (a limit of the cluster, or cancelled), saved; last log line: saved"
