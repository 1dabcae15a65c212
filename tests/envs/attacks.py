"""What code tries against the sandbox: each prints THROUGH where it gets through.

The first 47 are those of the field notes.

Filled in: ``file`` (of this machine; everybody may read and write it), ``folder`` (everybody may
write there), ``port`` (TCP on loopback), ``abstract`` and ``named`` (unix sockets), ``run`` and
``canary`` (pids: of the host, and of a process of the same user).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attack:
    """``check``: what is looked at outside afterwards, besides THROUGH: a method of
    tests/envs/attack_checks.py.
    """

    code: str
    seconds: float = 5.0
    check: str = ""


CALL = """
import ctypes, os, errno, struct
L = ctypes.CDLL(None, use_errno=True)
def call(number, *a):
    return L.syscall(number, *a)
def tried(result):
    print('THROUGH' if result >= 0 else os.strerror(ctypes.get_errno()))
"""


def _many(body: str, limit: int, counted: str = "n") -> str:
    """``body`` counts in ``n`` until it is refused; more than ``limit`` is through."""
    return (
        f"n = 0\ntry:\n{body}\nexcept (OSError, RuntimeError, MemoryError) as e:"
        f" print(e)\nprint('THROUGH' if {counted} > {limit} else n)"
    )


def _call(arguments: str, before: str = "") -> Attack:
    return Attack(f"{CALL}{before}\ntried(call({arguments}))")


def _forged(data: str) -> Attack:
    """On the interpreter's own connection: the next call must not be answered by it."""
    return Attack(
        f"import os, json, struct\nfor fd in range(3, 8):\n  try: os.write(fd, {data})\n  except"
        " OSError: pass",
        2,
    )


_ANSWER = (
    "(lambda h: struct.pack('>I', len(h)) + h)(json.dumps({{'call': ID, 'text': 'FORGED', 'error':"
    " None, 'dropped': 0, 'blobs': []}}).encode())"
)

OF_THE_NOTES: Mapping[str, Attack] = {
    "fork bomb": Attack(
        "import os, time\n"
        + _many(
            "  for k in range(200):\n    if os.fork() == 0: time.sleep(3); os._exit(0)\n    n += 1",
            64,
        ),
        8,
    ),
    "a child in a session of its own": Attack(
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n   "
        " open('/proc/self/comm', 'w').write('survivor-x'); time.sleep(60)\n "
        " os._exit(0)\ntime.sleep(.2)",
        2,
        "survivors",
    ),
    "run a program": Attack(
        "import subprocess\nprint('THROUGH' if b'uid=' in subprocess.run(['/usr/bin/id'],"
        " capture_output=True).stdout else '')"
    ),
    "10 GB": Attack("b = bytearray(10 << 30)\nprint('THROUGH')"),
    "a loop that ignores SIGTERM": Attack(
        "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass", 0.5
    ),
    "a loop in C": Attack("x = 7 ** (10 ** 8)", 0.5),
    "fill the disk": Attack(
        _many(
            "  for k in range(15):\n    with open(f'f{{k}}', 'wb') as f:\n      for _ in range(10):"
            " n += f.write(b'0' * (1 << 20))",
            64 << 20,
        ),
        10,
    ),
    "fill the inodes": Attack(
        _many("  for k in range(3000):\n    open(f'i{{k}}', 'w').close(); n += 1", 512), 10
    ),
    "write elsewhere": Attack(
        "for p in ('{folder}/x', '/dev/shm/x-attack', '/var/tmp/x-attack'):\n  try: open(p,"
        " 'w').write('x'); print('THROUGH')\n  except OSError as e: print(e)"
    ),
    "memory in a memfd": Attack(
        "import os\n"
        + _many(
            "  for k in range(4):\n    f = os.memfd_create('x')\n    for _ in range(50): n +="
            " os.write(f, b'0' * (1 << 20))",
            64 << 20,
        ),
        10,
    ),
    "TCP to this machine": Attack(
        "import socket\ns = socket.create_connection(('127.0.0.1', {port}), 2); print('THROUGH')"
    ),
    "an abstract unix socket": Attack(
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('\\0' + {abstract!r});"
        " print('THROUGH')"
    ),
    "a named unix socket": Attack(
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect({named!r}); print('THROUGH')"
    ),
    "a pair of datagram sockets": Attack(
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print('THROUGH')"
    ),
    "/proc/1/environ": Attack("print('THROUGH' if open('/proc/1/environ').read() else '')"),
    "the run's variables": Attack(
        "print('THROUGH' if '=' in open('/proc/{run}/environ').read() else '')"
    ),
    "its own variables": Attack(
        "import os\nprint('THROUGH' if 'CANARY' in str(os.environ) +"
        " open('/proc/self/environ').read() else '')"
    ),
    "/etc/passwd": Attack("print('THROUGH' if 'root:' in open('/etc/passwd').read() else '')"),
    "Ray's token": Attack("print('THROUGH', open('{folder}/.ray/auth_token').read())"),
    "the ground truth": Attack("print('THROUGH', open('{file}').read())"),
    "a link to the ground truth": Attack(
        "import os\nos.symlink('{file}', 'l')\nprint('THROUGH', open('l').read())"
    ),
    "another episode's files": Attack(
        "import glob\nfor p in glob.glob('../*/mine.txt') +"
        " glob.glob('/tmp/sandbox-*/*/mine.txt'):\n  try: print('THROUGH', open(p).read())\n "
        " except OSError as e: print(e)"
    ),
    "chmod, touch and truncate a file": Attack(
        "import os\nfor f in (lambda: os.chmod('{file}', 0o600), lambda: os.utime('{file}', (1,"
        " 1)), lambda: os.truncate('{file}', 0)):\n  try: f(); print('THROUGH')\n  except OSError"
        " as e: print(e)",
        5,
        "file",
    ),
    "stat of a file": Attack("import os\nprint('THROUGH', os.stat('{file}').st_size)"),
    "kill(-1)": Attack("import os\nos.kill(-1, 9)", 5, "canary"),
    "kill the parent": Attack(
        "import os\nos.kill(os.getppid() or 1, 9); print('THROUGH' if os.getppid() else '')"
    ),
    "trace the parent": _call("{ptrace}, 16, os.getppid() or 1, 0, 0"),
    "the parent's memory": Attack(
        "import os\nopen(f'/proc/{{os.getppid()}}/mem', 'rb'); print('THROUGH')"
    ),
    "unshare a user namespace": Attack(CALL + "tried(L.unshare(0x10000000 | 0x20000))"),
    "setuid(0)": Attack(
        "import os\nos.setuid(0); print('THROUGH' if os.geteuid() == 0 and open('/etc/shadow')"
        " else '')"
    ),
    "raise limits": Attack(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 42, 1 << 42));"
        " print('THROUGH')"
    ),
    "1 GB of output": Attack("for _ in range(100): print('x' * 10_000_000)", 30),
    "write to descriptors 1 and 2": Attack(
        "import os\nfor _ in range(500): os.write(1, b'x' * 65536); os.write(2, b'x' * 65536)"
    ),
    "a forged answer": _forged(_ANSWER.replace("ID", "99")),
    "a huge header": _forged("b'\\xff' * 8"),
    "garbage on the connection": _forged("b'\\0\\0\\0\\4nope'"),
    "close the connection": Attack("import os\nos.closerange(3, 64)", 2),
    "os._exit": Attack("import os\nos._exit(0)", 2),
    "segmentation fault": Attack("import ctypes\nctypes.string_at(0)", 2),
    "10,000 figures": Attack("for k in range(10000): plt.figure(figsize=(1, 1))\nplt.show()", 1),
    "a figure of 200:1": Attack("plt.figure(figsize=(200, 1)); plt.plot([1]); plt.show()"),
    "a figure of 50,000 pixels": Attack(
        "plt.figure(figsize=(500, 500)); plt.plot([1]); plt.show()"
    ),
    "an image bomb": Attack(
        "import zlib, struct\ndef c(t, d): return struct.pack('>I', len(d)) + t + d +"
        " struct.pack('>I', zlib.crc32(t + d))\nb = b'\\x89PNG\\r\\n\\x1a\\n' + c(b'IHDR',"
        " struct.pack('>IIBBBBB', 30000, 30000, 8, 2, 0, 0, 0)) + c(b'IDAT', zlib.compress(b'\\0' *"
        " (30000 * 3 + 1) * 300, 1)) + c(b'IEND', b'')\nim = Image.open(io.BytesIO(b)); im.load();"
        " print('THROUGH')"
    ),
    "thread bomb": Attack(
        "import threading, time\nthreading.stack_size(65536)\n"
        + _many(
            "  for k in range(1000):\n    threading.Thread(target=time.sleep, args=(2,),"
            " daemon=True).start(); n += 1",
            64,
        ),
        8,
    ),
    "a thread that outlives its call": Attack(
        "import threading, time\ndef f():\n  for k in range(100): time.sleep(.01);"
        " print('LATE')\nthreading.Thread(target=f, daemon=True).start()",
        5,
        "late",
    ),
    "replace what sends answers": Attack(
        "import sys\nsys._getframe(1).f_globals['frames'].send = lambda *a, **k: None", 0.5
    ),
    "wait for input": Attack("print('THROUGH', input())", 2),
}

FURTHER: Mapping[str, Attack] = {
    "io_uring_setup": _call("425, 1, ctypes.create_string_buffer(200)"),
    "userfaultfd": _call("{userfaultfd}, 1"),
    "bpf": _call(
        "{bpf}, 0, ctypes.create_string_buffer(struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(60)), 80"
    ),
    "perf_event_open": _call(
        "{perf_event_open}, ctypes.create_string_buffer(struct.pack('IIQ', 1, 112, 0) + bytes(96)),"
        " 0, -1, -1, 0"
    ),
    "keyctl: join a session": _call("{keyctl}, 1, 0"),
    "add_key": _call("{add_key}, b'user', b'x', b'y', 1, -2"),
    "process_vm_readv of the run": _call(
        "{process_vm_readv}, {canary}, ctypes.create_string_buffer(struct.pack('QQ',"
        " ctypes.addressof(b), 8)), 1, ctypes.create_string_buffer(struct.pack('QQ', 4096, 8)),"
        " 1, 0",
        "b = ctypes.create_string_buffer(8)",
    ),
    "name_to_handle_at": _call(
        "{name_to_handle_at}, -100, b'{file}', ctypes.create_string_buffer(struct.pack('Ii', 128,"
        " 0) + bytes(128)), ctypes.create_string_buffer(8), 0"
    ),
    "open_by_handle_at": _call(
        "{open_by_handle_at}, -100, ctypes.create_string_buffer(struct.pack('Ii', 8, 1) +"
        " bytes(8)), 0"
    ),
    "mount_setattr": _call("442, -100, b'/usr', 0, ctypes.create_string_buffer(bytes(32)), 32"),
    "open_tree": _call("428, -100, b'/usr', 1"),
    "fsopen": _call("430, b'tmpfs', 0"),
    "pidfd_open of another": _call("434, os.getppid() or {canary}, 0"),
    "pidfd_getfd of another": _call("438, call(434, {canary}, 0), 1, 0"),
    "ptrace SEIZE of another": _call("{ptrace}, 0x4206, {canary}, 0, 0"),
    "ptrace TRACEME": _call("{ptrace}, 0, 0, 0, 0"),
    "x32 numbers": Attack(CALL + "tried(call(0x40000000 + 41, 2, 1, 0))"),
    "prctl: not ending with the parent": Attack(CALL + "tried(L.prctl(1, 0, 0, 0, 0))"),
    "prctl: a filter of its own": Attack(CALL + "tried(L.prctl(22, 1, 0, 0, 0))"),
    "prctl: be dumpable": Attack(CALL + "tried(L.prctl(4, 1, 0, 0, 0))"),
    "prctl: adopt orphans": Attack(CALL + "tried(L.prctl(36, 1, 0, 0, 0))"),
    "clone3 of a process": Attack(
        CALL
        + "r = call(435, ctypes.create_string_buffer(struct.pack('QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0,"
        " 0)), 64)\nif r == 0: os._exit(0)\ntried(r)"
    ),
    "vfork": Attack(
        "import posix\nposix.waitpid(posix.posix_spawn('/usr/bin/true', ['true'], {{}}), 0);"
        " print('THROUGH')"
    ),
    "execveat": _call("{execveat}, -100, b'/usr/bin/true', 0, 0, 0", ""),
    "F_SETOWN: signals to another": Attack(
        "import fcntl, os, signal\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, {canary});"
        " fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); print('THROUGH');"
        " os.write(w, b'x')",
        5,
        "canary",
    ),
    "FIOSETOWN: signals to another": Attack(
        "import fcntl, socket, struct\na, b = socket.socketpair()\nfcntl.ioctl(a, 0x8901,"
        " struct.pack('i', {canary})); print('THROUGH')"
    ),
    "tgkill of another": Attack(CALL + "tried(call({tgkill}, {canary}, {canary}, 9))", 5, "canary"),
    "rt_sigqueueinfo to another": Attack(
        CALL + "tried(call({rt_sigqueueinfo}, {canary}, 9,"
        " ctypes.create_string_buffer(struct.pack('iii', 9, 0, -1) + bytes(116))))",
        5,
        "canary",
    ),
    "setpriority of another": Attack(
        "import os\nos.setpriority(os.PRIO_PROCESS, {canary}, 19); print('THROUGH')"
    ),
    "affinity of another": Attack(
        "import os\nos.sched_setaffinity({canary}, {{0}}); print('THROUGH')"
    ),
    "limits of another": Attack(
        "import resource\nresource.prlimit({canary}, resource.RLIMIT_NOFILE, (16, 16));"
        " print('THROUGH')"
    ),
    "System V shared memory": _call("{shmget}, 4242, 1 << 20, 0o1666"),
    "a System V queue": _call("{msgget}, 4242, 0o1666"),
    "a POSIX queue": _call("{mq_open}, b'attack', 0o102, 0o666, 0"),
    "/dev/shm of others": Attack(
        "import os\nprint('THROUGH' if os.listdir('/dev/shm') else '')\nopen('/dev/shm/attack',"
        " 'w'); print('THROUGH')"
    ),
    "list the folder of the data": Attack("import os\nprint('THROUGH', os.listdir('{folder}'))"),
    "the data by openat2": _call(
        "437, -100, b'{file}', ctypes.create_string_buffer(bytes(24)), 24"
    ),
    "the data by O_PATH": Attack(
        "import os\nfd = os.open('{file}', os.O_PATH)\nprint('THROUGH',"
        " open(f'/proc/self/fd/{{fd}}').read())"
    ),
    "the data through /proc/self/root": Attack(
        "print('THROUGH', open('/proc/self/root{file}').read())"
    ),
    "the data through the parent's root": Attack(
        "import os\nprint('THROUGH', open(f'/proc/{{os.getppid()}}/root{file}').read())"
    ),
    "a hard link to the data": Attack(
        "import os\nos.link('{file}', 'h'); print('THROUGH', open('h').read())"
    ),
    "rename the data": Attack(
        "import os\nos.rename('{file}', '{folder}/y'); os.rename('{folder}/y', '{file}');"
        " print('THROUGH')"
    ),
    "extended attributes of the data": Attack(
        "import os\nos.setxattr('{file}', 'user.x', b'y'); print('THROUGH')"
    ),
    "watch the data": _call("{inotify_init1}, 0"),
    "chroot": Attack("import os\nos.chroot('/'); print('THROUGH')"),
    "UDP": Attack(
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1',"
        " {port})); print('THROUGH')"
    ),
    "listen for others": Attack(
        "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('THROUGH')"
    ),
    "netlink": Attack(
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); print('THROUGH')"
    ),
    "vsock": Attack("import socket\nsocket.socket(40, socket.SOCK_STREAM); print('THROUGH')"),
    "TCP by a raw call": _call("{socket}, 2, 1, 0"),
    "multiprocessing": Attack(
        "import multiprocessing as m\np = m.get_context('fork').Process(target=print); p.start();"
        " p.join(); print('THROUGH')"
    ),
    "32-bit calls": Attack(
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096,"
        " prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\nf ="
        " ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nprint('THROUGH'"
        " if f() > 0 else '')",
        2,
    ),
    "the next call's answer": _forged(_ANSWER.replace("ID", "3")),
    "a million blobs": _forged(
        "(lambda h: struct.pack('>I', len(h)) + h)(json.dumps({{'call': 2, 'blobs': [1 << 40] *"
        " 9}}).encode())"
    ),
    "deep JSON": _forged("(lambda h: struct.pack('>I', len(h)) + h)(b'[' * 200000)"),
    "descriptors without end": Attack(
        "import os\n" + _many("  while n < 5000: os.dup(0); n += 1", 64)
    ),
    "2 GB in a pipe": Attack(
        "import os, fcntl\nr, w = os.pipe()\nfcntl.fcntl(w, 1031, 1 << 20); print('THROUGH')"
    ),
    "the host name": Attack("import socket\nsocket.sethostname('x'); print('THROUGH')"),
    "the clock": Attack(
        "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time()); print('THROUGH')"
    ),
    "memory that cannot be swapped": Attack(
        CALL + "b = ctypes.create_string_buffer(64 << 20)\ntried(L.mlock(b, 64 << 20))"
    ),
    "personality": _call("{personality}, 0x0040000"),
    "Python's own packages": Attack(
        "import numpy, os\nopen(os.path.join(os.path.dirname(numpy.__file__), 'x-attack'), 'w');"
        " print('THROUGH')"
    ),
    "an exception that hides the answer": Attack(
        "class E(BaseException):\n  def __str__(self): raise SystemExit\nraise E", 2
    ),
}

NUMBERS: Mapping[str, tuple[int, int]] = {
    "ptrace": (101, 117),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "process_vm_readv": (310, 270),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "execveat": (322, 281),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "inotify_init1": (294, 26),
    "socket": (41, 198),
    "personality": (135, 92),
}
"""System calls on x86_64 and aarch64."""
