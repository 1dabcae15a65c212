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
from rayloop.launch.network import CONNECT_TIMEOUT_S, unreachable

DASHBOARD_PORT = 8265
PORTS = {
    6379: ("GCS", "--port"),
    DASHBOARD_PORT: ("dashboard", "--dashboard-port"),
    10001: ("Ray client", "--ray-client-server-port"),
}
"""Ray's default ports: the purpose, and the option of ``ray start`` that chooses another."""
_RAY_COMMAND = re.compile(r"/gcs_server\b|/raylet\b|ray/dashboard|ray\.util\.client|^ray::")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_GCS_PORT = 6379
_SCHEME_PORTS = {"ray": 10001, "http": DASHBOARD_PORT, "https": 443}
_PROXY_PORTS = {"https": 443}
_DEFAULT_PROXY_PORT = 80
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Ray's file with the address of the cluster that was started last on this machine.

It is read for the address ``auto``.
"""
_MAX_COMMAND_CHARACTERS = 80


def ports(required: Collection[int] = ()) -> list[Finding]:
    """Processes that listen on ports which a run needs.

    Error for a ``required`` port; warning for one of Ray's default ports, unless Ray itself has it.
    """
    findings = []
    free_ports = []
    pids = _listening_pids()
    for port in sorted({*PORTS, *required}):
        if port not in pids:
            free_ports.append(str(port))
            continue
        owners = [_owner(pid) for pid in pids[port]]
        names = ", ".join(sorted(name for name, _ in owners))
        purpose, option = PORTS.get(port, ("", ""))
        port_name = f"{port} ({purpose})" if purpose else str(port)
        state = f"{port_name} is taken by {names}"
        if port not in required and all(is_ray for _, is_ray in owners):
            findings.append(Finding("ok", state))
            continue
        choice = f" with ray start {option}" if option else ""
        remedy = f"end it, or choose another port{choice}; train finds free ports by itself"
        findings.append(Finding("error" if port in required else "warning", state, remedy))
    if free_ports:
        findings.append(Finding("ok", f"free: {', '.join(free_ports)}"))
    return findings


def _listening_pids() -> dict[int, set[int | None]]:
    """The processes that listen on each port; None for one that only root may see."""
    pids: dict[int, set[int | None]] = {}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            pids.setdefault(connection.laddr.port, set()).add(connection.pid)
    return pids


def _owner(pid: int | None) -> tuple[str, bool]:
    """A readable name of a process, and whether it is one of Ray's."""
    if pid is None:
        return "a process that only root may see", False
    try:
        process = psutil.Process(pid)
        words = process.cmdline() or [process.name()]
        user = process.username()
    except psutil.Error as error:
        return f"pid {pid} ({type(error).__name__})", False
    command = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    name = f"pid {pid} of {user}: {command[:_MAX_COMMAND_CHARACTERS]}"
    return name, bool(_RAY_COMMAND.search(" ".join(words)))


def proxies(environment: Mapping[str, str], internal: Iterable[str]) -> list[Finding]:
    """Proxy variables: error when a proxy does not answer.

    Warning when it would see requests to hosts inside the cluster.

    ``internal``: these hosts.
    """
    variables: dict[str, list[str]] = {}
    for variable in (*_PROXY_VARIABLES, *map(str.upper, _PROXY_VARIABLES)):
        proxy = environment.get(variable)
        if proxy:
            variables.setdefault(proxy, []).append(variable)
    findings = [_proxy(proxy, names) for proxy, names in variables.items()]
    exceptions = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    missing = [host for host in internal if not proxy_bypass(host, {"no": exceptions})]
    if variables and missing:
        state = (
            f"no_proxy={exceptions} leaves out {', '.join(missing)}: requests inside the cluster"
            " would go to the proxy"
        )
        hosts = ",".join(filter(None, [exceptions, *missing]))
        remedy = (
            f"export no_proxy={hosts} NO_PROXY={hosts} (names and addresses one by one: ranges are"
            " not understood by all)"
        )
        findings.append(Finding("warning", state, remedy))
    return findings or [Finding("ok", "none")]


def _proxy(proxy: str, variables: list[str]) -> Finding:
    """Whether a proxy answers."""
    host, port = place(proxy, _PROXY_PORTS, _DEFAULT_PROXY_PORT)
    # Host and port alone: the variable may have a user and a password.
    name = f"{', '.join(variables)} ({host}:{port})"
    problem = unreachable(host, port)
    if not problem:
        return Finding("ok", f"{name} answers")
    remedy = (
        f"unset {' '.join(variables)}, or name a proxy that works: downloads and loggers go"
        " through it"
    )
    return Finding("error", f"{name} does not answer: {problem}", remedy)


def place(
    address: str, defaults: Mapping[str, int] = _SCHEME_PORTS, default: int = _GCS_PORT
) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``ray://HOST:PORT`` or ``http://HOST:PORT``.

    An address without a port has that of its scheme.
    """
    url = urlsplit(address if "//" in address else f"//{address}")
    try:
        port = url.port
    except ValueError:
        port = None
    return url.hostname or "", port or defaults.get(url.scheme, default)


def ray_address(address: str | None, current: Path = _CURRENT_CLUSTER) -> list[Finding]:
    """The cluster to join answers: error when it does not.

    Without an address a run starts its own.
    """
    if address in (None, "", "local"):
        return [Finding("ok", "no address: a run starts a private cluster on this machine")]
    if address == "auto":
        if not current.exists():
            remedy = "start a head, or name its address: --address HOST:6379"
            return [Finding("error", f"auto: {current} does not exist", remedy)]
        return ray_address(current.read_text(encoding="utf-8").strip())
    assert address is not None
    host, port = place(address)
    problem = unreachable(host, port)
    if problem:
        remedy = (
            "is the head running, and does a firewall let this machine through? Unset RAY_ADDRESS"
            " for a private cluster"
        )
        return [Finding("error", f"{host}:{port} does not answer: {problem}", remedy)]
    return [Finding("ok", f"{host}:{port} answers")]


def token(environment: Mapping[str, str], named: Path | None, home: Path) -> list[Finding]:
    """Token authentication: error without a token that is needed.

    Warning when others can read the token, or when authentication is off.

    ``named``: the token's file. Without it, it is that of ``RAY_AUTH_TOKEN_PATH``, or
    ``home/.ray/auth_token``, as for Ray.
    """
    mode = environment.get("RAY_AUTH_MODE", "token" if named else "")
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    file = named or (Path(path) if path else home / ".ray" / "auth_token")
    if mode not in ("", "token", "disabled"):
        remedy = "export RAY_AUTH_MODE=token (or disabled)"
        return [Finding("error", f"RAY_AUTH_MODE={mode}", remedy)]

    findings = []
    if mode == "disabled":
        state = "RAY_AUTH_MODE=disabled: who reaches the ports of a cluster may run code in it"
        remedy = "unset RAY_AUTH_MODE; --insecure does the same for one command"
        findings.append(Finding("warning", state, remedy))
    if "RAY_AUTH_TOKEN" in environment:
        state = (
            "RAY_AUTH_TOKEN holds the token itself, which every child process and many logs get"
            " to see"
        )
        remedy = "put it into a file of mode 0600 and name that with RAY_AUTH_TOKEN_PATH"
        findings.append(Finding("warning", state, remedy))
    elif file.is_file():
        findings.append(_token_file(file))
    elif mode == "token" or path:
        state = f"{file} does not exist, and the cluster wants a token"
        remedy = (
            "copy the token from the head (python -m rayloop writes one per cluster), and name it"
            " with --token-file"
        )
        findings.append(Finding("error", state, remedy))
    if findings:
        return findings
    state = (
        "none yet: train makes one for its cluster, but a plain `ray start --head` would be open"
    )
    return [Finding("ok", state)]


def _token_file(file: Path) -> Finding:
    if not os.access(file, os.R_OK) or not file.stat().st_size:
        return Finding(
            "error", f"{file} is empty or cannot be read", "copy the token from the head"
        )
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        state = f"{file} has mode {mode:04o}: other users may run code in the cluster"
        return Finding("warning", state, f"chmod 600 {file}")
    return Finding("ok", f"{file} (mode {mode:04o})")


def dashboards(candidates: Collection[int], address: str | None, node: str | None) -> list[Finding]:
    """Ray dashboards that answer without a token, here and at the cluster's address.

    Warning unless only this machine reaches them.

    ``candidates``: ports of this machine; ``node``: its own address.
    """
    findings = []
    for url in _dashboard_urls(candidates, address, node):
        status = dashboard_status(url)
        if status in (401, 403):
            findings.append(Finding("ok", f"{url} asks for a token"))
        elif status == 200 and _is_loopback(urlsplit(url).hostname or ""):
            findings.append(Finding("ok", f"{url} is open, for users of this machine only"))
        elif status == 200:
            state = f"{url} is open: who reaches it may run code in the cluster"
            remedy = (
                "start the head with RAY_AUTH_MODE=token, or with --dashboard-host=127.0.0.1 and"
                " use an SSH tunnel"
            )
            findings.append(Finding("warning", state, remedy))
    return findings or [Finding("ok", "none found")]


def _dashboard_urls(
    candidates: Collection[int], address: str | None, node: str | None
) -> list[str]:
    """The addresses at which a dashboard may answer, each once."""
    urls: list[str] = []
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in candidates:
            listens_everywhere = connection.laddr.ip in ("0.0.0.0", "::")
            host = (node or "127.0.0.1") if listens_everywhere else connection.laddr.ip
            if ":" in host:
                host = f"[{host}]"
            urls.append(f"http://{host}:{connection.laddr.port}")
    if address and address not in ("auto", "local"):
        host, port = place(address)
        if not address.startswith("http"):
            port = DASHBOARD_PORT
        is_listed = _is_loopback(host) and any(url.endswith(f":{port}") for url in urls)
        if not is_listed:
            urls.append(f"http://{host}:{port}")
    return list(dict.fromkeys(urls))


def dashboard_status(url: str) -> int:
    """The status with which a Ray dashboard answers without a token; 0 without a dashboard."""
    try:
        answer = httpx.get(
            f"{url}/api/version", timeout=CONNECT_TIMEOUT_S, trust_env=False, follow_redirects=True
        )
        is_dashboard = answer.is_error or "ray_version" in answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
        return 0
    return answer.status_code if is_dashboard else 0


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
