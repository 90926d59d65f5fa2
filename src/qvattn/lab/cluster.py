"""The runs of a comparison as jobs of a cluster, one job each: submitted through submitit, and looked after from disk.

A job is a plain command line in a shell, so what submitit pickles for itself holds no code or data of ours, and nothing
here unpickles anything: how a run ended is told by its run directory, its log, a file with its exit code, and, where
these are silent, by the queue. Must never submit a run that still waits or runs, and never wait for a job.

    DIR/cluster.json            which cluster, with what options, and the job of each run
    DIR/cluster/                submitit's files        DIR/cluster/<slug>.exit   the exit code of a run's last job
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from qvattn.errors import UserError
from qvattn.files import write_atomically
from qvattn.lab.grid import THREAD_VARIABLES, GridRun, RunState, RunStatus, describe_exit, last_line
from qvattn.lab.runs import is_complete, read_json
from qvattn.untrusted import parse_yaml

Cluster = Literal["slurm", "local"]
CLUSTERS: tuple[Cluster, ...] = get_args(Cluster)

JOBS_NAME, FOLDER = "cluster.json", "cluster"
WEEK_MINUTES = 7 * 24 * 60
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
QUEUE_SECONDS = 120.0
"""How long a queue may take to know of a job that was just submitted."""

# The trap lets the shell outlive a signal to its whole group, until the run has saved and ended.
SHELL = """
trap : TERM INT USR1 USR2
log=$0 code=$1; shift
rm -f "$code"
echo "\\n\\$ $*" >>"$log"
"$@" >>"$log" 2>&1 </dev/null
status=$?
echo $status >"$code.part" && mv "$code.part" "$code"
exit $status
"""


class Job(BaseModel):
    """The last job of a run: its id in the queue (a process id, locally), and when it was submitted (Unix time)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    submitted: float


class Jobs(BaseModel):
    """What was submitted from one comparison: `jobs` maps a run's slug to its last job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: Cluster
    options: dict[str, Any]
    launcher: tuple[str, ...]
    jobs: dict[str, Job]


def read_jobs(out: Path) -> Jobs | None:
    """The jobs of a comparison, None where it was never submitted. Raises `UserError` for a file that is not whole."""
    content = read_json(out / JOBS_NAME)
    if not content:
        return None
    try:
        return Jobs.model_validate(content)
    except ValidationError as error:
        raise UserError(
            f"{out / JOBS_NAME} is not what `qvattn compare --cluster` writes; delete it to submit anew"
        ) from error


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """`["timeout_min=60", "slurm_partition=gpu"]` as a mapping; values are read as YAML."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"--cluster-options {pair!r}: expected NAME=VALUE, such as timeout_min=60")
        try:
            options[key.strip()] = parse_yaml(text)
        except ValueError as error:
            raise UserError(f"--cluster-options {pair!r}: the value is not valid YAML") from error
    return options


def submit(runs: Sequence[GridRun], jobs: Jobs, out: Path, *, threads: int, name: str) -> Jobs:
    """Submit each run as a job (of one array, where the cluster has such) and note the jobs in `out`.

    Raises `UserError` when submitit is missing, an option is unknown, or the cluster refuses.
    """
    if jobs.cluster == "slurm" and not {"timeout_min", "slurm_time"} & jobs.options.keys():
        raise UserError("--cluster slurm: give each job a limit, such as --cluster-options timeout_min=600")
    if not runs:
        return jobs
    submitit = _submitit()
    folder = (out / FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        run.log.parent.mkdir(parents=True, exist_ok=True)
        _exit_file(run, out).unlink(missing_ok=True)
    now = time.time()
    with _refusals():
        executor = submitit.AutoExecutor(folder=folder, cluster=jobs.cluster)
        defaults = {"name": name, "timeout_min": WEEK_MINUTES, "cpus_per_task": threads, "stderr_to_stdout": True}
        if jobs.cluster == "slurm" and "slurm_time" in jobs.options:
            del defaults["timeout_min"]
        executor.update_parameters(**{**defaults, **jobs.options})
        with executor.batch():
            submitted = [
                executor.submit(submitit.helpers.CommandFunction(job_command(run, out, threads), verbose=False))
                for run in runs
            ]
        ids = {run.slug: str(job.job_id) for run, job in zip(runs, submitted, strict=True)}
    new = {slug: Job(id=job, submitted=now) for slug, job in ids.items()}
    done = jobs.model_copy(update={"jobs": {**jobs.jobs, **new}})
    write_atomically(out / JOBS_NAME, done.model_dump_json(indent=1) + "\n")
    return done


def job_command(run: GridRun, out: Path, threads: int) -> list[str]:
    """What a job does: the run's command, its output into the run's log, its exit code into a file."""
    settings = dict.fromkeys(THREAD_VARIABLES, str(threads))
    settings |= {"QVATTN_TRACEBACK": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    command = ["env", *(f"{key}={value}" for key, value in settings.items()), *run.command]
    if "--resume" not in command:
        command.append("--resume")  # a job that the cluster starts again goes on
    return ["/bin/sh", "-c", SHELL, str(run.log.resolve()), str(_exit_file(run, out)), *command]


def statuses_of(runs: Sequence[GridRun], jobs: Jobs | None, out: Path) -> list[RunStatus]:
    """How each run is: done, failed (and why), running, or waiting (submitted or not)."""
    states = _queue_states(runs, jobs, out)
    found = []
    for run in runs:
        status = RunStatus(run=run)
        status.refresh()
        status.state, status.reason = _state(run, jobs, out, states.get(run.slug, ""))
        found.append(status)
    return found


def is_submitted(status: RunStatus, jobs: Jobs) -> bool:
    """Whether the run has a job that waits or runs."""
    return status.run.slug in jobs.jobs and status.state in (RunState.WAITING, RunState.RUNNING)


def _state(run: GridRun, jobs: Jobs | None, out: Path, queue: str) -> tuple[RunState, str]:
    if is_complete(run.directory):
        return RunState.KEPT, ""
    if jobs is None or run.slug not in jobs.jobs:
        return RunState.WAITING, ""
    said = last_line(run.log)
    log = f"; last log line: {said}" if said else "; its log is empty"
    code = _exit_code(run, out)
    if code is not None:
        if code == 130:
            return RunState.FAILED, f"stopped before its end (a limit of the cluster, or cancelled), saved{log}"
        ended = describe_exit(code if code < 128 else 128 - code) if code else "ended without complete results"
        return RunState.FAILED, f"{ended}{log}"
    if queue in WAITING:
        return RunState.WAITING, ""
    if queue in RUNNING:
        return RunState.RUNNING, ""
    job = jobs.jobs[run.slug]
    if queue:
        return RunState.FAILED, f"job {job.id} ended as {queue}{log}"
    if jobs.cluster == "slurm" and time.time() - job.submitted < QUEUE_SECONDS:
        return RunState.WAITING, ""
    return RunState.FAILED, f"job {job.id} is gone without an exit code (killed, or cancelled){log}"


def _exit_file(run: GridRun, out: Path) -> Path:
    return out.resolve() / FOLDER / f"{run.slug}.exit"


def _exit_code(run: GridRun, out: Path) -> int | None:
    """The exit code of the last job, None before it has ended."""
    try:
        return int(_exit_file(run, out).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


# -- what the queue says -----------------------------------------------------------------------------------------


def _queue_states(runs: Sequence[GridRun], jobs: Jobs | None, out: Path) -> dict[str, str]:
    """What the cluster says of the runs' jobs, in SLURM's words; empty where it says nothing."""
    if jobs is None:
        return {}
    ids = {run.slug: jobs.jobs[run.slug].id for run in runs if run.slug in jobs.jobs}
    if jobs.cluster == "local":
        return {slug: "RUNNING" if _is_alive(job) else "" for slug, job in ids.items()}
    states = _ask(["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(ids.values())], "|")
    # without accounting only the queue of living jobs is there to be asked
    states |= _ask(["squeue", "-h", "-r", "-o", "%i|%T", "-j", ",".join(ids.values())], "|")
    return {slug: states.get(job, "") for slug, job in ids.items()}


def _ask(command: Sequence[str], separator: str) -> dict[str, str]:
    """Job -> state from a command that prints a line each; empty when it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = [line.split(separator) for line in done.stdout.splitlines() if separator in line]
    return {job.strip(): state.split()[0].rstrip("+") for job, state, *_ in lines if state.strip()}


def _is_alive(process: str) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        os.kill(int(process), 0)
    except (OSError, ValueError):
        return False
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True


# -- submitit ----------------------------------------------------------------------------------------------------


def _submitit() -> Any:
    if importlib.util.find_spec("submitit") is None:
        raise UserError("--cluster needs submitit: pip install 'qvattn[cluster]'")
    import submitit
    import submitit.helpers

    return submitit


@contextmanager
def _refusals() -> Iterator[None]:
    """What submitit or the cluster refuse, as one line for the user."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # AssertionError, NameError, RuntimeError, FailedJobError ...
        text = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--cluster: the jobs were not submitted: {text[:500]}") from error


def checked_cluster(name: str) -> Cluster:
    """The cluster by its name. Raises `UserError` for another one."""
    for cluster in CLUSTERS:
        if cluster == name:
            return cluster
    raise UserError(f"--cluster {name!r}: allowed are {', '.join(CLUSTERS)}")


def merged(options: Mapping[str, Any], *, jobs: int | None, cluster: Cluster) -> dict[str, Any]:
    """The options with --jobs, where it is given, as the number of an array's jobs that run at once."""
    if jobs is None or cluster != "slurm":
        return dict(options)
    return {"slurm_array_parallelism": jobs, **options}
