"""Private names of libraries may change with any release: the places that use one are listed here,
one line per file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "rayloop",
    "judge",
    "recipes",
    "actors",
    "cluster",
    "serve_apps",
    "benchmarks",
    "tools",
    "examples",
)
INTERNAL = ("vllm.v1", "vllm.distributed", "vllm.model_executor", "transformers.integrations")
"""Modules without an underscore whose contents their libraries do not promise either."""
BINDINGS = ("ProcessGroupGloo", "ProcessGroupNCCL")
"""Constructors that torch.distributed exports from C++ and does not document."""

ALLOWED: dict[str, set[str]] = {
    "actors/base.py": {"_current_frames"},  # of sys; documented, in spite of its name
    "cluster/session.py": {
        "ray._private.accelerators",
        "ray._private.state",
        "ray._private.worker",
        "_get_global_client",
        "_temp_dir=",
    },
    "rayloop/engines/attention.py": {
        "transformers.integrations.sdpa_attention",
        "_attn_implementation",
    },
    "rayloop/engines/generation/sglang.py": {
        "_send_one_request"
    },  # of the one release that it takes
    "rayloop/engines/generation/vllm_process.py": {
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.exceptions",
        "vllm.v1.metrics.ray_wrappers",
    },
    "rayloop/engines/generation/vllm_worker.py": {
        "vllm.model_executor.layers.utils",
        "vllm.model_executor.layers.vocab_parallel_embedding",
    },
    "examples/grpo_in_one_file.py": {"_foreach_mul_"},
    "rayloop/engines/profiling.py": {
        "torch._C._profiler",
        "_ExperimentalConfig",
    },  # torch has no other way to all threads
    "rayloop/engines/training/optimizer.py": {"_foreach_mul_"},
    "rayloop/engines/training/sequence.py": {
        "torch.distributed._functional_collectives"
    },  # those of torch.distributed.nn refer to it
    "rayloop/envs/agents/host.py": {"_exit"},  # of os; documented
    "rayloop/envs/agents/namespaces.py": {"_exit"},
    "rayloop/envs/desktop/inside/driver.py": {"_exit"},
    "rayloop/envs/desktop/inside/keyboard.py": {
        "_update_keymap"
    },  # of python-xlib, whose public way wants an event
    "rayloop/sandbox/cells.py": {"_current_frames", "_exit"},  # of sys and os; documented
    "rayloop/sandbox/kernel.py": {"_exit"},
    "rayloop/sandbox/server.py": {"_exit"},
    "rayloop/transports/process_group.py": {"ProcessGroupGloo", "ProcessGroupNCCL"},
}


def private(name: str) -> bool:
    return (
        name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"
    )


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that this file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def foreign(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Private names in this file that nobody here defines, and modules that are private."""
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
            if node.module.split(".")[0] != "rayloop":
                yield from (
                    alias.name
                    for alias in node.names
                    if private(alias.name) or alias.name in BINDINGS
                )
        for module in modules:
            mine = module.split(".")[0] in ("rayloop", "tests", "__future__")
            if not mine and (
                any(map(private, module.split(".")))
                or f"{module}.".startswith(tuple(f"{m}." for m in INTERNAL))
            ):
                yield module
        if isinstance(node, ast.Attribute) and (
            node.attr in BINDINGS or (private(node.attr) and node.attr not in ours)
        ):
            yield node.attr
        if (
            isinstance(node, ast.keyword)
            and node.arg
            and private(node.arg)
            and node.arg not in ours
        ):
            yield f"{node.arg}="


def test_private_names_of_libraries_are_used_in_the_listed_files_only() -> None:
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    ours = {name for tree in trees.values() for name in defined(tree)}
    found = {file: names for file, tree in trees.items() if (names := set(foreign(tree, ours)))}
    new = {
        file: names - ALLOWED.get(file, set())
        for file, names in found.items()
        if names - ALLOWED.get(file, set())
    }
    gone = {
        file: names - found.get(file, set())
        for file, names in ALLOWED.items()
        if names - found.get(file, set())
    }
    assert not new, f"use a public name, or move the call behind a file that is listed: {new}"
    assert not gone, f"no longer used, take it off the list: {gone}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import ray\nray._private.worker._global_node", {"_private", "_global_node"}),
        ("from ray._private.accelerators import Manager", {"ray._private.accelerators"}),
        ("ray.init(_temp_dir=folder)", {"_temp_dir="}),
        ("from torch import _dynamo", {"_dynamo"}),
        ("from vllm.v1.engine import X\nimport vllm.sampling_params", {"vllm.v1.engine"}),
        ("dist.ProcessGroupGloo(store, 0, 2)", {"ProcessGroupGloo"}),
        ("self._mine + other._mine + x.__class__", set()),
    ],
)
def test_what_is_private_is_recognised(text: str, names: set[str]) -> None:
    assert set(foreign(ast.parse(text), {"_mine"})) == names
