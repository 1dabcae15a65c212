"""What vLLM's chat refuses, without vLLM."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from rayloop.engines.generation.vllm_chat import RequestRefused, _parameters


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, parameters = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    monkeypatch.setattr(vllm, "SamplingParams", dict, raising=False)
    monkeypatch.setattr(
        parameters, "RequestOutputKind", types.SimpleNamespace(FINAL_ONLY=1), raising=False
    )
    monkeypatch.setattr(parameters, "StructuredOutputsParams", dict, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)


@pytest.mark.parametrize(
    "form", [{}, {"json_schema": {}}, {"json_schema": "x"}, {"json_schema": {"schema": 5}}]
)
def test_a_response_format_without_its_schema_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match="json_schema needs"):
        _parameters({"response_format": {"type": "json_schema", **form}}, 100)


def test_a_schema_is_passed_on() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": {"type": "object"}}}
    assert _parameters({"response_format": form}, 100)["structured_outputs"] == {
        "json": {"type": "object"}
    }
