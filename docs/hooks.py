"""Puts the documentation site together (mkdocs hook): navigation of the pages that exist, and the pages that are made
of the code: home (README), commands, API reference, changelog. Must never write into the source tree.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

# The order of the guide. A page that does not exist is left out, a new one is added at the end.
GUIDE = [
    "choosing",
    "plan",
    "lean",
    "convert",
    "serving",
    "diffusion",
    "scale",
    "reliability",
    "why-no-q-cache",
    "release",
]

# Title of a reference page -> public names on it, each documented from its docstring.
REFERENCE: dict[str, list[str]] = {
    "Attention": [
        *("qvattn.Attention", "qvattn.AttentionSpec", "qvattn.PositionSpec", "qvattn.presets"),
        *("qvattn.Stream", "qvattn.StreamCache", "qvattn.UserError"),
    ],
    "Kernels": [
        *("qvattn.attend", "qvattn.ScoreTerm", "qvattn.ValueTerm", "qvattn.Geometry"),
        *("qvattn.kernels.choose", "qvattn.kernels.attend_with_weights", "qvattn.positions.DistanceTables"),
    ],
    "Models": [
        *("qvattn.models.TranslationModel", "qvattn.models.TranslationConfig"),
        *("qvattn.models.CausalLM", "qvattn.models.CausalLMConfig", "qvattn.models.initialise"),
    ],
    "Decoding": [
        *("qvattn.decode.LeanModel", "qvattn.decode.greedy", "qvattn.decode.greedy_many", "qvattn.decode.beam_search"),
        *("qvattn.decode.Hypotheses", "qvattn.decode.sample"),
    ],
    "Hugging Face": ["qvattn.hf"],
    "Lab": [
        *("qvattn.train.recipe.Recipe", "qvattn.train.recipe.load_recipe", "qvattn.train.run.run_training"),
        *("qvattn.lab.compare.choose", "qvattn.lab.compare.compare", "qvattn.lab.experiment.load_experiments"),
        *("qvattn.lab.report.write_report", "qvattn.lab.family.family", "qvattn.lab.explain.spec_for"),
        *("qvattn.lab.explain.walk", "qvattn.lab.check.run_checks", "qvattn.lab.plan.plan", "qvattn.lab.plan.shape_of"),
    ],
}
PACKAGES = {"qvattn.hf"}
"""Documented whole: everything in their `__all__`."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation, from the pages that exist."""
    docs = Path(config.docs_dir)
    pages = {p.relative_to(docs).with_suffix("").as_posix() for p in docs.rglob("*.md")}
    guide = [name for name in GUIDE if name in pages]
    guide += sorted(name for name in pages if "/" not in name and name not in guide)
    results = sorted(name for name in pages if name.startswith("results/"))
    others = sorted(pages - set(guide) - set(results))
    config.nav = [
        {"Home": "index.md"},
        {"Guide": [f"{name}.md" for name in guide + others]},
        {"Results": [f"{name}.md" for name in results]},
        {"Reference": ["cli.md", *({title: _address(title)} for title in REFERENCE)]},
        {"Changelog": "changelog.md"},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that are made of the code."""
    generated = {
        "index.md": "---\nhide: [navigation]\n---\n" + _inside((ROOT / "README.md").read_text()),
        "changelog.md": _inside((ROOT / "CHANGELOG.md").read_text()),
        "cli.md": command_page(),
    }
    generated |= {_address(title): _reference(title, names) for title, names in REFERENCE.items()}
    for address, content in generated.items():
        files.append(File.generated(config, address, content=content))
    return files


def _address(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '-')}.md"


def _inside(text: str) -> str:
    """Links of a file at the root, as a page of the site needs them."""
    text = text.replace("](CHANGELOG.md", "](changelog.md").replace("](docs/", "](")
    return re.sub(r"\[([^]]*)\]\((?:LICENSE|CITATION\.cff|notebooks/[^)]*|recipes[^)]*|src/[^)]*)\)", r"\1", text)


def _reference(title: str, names: list[str]) -> str:
    parts = [f"# {title}\n"]
    for name in names:
        parts.append(f"::: {name}\n")
        if name in PACKAGES:
            parts.append("    options:\n      members: true\n      show_root_heading: false\n      heading_level: 1\n")
    return "\n".join(parts)


def command_page() -> str:
    """Every command with its arguments and options, read off the command line itself."""
    from qvattn import cli

    parts = [
        "# Commands\n",
        "Results go to stdout, logs and progress to stderr. Exit codes: 0 success, 1 a failure while working (or a "
        "check that does not hold), 2 bad usage or input, 130 interrupted. `QVATTN_TRACEBACK=1` shows where "
        "an error arose.\n",
    ]
    for name in cli.COMMANDS:
        command = cli.load_command(name)
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["qvattn", name, *command.collect_usage_pieces(context)])
        parts += [f"## {name}\n", _paragraphs(command.help or cli.COMMANDS[name].summary), f"```text\n{usage}\n```\n"]
        parts += ["| argument or option | meaning |", "|---|---|"]
        parts += [_parameter(p, context) for p in command.get_params(context) if not getattr(p, "hidden", False)]
        parts.append("")
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    lines = [line.strip() for line in text.split("\f")[0].replace("\b", "").splitlines()]
    return "\n".join(lines).strip() + "\n"


def _parameter(parameter: Any, context: Any) -> str:
    record = parameter.get_help_record(context)
    if record is None:
        return f"| `{parameter.make_metavar(context)}` | |"
    left, right = (re.sub(r"\s+", " ", str(part)).replace("|", "\\|").strip() for part in record)
    return f"| `{left}` | {_plain(right)} |"


def _plain(text: str) -> str:
    """Help text as Markdown: brackets and stars are meant as such."""
    return re.sub(r"([\[\]*<>_])", r"\\\1", text)
