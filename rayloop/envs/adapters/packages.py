"""Code that the adapters share.

It checks for packages, loads functions that a configuration names, makes pictures of arrays, and
keeps rewards.
"""

import importlib
import logging
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from PIL import Image

from rayloop.core.failures import (
    Blame,
    Cause,
    EnvironmentFailed,
    PolicyFailure,
    blame,
    cause_of,
    raised,
)
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.reports import REFUSED, class_of
from rayloop.core.types import ImageSource, Message
from rayloop.data.images import png
from rayloop.envs.tools import ToolError

logger = logging.getLogger(__name__)

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names of this machine's loopback."""


class RewardedSteps:
    """The base of environments that reward each step.

    ``evaluate`` returns the sum of the rewards or the last one (``result``).
    """

    def __init__(self, result: Literal["sum", "last"]) -> None:
        self._result = result
        self._rewards = [0.0]
        self._last_shown: tuple[str | ImageSource, ...] = ()

    def evaluate(self) -> float:
        """Return the sum of the rewards, or the last one."""
        return sum(self._rewards) if self._result == "sum" else self._rewards[-1]

    def _reward(self, value: Any) -> float:
        """Take the reward of a step, and return it.

        Raises PolicyFailure for a reward that is not finite: the action before has led to it.
        """
        reward = float(value)
        if not math.isfinite(reward):
            raise PolicyFailure(f"the action was rewarded with {reward}")
        self._rewards.append(reward)
        return reward

    def _shown(self, *parts: str | ImageSource) -> Message:
        self._last_shown = parts
        return Message("user", parts)

    def _refused(self, reason: str) -> StepResult:
        """Return the error, and what was shown before."""
        parts = (f"Error: {reason}\n", *self._last_shown)
        return StepResult(Observation((Message("user", parts),)), error=reason)


def reported(
    protocol: str, report: str, why: str, server: str, *, acted: bool = True
) -> ToolError | PolicyFailure | EnvironmentFailed:
    """Return the exception for what a server reports, by the rows of ``core/failures.yaml``.

    ToolError: the policy sees ``why``. ``acted``: the server carried out what the policy wrote;
    without that, nothing is the policy's fault.
    """
    name = class_of(protocol, report)
    is_policys = name in (REFUSED, Blame.POLICY)
    if is_policys and acted:
        return ToolError(why) if name == REFUSED else PolicyFailure(why)
    cause = Cause.RAISED if is_policys else Cause(name)
    return EnvironmentFailed(why, cause is Cause.BUG, cause, server)


def unanswered(error: Exception, where: str, server: str) -> EnvironmentFailed:
    """Return the exception for a call that got no answer, or one that cannot be read."""
    why = f"{where}: {type(error).__name__}: {error}"
    return EnvironmentFailed(why, cause=cause_of(raised(error)), server=server)


def read_by(act: Callable[..., Any], text: str, *more: Any) -> Any:
    """Return the action that ``act`` reads in the policy's text.

    Raises ValueError, in words for the policy, for every error of ``act`` that does not blame the
    infrastructure.
    """
    try:
        return act(text, *more)
    except ValueError:
        raise
    except Exception as error:
        if blame(error) is not Blame.POLICY:
            raise
        logger.warning(
            "the text of a turn broke %s", getattr(act, "__qualname__", act), exc_info=error
        )
        raise ValueError(f"this is not an action: {type(error).__name__}: {error}") from error


def needs(package: str, extra: str = "") -> None:
    """Check that a package, of an ``extra`` or not, is installed.

    Raises ValueError, which the check of a configuration shows.
    """
    if find_spec(package) is None:
        install = f'"rayloop[{extra}]"' if extra else package
        raise ValueError(f"the package {package} is not installed: pip install {install}")


def function(use: str) -> Callable[..., Any]:
    """Return the function ``module:name``. Raises ValueError when it does not exist."""
    module, _, name = use.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{use}: {error}; a function is named module:name") from error
    if not callable(value):
        raise ValueError(f"{use} is not a function")
    result: Callable[..., Any] = value
    return result


def picture(pixels: Any) -> ImageSource:
    """Return a PNG of an array [H, W, 3] or [H, W] of integers from 0 to 255.

    Raises ValueError for another array.
    """
    array = np.asarray(pixels)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_grey = array.ndim == 2
    is_rgb = array.ndim == 3 and array.shape[2] == 3
    if not (is_grey or is_rgb) or 0 in array.shape:
        raise ValueError(
            f"no picture: an array of shape {array.shape}, expected [height, width, 3]"
        )
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
            raise ValueError(f"no picture: {array.dtype} values, expected integers from 0 to 255")
        array = array.astype(np.uint8)
    return ImageSource(data=png(Image.fromarray(array)))
