"""Our model classes made known to transformers' Auto classes, by `import qvattn` alone and without its cost.

Registering means importing transformers and PyTorch, which takes seconds that `qvattn --help` should not take. So where
transformers is not imported yet, it is waited for: the classes are registered as soon as it has been.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register_with_transformers() -> None:
    """Register now if transformers is imported, otherwise right after it is."""
    if "transformers" in sys.modules:
        import_module("qvattn.models")
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Finds transformers as everybody else would, and sees to it that its import ends with ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import_module("qvattn.models")

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
