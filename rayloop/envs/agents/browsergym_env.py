"""A task of BrowserGym 0.14 as an agent of the harness, in a Python with that package: ``run:
.../browsergym_env.py:play``.
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

TIMEOUT = 30_000
"""Milliseconds for a page to be there. An action has half a second, as BrowserGym says."""


def play(
    task: str,
    seed: int,
    messages: Any,
    actions: Any = "miniwob_all",
    see: str = "screenshot",
    steps: int = 10,
    success_at: float | None = 1.0,
) -> float:
    """One episode of the row's column ``task``, such as miniwob.click-test.

    Further columns: ``actions``, subsets of BrowserGym's actions (``bid`` and ``coord`` upload
    files, ``nav`` opens any address); ``see``: screenshot, axtree or both; ``steps``, after which
    it ends; ``success_at``, the page's own reward from which on a task of MiniWoB++ is solved
    (None: any above 0, as BrowserGym pays, a wrong card of find-greatest too). Returns the sum of
    the rewards. Raises RuntimeError for a page that hangs after an action, ConnectionError for a
    browser that is gone, and what Playwright raises for a page that is not there.
    """
    import gymnasium
    import openai
    from browsergym.core import env
    from browsergym.core.action.highlevel import HighLevelActionSet
    from playwright.sync_api import Error, TimeoutError

    importlib.import_module(f"browsergym.{task.partition('.')[0]}")
    if pages := find_spec("miniwob"):
        os.environ.setdefault(
            "MINIWOB_URL", f"file://{(pages.submodule_search_locations or [''])[0]}/html/miniwob/"
        )
    env.Chat = _chat
    known = HighLevelActionSet(actions, multiaction=False)
    del known.action_set["noop"]  # it waits for as long as the policy says
    program = {
        "executable_path": shutil.which("chromium-headless-shell") or shutil.which("chromium")
    }
    options = {
        "timeout": TIMEOUT,
        "action_mapping": known.to_python_code,
        "pw_chromium_kwargs": program,
    }
    client, history, total = openai.OpenAI(), list(messages), 0.0
    with closing(
        gymnasium.make(f"browsergym/{task}", disable_env_checker=True, **options)
    ) as browser:
        observed, _ = browser.reset(seed=seed)
        new = [
            _text(known.describe(with_long_description=False, with_examples=False)),
            *observed["goal_object"],
        ]
        for _ in range(steps):
            history.append({"role": "user", "content": [*new, *_seen(observed, see)]})
            answer = client.chat.completions.create(
                model=os.environ["OPENAI_MODEL"], messages=history
            )
            said, new = answer.choices[0].message.content or "", []
            history.append({"role": "assistant", "content": said})
            try:
                observed, reward, terminated, truncated, info = browser.step(said)
            except TimeoutError:  # the page that the action has led to does not answer
                # Before ``Error``, of which Playwright's TimeoutError is a kind.
                raise RuntimeError(
                    f"the page did not answer within {TIMEOUT / 1000:g} s after an action"
                ) from None
            except Error as error:  # an action's own errors are in ``observed``
                raise ConnectionError(f"the browser: {error}") from error
            total += _paid(reward, info, success_at)
            if terminated or truncated:
                break
    return total


def _paid(reward: float, info: Any, success_at: float | None) -> float:
    """BrowserGym's reward; of a page of MiniWoB++ whether the page's own reward reaches
    ``success_at``.
    """
    of_the_page = info.get("task_info", {}).get("RAW_REWARD_GLOBAL")
    if of_the_page is None or success_at is None:
        return reward
    return float(of_the_page >= success_at)


def _seen(observed: Any, see: str) -> list[dict[str, Any]]:
    """The last action's error, and what ``see`` names."""
    from browsergym.utils.obs import flatten_axtree_to_str
    from PIL import Image

    parts = [_text(f"Error: {error}\n")] if (error := observed["last_action_error"]) else []
    if "axtree" in see:
        parts.append(_text(flatten_axtree_to_str(observed["axtree_object"])))
    if "screenshot" in see:
        Image.fromarray(observed["screenshot"]).save(file := io.BytesIO(), "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _chat(**_: Any) -> Any:
    """BrowserGym's chat without its window, which is a browser of its own."""
    said: list[dict[str, str]] = []
    return SimpleNamespace(
        messages=said,
        add_message=lambda role, msg: said.append({"role": role, "message": msg}),
        close=lambda: None,
    )
