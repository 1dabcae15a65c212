"""Checks of ports, proxies, and of the Ray cluster that a run would join."""

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import httpx
import psutil

from rayloop.doctor.finding import Finding
from rayloop.launch.network import CONNECT, unreachable

DASHBOARD = 8265
PORTS = {
    6379: ("GCS", "--port"),
    DASHBOARD: ("dashboard", "--dashboard-port"),
    10001: ("Ray client", "--ray-client-server-port"),
}
"""Ray's defaults: what it is for, and the option of ``ray start`` that chooses another."""
RAYS_OWN = re.compile(r"/gcs_server\b|/raylet\b|ray/dashboard|ray\.util\.client|^ray::")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
SCHEME_PORTS = {"ray": 10001, "http": DASHBOARD, "https": 443}
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where Ray notes the address of the cluster that was started last on this machine; read for the
address ``auto``.
"""


def ports(required: Collection[int] = ()) -> list[Finding]:
    """Who listens on Ray's default ports (warning) and on ``required`` ones (error); Ray itself may
    hold the former.
    """
    findings, free = [], []
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    for port in sorted({*PORTS, *required}):
        purpose, option = PORTS.get(port, ("", ""))
        owners = [_owner(pid) for pid in {c.pid for c in listening if c.laddr.port == port}]
        if not owners:
            free.append(str(port))
            continue
        found = (
            f"{port}{purpose and f' ({purpose})'} is taken by"
            f" {', '.join(sorted(owner for owner, _ in owners))}"
        )
        if port not in required and all(rays for _, rays in owners):
            findings.append(Finding("ok", found))
        else:
            remedy = (
                f"end it, or choose another port{option and f' with ray start {option}'}; train"
                " finds free ports by itself"
            )
            findings.append(Finding("error" if port in required else "warning", found, remedy))
    return [*findings, Finding("ok", f"free: {', '.join(free)}")] if free else findings


def _owner(pid: int | None) -> tuple[str, bool]:
    """A process for a person, and whether it is one of Ray's."""
    if pid is None:
        return "a process that only root may see", False
    try:
        process = psutil.Process(pid)
        words = process.cmdline() or [process.name()]
        user = process.username()
    except psutil.Error as error:
        return f"pid {pid} ({type(error).__name__})", False
    command = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    return f"pid {pid} of {user}: {command[:80]}", bool(RAYS_OWN.search(" ".join(words)))


def proxies(environment: Mapping[str, str], internal: Iterable[str]) -> list[Finding]:
    """Proxy variables: error when a proxy does not answer, warning when it would see requests to
    ``internal`` hosts.
    """
    named: dict[str, list[str]] = {}
    for variable in (*PROXIES, *map(str.upper, PROXIES)):
        if value := environment.get(variable):
            named.setdefault(value, []).append(variable)
    findings = []
    for value, variables in named.items():
        host, port = place(value, {"https": 443}, 80)
        names = f"{', '.join(variables)} ({host}:{port})"  # never the user and password in it
        if problem := unreachable(host, port):
            remedy = (
                f"unset {' '.join(variables)}, or name a proxy that works: downloads and loggers go"
                " through it"
            )
            findings.append(Finding("error", f"{names} does not answer: {problem}", remedy))
        else:
            findings.append(Finding("ok", f"{names} answers"))
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    caught = [host for host in internal if not proxy_bypass(host, {"no": excepted})]
    if named and caught:
        found = (
            f"no_proxy={excepted} leaves out {', '.join(caught)}: requests inside the cluster would"
            " go to the proxy"
        )
        whole = ",".join(filter(None, [excepted, *caught]))
        remedy = (
            f"export no_proxy={whole} NO_PROXY={whole} (names and addresses one by one: ranges are"
            " not understood by all)"
        )
        findings.append(Finding("warning", found, remedy))
    return findings or [Finding("ok", "none")]


def place(
    address: str, defaults: Mapping[str, int] = SCHEME_PORTS, default: int = 6379
) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``ray://HOST:PORT`` or ``http://HOST:PORT``; without a port
    that of the scheme.
    """
    url = urlsplit(address if "//" in address else f"//{address}")
    try:
        named = url.port
    except ValueError:
        named = None
    return url.hostname or "", named or defaults.get(url.scheme, default)


def ray_address(address: str | None, current: Path = CURRENT_CLUSTER) -> list[Finding]:
    """The cluster to join answers: error when it does not.

    Without an address a run starts its own.
    """
    if address in (None, "", "local"):
        return [Finding("ok", "no address: a run starts a private cluster on this machine")]
    if address == "auto":
        if not current.exists():
            return [
                Finding(
                    "error",
                    f"auto: {current} does not exist",
                    "start a head, or name its address: --address HOST:6379",
                )
            ]
        return ray_address(current.read_text(encoding="utf-8").strip())
    assert address is not None
    host, port = place(address)
    if problem := unreachable(host, port):
        remedy = (
            "is the head running, and does a firewall let this machine through? Unset RAY_ADDRESS"
            " for a private cluster"
        )
        return [Finding("error", f"{host}:{port} does not answer: {problem}", remedy)]
    return [Finding("ok", f"{host}:{port} answers")]


def token(environment: Mapping[str, str], named: Path | None, home: Path) -> list[Finding]:
    """Token authentication: error when there is no token but has to be one, warning when others
    could read it or it is off.

    The token is the file ``named``, that of ``RAY_AUTH_TOKEN_PATH``, or ``home/.ray/auth_token``,
    as Ray looks for it.
    """
    mode, path = (
        environment.get("RAY_AUTH_MODE", "token" if named else ""),
        environment.get("RAY_AUTH_TOKEN_PATH"),
    )
    file = named or (Path(path) if path else home / ".ray" / "auth_token")
    if mode not in ("", "token", "disabled"):
        return [
            Finding("error", f"RAY_AUTH_MODE={mode}", "export RAY_AUTH_MODE=token (or disabled)")
        ]
    findings = []
    if mode == "disabled":
        remedy = "unset RAY_AUTH_MODE; --insecure does the same for one command"
        findings.append(
            Finding(
                "warning",
                "RAY_AUTH_MODE=disabled: who reaches the ports of a cluster may run code in it",
                remedy,
            )
        )
    if "RAY_AUTH_TOKEN" in environment:
        found = (
            "RAY_AUTH_TOKEN holds the token itself, which every child process and many logs get"
            " to see"
        )
        findings.append(
            Finding(
                "warning",
                found,
                "put it into a file of mode 0600 and name that with RAY_AUTH_TOKEN_PATH",
            )
        )
    elif file.is_file():
        findings += _token_file(file)
    elif mode == "token" or path:
        remedy = (
            "copy the token from the head (python -m rayloop writes one per cluster), and name it"
            " with --token-file"
        )
        findings.append(
            Finding("error", f"{file} does not exist, and the cluster wants a token", remedy)
        )
    if not findings:
        findings.append(
            Finding(
                "ok",
                "none yet: train makes one for its cluster, but a plain `ray start --head` would be"
                " open",
            )
        )
    return findings


def _token_file(file: Path) -> list[Finding]:
    if not os.access(file, os.R_OK) or not file.stat().st_size:
        return [
            Finding("error", f"{file} is empty or cannot be read", "copy the token from the head")
        ]
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        return [
            Finding(
                "warning",
                f"{file} has mode {mode:04o}: other users may run code in the cluster",
                f"chmod 600 {file}",
            )
        ]
    return [Finding("ok", f"{file} (mode {mode:04o})")]


def dashboards(candidates: Collection[int], address: str | None, node: str | None) -> list[Finding]:
    """Ray dashboards that answer without a token, here and at the cluster's address: warning unless
    only this machine reaches them.

    ``candidates``: ports of this machine; ``node``: its own address.
    """
    findings = []
    for url in _dashboard_urls(candidates, address, node):
        status = dashboard_status(url)
        if status in (401, 403):
            findings.append(Finding("ok", f"{url} asks for a token"))
        elif status == 200 and _loopback(urlsplit(url).hostname or ""):
            findings.append(Finding("ok", f"{url} is open, for users of this machine only"))
        elif status == 200:
            remedy = (
                "start the head with RAY_AUTH_MODE=token, or with --dashboard-host=127.0.0.1 and"
                " use an SSH tunnel"
            )
            findings.append(
                Finding(
                    "warning", f"{url} is open: who reaches it may run code in the cluster", remedy
                )
            )
    return findings or [Finding("ok", "none found")]


def _dashboard_urls(
    candidates: Collection[int], address: str | None, node: str | None
) -> list[str]:
    urls: dict[str, None] = {}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in candidates:
            everywhere = connection.laddr.ip in ("0.0.0.0", "::")
            host = (node or "127.0.0.1") if everywhere else connection.laddr.ip
            urls[f"http://{f'[{host}]' if ':' in host else host}:{connection.laddr.port}"] = None
    if address and address not in ("auto", "local"):
        host, port = place(address)
        port = port if address.startswith("http") else DASHBOARD
        if not (_loopback(host) and any(url.endswith(f":{port}") for url in urls)):
            urls[f"http://{host}:{port}"] = None
    return list(urls)


def dashboard_status(url: str) -> int:
    """What a Ray dashboard answers to a request without a token; 0 when none answers there."""
    try:
        answer = httpx.get(
            f"{url}/api/version", timeout=CONNECT, trust_env=False, follow_redirects=True
        )
        return answer.status_code if answer.is_error or "ray_version" in answer.json() else 0
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
        return 0


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
