"""A logger that sends the recorded episodes as OpenTelemetry spans (GenAI conventions).

Needs the extra ``otel``.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayloop.config.settings import SettingsModel
from rayloop.core.files import utf8
from rayloop.envs.tools import ToolError, tool_call
from rayloop.run.records.rollouts import NEW_CONTEXT, RolloutRecord, RolloutTurn

SPANS_PER_REQUEST = 512
"""Spans of one request."""


class Episodes:
    """An ``invoke_agent`` span for each episode of ``rollouts/``.

    Below it are ``chat`` and ``execute_tool`` spans for each turn, with their texts. The variables
    ``OTEL_EXPORTER_OTLP_*`` of OpenTelemetry set the receiver, and how long a request may take.
    """

    class Settings(SettingsModel):
        """None."""

    def __init__(
        self, settings: Settings, name: str, config: Mapping[str, Any], folder: Path
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._name = name
        self._model = str(config["model"]["path"])
        self._exporter = OTLPSpanExporter()
        self._made = InMemorySpanExporter()
        provider = TracerProvider(
            resource=Resource.create({"service.name": "rayloop", "service.instance.id": name})
        )
        provider.add_span_processor(SimpleSpanProcessor(self._made))
        self._tracer = provider.get_tracer("rayloop")
        self.sent = self.dropped = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing: metrics go elsewhere."""

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Send the episodes of a step.

        After a request that failed, the rest of the step is dropped and counted.
        """
        for record in records:
            if not record.replayed and any(turn.times for turn in record.turns):
                self._episode(step, record)
        spans = self._made.get_finished_spans()
        works = True
        # Before the requests: spans of a step that could not be sent must not pile up in memory.
        self._made.clear()
        for begin in range(0, len(spans), SPANS_PER_REQUEST):
            some = spans[begin : begin + SPANS_PER_REQUEST]
            works = works and self._exporter.export(some).name == "SUCCESS"
            if works:
                self.sent += len(some)
            else:
                self.dropped += len(some)

    def close(self) -> None:
        """Raises RuntimeError with their number when spans were dropped."""
        self._exporter.shutdown()
        if self.dropped:
            raise RuntimeError(
                f"{self.dropped} of {self.dropped + self.sent} spans did not arrive"
                " (OTEL_EXPORTER_OTLP_ENDPOINT)"
            )

    def _span(
        self, operation: str, of: str, times: Sequence[float], parent: Any, about: Mapping[str, Any]
    ) -> Any:
        """One from the first to the last of ``times``, below the span ``parent``."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "rayloop",
            **about,
        }
        span = self._tracer.start_span(
            f"{operation} {of}",
            None if parent is None else set_span_in_context(parent),
            SpanKind.CLIENT if operation == "chat" else SpanKind.INTERNAL,
            {key: _sendable(value) for key, value in attributes.items() if value is not None},
            start_time=int(times[0] * 1e9),
        )
        span.end(int(times[-1] * 1e9))
        return span

    def _episode(self, step: int, record: RolloutRecord) -> None:
        times = [time for turn in record.turns for time in turn.times]
        fields = {
            f"rayloop.{key}": getattr(record, key)
            for key in ("task", "source", "end_reason", "reward", "advantage", "status")
        }
        id = f"{self._name}/{step}/{record.group}/{record.sample}"
        model = {"gen_ai.request.model": self._model, "gen_ai.conversation.id": id}
        tokens = record.length - sum(turn.tokens for turn in record.turns)
        usage = {
            "gen_ai.usage.output_tokens": record.sampled_tokens,
            "gen_ai.usage.input_tokens": tokens,
        }
        about = {**fields, **model, **usage, "gen_ai.agent.name": self._name, "rayloop.step": step}

        agent = self._span("invoke_agent", self._name, (min(times), max(times)), None, about)
        messages = [("user", record.prompt)]
        turns = record.turns
        for turn, following in zip(turns, (*turns[1:], None), strict=True):
            tokens = turn.tokens if turn.text == NEW_CONTEXT else tokens + turn.tokens
            if turn.sampled and turn.times:
                used = {
                    "gen_ai.usage.input_tokens": tokens - turn.tokens,
                    "gen_ai.usage.output_tokens": turn.tokens,
                }
                said = {
                    "gen_ai.input.messages": _messages(messages),
                    "gen_ai.output.messages": _messages([("assistant", turn.text)]),
                }
                self._span("chat", self._model, turn.times[:2], agent, {**model, **used, **said})
                self._tool(turn, following, agent)
            messages = [] if turn.sampled else [*messages, (turn.role, turn.text)]

    def _tool(self, turn: RolloutTurn, after: RolloutTurn | None, agent: Any) -> None:
        """The span of the environment's answer.

        There is one when the turn called a tool or acted in another way.
        """
        try:
            call = tool_call(turn.text)
        except ToolError:
            call = None
        if len(turn.times) > 2 and (call or turn.executed is not None):
            name, arguments = call or ("step", {"action": turn.text})
            about = {"gen_ai.tool.name": name, "gen_ai.tool.call.arguments": json.dumps(arguments)}
            result = {
                "gen_ai.tool.call.result": None if after is None else after.text,
                "gen_ai.tool.type": "function",
            }
            self._span("execute_tool", name, turn.times[1:], agent, about | result)


def _messages(said: Sequence[tuple[str, str]]) -> str:
    return json.dumps(
        [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in said],
        ensure_ascii=False,
    )


def _sendable(value: Any) -> Any:
    return utf8(value) if isinstance(value, str) else value
