"""What a contributor runs: make, the hooks before a commit, hosted CI and the page about them say
the same.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
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
    assert {f"test-{name}" for name in re.findall(r"^lane ([\w-]+)", CI, re.MULTILINE)} == lanes - {
        "lint",
        "fast",
        "test",
    }


def test_every_folder_of_tests_is_on_the_page() -> None:
    folders = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert set(re.findall(r"^\| `tests/(\w+)` \|", PAGE, re.MULTILINE)) == folders


def test_the_hooks_before_a_commit_check_what_lint_checks() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    checks = {
        line.strip().replace("$(BIN)/", "").split(" $(")[0].removesuffix(" --check")
        for line in recipe.splitlines()
    }
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))[
        "repos"
    ]
    hooks = {
        hook["entry"].removeprefix(".venv/bin/").removesuffix(" --fix") for hook in repo["hooks"]
    }
    assert hooks == checks
    assert all(hook["language"] == "system" for hook in repo["hooks"]), (
        "a hook that is downloaded is another version"
    )


def test_hosted_ci_has_a_runner_for_every_lane() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    fast, lane = workflow["jobs"]["fast"], workflow["jobs"]["lane"]
    assert fast["steps"][-1]["run"] == "make fast"
    assert lane["steps"][-1]["run"] == '.ci/run "$LANE"'
    assert lane["strategy"]["matrix"]["lane"] == re.findall(r"^lane ([\w-]+)", CI, re.MULTILINE)
    assert not any(job["strategy"]["fail-fast"] for job in (fast, lane)), (
        "one lane hides what another would say"
    )
    longest = max(int(minutes) for minutes in re.findall(r"^lane [\w-]+ (\d+)", CI, re.MULTILINE))
    assert lane["timeout-minutes"] >= 2 * longest


def test_hosted_ci_runs_on_the_pythons_that_are_promised() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    promised = [
        line.rpartition(" ")[2]
        for line in project["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", line)
    ]
    assert workflow["jobs"]["fast"]["strategy"]["matrix"]["python"] == promised
    checked = project["tool"]["mypy"]["python_version"]
    assert workflow["jobs"]["lane"]["container"]["image"].startswith(f"python:{checked}-")


def test_ci_runs_the_lane_that_is_named_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "make").write_text('#!/bin/sh\necho "make $*"\n', encoding="utf-8")
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / ".ci/run", "k8s", "nodes"], env=environment, capture_output=True, text=True
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("make")] == [
        "make test-k8s",
        "make test-nodes",
    ]
    unknown = subprocess.run(
        [ROOT / ".ci/run", "test"], env=environment, capture_output=True, text=True
    )
    assert unknown.returncode == 2
    assert "there is no lane test; the lanes are: stranger" in unknown.stderr


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
    """`make test` reads every file of tests before it leaves out other lanes', and installs nothing
    but `dev`.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = {
        re.split(r"[<>=\[]", need)[0] for extra in extras.keys() - {"dev"} for need in extras[extra]
    }
    modules = named - {"jsonschema", "websockets", "tensorboard"} | {
        "Xlib",
        "kubernetes_validate",
    }  # the three are in dev
    unguarded = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                from_ = (
                    [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else [name.name for name in node.names]
                )
                needed = {name.split(".")[0] for name in from_} & modules
                unguarded |= {
                    (path.name, name) for name in needed if f'importorskip("{name}"' not in text
                }
    programs = {("mcp_server.py", "mcp"), ("listener.py", "Xlib")}
    assert unguarded <= programs, "say pytest.importorskip first"
