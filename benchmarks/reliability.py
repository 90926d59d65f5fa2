"""Everything that docs/reliability.md says, done again: kills, faults, hostile files, the soak, the demo run.

    python benchmarks/reliability.py                     all parts, then the page (under an hour on two cores)
    python benchmarks/reliability.py --only soak         one part again; what the others gave is kept
    python benchmarks/reliability.py --only page         the page again

The tests are those of the suite (tests/faults, tests/safety, tests/soak) with larger numbers. What a part gave is kept
in docs/results/reliability.json, from which the page is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs/results/reliability.json"
PAGE = ROOT / "docs/reliability.md"
TESTS = {"kills": "kill", "faults": "not kill", "safety": "", "soak": ""}
"""Part -> which tests of its directory."""
FOLDERS = {"kills": "faults", "faults": "faults", "safety": "safety", "soak": "soak"}
VARIANT = "qv-ka-2x-agf-pcm-v"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*TESTS, "demo", "page"], help="this part; repeat for more")
    parser.add_argument("--examples", type=int, default=300, help="inputs of every fuzzing test")
    parser.add_argument("--kills", type=int, default=24, help="random moments of every killing test")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the soak")
    parser.add_argument("--soak-minutes", type=float, default=120, help="when the soak ends in any case")
    parser.add_argument("--demo-steps", type=int, default=400, help="steps of the demo run that is killed five times")
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    for part in args.only or [*TESTS, "demo"]:
        if part != "page":
            begun = time.perf_counter()
            given = demo(args.demo_steps) if part == "demo" else tests(part, args)
            record[part] = {**where(), "minutes": round((time.perf_counter() - begun) / 60, 1), **given}
            RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def where() -> dict[str, Any]:
    """The machine, the commit and the day."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {model.partition(':')[2].strip() or platform.machine()}",
        "python": platform.python_version(),
    }


def tests(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a part's tests with the larger numbers; their counts and the last line of pytest."""
    with tempfile.TemporaryDirectory() as counts:
        numbers = {"EXAMPLES": args.examples, "KILLS": args.kills, "COUNTS": counts}
        numbers |= {"REQUESTS": args.requests, "SECONDS": 60 * args.soak_minutes}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{f"QVATTN_{k}": str(v) for k, v in numbers.items()}}
        chosen = ["-k", TESTS[part]] if TESTS[part] else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{FOLDERS[part]}", *chosen]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        print(done.stdout[-3000:], file=sys.stderr)
        total: Counter[tuple[str, str]] = Counter()
        for file in Path(counts).glob("*.json"):
            total.update({(what, outcome): number for what, outcome, number in json.loads(file.read_text())})
    counted = [[what, outcome, number] for (what, outcome), number in sorted(total.items())]
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"tests": done.stdout.strip().splitlines()[-1], "failed": failed, "counts": counted}


def demo(steps: int) -> dict[str, Any]:
    """The demo recipe on two processes, killed five times at random, beside an undisturbed run on two processes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from faults.two_processes import killed_run, same_weights, start

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        changes = [
            f"train.steps={steps}",
            "train.save_every=10",
            "train.keep_last=2",
            "train.tensorboard=false",
        ]
        command = ["train", "demo", "--variant", VARIANT, *changes]
        undisturbed = start([*command, "--run-dir", str(folder / "whole")], folder / "log")
        if undisturbed.wait() != 0:
            raise SystemExit((folder / "log").read_text()[-4000:])
        print("undisturbed run: done", file=sys.stderr)
        killed = [*command, "--run-dir", str(folder / "run"), "--resume"]
        say = lambda text: print(text, file=sys.stderr)  # noqa: E731
        draw = random.Random(8)
        hit = killed_run(killed, folder / "run", folder / "log2", kills=5, steps=steps, pause=2, draw=draw, say=say)
        tensors = same_weights(folder / "whole", folder / "run")
        accuracies = [
            json.loads((folder / name / "results.json").read_text())["test"]["accuracy"] for name in ("whole", "run")
        ]
    return {"command": " ".join(command), "hit": hit, "tensors": tensors, "accuracy": accuracies}


def page(record: dict[str, Any]) -> str:
    """docs/reliability.md."""
    sections = [HEAD]
    for part, title in (
        ("kills", "Killed with -9"),
        ("demo", "The demo run on two processes"),
        ("faults", "Other faults"),
        ("safety", "Hostile files"),
        ("soak", "Soak of the decode engine"),
    ):
        if part in record:
            sections.append(f"## {title}\n\n{TEXTS[part]}\n\n{body(part, record[part])}\n\n{source(record[part])}")
    return "\n\n".join([*sections, FOOT]) + "\n"


def body(part: str, given: dict[str, Any]) -> str:
    if part == "demo":
        hits = "\n".join(f"* kill {number}: {hit}" for number, hit in enumerate(given["hit"], start=1))
        equal = (
            f"All {given['tensors']} tensors of the final weights are equal bit for bit to those of the undisturbed run"
        )
        accuracies = " and ".join(f"{100 * a:.3f} %" for a in given["accuracy"])
        return f"`qvattn {given['command']}`\n\n{hits}\n\n{equal}; test accuracy {accuracies}."
    lines = ["| what | outcome | count |", "|:--|:--|--:|"]
    lines += [f"| {what} | {outcome} | {number:,} |" for what, outcome, number in given["counts"]]
    if given["failed"]:
        lines += ["", "Tests that failed in this run: " + ", ".join(f"`{name}`" for name in given["failed"]) + "."]
    if "note" in given:
        lines += ["", given["note"]]
    return "\n".join(lines)


def source(given: dict[str, Any]) -> str:
    tests = f"; {given['tests'].strip('= ')}" if "tests" in given else ""
    place = f"commit {given['commit']}, {given['machine']}, Python {given['python']}"
    return f"<small>{given['date']}, {place}{tests}.</small>"


HEAD = """# Reliability

What was tried to break runs, files and the decode engine, and how often it ended how. Every table below is written by

    python benchmarks/reliability.py

(`make reliability`) from `docs/results/reliability.json`; the tests behind it are in `tests/faults`, `tests/safety`
and `tests/soak` and run, with smaller numbers, in the test suite."""

TEXTS = {
    "kills": """\
Real processes are killed at random moments: of their time, or some milliseconds into a checkpoint. After every kill
the newest checkpoint must be whole (its SHA-256 sums are read again) and loadable; the next start goes on, and the
final weights, the optimizer's moments, results and history must be those of an undisturbed run, bit for bit. The
phase is what the files tell after the kill. Beside that, every operation that writes is repeated in a fork that
kills itself before its n-th file operation, for every n. A comparison is killed alone: its runs must end by
themselves and be resumed.""",
    "demo": """\
The recipe of `qvattn demo` on two processes (gloo, one machine) through `torchrun`, killed five times at random:
all processes at once, or one of them, after which the launcher must end the job by itself. Checkpoints every 10
steps.""",
    "faults": """\
A full and a read-only disk are real mounts (of memory); damaged checkpoints are cut short, emptied, overwritten,
lost or flipped by one bit at a random place. A damaged checkpoint is passed over with a warning for the one before
it, from which training comes to the same bits; where there is none, it is refused with the file's name. Whoever
reads a model (`translate`, `check`, ...) is never given a damaged one, nor another in its place.""",
    "safety": """\
Invented inputs: valid files changed in a place or two (values of other types, of absurd size, nested thousands
deep), scrambled bytes, and files made to run code. "Accepted" means that a change was harmless and the result
passed the checks; "refused" is a message that names the file. Anything else (another exception, more than some
hundred MB, a crash) fails the test. The kernels' arguments are tried in a process of its own with bounded memory.""",
    "soak": """\
Greedy, beams, sampling, rows that take the next source, crops and forks, on eight small models of several variants
and positions, in one process. Every tenth request is compared, row by row, with the same request alone, without
padding or cache neighbours. The resident memory is sampled every 50 requests.""",
}

FOOT = """## What this does not show

* Killing a process is not a power cut: what a disk does with writes that it has confirmed was not tried. Files are
  flushed (`fsync`) before they are renamed.
* Two processes on one machine, over gloo on a CPU. No GPU, no NCCL, no network between machines, no network file
  system; the lock on a run directory (`flock`) is only as good as the file system's.
* A checkpoint's sums tell of accidents, not of malice: who can change a file can change its sums. Weights are
  safetensors and nothing is unpickled but tensors (`weights_only`), so a hostile checkpoint can be wrong, not run
  code.
* Fuzzing finds what it finds: the inputs are random changes of valid files, without coverage feedback.
* The soak's models are small, and its memory that of one process on one kind of machine."""

if __name__ == "__main__":
    main()
