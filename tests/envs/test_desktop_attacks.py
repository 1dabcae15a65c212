"""What a policy's program tries from a desktop's terminal against the run, its machine and other
episodes (docs/security.md).
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from rayloop.envs.desktop.environment import DesktopTasks
from rayloop.envs.desktop.session import Desktop, DesktopLimits, DesktopSpoiled, missing
from tests.support.runs import eventually

LACKS = missing()
pytestmark = [pytest.mark.env, pytest.mark.skipif(bool(LACKS), reason=f"missing here: {LACKS}")]

ATTACKS = {
    "TCP to this machine (Ray, the judge)": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "TCP to another machine": "socket.create_connection(('198.51.100.1', 80), 2)",
    "UDP to this machine": (
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT)) and"
        " ping()"
    ),
    "an abstract unix socket": "socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)",
    "a named unix socket": "socket.socket(socket.AF_UNIX).connect(NAMED)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM).connect((2, 1))",
    "the ground truth": "open(TRUTH).read()",
    "list the folder of the data": "os.listdir(FOLDER)",
    "stat of a file": "os.stat(TRUTH)",
    "Ray's token": "open(FOLDER + '/.ray/auth_token').read()",
    "the data through the driver's root": "open('/proc/1/root' + TRUTH).read()",
    "/etc/shadow": "open('/etc/shadow').read()",
    "names of this machine's users": "1 / ('root:' in open('/etc/passwd').read())",
    "the run's variables": "open('/proc/RUN/environ').read()",
    "signal the run": "os.kill(RUN, 0)",
    "the driver's variables": "open('/proc/1/environ').read()",
    "the driver's memory": "open('/proc/1/mem', 'rb+')",
    "trace the driver": "1 / (ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0)",
    "the driver's connection to the host": (
        "1 / ('socket:' in os.popen(f'ls -l /proc/{os.getppid()}/fd').read())"
    ),
    "the checks of the task": (
        "1 / (os.popen('find / -path /proc -prune -o -name tasks.yaml -print 2>&-').read() != '')"
    ),
    "another desktop's home": "glob.glob('/proc/[0-9]*/root/home/user/secret.txt')[0]",
    "/dev/shm of others": "os.listdir('/dev/shm')[0]",
    "System V memory of others": "1 / (ctypes.CDLL(None).shmget(4243, 0, 0) >= 0)",
    "write to /usr": "open('/usr/x', 'w')",
    "write to this machine's disk": (
        "[open(f'{p}/x-attack', 'w') for p in ('/var/tmp', '/etc', '/')]"
    ),
    "setuid(0)": "os.setuid(0)",
    "a setuid program": (
        "1 / (subprocess.run(['/usr/bin/su', '-c', 'id -u'], stdin=-3, capture_output=True).stdout"
        " == b'0\\n')"
    ),
    "mount": "1 / (ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0)",
    "a device": "os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "raise limits": "resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "the cgroup of others": (
        "open(glob.glob('/sys/fs/cgroup/**/cgroup.procs', recursive=True)[0], 'w')"
    ),
    "io_uring_setup": "syscall(425, 1, 0)",
    "userfaultfd": "syscall(323, 1)",
    "bpf": "syscall(321, 0, 0, 0)",
    "perf_event_open": "syscall(298, 0, 0, -1, -1, 0)",
    "keyctl": "syscall(250, 1, 0)",
    "open_tree": "syscall(428, -100, b'/usr', 1)",
    "unshare a user namespace": "syscall(272, 0x10000000)",
    "clone of a user namespace": "syscall(56, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
    "clone3": "syscall(435, ctypes.create_string_buffer(64), 64)",
    "process_vm_readv": "syscall(310, os.getppid(), 0, 0, 0, 0, 0)",
    "open_by_handle_at": "syscall(304, -100, 0, 0)",
    "personality": "syscall(135, 0x40000)",
    "an AF_ALG socket": "socket.socket(38, socket.SOCK_SEQPACKET)",
}
"""Each raises when it is held. Numbers of system calls are those of x86_64."""
SCRIPT = """
import ctypes, glob, json, os, resource, socket, subprocess, time
def syscall(*arguments):
    # only what the filter refuses, and not what the kernel does for another reason
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*arguments) < 0 and ctypes.get_errno() in (1, 38):
        raise OSError(ctypes.get_errno(), 'refused')
def ping():
    raise OSError('nobody knows')
def held(code):
    try:
        exec(code)
    except BaseException as error:
        return f'held: {error}'
    return 'through'
found = {name: held(code) for name, code in json.load(open('attacks.json')).items()}
json.dump(found, open('found.part', 'w')); os.rename('found.part', 'found.json')
"""


def test_a_runs_header_says_what_holds_desktops_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "namespaces without network" in DesktopTasks.preflight(DesktopTasks.Settings())
    monkeypatch.setattr("rayloop.envs.desktop.environment.missing", lambda: "apt-get install xvfb")
    assert (
        DesktopTasks.preflight(DesktopTasks.Settings())
        == "nothing yet: desktops cannot be started here (apt-get install xvfb)"
    )


def test_attacks_from_a_terminal_are_held(tmp_path: Path) -> None:
    """The bait is there and everybody may read it; another desktop runs beside.

    UDP's arrival is looked at here.
    """
    os.chmod(tmp_path, 0o755)
    (tmp_path / ".ray").mkdir()
    truth, token = tmp_path / "truth.jsonl", tmp_path / ".ray" / "auth_token"
    for file in (truth, token):
        file.write_text("secret", encoding="utf-8")
        file.chmod(0o644)
    abstract, named = f"attack-{os.getpid()}", f"{tmp_path}/socket"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as first,
        socket.socket(socket.AF_UNIX) as second,
    ):
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        udp.settimeout(0.5)
        first.bind(f"\0{abstract}")
        second.bind(named)
        for one in (first, second):
            one.listen()
        filled = {
            "PORT": str(port),
            "ABSTRACT": repr(abstract),
            "NAMED": repr(named),
            "TRUTH": repr(str(truth)),
            "FOLDER": repr(str(tmp_path)),
            "RUN": str(os.getpid()),
        }
        found = _tried({name: _filled(code, filled) for name, code in ATTACKS.items()})
        with pytest.raises(TimeoutError):
            udp.recv(1)
    print(json.dumps(found, indent=1))
    assert {name: said for name, said in found.items() if not said.startswith("held")} == {}
    assert len(found) == len(ATTACKS)


def _filled(code: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        code = code.replace(name, value)
    return code


def _tried(attacks: dict[str, str]) -> dict[str, str]:
    other, desktop = Desktop(DesktopLimits()), Desktop(DesktopLimits())
    try:
        other.put("secret.txt", b"of another episode")
        desktop.put("attacks.json", json.dumps(attacks).encode())
        desktop.put("try.py", SCRIPT.encode())
        desktop.launch(["xterm"])
        desktop.type("/usr/bin/python3 try.py\n", 0.001, 0.1)
        entry = eventually(
            lambda: desktop.home().get("found.json"), "what the attacks found", 60, 0.2
        )
        found: dict[str, str] = json.loads(entry.content or b"")
        return found
    finally:
        other.close()
        desktop.close()


FILL = {
    "many processes": (
        "[os.fork() or (bytearray(b'x' * 150_000_000), time.sleep(60)) for _ in range(5)]"
    ),
    "files without a name": (
        "[os.write(f, b'0' * MIB) for f in [os.memfd_create('x') for _ in range(8)] for _ in"
        " range(100)]"
    ),
    "segments that nobody has open": (
        "[libc.memset(at, 1, 200 * MIB) and libc.shmdt(at) for at in"
        " [ctypes.c_void_p(libc.shmat(libc.shmget(0, 200 * MIB, 0o1600), None, 0)) for _ in"
        " range(4)]]"
    ),
}
"""Each is more than the limit in sum, and less in any process."""
FILLS = """
import ctypes, os, time
MIB = 1 << 20
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
CODE
time.sleep(60)
"""


def test_what_forks_share_counts_once() -> None:
    desktop = Desktop(DesktopLimits(total_mb=512))
    try:
        shared = (
            "kept = b'x' * 200_000_000\nfor _ in range(5): os.fork() or time.sleep(60)\nopen('up',"
            " 'w')"
        )
        desktop.put("fill.py", FILLS.replace("CODE", shared).encode())
        desktop.launch(["xterm"])
        desktop.type("/usr/bin/python3 fill.py\n", 0.001, 0.1)
        eventually(lambda: "up" in desktop.home(), "five forks", 20, 0.1)
        time.sleep(1)
        assert desktop.screenshot(), "the desktop was not spoiled"
    finally:
        desktop.close()


@pytest.mark.parametrize("how", FILL)
def test_memory_is_limited_in_sum(how: str) -> None:
    desktop = Desktop(DesktopLimits(total_mb=512))
    try:
        desktop.put("fill.py", FILLS.replace("CODE", FILL[how]).encode())
        desktop.launch(["xterm"])
        desktop.type("/usr/bin/python3 fill.py\n", 0.001, 0.1)

        def spoiled() -> str:
            try:
                desktop.screenshot()
            except DesktopSpoiled as error:
                return str(error)
            return ""

        assert "MiB together, of at most 512" in eventually(
            spoiled, "the end of its programs", 20, 0.1
        )
    finally:
        desktop.close()
