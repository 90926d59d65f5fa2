"""How many parameters a model has and which of them a decoding step reads, counted on the model itself.

The model is built on the meta device: shapes without numbers, so nothing of its size is allocated or downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ...errors import UserError
from .layers import Weights

CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_top_k", "top_k")
"""What configs call the number of routed experts that a token visits."""


def count(config: Any) -> Weights:
    """Weights of the causal language model of a Hugging Face config. Raises UserError where none can be built."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{config.model_type}: no model could be built from this config: {error}") from None
    finally:
        transformers_logging.set_verbosity(level)
    return of_model(model, routed_experts(config))


def routed_experts(config: Any) -> int:
    """Experts that a token visits; 0 where the config names none."""
    values = (getattr(config, name, None) for name in CHOSEN)
    return next((value for value in values if isinstance(value, int)), 0)


def of_model(model: nn.Module, experts_per_token: int = 0, unread: tuple[str, ...] = ()) -> Weights:
    """Weights of a built model.

    Experts are parameters below a module called `experts`, their number first; a lookup table is an embedding that no
    linear layer shares.  unread: beginnings of the names of parameters that decoding does not read (an encoder).
    """
    parameters: dict[int, tuple[str, Tensor]] = {id(p): (name, p) for name, p in model.named_parameters()}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    projections = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    total = sum(p.numel() for _, p in parameters.values())
    experts = {key: p for key, (name, p) in parameters.items() if ".experts." in f".{name}" and p.dim() >= 2}
    if not experts_per_token:
        experts = {}
    read = sum(
        p.numel()
        for key, (name, p) in parameters.items()
        if key not in experts and key not in embeddings - projections and not name.startswith(unread or ("\0",))
    )
    return Weights(
        total=total,
        read=read,
        experts=sum(p.numel() for p in experts.values()),
        expert_count=max((p.shape[0] for p in experts.values()), default=0),
        experts_per_token=experts_per_token if experts else 0,
    )
