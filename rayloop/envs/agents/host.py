"""Runs agents, each in a forked process: ``python host.py MODULE...``.

It imports the modules, and forks for each socket that comes over the socket at its input. Such a
socket carries a request, a JSON object on one line, and gets one line that says how the agent
ended. The agent and all that it started are killed at a limit, at its end, when the client closes
the socket, and when this process ends. Where user namespaces work, an agent sees only the processes
that it starts. Standard library only: it runs in the agent's Python.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CHECK_EVERY_S = 0.2
"""Seconds between two checks of the agent's processes."""
OUTPUT_TAIL_BYTES = 8192
"""Bytes that are kept of the end of an agent's output."""
RESULT_VARIABLE = "RAYLOOP_RESULT_FD"
"""The variable with the number of the descriptor to which a command writes its result."""
RESULT_BYTES = 1 << 14
"""Bytes that are read of an agent's result.

That is more than a number, or the names of its exceptions, can have.
"""
MAX_CONNECTIONS = 256
"""Connections of an agent to the policy at one time."""
CHUNK_BYTES = 1 << 16
"""Bytes that are read at once."""

# Numbers of the kernel, for which Python has no names.
SET_DUMPABLE = 4
"""PR_SET_DUMPABLE, an option of prctl as the next two."""
DROP_CAPABILITY = 24
"""PR_CAPBSET_DROP."""
SET_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""
SYS_PTRACE = 19
"""CAP_SYS_PTRACE: with it a process reads and writes the memory of others."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _load(path: Path) -> Any:
    """Load a file of rayloop: an agent's Python has no package rayloop."""
    spec = importlib.util.spec_from_file_location(f"rayloop_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


memory = _load(Path(__file__).parents[2] / "sandbox" / "memory.py")
namespaces = _load(Path(__file__).with_name("namespaces.py"))
raised = _load(Path(__file__).with_name("raised.py"))
LIBC = namespaces.LIBC


def main(*modules: str) -> None:
    """Serve until the input closes: then the process that started this one has ended."""
    for module in modules:
        importlib.import_module(module)
    probe = namespaces.start(lambda: os._exit(0), namespaces.NEW_NAMESPACES | namespaces.NO_NETWORK)
    can_isolate = os.waitpid(probe, 0)[1] == 0
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
                _host(can_isolate)
                os._exit(0)
            os.close(descriptors[0])


def _host(can_isolate: bool) -> None:
    """Run one agent, and send how it ended.

    The keys are ``end``, ``late``, ``code``, ``result``, ``raised``, ``cause``, ``server``,
    ``broken``, ``output`` and ``alone``.
    """
    # The parent ignores SIGCHLD; with that inherited, ``wait`` would return no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(0, "rb", buffering=0, closefd=False) as connection:
        request = json.loads(connection.readline())
    # What the agent leaves behind becomes a child of this process.
    LIBC.prctl(SET_SUBREAPER, 1, 0, 0, 0)
    isolated = can_isolate and request["alone"]
    request["alone"] = isolated
    without_network = isolated and not request["network"]

    # For what the agent prints, for its result, and for the exit code, which its parent reports.
    # The result has a socket: /proc/PID/fd would open a pipe for every program of the agent.
    output_reader, output_writer = os.pipe()
    result_reader, result_writer = (end.detach() for end in socket.socketpair())
    status_reader, status_writer = os.pipe()
    limits = request["limits"]
    memory_bytes = int(limits["memory_mb"]) << 20
    kills_at_start = memory.kernel_kills()
    # The sum over the processes comes first, since it can say which limit was passed. The cgroup is
    # for memory that the sum does not see.
    with memory.bounded(memory_bytes + memory_bytes // 4) as request["group"]:
        host_end, agent_end = socket.socketpair()
        request["host_ends"] = output_reader, result_reader, status_reader, host_end.fileno()
        listening_end = agent_end if without_network else None
        keeper = namespaces.start(
            lambda: _keep(request, output_writer, result_writer, status_writer, listening_end),
            _namespace_flags(isolated, without_network),
        )
        # A pipe reports its end only after every copy of its writing end is closed.
        for descriptor in (output_writer, result_writer, status_writer, agent_end.detach()):
            os.close(descriptor)
        if without_network and request["address"]:
            relay = threading.Thread(target=_relay, args=(host_end, _port(request)), daemon=True)
            relay.start()
        group = os.path.dirname(request["group"])
        report = _watch(keeper, output_reader, limits, isolated, group)
        # A cgroup can be removed only after its processes have ended.
        _kill_descendants()
        report["output"] = _output_tail(report["output"], output_reader)
        report["end"] = report["end"] or _killed_at_its_limit(limits, group)
        machine_was_short = memory.machine_was_short(group, kills_at_start)

    status = os.read(status_reader, RESULT_BYTES)
    if status and not report["end"]:
        report["code"] = os.waitstatus_to_exitcode(int(status))
    else:
        report["code"] = -signal.SIGKILL
    # Without a status, the agent's parent was killed.
    report["broken"] = machine_was_short or not status
    report |= _read_result(result_reader)
    with suppress(OSError):
        os.write(1, json.dumps({**report, "alone": isolated}).encode() + b"\n")


def _output_tail(output: bytes, output_reader: int) -> str:
    """The last bytes of the output. Nothing can write any more, so the rest of it has an end."""
    with open(output_reader, "rb") as rest:
        tail = (output + rest.read())[-OUTPUT_TAIL_BYTES:]
    return tail.decode(errors="replace")


def _namespace_flags(isolated: bool, without_network: bool) -> int:
    flags = 0
    if isolated:
        flags |= namespaces.NEW_NAMESPACES
    if without_network:
        flags |= namespaces.NO_NETWORK
    return flags


def _read_result(result_reader: int) -> dict[str, Any]:
    """Read ``result``, ``raised``, ``cause`` and ``server``, which the agent wrote.

    The agent can write anything into that socket, so that nothing else is taken from it.
    """
    values: dict[str, Any] = {"result": None, "raised": [], "cause": "", "server": ""}
    with suppress(ValueError):  # it was killed while it wrote
        written = json.loads(os.read(result_reader, RESULT_BYTES) or b"{}")
        if isinstance(written, dict):
            values |= {name: written[name] for name in values if name in written}
    return values


def _port(request: Mapping[str, Any]) -> int:
    """Return the port on loopback at which the policy answers."""
    return int(request["address"]["base_url"].rsplit(":", 1)[1].split("/")[0])


def _relay(host_end: socket.socket, port: int) -> None:
    """Connect the agent's connections with the policy.

    The agent's listening socket comes over ``host_end``.
    """
    _, descriptors, _, _ = socket.recv_fds(host_end, 1, 1)
    free = threading.Semaphore(MAX_CONNECTIONS)
    with socket.socket(fileno=descriptors[0]) as listening:
        # An agent that opens more connections waits in the backlog, and starts no further threads.
        while free.acquire():
            agent, _ = listening.accept()
            threading.Thread(target=_connect, args=(agent, port, free), daemon=True).start()


def _connect(agent: socket.socket, port: int, free: threading.Semaphore) -> None:
    """Forward each side of a connection to the other, until one closes it."""
    with agent, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as policy:
        # Nagle's algorithm would hold a small message back until the one before is acknowledged.
        for connection in (agent, policy):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = threading.Thread(target=_forward, args=(policy, agent), daemon=True)
        answers.start()
        _forward(agent, policy)
        answers.join()
    free.release()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    # The other direction stays open: a client that has sent its request awaits the answer.
    for connection, direction in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):
            connection.shutdown(direction)


def _keep(
    request: Mapping[str, Any],
    output_writer: int,
    result_writer: int,
    status_writer: int,
    listening_end: socket.socket | None,
) -> None:
    """Be the parent of the agent and of all that it leaves behind, until the agent ends.

    ``status_writer`` gets how it ended, ``listening_end`` the socket at which an agent without a
    network asks the policy.
    """
    LIBC.prctl(SET_SUBREAPER, 1, 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    # The fork has the host's ends of the pipes too, which the agent must not get.
    for descriptor in (nothing, *request["host_ends"]):
        os.close(descriptor)

    memory_bytes = int(request["limits"]["memory_mb"]) << 20
    if request["group"]:
        with suppress(OSError):
            namespaces.write(request["group"], "0")
    if request["alone"]:
        # The sum misses shared segments whose processes have all ended.
        with suppress(OSError):
            namespaces.write("/proc/sys/kernel/shmall", str(memory_bytes // PAGE_BYTES))
        size = f"size={memory_bytes}".encode()
        LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", namespaces.PLAIN_MOUNT, size)

    if listening_end is not None:
        if request["address"]:
            with namespaces.listen(_port(request), MAX_CONNECTIONS) as listening:
                socket.send_fds(listening_end, [b"1"], [listening.fileno()])
        listening_end.close()

    LIBC.prctl(DROP_CAPABILITY, SYS_PTRACE, 0, 0, 0)
    parent = os.getpid()
    agent = os.fork()
    if agent == 0:
        os.close(status_writer)
        namespaces.die_with(parent)
        _become_agent(request, output_writer, result_writer)
    os.close(output_writer)
    os.close(result_writer)
    while True:
        # Orphans of the agent end here as well, since this process adopts them.
        pid, status = os.wait()
        if pid == agent:
            os.write(status_writer, str(status).encode())
            os._exit(0)


def _watch(
    keeper: int, output: int, limits: Mapping[str, float], isolated: bool, group: str
) -> dict[str, Any]:
    """Return when the agent has ended, or must end.

    ``end`` says why it must, "" when it ended by itself; ``late`` says whether it passed its
    deadline; ``output`` is the end of what was read of its output.
    """
    exited = os.pidfd_open(keeper)
    client = 0
    descriptors = [exited, output, client]
    tail = b""
    deadline = time.monotonic() + limits["seconds"]
    next_check = 0.0
    late = False
    end = ""
    while True:
        ready, _, _ = select.select(descriptors, [], [], CHECK_EVERY_S)
        if output in ready:
            chunk = os.read(output, CHUNK_BYTES)
            tail = (tail + chunk)[-OUTPUT_TAIL_BYTES:]
            if not chunk:
                descriptors.remove(output)
        # The client sends nothing after its request: it is readable when the connection is closed.
        if client in ready:
            end = "its client closed the connection"
        elif exited not in ready and time.monotonic() > next_check:
            late = time.monotonic() > deadline
            end = _late(limits) if late else _passed_limit(limits, keeper, isolated, group)
            next_check = time.monotonic() + CHECK_EVERY_S
        if end or exited in ready:
            return {"end": end, "late": late, "output": tail}


def _late(limits: Mapping[str, float]) -> str:
    return f"it did not end within {limits['seconds']:g} s (deadline)"


def _passed_limit(limits: Mapping[str, float], keeper: int, isolated: bool, group: str) -> str:
    pids = memory.tree(keeper)
    return _beyond(limits, pids, isolated) or _killed_at_its_limit(limits, group)


def _beyond(limits: Mapping[str, float], pids: list[int], isolated: bool) -> str:
    """Say which limit the agent's processes passed, "" when they passed none.

    The first of ``pids`` keep the agent: one process, with namespaces two.
    """
    living = [pid for pid in pids[1 + isolated :] if memory.lives(pid)]
    if len(living) > limits["processes"]:
        return f"it had {len(living)} processes, {limits['processes']} are allowed (processes)"
    limit_bytes = int(limits["memory_mb"]) << 20
    file_bytes = 0
    if isolated and living:
        with suppress(OSError):
            shared = os.statvfs(f"/proc/{pids[1]}/root/dev/shm")
            file_bytes = (shared.f_blocks - shared.f_bfree) * shared.f_frsize
    process_bytes = memory.beyond(limit_bytes - file_bytes, living)
    if process_bytes or file_bytes > limit_bytes:
        filled_mb = process_bytes + file_bytes >> 20
        return f"it filled {filled_mb} MiB of memory, {limits['memory_mb']} are allowed (memory_mb)"
    return ""


def _killed_at_its_limit(limits: Mapping[str, float], group: str) -> str:
    """Say that the kernel ended a process of the agent at ``memory_mb``, "" when it did not.

    The kernel is faster than the sum over the processes.
    """
    if group and memory.kernel_kills(group) and memory.limit_was_reached(group):
        return (
            f"the kernel ended a process of it for its memory, of which {limits['memory_mb']} MiB"
            " are allowed (memory_mb)"
        )
    return ""


def _kill_descendants() -> None:
    """Kill all descendants, until none is left."""
    # A process may fork while the others are killed, so one round is not enough.
    while descendants := memory.tree(os.getpid())[1:]:
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A process that is not waited for stays in /proc, and would be found in each round.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become_agent(request: Mapping[str, Any], output_writer: int, result_writer: int) -> None:
    """Be the agent, in the child. Never returns."""
    os.setsid()
    # Otherwise the programs that it starts could write into its memory and its pipes.
    LIBC.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output_writer, 1)
    os.dup2(output_writer, 2)

    memory_bytes = int(request["limits"]["memory_mb"]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    code = 1
    try:
        if isinstance(request["run"], list):
            command = _filled_command(request)
            os.set_inheritable(result_writer, True)
            os.environ[RESULT_VARIABLE] = str(result_writer)
            os.execvp(command[0], command)
        result = _call_function(request)
        if request.get("call", True):
            is_number = isinstance(result, int | float) or type(result).__module__ == "numpy"
            report = {"result": float(result) if is_number else None}
            os.write(result_writer, json.dumps(report).encode())
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        _report_error(result_writer, error)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        _report_error(result_writer, error)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # An ordinary exit would run the exit handlers of the fork server, whose copy this is.
        os._exit(code)


def _filled_command(request: Mapping[str, Any]) -> list[str]:
    """Return the command's words; ``{name}`` becomes the row's column or the policy's address."""
    values = {**request["row"], **request["address"]}
    words = []
    for word in request["run"]:
        is_placeholder = word[:1] + word[-1:] == "{}"
        words.append(str(values.get(word[1:-1], word)) if is_placeholder else word)
    return words


def _report_error(result_writer: int, error: BaseException) -> None:
    with suppress(Exception):
        os.write(result_writer, json.dumps(raised.report(error)).encode())


def _call_function(request: Mapping[str, Any]) -> Any:
    """Call the agent's function; with ``call: false``, only load it.

    Its parameters are filled by name. A single parameter of another name gets the row.
    """
    function = _load_function(request["run"])
    if not request.get("call", True):
        return None
    row = request["row"]
    values = {**row, **request["address"], "row": row}
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty or p.name in values]
    if len(names) == 1 and names[0] not in values:
        result = function(row)
    else:
        result = function(**{name: values[name] for name in names if name in values})
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _load_function(address: str) -> Any:
    """Load ``module:function`` or ``file.py:function``. Raises ImportError, AttributeError."""
    # Python itself starts with these two on its path.
    search_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [os.getcwd(), *search_path]
    place, _, name = address.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("agent", place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} is not a Python file")
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        module = sys.modules["agent"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


if __name__ == "__main__":
    # Python put the folder of this file there, in which an agent's import would find our modules.
    with suppress(ValueError):  # unless that Python is started with -P
        sys.path.remove(os.path.dirname(__file__))
    main(*sys.argv[1:])
