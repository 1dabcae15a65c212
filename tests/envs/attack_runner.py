"""One column of the attack table: a level, as root or as another user.

Prints a line of JSON for each attack.

``measure`` runs it in a pid namespace of its own, where ``kill(-1)`` reaches this run alone; when
an attack ends the run, another one goes on with the next.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rayloop.sandbox.host import Interpreter, Sandbox
from rayloop.sandbox.kernel import MACHINE
from rayloop.sandbox.options import CodeFailed, Level, Options
from tests.envs.attack_checks import CHECKS, Seen, growing, said
from tests.envs.attacks import NUMBERS, Attack
from tests.envs.attacks_second import ATTACKS

ROOT = Path(__file__).parents[2]
USER = 61183
"""An ordinary user, for the columns of one."""
PRELOAD = (
    *Options().preload,
    "subprocess",
    "socket",
    "ctypes",
    "resource",
    "multiprocessing",
    "glob",
    "fcntl",
    "mmap",
)


def columns() -> list[tuple[Level, str]]:
    """Those that can be measured here."""
    users = ("user", "root") if os.geteuid() == 0 else ("user",)
    return [(level, who) for level in Level for who in users]


def measure(level: Level, who: str, names: Iterable[str] = ATTACKS) -> dict[str, str]:
    """Attack -> "held", or how it got through."""
    todo, found = list(names), {}
    while todo:
        lines = _run(level, who, todo)
        for name, result in lines.items():
            found[name] = result or "through: it ended the run"
            todo.remove(name)
        if not lines:
            raise RuntimeError(f"{level} as {who}: the runner does not start")
    return found


def _run(level: Level, who: str, names: list[str]) -> dict[str, str | None]:
    """One process; the last attack has None when the process did not live to say how it went."""
    with tempfile.TemporaryDirectory(prefix="attacks-") as home:
        os.chmod(home, 0o777)
        line = [sys.executable, "-B", "-m", "tests.envs.attack_runner", level, *names]
        bait = (
            Path(home) / "bait"
        )  # data and keys where images and machines have them, over what is there
        for path in (bait / "src/app/data/truth.jsonl", bait / "etc/judge.key"):
            path.parent.mkdir(parents=True)
            path.write_text("secret", encoding="utf-8")
        for path in (bait, *bait.rglob("*")):
            path.chmod(0o755)
        outer = [
            "bwrap",
            "--dev-bind",
            "/",
            "/",
            *("--ro-bind", str(bait / "src"), "/usr/src"),
            *("--ro-bind", str(bait / "etc"), "/usr/local/etc"),
            "--unshare-pid",
            "--proc",
            "/proc",
            "--die-with-parent",
            "--chdir",
            str(ROOT),
        ]
        if who == "user" and os.geteuid() == 0:  # who can read the Python below /root too
            outer += ["--perms", "0755", "--tmpfs", "/root"]
            for folder in (
                Path(path)
                for path in {sys.prefix, sys.base_prefix, str(ROOT)}
                if path.startswith("/root/")
            ):
                for parent in list(reversed(folder.parents))[2:]:
                    outer += ["--perms", "0755", "--dir", str(parent)]
                outer += ["--ro-bind", str(folder), str(folder)]
            line = [
                "setpriv",
                f"--reuid={USER}",
                f"--regid={USER}",
                "--clear-groups",
                "--inh-caps=-all",
                "--bounding-set=-all",
                *line,
            ]
        environment = {**os.environ, "HOME": home, "CANARY_SECRET": "x", "PYTHONPATH": str(ROOT)}
        cache = _fonts()
        environment |= {"MPLCONFIGDIR": cache} if cache else {}
        done = subprocess.run(
            [*outer, *line],
            stdout=subprocess.PIPE,
            text=True,
            timeout=280,
            check=False,
            env=environment,
        )
    results: dict[str, str | None] = {}
    for text in done.stdout.splitlines():
        record = json.loads(text)
        results[record["name"]] = record.get("result")
    return results


def _fonts() -> str | None:
    from rayloop.sandbox.host import fonts_folder

    found = fonts_folder()
    return found if found and not found.startswith("/root/") else None


class Column:
    """The things that attacks are aimed at, and a sandbox."""

    def __init__(self, level: Level) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bait-"))
        os.chmod(self.folder, 0o777)
        (self.folder / ".ray").mkdir(mode=0o755)
        self.file = self.folder / "truth.jsonl"
        for path in (self.file, self.folder / ".ray" / "auth_token"):
            path.write_text("secret", encoding="utf-8")
            path.chmod(0o666)
        self.servers = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        ]
        abstract, named = f"attack-{os.getpid()}", str(self.folder / "socket")
        self.servers[1].bind(f"\0{abstract}")
        self.servers[2].bind(named)
        os.chmod(named, 0o777)
        for server in self.servers[1:]:
            server.listen()
        self.canary = subprocess.Popen(["sleep", "600"])
        self.sandbox = Sandbox(level, Options(preload=PRELOAD, spares=1))
        self.older = self.sandbox.interpreter()
        self.older.run(
            "secret = 'mine'\ntry: open('mine.txt', 'w').write('another episode')\nexcept OSError:"
            " pass",
            10,
        )
        numbers = {name: pair[MACHINE == "aarch64"] for name, pair in NUMBERS.items()}
        self.filled: dict[str, Any] = {
            "file": self.file,
            "folder": self.folder,
            "port": self.servers[0].getsockname()[1],
        }
        cold = "/usr/share/common-licenses/GPL-3"
        self.filled["cold"] = cold if os.path.exists(cold) else "/usr/bin/openssl"
        os.symlink("SECRET-TEXT", self.folder / "link")
        self.filled |= {
            "abstract": abstract,
            "named": named,
            "run": os.getpid(),
            "canary": self.canary.pid,
            **numbers,
        }

    def result(self, attack: Attack) -> str:
        """ "held", or what went through; raises nothing that an attack can cause."""
        target = self.sandbox.interpreter()
        target.run("x = 1", 10)
        with growing() as grown:
            began = time.monotonic()
            self.last, text = said(target, attack.code.format(**self.filled), attack.seconds)
            late = time.monotonic() - began > attack.seconds + 3
        self.said, self.grown = text, grown()
        through = "THROUGH" in text or late or self._outside(attack, target)
        after = self._next(target)
        target.close()
        if through:
            return f"through: {' '.join(text.split())[:80]}"
        return after or "held"

    def _outside(self, attack: Attack, target: Interpreter) -> bool:
        """What is not as it should be."""
        return CHECKS[attack.check](self.seen(target)) if attack.check else False

    def seen(self, target: Interpreter) -> Seen:
        """What the checks look at."""
        return Seen(
            self.sandbox,
            target,
            self.file,
            self.canary,
            self.filled["cold"],
            self.last,
            self.said,
            self.grown,
        )

    def _next(self, target: Interpreter) -> str:
        """The next call must give its own output, in this interpreter or in a new one, and the
        older one must have its names.
        """
        for _ in range(2):
            try:
                if target.run("print(6 * 7)", 3).text != "42\n":
                    return "through: the next call got another's output"
                break
            except CodeFailed:
                target = self.sandbox.interpreter()
        if self.older.run("print(secret)", 5).text != "mine\n":
            return "through: an older interpreter lost its names"
        return ""


def main(arguments: list[str]) -> None:
    column = Column(Level(arguments[0]))
    for name in arguments[1:]:
        print(json.dumps({"name": name}), flush=True)
        try:
            result = column.result(ATTACKS[name])
        except Exception as error:  # of the sandbox: a run would have lost its episodes
            result = f"through: the sandbox failed ({type(error).__name__}: {error})"[:120]
        print(json.dumps({"name": name, "result": result}), flush=True)
        if (
            "the sandbox failed" in result
            or "lost its names" in result
            or column.canary.poll() is not None
        ):
            break  # the rest is run anew
    column.canary.kill()
    column.sandbox.close()


def table(found: Mapping[tuple[Level, str], Mapping[str, str]]) -> str:
    """A page's table: how many each level holds, and which get through at a level that a run may
    use.
    """
    heads = [f"{level}, {who}" for level, who in found]
    rows = [f"| attack | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    held = {name: [column[name] == "held" for column in found.values()] for name in ATTACKS}
    sums = [sum(column) for column in zip(*held.values(), strict=True)]
    rows.append(f"| **held, of {len(ATTACKS)}** | {' | '.join(f'**{count}**' for count in sums)} |")
    usable = [level != Level.PROCESS for level, _ in found]
    for name, row in held.items():
        if not all(one for one, counts in zip(row, usable, strict=True) if counts):
            rows.append(
                f"| {name} | {' | '.join('held' if one else '**through**' for one in row)} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print(table({(level, who): measure(level, who) for level, who in columns()}))
    else:
        main(sys.argv[1:])
