"""The structure of the code: import order, sizes, what a process imports, how full a folder is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FILE_LINES = 500
FUNCTION_LINES = 60
HEAVY = ("torch", "transformers", "peft", "vllm", "sglang", "torchvision")


def module_name(path: Path) -> str:
    """The import name of a file: every package is below ``rayloop``, and the folders beside it are
    linked there.
    """
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return (
        name
        if name.split(".")[0] in ("rayloop", "benchmarks", "tools", "examples")
        else f"rayloop.{name}"
    )


def modules_below(*names: str) -> list[str]:
    """The modules with these names, and all modules below them."""
    return [
        name
        for name in map(module_name, SOURCES)
        if any(f"{name}.".startswith(f"{top}.") for top in names)
    ]


LIGHT = [
    *modules_below(
        *(
            f"rayloop.{name}"
            for name in ("core", "config", "data", "chat", "envs", "rewards", "measure")
        )
    ),
    *modules_below(
        "rayloop.launch",
        "rayloop.view",
        "rayloop.doctor",
        "rayloop.transports.seam",
        "rayloop.engines.settings",
    ),
    *(f"rayloop.transports.{name}" for name in ("plain", "collective")),
    *modules_below(
        *(
            f"rayloop.grpo.{name}"
            for name in ("settings", "advantage", "filters", "selection", "replay", "staleness")
        )
    ),
    *(name for name in modules_below("rayloop.run") if name != "rayloop.run.export"),
    *modules_below(
        "rayloop.judge",
        "rayloop.recipes",
        "rayloop.actors.environment",
        "rayloop.actors.reward",
        "rayloop.cluster.driver",
        "rayloop.cli",
    ),
    "benchmarks.__main__",
]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_imports_follow_the_order() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_files_and_functions_stay_small() -> None:
    too_long = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) >= FILE_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines, the limit is {FILE_LINES}")
        for function in functions(ast.parse(text)):
            assert function.end_lineno is not None
            if (lines := function.end_lineno - function.lineno + 1) >= FUNCTION_LINES:
                too_long.append(
                    f"{path.relative_to(ROOT)}:{function.lineno}: {function.name} has {lines} lines"
                )
    assert not too_long, "\n".join(too_long)


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name not in ("__init__.py", "__main__.py")
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_a_module_that_runs_as_a_program_ends_with_its_call() -> None:
    for path in SOURCES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        guards = [
            i
            for i, node in enumerate(body)
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        ]
        assert guards in (
            [],
            [len(body) - 1],
        ), f"{path}: what stands below `if __name__` does not exist yet when it runs"


OF_EXTRAS = ("Xlib",)
"""What only an extra installs, and a module of its own process imports at its top."""


def test_light_modules_leave_torch_alone() -> None:
    """Processes of the driver, environments and rewards start fast and stay small."""
    assert {"rayloop.core.types", "rayloop.grpo.advantage", "rayloop.envs.episode"} <= set(LIGHT)
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split():\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        f"        if error.name not in {OF_EXTRAS!r}: raise\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    if loaded: sys.exit(f'importing {name} loads {loaded}')\n"
    )
    command = [sys.executable, "-c", program, " ".join(LIGHT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_configuration_is_read_by_name_guessing() -> None:
    """``getattr`` and ``hasattr`` with a default hide misspelt keys."""
    guesses = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3))
        and any(
            "config" in ast.dump(arg).lower() or "settings" in ast.dump(arg).lower()
            for arg in node.args[:1]
        )
    ]
    assert not guesses
