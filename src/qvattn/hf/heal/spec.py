"""What a healing run is, said once: `HealSpec`, from which a run follows to the bit.

It is written to heal.yaml, and a run continues only under an equal one. Nothing here loads a model or reads text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...errors import UserError
from ...train.recipe import TrainSpec
from ...untrusted import parse_yaml

DEFAULT_STEPS = 200


class HealSpec(BaseModel):
    """One healing run. Paths stand as the user gave them.

    what: which weights learn: `all`; those of `attention`; `new`: those the teacher lacks or has in another shape.
    lora: rank of low-rank updates (arXiv 2106.09685) to the chosen matrices; new weights that are not matrices of
        linear layers learn in full. None: full weights.
    steps, minutes: the length of the run, one of them; minutes are turned into steps by timing a few.
    tokens: of one step; micro_tokens: worked on at a time; context: tokens of a window.
    layers: whose hidden states are matched, `all`, `none` or a list counted from 0.
    valid: text of the curve; None: the end of every training text. The step with the lowest KL on it is the best: text
        like the training text can lower the perplexity while the student leaves the teacher.
    test: texts scored before and after, and never looked at in between; test_tokens of each, from its
        beginning, in windows of test_window (that of `convert`, so that the numbers compare).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    converted: str
    teacher: str
    text: tuple[str, ...] = Field(min_length=1)
    valid: str | None = None
    test: tuple[str, ...] = ()
    what: Literal["all", "attention", "new"] = "attention"
    lora: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    tokens: int = Field(default=4096, ge=2)
    micro_tokens: int = Field(default=2048, ge=2)
    context: int = Field(default=512, ge=2)
    learning_rate: float = Field(default=1e-4, gt=0)
    warmup: float = Field(default=0.05, ge=0, lt=1, description="share of the steps")
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float | None = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    kl_weight: float = Field(default=1.0, ge=0)
    hidden_weight: float = Field(default=8.0, ge=0)
    layers: Literal["all", "none"] | tuple[int, ...] = "all"
    dtype: Literal["fp32", "bf16"] = "fp32"
    validations: int = Field(default=10, ge=1, description="points of the curve after step 0")
    valid_tokens: int = Field(default=16384, ge=2)
    test_tokens: int = Field(default=32768, ge=2)
    test_window: int = Field(default=2048, ge=2)
    keep: Literal["best", "last"] = "best"
    seed: int = Field(default=1, ge=0)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise UserError("; ".join(_line(one) for one in error.errors())) from None

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.steps is not None and self.minutes is not None:
            raise ValueError(f"steps={self.steps}, minutes={self.minutes:g}: give one of them")
        if self.micro_tokens < self.context:
            raise ValueError(f"micro_tokens={self.micro_tokens}: at least one window of context={self.context}")
        if self.tokens % self.micro_tokens and self.tokens > self.micro_tokens:
            raise ValueError(f"tokens={self.tokens}: a multiple of micro_tokens={self.micro_tokens}, or less")
        if self.tokens < self.context:
            raise ValueError(f"tokens={self.tokens}: at least one window of context={self.context}")
        if not self.kl_weight and (not self.hidden_weight or self.layers == "none"):
            raise ValueError("kl_weight=0: with no hidden states to match there is nothing to learn from")
        return self

    @property
    def batch_tokens(self) -> int:
        """Tokens worked on at a time."""
        return min(self.micro_tokens, self.tokens)

    def train_spec(self, steps: int) -> TrainSpec:
        """The loop's settings for a run of this many steps."""
        validate_every = max(1, -(-steps // self.validations))
        return TrainSpec(
            steps=steps,
            accumulate=self.tokens // self.batch_tokens,
            learning_rate=self.learning_rate,
            schedule="cosine",
            warmup_steps=max(1, round(self.warmup * steps)),
            betas=(0.9, 0.95),
            eps=1e-8,
            clip=self.clip,
            label_smoothing=0.0,
            precision=self.dtype,
            validate_every=validate_every,
            report_every=max(1, validate_every // 5),
            keep_last=1,
            best_metric="loss",
            seed=self.seed,
            tensorboard=False,
        )


def dump_spec(spec: HealSpec) -> str:
    """YAML text that `read_spec` turns back into an equal spec."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def read_spec(path: Path) -> HealSpec:
    """The spec in a heal.yaml. Raises UserError when it is not one."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not the description of a healing run")
    return HealSpec(**content)


def changes(before: HealSpec, now: HealSpec) -> list[str]:
    """`field: before -> now` for every field in which two specs differ."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    return [f"{name}: {old[name]} -> {new[name]}" for name in old if old[name] != new[name]]


def _line(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"] if part not in ("tuple[int, ...]", "literal['all','none']"))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{where}={error.get('input')!r}: {error['msg']}"
