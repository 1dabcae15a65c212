"""Runs agents: ``python host.py MODULE...`` imports the modules, and forks for each socket that
comes over the one at its input. A socket carries a JSON object on one line, and brings one line
that says how the agent ended. The agent and all that it started are killed at a limit, at its end,
when the client closes the socket, and when this process ends. Where user namespaces work, an agent
sees no process but those that it starts. Standard library only: it runs in the agent's Python.
"""

import asyncio
import ctypes
import fcntl
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
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK = 0.2
"""Seconds between two looks at the agent's processes."""
TAIL = 8192
"""Bytes that are kept of the end of an agent's output."""
RESULT = 1 << 14
"""Bytes that are read of an agent's result: more than a number, or the names of its exceptions, can
have.
"""
CHAIN = 8
"""Exceptions, each the cause of the one before, that are reported."""
BASES = 12
"""Classes of an exception that are reported."""
NAME = 80
"""Characters of a class's name that are reported."""
CONNECTIONS = 256
"""Connections of an agent to the policy at one time."""
PIECE = 1 << 16
"""Bytes that are passed on at once."""

# Numbers of the kernel, which Python has no names for.
ALONE = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000
"""CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS and CLONE_NEWIPC: namespaces of users, process ids,
mounts and IPC.
"""
NO_NETWORK = 0x40000000
"""CLONE_NEWNET: a namespace of the network, in which there is only a loopback device."""
INTERFACE_FLAGS, UP = 0x8914, 1
"""SIOCSIFFLAGS, which sets an interface's flags, and IFF_UP."""
RECURSIVE_PRIVATE = 0x4000 | 0x40000
"""MS_REC and MS_PRIVATE: no mount is seen outside of the namespace."""
PLAIN = 2 | 4 | 8
"""MS_NOSUID, MS_NODEV and MS_NOEXEC."""
DIES_WITH_PARENT, DUMPABLE, BOUND_DROP, SUBREAPER = 1, 4, 24, 36
"""Options of prctl: PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP and PR_SET_CHILD_SUBREAPER.
"""
SYS_PTRACE = 19
"""CAP_SYS_PTRACE: with it a process reads and writes the memory of others."""

PAGE = os.sysconf("SC_PAGE_SIZE")
LIBC = ctypes.CDLL(None, use_errno=True)
_MEMORY = importlib.util.spec_from_file_location(
    "rayloop_memory", Path(__file__).parents[2] / "sandbox" / "memory.py"
)
assert _MEMORY is not None
assert _MEMORY.loader is not None
memory: Any = importlib.util.module_from_spec(_MEMORY)
"""rayloop/sandbox/memory.py: there is no package rayloop in an agent's Python."""
_MEMORY.loader.exec_module(memory)


def main(*modules: str) -> None:
    """Serve until the input closes: then the process that started this one has ended."""
    for module in modules:
        importlib.import_module(module)
    alone = os.waitpid(_started(lambda: os._exit(0), ALONE | NO_NETWORK), 0)[1] == 0
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    print("ready", flush=True)
    with socket.socket(fileno=0) as control:
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return
            if os.fork() == 0:
                os.dup2(descriptors[0], 0)  # which closes the control socket here
                os.dup2(descriptors[0], 1)
                os.close(descriptors[0])
                _host(alone)
                os._exit(0)
            os.close(descriptors[0])


def _host(alone: bool) -> None:
    """Run one agent, and send ``{"end", "late", "code", "result", "raised", "broken", "output",
    "alone"}``.
    """
    # The parent ignores SIGCHLD; with that inherited, ``wait`` would return no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(0, "rb", buffering=0, closefd=False) as connection:
        asked = json.loads(connection.readline())
    LIBC.prctl(
        SUBREAPER, 1, 0, 0, 0
    )  # what the agent leaves behind becomes a child of this process
    alone = asked["alone"] = alone and asked["alone"]

    # Three pipes: what the agent prints, what its function returns, and the exit code, which its
    # parent reports.
    output, written = os.pipe()
    returned, returns = os.pipe()
    status, reports = os.pipe()
    most = int(asked["limits"]["memory_mb"]) << 20
    killed_before = memory.kernel_kills()
    # The sum over the processes comes first, since it can say what was passed. The cgroup is for
    # memory that it does not see.
    with memory.bounded(most + most // 4) as asked["group"]:
        ours, theirs = socket.socketpair()
        inside = alone and not asked["network"]
        asked["ours"] = output, returned, status, ours.fileno()
        namespaces = (ALONE | NO_NETWORK * inside) * alone
        first = _started(
            lambda: _keep(asked, written, returns, reports, theirs if inside else None), namespaces
        )
        # A pipe reports its end only after every copy of its writing end is closed.
        for descriptor in (written, returns, reports, theirs.detach()):
            os.close(descriptor)
        if inside and asked["address"]:
            threading.Thread(target=_relay, args=(ours, _port(asked)), daemon=True).start()
        group = os.path.dirname(asked["group"])
        found = _watch(first, output, asked["limits"], alone, group)
        # A cgroup can be removed only after its processes have ended.
        _kill()
        found["end"] = found["end"] or _killed_at_its_limit(asked["limits"], group)
        short = memory.machine_was_short(group, killed_before)

    code = os.read(status, RESULT)
    found["code"] = (
        os.waitstatus_to_exitcode(int(code)) if code and not found["end"] else -signal.SIGKILL
    )
    found |= {
        "result": None,
        "raised": [],
        "broken": short or not code,
    }  # without a code, the agent's parent was killed
    with suppress(ValueError):  # it was killed while it wrote
        told = json.loads(os.read(returned, RESULT) or b"{}")
        # The agent can write into that pipe: everything else is what this process has seen.
        if isinstance(told, dict):
            found |= {name: told[name] for name in ("result", "raised") if name in told}
    with suppress(OSError):
        os.write(1, json.dumps({**found, "alone": alone}).encode() + b"\n")


def _started(work: Callable[[], None], namespaces: int) -> int:
    """A new process that does ``work``, and is killed with this one.

    With ``namespaces`` the work is done by a child of it, the first process in them, which takes
    all others there along when it ends.
    """
    parent = os.getpid()
    # The child asks for its users once it is in the new namespace, and waits: only a process
    # outside may map them.
    asked, asks = os.pipe()
    mapped, maps = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            if namespaces:
                _check(LIBC.unshare(namespaces))
                os.write(asks, b"1")
                os.read(mapped, 1)
            _die_with(parent)
            if namespaces:
                # A process stays in its own namespace of process ids; its first child begins the
                # new one.
                first = os.fork()
                if first:
                    os._exit(bool(os.waitpid(first, 0)[1]))
                _die_with(0)
                _mount()
            for descriptor in (asked, asks, mapped, maps):
                os.close(descriptor)
            work()
        os._exit(1)
    os.close(asks)
    if namespaces and os.read(asked, 1):
        _map(pid)
        os.write(maps, b"1")
    for descriptor in (asked, mapped, maps):
        os.close(descriptor)
    return pid


def _map(pid: int) -> None:
    """Give the process in a new user namespace the users that there are here: to root all of them,
    to others their own.
    """
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        ranges = [f"{own} {own} 1"]
        if os.geteuid() == 0:
            with open(f"/proc/self/{kind}_map", encoding="utf-8") as file:
                ranges = [f"{inside} {inside} {count}" for inside, _, count in map(str.split, file)]
        elif kind == "gid":
            _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/{kind}_map", "\n".join(ranges))


def _mount() -> None:
    """A /proc of the new processes. Raises OSError, where a container hides parts of its own."""
    _check(LIBC.mount(b"none", b"/", None, RECURSIVE_PRIVATE, None))
    _check(LIBC.mount(b"proc", b"/proc", b"proc", PLAIN, None))


def _port(asked: Mapping[str, Any]) -> int:
    """Where the policy answers, on loopback."""
    return int(asked["address"]["base_url"].rsplit(":", 1)[1].split("/")[0])


def _listening(port: int) -> socket.socket:
    """The same address in a new network, whose loopback device is put to work."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, INTERFACE_FLAGS, struct.pack("16sh22x", b"lo", UP))
    return socket.create_server(("127.0.0.1", port), backlog=CONNECTIONS)


def _relay(passed: socket.socket, port: int) -> None:
    """Connect each connection to the agent's listening socket, which comes over ``passed``, with
    the policy.
    """
    _, descriptors, _, _ = socket.recv_fds(passed, 1, 1)
    free = threading.Semaphore(CONNECTIONS)
    with socket.socket(fileno=descriptors[0]) as listening:
        # An agent that opens more connections waits in the backlog, and starts no further threads.
        while free.acquire():
            agent, _ = listening.accept()
            threading.Thread(target=_connect, args=(agent, port, free), daemon=True).start()


def _connect(agent: socket.socket, port: int, free: threading.Semaphore) -> None:
    """Pass on what each side of a connection says, until one closes it."""
    with agent, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as policy:
        # Nagle's algorithm would hold a small message back until the one before is acknowledged.
        for one in (agent, policy):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pass_on, args=(policy, agent), daemon=True)
        back.start()
        _pass_on(agent, policy)
        back.join()
    free.release()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    # The other direction stays open: a client that has sent its request awaits the answer.
    for one, end in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):
            one.shutdown(end)


def _keep(
    asked: Mapping[str, Any], written: int, returns: int, reports: int, passed: socket.socket | None
) -> None:
    """Be the parent of the agent and of all that it leaves behind, until the agent ends;
    ``reports`` gets how, and ``passed`` the socket on which an agent without a network asks.
    """
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    # The fork has the host's ends of the pipes too, which the agent must not get.
    for descriptor in (nothing, *asked["ours"]):
        os.close(descriptor)

    most = int(asked["limits"]["memory_mb"]) << 20
    if asked["group"]:
        with suppress(OSError):
            _write(asked["group"], "0")
    if asked["alone"]:
        with suppress(OSError):  # shared segments of which no process is left are in no sum
            _write("/proc/sys/kernel/shmall", str(most // PAGE))
        LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", PLAIN, f"size={most}".encode())

    if passed is not None:
        if asked["address"]:
            with _listening(_port(asked)) as listening:
                socket.send_fds(passed, [b"1"], [listening.fileno()])
        passed.close()

    LIBC.prctl(BOUND_DROP, SYS_PTRACE, 0, 0, 0)
    parent = os.getpid()
    agent = os.fork()
    if agent == 0:
        os.close(reports)
        _die_with(parent)
        _become(asked, written, returns)
    os.close(written)
    os.close(returns)
    while True:
        # Orphans of the agent end here as well, since this process adopts them.
        pid, status = os.wait()
        if pid == agent:
            os.write(reports, str(status).encode())
            os._exit(0)


def _die_with(parent: int) -> None:
    """Be killed when the parent ends; ``parent`` is its id in this process's namespace, 0 for one
    outside.
    """
    LIBC.prctl(DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _watch(
    pid: int, output: int, limits: Mapping[str, float], alone: bool, group: str
) -> dict[str, Any]:
    """Returns when the agent has ended, or must: ``end`` says why, "" when it ended by itself;
    ``late``: at its deadline.
    """
    ended = os.pidfd_open(pid)
    open_ends = [ended, output, 0]  # 0: the client's socket
    tail = b""
    until = time.monotonic() + limits["seconds"]
    next_look = 0.0
    late = False
    while True:
        ready, _, _ = select.select(open_ends, [], [], LOOK)
        if output in ready:
            if chunk := os.read(output, 1 << 16):
                tail = (tail + chunk)[-TAIL:]
            else:
                open_ends.remove(output)
        end = (
            "its client closed the connection" if 0 in ready else ""
        )  # a client sends nothing more
        if not end and ended not in ready and time.monotonic() > next_look:
            late = time.monotonic() > until
            end = (
                _late(limits)
                if late
                else _beyond(limits, memory.tree(pid), alone) or _killed_at_its_limit(limits, group)
            )
            next_look = time.monotonic() + LOOK
        if end or ended in ready:
            break

    # The agent may have written something between the last look and its end.
    while (
        output in open_ends
        and select.select([output], [], [], 0)[0]
        and (chunk := os.read(output, 1 << 16))
    ):
        tail = (tail + chunk)[-TAIL:]
    return {"end": end, "late": late, "output": tail.decode(errors="replace")}


def _late(limits: Mapping[str, float]) -> str:
    return f"it did not end within {limits['seconds']:g} s (deadline)"


def _beyond(limits: Mapping[str, float], pids: list[int], alone: bool) -> str:
    """The limit that was passed by the agent's processes, which follow those that keep it; "" while
    there is none.
    """
    living = [pid for pid in pids[1 + alone :] if memory.lives(pid)]
    if len(living) > limits["processes"]:
        return f"it had {len(living)} processes, {limits['processes']} are allowed (processes)"
    most = int(limits["memory_mb"]) << 20
    files = 0
    if alone and living:
        with suppress(OSError):
            shared = os.statvfs(f"/proc/{pids[1]}/root/dev/shm")
            files = (shared.f_blocks - shared.f_bfree) * shared.f_frsize
    filled = memory.beyond(most - files, living)
    if filled or files > most:
        return (
            f"it filled {filled + files >> 20} MiB of memory, {limits['memory_mb']} are allowed"
            " (memory_mb)"
        )
    return ""


def _killed_at_its_limit(limits: Mapping[str, float], group: str) -> str:
    """What to say when the kernel, which is faster than the sum, ended a process of the agent at
    ``memory_mb``; else "".
    """
    if group and memory.kernel_kills(group) and memory.limit_was_reached(group):
        return (
            f"the kernel ended a process of it for its memory, of which {limits['memory_mb']} MiB"
            " are allowed (memory_mb)"
        )
    return ""


def _kill() -> None:
    """Kill all descendants, until none is left."""
    # A process may fork while the others are killed, so one round is not enough.
    while left := memory.tree(os.getpid())[1:]:
        for one in left:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        # A process that is not waited for stays in /proc, and would be found in each round.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(asked: Mapping[str, Any], written: int, returns: int) -> None:
    """In the child: be the agent. Never returns."""
    os.setsid()
    LIBC.prctl(
        DUMPABLE, 0, 0, 0, 0
    )  # else what it starts could write into its memory and its pipes
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(written, 2)

    most = int(asked["limits"]["memory_mb"]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    code = 1
    try:
        if isinstance(asked["run"], list):
            given = {**asked["row"], **asked["address"]}
            line = [
                str(given.get(word[1:-1], word)) if word[:1] + word[-1:] == "{}" else word
                for word in asked["run"]
            ]
            os.execvp(line[0], line)
        result = _called(asked)
        if asked.get("call", True):
            number = isinstance(result, int | float) or type(result).__module__ == "numpy"
            os.write(returns, json.dumps({"result": float(result) if number else None}).encode())
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        with suppress(Exception):
            os.write(returns, json.dumps({"raised": _raised(error)}).encode())
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        with suppress(Exception):
            os.write(returns, json.dumps({"raised": _raised(error)}).encode())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # An ordinary exit would run what the fork server, whose copy this is, has registered.
        os._exit(code)


def _raised(error: BaseException) -> list[tuple[list[str], Any]]:
    """The exception and those that led to it: names of its class and its bases, and its ``errno``."""
    chain: list[tuple[list[str], Any]] = []
    found: Any = error
    while found is not None and len(chain) < CHAIN:
        kinds = [kind.__name__[:NAME] for kind in type(found).__mro__[:BASES]]
        number = found.errno if isinstance(found, OSError) else None
        chain.append((kinds, number if isinstance(number, int) else None))
        inner = getattr(found, "exceptions", None)  # of a group
        if isinstance(inner, tuple) and inner and isinstance(inner[0], BaseException):
            found = inner[0]
        else:
            found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return chain


def _called(asked: Mapping[str, Any]) -> Any:
    """What the agent's function returns; with ``call: false`` the function is only loaded.

    Its parameters are filled by name.
    """
    sys.path[:0] = [
        os.getcwd(),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]  # as at a start of Python
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
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty or p.name in given
    ]
    if len(needed) == 1 and needed[0] not in given:
        result = function(asked["row"])
    else:
        result = function(**{name: given[name] for name in needed if name in given})
    return asyncio.run(result) if inspect.iscoroutine(result) else result


if __name__ == "__main__":
    main(*sys.argv[1:])
