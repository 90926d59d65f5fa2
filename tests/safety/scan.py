"""Finds calls that could run what a file holds, in a syntax tree: unpickling, remote code, unsafe YAML, shells."""

from __future__ import annotations

import ast
from collections.abc import Iterator

UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}
FORBIDDEN_METHODS = {"extractall", "unsafe_load", "full_load"}
AUTO_LOADERS = ("from_pretrained", "from_config", "get_config_dict")


def dangers(source: str) -> Iterator[str]:
    """What is wrong, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in UNPICKLING:
                    yield f"line {node.lineno}: import of {name}"
        if isinstance(node, ast.Call):
            for wrong in _call(node):
                yield f"line {node.lineno}: {wrong}"


def _call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    last = name.split(".")[-1]
    given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if name in FORBIDDEN or last in FORBIDDEN_METHODS:
        yield name
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if (
        last == "load"
        and name.startswith(("np.", "numpy."))
        and not _is(given.get("allow_pickle", ast.Constant(False)), False)
    ):
        yield "numpy.load with allow_pickle"
    if name == "yaml.load":
        yield "yaml.load: use qvattn.untrusted.parse_yaml"
    if name == "yaml.safe_load":
        yield "yaml.safe_load: use qvattn.untrusted.parse_yaml, which bounds what aliases may become"
    if not _is(given.get("shell", ast.Constant(False)), False):
        yield "a shell"
    if not _is(given.get("trust_remote_code", ast.Constant(False)), False):
        yield "trust_remote_code"
    owner = name.rpartition(".")[0]
    if last in AUTO_LOADERS and (owner.startswith("Auto") or owner == "PreTrainedConfig"):
        if "trust_remote_code" not in given:
            yield f"{name} without trust_remote_code=False (it would ask the user)"
        if owner.startswith("AutoModel") and last == "from_pretrained" and not _is(given.get("use_safetensors"), True):
            yield f"{name} without use_safetensors=True"
    if last == "load_dataset" and "trust_remote_code" in given:
        yield "load_dataset with trust_remote_code"


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
