"""The model card's words about a healing run: what was done, what it gained, what the numbers do not show."""

from __future__ import annotations

from typing import Any


def card_section(result: dict[str, Any]) -> str:
    """Markdown for the card, from what healing.json holds."""
    how = f"LoRA of rank {result['lora']}, merged" if result["lora"] else "full weights"
    lines = [
        f"Distilled from `{result['teacher']}` ({result['what']}, {how}): {result['steps']} steps, "
        f"{result['tokens']:,} tokens of {', '.join(result['text'])} ({result['epochs']:.2f} passes), "
        f"{result['train_seconds'] / 60:.1f} minutes on {result['machine']['cpu_model']} "
        f"({result['machine']['threads']} thread(s), {result['machine']['precision']}).",
        "",
    ]
    for test in result["test"]:
        lines += [
            f"Perplexity on {test['text']} ({test['windows']} windows, {test['tokens']:,} tokens), with 95 % intervals "
            "of the paired difference over windows:",
            "",
            "| model | perplexity | against the original | KL to the original |",
            "|:--|--:|--:|--:|",
            f"| original | {test['teacher']:.3f} | | |",
            f"| converted | {test['before']:.3f} | {percent(test['before_against_teacher'])} | {kl(test, 'before')} |",
            f"| healed | {test['after']:.3f} | {percent(test['after_against_teacher'])} | {kl(test, 'after')} |",
            "",
        ]
    valid = result["valid"]
    lines += [
        f"On the curve's held-out text: perplexity {valid['before']:.3f} before, {valid['best']:.3f} at the best step; "
        f"KL to the original {valid['before_kl']:.4f} and {valid['best_kl']:.4f}.",
        "Healing on one kind of text favours that kind: measure on your own.",
    ]
    return "\n".join(lines) + "\n"


def percent(found: dict[str, float | None]) -> str:
    """`+1.40 % (+1.21 ... +1.60)`."""
    if found["low"] is None or found["high"] is None:
        return f"{found['percent']:+.2f} %"
    return f"{found['percent']:+.2f} % ({found['low']:+.2f} … {found['high']:+.2f})"


def kl(test: dict[str, Any], when: str) -> str:
    """`0.0123 ± 0.0004` nats per token."""
    found = test["kl"][when]
    half = "" if found["half_width"] is None else f" ± {found['half_width']:.4f}"
    return f"{found['mean']:.4f}{half}"
