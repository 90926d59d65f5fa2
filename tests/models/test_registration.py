"""`import qvattn` is enough for transformers' Auto classes, in either order, and costs nothing without transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qvattn.models import CausalLM, CausalLMConfig


@pytest.mark.parametrize(
    "imports",
    [
        "import qvattn; from transformers import AutoConfig, AutoModelForCausalLM",
        "from transformers import AutoConfig, AutoModelForCausalLM; import qvattn",
        "import qvattn.models; from transformers import AutoConfig, AutoModelForCausalLM",
    ],
)
def test_auto_classes_know_our_models(imports: str, tmp_path: Path) -> None:
    config = CausalLMConfig(vocab_size=40, d_model=16, d_ff=16, n_heads=2, layers=1, attention="qv")
    CausalLM(config).save_pretrained(tmp_path)
    code = f"{imports}; print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["CausalLM"], done.stderr


def test_importing_it_alone_imports_neither_transformers_nor_torch() -> None:
    code = "import sys, qvattn, qvattn.cli; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
