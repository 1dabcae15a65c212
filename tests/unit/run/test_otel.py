"""The episodes of a run as OpenTelemetry spans, in a collector of this test that speaks OTLP over
HTTP.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rayloop.cluster.loop.loggers import open_logger
from rayloop.config.settings import Component
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import RolloutRecord, RolloutTurn

CALL = '<tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 1, 1]}}</tool_call>'
TURNS = (
    RolloutTurn("assistant", CALL, True, executed=True, tokens=9, times=(100.0, 101.5, 102.0)),
    RolloutTurn("tool", "an image", False, tokens=20),
    RolloutTurn("assistant", "42", True, tokens=2, times=(102.0, 103.0, 103.25)),
)
RECORD = RolloutRecord(
    3,
    1,
    0,
    "train-5",
    "digits",
    "How many?",
    (),
    TURNS,
    "done",
    0.5,
    advantage=-1.25,
    length=41,
    sampled_tokens=11,
)


class Collector(BaseHTTPRequestHandler):
    got: list[Any]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.got += [
            span
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    handler = type("Handler", (Collector,), {"got": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def opened(tmp_path: Path) -> Any:
    chosen = Component.model_validate({"use": "rayloop.run.records.otel:Episodes"})
    return open_logger(
        chosen, "named", {"model": {"path": "models/tiny"}}, RunFolder.at(tmp_path / "run")
    )


def about(span: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
    }


def test_an_episode_is_an_agent_with_chats_and_tools(
    tmp_path: Path, collector: type[Collector]
) -> None:
    logger = opened(tmp_path)
    logger.rollouts(7, [RECORD])
    logger.close()
    spans = {
        span.name: span
        for span in sorted(collector.got, key=lambda span: -span.start_time_unix_nano)
    }
    assert sorted(span.name for span in collector.got) == [
        "chat models/tiny",
        "chat models/tiny",
        "execute_tool zoom",
        "invoke_agent named",
    ]
    agent, first, tool = (
        spans["invoke_agent named"],
        spans["chat models/tiny"],
        spans["execute_tool zoom"],
    )
    assert (agent.start_time_unix_nano, agent.end_time_unix_nano) == (
        100_000_000_000,
        103_250_000_000,
    )
    assert {span.parent_span_id for span in collector.got} == {b"", agent.span_id}
    assert len({span.trace_id for span in collector.got}) == 1
    assert about(agent) | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "named",
    } == about(agent)
    assert (about(agent)["rayloop.reward"], about(agent)["gen_ai.conversation.id"]) == (
        0.5,
        "named/7/3/1",
    )
    said = about(first)
    assert (said["gen_ai.request.model"], said["gen_ai.operation.name"]) == ("models/tiny", "chat")
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (10, 9)
    assert "How many?" in said["gen_ai.input.messages"]
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (
        100_000_000_000,
        101_500_000_000,
    )
    [second] = [
        about(s) for s in collector.got if s.name.startswith("chat") and s.span_id != first.span_id
    ]
    assert (second["gen_ai.usage.input_tokens"], second["gen_ai.usage.output_tokens"]) == (39, 2)
    assert about(tool)["gen_ai.tool.name"] == "zoom"
    assert about(tool)["gen_ai.tool.call.result"] == "an image"
    assert (tool.start_time_unix_nano, tool.end_time_unix_nano) == (
        101_500_000_000,
        102_000_000_000,
    )


def test_spans_that_are_refused_are_counted(tmp_path: Path, collector: type[Collector]) -> None:
    collector.status = 400
    logger = opened(tmp_path)
    logger.rollouts(7, [RECORD])
    collector.status = 200
    logger.rollouts(8, [RECORD])
    with pytest.raises(RuntimeError, match="4 of 8 spans did not arrive"):
        logger.close()


def test_a_replayed_episode_is_not_sent_again(tmp_path: Path, collector: type[Collector]) -> None:
    import dataclasses

    logger = opened(tmp_path)
    logger.rollouts(7, [dataclasses.replace(RECORD, replayed=True)])
    logger.close()
    assert collector.got == []
