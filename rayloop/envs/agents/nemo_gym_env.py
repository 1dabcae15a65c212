"""Agents of nemo-gym 0.7 as agents of AgentEnv, in a Python with that package.

``run: .../nemo_gym_env.py:play``. The agent's server and the model server, which asks the policy,
run in the process of the episode. The resources server runs elsewhere, at the host and the port
that the configuration gives it.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

CONFIG_VARIABLE = "NEMO_GYM_CONFIG"
"""The variable with the path of a configuration as ``gym env start`` takes it."""
MODEL = "policy_model"
"""The name by which agents refer to their model server."""
BEGINNINGS = ("/seed_session", "/reset")
"""Paths of requests that come before the policy has acted."""
CONNECTION_TRIES = 3
"""How often a connection is tried; the package tries without end."""
REPORTS = Path(__file__).parents[2] / "core" / "failures.yaml"
"""The class of each report: this Python has no package rayloop."""


@dataclass
class _Call:
    """A request to the resources server; ``report``: the row of its failure, "" for a success."""

    url: str
    options: Mapping[str, Any]
    report: str


class ServerFailed(Exception):
    """The resources server failed: the agent's host reports these two attributes."""

    def __init__(self, why: Any, report: str, server: str) -> None:
        super().__init__(f"NeMo Gym, {report}: {why}")
        self.rayloop_cause = _class(report)
        self.rayloop_server = server


async def play(
    ground_truth: Mapping[str, Any],
    responses_create_params: Mapping[str, Any],
    base_url: str,
    api_key: str,
    model: str,
) -> float:
    """Play one episode of a row that ``NemoGymRows`` has read, and return its reward.

    ``agent_ref`` of the row names the agent. Raises ServerFailed for an episode that the resources
    server broke or masked, what the agent raised, and RuntimeError for an answer without a reward.
    """
    from nemo_gym import server_utils

    agent = ground_truth["agent_ref"]["name"]
    config = _config(base_url, api_key, model)
    client = server_utils.ServerClient(
        head_server_config=config.head_server, global_config_dict=config
    )
    _, settings = _settings(config, agent)
    _, resources = _settings(config, settings.resources_server.name)
    server = f"http://{resources.host}:{resources.port}"
    calls = _noted_calls(server_utils, server)
    raised: list[Exception] = []
    row = {**ground_truth, "responses_create_params": responses_create_params}
    async with _serving(config, agent, client, raised):
        response = await client.post(agent, "/run", json=row)
        text = await response.text()
    _raise_lost(calls, server)
    result = json.loads(text) if response.ok else {}
    if result.get("mask_sample"):
        kind = result.get("failure_kind") or "other"
        raise ServerFailed(result.get("failure_reason"), kind, server)
    if "reward" in result:
        return float(result["reward"])
    if calls and calls[-1].url == f"{server}/verify":
        await _raise_broken_verifier(server_utils, calls[-1], server)
    if raised:
        raise raised[0]
    raise RuntimeError(f"NeMo Gym, /run of {agent}: HTTP {response.status}: {text}")


def _config(base_url: str, api_key: str, model: str) -> Any:
    """Return the configuration as the package reads it, with the policy as its model."""
    from nemo_gym import global_config
    from omegaconf import OmegaConf

    policy = {
        "entrypoint": "app.py",
        "openai_base_url": base_url,
        "openai_api_key": api_key,
        "openai_model": model,
        "max_http_attempts": 1,
    }
    given = {
        "config_paths": [os.environ[CONFIG_VARIABLE]],
        MODEL: {"responses_api_models": {"openai_model": policy}},
    }
    parser_settings = global_config.GlobalConfigDictParserConfig(
        initial_global_config_dict=OmegaConf.create(given),
        skip_load_from_cli=True,
        skip_load_from_dotenv=True,
    )
    return global_config.get_global_config_dict(parser_settings)


def _settings(config: Any, name: str) -> tuple[str, Any]:
    """Return the module of a server, and its settings."""
    [(kind, folders)] = config[name].items()
    [(folder, settings)] = folders.items()
    return f"{kind}.{folder}.app", settings


@asynccontextmanager
async def _serving(
    config: Any, agent: str, client: Any, raised: list[Exception]
) -> AsyncIterator[None]:
    """Serve the agent and its model on free ports; ``raised`` gets what they raise."""
    import uvicorn

    running = []
    for name in (agent, MODEL):
        module, settings = _settings(config, name)
        listening = socket.create_server(("127.0.0.1", 0))
        settings.host, settings.port = listening.getsockname()
        app = _noting(_app(module, settings, name, client), raised)
        server = uvicorn.Server(uvicorn.Config(app))
        running.append((server, asyncio.create_task(server.serve(sockets=[listening]))))
    try:
        yield
    finally:
        for server, task in running:
            server.should_exit = True
            await task


def _app(module: str, settings: Any, name: str, client: Any) -> Any:
    """Return the application of a server, whose class is the last that its module has."""
    from omegaconf import OmegaConf

    classes = [
        value for value in vars(import_module(module)).values() if hasattr(value, "setup_webserver")
    ]
    values = {**OmegaConf.to_container(settings, resolve=True), "name": name}
    server_config = classes[-1].model_fields["config"].annotation.model_validate(values)
    return classes[-1](config=server_config, server_client=client).setup_webserver()


def _noting(app: Any, raised: list[Exception]) -> Any:
    async def noting(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            raised.append(error)
            raise

    return noting


def _noted_calls(server_utils: Any, server: str) -> list[_Call]:
    """Return a list that the next requests to ``server`` fill."""
    calls: list[_Call] = []
    ask = server_utils.request

    async def noted(method: str, url: str, **options: Any) -> Any:
        options["_max_connection_retries"] = CONNECTION_TRIES
        # The report stays until an answer comes.
        call = _Call(url, options, "transport_unreachable")
        if url.startswith(f"{server}/"):
            calls.append(call)
        response = await ask(method, url, **options)
        call.report = "" if response.ok else f"http_{response.status}"
        return response

    server_utils.request = noted
    return calls


def _raise_lost(calls: Sequence[_Call], server: str) -> None:
    """Raise ServerFailed for the first failure that is not the policy's."""
    for call in calls:
        path = call.url.removeprefix(server)
        is_refused = _class(call.report) == "refused"
        if is_refused and path in BEGINNINGS:
            raise ServerFailed(f"{path}: {call.report}", "other", server)
        if call.report and not is_refused:
            raise ServerFailed(path, call.report, server)


async def _raise_broken_verifier(server_utils: Any, call: _Call, server: str) -> None:
    """Raise ServerFailed if the verifier breaks on an empty answer too."""
    body = call.options["json"]
    body["response"]["output"] = []
    response = await server_utils.request("POST", call.url, **call.options)
    if not response.ok:
        raise ServerFailed(
            f"HTTP {response.status} for an empty answer too", "verifier_error", server
        )


def _class(report: str) -> str:
    """Return the class of a report by core/failures.yaml."""
    import yaml

    rows = yaml.safe_load(REPORTS.read_text(encoding="utf-8"))["nemo_gym"]
    return str(rows.get(report, rows["other"])[0])
