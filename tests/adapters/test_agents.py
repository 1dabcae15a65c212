"""Agents of published frameworks, in a Python that has them, against hostile turns: whatever the
policy writes, they are scored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import hostile_played
from tests.support import hostile_turns
from tests.support.runs import ROOT

PYTHON = ROOT / ".venv-agents/bin/python"
pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(280),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="the frameworks are not installed here (make test-adapters installs them)",
    ),
]
LANGCHAIN = """
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def add(a: float, b: float) -> float:
    "Adds two numbers."
    return a + b

def play(prompt):
    made = create_agent(ChatOpenAI(model="policy", max_retries=0), [add]).invoke({"messages": [("user", prompt)]})
    return float("5" in str(made["messages"][-1].content))
"""
OPENAI_AGENTS = """
from agents import Agent, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)

@function_tool
def add(a: float, b: float) -> float:
    "Adds two numbers."
    return a + b

async def play(prompt):
    made = await Runner.run(Agent(name="a", model="policy", instructions="Add.", tools=[add]), prompt)
    return float("5" in str(made.final_output))
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
agent = Agent(OpenAIChatModel("policy"), instructions="Add.")

@agent.tool_plain
def add(a: float, b: float) -> float:
    "Adds two numbers."
    return a + b

async def play(prompt):
    return float("5" in (await agent.run(prompt)).output)
"""
FRAMEWORKS = {
    "langchain": (LANGCHAIN, ["langchain_openai", "langchain.agents"]),
    "openai-agents": (OPENAI_AGENTS, ["agents"]),
    "pydantic-ai": (PYDANTIC_AI, ["pydantic_ai.models.openai"]),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_hostile_turns_are_scored(framework: str, tmp_path: Path) -> None:
    source, preload = FRAMEWORKS[framework]
    file = tmp_path / "agent.py"
    file.write_text(source, encoding="utf-8")
    options = {"run": f"{file}:play", "python": str(PYTHON), "preload": preload, "deadline": 60}
    kind = {"use": "rayloop.envs.agent_env:AgentEnv", "with": options}
    calls = hostile_turns.calls([{"function": {"name": "add", "parameters": SCHEMA}}])
    texts = [*calls[::5], *hostile_turns.texts(8)[::14]]
    paid = hostile_played(kind, {}, texts)
    assert {one.value for one in paid} <= {0.0, 1.0}, "what the agent returns, or on_error"
    print(f"\n{framework}: {len(texts)} texts in {len(paid)} episodes, every one scored")
