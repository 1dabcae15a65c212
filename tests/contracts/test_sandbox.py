"""What every sandbox for programs keeps to, on real programs: the local one, containers,
SandboxFusion, and one of a user's own.

Containers run in a FAKE podman (tests/support/podman.py), and in the real engine where
RAYLOOP_TEST_IMAGE names an image of it with ``sh`` and the usual programs (RAYLOOP_TEST_ENGINE:
podman). SandboxFusion's server is tests/support/fusion.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.config.settings import Component, check_components
from rayloop.core.failures import (
    ConfigError,
    EnvironmentFailed,
    InfrastructureFailure,
    ToolDeadline,
)
from rayloop.core.protocols import ProgramResult, ProgramSandbox
from rayloop.core.types import Message, Task
from rayloop.envs import programs
from rayloop.envs.programs import ContainerSandbox, FusionSandbox, LocalSandbox, RunProgram
from rayloop.envs.tools import ToolCalls
from rayloop.run.sections import EnvironmentSettings, held_in
from tests.envs.programs import needs
from tests.support import fusion, podman
from tests.support.runs import eventually

HERE = "tests.contracts.test_sandbox"
MEMORY, FILES = 128, 4
ENGINE, IMAGE = (
    os.environ.get("RAYLOOP_TEST_ENGINE", "podman"),
    os.environ.get("RAYLOOP_TEST_IMAGE", ""),
)
BINARY = bytes(range(256)) * 8
Make = Callable[[], ProgramSandbox]

real = pytest.mark.skipif(
    not IMAGE, reason="RAYLOOP_TEST_IMAGE names no image of a container engine"
)
runs_programs = [pytest.mark.env, pytest.mark.timeout(180)]
KINDS = [
    pytest.param("local", marks=[*runs_programs, needs("bwrap")]),
    pytest.param("sandbox_fusion", marks=[*runs_programs, needs("bwrap")]),
    pytest.param("container (FAKE podman)", marks=[*runs_programs, needs("bwrap")]),
    pytest.param("container", marks=[*runs_programs, real]),
]


@pytest.fixture(params=KINDS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes sandboxes of one kind. At the end nothing of them is left: no process, no file."""
    (tmp_path / "tmp").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    before, made = set(psutil.pids()), list[ProgramSandbox]()
    limits: dict[str, Any] = {"memory": MEMORY, "files": FILES}

    def build() -> ProgramSandbox:
        made.append(kind.build())
        return made[-1]

    kind: LocalSandbox | ContainerSandbox | FusionSandbox
    if request.param == "sandbox_fusion":
        with fusion.server() as url:
            kind = FusionSandbox(url=url, **limits)
            yield build
    else:
        kind = LocalSandbox(**limits)
        if request.param == "container":
            kind = ContainerSandbox(engine=ENGINE, image=IMAGE, **limits)  # type: ignore[arg-type]
        elif request.param != "local":
            (tmp_path / "bin").mkdir()
            (tmp_path / "state").mkdir()
            for name, value in podman.install(tmp_path / "bin", tmp_path / "state").items():
                monkeypatch.setenv(name, value)
            kind = ContainerSandbox(image="known", **limits)
        yield build
    for sandbox in made:
        sandbox.close()
    eventually(
        lambda: not any(map(of_ours, set(psutil.pids()) - before)), "no process of a sandbox", 20
    )
    assert not list((tmp_path / "tmp").iterdir())
    assert not list(tmp_path.glob("state/*"))


def of_ours(pid: int) -> bool:
    """Whether the process lives, and was started by these tests: it is below this process, or has
    lost its parent. Other tests run sandboxes at the same time.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or not {"987654", "bwrap", "conmon"} & {
            process.name(),
            *process.cmdline(),
        }:
            return False
        above = [one.pid for one in process.parents()]
        return os.getpid() in above or above[:1] == [1] or "987654" in process.cmdline()
    except psutil.Error:
        return False


def sh(
    sandbox: ProgramSandbox, script: str, timeout: float = 20, stdin: bytes = b""
) -> ProgramResult:
    return sandbox.exec(("sh", "-c", script), timeout=timeout, stdin=stdin)


def test_a_program_has_its_arguments_its_input_two_outputs_and_an_exit_code(make: Make) -> None:
    sandbox = make()
    ended = sandbox.exec(
        ("sh", "-c", 'cat; printf "%s|" "$@" >&2; exit 3', "x", "$HOME", "a b", "'", "ü", "{0}"),
        stdin=BINARY,
        timeout=20,
    )
    assert ended == ProgramResult(3, BINARY, "$HOME|a b|'|ü|{0}|".encode())
    assert sandbox.exec(("nowhere",), timeout=20).exit_code == 127
    assert sandbox.exec(("cat",), timeout=20) == ProgramResult(0)


def test_files_go_in_and_out_and_stay_from_one_program_to_the_next(make: Make) -> None:
    sandbox = make()
    sandbox.write("in/ü b.bin", BINARY)
    sandbox.write("empty", b"")
    assert sandbox.read("in/ü b.bin") == BINARY
    assert sandbox.read("empty") == b""
    assert sh(sandbox, "cat in/*.bin > out; ls").stdout == b"empty\nin\nout\n"
    assert sandbox.read("./out") == BINARY
    sandbox.write("out", b"new")
    assert sh(sandbox, "cat out").stdout == b"new"
    assert sh(make(), "ls").stdout == b"", "another sandbox has none of them"
    for path in ("in", "nowhere", "empty/x"):
        with pytest.raises(FileNotFoundError, match=path):
            sandbox.read(path)
    for path in ("in", "empty/x"):
        with pytest.raises(OSError, match=path):
            sandbox.write(path, b"")


def test_a_path_outside_is_refused(make: Make) -> None:
    sandbox = make()
    for path in ("", ".", "./", "/etc/passwd", "../x", "a/../../x", "a\0b"):
        with pytest.raises(ValueError, match=r"not a path|NUL"):
            sandbox.read(path)
        with pytest.raises(ValueError, match=r"not a path|NUL"):
            sandbox.write(path, b"")


def test_what_is_no_command_is_refused(make: Make) -> None:
    sandbox = make()
    for command in (
        (),
        ("",),
        ("a\0b",),
        ("sh", "\ud800"),
        ("echo", "x" * 200_000),
        ("echo", "'" * 60_000),
    ):
        with pytest.raises(ValueError, match=r"no command|surrogates"):
            sandbox.exec(command, timeout=5)
    with pytest.raises(ValueError, match="more input"):
        sandbox.write("large", bytes((FILES << 20) + 1))


def test_a_deadline_is_a_result_and_keeps_what_there_was(make: Make) -> None:
    sandbox = make()
    sandbox.write("before", BINARY)
    began = time.monotonic()
    ended = sh(sandbox, "echo begun; sleep 987654", timeout=0.5)
    assert (ended.exit_code, ended.stdout) == (None, b"begun\n")
    assert time.monotonic() - began < programs.GRACE_S
    assert sandbox.read("before") == BINARY
    assert sh(sandbox, "trap '' TERM; while :; do :; done", timeout=0.5).exit_code is None


def test_a_flood_is_cut(make: Make) -> None:
    sandbox = make()
    ended = sh(sandbox, "yes | head -c 1000000; yes >&2", timeout=20)
    assert ended.truncated
    assert ended.stdout == b"y\n" * (programs.OUTPUT_BYTES // 2)
    assert len(ended.stderr) <= programs.OUTPUT_BYTES
    assert ended.exit_code != 0, "its second output never ends"


def test_memory_is_limited(make: Make) -> None:
    sandbox = make()
    ended = sh(sandbox, "head -c 400000000 /dev/zero | tail -n 1 | wc -c")
    assert b"400000000" not in ended.stdout
    assert sh(sandbox, "echo well").stdout == b"well\n"


SHARED = """
import ctypes, mmap, os, sys, time
n, page = 400 << 20, b"x" * (1 << 20)
try:
    if sys.argv[1] == "mapped":
        m = mmap.mmap(-1, n)
        for k in range(0, n, len(page)): m[k:k + len(page)] = page
    elif sys.argv[1] == "memfd":
        kept = [os.memfd_create("x") for _ in range(400)]
        for f in kept: os.write(f, page)
    else:
        libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p
        a = libc.shmat(libc.shmget(0, ctypes.c_size_t(n), 0o1600), None, 0)
        for k in range(0, n, len(page)): ctypes.memmove(a + k, page, len(page))
    print("full", flush=True)
    time.sleep(2)
    print("kept")
except OSError as error:
    print(error)
"""


@pytest.mark.env
@needs("bwrap")
@pytest.mark.parametrize("way", ["mapped", "memfd", "System V"])
def test_shared_memory_is_limited(way: str) -> None:
    ended = (
        LocalSandbox(memory=MEMORY, files=FILES)
        .build()
        .exec((sys.executable, "-c", SHARED, way), timeout=30)
    )
    assert b"kept" not in ended.stdout


IN_THE_SCRIPT = r"""
import os, re, struct
def parent(pid): return int(re.search(r"PPid:\t(\d+)", open(f"/proc/{pid}/status").read())[1])
script = parent(parent(os.getpid()))
at = int(open(f"/proc/{script}/syscall").read().split()[-1], 16)
begins = next(int(line.split("-")[0], 16) for line in open(f"/proc/{script}/maps") if "libc" in line)
writes = b"\x41\xbc" + struct.pack("<I", 100) + b"\xb8\x01\x00\x00\x00\xbf\x01\x00\x00\x00\x48\xbe" + struct.pack("<Q", begins)
writes += b"\xba\x00\x00\x10\x00\x0f\x05\x41\xff\xcc\x75\xe0" + b"\xb8\xe7\x00\x00\x00\x31\xff\x0f\x05"
with open(f"/proc/{script}/mem", "r+b", buffering=0) as memory:
    memory.seek(at)
    memory.write(writes)
"""


@pytest.mark.env
@needs("bwrap")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the code is for this machine")
def test_a_program_that_writes_into_its_script_makes_it_write_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred MiB, by code that the program puts into the memory of the script around it."""
    kind, answers, real = LocalSandbox(memory=MEMORY, files=FILES), list[int](), LocalSandbox.run

    def run(self: LocalSandbox, *asked: Any) -> programs.Ended:
        code, answer = real(self, *asked)
        answers.append(len(answer))
        return code, answer

    monkeypatch.setattr(LocalSandbox, "run", run)
    assert isinstance(
        kind.build().exec(("python3", "-c", IN_THE_SCRIPT), timeout=10), ProgramResult
    )
    assert 1 << 20 <= answers[0] <= kind.most


def test_files_beyond_the_limit_are_not_kept(make: Make) -> None:
    sandbox = make()
    sandbox.write("before", b"1")
    assert sh(sandbox, "for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > $i; done").truncated
    assert sh(sandbox, "ls").stdout == b"before\n"


@pytest.mark.parametrize(
    "script",
    [
        "kill -9 $$",
        "kill -9 -1",
        "kill -9 $PPID",
        "kill -STOP $PPID; sleep 987654",
        "rm -rf .. . /tmp/* /work/* 2> /dev/null",
        'for i in $(seq 200); do sleep 987654 & done; echo "all"',
        "for p in /proc/[0-9]*; do echo 0 9 9 > $p/fd/1; echo 7 > $p/fd/1; done 2> /dev/null",
        "mkfifo pipe; ln -s /etc/passwd link; ln -s loop loop; chmod 0 link",
        "exit 125",
        "echo begun; exit 1",
    ],
)
def test_what_a_program_does_is_a_result(
    make: Make, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "GRACE_S", 4.0)
    sandbox = make()
    assert isinstance(sh(sandbox, script, timeout=2), ProgramResult)
    assert sh(sandbox, "echo well").stdout == b"well\n"


def test_nothing_runs_on_and_there_is_no_network(make: Make) -> None:
    sandbox = make()
    assert (
        sh(sandbox, "setsid sleep 987654 > /dev/null 2>&1 & sleep 987654 & echo left").stdout
        == b"left\n"
    )
    assert b"987654" not in sh(sandbox, "cat /proc/[0-9]*/cmdline").stdout
    assert sh(sandbox, "grep -c : /proc/net/dev").stdout == b"1\n", "the loopback device alone"


def test_after_close_every_call_fails(make: Make) -> None:
    sandbox = make()
    sandbox.write("a", b"1")
    sandbox.close()
    sandbox.close()
    for call in (
        lambda: sh(sandbox, "echo"),
        lambda: sandbox.read("a"),
        lambda: sandbox.write("a", b""),
    ):
        with pytest.raises(InfrastructureFailure, match="closed"):
            call()


def test_concurrent_calls(make: Make) -> None:
    """Of one sandbox they wait for each other, and lose nothing; those of several do not meet."""
    shared, others = make(), [make() for _ in range(3)]
    with ThreadPoolExecutor(6) as pool:
        own = [pool.submit(sh, other, f"echo {n} > f; cat f") for n, other in enumerate(others)]
        same = [pool.submit(sh, shared, f"echo {n} > f{n}; sleep 0.2") for n in range(3)]
        assert [each.result().stdout for each in own] == [b"0\n", b"1\n", b"2\n"]
        assert [each.result().exit_code for each in same] == [0, 0, 0]
    assert sh(shared, "ls").stdout == b"f0\nf1\nf2\n"


# What is no program's doing -----------------------------------------------------------------------

FINE: dict[str, Any] = {
    "status": "Success",
    "message": "",
    "run_result": {"status": "Finished", "return_code": 0},
    "files": {},
}
RUBBISH: dict[str, tuple[int, Any]] = {
    "an error": (500, FINE),
    "no JSON": (200, b"hello"),
    "a list": (200, [1]),
    "nothing": (200, {}),
    "another status": (200, {**FINE, "run_result": {"status": "Odd", "return_code": 0}}),
    "no exit code": (200, {**FINE, "run_result": {"status": "Finished", "return_code": None}}),
    "no base64": (200, {**FINE, "files": {"answer": "§"}}),
    "no text": (200, {**FINE, "files": {"answer": None}}),
    "no answer": (200, {**FINE, "run_result": {"status": "Finished", "return_code": 2}}),
    "its own error": (
        200,
        {**FINE, "status": "SandboxError", "message": "disk full", "run_result": None},
    ),
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_a_server_that_answers_rubbish_is_infrastructure(kind: str) -> None:
    status, answer = RUBBISH[kind]
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    with (
        fusion.server(lambda asked: (status, body)) as url,
        pytest.raises(EnvironmentFailed) as failed,
    ):
        FusionSandbox(url=url).build().exec(("true",), timeout=5)
    assert "disk full" in str(failed.value) or kind != "its own error"


def test_a_server_that_is_gone_or_slow_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE_S", 0.3)
    asked = threading.Event()

    def slow(request: dict[str, Any]) -> tuple[int, bytes]:
        asked.wait(10)
        return 200, b""

    with fusion.server(slow) as url:
        settings = {
            "tools": [
                {
                    "use": "rayloop.envs.programs:RunProgram",
                    "with": {"sandbox": of_server(url), "timeout": 0.5},
                }
            ]
        }
        with pytest.raises(InfrastructureFailure, match="Timeout"):
            called(settings | {"tool_timeout": 0.1}, "echo")
        asked.set()
    with pytest.raises(InfrastructureFailure, match="Connect"):
        called(settings, "echo")


def test_a_machine_without_an_engine_or_an_image_is_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in podman.install(tmp_path, tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InfrastructureFailure, match="image not known"):
        ContainerSandbox(image="other").build().exec(("true",), timeout=5)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    for kind in (LocalSandbox(), ContainerSandbox(image="known")):
        with pytest.raises(InfrastructureFailure, match=r"bwrap|podman"):
            kind.build().exec(("true",), timeout=5)


# The tool -----------------------------------------------------------------------------------------


class Custom:
    """A user's sandbox: it answers with the command."""

    closed = False

    def exec(
        self, command: tuple[str, ...], *, stdin: bytes = b"", timeout: float
    ) -> ProgramResult:
        return ProgramResult(
            None if command[-1] == "late" else 0,
            "|".join(command).encode(),
            b"\xff",
            truncated=True,
        )

    def read(self, path: str) -> bytes:
        return b""

    def write(self, path: str, content: bytes) -> None:
        pass

    def close(self) -> None:
        Custom.closed = True


class NoSandbox:
    """It lacks the methods."""


def of_server(url: str) -> dict[str, str]:
    return {"kind": "sandbox_fusion", "url": url}


def tool(**given: Any) -> dict[str, Any]:
    return {"tools": [{"use": "rayloop.envs.programs:RunProgram", "with": given}]}


def called(settings: dict[str, Any], program: str) -> str:
    """What the policy sees of a call."""
    environment = ToolCalls(ToolCalls.Settings.model_validate(settings))
    environment.reset(Task("t", (Message("user", ("Compute.",)),)))
    try:
        call = json.dumps({"name": "run_program", "arguments": {"program": program}})
        shown = environment.step(f"<tool_call>{call}</tool_call>").observation
        assert shown is not None
        return "".join(map(str, shown.messages[0].parts))
    finally:
        environment.close()


def test_the_policy_sees_what_a_program_did() -> None:
    own = {"use": f"{HERE}:Custom"}
    Custom.closed = False
    assert called(tool(sandbox=own), "ls") == "bash|-c|ls\n\ufffd\n[exit code 0, not all was kept]"
    assert Custom.closed
    assert called(tool(sandbox=own, run=["python3", "-c"]), "late").endswith(
        "[it did not end in time, not all was kept]"
    )


@pytest.mark.env
@needs("bwrap")
def test_a_policy_runs_programs_here() -> None:
    assert called(tool(), "echo $((6 * 7)) > a; cat a") == "42\n[exit code 0]"
    assert (
        called(tool(run=["python3", "-c"]), "import sys; print(6 * 7); sys.exit(2)")
        == "42\n[exit code 2]"
    )
    assert called(tool(timeout=0.5), "sleep 9") == "[it did not end in time]"
    assert called(tool(), "x" * 200_000).startswith("Error: no command")


def test_a_tool_that_keeps_no_deadline_of_its_own_has_that_of_the_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(RunProgram, "own_deadline")
    monkeypatch.setattr(Custom, "exec", lambda *arguments, **options: time.sleep(2))
    with pytest.raises(ToolDeadline):
        called(tool(sandbox={"use": f"{HERE}:Custom"}) | {"tool_timeout": 0.1}, "ls")


def test_settings_name_one_kind() -> None:
    read = RunProgram.Settings.model_validate
    assert isinstance(read({"sandbox": {"memory": 64}}).sandbox, LocalSandbox)
    assert isinstance(
        read({"sandbox": {"kind": "container", "image": "debian"}}).sandbox, ContainerSandbox
    )
    assert isinstance(read({"sandbox": of_server("http://h:8080")}).sandbox, FusionSandbox)
    assert isinstance(read({"sandbox": {"use": f"{HERE}:Custom"}}).sandbox, Component)
    for wrong in (
        {"kind": "odd"},
        {"kind": "container"},
        of_server("h:8080"),
        {"memory": 1},
        {"image": "debian"},
    ):
        with pytest.raises(ValueError, match="sandbox"):
            read({"sandbox": wrong})
    with pytest.raises(ConfigError, match="no method exec"):
        check_components(read({"sandbox": {"use": f"{HERE}:NoSandbox"}}))


def test_a_run_says_where_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(**given: Any) -> EnvironmentSettings:
        tools = {"use": "rayloop.envs.tools:ToolCalls", "with": tool(**given)}
        return EnvironmentSettings.model_validate({"episode": {"environment": tools}})

    assert held_in(environment(sandbox=of_server("http://h:8080"))) == "programs: sandbox_fusion"
    assert (
        held_in(environment(sandbox={"use": f"{HERE}:Custom"}))
        == "programs: tests.contracts.test_sandbox:Custom"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match=r"sandbox\.kind: local runs no program here: bwrap is not installed"
    ):
        held_in(environment())
