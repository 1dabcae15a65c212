"""``bench agents``: what the endpoint of agents costs a call, with an engine that answers at once.

Each of ``--sessions`` clients, all at once in another process, holds conversations of ``--turns``
turns; the policy's answers have 64 tokens. ``cpu_ms``: CPU time of the endpoint's process for one
call (HTTP, checks, rendering, decoding, JSON). ``latency_ms``: from a client's request to its
answer, with all clients at once on the same cores, median and 95th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.measure import machine
from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.types import (
    Completion,
    FinishReason,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    TrajectoryId,
    Version,
)
from rayloop.envs.agents.endpoint import Endpoint
from rayloop.envs.agents.session import Session
from rayloop.envs.settings import EpisodeSettings
from rayloop.recipes.arc_vision import __file__ as recipe

MODEL = Path(recipe).parent / "loose"
ANSWER_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=64, help="agents at once")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation")
    parser.add_argument(
        "--episodes", type=int, default=4, help="conversations of each agent, one after the other"
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        metavar="DIR",
        help="whose template and tokenizer are used",
    )
    parser.set_defaults(run=_agents)


def _agents(arguments: argparse.Namespace) -> int:
    print(json.dumps({**asyncio.run(_measured(arguments)), "machine": machine()}))
    return 0


async def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    renderer, endpoint = Renderer(ModelSettings(path=str(arguments.model))), Endpoint()
    tokens = (renderer.encode("The sum of these numbers is 42. ") * ANSWER_TOKENS)[:ANSWER_TOKENS]
    settings = EpisodeSettings(max_turns=arguments.turns * arguments.episodes, max_tokens=1 << 20)

    async def generate(prompt: TokenPrompt, sampling: Sampling) -> Completion:
        return Completion(tokens, (-0.5,) * len(tokens), FinishReason.END_TOKEN, Version(0, 0))

    def session(number: int) -> Session:
        request = RolloutRequest(
            Task(str(number), (Message("user", ("go",)),)),
            TrajectoryId(number, 0),
            0,
            0,
            Sampling(),
        )
        return Session(request, renderer, settings, generate, "policy")

    addresses, open_ones = [], []
    for number in range(arguments.sessions):
        open_ones.append(endpoint.serving(session(number)))
        addresses.append(await open_ones[-1].__aenter__())
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.envs.agents",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    asked = {"addresses": addresses, "turns": arguments.turns, "episodes": arguments.episodes}
    began, cpu = time.perf_counter(), time.process_time()
    said, _ = await client.communicate(json.dumps(asked).encode())
    spent, took = time.process_time() - cpu, json.loads(said)
    for one in open_ones:
        await one.__aexit__(None, None, None)
    return {
        "sessions": arguments.sessions,
        "calls": len(took),
        "cpu_ms": round(1000 * spent / len(took), 2),
        "latency_ms": [round(1000 * median(took), 1), round(1000 * quantiles(took, n=20)[-1], 1)],
        "calls_per_second": round(len(took) / (time.perf_counter() - began)),
    }


async def clients(asked: dict[str, Any]) -> list[float]:
    """Talk to all addresses at once. Returns the seconds of each call."""
    import httpx

    took: list[float] = []
    numbers = count()

    async def agent(http: httpx.AsyncClient, address: dict[str, str]) -> None:
        for _ in range(asked["episodes"]):
            messages: list[dict[str, Any]] = []
            for _ in range(asked["turns"]):
                messages.append(
                    {
                        "role": "user",
                        "content": (
                            f"Add {next(numbers)} and 1. Say only the sum, and nothing else."
                        ),
                    }
                )
                began = time.perf_counter()
                answer = await http.post(
                    f"{address['base_url']}/chat/completions",
                    json={"model": address["model"], "messages": messages},
                    headers={"Authorization": f"Bearer {address['api_key']}"},
                )
                took.append(time.perf_counter() - began)
                messages.append(
                    {
                        "role": "assistant",
                        "content": (
                            answer.raise_for_status().json()["choices"][0]["message"]["content"]
                        ),
                    }
                )

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        await asyncio.gather(*(agent(http, address) for address in asked["addresses"]))
    return took


if __name__ == "__main__":
    print(json.dumps(asyncio.run(clients(json.loads(sys.stdin.read())))))
