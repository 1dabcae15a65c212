"""Traces of foreign loops become trajectories, or are refused where they do not agree with
themselves.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rayloop.core.failures import DataFailure
from rayloop.core.traces import Trace, branches
from rayloop.core.types import FinishReason, ImageRef, Sampling, TrajectoryId, Version

PAD = 99
PICTURE = ImageRef("ab" * 32, 28, 56, (1, 2, 4), 2)
SMALL = ImageRef("cd" * 32, 28, 28, (1, 2, 2), 1)
TRACE = Trace(
    (1, PAD, PAD, 2, 7, 8, 3, PAD, 9),
    (False,) * 4 + (True,) * 2 + (False,) * 2 + (True,),
    (0.0,) * 4 + (-0.5, -1.0) + (0.0,) * 2 + (-0.25,),
    (Version(0, 3), Version(1, 4)),
    (FinishReason.STOP_STRING, FinishReason.LENGTH),
    (PICTURE, SMALL),
    {SMALL.sha256: b"png"},
)


def test_a_trace_is_the_trajectory_that_an_episode_would_have_been() -> None:
    made = TRACE.trajectory(
        TrajectoryId(5, 1), "task", Sampling(0.9), image_token=PAD, env_result=0.5
    )
    assert [turn.role for turn in made.turns] == ["prompt", "assistant", "user", "assistant"]
    assert [turn.images for turn in made.turns] == [(PICTURE,), (), (SMALL,), ()]
    assert [turn.version for turn in made.sampled_turns] == [Version(0, 3), Version(1, 4)]
    assert [turn.finish for turn in made.sampled_turns] == [
        FinishReason.STOP_STRING,
        FinishReason.LENGTH,
    ]
    flat = made.flatten()
    assert tuple(flat.token_ids) == TRACE.token_ids
    assert tuple(flat.loss_mask) == TRACE.sampled_mask
    assert tuple(flat.rollout_logprobs) == TRACE.logprobs
    assert (made.env_result, made.image_bytes) == (0.5, {SMALL.sha256: b"png"})
    assert Trace.of(made.turns, made.image_bytes) == TRACE


def test_a_trace_survives_json_and_may_have_log_probs_of_sampled_tokens_only() -> None:
    again = Trace.from_json(json.loads(json.dumps(TRACE.json())))
    assert again == TRACE
    short = dataclasses.replace(TRACE, logprobs=(-0.5, -1.0, -0.25))
    one, other = (
        t.trajectory(TrajectoryId(0, 0), "t", Sampling(), image_token=PAD) for t in (TRACE, short)
    )
    assert one == other


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampled_mask": TRACE.sampled_mask[1:]}, "differ in length"),
        ({"logprobs": TRACE.logprobs[2:]}, "differ in length"),
        ({"logprobs": (*TRACE.logprobs[:-1], 0.5)}, "not a log-prob"),
        ({"logprobs": (*TRACE.logprobs[:-1], float("nan"))}, "not a log-prob"),
        ({"logprobs": (*TRACE.logprobs[:-1], -float("inf"))}, "not a log-prob"),
        ({"versions": TRACE.versions[:1]}, "differ in number"),
        ({"finishes": TRACE.finishes[:1]}, "differ in number"),
        (
            {"sampled_mask": (True,) * 9, "logprobs": (-1.0,) * 9, "versions": TRACE.versions[:1]},
            "there is no prompt",
        ),
        ({"sampled_mask": (False,) * 9, "versions": (), "finishes": ()}, "no answer"),
        ({"images": (PICTURE,)}, "image tokens"),
        ({"images": (PICTURE, SMALL, SMALL)}, "1 images have no image tokens"),
    ],
)
def test_what_does_not_agree_with_itself_is_refused(changes: dict[str, Any], why: str) -> None:
    broken = dataclasses.replace(TRACE, **changes)
    with pytest.raises(DataFailure, match=why):
        broken.trajectory(TrajectoryId(0, 0), "task", Sampling(), image_token=PAD)


@pytest.mark.parametrize(
    "data",
    [{}, {"token_ids": 3}, {**TRACE.json(), "versions": ["one"]}, {**TRACE.json(), "images": [{}]}],
)
def test_what_is_no_trace_is_bad_data(data: dict[str, Any]) -> None:
    with pytest.raises(DataFailure, match="is not one"):
        Trace.from_json(data)


def answer(
    prompt: list[int], *choices: list[int], version: str = "0.1", **changes: Any
) -> dict[str, Any]:
    reported = [
        {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -1.0} for _ in tokens]},
            "finish_reason": "stop",
            "weight_version": version,
            **changes,
        }
        for tokens in choices
    ]
    return {"prompt_token_ids": prompt, "choices": reported, "rayloop": {"images": []}}


def test_an_answer_continues_the_one_whose_tokens_its_prompt_begins_with() -> None:
    first = answer([1, 2], [7, 8], [7, 9])
    second = answer([1, 2, 7, 9, 3], [5], version="0.2", stop_reason="</tool_call>")
    other = answer([1, 2, 7, 6, 3], [5])  # its history is not what was sampled
    made = branches([first, second, other])
    assert [trace.token_ids for trace in made] == [
        (1, 2, 7, 8),
        (1, 2, 7, 9, 3, 5),
        (1, 2, 7, 6, 3, 5),
    ]
    assert made[1].sampled_mask == (False, False, True, True, False, True)
    assert made[1].versions == (Version(0, 1), Version(0, 2))
    assert made[1].finishes == (FinishReason.END_TOKEN, FinishReason.STOP_STRING)
    assert made[2].sampled_mask == (False,) * 5 + (True,), "what was not sampled is not trained"


def test_an_answer_without_tokens_says_how_to_ask() -> None:
    with pytest.raises(DataFailure, match="ask with logprobs and return_token_ids"):
        branches([{"choices": []}])


def test_a_trace_that_names_no_versions_is_given_one() -> None:
    data = {
        "token_ids": [1, 2, 3, 4, 5],
        "sampled_mask": [0, 1, 1, 0, 1],
        "logprobs": [0, -0.5, -1, 0, -2],
    }
    assert Trace.from_json(data, Version(0, 3)).versions == (Version(0, 3),) * 2
    with pytest.raises(DataFailure, match="versions"):
        Trace.from_json(data)
