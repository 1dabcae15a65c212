"""The OpenEnv adapter against a server of the published package, which ``make test-env`` installs in an environment of its own."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloop.core.failures import EnvironmentFailed
from rayloop.core.types import Message, Task
from rayloop.data.images import decode
from rayloop.envs.adapters.openenv import OpenEnv, OpenEnvSettings
from tests.support.runs import eventually

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-openenv/bin/python"
TASK = Task("t", (Message("user", ("Count to three.",)),), extra={"seed": 3})
pytestmark = [
    pytest.mark.env,
    pytest.mark.skipif(not PYTHON.exists(), reason="openenv-core is not installed here (make test-env installs it)"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server with two sessions."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([PYTHON, ROOT / "tests/envs/openenv_server.py", str(port), "2"])
    try:
        eventually(lambda: listens(port), "the server listens", 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_an_episode_has_pictures_refusals_and_a_result(url: str) -> None:
    made = OpenEnv(OpenEnvSettings(url=url, image="screenshot"))
    seen = made.reset(TASK).messages[-1]
    assert decode(seen.images[0].data or b"").size == (56, 28)
    for wrong in ("no json", '{"wrong": 1}'):
        refused = made.step(wrong)
        assert (refused.done, bool(refused.error)) == (False, True)
    assert made.step('{"by": 1}').reward == 0.0
    last = made.step('I say {"by": 2}')
    assert (last.done, last.reward) == (True, 1.0)
    assert last.observation is not None
    assert "the count is 3" in str(last.observation.messages[-1].parts)
    assert made.evaluate() == 1.0
    made.close()


def test_a_server_without_a_free_session_says_what_to_do(url: str) -> None:
    """It says so unasked after the connection, and closes it."""
    both = [OpenEnv(OpenEnvSettings(url=url)) for _ in range(2)]
    for one in both:
        eventually(lambda one=one: begun(one), "a session is free", 10)
    third = OpenEnv(OpenEnvSettings(url=url))
    with pytest.raises(EnvironmentFailed, match=r"CAPACITY_REACHED: .*2/2 .*Raise the server's max_concurrent_envs"):
        third.reset(TASK)
    for one in (*both, third):
        one.close()


def begun(one: OpenEnv) -> bool:
    try:
        one.reset(TASK)
    except EnvironmentFailed:
        return False
    return True
