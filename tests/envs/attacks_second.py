"""A second series of attacks (rayloop's tests/envs/attacks.py has the first): limits, forged
answers, channels between episodes.

``check`` names a method of tests/envs/attack_checks.py. Filled in besides: ``cold``, a file of /usr
that is rarely read.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.envs.attacks import CALL, FURTHER, OF_THE_NOTES, Attack

_SEND = (
    "import os, json, struct\ndef frame(h, blobs=()):\n  t = json.dumps(dict(h, blobs=[len(b) for b"
    " in blobs])).encode() if isinstance(h, dict) else h\n  os.write(3, struct.pack('>I', len(t)) +"
    " t)\n  for b in blobs:\n    m = memoryview(b)\n    while m: m = m[os.write(3, m):]\n"
)
_OK = "{{'call': 2, 'text': %s, 'error': None, 'seconds': %s, 'dropped': %s}}"


def _call(arguments: str) -> Attack:
    return Attack(f"{CALL}\ntried(call({arguments}))")


SECOND: Mapping[str, Attack] = {
    # system calls
    "memfd_create + fexecve": Attack(
        "import os\nf = os.memfd_create('p', 0)\nos.write(f, open('/usr/bin/true','rb').read())\nif"
        " os.path.exists('/proc/self/fd'): os.execve(f, ['true'], {{}})\nos.execve(f, ['true'],"
        " {{}})",
        5,
        "became",
    ),
    "memfd_secret": _call("447, 0"),
    "io_uring_register": _call("427, -1, 0, 0, 0"),
    "pidfd_open of itself + pidfd_send_signal to the server": Attack(
        CALL + "p = call(434, os.getpid(), 0)\nprint('pidfd', p)\nif p >= 0: print('THROUGH')\nr ="
        " call(424, 0, 9, 0, 0)\nprint(r)"
    ),
    "SO_PEERPIDFD of the connection": Attack(
        "import socket, struct\ns = socket.socket(fileno=3)\np = struct.unpack('i', s.getsockopt(1,"
        " 77, 4))[0]\ns.detach()\nimport ctypes\nL = ctypes.CDLL(None,"
        " use_errno=True)\nprint('pidfd', p, L.syscall(424, p, 9, 0, 0), L.syscall(438, p, 0, 0),"
        " L.setns(p, 0x20000000))\nprint('THROUGH' if L.syscall(438, p, 0, 0) >= 0 else '')"
    ),
    "SO_PEERCRED gives pids of this machine": Attack(
        "import socket, struct\ns = socket.socket(fileno=3)\npid, uid, gid = struct.unpack('3i',"
        " s.getsockopt(1, 17, 12)); s.detach()\nprint(pid, uid, gid)\nprint('THROUGH: pid of the"
        " machine' if pid > 2 else '')"
    ),
    "AF_PACKET": Attack("import socket\nsocket.socket(17, 3, 3); print('THROUGH')"),
    "AF_ALG": Attack("import socket\nsocket.socket(38, 5); print('THROUGH')"),
    "AF_XDP, AF_TIPC, AF_RDS, AF_KEY, AF_CAN, AF_BLUETOOTH, AF_QIPCRTR": Attack(
        "import socket\nfor f in (44, 30, 21, 15, 29, 31, 42, 36, 41, 43, 45):\n  for t in (1, 2,"
        " 3, 5):\n    try: socket.socket(f, t); print('THROUGH', f, t)\n    except OSError as e:"
        " pass"
    ),
    "socketpair SEQPACKET and of other families": Attack(
        "import socket\nfor f, t in ((1, 5), (1, 2), (2, 1), (16, 3), (30, 1), (1, 3)):\n  try:"
        " socket.socketpair(f, t); print('THROUGH', f, t)\n  except OSError as e: print(e)"
    ),
    "SCM_RIGHTS on a stream pair": Attack(
        "import socket, array\na, b = socket.socketpair()\na.sendmsg([b'x'], [(1, 1,"
        " array.array('i', [0]))]); print('THROUGH')"
    ),
    "connect of a stream pair's end to a path": Attack(
        "import socket\na, b = socket.socketpair()\na.connect({named!r}); print('THROUGH')"
    ),
    "bind of a stream pair's end": Attack(
        "import socket\na, b = socket.socketpair()\na.bind('\\0mine'); print('THROUGH')"
    ),
    "clone: CLONE_THREAD with every namespace": Attack(
        CALL
        + "ok = False; stack = ctypes.create_string_buffer(65536)\nfor f in (0x20000, 0x2000000,"
        " 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):\n  r = L.syscall(56, 0x10900"
        " | f, ctypes.addressof(stack) + 65000, 0, 0, 0)\n  if r >= 0: ok = True\n  print(hex(f),"
        " r, os.strerror(ctypes.get_errno()))\nprint('THROUGH' if ok else '')",
        3,
    ),
    "setns to the parent's namespaces": Attack(
        "import os, ctypes\nL = ctypes.CDLL(None, use_errno=True)\nf ="
        " os.open(f'/proc/{{os.getppid() or 1}}/ns/mnt', 0)\nprint('THROUGH' if L.setns(f, 0) == 0"
        " else '')"
    ),
    "signalfd, timerfd, inotify, fanotify": Attack(
        CALL
        + "for n, a in ((289, (-1, ctypes.create_string_buffer(8), 8, 0)), (283, (1, 0)), (253,"
        " ()), (300, (0, 0)), (222, (1, 0, ctypes.create_string_buffer(8)))):\n  if call(n, *a)"
        " >= 0: print('THROUGH', n)"
    ),
    "splice, tee, vmsplice": Attack(
        CALL
        + "r, w = os.pipe(); r2, w2 = os.pipe()\nb = ctypes.create_string_buffer(struct.pack('QQ',"
        " 0, 0))\nfor n, a in ((275, (r, 0, w2, 0, 1, 2)), (276, (r, w2, 1, 2)), (278, (w, b, 0,"
        " 0))):\n  if call(n, *a) >= 0: print('THROUGH', n)"
    ),
    "seccomp(2): a listener, a filter of its own": Attack(
        CALL + "for n, a in ((317, (0, 0, 0)), (317, (1, 8, 0)), (317, (2, 0,"
        " ctypes.create_string_buffer(8)))):\n  if call(n, *a) >= 0: print('THROUGH', a)"
    ),
    "landlock_create_ruleset": _call("444, 0, 0, 1"),
    "process_madvise, process_mrelease, kcmp, migrate_pages": Attack(
        CALL
        + "for n, a in ((440, (0, 0, 0, 0, 0)), (448, (0, 0)), (312, ({canary}, os.getpid(), 0, 0,"
        " 0)), (256, ({canary}, 8, 0, 0))):\n  if call(n, *a) >= 0: print('THROUGH', n)"
    ),
    "syslog: read the kernel's log": _call("103, 3, ctypes.create_string_buffer(4096), 4096"),
    "sched_setscheduler, sched_setattr, ioprio_set": Attack(
        CALL
        + "for n, a in ((144, (0, 1, ctypes.create_string_buffer(struct.pack('i', 1)))), (314, (0,"
        " ctypes.create_string_buffer(64), 0)), (251, (1, 0, 1 << 13)), (141, (0, 0, -10))):\n "
        " if call(n, *a) >= 0: print('THROUGH', n)"
    ),
    "futex_waitv, futex2, map_shadow_stack, mseal, lsm_*": Attack(
        CALL
        + "for n in (449, 453, 454, 455, 456, 457, 458, 459, 460, 461, 462, 463, 467, 500, 511):\n "
        " if call(n, 0, 0, 0, 0, 0, 0) >= 0: print('THROUGH', n)"
    ),
    "timer_create: signals without end": _call("222, 0, 0, ctypes.create_string_buffer(8)"),
    "link, symlink, mknod, mkfifo": Attack(
        "import os, stat\nfor f in (lambda: os.link('/usr/bin/true', 't'), lambda:"
        " os.symlink('/etc/passwd', 's'), lambda: os.mkfifo('f'), lambda: os.mknod('n', 0o600 |"
        " stat.S_IFCHR, os.makedev(1, 1))):\n  try: f(); print('THROUGH')\n  except OSError as e:"
        " print(e)"
    ),
    # files
    "the data below /usr/src/app": Attack(
        "print('THROUGH' if 'secret' in open('/usr/src/app/data/truth.jsonl').read() else '')"
    ),
    "a key below /usr/local/etc": Attack(
        "print('THROUGH' if 'secret' in open('/usr/local/etc/judge.key').read() else '')"
    ),
    "files of the virtual environment's folder that are not Python's": Attack(
        "import os, sys\nprint('THROUGH' if os.listdir(sys.prefix + '/include') is not None"
        " else '')"
    ),
    "readlink of a link elsewhere": Attack(
        "import os\nt = os.readlink('{folder}/link')\nprint('THROUGH: a link\\'s text' if t =="
        " 'SECRET-TEXT' else t)"
    ),
    "readlink of the run's cwd, exe and descriptors": Attack(
        "import os\nfor p in ({run}, os.getppid() or 1):\n  for n in ('cwd', 'exe', 'root', 'fd/0',"
        " 'fd/1', 'fd/3'):\n    try: print('THROUGH', os.readlink(f'/proc/{{p}}/{{n}}'))\n   "
        " except OSError as e: pass"
    ),
    "stat of what /proc shows of processes": Attack(
        "import os\nn = sum(os.path.exists(f'/proc/{{p}}') for p in range(1,"
        " 4000))\nprint('THROUGH: %d processes counted' % n if n > 1 else '')"
    ),
    "which pids are there, by getpgid": Attack(
        "import os\nn = 0\nfor p in range(2, 4000):\n  try: os.getpgid(p); n += (p !="
        " os.getpid())\n  except OSError: pass\nprint('THROUGH: %d pids' % n if n else '')"
    ),
    "which pids are there, by affinity": Attack(
        "import os\nn = 0\nfor p in range(2, 4000):\n  try: os.sched_getaffinity(p); n += (p !="
        " os.getpid())\n  except OSError: pass\nprint('THROUGH: %d pids' % n if n else '')"
    ),
    "terminals: /dev/tty, /dev/ptmx, /dev/pts, /dev/console": Attack(
        "import os\nfor p in ('/dev/tty', '/dev/ptmx', '/dev/pts/ptmx', '/dev/console',"
        " '/dev/pts/0', '/dev/full', '/dev/random', '/dev/kmsg', '/dev/fuse', '/dev/net/tun',"
        " '/dev/vsock', '/dev/kvm'):\n  try: os.open(p, os.O_RDWR); print('THROUGH', p)\n  except"
        " OSError as e: pass"
    ),
    "/sys, cgroups, /run, /var, /boot": Attack(
        "import os\nfor p in ('/sys/fs/cgroup', '/sys/kernel', '/run', '/var/log', '/boot',"
        " '/home', '/root', '/etc', '/opt', '/mnt', '/'):\n  try:\n    n = os.listdir(p)\n    if p"
        " != '/' or 'home' in n or 'root' in n: print('THROUGH', p, n[:3]) if n else None\n  except"
        " OSError as e: pass"
    ),
    "a folder moved out from below by rename and ..": Attack(
        "import os\nos.mkdir('a'); os.mkdir('a/b'); os.chdir('a/b'); os.rename('../b', '../../c')"
        " if 0 else os.rename('../../a/b', '../../c')\nfor k in range(8):\n  try: os.chdir('..')\n "
        " except OSError: break\nprint(os.getcwd()); print('THROUGH' if os.path.exists('{file}')"
        " and open('{file}').read() else '')"
    ),
    "O_TMPFILE and unlinked files beyond the limit": Attack(
        "import os\nn = 0\ntry:\n  for k in range(40):\n    f = os.open('.', os.O_TMPFILE |"
        " os.O_RDWR, 0o600)\n    for _ in range(8): n += os.write(f, bytes(1 << 20))\nexcept"
        " OSError as e: print(e)\nprint('THROUGH' if n > 64 << 20 else n)",
        15,
    ),
    "fallocate beyond the limit": Attack(
        "import os\nn = 0\ntry:\n  for k in range(40):\n    f = os.open(f'a{{k}}', os.O_CREAT |"
        " os.O_RDWR); os.posix_fallocate(f, 0, 32 << 20); n += 32 << 20\nexcept OSError as e:"
        " print(e)\nprint('THROUGH' if n > 64 << 20 else n)",
        15,
    ),
    "a tree 5,000 folders deep, left behind": Attack(
        "import os, itertools\ntry:\n  for k in range(5000): os.mkdir('d'); os.chdir('d')\nexcept"
        " OSError as e: print(k, e)\nos._exit(0)",
        8,
        "server",
    ),
    "many names in one folder (memory of dentries)": Attack(
        "import os\nn = 0\ntry:\n  for k in range(200000): open('n' * 200 + str(k), 'w').close(); n"
        " += 1\nexcept OSError as e: print(e)\nprint('THROUGH' if n > 1000 else n)",
        15,
    ),
    # memory and processor beside the limits
    "64 descriptors full of pipe data": Attack(
        "import os\nn = 0\ntry:\n  while True:\n    r, w = os.pipe(); os.set_blocking(w, False)\n  "
        "  try:\n      while True: n += os.write(w, bytes(65536))\n    except BlockingIOError:"
        " pass\nexcept OSError as e: print(e)\nprint('THROUGH' if n > 64 << 20 else n)"
    ),
    "memory by threads beyond RLIMIT_AS": Attack(
        "import threading\nhold = []\ndef f():\n  try: hold.append(bytearray(512 << 20))\n  except"
        " MemoryError: pass\nT = [threading.Thread(target=f) for _ in range(12)]\n[t.start() for t"
        " in T]; [t.join() for t in T]\nn = sum(map(len, hold)); print('THROUGH' if n > 2 << 30"
        " else n)",
        20,
    ),
    "processor time between calls, threads": Attack(
        "import threading, numpy\na = numpy.ones((400, 400))\ndef f():\n  b = a\n  while True: b ="
        " a @ a\nfor _ in range(8): threading.Thread(target=f, daemon=True).start()",
        5,
        "cpu",
    ),
    "processor time between calls, SIGALRM": Attack(
        "import signal\ndef f(*_):\n  while True: pass\nsignal.signal(signal.SIGALRM, f);"
        " signal.setitimer(signal.ITIMER_REAL, 0.3)",
        5,
        "cpu",
    ),
    # the connection
    "16 GiB of blobs into the host (here 24 x 64 MiB)": Attack(
        _SEND + "frame(" + _OK % ("'x'", "0.1", "0") + ", [bytes(64 << 20)] * 24)", 25, "memory"
    ),
    "1 MiB of text instead of 20,000 characters": Attack(
        _SEND + "frame(" + _OK % ("'x' * 900000", "0.1", "0") + ")", 5, "text"
    ),
    "1 MiB of error instead of 4,000 characters": Attack(
        _SEND
        + "frame({{'call': 2, 'text': '', 'error': 'x' * 900000, 'seconds': 0.1, 'dropped': 0}})",
        5,
        "text",
    ),
    "256 figures instead of 32": Attack(
        _SEND
        + "b = io.BytesIO(); Image.new('RGB', (64, 64)).save(b, 'PNG')\nframe("
        + _OK % ("'x'", "0.1", "0")
        + ", [b.getvalue()] * 256)",
        10,
        "text",
    ),
    "seconds: NaN, 1e308, negative": Attack(
        _SEND + "frame(" + _OK % ("'x'", "float('nan')", "0") + ")", 5, "nan"
    ),
    "dropped: an integer of 4,300 digits and a broken figure": Attack(
        _SEND + "frame(" + _OK % ("'x'", "0.1", "10 ** 4300 - 1") + ", [b'no image'])",
        5,
        "environment",
    ),
    "dropped: negative": Attack(_SEND + "frame(" + _OK % ("'x'", "0.1", "-7") + ")", 5, "negative"),
    "header: JSON constants, lists, null": Attack(_SEND + "frame(b'[]')", 3),
    "header: blobs as a dict": Attack(
        _SEND + "frame(json.dumps({{'call': 2, 'text': 'x', 'error': None, 'dropped': 0, 'blobs':"
        " {{}}}}).encode())",
        3,
    ),
    "header: an integer of 5,000 digits": Attack(
        _SEND + "frame(b'{{\"id\": 2, \"blobs\": [' + b'9' * 5000 + b']}}')", 3
    ),
    "header: invalid UTF-8, UTF-16, a BOM": Attack(
        _SEND + "frame('\\ufeff{{}}'.encode('utf-16'))", 3
    ),
    "header: duplicate names": Attack(
        _SEND
        + 'frame(b\'{{"id": 2, "id": 2, "text": "a", "text": "b", "error": null, "dropped": 0,'
        ' "blobs": [], "blobs": [1]}}\')',
        1,
    ),
    "a frame without an end, one byte a time": Attack(
        "import os, time, struct\nos.write(3, struct.pack('>I', 100))\nfor k in range(99):\n "
        " os.write(3, b'x'); time.sleep(.2)",
        2,
        "deadline",
    ),
    "a surrogate in what is printed": Attack(
        "print('\\ud83d' * 10); print('THROUGH') if 0 else None"
    ),
    "half of the connection shut down": Attack(
        "import socket\ns = socket.socket(fileno=3); s.shutdown(1)", 2
    ),
    "an answer before its question (id 3 and 4)": Attack(
        _SEND
        + "frame({{'call': 3, 'text': 'FORGED', 'error': None, 'seconds': 0.1, 'dropped': 0}})",
        3,
    ),
    # Python
    "sys.modules and builtins poisoned for others": Attack(
        "import sys, builtins, numpy\nsys.modules['json'] = None; builtins.print = None; numpy.ones"
        " = None; builtins.exec = None",
        3,
        "others",
    ),
    "atexit and sys.settrace": Attack(
        "import atexit, sys, threading\natexit.register(lambda: open('/tmp/late',"
        " 'w'))\nsys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit))",
        3,
        "others",
    ),
    "the helpers replaced: _format_traceback, Printed.text, time": Attack(
        "import sys\nc = sys.modules['rayloop.sandbox.cells']\nc._format_traceback = lambda e:"
        " None\nc.Printed.text = lambda self: 'x' * (3 << 20)\nc.time.perf_counter = lambda:"
        " float('inf')",
        3,
        "helpers",
    ),
    "gc finds the server's settings, control socket and other interpreters": Attack(
        "import gc, sys, socket\nf = [o for o in gc.get_objects() if isinstance(o,"
        " socket.socket)]\nprint([s.fileno() for s in f])\nimport os\nn = 0\nfor s in range(4,"
        " 64):\n  try: os.fstat(s); n += 1\n  except OSError: pass\nprint('THROUGH: %d descriptors'"
        " % n if n else '')"
    ),
    "the same random numbers in two interpreters": Attack(
        "import random, numpy\nprint(random.random(), numpy.random.rand())", 3, "random"
    ),
    "the run's variables by ctypes (environ, auxv)": Attack(
        "import ctypes, os\nL = ctypes.CDLL(None)\ne = ctypes.POINTER(ctypes.c_char_p).in_dll(L,"
        " 'environ'); k = 0; t = b''\nwhile e[k]: t += e[k] + b' '; k += 1\nprint('THROUGH' if"
        " b'CANARY' in t or b'secret' in t else t[:200])"
    ),
    "audit hooks, excepthook, displayhook, threading.excepthook": Attack(
        "import sys\ndef h(*a): raise SystemExit\nsys.excepthook = h; sys.displayhook = h;"
        " sys.unraisablehook = h\nsys.addaudithook(lambda e, a: (_ for _ in"
        " ()).throw(RuntimeError('no')) if e == 'compile' else None)",
        3,
        "others",
    ),
    "recursion in C, a stack of 8 MiB gone": Attack(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", 5
    ),
    "a regular expression without end": Attack("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", 1),
    "ctypes: overwrite the connection's code": Attack(
        "import ctypes, sys\nc ="
        " sys.modules['rayloop.sandbox.frames']\nctypes.memset(id(c.send.__code__), 0, 64)",
        2,
    ),
    # channels between episodes
    "flock on a shared file of /usr": Attack(
        "import fcntl\nf = open('/usr/bin/true', 'rb'); fcntl.flock(f, fcntl.LOCK_EX |"
        " fcntl.LOCK_NB)\nkeep = f",
        3,
        "flock",
    ),
    "the page cache of a shared file": Attack(
        "import os\nf = os.open({cold!r}, os.O_RDONLY); os.posix_fadvise(f, 0, 0,"
        " os.POSIX_FADV_DONTNEED); print('ready')",
        3,
        "cache",
    ),
    "the machine's name, memory, load": Attack(
        "import os, ctypes\nu = os.uname(); print('THROUGH: ' + u.nodename if u.nodename not in"
        " ('sandbox',) else '')"
    ),
}
ATTACKS: Mapping[str, Attack] = {**OF_THE_NOTES, **FURTHER, **SECOND}
