"""The judge as a reward: what a trajectory gets when the judge answers, answers nonsense, or is
gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import yaml

from rayloop.actors.reward import RewardActor
from rayloop.config.model import ModelSettings
from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError, DataFailure, RewardLost
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import (
    EndReason,
    ImageSource,
    Message,
    Sampling,
    Task,
    Trajectory,
    TrajectoryId,
)
from rayloop.judge.api import JudgeItem, JudgeUnscored, JudgeVerdict, NoVerdict
from rayloop.judge.calibrate import DriftWatch, Gate, calibrate, drift_subset, failures, score
from rayloop.judge.client import ClientSettings, JudgeClient
from rayloop.judge.grader import Grader, decide
from rayloop.judge.reward import JudgeReward
from rayloop.judge.rubric import FOLDER, calibration, load_rubrics
from rayloop.rewards.settings import RewardSettings
from tests.support.judge_stub import JudgeStub, body, results, serving, slow, status, verdict

TASK = Task(
    "t1",
    (Message("user", ("Which colour?", ImageSource(path="a.png"))),),
    ground_truth="red",
    source="vstar",
)
TRAJECTORY = Trajectory(TrajectoryId(1, 0), 0, "t1", 0, (), Sampling(), EndReason.DONE)
RUBRIC = load_rubrics()["equivalence"]
FAST = {"backoff": 0.01, "backoff_max": 0.05, "probe_interval": 0.05}


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeStub]:
    with serving(JudgeStub()) as running:
        yield running


@pytest.fixture
def stub(server: JudgeStub) -> JudgeStub:
    server.reset()
    return server


def rewards(
    url: str,
    *answers: str,
    timeout: float = 10.0,
    task: Task = TASK,
    dry_run: bool = False,
    **settings: Any,
) -> list[Outcome]:
    """Score the answers one after the other with one reward source."""

    async def run() -> list[Outcome]:
        client = ClientSettings(url=url, **FAST, canary=settings.pop("canary", True))
        source = JudgeReward(JudgeReward.Settings(judge=client, **settings))
        try:
            return [
                await source.score(
                    TRAJECTORY,
                    task,
                    ScoreContext(
                        1, [f"thinking <answer>{a}</answer><|im_end|>"], timeout, dry_run=dry_run
                    ),
                )
                for a in answers
            ]
        finally:
            await source.client.close()

    return asyncio.run(run())


def test_a_trial_waits_for_no_judge() -> None:
    async def run(url: str, **settings: Any) -> Outcome:
        source = JudgeReward(
            JudgeReward.Settings(judge=ClientSettings(url=url, **FAST), **settings)
        )
        try:
            return await source.score(
                TRAJECTORY, TASK, ScoreContext(1, ["<answer>crimson</answer>"], 600.0, dry_run=True)
            )
        finally:
            await source.client.close()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        absent = asyncio.run(asyncio.wait_for(run(url), 15))
    assert isinstance(absent, Unscored)
    assert absent.kind is UnscoredKind.REWARD_UNAVAILABLE
    assert absent.reason.startswith(f"no judge answers ({url}: ConnectError")


def test_a_trial_gives_up_on_a_judge_that_only_fails(stub: JudgeStub) -> None:
    stub.always = status(503)
    outcome = rewards(stub.url, "crimson", timeout=600.0, dry_run=True, patience=0.5)[0]
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.REWARD_UNAVAILABLE
    assert "HTTP 503" in outcome.reason


def test_a_verdict_is_a_reward(stub: JudgeStub) -> None:
    found = rewards(stub.url, "red", "crimson", rules_first=False)
    assert [(outcome.value, outcome.components["by_model"]) for outcome in found] == [
        (1.0, 1.0),
        (0.0, 1.0),
    ]
    assert stub.asked == ["red", "crimson"]
    (asked,) = stub.requests[0]
    assert (asked["question"], asked["reference"], asked["source"]) == (
        "Which colour?",
        "red",
        "vstar",
    )


def test_verdicts_of_another_judge_are_flagged(stub: JudgeStub) -> None:
    async def run() -> list[tuple[str, ...]]:
        source = JudgeReward(JudgeReward.Settings(judge=ClientSettings(url=stub.url, **FAST)))
        found = []
        for fingerprint, answer in (("stub-1", "rose"), ("stub-2", "ruby"), ("stub-1", "wine")):
            stub.fingerprint = fingerprint
            outcome = await source.score(
                TRAJECTORY, TASK, ScoreContext(1, [f"<answer>{answer}</answer>"])
            )
            assert isinstance(outcome, Scored)
            found.append(outcome.flags)
        await source.client.close()
        return found

    assert asyncio.run(run()) == [(), ("judge_changed",), ()]


def test_rules_decide_without_a_request(stub: JudgeStub) -> None:
    found = rewards(stub.url, "The answer is red.", ":", "", "crimson")
    assert [outcome.value for outcome in found] == [1.0, 0.0, 0.0, 0.0]
    assert [outcome.components["by_model"] for outcome in found] == [0.0, 0.0, 0.0, 1.0]
    assert stub.asked == ["crimson"]


def test_only_the_answer_is_judged_without_special_tokens(stub: JudgeStub) -> None:
    rewards(stub.url, "<|im_start|>crimson<|vision_pad|>")
    assert stub.asked == ["crimson"]


def test_no_answer_is_the_policys_failure(stub: JudgeStub) -> None:
    async def run() -> Outcome:
        source = JudgeReward(JudgeReward.Settings(judge=ClientSettings(url=stub.url)))
        return await source.score(TRAJECTORY, TASK, ScoreContext(1, ["red"]))

    outcome = asyncio.run(run())
    assert outcome == Scored(0.0, {"correct": 0.0}, ("unparsable",))
    assert not stub.requests


def test_a_task_without_reference_is_bad_data(stub: JudgeStub) -> None:
    for task in (
        dataclasses.replace(TASK, ground_truth=None),
        dataclasses.replace(TASK, messages=()),
    ):
        with pytest.raises(DataFailure, match="t1"):
            rewards(stub.url, "crimson", task=task)


def test_a_rubric_that_sees_is_sent_the_paths_of_the_images(
    stub: JudgeStub, tmp_path: Path
) -> None:
    for name, more in (("equivalence", ""), ("seeing", "sees_images: true")):
        rubric = (
            (FOLDER / "equivalence.yaml")
            .read_text(encoding="utf-8")
            .replace("name: equivalence", f"name: {name}")
        )
        (tmp_path / f"{name}.yaml").write_text(f"{rubric}\n{more}\n", encoding="utf-8")
    stub.rubrics = load_rubrics(tmp_path)
    for name in ("equivalence", "seeing"):
        rewards(stub.url, "crimson", rubrics=str(tmp_path), rubric=name)
    blind, seeing = (asked for (asked,) in stub.requests)
    assert (blind["rubric"], blind["images"]) == ("equivalence", [])
    assert (seeing["rubric"], seeing["images"]) == ("seeing", [str(Path.cwd() / "a.png")])
    for pictures, what in (
        ((ImageSource(data=b"png"),), "1 images, 0 of them"),
        ((ImageSource(path="a.png"),) * 9, "9 images"),
    ):
        task = dataclasses.replace(TASK, messages=(Message("user", ("Which colour?", *pictures)),))
        with pytest.raises(DataFailure, match=what):
            rewards(stub.url, "crimson", task=task, rubrics=str(tmp_path), rubric="seeing")


def test_a_row_with_odd_characters_is_judged(stub: JudgeStub) -> None:
    task = dataclasses.replace(
        TASK, messages=(Message("user", ("Which \ud800colour?",)),), ground_truth="r\udfffed"
    )
    rewards(stub.url, "crimson", task=task)
    ((asked,),) = stub.requests
    assert (asked["question"], asked["reference"]) == ("Which colour?", "red")


def test_an_unknown_rubric_is_refused() -> None:
    with pytest.raises(ConfigError, match="equivalence"):
        JudgeReward(JudgeReward.Settings(rubric="missing"))


def test_wait_outlasts_an_outage(stub: JudgeStub) -> None:
    stub.script = [status(503)] * 7
    (outcome,) = rewards(stub.url, "crimson")
    assert outcome == Scored(0.0, {"correct": 0.0, "by_model": 1.0})


@pytest.mark.parametrize("policy", ["wait", "stop"])
def test_a_judge_that_is_gone_ends_the_run(policy: str) -> None:
    with pytest.raises(RewardLost) as lost:
        rewards("http://127.0.0.1:9", "crimson", timeout=0.3, on_unavailable=policy)
    assert "http://127.0.0.1:9" in str(lost.value)
    assert "ConnectError" in str(lost.value)
    assert "\n" not in str(lost.value)


def test_a_request_that_the_judge_refuses_ends_the_run_and_is_no_reward(stub: JudgeStub) -> None:
    stub.always = status(422)
    with pytest.raises(RewardLost, match=r"HTTP 422.*asked to fail"):
        rewards(stub.url, "crimson")


def test_exclude_leaves_out_up_to_its_budget(stub: JudgeStub) -> None:
    stub.always = status(503)
    policy = {
        "on_unavailable": "exclude",
        "patience": 0.1,
        "window": 10,
        "max_excluded_fraction": 0.2,
    }
    for outcome in rewards(stub.url, "crimson", "rose", **policy):
        assert isinstance(outcome, Unscored)
        assert outcome.kind is UnscoredKind.REWARD_UNAVAILABLE
        assert "503" in outcome.reason
    with pytest.raises(RewardLost, match=r"3 of the last 3 trajectories have no verdict.*503"):
        rewards(stub.url, "crimson", "rose", "ruby", **policy)


def test_an_answer_that_breaks_a_judge_in_good_health_is_a_failure(stub: JudgeStub) -> None:
    stub.script = [results(score=7), results(score=7)]
    (failed,) = rewards(stub.url, "crimson", on_invalid="fail")
    assert failed == Scored(0.0, {"correct": 0.0}, ("judge_invalid",))
    stub.script = [results(score=7), results(score=7)]
    (excluded,) = rewards(stub.url, "crimson")
    assert isinstance(excluded, Unscored)
    assert excluded.kind is UnscoredKind.INVALID_REWARD
    stub.script = [results(score=7)]
    (scored,) = rewards(stub.url, "crimson")
    assert scored == Scored(0.0, {"correct": 0.0, "by_model": 1.0})


def test_invalid_verdicts_of_a_sick_judge_are_not_the_policys(stub: JudgeStub) -> None:
    stub.always = results(score=7)
    (outcome,) = rewards(stub.url, "crimson", on_unavailable="exclude", window=10)
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.REWARD_UNAVAILABLE
    assert "canaries" in outcome.reason


async def nonsense(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Any) -> None:
    """No verdicts but the canary's, which are right."""
    found = [
        verdict(one["answer"].strip(".").lower() == one["reference"], stub.fingerprint)
        for one in items
    ]
    found = [
        one if asked["fresh"] else one | {"score": 7}
        for one, asked in zip(found, items, strict=True)
    ]
    await body(send, 200, json.dumps({"results": found}).encode())


def test_a_burst_of_invalid_answers_is_no_burst_of_canaries(stub: JudgeStub) -> None:
    stub.always = nonsense

    async def run() -> list[Outcome]:
        source = JudgeReward(
            JudgeReward.Settings(
                judge=ClientSettings(url=stub.url, **FAST), max_excluded_fraction=1
            )
        )
        texts = [f"<answer>shade {i}</answer>" for i in range(64)]
        found = await asyncio.gather(
            *(source.score(TRAJECTORY, TASK, ScoreContext(1, [t], 30)) for t in texts)
        )
        await source.client.close()
        return found

    assert all(isinstance(outcome, Unscored) for outcome in asyncio.run(run()))
    assert sum(any(one["fresh"] for one in items) for items in stub.requests) == 1


def test_answers_without_a_verdict_end_the_run_when_there_are_many(stub: JudgeStub) -> None:
    stub.always = nonsense
    with pytest.raises(RewardLost, match=r"3 of the last 3 trajectories have no verdict"):
        rewards(stub.url, "crimson", "rose", "ruby", window=10, max_excluded_fraction=0.2)


def test_a_model_that_cannot_see_is_no_judge_for_a_rubric_that_sees(
    stub: JudgeStub, tmp_path: Path
) -> None:
    """Its server refuses every image, so no answer with one gets a verdict; the canary without an
    image is right.
    """
    (tmp_path / "equivalence.yaml").write_text(
        (FOLDER / "equivalence.yaml").read_text(encoding="utf-8") + "\nsees_images: true\n",
        encoding="utf-8",
    )
    stub.rubrics = load_rubrics(tmp_path)

    async def blind(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Any) -> None:
        found = [
            verdict(one["answer"].strip(".").lower() == one["reference"], stub.fingerprint)
            for one in items
        ]
        refused = {
            "outcome": "unscored",
            "kind": "invalid",
            "reason": "no images",
            "fingerprint": "stub-1",
            "backend": "openai",
        }
        found = [
            refused if asked["images"] else one for one, asked in zip(found, items, strict=True)
        ]
        await body(send, 200, json.dumps({"results": found}).encode())

    stub.always = blind
    with pytest.raises(RewardLost, match="the judge is not well"):
        rewards(
            stub.url, "crimson", rubrics=str(tmp_path), on_unavailable="stop", on_invalid="fail"
        )


def test_the_rule_backend_pays_only_when_it_is_named(stub: JudgeStub) -> None:
    said = {
        "verdict": "incorrect",
        "score": 0.0,
        "backend": "rule",
        "decided_by": "rules",
        "reason": "none: no rule decides this",
    }
    stub.always = results(**said)
    with pytest.raises(
        ConfigError, match=r"has the backend rule, and this run accepts openai, vllm"
    ):
        rewards(stub.url, "crimson")
    (outcome,) = rewards(stub.url, "crimson", accept=["rule"])
    assert outcome == Scored(0.0, {"correct": 0.0, "by_model": 0.0})


def test_another_rubric_than_the_runs_is_refused(stub: JudgeStub) -> None:
    stub.rubrics = {"equivalence": RUBRIC.model_copy(update={"instructions": "Be kind."})}
    with pytest.raises(ConfigError, match=r"the rubric equivalence is .* here and .* at http"):
        rewards(stub.url, "crimson")


def test_another_judge_than_the_one_that_is_named_is_refused(stub: JudgeStub) -> None:
    assert isinstance(rewards(stub.url, "crimson", fingerprint="stub-1")[0], Scored)
    stub.fingerprint = "stub-2"
    with pytest.raises(ConfigError, match="is stub-2, and this run accepts stub-1 only"):
        rewards(stub.url, "crimson", fingerprint="stub-1")


def test_a_yes_or_no_is_no_score_between(stub: JudgeStub) -> None:
    stub.always = results(verdict="incorrect", score=0.3)
    (outcome,) = rewards(stub.url, "crimson", canary=False)
    assert isinstance(outcome, Unscored)
    assert (outcome.kind, "0.3 of a yes/no rubric" in outcome.reason) == (
        UnscoredKind.INVALID_REWARD,
        True,
    )


def test_odd_sources_and_unforeseen_failures_are_no_rewards(
    stub: JudgeStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outcome,) = rewards(stub.url, "crimson", task=dataclasses.replace(TASK, source="math\ud800"))
    assert isinstance(outcome, Scored)

    async def broken(client: JudgeClient, item: JudgeItem, patience: float) -> JudgeUnscored:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(JudgeClient, "judge", broken)
    (outcome,) = rewards(stub.url, "crimson")
    assert isinstance(outcome, Unscored)
    assert (outcome.kind, "RecursionError" in outcome.reason) == (
        UnscoredKind.REWARD_UNAVAILABLE,
        True,
    )


def test_a_canary_that_takes_too_long_is_not_the_policys_doing(stub: JudgeStub) -> None:
    stub.script = [results(score=7), results(score=7), slow(30)]
    (outcome,) = rewards(stub.url, "crimson", on_unavailable="exclude", patience=0.5, window=10)
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.REWARD_UNAVAILABLE


def scored_by_an_actor(judge: dict[str, Any], **settings: Any) -> Outcome:
    source = Component(
        use="rayloop.judge.reward:JudgeReward", **{"with": {"judge": {**FAST, **judge}}}
    )
    chosen = RewardSettings(source=source, **settings)
    with patch("rayloop.actors.reward.resolve"), patch("rayloop.actors.reward.load_tokenizer"):
        made = RewardActor(ModelSettings(path="none"), chosen)
    context = ScoreContext(1, ["<answer>crimson</answer>"], chosen.timeout)
    (outcome,) = asyncio.run(made._scoring._attempts([TRAJECTORY], TASK, [context]))
    return outcome


def test_whatever_it_raises_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str, how: str) -> str:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("rayloop.judge.reward.extract", broken)
    outcome = scored_by_an_actor({"url": "http://127.0.0.1:9"}, timeout=1.0, on_error=0.0)
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.REWARD_UNAVAILABLE


def test_a_drift_check_that_fails_is_reported(
    stub: JudgeStub, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    async def broken(watch: DriftWatch) -> float:
        raise ConfigError("the judge's key file is gone")

    monkeypatch.setattr(DriftWatch, "check", broken)
    stub.always = slow(0.1)
    rewards(stub.url, "crimson", drift_every=1)
    assert "could not be checked: ConfigError: the judge's key file is gone" in caplog.text


def test_the_reward_actor_lets_a_lost_judge_end_the_run() -> None:
    with pytest.raises(RewardLost, match=r"on_unavailable: wait, 1 s\): http://127\.0\.0\.1:9"):
        scored_by_an_actor({"url": "http://127.0.0.1:9"}, timeout=1.0)


def test_a_key_that_cannot_be_read_ends_the_run_and_is_no_reward(
    stub: JudgeStub, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"key file .*missing cannot be read"):
        scored_by_an_actor({"url": stub.url, "key_file": str(tmp_path / "missing")})
    assert not stub.requests


def test_a_judge_that_is_away_for_minutes_is_waited_for_without_any_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def away(client: JudgeClient, item: JudgeItem, patience: float) -> JudgeUnscored:
        return JudgeUnscored(kind=NoVerdict.UNAVAILABLE, reason=f"after {patience:.0f} s")

    monkeypatch.setattr(JudgeClient, "judge", away)
    with pytest.raises(RewardLost, match="after 540 s"):
        scored_by_an_actor({"url": "http://127.0.0.1:9"})


def test_many_trajectories_ask_each_question_once(stub: JudgeStub) -> None:
    stub.seconds = 0.002

    async def run() -> list[Outcome]:
        source = JudgeReward(
            JudgeReward.Settings(judge=ClientSettings(url=stub.url, **FAST), rules_first=False)
        )
        texts = [f"<answer>colour {i % 32}</answer>" for i in range(512)]
        found = await asyncio.gather(
            *(source.score(TRAJECTORY, TASK, ScoreContext(1, [t])) for t in texts)
        )
        await source.client.close()
        return found

    found = asyncio.run(run())
    assert all(isinstance(outcome, Scored) for outcome in found)
    assert len(stub.asked) == 32
    assert len(stub.requests) == 2


def test_metrics_are_served_by_the_first_process(
    stub: JudgeStub, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rewards(stub.url, "crimson", metrics_port=port)
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    assert 'judge_client_requests_total{outcome="ok"}' in page
    assert "judge_client_breaker_state 0.0" in page
    assert not caplog.records
    rewards(stub.url, "crimson", metrics_port=port)
    assert "are not served" in caplog.text


# Calibration --------------------------------------------------------------------------------------


def test_the_calibration_set_covers_what_it_should() -> None:
    items = calibration()
    assert len(items) >= 240
    assert len({one.id for one in items}) == len(items)
    assert len({(one.item.question, one.item.answer) for one in items}) == len(items)
    families = {one.family for one in items}
    assert families == {"visual_search", "chart", "math", "spatial"}
    rubric = load_rubrics()["equivalence"]
    assert all(rubric.family(one.item.source) == one.family for one in items)
    for family in families:
        part = [one for one in items if one.family == family]
        assert {one.kind for one in part if one.attack} == {
            "empty",
            "opener",
            "injection",
            "gaming",
        }
        assert {one.verdict for one in part} == {"correct", "incorrect"}
    assert {"unit", "order", "synonym"} <= {one.kind for one in items}
    assert all(one.verdict == "incorrect" for one in items if one.attack)
    assert {one.kind for one in drift_subset(items) if one.attack} == {
        "empty",
        "opener",
        "injection",
        "gaming",
    }


def test_the_rule_backend_scores_low_but_is_never_fooled() -> None:
    items = calibration()
    answers = asyncio.run(Grader(load_rubrics()).judge([one.item for one in items]))
    found = score("all", items, answers)
    assert found.attack_rate == found.false_positives == 0
    assert 0.3 < found.false_negatives < 0.6
    assert failures(found, Gate())
    assert not failures(found, Gate(min_accuracy=0.8, min_kappa=0.5))
    page = (Path(__file__).parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
    attacks = sum(one.attack for one in items)
    assert f"{len(items)} labelled answers, {attacks} of them attacks" in page
    assert f"accuracy {found.accuracy:.3f}, kappa {found.kappa:.3f}, no attack succeeds" in page
    assert f"{found.false_negatives:.0%}".replace("%", " %") in page


def test_the_page_shows_a_configuration_that_loads() -> None:
    page = (Path(__file__).parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
    shown = yaml.safe_load(page.partition("```yaml")[2].partition("```")[0])
    settings = RewardSettings.model_validate(shown["reward"])
    assert isinstance(settings.source.build(), JudgeReward)


def test_kappa_is_agreement_beyond_chance() -> None:
    items = calibration()
    right = [one for one in items if one.verdict == "correct"][:4] + [
        one for one in items if one.verdict == "incorrect"
    ][:4]

    def said(*verdicts: str) -> Any:
        return [
            JudgeVerdict(
                verdict=v, score=v == "correct", fingerprint="f", backend="rule", decided_by="model"
            )  # type: ignore[arg-type]
            for v in verdicts
        ]

    yes, no = ["correct"], ["incorrect"]
    assert score("all", right, said(*yes * 4, *no * 4)).kappa == 1
    assert score("all", right, said(*no * 4, *yes * 4)).kappa == -1
    assert score("all", right, said(*yes * 8)).kappa == 0
    one_wrong = score("all", right, said(*yes * 3, *no * 5))
    assert (one_wrong.accuracy, one_wrong.kappa, one_wrong.false_negatives) == (7 / 8, 0.75, 1 / 4)


def test_calibrate_prints_a_table_and_applies_the_gate(stub: JudgeStub) -> None:
    async def run(gate: Gate) -> tuple[bool, list[str]]:
        client, lines = JudgeClient(ClientSettings(url=stub.url, **FAST)), []
        passed = await calibrate(client, gate, 20, lines.append, drift=True)
        await client.close()
        return passed, lines

    loose = Gate(min_accuracy=0, min_kappa=-1, max_attack_rate=1, max_unscored=1)
    passed, lines = asyncio.run(run(loose))
    assert passed
    assert [line.split()[0] for line in lines[2:7]] == [
        "visual_search",
        "chart",
        "math",
        "spatial",
        "all",
    ]
    assert lines[-1] == "passes"
    passed, lines = asyncio.run(run(Gate(min_accuracy=1)))
    assert not passed
    assert lines[-1].startswith("does not pass: accuracy")


def test_calibrate_keeps_where_the_model_differs_from_the_rules(
    stub: JudgeStub, tmp_path: Path
) -> None:
    """The judge applies the rules; its model takes equal texts for right and all others for wrong,
    so it differs from some.
    """
    rubrics, kept = load_rubrics(), tmp_path / "kept.json"

    def ruled(item: JudgeItem) -> bool | None:
        return decide(rubrics[item.rubric], item).correct

    def equal(item: JudgeItem) -> bool:
        return item.answer == item.reference

    async def judge(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Any) -> None:
        found = []
        for item in map(JudgeItem.model_validate, items):
            rule = None if item.fresh else ruled(item)
            right, by = (equal(item), "model") if rule is None else (rule, "rules")
            found.append({**verdict(right, stub.fingerprint), "decided_by": by})
        await body(send, 200, json.dumps({"results": found}).encode())

    async def run() -> bool:
        client = JudgeClient(ClientSettings(url=stub.url, **FAST, canary=False))
        try:
            return await calibrate(
                client, Gate(max_attack_rate=0), 20, lambda line: None, keep=kept
            )
        finally:
            await client.close()

    stub.always = judge
    passed, found = asyncio.run(run()), json.loads(kept.read_text(encoding="utf-8"))
    by_rule = [one for one in calibration() if ruled(one.item) is not None]
    differ = {one.id for one in by_rule if ruled(one.item) != equal(one.item)}
    assert differ, "no item shows a difference"
    assert found["asked"] == len(by_rule)
    assert {one["item"] for one in found["disputed"]} == differ
    assert {one["rules"] for one in found["disputed"]} | {
        one["model"] for one in found["disputed"]
    } == {"correct", "incorrect"}
    assert (not found["problems"]) == passed
    assert (
        sum(one["count"] for one in found["scores"][:-1])
        == found["scores"][-1]["count"]
        == len(calibration())
    )


def test_a_judge_without_verdicts_does_not_pass() -> None:
    async def run() -> bool:
        client = JudgeClient(ClientSettings(url="http://127.0.0.1:9", **FAST))
        passed = await calibrate(client, Gate(max_unscored=1), 0.3, lambda line: None, drift=True)
        await client.close()
        return passed

    assert not asyncio.run(run())


def test_drift_is_reported(stub: JudgeStub, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[float | None]:
        client = JudgeClient(ClientSettings(url=stub.url, **FAST))
        watch = DriftWatch(client, 0.1, 10)
        found = [await watch.check(), await watch.check()]
        stub.always = results()
        found.append(await watch.check())
        await client.close()
        return found

    first, same, changed = asyncio.run(run())
    assert (first, same) == (None, 0)
    assert changed is not None
    assert changed > 0.5
    assert [record for record in caplog.records if "drifts" in record.getMessage()]


def test_drift_is_measured_from_the_first_verdicts_even_if_the_judge_was_away_at_first(
    stub: JudgeStub,
) -> None:
    async def run() -> list[float | None]:
        client = JudgeClient(ClientSettings(url=stub.url, **FAST))
        watch, found = DriftWatch(client, 0.1, 0.2), []
        for always, patience in ((status(503), 0.2), (None, 10), (None, 10)):
            stub.always, watch.patience = always, patience
            found.append(await watch.check())
        await client.close()
        return found

    assert asyncio.run(run()) == [None, None, 0]
