"""Rules for what judges, rule or model: PyVision-RL's verifiers, and its numeric accuracy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from judge.answers import extract
from judge.rules import decision as rules
from judge.rules.quantities import first_number
from judge.verdict import InvalidVerdict, parse
from tests.vector_rules.entries import Deviation, Entry, Refused, Rule, Unknown

RULES_FIRST = "a match that needs no judgement never asks the judge, so its state and reply do not matter"
NO_SUBSTRING = "a reply that is not the verdict's schema is no verdict: neither right nor wrong"
OUTAGE = "an outage of the judge is no verdict: the answer is neither right nor wrong"
NOTHING_SAID = "an empty answer is wrong whatever the judge says"
TOO_LONG = "an overlong answer is wrong, and earns no bonus for being right"
LAST_COUNTS = "the last answer block counts: one in a tool's output or in the reasoning comes before it"
LENIENT = "where the answer is may be read; whether its form is paid is the recipe's business"
INNER_BOX = "of a box inside an answer the innermost, last one with balanced braces holds the answer"
NO_EXAMPLES = "a source without examples of its own is judged all the same: the original never sets its variable"
SEPARATORS = "commas between groups of three digits separate thousands"

FORM = re.compile(r"<answer>\n\\boxed\{(.*?)\}\n</answer>", re.DOTALL)
"""The one form that the original reads."""
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
FAILURE = re.compile(r"[\w.]*(?:Error|Exception|Timeout)\(")
"""How a vector writes that the call of the judge raised."""
EXAMPLES = {
    "deepeyes", "minio3", "vstar", "hrbench-4k", "hrbench-8k", "ecd", "wemath-standard", "wemath-pro", "v-interaction",
    "mathvision", "wemath", "mathvista", "mathverse", "logicvista", "vsi", "longvila",
}  # fmt: skip
"""Sources for which the original's multi-task verifier has few-shot examples."""


# By hand: what the text says, without the functions under test ------------------------------------------------------


def _read(text: str) -> str | None:
    """The last answer block's last box with balanced braces, else the whole block; None without a block."""
    blocks = [part.partition("</answer>") for part in text.split("<answer>")[1:]]
    closed = [inside.strip() for inside, end, _ in blocks if end]
    if not closed:
        return None
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\s*\{", closed[-1])]):
        depth = 1
        for brace in BRACES.finditer(closed[-1], start):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                return closed[-1][start : brace.start()].strip()
    return closed[-1]


def _balanced(text: str) -> bool:
    depth = 0
    for brace in BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def _in_form(response: str, gate: bool) -> str | None:
    """The answer as the original reads it, None where the form is worth nothing there. ``gate``: tags must be balanced."""
    found = FORM.search(response)
    final = response.rpartition("</interpreter>")[2]
    unbalanced = gate and (
        response.count("<|vision_start|><|image_pad|>") != response.count("<|image_pad|><|vision_end|>")
        or final.count("<answer>") != final.count("</answer>")
    )
    if found is None or unbalanced or re.search(r"<interpreter>|<answer>|\\boxed", found[1]):
        return None
    return found[1].strip()


def _said(reply: str, grader: bool) -> bool | None:
    """What the original makes of the judge's reply; None where it raises. ``grader``: the template with yes and no."""
    if grader:
        found = re.search(r"correct: (yes|no)", reply, re.IGNORECASE)
        return found is not None and found[1].lower() == "yes" and not FAILURE.match(reply)
    if FAILURE.match(reply):
        return None
    return "1" in reply.rpartition("Judgement:")[2] if "Judgement:" in reply else reply.strip() == "1"


def _may_decide(reference: str, answer: str) -> set[bool | None]:
    """What the rules for short answers may say: right, wrong, or nothing (None)."""
    left, right = reference.strip(), answer.strip()
    if not right:
        return {False}
    if left == right:
        return {True}
    if len(right) >= 1000:
        return {False}
    if left.casefold() == right.casefold():
        return {True, None}
    number = r"-?\d+(\.\d+)?"
    if re.fullmatch(number, left) and re.fullmatch(number, right):
        return {float(left) == float(right), None}
    words = [text.casefold() for text in (left, right) if re.fullmatch(r"[A-Za-z]{3,}", text)]
    if len(words) == 2 and not any(re.match(COUNTED_OR_AGREED, word) for word in words):
        return {False, None} if re.match(OPENED, words[1]) else {None}
    return {True, False, None}


COUNTED_OR_AGREED = (
    "(yes|true|false|none|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thir|twenty|forty|fifty"
    "|hundred|thousand|million|dozen)"
)
OPENED = "(ok|sure|certainly|well|alright|solution|answer|reason|expla|analy|respon|judg|verdict|output|result|think)"


def _accuracy(reference: float, answer: float) -> float:
    if reference == 0:
        return float(answer == 0)
    return sum(abs(answer - reference) / abs(reference) < 1 - (0.5 + 0.05 * i) for i in range(10)) / 10


# Rules ---------------------------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    number = first_number(value) if isinstance(value, str) else None
    if number is None:
        raise Refused(f"no number in {value!r}")
    return number


def relative_accuracy(entry: Entry, file: Sequence[Entry]) -> Any:
    entry.only("response", "ground_truth")
    values = [entry.need(name) for name in ("ground_truth", "response")]
    score = rules.mean_relative_accuracy(*map(_number, values))
    firsts = [re.search(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.?\d+", str(value)) for value in values]
    if not any(first and "," in first[0] for first in firsts):
        return _scored(score)
    plain = [re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", str(value)) for value in values]
    by_hand = _accuracy(*(float(re.search(r"[-+]?\d*\.?\d+", text)[0]) for text in plain))  # type: ignore[index]
    return Deviation(_scored(score), SEPARATORS, instead=_scored(by_hand))


def _scored(score: float) -> Mapping[str, Any]:
    return {"score": score, "is_answer_right": score >= 0.5}


def answer(entry: Entry, file: Sequence[Entry]) -> Deviation:
    entry.only("text")
    text = entry.need("text")
    found = FORM.search(text)
    conditions = {
        LAST_COUNTS: text.count("<answer>") > 1,
        LENIENT: found is None and "<answer>" in text,
        INNER_BOX: found is not None and (r"\boxed" in found[1] or not _balanced(found[1])),
    }
    reasons = [reason for reason, holds in conditions.items() if holds]
    return Deviation(extract(text, "tagged_box"), "; ".join(reasons), instead=_read(text))


def verifier(entry: Entry, file: Sequence[Entry]) -> Any:
    """The answer's correctness: by the rules where they decide, else by the judge's reply in our schema."""
    entry.only("response", "ground_truth", "judge_reply", "data_source", "response_build")
    response, reference, reply = (entry.need(name) for name in ("response", "ground_truth", "judge_reply"))
    found = extract(response, "tagged_box")
    assert found == _read(response), f"the answer read is {found!r}, by hand it is {_read(response)!r}"
    if found is None:
        return _result(False)
    decision = rules.decide(reference, found)
    assert decision.correct in _may_decide(reference, found), f"{reference!r} against {found!r}: {decision}"
    grader, gate = entry.reward.startswith("general"), entry.reward.startswith("multi_task")
    in_form = _in_form(response, gate)
    decided, said = decision.correct is not None, _said(reply, grader)
    got: Any = _result(decision.correct) if decision.correct is not None else _judged(reply, grader)
    conditions = {
        NO_EXAMPLES: gate and in_form is not None and entry.inputs.get("data_source") not in EXAMPLES,
        LENIENT: in_form is None,
        LAST_COUNTS: in_form is not None and response.count("<answer>") > 1 and in_form != found,
        INNER_BOX: in_form is not None and not _balanced(in_form),
        NOTHING_SAID: re.search(r"[^\W_]", found) is None,
        TOO_LONG: len(found) >= 1000,
        RULES_FIRST: decided and in_form is not None and decision.correct != said,
        OUTAGE: not decided and FAILURE.match(reply) is not None,
        NO_SUBSTRING: not decided and got is None,
    }
    reasons = [reason for reason, holds in conditions.items() if holds]
    if NOTHING_SAID in reasons or TOO_LONG in reasons:
        reasons = [reason for reason in reasons if reason != RULES_FIRST]
    return Deviation(got, "; ".join(reasons))


def _judged(reply: str, grader: bool) -> Any:
    """What our code makes of a reply: a verdict, None for what is none, an error for an outage."""
    if FAILURE.match(reply):
        return {"raises": reply}
    words = {"correct: yes": "correct", "correct: no": "incorrect"} if grader else {"1": "correct", "0": "incorrect"}
    meant = words.get(reply.strip().lower())
    try:
        verdict = parse(reply if meant is None else json.dumps({"reason": "", "verdict": meant}), "binary")
    except InvalidVerdict:
        return None
    if meant is None:
        raise Unknown(f"the reply {reply!r}")
    assert (verdict.score == 1) == (meant == "correct"), f"{meant} was read as {verdict}"
    return _result(verdict.score == 1)


def _result(right: bool) -> Mapping[str, Any]:
    return {"score": float(right), "is_answer_right": right}


RULES: dict[str, Rule] = {
    r"^rule_match_verify\.compute_score_rule_mra$": relative_accuracy,
    r"^env\.extract_answer \(verifier\)$": answer,
    r"^(multi_task_verifier|general_verifier|vl_agent)\.compute_score$": verifier,
}
