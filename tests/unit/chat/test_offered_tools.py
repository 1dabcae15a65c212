"""What an agent offers as a tool's parameters is checked, and not kept when it is large."""

import pytest
from pydantic import ValidationError

from rayloop.chat.openai import api
from rayloop.chat.openai.api import ToolFunction


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(3000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(ValidationError, match="nested too deeply"):
        ToolFunction(name="f", parameters=schema)


def test_a_large_schema_is_not_kept() -> None:
    before = api._schema_error.cache_info().currsize
    ToolFunction(name="f", parameters={"description": "x" * (api.CACHED_SCHEMA_CHARACTERS + 1)})
    assert api._schema_error.cache_info().currsize == before
    ToolFunction(name="f", parameters={"description": "no other has this"})
    assert api._schema_error.cache_info().currsize == before + 1
    with pytest.raises(ValidationError, match="not a JSON schema"):
        ToolFunction(
            name="f",
            parameters={"type": 7, "description": "x" * (api.CACHED_SCHEMA_CHARACTERS + 1)},
        )
