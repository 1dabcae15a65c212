"""An environment of verifiers 0.4 as an agent of the harness, in a Python with that package: ``run:
.../verifiers_env.py:play``.
"""

import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any


async def play(row: Mapping[str, Any], reward_key: str = "") -> float:
    """One episode of the row's column ``taskset`` (its id: an installed package or a module), of
    the task at ``index`` (0), with further columns ``env`` (an ``Env``'s id) and ``config`` (the
    task set's). Returns the sum of what its rubric gave to the trainable agents. With
    ``reward_key`` each answer of such an agent is paid what the agent got, and their sum is
    returned. Raises RuntimeError for an episode that an answer broke, such as one that did not keep
    to a contract of the environment, and ConnectionError for one that the provider, a sandbox or a
    tool server broke.
    """
    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime
    from verifiers.v1.utils.loaders import env_config_type, load_environment

    SubprocessRuntime.prepare_uv_script = (
        _script  # uv would download into an environment of its own
    )
    taskset = {**(row.get("config") or {}), "id": row["taskset"]}
    env = row.get("env") or ""
    kind = env_config_type(row["taskset"], env)
    seats = {
        name: field.default
        for name, field in kind.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    }
    chosen = {
        name: {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}} for name in seats
    }
    environment = load_environment(kind.model_validate({"id": env, "taskset": taskset, **chosen}))
    index = int(row.get("index") or 0)
    (task,) = environment.taskset.include(idx=[f"{index}:{index + 1}"])
    answers = _answers_by_trace()
    base_url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            task, vf.ModelContext(os.environ["OPENAI_MODEL"], client)
        )
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        broken = next((error for error in errors if _of_a_machine(error)), None)
        error = broken or errors[0]
        raise (ConnectionError if broken else RuntimeError)(
            f"verifiers: {error.type}: {error.message}"
        )
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not reward_key:
        return float(sum(trace.reward for trace in trained))
    pay = {answer: float(trace.reward) for trace in trained for answer in answers[trace.id]}
    headers = {"Authorization": f"Bearer {reward_key}"}
    for answer, reward in pay.items():
        httpx.post(
            f"{base_url}/reward", headers=headers, json={"reward": reward, "answer": answer}
        ).raise_for_status()
    return sum(pay.values())


def _answers_by_trace() -> Mapping[str, list[str]]:
    """The names of the answers that each trace gets from now on, by the trace's id."""
    from verifiers.v1.graph import PendingTurn

    answers = defaultdict[str, list[str]](list)
    commit = PendingTurn.commit

    def noted(turn: Any, response: Any) -> Any:
        answers[turn.trace.id].append(f"{response.id}/0")
        return commit(turn, response)

    PendingTurn.commit = noted
    return answers


MACHINES = ("ProviderError", "SandboxError", "ToolsetError", "InterceptionError", "TunnelError")
"""Boundaries of verifiers that no answer of the policy breaks."""
_MACHINE = re.compile(
    r"Connect|Timeout|Transport|Network|Memory|Import|OSError|HTTP|RateLimit|InternalServer"
)
"""In the names of exceptions that hooks and rubrics raise when what they ask is not there."""


def _of_a_machine(error: Any) -> bool:
    """By the boundary, and within the task's and the environment's code by the class that was
    raised first. The message, which the policy may have written a part of, stands behind that.
    """
    first = next(
        (
            line
            for line in (error.traceback or "").splitlines()
            if line[:1].isalpha() and ":" in line.split()[0]
        ),
        "",
    )
    return error.type in MACHINES or bool(_MACHINE.search(first.partition(":")[0]))


async def _script(
    runtime: Any, script: str | bytes, env: Any = None, *, activate: bool = True
) -> list[str]:
    """The program runs in this Python, which has its packages."""
    path = Path(runtime.workdir) / "program.py"
    path.write_bytes(script.encode() if isinstance(script, str) else script)
    return [sys.executable, str(path)]
