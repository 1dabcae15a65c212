"""A task of BrowserGym 0.14 as an agent of AgentEnv, in a Python with that package.

``run: .../browsergym_env.py:play``.
"""

import base64
import importlib
import io
import os
import shutil
from contextlib import closing
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

PAGE_TIMEOUT_MS = 30_000
"""Milliseconds in which a page must load. BrowserGym gives an action half a second."""


def play(
    task: str,
    seed: int,
    messages: Any,
    actions: Any = "miniwob_all",
    see: str = "screenshot",
    steps: int = 10,
    success_at: float | None = 1.0,
) -> float:
    """Play one episode of the row's column ``task``, such as miniwob.click-test.

    Further columns: ``actions``, subsets of BrowserGym's actions (``bid`` and ``coord`` upload
    files, ``nav`` opens any address); ``see``: screenshot, axtree or both; ``steps``, after which
    it ends; ``success_at``, the least reward of the page with which a task of MiniWoB++ is solved
    (None: any above 0, as BrowserGym pays, a wrong card of find-greatest too). Returns the sum of
    the rewards. Raises RuntimeError for a page that hangs after an action, ConnectionError for a
    browser that has ended, and what Playwright raises for a page that does not load.
    """
    import openai
    from browsergym.core.action.highlevel import HighLevelActionSet
    from playwright.sync_api import Error, TimeoutError

    action_set = HighLevelActionSet(actions, multiaction=False)
    # It waits for a time that the policy chooses.
    del action_set.action_set["noop"]
    client = openai.OpenAI()
    history = list(messages)
    total = 0.0
    with closing(_browser(task, action_set)) as browser:
        observation, _ = browser.reset(seed=seed)
        description = action_set.describe(with_long_description=False, with_examples=False)
        goal = [_text(description), *observation["goal_object"]]
        for step in range(steps):
            parts = _observation_parts(observation, see)
            history.append({"role": "user", "content": parts if step else [*goal, *parts]})
            completion = client.chat.completions.create(
                model=os.environ["OPENAI_MODEL"], messages=history
            )
            answer = completion.choices[0].message.content or ""
            history.append({"role": "assistant", "content": answer})
            try:
                observation, reward, terminated, truncated, info = browser.step(answer)
            # Before ``Error``, of which Playwright's TimeoutError is a subclass.
            except TimeoutError:
                raise RuntimeError(
                    f"the page did not answer within {PAGE_TIMEOUT_MS / 1000:g} s after an action"
                ) from None
            except Error as error:
                # The errors of the action itself are in the observation.
                raise ConnectionError(f"the browser: {error}") from error
            total += _paid(reward, info, success_at)
            if terminated or truncated:
                break
    return total


def _browser(task: str, action_set: Any) -> Any:
    """Return BrowserGym's environment of a task."""
    import gymnasium
    from browsergym.core import env

    importlib.import_module(f"browsergym.{task.partition('.')[0]}")
    spec = find_spec("miniwob")
    if spec is not None:
        folder = (spec.submodule_search_locations or [""])[0]
        os.environ.setdefault("MINIWOB_URL", f"file://{folder}/html/miniwob/")
    env.Chat = _chat
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    return gymnasium.make(
        f"browsergym/{task}",
        disable_env_checker=True,
        timeout=PAGE_TIMEOUT_MS,
        action_mapping=action_set.to_python_code,
        pw_chromium_kwargs={"executable_path": program},
    )


def _paid(reward: float, info: Any, success_at: float | None) -> float:
    """Return BrowserGym's reward.

    For a page of MiniWoB++, it is whether the page's reward reaches ``success_at``.
    """
    page_reward = info.get("task_info", {}).get("RAW_REWARD_GLOBAL")
    if page_reward is None or success_at is None:
        return reward
    return float(page_reward >= success_at)


def _observation_parts(observation: Any, see: str) -> list[dict[str, Any]]:
    """Return the last action's error, and what ``see`` names."""
    from browsergym.utils.obs import flatten_axtree_to_str
    from PIL import Image

    parts = []
    error = observation["last_action_error"]
    if error:
        parts.append(_text(f"Error: {error}\n"))
    if "axtree" in see:
        parts.append(_text(flatten_axtree_to_str(observation["axtree_object"])))
    if "screenshot" in see:
        file = io.BytesIO()
        Image.fromarray(observation["screenshot"]).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _chat(**_: Any) -> Any:
    """Return BrowserGym's chat without its window, which is a separate browser."""
    messages: list[dict[str, str]] = []
    return SimpleNamespace(
        messages=messages,
        add_message=lambda role, msg: messages.append({"role": role, "message": msg}),
        close=lambda: None,
    )
