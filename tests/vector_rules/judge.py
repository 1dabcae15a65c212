"""Rules for what judges, rule or model: PyVision-RL's verifiers, and its numeric accuracy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from judge import rules
from judge.answers import extract
from judge.quantities import first_number
from judge.verdict import InvalidVerdict, parse
from rayloop.core.failures import InfrastructureFailure
from tests.vector_rules.entries import Deviation, Entry, Rule, Unknown

REPLIES = {digit: json.dumps({"reason": "", "verdict": word}) for digit, word in (("1", "correct"), ("0", "incorrect"))}
"""The original's judge answers with a digit; what that means in our schema."""

RULES_FIRST = "a match that needs no judgement never asks the judge, so its state and reply do not matter"
NO_SUBSTRING = "a reply that is not the verdict's schema is no verdict: neither right nor wrong"
NOTHING_SAID = "an empty answer is wrong whatever the judge says"
TOO_LONG = "an overlong answer is wrong, and earns no bonus for being right"
LAST_COUNTS = "the last answer block counts: one in a tool's output or in the reasoning comes before it"
LENIENT = "where the answer is may be read; whether its form is paid is the recipe's business"


def _number(text: Any) -> float:
    number = first_number(str(text))
    if number is None:
        raise ValueError(f"no number in {text!r}")
    return number


def relative_accuracy(entry: Entry, file: Sequence[Entry]) -> Mapping[str, Any]:
    entry.only("response", "ground_truth")
    score = rules.mean_relative_accuracy(_number(entry.need("ground_truth")), _number(entry.need("response")))
    return {"score": score, "is_answer_right": score >= 0.5}


def answer(entry: Entry, file: Sequence[Entry]) -> Deviation:
    entry.only("text")
    text = entry.need("text")
    return Deviation(extract(text, "tagged_box"), LAST_COUNTS if len(re.findall("<answer>", text)) > 1 else LENIENT)


def verifier(entry: Entry, file: Sequence[Entry]) -> Any:
    """The answer's correctness; the forms and states that we treat otherwise are deviations."""
    entry.only("response", "ground_truth", "judge_reply", "data_source", "response_build")
    found = extract(entry.need("response"), "tagged_box")
    if found is None:
        return _result(False)
    decision = rules.decide(entry.need("ground_truth"), found)
    if decision.correct is not None:
        why = {"empty": NOTHING_SAID, "too_long": TOO_LONG}.get(decision.rule)
        return Deviation(_result(decision.correct), why or (LENIENT if entry.need("judge_reply") == "1" else RULES_FIRST))
    reply = entry.need("judge_reply")
    if reply.startswith("TimeoutError"):
        raise InfrastructureFailure(reply)
    if reply not in REPLIES:
        try:
            parse(reply, "binary")
        except InvalidVerdict:
            return Deviation(None, NO_SUBSTRING)
        raise Unknown(f"the reply {reply!r}")
    return _result(parse(REPLIES[reply], "binary").score == 1)


def _result(right: bool) -> Mapping[str, Any]:
    return {"score": float(right), "is_answer_right": right}


RULES: dict[str, Rule] = {
    r"^rule_match_verify\.compute_score_rule_mra$": relative_accuracy,
    r"^env\.extract_answer \(verifier\)$": answer,
    r"^(multi_task_verifier|general_verifier|vl_agent)\.compute_score$": verifier,
}
