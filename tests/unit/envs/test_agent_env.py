"""Agents as real processes with the published OpenAI client: how they are asked, paid, limited and
ended.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.cli import main
from rayloop.core.failures import ConfigError, EnvironmentFailed, EnvironmentHung
from rayloop.core.types import EndReason, ImageSource, Message, Task, TokenPrompt, Trajectory
from rayloop.envs import agent_env
from rayloop.envs.agents import host
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind
from rayloop.sandbox import memory
from tests.support.pictures import picture
from tests.support.played import RENDERER, episode_settings, play_one
from tests.support.runs import eventually

pytestmark = pytest.mark.timeout(120)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
MARK = "RAYLOOP_TEST_AGENT"

Played = Callable[..., Trajectory]


@pytest.fixture
def agent(tmp_path: Path) -> Played:
    """Plays one episode with the source of a module as its agent; the engine says ``says`` in turn,
    else a number.
    """

    def played(
        source: str,
        *,
        says: tuple[str, ...] = (),
        task: Task | None = None,
        max_turns: int = 8,
        **options: Any,
    ) -> Trajectory:
        file = tmp_path / "agent.py"
        file.write_text(textwrap.dedent(source), encoding="utf-8")
        options = {
            "run": f"{file}:play",
            "preload": ["openai"],
            "deadline": 60,
            "env": {MARK: str(tmp_path)},
            **options,
        }
        left = list(says)
        asked = task or Task(
            "t", (Message("user", ("What is 2 + 3?",)),), ground_truth="5", extra={"level": 3}
        )
        limits = episode_settings(
            {"use": "rayloop.envs.agent_env:AgentEnv", "with": options}, max_turns=max_turns
        )
        return play_one(
            asked, lambda prompt: left.pop(0) if left else f"said {prompt.seed % 100}", limits
        )

    return played


def assert_nothing_is_left(folder: Path) -> None:
    """No process of the agent lives a second later: of the forks, which show no mark, and of what
    they started.
    """
    until = time.monotonic() + 5
    while left := [
        *(
            pid
            for server in agent_env._fork_servers.values()
            for pid in memory.tree(server._process.pid)[1:]
        ),
        *(one.pid for one in psutil.process_iter() if _lost(one) or _marked(one, folder)),
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def _marked(process: psutil.Process, folder: Path) -> bool:
    try:
        return (
            process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False


def _lost(process: psutil.Process) -> bool:
    """Whether it is a fork whose parents have ended."""
    try:
        return agent_env.HOST in process.cmdline() and process.ppid() == 1
    except psutil.Error:
        return False


TOOLS = """
    import json, os
    from openai import OpenAI

    TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}

    def play(prompt, ground_truth):
        client, messages = OpenAI(), [{"role": "user", "content": prompt}]
        while True:
            answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content == ground_truth)
            for call in message.tool_calls:
                result = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
"""


def test_an_agent_with_tools_is_one_conversation_of_the_sampled_tokens(agent: Played) -> None:
    made = agent(TOOLS, says=(CALL, "5"))
    assert (made.end_reason, made.env_result) == (EndReason.DONE, 1.0)
    assert [(turn.role, turn.sampled) for turn in made.turns] == [
        ("prompt", False),
        ("assistant", True),
        ("tool", False),
        ("assistant", True),
    ]
    assert made.turns[1].token_ids == RENDERER.encode(CALL)


def test_responses_streams_images_and_parallel_calls_of_a_coroutine(agent: Played) -> None:
    source = """
    import asyncio
    from openai import AsyncOpenAI

    async def play(row):
        client = AsyncOpenAI()
        many = await asyncio.gather(*(client.chat.completions.create(model="policy", messages=row["messages"] + [
            {"role": "user", "content": str(i)}]) for i in range(3)))
        stream = await client.chat.completions.create(model="policy", messages=row["messages"], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        first = await client.responses.create(model="policy", input="hi", instructions="Be brief.")
        second = await client.responses.create(model="policy", input="more", previous_response_id=first.id)
        events = [event async for event in await client.responses.create(model="policy", input=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "output_text", "text": first.output_text}]},
            {"role": "user", "content": "again"}], stream=True)]
        assert text and first.output_text and second.output_text and events[-1].response.output_text
        assert len({one.id for one in many}) == 3 and many[0].usage.prompt_tokens > 10
        return row["level"] * 1.0
    """
    shown = Message("user", ("Look", ImageSource(data=picture(56, 56))))
    made = agent(source, task=Task("t", (shown,), extra={"level": 3}))
    assert made.env_result == 3.0
    assert len(made.sampled_turns) == 7
    assert len(made.segments) == 6, "the second response goes on with the first"
    assert len(made.images) == 4
    assert set(made.image_bytes) == {image.sha256 for image in made.images}


def test_calls_of_tools_by_responses(agent: Played) -> None:
    source = """
    import os
    from openai import OpenAI

    def play(row):
        client, model = OpenAI(), os.environ["OPENAI_MODEL"]
        tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
        first = client.responses.create(model=model, input="2 + 3", tools=tools)
        (call,) = first.output
        assert (call.type, call.name) == ("function_call", "add"), call
        second = client.responses.create(model=model, tools=tools, input=[
            {"role": "user", "content": "2 + 3"}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}])
        return float(second.output_text)
    """
    made = agent(source, says=(CALL, "5"))
    assert made.env_result == 5.0
    assert len(made.segments) == 1, "the history with the call is known"


def test_a_command_gets_the_columns_and_posts_its_reward(agent: Played, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, json, urllib.request as u\ndef post(path, body):\n    key = sys.argv[3] if"
        " path == '/reward' else os.environ['OPENAI_API_KEY']\n    key = {'Authorization': 'Bearer"
        " ' + key, 'Content-Type': 'application/json'}\n    return"
        " json.load(u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + path,"
        " json.dumps(body).encode(), key)))\nasked = [{'role': 'user', 'content':"
        " sys.argv[1]}]\nanswer = post('/chat/completions', {'model': 'gpt-5', 'messages':"
        " asked})\npost('/reward', {'reward': 0.125, 'answer': answer['id'] +"
        " '/0'})\npost('/reward', {'reward': float(sys.argv[2])})\n",
        encoding="utf-8",
    )
    made = agent(
        "",
        run=[sys.executable, str(script), "{prompt}", "{level}", "{reward_key}"],
        model="gpt-5",
        reward="posted",
    )
    assert made.env_result == 3.0
    assert [turn.reward for turn in made.sampled_turns] == [0.125]
    assert "What is 2 + 3?" in RENDERER.shown(made.turns[0].token_ids)


def test_the_key_of_the_chats_does_not_pay(agent: Played) -> None:
    """An agent with a shell runs what the policy writes, which has the agent's variables."""
    post = (
        "import os, urllib.request as u, urllib.error\nkey = {'Authorization': 'Bearer ' +"
        " os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\ntry:"
        " u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/reward', b'{\"reward\": 1.0}',"
        " key))\nexcept urllib.error.HTTPError as error: print(error.code, error.read())\n"
    )
    made = agent(f"""
    import subprocess, sys
    from openai import OpenAI
    def play(prompt, ground_truth):
        OpenAI().chat.completions.create(model="policy", messages=[{{"role": "user", "content": prompt}}])
        said = subprocess.run([sys.executable, "-c", {post!r}], capture_output=True, text=True).stdout
        assert said.startswith("403") and "does not pay" in said, said
        return 0.0
    """)
    assert made.env_result == 0.0


POSTS = """
    import json, urllib.request as u, urllib.error
    from openai import OpenAI, PermissionDeniedError
    def play(prompt, base_url{parameter}):
        OpenAI().chat.completions.create(model="policy", messages=[{{"role": "user", "content": prompt}}])
        try:
            OpenAI(api_key=reward_key).models.list()
            raise AssertionError("it opens the chats")
        except PermissionDeniedError:
            pass
        key = {{"Authorization": "Bearer " + reward_key, "Content-Type": "application/json"}}
        u.urlopen(u.Request(base_url + "/reward", b'{{"reward": 0.75}}', key))
"""


def test_a_key_of_its_own_pays_where_that_is_asked_for(agent: Played) -> None:
    made = agent(POSTS.format(parameter=", reward_key"), reward="posted")
    assert made.env_result == 0.75
    with pytest.raises(EnvironmentFailed, match="reward_key"):
        agent(POSTS.format(parameter=", reward_key"))


def works_alone() -> bool:
    """Whether user namespaces with a /proc work here."""
    return (
        subprocess.run(
            ["unshare", "-Urpf", "--mount-proc", "true"], check=False, capture_output=True
        ).returncode
        == 0
    )


alone = pytest.mark.skipif(not works_alone(), reason="no user namespaces here")

LOOKS = """
    import glob, os, signal, subprocess
    from openai import OpenAI
    def play(prompt):
        OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
        os.kill(os.getppid(), signal.SIGKILL)
        script = 'cat /proc/$PPID/environ; echo 1 > /proc/$PPID/mem; for f in /proc/$PPID/fd/*; do echo 1 > $f; done'
        subprocess.run(["sh", "-c", script], check=False)
        return float(len(glob.glob("/proc/[0-9]*")))
"""


@alone
def test_an_agent_sees_no_other_process_and_ends_none(agent: Played, tmp_path: Path) -> None:
    assert agent(LOOKS).env_result == 2.0, "the first process of its namespace, and itself"
    assert_nothing_is_left(tmp_path)


REACHES = """
    import socket
    from openai import OpenAI
    def play(prompt):
        OpenAI().chat.completions.create(model="policy", messages=[{{"role": "user", "content": prompt}}])
        inner = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(inner.getsockname(), timeout=5).close()
        try:
            socket.create_connection(("127.0.0.1", {port}), timeout=5).close()
        except ConnectionRefusedError:
            socket.create_connection(("192.0.2.1", 80), timeout=5)
        return 1.0
"""


@alone
def test_an_agent_reaches_the_policy_and_itself_and_with_a_network_others(agent: Played) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        source = REACHES.format(port=other.getsockname()[1])
        assert agent(source, network=True).env_result == 1.0
        with pytest.raises(
            EnvironmentFailed, match=r"(?s)Network is unreachable.*with\.network: true"
        ):
            agent(source)


@alone
def test_many_connections_and_large_bodies_reach_the_policy(agent: Played) -> None:
    made = agent(
        """
    import asyncio
    from openai import AsyncOpenAI
    async def play(prompt):
        async def one(number):
            client = AsyncOpenAI(max_retries=0)
            said = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(number)}])
            stream = await client.chat.completions.create(model="policy", messages=[
                {"role": "user", "content": str(number)}], stream=True, extra_body={"metadata": {"x": "y" * 1_000_000}})
            return len([chunk async for chunk in stream]) + len(said.choices)
        return float(min(await asyncio.gather(*map(one, range(8)))) > 1)
    """,
        max_turns=16,
    )
    assert made.env_result == 1.0
    assert len(made.sampled_turns) == 16


def test_an_agent_that_shares_the_processes_ends_with_those_that_keep_it(
    agent: Played, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailed, match="exit code -9"):
        agent(LOOKS, alone=False)
    assert_nothing_is_left(tmp_path)


def test_an_agent_whose_host_is_killed_ends(agent: Played, tmp_path: Path) -> None:
    def kill() -> None:
        servers = agent_env._fork_servers
        alive = eventually(lambda: [one for one in servers.values() if one.alive()], "a host", 60)
        server = alive[-1]
        eventually(lambda: len(memory.tree(server._process.pid)) > 3, "an agent", 60)
        os.kill(memory.children(server._process.pid)[0], 9)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(EnvironmentFailed, match="ended without a word"):
        agent(HANGS)
    assert_nothing_is_left(tmp_path)


def test_programs_that_have_ended_are_no_processes(agent: Played) -> None:
    made = agent(
        """
    import subprocess
    from openai import OpenAI
    def play(prompt):
        OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
        for _ in range(60):
            subprocess.run(["sh", "-c", "true &"])
        kept = [subprocess.Popen(["true"]) for _ in range(60)]  # which it does not wait for
        import time; time.sleep(1)
        return 1.0
    """,
        processes=20,
    )
    assert made.env_result == 1.0


def test_an_agent_has_no_key_of_the_run_and_its_own_opens_nothing_else(
    agent: Played, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    seen = tmp_path / "seen"
    agent(f"""
    import os, json
    from openai import OpenAI, AuthenticationError, PermissionDeniedError
    def play(row):
        open({str(seen)!r}, "w").write(json.dumps(dict(os.environ)))
        for key in ("", "wrong"):
            try:
                OpenAI(api_key=key or "x", default_headers={{}} if key else {{"Authorization": ""}}).models.list()
            except (AuthenticationError, PermissionDeniedError):
                continue
            raise AssertionError(key)
        OpenAI().chat.completions.create(model="policy", messages=row["messages"])
    """)
    assert "secret" not in seen.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "client.chat.completions.create(model='gpt-4o', messages=row['messages'])",
            "unknown model 'gpt-4o'",
        ),
        (
            (
                "client.chat.completions.create(model=m, messages=row['messages'], tools=[{'type':"
                " 'function', 'function': {'name': 'f', 'parameters': {'type': 7}}}])"
            ),
            "parameters of f are not a JSON schema",
        ),
        (
            (
                "client.chat.completions.create(model=m, messages=[{'role': 'user', 'content': 'x'"
                " * 100_000_000}])"
            ),
            "413",
        ),
        (
            (
                "client.chat.completions.create(model=m, messages=row['messages'],"
                " extra_body={'guided': 'x'})"
            ),
            "guided",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("os._exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 11)", "exit code -11"),
        ("float('nan')", "returned nan, which is not a finite number"),
        ("None", "without an answer of the policy"),
    ],
)
def test_what_goes_wrong_in_an_agent_is_never_a_reward(agent: Played, body: str, said: str) -> None:
    source = f"""
    import os
    from openai import OpenAI
    def play(row):
        client, m = OpenAI(max_retries=0), "policy"
        return {body}
    """
    with pytest.raises(EnvironmentFailed, match=said) as raised:
        agent(source)
    assert raised.value.bug, "the same failure on two actors is not tried a third time"


MALFORMED = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
BROKEN = """
    import os, json
    from openai import OpenAI
    def play(row):
        client = OpenAI(max_retries=0)
        said = client.chat.completions.create(model="policy", messages=row["messages"]).choices[0].message.content
        {}
"""


@pytest.mark.parametrize(
    "body",
    [
        "return json.loads(said)['number']",
        "return float('nan')",
        "return {'a': 1}[said]",
        "os._exit(3)",
        "os.kill(os.getpid(), 9)",
        "open(said)",
        "raise SystemExit('no answer')",
        "kept = [b'x' * (8 << 20) for _ in range(1000)]",
        "import time; [os.fork() or time.sleep(60) for _ in range(40)]; time.sleep(60)",
        "print('ConnectionError: said the policy', flush=True); os._exit(3)",
        "raise SystemExit('TimeoutError: said the policy')",
        "raise ValueError('it did not end within 3 s (deadline)')",
    ],
)
def test_an_agent_that_an_answer_broke_is_scored(agent: Played, body: str) -> None:
    limits = {"memory_mb": 256, "processes": 30}
    made = agent(BROKEN.format(body), **limits)
    assert (made.end_reason, made.env_result) == (EndReason.ACTION_ERROR, 0.0)
    paid = agent(BROKEN.format(body), on_error=-1.0, **limits)
    assert (paid.end_reason, paid.env_result) == (EndReason.ACTION_ERROR, -1.0)
    with pytest.raises(EnvironmentFailed):
        agent(BROKEN.format(body), on_error="exclude", **limits)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ConnectionError('the database is away')", "the database is away"),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 5)", "Connection refused"),
        ("import no_such_module", "No module named"),
        ("raise OSError(28, 'No space left on device')", "No space left"),
        (
            "raise SystemExit('it gave up') from ConnectionError('the database is away')",
            "it gave up",
        ),
        (
            "client.chat.completions.create(model='gpt-4o', messages=row['messages'])",
            "unknown model 'gpt-4o'",
        ),
        (
            (
                "import openai; openai.OpenAI(base_url='http://127.0.0.1:9/v1',"
                " max_retries=0).models.list()"
            ),
            "Connection error",
        ),
    ],
)
def test_what_an_answer_cannot_have_broken_is_never_a_reward(
    agent: Played, body: str, said: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        agent(BROKEN.format(body))


COMMAND = """
    import json, os, subprocess, sys
    from openai import OpenAI

    def report(report):
        os.write(int(os.environ["RAYLOOP_RESULT_FD"]), json.dumps(report).encode())

    messages = [{"role": "user", "content": "a"}]
    client = OpenAI(max_retries=0)
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    BODY
"""


@pytest.fixture
def command(agent: Played, tmp_path: Path) -> Played:
    """Plays one episode with a command that ends with these lines, after an answer."""

    def played(*lines: str) -> Trajectory:
        program = tmp_path / "command.py"
        source = textwrap.dedent(COMMAND).replace("BODY", "\n".join(lines))
        program.write_text(source, encoding="utf-8")
        return agent("", run=[sys.executable, str(program)])

    return played


@pytest.mark.parametrize(
    "lines",
    [
        ["raise KeyError(said)"],
        ["raise ConnectionError(said)"],
        ["print('ConnectionError: said the policy', flush=True)", "os._exit(3)"],
        ["report({'raised': [[['ValueError', 'Exception'], None]]})", "os._exit(3)"],
        ["report({'raised': 7})", "os._exit(3)"],
        ["report({'raised': [[[[]], [2]]]})", "os._exit(3)"],
        ["report(['ConnectionError'])", "os._exit(3)"],
        ["report({'result': 'five'})"],
    ],
)
def test_a_command_that_an_answer_broke_is_scored_whatever_it_prints(
    command: Played, lines: list[str]
) -> None:
    made = command(*lines)
    assert (made.end_reason, made.env_result) == (EndReason.ACTION_ERROR, 0.0)


@pytest.mark.parametrize("raised", [[["ConnectionError"], None], [["OSError"], 28]])
def test_a_command_reports_what_no_answer_can_have_broken(command: Played, raised: Any) -> None:
    with pytest.raises(EnvironmentFailed, match="exit code 3"):
        command(
            f"report({{'raised': [{raised}]}})",
            "print('KeyError: said the policy', flush=True)",
            "os._exit(3)",
        )


def test_a_command_reports_its_reward_and_prints_none(command: Played) -> None:
    printed = """print('{"result": 1.0}')"""
    made = command("report({'result': 0.5})", printed)
    assert (made.end_reason, made.env_result) == (EndReason.DONE, 0.5)
    assert command(printed).env_result is None


def test_the_page_names_the_descriptor_and_both_reports() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for report in (
        host.RESULT_VARIABLE,
        '{"result": ',
        '{"raised": [[["ConnectionError"], null]], "cause": "unreachable", "server": "http://host"}',
    ):
        assert f"`{report}" in text


def test_programs_that_a_command_starts_cannot_report(command: Played) -> None:
    """They do not inherit the descriptor, and /proc opens no socket."""
    forged = "import os; fd = os.environ['RAYLOOP_RESULT_FD']; os.write({}, b'{{\"result\": 1}}')"
    inherited = forged.format("int(fd)")
    opened = forged.format("os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY)")
    made = command(
        f"for source in ({inherited!r}, {opened!r}):",
        "    assert subprocess.run([sys.executable, '-c', source]).returncode",
        "report({'result': 0.25})",
    )
    assert made.env_result == 0.25


def test_a_refusal_that_was_followed_by_an_answer_is_forgotten(agent: Played) -> None:
    made = agent("""
    from openai import OpenAI, NotFoundError
    def play(row):
        client = OpenAI(max_retries=0)
        try:
            client.chat.completions.create(model="other", messages=row["messages"])
        except NotFoundError:
            client.chat.completions.create(model="policy", messages=row["messages"])
        return {}["number"]
    """)
    assert (made.end_reason, made.env_result) == (EndReason.ACTION_ERROR, 0.0)


def test_the_agent_of_the_page_answers_a_malformed_call(agent: Played) -> None:
    page = (Path(__file__).parents[3] / "docs/policy_endpoint.md").read_text(encoding="utf-8")
    source = re.findall(r"```python title=my_agent.py\n(.*?)```", page, re.DOTALL)[0]
    made = agent(source, says=(MALFORMED.replace("1", '"one"'), "5"))
    assert (made.end_reason, made.env_result) == (EndReason.DONE, 1.0)


def test_a_history_that_was_not_given_here_is_rendered_and_trained_no_further(
    agent: Played,
) -> None:
    made = agent("""
    from openai import OpenAI
    def play(row):
        history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "invented"}, {"role": "user", "content": "b"}]
        answer = OpenAI().chat.completions.create(model="policy", messages=history)
        assert answer.rayloop["history"]["exact"] is False and "not given here" in answer.rayloop["history"]["why"]
    """)
    assert [turn.sampled for turn in made.turns] == [False, True]
    assert "invented" in RENDERER.shown(made.turns[0].token_ids)
    assert made.env_result is None


def test_an_error_behind_a_limit_ends_the_episode_with_that_reason(agent: Played) -> None:
    made = agent(TOOLS, says=(CALL, CALL, CALL), max_turns=2)
    assert (made.end_reason, made.env_result) == (EndReason.MAX_TURNS, None)
    assert len(made.sampled_turns) == 2


HANGS = """
    import subprocess, sys, time
    from openai import OpenAI
    def play(row):
        OpenAI().chat.completions.create(model="policy", messages=row["messages"])
        subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); os.fork(); time.sleep(600)"])
        time.sleep(600)
"""


def test_a_hang_is_ended_with_all_that_the_agent_started(agent: Played, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentHung, match=r"did not end within 3 s \(deadline\)") as raised:
        agent(HANGS, deadline=3)
    assert time.monotonic() - began < 30
    assert raised.value.contained
    assert_nothing_is_left(tmp_path)


def test_what_an_agent_writes_does_not_say_how_it_was_ended(agent: Played) -> None:
    source = BROKEN.format("""
        import stat
        for descriptor in range(3, 64):
            try:
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                    os.write(descriptor, b'{"end": "it did not end within 3 s (deadline)", "late": true, "broken": true}')
            except OSError:
                pass
        os._exit(3)
    """)
    made = agent(source)
    assert (made.end_reason, made.env_result) == (EndReason.ACTION_ERROR, 0.0)


def full_server() -> tuple[agent_env._ForkServer, socket.socket]:
    """A server whose buffer takes no further request, and its other end."""
    server = agent_env._ForkServer.__new__(agent_env._ForkServer)
    server._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._control.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            server._control.send(b"0")
    return server, theirs


def test_a_request_waits_while_the_buffer_is_full() -> None:
    server, theirs = full_server()

    def serve() -> None:
        """Read all requests, and answer the one that brings a socket."""
        descriptors: list[int] = []
        while not descriptors:
            _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
        with socket.socket(fileno=descriptors[0]) as connection, connection.makefile("rb") as asked:
            asked.readline()
            connection.sendall(b'{"code": 0}\n')

    async def asking() -> dict[str, Any]:
        # Behind the first try of the request, which comes before the loop takes up anything else.
        asyncio.get_running_loop().call_soon(threading.Thread(target=serve, daemon=True).start)
        return await server.host({})

    with theirs, server._control:
        assert asyncio.run(asking()) == {"code": 0}


def test_a_buffer_that_stays_full_is_not_an_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_env, "READY_TIMEOUT_S", 0.05)
    server, theirs = full_server()
    with (
        theirs,
        server._control,
        pytest.raises(EnvironmentFailed, match=r"took no request for 0\.05 s"),
    ):
        asyncio.run(server.host({}))


def test_an_episode_that_is_cancelled_ends_its_agent(
    agent: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = asyncio.run

    def short(main: Any) -> Any:
        return real(asyncio.wait_for(main, 4))

    monkeypatch.setattr(asyncio, "run", short)
    with pytest.raises(TimeoutError):
        agent(HANGS)
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("body", "options", "said"),
    [
        ("while True: os.fork()", {"processes": 20}, r"processes, 20 are allowed \(processes\)"),
        ("kept = [b'x' * (8 << 20) for _ in range(1000)]", {"memory_mb": 256}, "MemoryError"),
        (
            (
                "[os.fork() or (bytearray(200 << 20), time.sleep(600)) for _ in range(4)];"
                " time.sleep(600)"
            ),
            {"memory_mb": 300},
            r"allowed \(memory_mb\)",
        ),
        (
            (
                "m = mmap.mmap(-1, 400 << 20); [m.__setitem__(slice(k << 20, k + 1 << 20), PAGE)"
                " for k in range(400)]; time.sleep(600)"
            ),
            {"memory_mb": 200},
            r"allowed \(memory_mb\)",
        ),
    ],
)
def test_a_fork_bomb_and_a_memory_hog_are_ended(
    agent: Played, tmp_path: Path, body: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        agent(
            f"import mmap, os, time\nPAGE = b'x' * (1 << 20)\ndef play(row):\n    {body}\n",
            **options,
        )
    assert_nothing_is_left(tmp_path)


def test_the_output_of_an_agent_is_read_and_its_end_is_kept(agent: Played) -> None:
    with pytest.raises(EnvironmentFailed, match="the end of it") as raised:
        agent("""
        import sys
        def play(row):
            for _ in range(200):
                sys.stdout.write("x" * (1 << 20))
            sys.exit("the end of it")
        """)
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"python": "/no/such/python"}, r"with\.python: /no/such/python cannot be started"),
        ({"preload": ["no_such_module"]}, "did not start.*No module named 'no_such_module'"),
        ({"run": "no_such_module:play"}, "No module named 'no_such_module'"),
        ({"run": "os:no_such_function"}, "has no attribute 'no_such_function'"),
    ],
)
def test_an_agent_that_cannot_be_started_says_why(
    agent: Played, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=f"(?s){said}"):
        agent("", **options)


def test_a_check_finds_an_agent_without_playing(tmp_path: Path) -> None:
    def check(run: Any) -> None:
        kind = EnvironmentKind.model_validate(
            {"use": "rayloop.envs.agent_env:AgentEnv", "with": {"run": run}}
        )
        task = Task("t", (Message("user", ("a",)),))
        instance = Environments(kind, {}).of(task)

        async def once() -> None:
            await instance.make(9)
            assert (await instance.call("reset", task, timeout=30)).messages == task.messages

        asyncio.run(once())

    (tmp_path / "good.py").write_text("def play(row): raise SystemExit('played')", encoding="utf-8")
    check(f"{tmp_path / 'good.py'}:play")
    check(["true"])
    with pytest.raises(EnvironmentFailed, match="the program 'no-such-program' was not found"):
        check(["no-such-program"])
    with pytest.raises(EnvironmentFailed, match="has no attribute 'other'"):
        check(f"{tmp_path / 'good.py'}:other")


PAGE = Path(__file__).parents[3] / "docs/policy_endpoint.md"


def shown(title: str) -> str:
    (code,) = re.findall(
        rf"```\w+ title={re.escape(title)}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    return code


def test_the_agent_of_the_page_is_played(agent: Played) -> None:
    made = agent(shown("my_agent.py"), says=(CALL, "It is 5."))
    assert made.env_result == 1.0
    assert len(made.sampled_turns) == 2


def test_the_run_of_the_page_is_played_by_hand(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    for title in ("my_agent.py", "agent.yaml", "rows.jsonl"):
        Path(title).write_text(shown(title), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{CALL}\nIt is 5.\n"))
    model = f"model.path={PAGE.parents[1] / 'recipes/arc_vision/loose'}"
    assert main(["env", "play", "agent.yaml", model]) == 0
    said = capsys.readouterr().out
    assert said.count("What is 2 + 3?") == 1, "each token is shown once"
    assert "<|im_start|>tool\n5<|im_end|>" in said
    assert said.splitlines()[-2:] == ["the episode is over: done", "result: 1"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("quit\n"))
    assert main(["env", "play", "agent.yaml", model]) == 0
    assert capsys.readouterr().out.endswith("the episode was left\n")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


class Custom:
    """An agent-driven environment that somebody else wrote."""

    agent_driven, model = True, "policy"
    closed = 0
    does: Any = None

    def reset(self, task: Task) -> Any: ...

    async def run_agent(self, task: Task, address: Any) -> Any:
        if isinstance(Custom.does, Exception):
            raise Custom.does
        return Custom.does

    def close(self) -> None:
        Custom.closed += 1


@pytest.mark.parametrize(
    ("does", "said", "bug"),
    [
        (TypeError("a typo"), "run_agent raised TypeError: a typo", True),
        (OSError("disk full"), "run_agent raised OSError: disk full", False),
        ("high", "returned 'high', which is not a finite number", True),
        (float("inf"), "returned inf, which is not a finite number", True),
    ],
)
def test_what_an_agent_driven_class_breaks_is_its_own_failure_and_it_is_closed(
    agent: Played, does: Any, said: str, bug: bool
) -> None:
    Custom.does, Custom.closed = does, 0
    task = Task("t", (Message("user", ("a",)),))
    with pytest.raises(EnvironmentFailed, match=said) as raised:
        play_one(task, never, episode_settings({"use": f"{__name__}:Custom"}))
    assert (raised.value.bug, Custom.closed) == (bug, 1)


def never(prompt: TokenPrompt) -> str:
    raise AssertionError("it was not asked")


def test_modules_beside_the_agent_are_found_by_its_own_path(agent: Played, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library/helper_of_agents.py").write_text("REWARD = 0.75", encoding="utf-8")
    source = """
    import helper_of_agents
    from openai import OpenAI
    def play(row):
        OpenAI().chat.completions.create(model="policy", messages=row["messages"])
        return helper_of_agents.REWARD
    """
    assert agent(source, env={"PYTHONPATH": str(tmp_path / "library")}).env_result == 0.75


def test_no_module_of_ours_is_found_by_an_agents_import(agent: Played) -> None:
    made = agent("""
    import importlib.util, sys
    from openai import OpenAI
    def play(row):
        OpenAI().chat.completions.create(model="policy", messages=row["messages"])
        ours = ("host", "session", "endpoint", "namespaces", "memory")
        return float(any(importlib.util.find_spec(name) for name in ours))
    """)
    assert made.env_result == 0.0


def test_an_agent_driven_class_without_run_agent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half.py").write_text(
        "class Half:\n    agent_driven = True\n    def reset(self, task): ...\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    from rayloop.envs.settings import ENVIRONMENT

    with pytest.raises(ConfigError, match="no method run_agent and no close"):
        ENVIRONMENT.check(EnvironmentKind(use="half.py:Half"))
    assert os.getcwd() == str(tmp_path)
