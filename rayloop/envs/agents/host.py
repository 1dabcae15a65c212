"""Runs agents: ``python host.py NAME MODULE...`` imports the modules, and forks for each connection of its own user to the abstract
Unix socket NAME. A connection carries a JSON object on one line, and brings one line that says how the agent ended. The agent and
all that it started are killed at a limit, at its end, and when the connection closes because the client is gone. Standard library
only, since it runs in the agent's own Python."""

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LOOK = 0.2
"""Seconds between two looks at the agent's processes."""
TAIL, RESULT = 8192, 4096
"""Bytes of its output that are kept, and more than a number has that it returns."""
SUBREAPER = 36
PAGE = os.sysconf("SC_PAGE_SIZE")


def main(name: str, *modules: str) -> None:
    """Serve until the input closes, since the process that started this one is gone then."""
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen(256)
        print("ready", flush=True)
        while 0 not in select.select([server.fileno(), 0], [], [])[0]:
            connection, _ = server.accept()
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.geteuid() and os.fork() == 0:
                os.dup2(connection.fileno(), 0)
                os.dup2(connection.fileno(), 1)
                server.close()
                connection.close()
                _host()
                os._exit(0)
            connection.close()


def _host() -> None:
    """Run one agent, and send ``{"end": ..., "code": ..., "result": ..., "output": ...}``."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(0, "rb", buffering=0, closefd=False) as connection:
        asked = json.loads(connection.readline())
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # what the agent leaves behind becomes a child of this process
    output, written = os.pipe()
    returned, returns = os.pipe()
    pid = os.fork()
    if pid == 0:
        for descriptor in (output, returned):
            os.close(descriptor)
        _become(asked, written, returns)
    os.close(written)
    os.close(returns)
    found = _watch(pid, output, asked["limits"])
    _kill(pid)
    try:
        found["result"] = json.loads(os.read(returned, RESULT) or b"null")
    except ValueError:  # it was killed while it wrote
        found["result"] = None
    with suppress(OSError):
        os.write(1, json.dumps(found).encode() + b"\n")


def _watch(pid: int, output: int, limits: Mapping[str, float]) -> dict[str, Any]:
    """Returns when the agent has ended, or must: ``end`` says why, "" when it ended by itself."""
    ended, tail = os.pidfd_open(pid), b""
    until, open_ends = time.monotonic() + limits["seconds"], [ended, output, 0]
    look = 0.0
    while True:
        ready, _, _ = select.select(open_ends, [], [], LOOK)
        if output in ready:
            if chunk := os.read(output, 1 << 16):
                tail = (tail + chunk)[-TAIL:]
            else:
                open_ends.remove(output)
        gone = "its client is gone" if 0 in ready else ""  # else nothing comes
        end = gone
        if not end and ended not in ready and time.monotonic() > look:
            end, look = _beyond(limits, until), time.monotonic() + LOOK
        if end or ended in ready:
            break
    code = -signal.SIGKILL if end else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    while output in open_ends and select.select([output], [], [], 0)[0] and (chunk := os.read(output, 1 << 16)):
        tail = (tail + chunk)[-TAIL:]
    return {"end": end, "code": code, "output": tail.decode(errors="replace")}


def _beyond(limits: Mapping[str, float], until: float) -> str:
    """The limit that was passed; "" while there is none."""
    if time.monotonic() > until:
        return f"it did not end within {limits['seconds']:g} s (deadline)"
    processes = _descendants()
    if len(processes) > limits["processes"]:
        return f"it had {len(processes)} processes, {limits['processes']} are allowed (processes)"
    if (filled := sum(map(_filled, processes)) >> 20) > limits["memory_mb"]:
        return f"it filled {filled} MiB of memory, {limits['memory_mb']} are allowed (memory_mb)"
    return ""


def _descendants() -> list[int]:
    """The processes that the agent has, in all sessions."""
    found = _children(os.getpid())
    for pid in found:
        found += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file:
                found += map(int, file.read().split())
    return found


def _filled(pid: int) -> int:
    """Bytes that the process alone has written to."""
    with suppress(OSError), open(f"/proc/{pid}/statm", encoding="utf-8") as file:
        _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * PAGE
    return 0


def _kill(pid: int) -> None:
    """Kill the agent and its descendants, until none is left."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while left := _descendants():
        for one in left:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(asked: Mapping[str, Any], written: int, returns: int) -> None:
    """In the child: be the agent. Never returns."""
    os.setsid()
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    memory = int(asked["limits"]["memory_mb"]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 1
    try:
        if isinstance(asked["run"], list):
            line = [str(asked["row"].get(word[1:-1], word)) if word[:1] + word[-1:] == "{}" else word for word in asked["run"]]
            os.execvp(line[0], line)
        result = _called(asked)
        if asked.get("call", True):
            number = isinstance(result, int | float) or type(result).__module__ == "numpy"
            os.write(returns, json.dumps(float(result) if number else None).encode())
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _called(asked: Mapping[str, Any]) -> Any:
    """What the agent's function returns; with ``call: false`` the function is only loaded. Its parameters are filled by name."""
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]  # as at a start of Python
    place, _, name = asked["run"].rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("agent", place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} is no Python file")
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        module = sys.modules["agent"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name)
    if not asked.get("call", True):
        return None
    given = {**asked["row"], **asked["address"], "row": asked["row"]}
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty or p.name in given]
    if len(needed) == 1 and needed[0] not in given:
        result = function(asked["row"])
    else:
        result = function(**{name: given[name] for name in needed if name in given})
    return asyncio.run(result) if inspect.iscoroutine(result) else result


if __name__ == "__main__":
    main(*sys.argv[1:])
