"""An OpenAI-compatible server for our checkpoints: `transformers serve`, in a process that knows our classes.

transformers looks an architecture up by its name in its own namespace, so that is where the server's process is told of
ours. Everything else, requests, chat templates, streaming, is transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers
from transformers import AutoConfig
from transformers.utils.import_utils import is_serve_available

from ..errors import UserError
from ..models import CausalLM, CausalLMConfig
from .foreign.sources import find


def serve(model: str, *, host: str, port: int, device: str, dtype: str, more: Sequence[str] = ()) -> None:
    """Serve the checkpoint `model` until the process is stopped. more: options of `transformers serve`.

    Raises UserError where the packages of the extra are missing, and for what is not a language model of ours.
    """
    if not is_serve_available():
        raise UserError("serving needs more packages: pip install 'qvattn[serve]' (or 'transformers[serving]')")
    check_servable(model)
    setattr(transformers, CausalLM.__name__, CausalLM)
    from transformers.cli.transformers import app

    app(
        args=["serve", model, "--host", host, "--port", str(port), "--device", device, "--dtype", dtype, *more],
        prog_name="transformers",
        standalone_mode=False,
    )


def check_servable(model: str) -> None:
    """Raises UserError unless `model` is a saved language model of ours with a tokenizer that has a chat template."""
    source = find(model)
    try:
        config = AutoConfig.from_pretrained(source.place, trust_remote_code=False, **source.options)
    except (OSError, ValueError) as error:
        raise UserError(f"{model}: cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(config, CausalLMConfig):
        raise UserError(
            f"{model}: model_type={config.model_type!r} is not a language model of ours; `qvattn convert` makes one, "
            "or save what `qvattn.hf.adopt` gives"
        )
    folder = Path(source.place)
    if folder.is_dir() and not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{model}: there is no tokenizer beside the weights; a server needs one with a chat template")
