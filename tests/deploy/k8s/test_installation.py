"""Every extra can be installed with the constraints that README names for it: resolved from
metadata, nothing is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.k8s
ROOT = Path(__file__).parents[3]
UV = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
UNREACHABLE = re.compile(
    "error sending request|dns error|connect error|tcp connect|timed out|Failed to fetch",
    re.IGNORECASE,
)
CPU_TORCH = re.compile(
    r"no version of torch(\{[^}]*\})?==[\d.]+\+cpu|torch==[\d.]+\+cpu has no wheels"
)
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["optional-dependencies"]


def documented() -> dict[str, str]:
    """Extra (empty: none) -> its file, by README's table."""
    rows = re.findall(
        r"^\| (.+) \| `(constraints\S*\.txt)`",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return {
        extra: file
        for names, file in rows
        for extra in [*(["none"] if "none" in names else []), *re.findall(r"`([\w-]+)`", names)]
    }


def sources() -> list[str]:
    """uv's options for where pip looks for packages."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for key, _, value in (line.partition("=") for line in lines):
        option = key.rpartition(".")[2]
        if option in {"index-url", "extra-index-url", "find-links"}:
            found += [word for place in value.strip("'").split() for word in (f"--{option}", place)]
    return [*found, "--index-strategy", "unsafe-best-match"]


def resolve(extras: list[str], file: str, cache: Path, python: str = "3.11") -> str:
    """What uv says; empty when the extras of this project can be installed together with the file's
    versions.
    """
    wanted = [word for extra in extras for word in ("--extra", extra)]
    command = [
        UV,
        "pip",
        "compile",
        "-q",
        "pyproject.toml",
        *wanted,
        "-c",
        file,
        "--python-version",
        python,
        "--python-platform",
        "x86_64-manylinux_2_34",
        "--no-annotate",
        "--no-header",
        *sources(),
    ]
    environment = os.environ | {"UV_CACHE_DIR": str(cache), "UV_NO_PROGRESS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[0]}")
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not Path(UV).exists():
        pytest.skip("uv is not installed: pip install -e '.[k8s]' -c constraints.txt")
    return tmp_path_factory.mktemp("uv")


def test_readme_names_a_file_for_every_extra() -> None:
    assert set(documented()) == {"none", *EXTRAS}
    assert all((ROOT / file).is_file() for file in documented().values())


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("engine", ["none", "gpu", "cpu-vllm", "sglang"])
def test_all_extras_that_go_together_resolve(engine: str, python: str, cache: Path) -> None:
    """What can be installed together can be installed alone."""
    files = documented()
    extras = [] if engine == "none" else [engine]
    if files[engine] != "constraints-sglang.txt":
        extras += [
            extra for extra, file in files.items() if file == "constraints.txt" and extra != "none"
        ]
    fault = resolve(extras, files[engine], cache, python)
    if CPU_TORCH.search(fault):
        pytest.skip("cpu-vllm wants a CPU build of torch: name its index with PIP_EXTRA_INDEX_URL")
    assert not fault


def test_a_set_that_cannot_be_installed_is_found(cache: Path) -> None:
    """vLLM beside versions that it refuses."""
    assert "fastapi" in resolve(["gpu"], "constraints.txt", cache)


def test_the_sets_differ_only_where_vllm_demands_it() -> None:
    def pins(file: str) -> set[str]:
        return {
            line
            for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
            if line and not line.startswith("#")
        }

    held_back = {
        line.partition("==")[0] for line in pins("constraints-gpu.txt") ^ pins("constraints.txt")
    }
    assert held_back == {"fastapi", "numpy", "protobuf"}
