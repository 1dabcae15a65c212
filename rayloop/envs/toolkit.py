"""The schemas of an environment's tools, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayloop.core.failures import EnvironmentFailed
from rayloop.core.protocols import Environment

Schema = dict[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``: what chat templates of the Hub take."""


def schemas(environment: Environment) -> list[Schema]:
    """Of the environment's ``tools``, in their order; empty when it has none. Raises EnvironmentFailed for what is no tool."""
    return [schema(tool) for tool in getattr(environment, "tools", ())]


def schema(tool: Any) -> Schema:
    """Of one tool. Raises EnvironmentFailed for what is none."""
    name, about, parameters = (getattr(tool, key, None) for key in ("name", "description", "parameters"))
    if not (isinstance(name, str) and name and isinstance(about, str) and isinstance(parameters, Mapping)):
        needs = "a name and a description (texts) and parameters (a JSON schema, a mapping)"
        raise EnvironmentFailed(f"{type(tool).__name__} is no tool: it needs {needs}", bug=True)
    try:
        plain = json.loads(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"the parameters of the tool {name} are no JSON: {error}", bug=True) from error
    return {"type": "function", "function": {"name": name, "description": about, "parameters": plain}}
