"""One folder per recipe. What the command line can do for a recipe follows from the modules that it has.

``prepare`` has ``main(arguments) -> exit code``, which makes its dataset (``python -m cluster data prepare NAME``);
``benchmark`` has ``BENCHMARK``, what a checkpoint is measured on (``python -m benchmarks recipe NAME``);
``score`` has ``SCORING``, how saved completions are scored (``python -m cluster score NAME FILE``).
"""

from __future__ import annotations

import pkgutil
from importlib.util import find_spec


def having(module: str) -> list[str]:
    """The recipes that have this module, sorted."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if found.ispkg]
    return sorted(name for name in names if find_spec(f"recipes.{name}.{module}"))
