"""What vLLM's pinned release imports from transformers exists in the transformers that is installed
with it. Only names: the files of the wheel are read on the package index, as for
``test_signatures``, and nothing of vLLM runs.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tests.gpu_fake.test_signatures import Wheel, pin, wheels
from tests.support.runs import ROOT

pytestmark = [pytest.mark.gpu_fake, pytest.mark.timeout(600)]

FOLDERS = (
    "vllm/model_executor/models/",
    "vllm/transformers_utils/",
    "vllm/multimodal/",
    "vllm/tokenizers/",
    "vllm/renderers/",
)
"""Where vLLM imports classes of models and processors."""
LACKING = {"vllm/model_executor/models/pixtral.py"}
"""Files that vLLM cannot import with this transformers; none of them is of a family that is trained
here.
"""


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file takes from transformers when it is imported: not within
    functions, ``try`` or TYPE_CHECKING.
    """
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "transformers"
        ):
            yield from (
                (node.module or "", alias.name) for alias in node.names if alias.name != "*"
            )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.ClassDef):
            pending += node.body


@cache
def defined(module: str) -> frozenset[str]:
    """The names that a module of transformers has, by its file; its parts, for a package.

    Empty for no module.
    """
    if module == "transformers":
        return frozenset(dir(transformers))
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return frozenset()
    found = {
        name
        for part in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
        for name in _names(part)
    }
    below = {
        path.stem
        for folder in spec.submodule_search_locations or ()
        for path in Path(folder).glob("*")
    }
    if spec.submodule_search_locations:  # a package takes the names of its parts
        found |= {
            name
            for part in below
            if importlib.util.find_spec(f"{module}.{part}")
            for name in defined(f"{module}.{part}")
        }
    return frozenset(found | below)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def has(module: str, name: str) -> bool:
    try:
        return name in defined(module)
    except ModuleNotFoundError:
        return False


def test_what_the_pinned_vllm_imports_from_transformers_is_there() -> None:
    pinned = Version(pin("vllm"))
    if pinned not in wheels("vllm"):
        pytest.skip("the package index has no wheel of the pinned release")
    wheel = Wheel("vllm", pinned)
    files = [
        name for name in wheel._zip.namelist() if name.startswith(FOLDERS) and name.endswith(".py")
    ]
    with ThreadPoolExecutor(1) as pool:  # one connection reads one file after the other
        texts = dict(zip(files, pool.map(wheel.text, files), strict=True))
    wanted = {
        file: sorted(imported(ast.parse(text)))
        for file, text in texts.items()
        if text and "transformers" in text
    }
    assert sum(map(len, wanted.values())) > 500, "the walk has lost its way"
    missing = {
        file: lacking
        for file, names in wanted.items()
        if (lacking := [one for one in names if not has(*one)])
    }
    assert missing.keys() <= LACKING, missing


def test_the_pinned_transformers_is_the_installed_one() -> None:
    lines = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8").splitlines()
    [pinned] = [line.partition("==")[2] for line in lines if line.startswith("transformers==")]
    assert Version(transformers.__version__) == Version(pinned)


def test_names_are_found_where_they_are() -> None:
    assert has("transformers", "Qwen2VLImageProcessor")
    assert has("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", "smart_resize")
    assert has("transformers.utils", "is_flash_attn_2_available")
    assert not has("transformers", "NoSuchClass")
    assert not has("transformers.models.no_such_model", "NoSuchClass")
    soft = (
        "try:\n    from transformers import B\nexcept ImportError: ...\ndef f():\n    from"
        " transformers import C\n"
    )
    tree = ast.parse(f"from transformers import A\n{soft}")
    assert list(imported(tree)) == [("transformers", "A")]
