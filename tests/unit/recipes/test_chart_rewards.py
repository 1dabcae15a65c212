"""Chart-RVR's rewards: what the mended and the paper's variant pay, batches, and an embedder that
is slow, missing or wrong.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.config.settings import Component
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId, Turn
from rayloop.recipes.chart_rvr.rewards import embedders
from rayloop.recipes.chart_rvr.rewards.embedders import (
    OpenAiEmbedder,
    Similarity,
    Unavailable,
    checked,
)
from rayloop.recipes.chart_rvr.rewards.original import process_text
from rayloop.recipes.chart_rvr.rewards.reward import ChartReward

DATA = Path(__file__).parents[2] / "data" / "chart_rvr"
VECTORS: list[dict[str, Any]] = json.loads((DATA / "vectors.json").read_text(encoding="utf-8"))
EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)
WORDS = {"use": "rayloop.recipes.chart_rvr.rewards.embedders:WordEmbedder"}
TABLE = {"columns": ["Year", "Sales"], "rows": [["2019", "10"], ["2020", "20"]]}
GOOD = (
    f"<think>\n<type>bar</type>\n<table>{json.dumps(TABLE)}</table>\n<step-1>: read data\n<step-2>:"
    " 20-10=10\n</think>\n<answer>\n10\n</answer>"
)


def reward(**settings: Any) -> ChartReward:
    chosen = {} if "embedder" in settings else {"weights": {"process": 0}}
    made: ChartReward = Component.model_validate(
        {"use": "rayloop.recipes.chart_rvr.rewards.reward:ChartReward", "with": chosen | settings}
    ).build()
    return made


def row(**columns: Any) -> Task:
    return Task("t", (), columns.pop("label", "10"), extra=columns)


def scored(found: Any) -> Scored:
    async def awaited() -> Any:
        return await found

    outcome = found if isinstance(found, Scored) else asyncio.run(awaited())
    assert isinstance(outcome, Scored)
    return outcome


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_the_mended_rewards_and_the_papers_are_what_was_worked_out_by_hand(number: int) -> None:
    vector = VECTORS[number]
    task = Task("t", (), vector["label"], extra=vector)
    outcome = scored(
        reward(variant=vector["variant"]).score(
            EMPTY_TRAJECTORY, task, ScoreContext(0, [vector["completion"]])
        )
    )
    found = {name: outcome.components[name] for name in vector["expected"]}
    assert found == pytest.approx(vector["expected"]), vector.get("note")


def test_the_value_is_the_weighted_sum_of_the_seven() -> None:
    weights = {
        "format": 1,
        "accuracy": 10,
        "length": 0,
        "tags": 0.5,
        "type": 2,
        "table": 4,
        "process": 3,
    }
    task = row(chart_type="bar", table=TABLE, reasoning=process_text(GOOD))
    outcome = scored(
        reward(weights=weights, embedder=WORDS).score(
            EMPTY_TRAJECTORY, task, ScoreContext(0, [GOOD])
        )
    )
    assert outcome.components["process"] == pytest.approx(1.0)
    assert outcome.value == pytest.approx(2 + 10 + 0.5 * 2 + 2 + 4 * 2.25 + 3)
    assert outcome.flags == ()


def test_samples_of_a_batch_do_not_touch_each_other_but_in_the_original() -> None:
    broken = GOOD.replace(json.dumps(TABLE), '{"columns": [')
    for variant, second in (("original", 1.75), ("fork", 1.75), ("corrected", 0.0), ("paper", 0.0)):
        group = reward(variant=variant).score_group(
            [EMPTY_TRAJECTORY] * 2,
            row(table=TABLE),
            [ScoreContext(0, [text]) for text in (GOOD, broken)],
        )
        assert isinstance(group, Sequence)
        assert scored(group[1]).components["table"] == second
        assert ("stale_table" in scored(group[1]).flags) == (variant in ("original", "fork"))
        alone = scored(
            reward(variant=variant).score(
                EMPTY_TRAJECTORY, row(table=TABLE), ScoreContext(0, [broken])
            )
        )
        assert alone.components["table"] == 0.0
        assert "unparsable_table" in alone.flags


def test_a_true_table_is_left_as_it_is() -> None:
    table = {"columns": ["b", "A"], "rows": [["2", "1"], ["1", "2"]]}
    task = row(table=json.loads(json.dumps(table)))
    for variant in ("original", "fork", "corrected", "paper"):
        scored(reward(variant=variant).score(EMPTY_TRAJECTORY, task, ScoreContext(0, [GOOD])))
    assert task.extra["table"] == table


def test_what_made_the_original_raise_pays_nothing_and_is_flagged() -> None:
    longer = GOOD.replace('["2020", "20"]', '["2020", "20"], ["2021", "30"]')
    outcome = scored(
        reward(variant="original", embedder=WORDS).score(
            EMPTY_TRAJECTORY, row(table=TABLE), ScoreContext(0, [longer])
        )
    )
    assert outcome.components["table"] == 0.75
    assert outcome.components["process"] == 0.0
    assert outcome.flags == ("comparison_failed", "process_raised")


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"label": None}, "no label"),
        ({"label": " "}, "no label"),
        ({"table": [1]}, "table must be"),
        ({"table": "{}"}, "table"),
    ],
)
def test_a_row_that_cannot_be_scored_is_bad_data(columns: dict[str, Any], why: str) -> None:
    for variant in ("corrected", "paper"):
        with pytest.raises(DataFailure, match=why):
            reward(variant=variant).score(EMPTY_TRAJECTORY, row(**columns), ScoreContext(0, [GOOD]))


def test_answers_that_are_missing_or_cut_off_are_flagged() -> None:
    def flags(text: str) -> tuple[str, ...]:
        return scored(
            reward().score(EMPTY_TRAJECTORY, row(table=TABLE), ScoreContext(0, [text]))
        ).flags

    assert flags(GOOD) == ()
    assert flags(GOOD.removesuffix("</answer>")) == ("unclosed_answer",)
    assert flags("I do not know") == ("unparsable_table", "no_answer")


def test_the_papers_length_is_the_number_of_sampled_tokens_where_it_is_known() -> None:
    def length(tokens: int) -> float:
        turn = Turn("assistant", tuple(range(tokens)), logprobs=(0.0,) * tokens)
        played = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (turn,), Sampling(), EndReason.DONE)
        return scored(
            reward(variant="paper").score(played, row(), ScoreContext(0, [GOOD]))
        ).components["length"]

    assert [length(n) for n in (49, 50, 400, 401)] == [0.0, 1.0, 1.0, 0.0]


def test_the_papers_process_compares_steps_one_by_one_and_the_rest() -> None:
    def process(reasoning: str) -> float:
        task = row(reasoning=reasoning)
        return scored(
            reward(variant="paper", embedder=WORDS).score(
                EMPTY_TRAJECTORY, task, ScoreContext(0, [GOOD])
            )
        ).components["process"]

    assert process("<step-1>: read data <step-2>: 20-10=10") == pytest.approx(2.0)
    assert process("<step-1>: read data <step-2>: 20-10=10 <step-3>: verify") == pytest.approx(1.0)
    assert process("<step-1>: read data <step-2>: utterly different") == pytest.approx(
        (1 + 0.5) / 2 + 1
    )
    assert process("<step-1>: read data") == pytest.approx(1 / 2 + 1)
    assert process("no steps at all") == 0.0


def test_a_process_reward_without_embedder_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValidationError,
        match=r"none is configured.*\n.*OpenAiEmbedder.*\n.*TextEmbedder.*\n.*weights.process: 0",
    ):
        ChartReward.Settings()
    assert (
        "process"
        not in scored(reward().score(EMPTY_TRAJECTORY, row(), ScoreContext(0, [GOOD]))).components
    )


class Counting:
    """Vectors of texts, and how many texts came at a time."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[int] = []
        self.fails = fails

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        self.calls.append(len(texts))
        if self.fails:
            raise OSError("the server is gone")
        return [[float(len(text)), 1.0] for text in texts]


def test_texts_that_are_scored_together_are_embedded_together_and_each_once() -> None:
    embedder = Counting()
    similarity = Similarity(embedder, batch=64, wait=0.05, timeout=10)

    async def many() -> list[list[float]]:
        return await asyncio.gather(
            *(similarity.cosines([(f"text {i % 4}", "the true one")]) for i in range(20))
        )

    found = asyncio.run(many())
    assert embedder.calls == [5]
    assert len({value for [value] in found}) == 1
    small = Similarity(embedder, batch=2, wait=0.05, timeout=10)
    assert asyncio.run(small.cosines([("a", "bb"), ("ccc", ""), ("", "")]))[1:] == [0.0, 1.0]
    assert embedder.calls[1:] == [2, 1]


def test_an_empty_text_is_embedded_where_the_original_does(monkeypatch: pytest.MonkeyPatch) -> None:
    similarity = Similarity(Counting(), batch=64, wait=0.0, timeout=10)
    assert asyncio.run(similarity.cosines([("", "true"), ("", "")], empty=True)) == pytest.approx(
        [17**-0.5, 1.0]
    )
    monkeypatch.setattr(
        embedders.WordEmbedder,
        "embed",
        lambda _, texts: [[float(len(text)), 1.0] for text in texts],
    )
    task, silent = (
        row(table=TABLE, reasoning="true"),
        ScoreContext(0, ["<think><table></table></think>"]),
    )
    paid = {
        v: scored(reward(variant=v, embedder=WORDS).score(EMPTY_TRAJECTORY, task, silent))
        for v in ("original", "fork", "corrected")
    }
    assert {variant: one.components["process"] for variant, one in paid.items()} == {
        "original": pytest.approx(17**-0.5),
        "fork": pytest.approx(17**-0.5),
        "corrected": 0.0,
    }


def test_one_who_gives_up_takes_no_vector_from_another() -> None:
    similarity = Similarity(Counting(), batch=64, wait=0.2, timeout=10)

    async def two() -> list[float]:
        first, second = (
            asyncio.ensure_future(similarity.cosines([("said", "true")])) for _ in range(2)
        )
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    assert asyncio.run(two()) == [pytest.approx(1.0)]


def test_an_embedder_that_fails_is_no_reward() -> None:
    similarity = Similarity(Counting(fails=True), batch=64, wait=0.0, timeout=10)
    with pytest.raises(OSError, match="gone"):
        asyncio.run(similarity.cosines([("said", "true")]))
    for vectors in ([[1.0]], [[1.0], [1.0, 2.0]], [[1.0], [float("nan")]], [1.0, 2.0]):
        with pytest.raises(Unavailable):
            checked(vectors, 2)  # type: ignore[arg-type]


class Server(BaseHTTPRequestHandler):
    """The interface of an embedding server: vectors in any order, and what it was asked."""

    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
        data = [
            {"index": i, "embedding": [float(len(text)), 1.0]}
            for i, text in enumerate(body["input"])
        ]
        answer = json.dumps(
            {"data": data[::-1]} if body["model"] == "mini" else {"error": "no such model"}
        ).encode()
        self.send_response(200 if body["model"] != "broken" else 500)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None: ...


def test_a_server_with_the_openai_interface_is_asked_over_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EMBEDDING_KEY", "k")
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        use = {
            "use": "rayloop.recipes.chart_rvr.rewards.embedders:OpenAiEmbedder",
            "with": {"url": url, "model": "mini", "api_key_env": "EMBEDDING_KEY"},
        }
        task = row(table=TABLE, reasoning=process_text(GOOD))
        outcome = scored(
            reward(embedder=use).score(EMPTY_TRAJECTORY, task, ScoreContext(0, [GOOD]))
        )
        assert outcome.components["process"] == pytest.approx(1.0)
        assert Server.asked[0] | {"input": None} == {
            "path": "/v1/embeddings",
            "key": "Bearer k",
            "model": "mini",
            "input": None,
        }
        vectors = OpenAiEmbedder(OpenAiEmbedder.Settings(url=url, model="mini")).embed(["a", "bbb"])
        assert vectors == [[1.0, 1.0], [3.0, 1.0]]
        for model in ("other", "broken"):
            with pytest.raises(Unavailable, match="no such model"):
                OpenAiEmbedder(OpenAiEmbedder.Settings(url=url, model=model)).embed(["a"])
    finally:
        server.shutdown()
        server.server_close()
