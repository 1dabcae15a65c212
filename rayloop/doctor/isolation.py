"""Checks of what surrounds the run: schedulers, and how far a tool's code could be locked in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from rayloop.doctor.finding import Finding
from rayloop.envs.browser.containment import BrowserSettings, Confinement, available
from rayloop.envs.desktop.session import missing
from rayloop.sandbox import bubblewrap
from rayloop.sandbox.levels import Reached, reached
from rayloop.sandbox.options import Level

PROGRAM, SERVER = BrowserSettings().program, "Xvfb"
NAMESPACES = (
    "install bubblewrap and allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0, in a container a seccomp profile that permits unshare"
)


def sandbox(found: Callable[[], Reached] = reached) -> list[Finding]:
    """How strongly code that the policy writes can be held in, proven by attacks: warning when it is less than namespaces."""
    here = found()
    said = f"level: {here}"
    if here.level == Level.NAMESPACES:
        return [Finding("ok", said)]
    return [Finding("warning", said, NAMESPACES)]


def browser(program: str = PROGRAM, available: Callable[[], Confinement] = available) -> list[Finding]:
    """What holds in the Chromium of browser environments, where there is one: warning when it is less than namespaces and
    Chromium's own sandbox, since a page could then reach more."""
    if shutil.which(program) is None:
        return [Finding("ok", f"{program} is not installed; only browser environments need it")]
    held = available()
    if not held.lacks:
        return [Finding("ok", f"{program} is held in by {held}")]
    remedy = (
        "install bubblewrap and allow user namespaces (see sandbox above); browser.containment says what must be there"
        if held.level != "namespaces"
        else "allow user namespaces to be nested: sysctl user.max_user_namespaces, on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0"
    )
    return [Finding("warning", f"{program} is held in by {held}", remedy)]


def desktop(lacks: Callable[[], str] = missing, refused: Callable[[], str] = bubblewrap.refused_here) -> list[Finding]:
    """The programs of local desktops, where there is an X server for them, and bubblewrap: warning when one is missing."""
    if shutil.which(SERVER) is None:
        return [Finding("ok", f"{SERVER} is not installed; only desktop environments need it")]
    if remedy := lacks():
        return [Finding("warning", "something that desktops need is missing", remedy)]
    if why := refused():
        return [Finding("warning", f"desktops cannot be started; bubblewrap: {why}", NAMESPACES)]
    return [Finding("ok", "all programs are there, and bubblewrap starts")]


def scheduler(environment: Mapping[str, str], which: Callable[[str], str | None] = shutil.which) -> list[Finding]:
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
