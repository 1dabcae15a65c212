"""The contract of environments: what each implementation does under each isolation, and what a
broken one costs others.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from numbers import Real
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.core.failures import DataFailure, DeadlineExceeded, EnvironmentFailed, ToolDeadline
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.threads import hanging, in_thread
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.instance import Environments, Instance
from rayloop.envs.settings import EnvironmentKind
from tests.envs.programs import needs
from tests.support.environments import ThreadBound
from tests.support.pictures import picture
from tests.support.runs import eventually

HERE = "tests.support.environments"
ROW = {"desktop": "sort-lines", "page": "click-test", "phone": "set-alarm", "seed": 1}
TASK = Task("t1", (Message("user", ("Look.", ImageSource(data=picture(56, 56)))),), extra=ROW)
CROP = '<tool_call>{"name": "crop", "arguments": {"box": [0, 0, 1, 0.5]}}</tool_call>'
ROTATE = '<tool_call>{"name": "rotate", "arguments": {"angle": 30}}</tool_call>'
PUBLISHED_ROTATE = (
    '<tool_call>{"name": "image_rotate_tool", "arguments": {"angle": 30}}</tool_call>'
)
ISOLATIONS = ("thread", "process")

IMPLEMENTATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("rayloop.envs.single_turn:SingleTurn", {}, "an answer"),
    (
        "rayloop.envs.scripted:ScriptedTool",
        {"steps": [{"text": "go on", "images": [{}]}], "result": 0.5},
        "a turn",
    ),
    ("rayloop.envs.image_tools:ImageTools", {"min_side": 14}, CROP),
    ("rayloop.envs.image_tools:ImageTools", {"image_tools": ["rotate"]}, ROTATE),
    ("rayloop.envs.tools:ToolCalls", {}, "an answer"),
    ("rayloop.recipes.pyvision.toolbox:VisualToolBoxV2", {}, PUBLISHED_ROTATE),
    (f"{HERE}:Coroutines", {}, "a turn"),
    (f"{HERE}:ThreadBound", {}, "a click"),
]
"""Settings, and what the policy says. One of your own: a line here."""
CODE = "<code>\n```python\nprint(image_clue_0.size)\n```\n</code>"
PROGRAMS: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    ("rayloop.envs.interpreter.environment:PythonInterpreter", {}, CODE, ()),
    (
        "rayloop.envs.browser.miniwob:MiniWob",
        {},
        "Action: wait()",
        ("chromium-headless-shell", "bwrap"),
    ),
    (
        "rayloop.envs.browser.phone:Phone",
        {"scale": 1},
        "Action: press_home()",
        ("chromium-headless-shell", "bwrap"),
    ),
    (
        "rayloop.envs.desktop.environment:DesktopTasks",
        {},
        "Action: type(content='ls\\n')",
        ("bwrap", "Xvfb", "openbox", "xterm", "mousepad", "pcmanfm"),
    ),
]
"""The same for environments with real programs, which show more than the row (lane ``make
test-env``), and what they need.
"""


def ids(made: Sequence[tuple[Any, ...]]) -> list[str]:
    return [use.rpartition(":")[2] for use, *_ in made]


each = pytest.mark.parametrize(
    ("use", "settings", "said"), IMPLEMENTATIONS, ids=ids(IMPLEMENTATIONS)
)
programs = [
    pytest.param(*given, marks=[pytest.mark.env, pytest.mark.timeout(180), needs(*lacking)])
    for *given, lacking in PROGRAMS
]
isolated = pytest.mark.parametrize("isolation", ISOLATIONS)


@asynccontextmanager
async def hosted(
    use: str, isolation: str = "process", **settings: Any
) -> AsyncIterator[Environments]:
    kind = EnvironmentKind.model_validate({"use": use, "with": settings, "isolation": isolation})
    environments = Environments(kind, {})
    try:
        yield environments
    finally:
        environments.end()


async def begun(environments: Environments, task: Task = TASK) -> Instance:
    instance = environments.of(task)
    await instance.make(30)
    assert isinstance(await instance.call("reset", task, timeout=30), Observation)
    return instance


def with_one(
    use: str, isolation: str, test: Callable[[Instance], Awaitable[Any]], **settings: Any
) -> Any:
    """What ``test`` returns for an instance that has been reset; it is closed afterwards."""

    async def run() -> Any:
        async with hosted(use, isolation, **settings) as environments:
            instance = await begun(environments)
            try:
                return await test(instance)
            finally:
                await instance.close(30)

    return asyncio.run(run())


# What every implementation does -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "settings", "said"),
    [*IMPLEMENTATIONS, *programs],
    ids=ids([*IMPLEMENTATIONS, *PROGRAMS]),
)
@isolated
def test_an_episode(use: str, settings: dict[str, Any], said: str, isolation: str) -> None:
    """Returns what the protocol says, offers tools that a chat template takes, and a second
    instance begins anew.
    """

    async def run() -> None:
        async with hosted(use, isolation, **settings) as environments:
            for _ in range(2):
                instance = environments.of(TASK)
                await instance.make(60)
                first = await instance.call("reset", TASK, timeout=60)
                if use in {use for use, *_ in PROGRAMS}:
                    assert first.messages[0].parts[0] == "Look."
                else:
                    assert first == Observation(TASK.messages)
                for schema in await instance.call("tools", timeout=30):
                    assert set(schema) == {"type", "function"}
                    assert schema["type"] == "function"
                    assert set(schema["function"]) == {"name", "description", "parameters"}
                    assert schema["function"]["parameters"]["type"] == "object"
                step = await instance.call("step", said, timeout=30)
                assert isinstance(step, StepResult)
                assert step.error is None
                result = await instance.call("evaluate", timeout=30)
                assert result is None or isinstance(result, Real)
                await instance.close(30)

    asyncio.run(run())


@each
@isolated
def test_instances_at_once_do_not_meet(
    use: str, settings: dict[str, Any], said: str, isolation: str
) -> None:
    async def run() -> None:
        async with hosted(use, isolation, **settings) as environments:
            instances = await asyncio.gather(*(begun(environments) for _ in range(3)))
            steps = [await one.call("step", said, timeout=30) for one in instances]
            texts = [
                s.observation and [p for p in s.observation.messages[0].parts if isinstance(p, str)]
                for s in steps
            ]
            if "Coroutines" not in use:  # counts time
                assert texts[0] == texts[1] == texts[2]
            for one in instances:
                await one.close(30)

    asyncio.run(run())


@each
@isolated
def test_it_can_be_closed_at_any_time(
    use: str, settings: dict[str, Any], said: str, isolation: str
) -> None:
    async def run() -> None:
        async with hosted(use, isolation, **settings) as environments:
            unmade = environments.of(TASK)
            await unmade.close(30)
            made = environments.of(TASK)
            await made.make(30)
            await made.close(30)

    before = alive()
    asyncio.run(run())
    eventually(lambda: alive() <= before, "nothing of it is left", 60)
    assert alive() <= before


def alive() -> set[tuple[str, int | None]]:
    """This process's threads and children."""
    children = {("process", child.pid) for child in psutil.Process().children(recursive=True)}
    return children | {("thread", thread.ident) for thread in threading.enumerate()}


# One owner ----------------------------------------------------------------------------------------


@isolated
def test_what_belongs_to_its_thread_stays_in_it(isolation: str) -> None:
    async def test(instance: Instance) -> list[str]:
        said = [await instance.call("step", text, timeout=30) for text in ("click", "type")]
        assert await instance.call("evaluate", timeout=30) == 4.0
        return [step.observation.messages[0].parts[0] for step in said]

    assert with_one(f"{HERE}:ThreadBound", isolation, test) == ["2 so far", "3 so far"]


def test_a_thread_per_call_would_break_it() -> None:
    """The control of the test above: called as environments were before they had an owner."""

    async def test() -> None:
        environment = await in_thread(lambda: ThreadBound(ThreadBound.Settings()), timeout=30)
        with pytest.raises(RuntimeError, match="cannot switch to a different thread"):
            await in_thread(environment.reset, TASK, timeout=30)

    asyncio.run(test())


@isolated
def test_coroutines_share_a_loop_that_goes_on_between_calls(isolation: str, tmp_path: Path) -> None:
    async def test(instance: Instance) -> tuple[float, float]:
        before = await instance.call("evaluate", timeout=30)
        await asyncio.sleep(0.3)  # as while the policy writes
        return before, await instance.call("evaluate", timeout=30)

    closed = tmp_path / "closed"
    before, after = with_one(f"{HERE}:Coroutines", isolation, test, closed=str(closed))
    assert after >= before + 10
    assert closed.exists()


def test_who_hangs_is_closed_by_its_own_thread_when_it_returns(tmp_path: Path) -> None:
    """Two calls of an instance are never carried out at once, and nobody waits for a thread that
    hangs.
    """
    while hanging():  # of the tests before
        time.sleep(0.01)

    async def run() -> None:
        async with hosted(f"{HERE}:Fault", "thread", seconds=3.0) as environments:
            instance = await begun(environments)
            with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.1 seconds"):
                await instance.call("step", "hang", timeout=0.1)
            began = time.monotonic()
            await instance.close(30)
            assert time.monotonic() - began < 2
            assert hanging() == 1

    asyncio.run(run())
    began = time.monotonic()
    while hanging() and time.monotonic() - began < 20:
        time.sleep(0.01)
    assert hanging() == 0, "its thread has ended"


def test_a_cancelled_episode_does_not_wait_for_its_environment() -> None:
    async def run() -> None:
        async with hosted(f"{HERE}:Fault", "thread", seconds=2.0) as environments:
            instance = await begun(environments)
            call = asyncio.create_task(instance.call("step", "hang", timeout=30))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            began = time.monotonic()
            await instance.close(30)
            assert time.monotonic() - began < 1

    asyncio.run(run())


def test_a_message_that_cannot_be_sent_leaves_no_process() -> None:
    async def run() -> None:
        async with hosted(f"{HERE}:Fault") as environments:
            instance = await begun(environments)
            pid = int(await instance.call("evaluate", timeout=30))
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
                await instance.call("step", lambda: 0, timeout=30)
            assert until(lambda: gone(pid))
            await instance.close(30)

    asyncio.run(run())


# On the event loop itself -------------------------------------------------------------------------


def test_what_is_immediate_is_called_by_the_event_loop_and_needs_no_thread() -> None:
    async def test(instance: Instance) -> tuple[float, set[tuple[str, int | None]]]:
        return await instance.call("evaluate", timeout=30), alive()

    before = alive()
    caller, during = with_one(f"{HERE}:Immediate", "thread", test)
    assert caller == threading.get_native_id()
    assert during <= before, "nothing was started; what other tests have left may end"


@pytest.mark.parametrize(
    ("name", "isolation"),
    [("Immediate", "process"), ("DerivedFromImmediate", "thread")],
    ids=["process", "derived"],
)
def test_a_process_takes_precedence_and_who_derives_must_say_it_again(
    name: str, isolation: str
) -> None:
    async def test(instance: Instance) -> Any:
        return await instance.call("evaluate", timeout=30)

    assert with_one(f"{HERE}:{name}", isolation, test) != float(threading.get_native_id())


def test_a_coroutine_of_what_is_immediate_is_refused() -> None:
    async def run() -> None:
        async with hosted(f"{HERE}:ImmediateCoroutines", "thread") as environments:
            instance = environments.of(TASK)
            await instance.make(30)
            with pytest.raises(
                EnvironmentFailed, match="ImmediateCoroutines must not say `immediate = True`"
            ):
                await instance.call("reset", TASK, timeout=30)
            with pytest.raises(EnvironmentFailed, match="close is a coroutine"):
                await instance.close(30)

    asyncio.run(run())


@each
def test_who_says_that_it_is_immediate_has_plain_methods(
    use: str, settings: dict[str, Any], said: str
) -> None:
    kind = EnvironmentKind(use=use)
    methods = [getattr(kind.resolve(), name) for name in ("reset", "step", "evaluate", "close")]
    assert not (kind.immediate and any(map(inspect.iscoroutinefunction, methods)))


# What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "isolation"),
    [("Fault", "thread"), ("Fault", "process"), ("Immediate", "thread")],
    ids=lambda of: of,
)
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("data", DataFailure, "page.html: missing"),
        ("tool", ToolDeadline, "the tool gave no answer"),
        ("bug", ValueError, "boom"),
        ("disk", OSError, "No space left on device"),
        ("leave", RuntimeError, "raised SystemExit: 4"),
        ("stop", RuntimeError, "raised StopIteration: boom"),
    ],
)
def test_what_it_raises_arrives(
    name: str, isolation: str, fault: str, error: type[Exception], words: str
) -> None:
    async def test(instance: Instance) -> None:
        with pytest.raises(error, match=words):
            await instance.call("step", fault, timeout=30)
        assert await instance.call("step", "none", timeout=30), "it lives on"

    with_one(f"{HERE}:{name}", isolation, test, seconds=0.5)


def test_what_cannot_be_sent_is_said() -> None:
    async def test(instance: Instance) -> None:
        with pytest.raises(RuntimeError, match="Unpicklable: boom twice"):
            await instance.call("step", "odd", timeout=30)
        with pytest.raises(
            TypeError, match=r"what it returned \(StepResult\) cannot be sent to the actor"
        ):
            await instance.call("step", "lambda", timeout=30)
        with pytest.raises(ValueError, match="boom") as raised:
            await instance.call("step", "bug", timeout=30)
        assert "in _raise" in str(raised.value.__notes__) or "in fault" in str(
            raised.value.__notes__
        ), "its traceback"

    with_one(f"{HERE}:Fault", "process", test)


@isolated
@pytest.mark.parametrize("at", ["__init__", "reset", "evaluate", "close"])
def test_every_call_has_a_deadline(isolation: str, at: str) -> None:
    async def run() -> None:
        async with hosted(
            f"{HERE}:Fault", isolation, at=at, does="hang", seconds=1.0
        ) as environments:
            instance = environments.of(TASK)
            limits = dict.fromkeys(("__init__", "reset", "evaluate", "close"), 30.0) | {at: 0.2}
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "__init__": lambda: instance.make(limits["__init__"]),
                "reset": lambda: instance.call("reset", TASK, timeout=limits["reset"]),
                "evaluate": lambda: instance.call("evaluate", timeout=limits["evaluate"]),
                "close": lambda: instance.close(limits["close"]),
            }
            for name in takewhile(lambda name: name != at, calls):
                await calls[name]()
            with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.2 seconds"):
                await calls[at]()
            if at != "close":
                await instance.close(30)

    asyncio.run(run())


# A process of its own -----------------------------------------------------------------------------


def gone(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            == "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def children(pid: int) -> list[int]:
    found = [
        Path(f"/proc/{pid}/task") / task / "children" for task in os.listdir(f"/proc/{pid}/task")
    ]
    return [int(child) for file in found for child in file.read_text(encoding="utf-8").split()]


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("hang", DeadlineExceeded, "no answer within 1 seconds"),
        ("hold", DeadlineExceeded, "no answer within 1 seconds"),
        ("child", DeadlineExceeded, "no answer within 1 seconds"),
        ("exit", EnvironmentFailed, "its process ended with exit code 3"),
        ("kill", EnvironmentFailed, "its process was killed by SIGKILL"),
        ("segfault", EnvironmentFailed, "its process was killed by SIGSEGV"),
    ],
)
def test_a_hang_or_a_crash_costs_nobody_else(
    fault: str, error: type[Exception], words: str
) -> None:
    """Neighbours go on in the same processes, this process lives, and of the broken one nothing is
    left.
    """

    async def run() -> None:
        async with hosted(f"{HERE}:Fault") as environments:
            sick, *well = [await begun(environments) for _ in range(3)]
            pids = [int(await one.call("evaluate", timeout=30)) for one in (sick, *well)]
            assert len({os.getpid(), *pids}) == 4
            left = asyncio.create_task(sick.call("step", fault, timeout=1))
            await asyncio.sleep(0.5)
            started = [] if error is EnvironmentFailed else children(pids[0])
            assert left.done() or len(started) == 1 + (fault == "child"), (
                "its guard, and what it started"
            )
            with pytest.raises(error, match=words):
                await left
            assert until(lambda: all(gone(pid) for pid in (pids[0], *started)))
            with pytest.raises(EnvironmentFailed, match="its process has ended"):
                await sick.call("evaluate", timeout=30)
            await sick.close(30)
            for one, pid in zip(well, pids[1:], strict=True):
                assert (await one.call("step", "none", timeout=30)).done
                assert await one.call("evaluate", timeout=30) == pid
                await one.close(30)

    asyncio.run(run())


def test_a_process_is_used_again_unless_something_hangs_in_it() -> None:
    async def run() -> list[int]:
        async with hosted(f"{HERE}:Fault") as environments:
            pids = []
            for said in ("none", "bug", "tool", "none", "hang", "none"):
                instance = await begun(environments)
                pids.append(int(await instance.call("evaluate", timeout=30)))
                with suppress(ValueError, ToolDeadline, DeadlineExceeded):
                    await instance.call("step", said, timeout=0.5 if said == "hang" else 30)
                await instance.close(30)
            return pids

    first, second, third, fourth, fifth, sixth = asyncio.run(run())
    assert first == second == third, "also after an exception"
    assert third != fourth, "a thread hangs in it"
    assert fourth == fifth
    assert fifth != sixth, "it was killed"
    assert until(lambda: all(map(gone, (first, fourth, sixth)))), (
        "nothing is left when the actor ends its environments"
    )


def test_an_idle_process_that_died_is_replaced() -> None:
    async def run() -> None:
        async with hosted(f"{HERE}:Fault") as environments:
            one = await begun(environments)
            pid = int(await one.call("evaluate", timeout=30))
            await one.close(30)
            os.kill(pid, signal.SIGKILL)
            assert until(lambda: gone(pid))
            other = await begun(environments)
            assert await other.call("evaluate", timeout=30) != pid
            await other.close(30)

    asyncio.run(run())


def test_a_cancelled_call_ends_its_process() -> None:
    async def run() -> None:
        async with hosted(f"{HERE}:Fault") as environments:
            one = await begun(environments)
            pid = int(await one.call("evaluate", timeout=30))
            call = asyncio.create_task(one.call("step", "hang", timeout=30))
            await asyncio.sleep(0.2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await one.close(30)
            assert until(lambda: gone(pid))

    asyncio.run(run())


def test_it_is_free_of_torch_and_ray() -> None:
    async def test(instance: Instance) -> Any:
        return await instance.call("evaluate", timeout=30)

    assert with_one(f"{HERE}:Modules", "process", test) == 0.0


ACTOR = """
import asyncio, sys
from rayloop.core.types import Task
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind

async def run():
    kind = {{"use": "{here}:Fault", "isolation": "process", "with": {{"pids": sys.argv[1]}}}}
    environments = Environments(EnvironmentKind.model_validate(kind), {{}})
    idle, used = environments.of(Task("a", ())), environments.of(Task("b", ()))
    for instance in (idle, used):
        await instance.make(60)
        await instance.call("reset", Task("t", ()), timeout=60)
    await idle.close(60)
    await used.call("step", sys.argv[2], timeout=60)

asyncio.run(run())
"""


@pytest.mark.parametrize("fault", ["hang", "hold", "child"])
def test_it_dies_with_the_actor(fault: str, tmp_path: Path) -> None:
    """Also when the actor is killed, and while a call holds the interpreter."""
    command = [sys.executable, "-c", ACTOR.format(here=HERE), str(tmp_path), fault]
    root = Path(__file__).parents[2]
    actor = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    try:
        assert until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        pids = [int(file.name) for file in tmp_path.iterdir()]

        def guards() -> list[int]:
            return [child for pid in pids for child in children(pid)]

        assert until(lambda: len(guards()) == 2 + (fault == "child"), 60), "each has its guard"
        started = guards()
        assert not any(map(gone, pids))
    finally:
        actor.kill()
        actor.wait()
    assert until(lambda: all(map(gone, (*pids, *started))))
