"""A run from recipe to results: guards the run directory, prepares, trains, evaluates, writes results.json.

The run directory is refused when it holds anything, unless it is to be resumed or overwritten; nothing that is not part
of a run is ever deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers.utils import logging as transformers_logging

from ..decode.rate import decode_rate
from ..decode.score import score_translations
from ..errors import UserError
from ..files import discard, discard_drafts, explained, write_atomically
from ..models import QvattnModel
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    choose_checkpoint,
    discard_after,
    find_checkpoint,
    whole_checkpoint,
)
from .encoded import ENCODED
from .environment import describe_environment
from .export import export_checkpoint
from .launch import from_launcher
from .loop import Outcome, Trainer, TrainingError, make_accelerator
from .prepare import Prepared, build_model, load_weights, prepare
from .processes import ElsewhereError, Processes
from .recipe import Recipe, changed_keys, dump_recipe, load_recipe
from .sharding import is_divided, whole_weights

RUN_FILES = (
    "results.json",
    "checkpoints",
    "tensorboard",
    "history.csv",
    ENCODED,
    "tokenizer.json",
    "tokenizer_target.json",
    "environment.json",
    "recipe.yaml",
)
"""In the order in which they are deleted: what is left half-way is a run that has only begun, never a complete one."""
NOT_OURS_BUT_HARMLESS = ("log.txt",)
"""May lie in a run directory that counts as empty: whoever starts a run may send its output there."""

PLAIN_PROCESSES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
)


def run_training(
    recipe: Recipe,
    run_dir: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    seed: int | None = None,
    stop_at: int | None = None,
) -> dict[str, Any]:
    """Train one model and return what results.json holds.

    resume: continue from the newest checkpoint (from the start when there is none; returns at once when complete).
    overwrite: delete what an earlier run left in `run_dir`. seed: takes the place of `train.seed`.
    stop_at: save a checkpoint after that step and return, as if a signal had come.

    `status` is `complete` (with `stopped_early`), or `interrupted` after SIGTERM, Ctrl-C or `stop_at`.
    Raises `UserError` for what the user can mend, `TrainingError` and `CheckpointError` after writing `failed` to
    results.json; checkpoints written before that are intact.
    """
    if resume and overwrite:
        raise UserError("resume and overwrite exclude each other: give one of them")
    if seed is not None:
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    transformers_logging.disable_progress_bar()  # saving a small model needs none, and it tears the log lines
    run_dir = Path(run_dir)
    recipe = recipe.model_copy(update={"train": from_launcher(recipe.train)})
    accelerator = make_accelerator(recipe.train)
    if accelerator.distributed_type not in PLAIN_PROCESSES:
        raise UserError(
            f"launched as {accelerator.distributed_type.value}: checkpoints can be resumed exactly with "
            f"{', '.join(kind.value for kind in PLAIN_PROCESSES)}"
        )
    processes = Processes(accelerator, recipe.train.process_timeout)
    try:
        with processes.contact(), _named(run_dir), ExitStack() as held:
            with processes.together():
                if processes.is_main:
                    held.enter_context(locked(run_dir))
                    _open_run_dir(run_dir, recipe, resume=resume, overwrite=overwrite)
            finished = processes.gather(_finished(run_dir) if resume and processes.is_main else None)[0]
            return finished or _train(recipe, run_dir, accelerator, processes, resume=resume, stop_at=stop_at)
    except ElsewhereError as error:
        raise SystemExit(1) from error  # the process that failed has said why


def _train(
    recipe: Recipe, run_dir: Path, accelerator: Accelerator, processes: Processes, *, resume: bool, stop_at: int | None
) -> dict[str, Any]:
    begun = time.perf_counter()
    checkpoint = None
    if resume:
        with processes.together():
            checkpoint = _checkpoint(run_dir) if processes.is_main else None
        checkpoint = processes.gather(checkpoint)[0]
    prepared = prepare(recipe, run_dir, checkpoint, processes)
    with processes.together():
        _check(checkpoint, prepared)
        if processes.is_main:
            _clean_for_start(run_dir, checkpoint)
            prepared.tokenizers.save(run_dir)
            environment = describe_environment(
                device=accelerator.device,
                processes=accelerator.num_processes,
                precision=recipe.train.precision,
                seed=recipe.train.seed,
            )
            write_json(run_dir / "environment.json", environment)
    base = _facts(recipe, prepared)
    try:
        with _scalars(recipe, run_dir, accelerator, checkpoint) as scalars:
            trainer = Trainer(
                model=prepared.model,
                spec=recipe.train,
                plan=prepared.plan,
                data=prepared.train,
                valid=prepared.valid,
                accelerator=accelerator,
                run_dir=run_dir,
                save_model=_saver(recipe, prepared, processes),
                resume=checkpoint,
                facts=_fingerprints(prepared),
                scalars=scalars,
                score=_valid_score(recipe, prepared, processes),
                name=recipe.name,
                processes=processes,
            )
            outcome = trainer.train(stop_at=stop_at)
            results = base | _outcome(outcome, time.perf_counter() - begun)
            if results["status"] == "complete":
                with processes.together():
                    if processes.is_main:
                        _export(recipe, prepared, run_dir)
                results["test"] = _test_scores(recipe, prepared, trainer, run_dir, outcome)
                if accelerator.num_processes == 1:  # several would share the machine, or wait for each other
                    seconds = min(1.0, results["seconds"] / 20)
                    results["decode_tokens_per_second"] = decode_rate(
                        prepared.model, prepared.valid[0], seconds=seconds
                    )
    except (TrainingError, CheckpointError, OSError) as error:
        if processes.is_main:
            _try_to_write_failure(run_dir, base, error)
        elif isinstance(error, TrainingError):  # all processes see the same numbers
            raise ElsewhereError(str(error)) from error
        raise
    if processes.is_main:
        write_json(run_dir / "results.json", results)
        if results["status"] == "complete" and (run_dir / ENCODED).is_dir():
            discard(run_dir / ENCODED)
    return results


def _facts(recipe: Recipe, prepared: Prepared) -> dict[str, Any]:
    """The part of results.json that is known before training."""
    return {
        "status": "failed",
        "task": recipe.task,
        "name": recipe.name,
        "variant": prepared.variant,
        "seed": recipe.train.seed,
        "parameters": {
            "total": prepared.model.num_parameters(),
            "attention": prepared.model.attention_parameters(),
        },
        "cache_elements_per_token": {
            "layer": prepared.model.cache_elements_per_token_layer(),
            "model": prepared.model.cache_elements_per_token(),
        },
        "data": prepared.notes,
    }


def _outcome(outcome: Outcome, seconds: float) -> dict[str, Any]:
    progress = outcome.progress
    return {
        "status": "interrupted" if outcome.reason == "interrupted" else "complete",
        "stopped_early": outcome.reason == "early-stopped",
        "steps": progress.step,
        "epochs": progress.epoch,
        "tokens": progress.tokens,
        "train_tokens_per_second": progress.tokens / progress.train_seconds if progress.train_seconds else None,
        "decode_tokens_per_second": None,
        "seconds": progress.seconds,
        "session_seconds": seconds,
        "valid": progress.last_valid,
        "best": progress.best,
        "test": None,
    }


def _test_scores(
    recipe: Recipe, prepared: Prepared, trainer: Trainer, run_dir: Path, outcome: Outcome
) -> dict[str, Any] | None:
    """Scores of the best checkpoint on the test split, if the corpus has one."""
    if not prepared.test:
        return None
    best = outcome.progress.best
    if best is not None and best["step"] != outcome.progress.step:
        load_weights(prepared.model, find_checkpoint(run_dir))
    step = best["step"] if best is not None else outcome.progress.step
    scores = {"step": step, **trainer.evaluate(prepared.test).as_dict()}
    if recipe.train.score_test:
        model = _whole_model(recipe, prepared, trainer.processes)
        if model is not None:
            scores |= score_translations(
                model,
                prepared.tokenizers,
                prepared.test_pairs,
                recipe.train.score_beam,
                max_new_tokens=recipe.data.max_length,
            )
        trainer.processes.wait()
    return scores


def _valid_score(recipe: Recipe, prepared: Prepared, processes: Processes) -> Callable[[], dict[str, float]] | None:
    """What gives valid_bleu: the first sentences of the validation split, translated greedily."""
    if recipe.train.score_valid is None:
        return None
    pairs = prepared.valid_pairs[: recipe.train.score_valid]

    def score() -> dict[str, float]:
        model = _whole_model(recipe, prepared, processes)
        if model is None:
            return {}
        longest = recipe.data.max_length
        scores = score_translations(model, prepared.tokenizers, pairs, beam=1, max_new_tokens=longest)
        return {"valid_bleu": scores["bleu"]}

    return score


def _whole_model(recipe: Recipe, prepared: Prepared, processes: Processes) -> QvattnModel | None:
    """A model to translate with, on the main process alone; a divided one is put together for it, by all of them."""
    if not is_divided(prepared.model):
        return prepared.model if processes.is_main else None
    weights = whole_weights(prepared.model, keep=processes.is_main)
    if not processes.is_main:
        return None
    whole = build_model(recipe, prepared.tokenizers)
    whole.load_state_dict(weights)
    return whole.to(prepared.model.device).eval()


def _saver(recipe: Recipe, prepared: Prepared, processes: Processes) -> Callable[[Path], Any]:
    """What writes the model into a checkpoint; beside shards it is the config alone."""
    divided = recipe.train.parallel == "fsdp2" and processes.count > 1
    return prepared.model.config.save_pretrained if divided else prepared.model.save_pretrained


def _export(recipe: Recipe, prepared: Prepared, run_dir: Path) -> None:
    """After the last step: what lies in shards as one file too, so that every command reads it."""
    for checkpoint in {choose_checkpoint(run_dir, which) for which in ("best", "last")}:
        if not checkpoint.exported:
            export_checkpoint(checkpoint, build_model(recipe, prepared.tokenizers))


def _fingerprints(prepared: Prepared) -> dict[str, str]:
    """What a checkpoint's weights mean something with, and with nothing else."""
    digest = hashlib.sha256()
    for tokenizer in {id(t): t for t in (prepared.tokenizers.source, prepared.tokenizers.target)}.values():
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return {"data": prepared.plan.fingerprint, "tokenizer": digest.hexdigest()[:16]}


def _checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest whole checkpoint; says which newer ones are passed over."""
    checkpoint, damaged = whole_checkpoint(run_dir)
    if checkpoint:
        for wrong in damaged:
            print(f"warning: {wrong}; going on from step {checkpoint.step} instead", file=sys.stderr, flush=True)
    return checkpoint


def _check(checkpoint: Checkpoint | None, prepared: Prepared) -> None:
    """Raise `UserError` unless the checkpoint was trained on the same data, as the same ids."""
    if checkpoint is None:
        return
    before, now = checkpoint.state().get("facts", {}), _fingerprints(prepared)
    for fact, what in (("data", "the training data"), ("tokenizer", "the tokenizer")):
        if fact == "data" or fact in before:
            if before.get(fact) == now[fact]:
                continue
            raise UserError(
                f"cannot resume {checkpoint.path}: {what} changed (fingerprint {before.get(fact)} then, "
                f"{now[fact]} now); put back what it was, or start anew with --overwrite"
            )


# -- the run directory -------------------------------------------------------------------------------------------


def _open_run_dir(run_dir: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    contents = [path.name for path in run_dir.iterdir() if not path.name.startswith(".")]
    contents = [name for name in contents if name not in NOT_OURS_BUT_HARMLESS]
    if overwrite:
        foreign = sorted(set(contents) - set(RUN_FILES))
        if foreign:
            raise UserError(f"run directory {str(run_dir)!r}: {foreign[0]!r} is not part of a run; not overwriting")
        clear_run(run_dir)
    elif contents and not resume:
        raise UserError(
            f"run directory {str(run_dir)!r} is not empty (it holds {sorted(contents)[0]!r}): "
            "choose another, or give --resume or --overwrite"
        )
    saved = run_dir / "recipe.yaml"
    if resume and saved.exists():
        before = load_recipe(saved)
        if changed := changed_keys(before, recipe):
            raise UserError(f"cannot resume {str(run_dir)!r}: the recipe changed in {', '.join(changed)}")
    elif resume and contents:
        raise UserError(f"cannot resume {str(run_dir)!r}: it holds no recipe.yaml; start anew with --overwrite")
    _refuse_links(run_dir)
    write_atomically(saved, dump_recipe(recipe))


def clear_run(run_dir: Path) -> None:
    """Delete what a run left, and nothing else."""
    discard_drafts(run_dir)
    for name in RUN_FILES:
        path = run_dir / name
        if path.exists() or path.is_symlink():
            discard(path)


def _refuse_links(run_dir: Path) -> None:
    """A run directory that somebody gave away must not make its user write or delete elsewhere."""
    for name in ("checkpoints", "tensorboard"):
        path = run_dir / name
        if path.is_symlink():
            raise UserError(
                f"run directory {str(run_dir)!r}: {name} is a link (to {os.readlink(path)!r}), so the run would write "
                "outside of it; remove the link, or put the whole run directory there"
            )


def _finished(run_dir: Path) -> dict[str, Any] | None:
    try:
        results = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return results if isinstance(results, dict) and results.get("status") == "complete" else None


def _clean_for_start(run_dir: Path, checkpoint: Checkpoint | None) -> None:
    (run_dir / "results.json").unlink(missing_ok=True)
    for folder in (run_dir, run_dir / "checkpoints"):
        discard_drafts(folder)
    discard_after(run_dir, checkpoint.step if checkpoint else 0)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps a second process out of the run directory; the system lifts the lock when a process dies."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"run directory {str(run_dir)!r}: {explained(error)}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(
            f"run directory {str(run_dir)!r} is in use by another process; wait until it ends, or choose another"
        ) from error
    finally:
        os.close(handle)


@contextmanager
def _named(run_dir: Path) -> Iterator[None]:
    """Says of what the system refuses which file it was, and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{explained(error, run_dir)}. Then go on with --resume") from error


@contextmanager
def _scalars(recipe: Recipe, run_dir: Path, accelerator: Accelerator, checkpoint: Checkpoint | None) -> Iterator[Any]:
    if not (recipe.train.tensorboard and accelerator.is_main_process):
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter

    purge = checkpoint.step + 1 if checkpoint else None
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
    try:
        yield writer
    finally:
        writer.close()


def _try_to_write_failure(run_dir: Path, base: dict[str, Any], error: BaseException) -> None:
    with suppress(OSError):  # the disk may be full; the error itself is about to be raised
        write_json(run_dir / "results.json", {**base, "reason": str(error)})


def write_json(path: Path, value: Any) -> None:
    """Replace `path` in one step by strict JSON (numbers that are not finite become null)."""
    write_atomically(path, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
