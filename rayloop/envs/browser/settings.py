"""Settings of the browser environments. Light: neither torch nor Playwright."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel

Containment = Literal["namespaces", "chromium", "none"]


class BrowserSettings(SettingsModel):
    """The Chromium of an environment actor: how it is confined, and when it is replaced."""

    program: str = "chromium-headless-shell"
    """The browser to start, a path or a name of PATH. Debian's headless shell needs far less memory than a full Chromium; name
    another when yours is called otherwise."""
    containment: Containment = "namespaces"
    """What must confine it, or it is not started: bubblewrap's namespaces without a network, Chromium's own sandbox, or nothing.
    Lower it only for pages that you trust, where bubblewrap is refused."""
    pages: int = Field(16, ge=1)
    """Episodes in one browser at once; for more of them another browser is started beside it. Lower it when a browser that dies
    costs too many episodes, raise it to save the memory of a second browser."""
    recycle_episodes: int = Field(500, ge=1)
    """After this many episodes a browser takes no more and ends with its last; lower it when browsers grow over time."""
    browser_memory: int = Field(4096, ge=256)
    """MiB of all processes of a browser, shared pages counted once for each; beyond it the browser takes no more episodes. Raise it
    with ``pages``."""
    page_memory: int = Field(768, ge=64)
    """MiB that one page may fill; beyond it the page is ended, as the policy's doing once it has acted. Raise it for heavy
    pages such as maps and spreadsheets."""
    launch_timeout: float = Field(30.0, gt=0)
    """Seconds in which the browser must be there, and an empty page in it. Raise it on machines that are very busy."""
    load_timeout: float = Field(20.0, gt=0)
    """Seconds in which the episode's page must be loaded; beyond it the environment failed, never the policy. Keep it below
    ``episode.reset_timeout``."""
    action_timeout: float = Field(10.0, gt=0)
    """Seconds for a turn's actions and the screenshot after them. When the page, and nothing else, does not answer by then,
    the policy's action made it hang: the episode ends as ``tool_deadline``. Keep it below half of ``episode.step_timeout``."""
