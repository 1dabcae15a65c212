"""An environment of verifiers 0.4 as an agent of AgentEnv, in a Python with that package.

``run: .../verifiers_env.py:play``.
"""

import errno
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any


async def play(row: Mapping[str, Any], reward_key: str = "") -> float:
    """Play one episode of the row's column ``taskset``.

    That is the task set's id: an installed package or a module. Further columns: ``index`` (0) of
    the task, ``env`` (an ``Env``'s id) and ``config`` (the task set's). Returns the sum of what its
    rubric gave to the trainable agents. With ``reward_key`` each answer of such an agent is paid
    what the agent got, and their sum is returned. Raises RuntimeError for an episode that an answer
    broke, such as one that did not keep to a contract of the environment, and OSError for one
    that the provider, a sandbox or a tool server broke.
    """
    import verifiers.v1 as vf
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    # uv would download the packages into another environment.
    SubprocessRuntime.prepare_uv_script = _script
    environment = _environment(row)
    index = int(row.get("index") or 0)
    (task,) = environment.taskset.include(idx=[f"{index}:{index + 1}"])
    answers = _answers_by_trace()
    base_url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            task, vf.ModelContext(os.environ["OPENAI_MODEL"], client)
        )
    _raise_errors(episode)
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not reward_key:
        return float(sum(trace.reward for trace in trained))
    rewards = {}
    for trace in trained:
        for answer in answers[trace.id]:
            rewards[answer] = float(trace.reward)
    _post(rewards, base_url, reward_key)
    return sum(rewards.values())


def _environment(row: Mapping[str, Any]) -> Any:
    """Return the row's environment, whose agents run in subprocesses."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import env_config_type, load_environment

    taskset = {**(row.get("config") or {}), "id": row["taskset"]}
    env = row.get("env") or ""
    kind = env_config_type(row["taskset"], env)
    agents = {
        name: {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        for name, field in kind.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    }
    return load_environment(kind.model_validate({"id": env, "taskset": taskset, **agents}))


def _raise_errors(episode: Any) -> None:
    errors = list(episode.errors)
    for trace in episode.traces:
        errors += trace.errors
    if not errors:
        return
    causes = [_cause(error) for error in errors]
    first = next((place for place, cause in enumerate(causes) if cause != POLICY), 0)
    why = f"verifiers: {errors[first].type}: {errors[first].message}"
    # rayloop reads the cause from the class of the exception, and from its number.
    if causes[first] == POLICY:
        raise RuntimeError(why)
    if causes[first] == "unreachable":
        raise ConnectionError(why)
    raise OSError(errno.EIO, why)


def _post(rewards: Mapping[str, float], base_url: str, reward_key: str) -> None:
    """Pay each answer its reward."""
    import httpx

    headers = {"Authorization": f"Bearer {reward_key}"}
    for answer, reward in rewards.items():
        body = {"reward": reward, "answer": answer}
        httpx.post(f"{base_url}/reward", headers=headers, json=body).raise_for_status()


def _answers_by_trace() -> Mapping[str, list[str]]:
    """Return a dictionary that the next traces fill: trace id -> the names of its answers."""
    from verifiers.v1.graph import PendingTurn

    answers = defaultdict[str, list[str]](list)
    commit = PendingTurn.commit

    def commit_and_note(turn: Any, response: Any) -> Any:
        answers[turn.trace.id].append(f"{response.id}/0")
        return commit(turn, response)

    PendingTurn.commit = commit_and_note
    return answers


POLICY = "policy"
"""The class of an error that an answer of the policy may have caused."""
REPORTS = Path(__file__).parents[2] / "core" / "failures.yaml"
"""The class of each boundary of verifiers: this Python has no package rayloop."""
_MACHINE = re.compile(
    r"Connect|Timeout|Transport|Network|Memory|Import|OSError|HTTP|RateLimit|InternalServer"
)
"""Parts of the names of exceptions that hooks and rubrics raise when a service does not answer."""


def _cause(error: Any) -> str:
    """Return the class of an error by core/failures.yaml: POLICY, or a cause.

    The boundary says it, and within the code of task and environment the class that was raised
    first. The message, of which the policy may have written a part, follows that class.
    """
    class_name = ""
    for line in (error.traceback or "").splitlines():
        if line[:1].isalpha() and ":" in line.split()[0]:
            class_name = line.partition(":")[0]
            break
    import yaml

    rows = yaml.safe_load(REPORTS.read_text(encoding="utf-8"))["verifiers"]
    boundary: str = rows.get(error.type, rows["other"])[0]
    if boundary == POLICY and _MACHINE.search(class_name):
        return "unreachable"
    return boundary


async def _script(
    runtime: Any, script: str | bytes, env: Any = None, *, activate: bool = True
) -> list[str]:
    """Return the program's command: it runs in this Python, which has its packages."""
    path = Path(runtime.workdir) / "program.py"
    path.write_bytes(script.encode() if isinstance(script, str) else script)
    return [sys.executable, str(path)]
