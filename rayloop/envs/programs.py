"""A tool that runs programs of the policy, and the sandboxes that it runs them in.

A sandbox is on this machine (bubblewrap), in containers, or on SandboxFusion's servers.
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

from rayloop.config.settings import CUSTOM, Component, Role, SettingsModel, by_kind
from rayloop.core.failures import ConfigError, EnvironmentFailed
from rayloop.core.protocols import ProgramResult, ProgramSandbox, ToolResult
from rayloop.envs.tools import ToolError
from rayloop.sandbox import bubblewrap, memory, seccomp

OUTPUT_BYTES = 64 << 10
"""Bytes that are kept of each output."""
SCRIPT_BYTES = 120 << 10
"""Bytes of a command: Linux takes no argument of 128 KiB."""
TAR_BLOCK_BYTES = 10240
"""Bytes that tar reads and writes at once."""
MAX_PROCESSES = 64
"""Processes of a program at one time."""
GRACE_S = 10.0
"""Seconds beyond a program's timeout until the sandbox must answer, and the seconds for a file."""
CHECK_EVERY_S = 0.05
"""Seconds between two checks of a program."""
STARTED = b"begun\n"
"""What the script writes once the files are unpacked."""
STATUS_LINE_BYTES = 80
"""Bytes, at most, of the line behind a program: its exit code and the lengths of its outputs."""
PLACE = (
    'if [ -e w ] || [ -e out ] || [ -e err ]; then cd "$(mktemp -d)"; fi; mkdir w && cd w || exit 1'
)
"""Where a program runs: in a new folder where the sandbox shows files of this machine so named."""
Ended = tuple[int | None, bytes]
"""An exit code, None for a program that was killed, and its output."""


class SandboxKind(SettingsModel):
    """A way to run a script, and what programs may take.

    A program has at most 64 processes, and 64 KiB of each output are kept.
    """

    # Kills what a program has left running, where nothing else runs in its namespace.
    ends: ClassVar[str] = "kill -9 -1"
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
        """The most bytes that a script writes.

        That is the files, a file that is read, another output, and lines between.
        """
        return (2 * self.files << 20) + 2 * OUTPUT_BYTES

    def build(self) -> ProgramSandbox:
        """A new sandbox, which starts with its first program."""
        return _Sandbox(self)


class LocalSandbox(SandboxKind):
    """In bubblewrap on this machine.

    Programs see the system's programs and Python's packages, read-only, and no network.
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
                f"--nproc={MAX_PROCESSES}",
                f"--fsize={self.most}",
                "--core=0",
            )
            command = bubblewrap.command(
                ["/usr/bin/prlimit", *limits, "/bin/sh", "-c", script],
                read=bubblewrap.python_folders(),
                folders={"/tmp": self.files * 3 << 20},
                environment={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"},
                uid=uid,
                options=["--seccomp", str(filters.fileno())],
            )
            # The files in /tmp and /dev/shm, and bubblewrap itself, are in memory too.
            cgroup_bytes = (self.memory + 3 * self.files + 64) << 20
            with memory.bounded(cgroup_bytes) as group:
                if group:
                    # The shell joins the cgroup first: then bubblewrap and all below it are
                    # counted.
                    command = ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', group, *command]
                return _called(
                    command,
                    given,
                    seconds,
                    self.most,
                    filled=self.memory << 20,
                    fds=(filters.fileno(),),
                )


class ContainerSandbox(SandboxKind):
    """In a container for each program.

    It has no network and no capabilities, a read-only image, and its files in memory.
    """

    kind: Literal["container"] = "container"
    image: str
    """One that is on the machine already, with ``sh``, ``dd``, ``tar`` and ``timeout``."""
    engine: Literal["podman", "docker"] = "podman"
    """The command that starts it, as the run's user."""

    def run(self, script: str, given: bytes, seconds: float) -> Ended:
        """As ``LocalSandbox.run``."""
        name = f"rayloop-{time.time_ns()}-{threading.get_native_id()}"
        memory = f"{self.memory}m"
        command = [
            self.engine,
            "run",
            "--interactive",
            "--rm",
            "--name",
            name,
            "--pull=never",
            "--network=none",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--read-only",
            f"--pids-limit={MAX_PROCESSES}",
            f"--memory={memory}",
            f"--memory-swap={memory}",
            f"--tmpfs=/work:rw,exec,mode=1777,size={self.files * 3}m",
            "--workdir=/work",
            "--env=HOME=/work",
            "--entrypoint=sh",
            self.image,
            "-c",
            script,
        ]
        stop_command = (self.engine, "rm", "--force", name)
        # Engines start slowly.
        return _called(command, given, seconds + 2 * GRACE_S, self.most, end=stop_command)


class FusionSandbox(SandboxKind):
    """On a server of ByteDance's SandboxFusion (arXiv:2412.00535), by ``POST /run_code``.

    Never exercised on a server of ByteDance's.
    """

    ends = ":"
    kind: Literal["sandbox_fusion"] = "sandbox_fusion"
    url: str = Field(pattern="^https?://")
    """The server's address, such as http://host:8080."""

    def run(self, script: str, given: bytes, seconds: float) -> Ended:
        """As ``LocalSandbox.run``."""
        files = {"script": script.encode(), "given": given}
        request = {
            "language": "bash",
            "code": "sh script < given > answer",
            "run_timeout": seconds,
            "memory_limit_MB": self.memory,
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "fetch_files": ["answer"],
        }
        try:
            response = json.loads(self._post(request, seconds + GRACE_S))
            result = response["run_result"] or {"status": response["message"]}
            status = result["status"]
            if status not in ("Finished", "TimeLimitExceeded"):
                raise KeyError(status)
            code = int(result["return_code"]) if status == "Finished" else None
            answer = response["files"].get("answer", "")
            return code, base64.b64decode(answer, validate=True)
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

    def _post(self, request: Any, seconds: float) -> bytes:
        """Return the body of the server's response.

        Raises httpx's errors, and ValueError for more than a script can write.
        """
        deadline = time.monotonic() + seconds
        # Base64 and JSON need less than twice the bytes.
        max_bytes = 2 * self.most
        body = bytearray()
        url = f"{self.url.rstrip('/')}/run_code"
        with httpx.stream("POST", url, json=request, timeout=seconds) as response:
            response.raise_for_status()
            for chunk in response.iter_bytes(1 << 16):
                body += chunk
                if len(body) > max_bytes or time.monotonic() > deadline:
                    raise ValueError(
                        f"it is longer than {max_bytes} bytes, or than {seconds:g} seconds"
                    )
        return bytes(body)


SandboxSetting = Annotated[
    Annotated[LocalSandbox, Tag("local")]
    | Annotated[ContainerSandbox, Tag("container")]
    | Annotated[FusionSandbox, Tag("sandbox_fusion")]
    | Annotated[Component, Tag(CUSTOM)],
    by_kind("local"),
]


class _Sandbox:
    """Runs programs one after another; each finds the files that the one before left."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._file_bytes = kind.files << 20
        self._files = b""
        self._lock = threading.Lock()
        self._closed = False

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float,
        most: int = OUTPUT_BYTES,
    ) -> ProgramResult:
        """Run a program in a new place.

        The files of the one before, a tar that only the sandbox reads, come before its input.
        """
        # One program at a time: each begins with the files of the one before.
        with self._lock:
            script = self._script(command, timeout, most)
            fits = len(script.encode()) <= SCRIPT_BYTES and len(stdin) <= self._file_bytes
            if not command or not command[0] or "\0" in script or not fits:
                raise ValueError(
                    f"no command: it is empty, has a NUL, more than {SCRIPT_BYTES} bytes, or more"
                    f" input than {self._file_bytes} bytes"
                )
            if self._closed:
                raise EnvironmentFailed("the sandbox is closed")

            deadline = time.monotonic() + timeout
            try:
                code, answer = self._kind.run(script, self._files + stdin, timeout + GRACE_S)
            except OSError as error:
                raise EnvironmentFailed(f"programs cannot be run: {error}") from error
            return self._result(code, answer, most, deadline)

    def _script(self, command: Sequence[str], timeout: float, most: int) -> str:
        """Return the script that unpacks the files, runs the program and packs the files again."""
        tar_blocks = len(self._files) // TAR_BLOCK_BYTES
        lines = (
            f"exec 2> /dev/null; {PLACE}",
            f"dd bs={TAR_BLOCK_BYTES} count={tar_blocks} iflag=fullblock | tar -xf -; echo begun",
            f"(ulimit -f {self._file_bytes >> 9};"
            f" exec timeout -s KILL {timeout} {shlex.join(command)}) > ../out 2> ../err",
            f"code=$?; {self._kind.ends}; echo $code $(wc -c < ../out) $(wc -c < ../err)",
            f"head -c {most} ../out; head -c {most} ../err;"
            f" tar -cf - . | head -c {self._file_bytes}; exit 0",
        )
        return "\n".join(lines)

    def _result(self, code: int | None, answer: bytes, most: int, deadline: float) -> ProgramResult:
        """Read what the script wrote, and keep the program's files.

        Raises EnvironmentFailed when the script did not start.
        """
        start = answer.find(STARTED)
        if start < 0 and (code is None or 0 < code < 128):
            detail = answer[:500].decode(errors="replace")
            raise EnvironmentFailed(f"the sandbox did not begin ({code}): {detail}")
        line_start = start + len(STARTED) if start >= 0 else len(answer)
        line = answer[line_start : line_start + STATUS_LINE_BYTES].partition(b"\n")[0]
        numbers = [int(word) for word in line.split() if word.isdigit()]
        # The program may have ended the script too, before it wrote the line.
        missing = (137, 0, 0)[len(numbers) :]
        exit_code, stdout_bytes, stderr_bytes, *_ = [*numbers, *missing]

        stdout_start = line_start + len(line) + 1
        stdout_end = stdout_start + min(stdout_bytes, most)
        files_start = stdout_end + min(stderr_bytes, most)

        files_fit = len(answer) - files_start < self._file_bytes
        if files_fit and len(answer) > files_start:
            padding = bytes((files_start - len(answer)) % TAR_BLOCK_BYTES)
            self._files = answer[files_start:] + padding
        is_late = exit_code == 137 and time.monotonic() >= deadline
        return ProgramResult(
            None if is_late else exit_code,
            answer[stdout_start:stdout_end],
            answer[stdout_end:files_start],
            truncated=max(stdout_bytes, stderr_bytes) > most or not files_fit,
        )

    def read(self, path: str) -> bytes:
        return self._at(path, '[ -f "$1" ] && exec cat "$1"', b"").stdout

    def write(self, path: str, content: bytes) -> None:
        self._at(path, 'mkdir -p "${1%/*}" && exec cat > "$1"', content)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._files = b""

    def _at(self, path: str, script: str, content: bytes) -> ProgramResult:
        if not path.strip("./") or path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} is not a path below the sandbox's folder")
        ended = self.exec(
            ("sh", "-c", script, "sh", f"./{path}"),
            stdin=content,
            timeout=GRACE_S,
            most=self._file_bytes,
        )
        if ended.exit_code != 0:
            reason = ended.stderr.decode(errors="replace") or "no file that can be read"
            raise FileNotFoundError(f"{path}: {reason}")
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
    """Run a command line as ``SandboxKind.run`` does, with the descriptors ``fds``.

    It is ended when it has written more than ``most`` bytes, or filled more than ``filled`` bytes
    of memory. ``end`` is the command that ends what it has started elsewhere.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(given)
        stdin.seek(0)
        with subprocess.Popen(
            line, stdin=stdin, stdout=output, stderr=output, pass_fds=fds
        ) as process:
            while process.poll() is None and time.monotonic() < deadline:
                output_bytes = os.fstat(output.fileno()).st_size
                if output_bytes > most or memory.beyond(filled, memory.tree(process.pid)):
                    break
                time.sleep(CHECK_EVERY_S)
            code = process.poll()
            # While it lives: an engine's command that is killed first leaves what it has started.
            if code is None and end:
                _called([*end], b"", GRACE_S, OUTPUT_BYTES)
            process.kill()
        output.seek(0)
        return code, output.read(most)


class RunProgram:
    """A tool that runs what the policy writes in the episode's sandbox.

    The policy sees the outputs and how the program ended; a sandbox that fails is a failure of the
    environment, never a reward.
    """

    name = "run_program"
    own_deadline = True
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
        """The sandbox and its limits.

        ``kind``: local, container or sandbox_fusion, or ``{use: module:Class, with: {...}}``.
        """
        run: tuple[str, ...] = Field(("bash", "-c"), min_length=1)
        """The command; the policy's text is its last argument. For Python: ``[python3, -c]``."""
        timeout: float = Field(10.0, gt=0)
        """Seconds for a program.

        Keep it 50 below ``episode.step_timeout``; ``tool_timeout`` does not count for it.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sandbox = settings.sandbox.build()
        self.close = self._sandbox.close

    @staticmethod
    def preflight(settings: Settings) -> str:
        """Say where programs run. Raises ConfigError when that is known not to work here."""
        sandbox = settings.sandbox
        refusal = bubblewrap.refused_here() if isinstance(sandbox, LocalSandbox) else ""
        if refusal:
            raise ConfigError(
                f"sandbox.kind: local runs no program here: {refusal}. Choose another kind"
                " (docs/security.md, Programs)"
            )
        return f"programs: {sandbox.use if isinstance(sandbox, Component) else sandbox.kind}"

    def __call__(self, program: str) -> ToolResult:
        """Run a program. Raises ToolError when it cannot be run as one, and EnvironmentFailed."""
        try:
            ended = self._sandbox.exec(
                (*self._settings.run, program), timeout=self._settings.timeout
            )
        except ValueError as error:
            raise ToolError(str(error)) from error
        end = "it did not end in time"
        if ended.exit_code is not None:
            end = f"exit code {ended.exit_code}"
        if ended.truncated:
            end += ", not all was kept"
        outputs = [part.decode(errors="replace").rstrip() for part in (ended.stdout, ended.stderr)]
        return ToolResult("\n".join(filter(None, (*outputs, f"[{end}]"))))
