"""Programs that the policy writes, in a sandbox: here (bubblewrap), in containers, or on
SandboxFusion's servers; their tool.
"""

import base64
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import httpx
from pydantic import Field, Tag

from rayloop.config.settings import OWN, Component, Role, SettingsModel, by_kind
from rayloop.core.failures import ConfigError, EnvironmentFailed
from rayloop.core.protocols import ProgramResult, ProgramSandbox, ToolResult
from rayloop.envs.tools import ToolError
from rayloop.sandbox import bubblewrap, memory, seccomp

OUTPUT, SCRIPT, BLOCK, PROCESSES, GRACE, LOOK = 64 << 10, 120 << 10, 10240, 64, 10.0, 0.05
"""Bytes that are kept of each output, of a command (Linux takes no argument of 128 KiB), of tar's
blocks; processes at one time. Seconds: beyond a program's own until the sandbox must answer, and
for a file; between two looks at a program.
"""
BEGUN, LINE = b"begun\n", 80
"""What the script says when the files are there, and the most bytes of the line behind a program.
"""
PLACE = (
    'if [ -e w ] || [ -e out ] || [ -e err ]; then cd "$(mktemp -d)"; fi; mkdir w && cd w || exit 1'
)
"""Where a program runs: elsewhere when the sandbox shows something of this machine under these
names.
"""
Ended = tuple[int | None, bytes]


class SandboxKind(SettingsModel):
    """A way to run a script, and what programs may take: at most 64 processes, and 64 KiB of each
    output are kept.
    """

    ends: ClassVar[str] = (
        "kill -9 -1"  # what a program has left running, where nothing else runs beside it
    )
    memory: int = Field(1024, ge=64)
    """MiB: of one program, and but for ``sandbox_fusion`` of all together.

    Raise it for compilers and large data.
    """
    files: int = Field(64, ge=1, le=512)
    """MiB of all files, of a program's input and of each output.

    Raise it for programs that write much.
    """

    @property
    def most(self) -> int:
        """Bytes that a script writes at most: the files, a file that is read, another output, and
        lines between.
        """
        return (2 * self.files << 20) + 2 * OUTPUT

    def build(self) -> ProgramSandbox:
        """A new sandbox, which starts with its first program."""
        return _Sandbox(self)


class LocalSandbox(SandboxKind):
    """In bubblewrap on this machine: the system's programs and Python's packages, read-only, no
    network.
    """

    kind: Literal["local"] = "local"

    def run(self, script: str, given: bytes, seconds: float) -> Ended:
        """Run a script with an input, and leave nothing of it.

        Returns its exit code (None: it was ended, after ``seconds`` or for its memory) and output.
        Raises EnvironmentFailed, OSError.
        """
        with bubblewrap.borrowed() as uid, tempfile.TemporaryFile() as filters:
            filters.write(seccomp.administrators_refused(segments=False))
            filters.seek(0)
            limits = (
                f"--data={self.memory << 20}",
                f"--nproc={PROCESSES}",
                f"--fsize={self.most}",
                "--core=0",
            )
            line = bubblewrap.command(
                ["/usr/bin/prlimit", *limits, "/bin/sh", "-c", script],
                read=bubblewrap.python_folders(),
                folders={"/tmp": self.files * 3 << 20},
                environment={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"},
                uid=uid,
                options=["--seccomp", str(filters.fileno())],
            )
            inside = (
                self.memory + 3 * self.files + 64
            ) << 20  # with what lies in /tmp and /dev/shm, and bubblewrap's own
            with memory.bounded(inside) as group:
                if group:
                    # The shell joins the cgroup first: then bubblewrap and all below it are
                    # counted.
                    line = ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', group, *line]
                return _called(
                    line, given, seconds, self.most, self.memory << 20, (filters.fileno(),)
                )


class ContainerSandbox(SandboxKind):
    """In a container for each program: no network, no capabilities, a read-only image, files in
    memory.
    """

    kind: Literal["container"] = "container"
    image: str
    """One that is on the machine already, with ``sh``, ``dd``, ``tar`` and ``timeout``."""
    engine: Literal["podman", "docker"] = "podman"
    """The command that starts it, as the run's user."""

    def run(self, script: str, given: bytes, seconds: float) -> Ended:
        """As ``LocalSandbox.run``."""
        name, memory = f"rayloop-{time.time_ns()}-{threading.get_native_id()}", f"{self.memory}m"
        line = [
            *(
                self.engine,
                "run",
                "--interactive",
                "--rm",
                "--name",
                name,
                "--pull=never",
                "--network=none",
                "--cap-drop=ALL",
            ),
            *(
                "--security-opt=no-new-privileges",
                "--read-only",
                f"--pids-limit={PROCESSES}",
                f"--memory={memory}",
            ),
            *(
                f"--memory-swap={memory}",
                f"--tmpfs=/work:rw,exec,mode=1777,size={self.files * 3}m",
                "--workdir=/work",
            ),
            *("--env=HOME=/work", "--entrypoint=sh", self.image, "-c", script),
        ]
        end = (self.engine, "rm", "--force", name)
        return _called(line, given, seconds + 2 * GRACE, self.most, end=end)  # engines start slowly


class FusionSandbox(SandboxKind):
    """On a server of ByteDance's SandboxFusion (arXiv:2412.00535), by ``POST /run_code``.

    Never exercised on theirs.
    """

    ends = ":"
    kind: Literal["sandbox_fusion"] = "sandbox_fusion"
    url: str = Field(pattern="^https?://")
    """Of the server, such as http://host:8080."""

    def run(self, script: str, given: bytes, seconds: float) -> Ended:
        """As ``LocalSandbox.run``."""
        files = {"script": script.encode(), "given": given}
        asked = {
            "language": "bash",
            "code": "sh script < given > answer",
            "run_timeout": seconds,
            "memory_limit_MB": self.memory,
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "fetch_files": ["answer"],
        }
        try:
            said = json.loads(self._asked(asked, seconds + GRACE))
            ran = said["run_result"] or {"status": said["message"]}
            code = (
                int(ran["return_code"])
                if ran["status"] == "Finished"
                else {"TimeLimitExceeded": None}[ran["status"]]
            )
            return code, base64.b64decode(said["files"].get("answer", ""), validate=True)
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise EnvironmentFailed(
                f"{self.url}: no answer of SandboxFusion: {type(error).__name__}: {error}"
            ) from error

    def _asked(self, asked: Any, seconds: float) -> bytes:
        """The body of an answer.

        Raises httpx's errors, ValueError for more than a script can write.
        """
        until, most, body = (
            time.monotonic() + seconds,
            2 * self.most,
            bytearray(),
        )  # base64 and JSON need less than that
        with httpx.stream(
            "POST", f"{self.url.rstrip('/')}/run_code", json=asked, timeout=seconds
        ) as response:
            response.raise_for_status()
            for part in response.iter_bytes(1 << 16):
                body += part
                if len(body) > most or time.monotonic() > until:
                    raise ValueError(f"it is longer than {most} bytes, or than {seconds:g} seconds")
        return bytes(body)


SandboxSetting = Annotated[
    Annotated[LocalSandbox, Tag("local")]
    | Annotated[ContainerSandbox, Tag("container")]
    | Annotated[FusionSandbox, Tag("sandbox_fusion")]
    | Annotated[Component, Tag(OWN)],
    by_kind("local"),
]


class _Sandbox:
    def __init__(self, kind: Any) -> None:
        self._kind, self._most, self._files, self._lock, self._closed = (
            kind,
            kind.files << 20,
            b"",
            threading.Lock(),
            False,
        )

    def exec(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout: float, most: int = OUTPUT
    ) -> ProgramResult:
        """Each program runs in a new place.

        The last one's files, a tar that only the sandbox reads, come before its input.
        """
        # One program at a time: each begins with the files of the one before.
        with self._lock:
            script = f"""exec 2> /dev/null; {PLACE}
dd bs={BLOCK} count={len(self._files) // BLOCK} iflag=fullblock | tar -xf -; echo begun
(ulimit -f {self._most >> 9}; exec timeout -s KILL {timeout} {shlex.join(command)}) > ../out 2> ../err
code=$?; {self._kind.ends}; echo $code $(wc -c < ../out) $(wc -c < ../err)
head -c {most} ../out; head -c {most} ../err; tar -cf - . | head -c {self._most}; exit 0"""
            if (
                not command
                or not command[0]
                or "\0" in script
                or len(script.encode()) > SCRIPT
                or len(stdin) > self._most
            ):
                raise ValueError(
                    f"no command: it is empty, has a NUL, more than {SCRIPT} bytes, or more input"
                    f" than {self._most} bytes"
                )
            if self._closed:
                raise EnvironmentFailed("the sandbox is closed")

            until = time.monotonic() + timeout
            try:
                code, answer = self._kind.run(script, self._files + stdin, timeout + GRACE)
            except OSError as error:
                raise EnvironmentFailed(f"programs cannot be run: {error}") from error

            begun = answer.find(BEGUN)
            if begun < 0 and (code is None or 0 < code < 128):
                raise EnvironmentFailed(
                    f"the sandbox did not begin ({code}): {answer[:500].decode(errors='replace')}"
                )
            at = begun + len(BEGUN) if begun >= 0 else len(answer)
            line = answer[at : at + LINE].partition(b"\n")[0]
            found = [int(word) for word in line.split() if word.isdigit()]
            code, out, err, *_ = [
                *found,
                *(137, 0, 0)[len(found) :],
            ]  # the program may have ended the script too

            begins = at + len(line) + 1
            ends = begins + min(out, most)
            files_at = ends + min(err, most)

            whole = len(answer) - files_at < self._most
            if whole and len(answer) > files_at:
                self._files = answer[files_at:] + bytes((files_at - len(answer)) % BLOCK)
            late, cut = code == 137 and time.monotonic() >= until, max(out, err) > most or not whole
            return ProgramResult(
                None if late else code, answer[begins:ends], answer[ends:files_at], cut
            )

    def read(self, path: str) -> bytes:
        return self._at(path, '[ -f "$1" ] && exec cat "$1"', b"").stdout

    def write(self, path: str, content: bytes) -> None:
        self._at(path, 'mkdir -p "${1%/*}" && exec cat > "$1"', content)

    def close(self) -> None:
        with self._lock:
            self._closed, self._files = True, b""

    def _at(self, path: str, script: str, content: bytes) -> ProgramResult:
        if not path.strip("./") or path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} is no path below the sandbox's folder")
        ended = self.exec(
            ("sh", "-c", script, "sh", f"./{path}"), stdin=content, timeout=GRACE, most=self._most
        )
        if ended.exit_code != 0:
            raise FileNotFoundError(
                f"{path}: {ended.stderr.decode(errors='replace') or 'no file that can be read'}"
            )
        return ended


def _called(
    line: list[str],
    given: bytes,
    seconds: float,
    most: int,
    filled: float = 1e18,
    fds: Sequence[int] = (),
    end: Sequence[str] = (),
) -> Ended:
    """``SandboxKind.run`` of a command line with the descriptors ``fds``, which is ended when it
    has written more than ``most`` bytes or filled more than ``filled`` bytes of memory. ``end``
    ends what it has started elsewhere.
    """
    until = time.monotonic() + seconds
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(given)
        stdin.seek(0)
        with subprocess.Popen(
            line, stdin=stdin, stdout=output, stderr=output, pass_fds=fds
        ) as process:
            while process.poll() is None and time.monotonic() < until:
                written = os.fstat(output.fileno()).st_size
                if written > most or memory.beyond(filled, memory.tree(process.pid)):
                    break
                time.sleep(LOOK)
            code = process.poll()
            if (
                code is None and end
                # while it lives: an engine's command that is killed in between leaves what it has
                # started
            ):
                _called([*end], b"", GRACE, OUTPUT)
            process.kill()
        output.seek(0)
        return code, output.read(most)


class RunProgram:
    """A tool that runs what the policy writes in a sandbox of the episode's own.

    The policy sees the outputs and how the program ended; a sandbox that fails is a failure of the
    environment, never a reward.
    """

    name, own_deadline = "run_program", True
    description = (
        "Runs a program in a machine without a network, and returns its outputs. Its files are"
        " there for the next call."
    )
    parameters = {
        "type": "object",
        "properties": {"program": {"type": "string"}},
        "required": ["program"],
    }

    class Settings(SettingsModel):
        """Where and how programs run."""

        sandbox: Annotated[SandboxSetting, Role("sandbox", ("exec", "read", "write", "close"))] = (
            LocalSandbox()
        )
        """``kind``: local, container or sandbox_fusion, or ``{use: module:Class, with: {...}}``;
        with its limits.
        """
        run: tuple[str, ...] = Field(("bash", "-c"), min_length=1)
        """What is called with the policy's text as its last argument: ``[python3, -c]`` for Python.
        """
        timeout: float = Field(10.0, gt=0)
        """Seconds for a program.

        Keep it 50 below ``episode.step_timeout``; ``tool_timeout`` does not count for it.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._sandbox = settings, settings.sandbox.build()
        self.close = self._sandbox.close

    @staticmethod
    def preflight(settings: Settings) -> str:
        """Where programs run. Raises ConfigError when that is known not to work here."""
        if isinstance(settings.sandbox, LocalSandbox) and (why := bubblewrap.refused_here()):
            raise ConfigError(
                f"sandbox.kind: local runs no program here: {why}. Choose another kind"
                " (docs/security.md, Programs)"
            )
        return (
            "programs:"
            f" {settings.sandbox.use if isinstance(settings.sandbox, Component) else settings.sandbox.kind}"
        )

    def __call__(self, program: str) -> ToolResult:
        """Raises ToolError for what is no program, EnvironmentFailed."""
        try:
            ended = self._sandbox.exec(
                (*self._settings.run, program), timeout=self._settings.timeout
            )
        except ValueError as error:
            raise ToolError(str(error)) from error
        end = (
            "it did not end in time" if ended.exit_code is None else f"exit code {ended.exit_code}"
        )
        said = [part.decode(errors="replace").rstrip() for part in (ended.stdout, ended.stderr)]
        return ToolResult(
            "\n".join(filter(None, (*said, f"[{end}{', not all was kept' * ended.truncated}]")))
        )
