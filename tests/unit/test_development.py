"""What a contributor runs: make, the hooks before a commit, hosted CI and the page about them say the same."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import yaml

from rayloop.cli import COMMANDS

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/development.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_every_lane_is_on_the_page_and_in_ci() -> None:
    lanes = set(re.findall(r"^(lint|fast|test[\w-]*):", MAKEFILE, re.MULTILINE))
    assert {"lint", "fast", "test", "test-faults"} <= lanes
    assert set(re.findall(r"^\| `make ([\w-]+)` \|", PAGE, re.MULTILINE)) == lanes
    assert {f"test-{name}" for name in re.findall(r"^lane ([\w-]+)", CI, re.MULTILINE)} == lanes - {"lint", "fast", "test"}


def test_every_folder_of_tests_is_on_the_page() -> None:
    folders = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert set(re.findall(r"^\| `tests/(\w+)` \|", PAGE, re.MULTILINE)) == folders


def test_the_hooks_before_a_commit_check_what_lint_checks() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    checks = {line.strip().replace("$(BIN)/", "").split(" $(")[0].removesuffix(" --check") for line in recipe.splitlines()}
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = {hook["entry"].removeprefix(".venv/bin/").removesuffix(" --fix") for hook in repo["hooks"]}
    assert hooks == checks
    assert all(hook["language"] == "system" for hook in repo["hooks"]), "a hook that is downloaded is another version"


def test_hosted_ci_runs_the_script_on_the_python_that_is_checked() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if step.get("run", "").startswith(".ci")] == [".ci/run"]
    (budget,) = re.findall(r"^budget=(\d+)", CI, re.MULTILINE)
    assert job["timeout-minutes"] > int(budget)
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["python_version"]
    assert job["container"]["image"].startswith(f"python:{checked}-")


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    said = re.findall(r"`([^`]+)`", page)
    words = {word for text in said for word in re.split(r"[\s|\\]+", text)}
    assert set(COMMANDS) <= words, set(COMMANDS) - words


def test_every_generated_page_is_named() -> None:
    (recipe,) = re.findall(r"^docs:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    made = set(re.findall(r"> docs/(\w+\.md)", recipe))
    section = PAGE.partition("## Generated pages")[2]
    assert made == set(re.findall(r"\]\((\w+\.md)\)", section))
    says_so = {
        path.name
        for path in (ROOT / "docs").glob("*.md")
        if re.search("^Made by `python -m", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert made == says_so


def test_a_test_that_needs_an_extra_is_skipped_where_it_is_not_installed() -> None:
    """`make test` reads every file of tests before it leaves out other lanes', and installs nothing but `dev`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {re.split(r"[<>=\[]", need)[0] for extra in extras.keys() - {"dev"} for need in extras[extra]}
    modules = named - {"jsonschema", "websockets", "tensorboard"} | {"Xlib", "kubernetes_validate"}  # the three are in dev
    unguarded = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                from_ = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                needed = {name.split(".")[0] for name in from_} & modules
                unguarded |= {(path.name, name) for name in needed if f'importorskip("{name}"' not in text}
    assert unguarded <= {("mcp_server.py", "mcp")}, "say pytest.importorskip first"  # that one is a program
