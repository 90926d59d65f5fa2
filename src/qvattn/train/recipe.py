"""Recipes: one validated YAML file says everything about a run, or about a comparison of runs.

A recipe is read from a path, or by the name of one shipped with the package; `section.key=value` overrides go on top:
the command line beats the file, the file beats the defaults. Every mistake is reported at once, one readable line each.
Nothing here builds a model or touches data: a recipe is only a description, and equal recipes describe equal runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..data import DataSpec
from ..errors import UserError
from ..spec import AttentionSpec, PositionSpec
from ..untrusted import parse_yaml
from .complaints import explain, unknown_key

PLACES = ("encoder", "decoder", "cross")
"""The three attentions of a translation model; an attention section may hold one dict for each."""

ATTENTION_KEYS = tuple(name for name in AttentionSpec.model_fields if name not in ("d_model", "causal"))
POSITION_KEYS = tuple(PositionSpec.model_fields)

METRIC_DIRECTIONS = {"accuracy": "max", "loss": "min", "perplexity": "min"}
"""What "better" means for each validation metric."""

FREE_ON_RESUME = (
    "train.threads",
    "train.device",
    "train.parallel",
    "train.reshard_after_forward",
    "train.process_timeout",
    "train.score_test",
    "train.score_beam",
    "compare",
)
"""Keys that may differ on resume: they describe the machine, or other runs, and not this run."""


WIDEST, DEEPEST = 2**17, 4096
"""Bounds of widths and depths: a slip of a digit is told at once, not by the machine running out of memory."""


def _printable(name: str) -> str:
    """A name stands in terminals, tables and pages; what steers a terminal is no part of a name."""
    if not name.isprintable():
        raise ValueError("allowed are printable characters")
    return name


class _Section(BaseModel):
    """A frozen section of a recipe; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class ModelSpec(_Section):
    """The network: the fields of `TranslationConfig` that are not decided by the data.

    `attention` is one of: a variant's name; one dict of `AttentionSpec` fields for all three attentions; or a dict
    with the keys `encoder`, `decoder`, `cross`, each a name or a dict. `n_heads` and `position` fill in what is unset.
    A causal language model has no encoder: it ignores `encoder_layers` and `share_embeddings`.
    """

    d_model: int = Field(default=128, gt=0, le=WIDEST)
    d_ff: int = Field(default=512, gt=0, le=4 * WIDEST)
    n_heads: int = Field(default=8, gt=0, le=WIDEST)
    encoder_layers: int = Field(default=2, ge=1, le=DEEPEST)
    decoder_layers: int = Field(default=2, ge=1, le=DEEPEST)
    norm: Literal["pre", "post"] = "pre"
    norm_type: Literal["layer", "rms"] = "layer"
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    bias: bool = False
    dropout: float = Field(default=0.1, ge=0, lt=1)
    share_every: int = Field(default=1, ge=1)
    share_embeddings: bool = True
    attention: dict[str, Any] | str = "qkv"
    position: str | dict[str, Any] = "sinusoidal"


class TrainSpec(_Section):
    """Optimisation, validation and checkpoints. Steps are optimiser steps; tokens are target tokens without padding."""

    steps: int = Field(default=1000, gt=0)
    accumulate: int = Field(default=1, ge=1, description="batches (of data.max_tokens) in one step")
    learning_rate: float = Field(default=1e-3, gt=0, description="the peak, reached after warmup_steps")
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    warmup_steps: int = Field(default=200, ge=0)
    final_learning_rate: float = Field(default=0.0, ge=0, description="where the cosine ends")
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(default=1e-9, gt=0)
    clip: float | None = Field(default=1.0, gt=0, description="largest gradient norm; null switches clipping off")
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    validate_every: int = Field(default=200, gt=0)
    report_every: int = Field(default=50, gt=0)
    save_every: int | None = Field(default=None, gt=0, description="null: at every validation")
    keep_last: int = Field(default=2, ge=1)
    best_metric: Literal["accuracy", "loss", "perplexity"] = "accuracy"
    patience: int | None = Field(default=None, ge=1, description="validations without a new best before stopping")
    score_test: bool = Field(default=False, description="BLEU and chrF of the best checkpoint on the test split")
    score_beam: int = Field(default=5, ge=1, description="beams of score_test; 1 is greedy")
    score_valid: int | None = Field(
        default=None, ge=1, description="validation sentences translated greedily at every validation, for valid_bleu"
    )
    seed: int = Field(default=1, ge=0)
    threads: int | None = Field(default=None, ge=1)
    device: Literal["auto", "cpu"] = "auto"
    parallel: Literal["ddp", "fsdp2"] = Field(
        default="ddp", description="with several processes: a whole model on each, or one divided over them"
    )
    reshard_after_forward: bool = Field(default=True, description="fsdp2: let gathered weights go after the forward")
    process_timeout: float = Field(
        default=600.0, gt=0, description="seconds that a process waits for the others in one exchange"
    )
    tensorboard: bool = True

    @field_validator("betas")
    @classmethod
    def _betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("allowed: two numbers, each at least 0 and below 1")
        return betas


Name = Annotated[str, Field(min_length=1, max_length=120), AfterValidator(_printable)]


class VariantSpec(_Section):
    """One row of a comparison: what it changes in `model`.

    An `attention` that names a variant replaces the recipe's; one that does not is laid over it.
    """

    name: Name
    attention: dict[str, Any] | str = Field(default_factory=dict)
    position: str | dict[str, Any] | None = None


class CompareSpec(_Section):
    """The grid of a comparison: every variant with every seed."""

    variants: tuple[VariantSpec, ...] = Field(min_length=1)
    baseline: str
    seeds: tuple[int, ...] = Field(default=(1, 2, 3), min_length=1)
    jobs: int = Field(default=1, ge=1)
    threads: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [variant.name for variant in self.variants]
        slugs = [slugify(name) for name in names]
        if len(set(slugs)) < len(slugs):
            raise ValueError(f"variants: names must differ in letters or digits, got {names}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: must differ, got {list(self.seeds)}")
        if self.baseline not in names:
            raise ValueError(f"baseline: {self.baseline!r} is not a variant's name; allowed: {names}")
        return self


class Recipe(_Section):
    """Everything that decides a run."""

    name: Name
    task: Literal["translation", "causal-lm"] = "translation"
    data: DataSpec
    model: ModelSpec = ModelSpec()
    train: TrainSpec = TrainSpec()
    compare: CompareSpec | None = None

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.data.is_text != (self.task == "causal-lm"):
            raise ValueError(f"data.corpus: task {self.task!r} cannot use {self.data.corpus!r}")
        shared = self.task == "translation" and self.model.share_embeddings
        if shared and not self.data.shared_vocab:
            raise ValueError("model.share_embeddings: true needs data.shared_vocab: true")
        if self.task != "translation" and (self.train.score_test or self.train.score_valid):
            raise ValueError(f"train.score_test, train.score_valid: task {self.task!r} has no translations to score")
        if self.train.parallel == "fsdp2" and self.train.precision == "fp16":
            raise ValueError("train.precision: fp16 cannot be sharded (train.parallel: fsdp2); use bf16 or fp32")
        complaints = _attention_complaints("model", self.model.attention, self.model.position, self.model)
        if self.compare is not None:
            for variant in self.compare.variants:
                attention = _lay_over(self.model.attention, variant.attention)
                position = self.model.position if variant.position is None else variant.position
                complaints += _attention_complaints(
                    f"compare.variants[{variant.name}]", attention, position, self.model
                )
        if complaints:
            raise ValueError("\n  ".join(dict.fromkeys(complaints)))
        return self


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run of a comparison. `slug` is a directory name, unique within the comparison."""

    name: str
    slug: str
    seed: int
    recipe: Recipe


def _attention_complaints(section: str, attention: Any, position: Any, model: ModelSpec) -> list[str]:
    """What is wrong with an attention section, one line each; empty when an `AttentionSpec` can be made of it."""
    complaints = _position_complaints(f"{section}.position", position)
    by_place = isinstance(attention, dict) and any(place in attention for place in PLACES)
    places = attention if by_place else {"": attention}
    for place, given in places.items():
        where = f"{section}.attention" + (f".{place}" if place else "")
        if by_place and place not in PLACES:
            complaints.append(unknown_key(place, f"{section}.attention", PLACES))
            continue
        fields = {"variant": given} if isinstance(given, str) else given
        if not isinstance(fields, dict):
            complaints.append(f"{where}: expected a variant's name or a mapping, got {given!r}")
            continue
        strange = [key for key in fields if key not in ATTENTION_KEYS]
        complaints += [unknown_key(str(key), where, ATTENTION_KEYS) for key in strange]
        inner = _position_complaints(f"{where}.position", fields.get("position", "none"))
        complaints += inner
        if not strange and not inner and not complaints:
            whole = {"n_heads": model.n_heads, "position": position, "bias": model.bias, **fields}
            try:
                AttentionSpec(d_model=model.d_model, **whole)
            except UserError as error:
                complaints.append(f"{where}: {str(error).removeprefix('AttentionSpec: ')}")
    return complaints


def _position_complaints(where: str, position: Any) -> list[str]:
    if isinstance(position, dict):
        strange = [unknown_key(str(key), where, POSITION_KEYS) for key in position if key not in POSITION_KEYS]
        if strange:
            return strange
    elif not isinstance(position, str):
        return [f"{where}: expected a scheme's name or a mapping, got {position!r}"]
    try:
        PositionSpec(**({"kind": position} if isinstance(position, str) else position))
    except UserError as error:
        return [f"{where}: {str(error).removeprefix('PositionSpec: ')}"]
    return []


def slugify(name: str) -> str:
    """`QV-Ka 2x, AGF+PCM-V` -> `qv-ka-2x-agf-pcm-v`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"


def expand(recipe: Recipe) -> list[RunPlan]:
    """The runs a recipe asks for: variants x seeds, seeds outermost (early results already compare); else one run."""
    compare = recipe.compare
    if compare is None:
        seed = recipe.train.seed
        return [RunPlan(name=recipe.name, slug=f"{slugify(recipe.name)}--seed{seed}", seed=seed, recipe=recipe)]
    return [
        RunPlan(
            name=variant.name,
            slug=f"{slugify(variant.name)}--seed{seed}",
            seed=seed,
            recipe=_single(recipe, compare, variant, seed),
        )
        for seed in compare.seeds
        for variant in compare.variants
    ]


def pick_variant(recipe: Recipe, name: str) -> Recipe:
    """The single-run recipe of one row of a comparison, with the recipe's own seed."""
    variants = recipe.compare.variants if recipe.compare else ()
    for variant in variants:
        if name in (variant.name, slugify(variant.name)):
            assert recipe.compare is not None
            return _single(recipe, recipe.compare, variant, recipe.train.seed)
    allowed = ", ".join(repr(variant.name) for variant in variants) or "none: the recipe compares nothing"
    raise UserError(f"variant {name!r} is not in the recipe {recipe.name!r}; allowed: {allowed}")


def _single(recipe: Recipe, compare: CompareSpec, variant: VariantSpec, seed: int) -> Recipe:
    model: dict[str, Any] = {"attention": _lay_over(recipe.model.attention, variant.attention)}
    if variant.position is not None:
        model["position"] = variant.position
    train: dict[str, Any] = {"seed": seed}
    if compare.threads is not None:
        train["threads"] = compare.threads
    return recipe.model_copy(
        update={
            "name": variant.name,
            "model": recipe.model.model_copy(update=model),
            "train": recipe.train.model_copy(update=train),
            "compare": None,
        }
    )


def _lay_over(base: dict[str, Any] | str, change: dict[str, Any] | str) -> dict[str, Any] | str:
    if isinstance(change, str) or "variant" in change or any(stack in change for stack in PLACES):
        return change
    under = {"variant": base} if isinstance(base, str) else base
    if any(stack in under for stack in PLACES):
        return {stack: _lay_over(under[stack], change) for stack in under}
    return {**under, **change}


def read_recipe(text: str, *, origin: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from YAML text with overrides laid on top. Raises `UserError` with one line per mistake."""
    try:
        content = parse_yaml(text, _StrictLoader)
    except ValueError as error:
        raise UserError(f"{origin}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{origin}: a recipe is a mapping of sections, this is {type(content).__name__}")
    for override in overrides:
        _apply_override(content, override)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{origin}: the recipe is not valid\n" + "\n".join(explain(error, Recipe))) from error


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file, or by the name of one shipped with the package (see `shipped_recipes`)."""
    path = Path(source)
    if not path.is_file():
        shipped = resources.files("qvattn.recipes") / f"{source}.yaml"
        if str(source) not in shipped_recipes():
            raise UserError(f"recipe {str(source)!r}: neither a file nor one of {', '.join(shipped_recipes())}")
        return read_recipe(shipped.read_text(encoding="utf-8"), origin=str(source), overrides=overrides)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from error
    return read_recipe(text, origin=str(path), overrides=overrides)


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("qvattn.recipes")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def dump_recipe(recipe: Recipe) -> str:
    """YAML text that `read_recipe` turns back into an equal recipe. All defaults are written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def changed_keys(old: Recipe, new: Recipe) -> list[str]:
    """Dotted keys in which two recipes differ, without those that may differ on resume."""
    before, after = (_flatten(recipe.model_dump(mode="json")) for recipe in (old, new))
    different = (key for key in {**before, **after} if before.get(key) != after.get(key))
    return sorted(key for key in different if not _within(key, FREE_ON_RESUME))


def _within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _apply_override(content: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in a recipe's raw content; the value is read as YAML."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"override {override!r}: expected section.key=value, such as train.steps=100")
    try:
        value = parse_yaml(text, _StrictLoader)
    except ValueError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {error}") from error
    section: Any = content
    for depth, key in enumerate(keys[:-1], start=1):
        section = _enter(section, key, override, ".".join(keys[:depth]))
    _put(section, keys[-1], value, override)


def _enter(section: Any, key: str, override: str, path: str) -> Any:
    """The section (or list) under `key`, made where there is none; a short form becomes the mapping it stands for."""
    if isinstance(section, list):
        return section[_index(section, key, override)]
    inner = section.get(key)
    if inner is None:
        inner = {}
    elif isinstance(inner, str) and key in ("attention", *PLACES):
        inner = {"variant": inner}
    elif isinstance(inner, str) and key == "position":
        inner = {"kind": inner}
    elif not isinstance(inner, dict | list):
        raise UserError(f"override {override!r}: {path} is not a section, it is {inner!r}")
    section[key] = inner
    return inner


def _put(section: Any, key: str, value: Any, override: str) -> None:
    if isinstance(section, list):
        section[_index(section, key, override)] = value
    elif isinstance(section, dict):
        section[key] = value
    else:
        raise UserError(f"override {override!r}: {key!r} cannot be set in {section!r}")


def _index(entries: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(entries):
        raise UserError(f"override {override!r}: {key!r} is not one of the entries 0 to {len(entries) - 1}")
    return int(key)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses repeated keys and reads `1e-4` as the number it looks like."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
