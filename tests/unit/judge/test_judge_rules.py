"""Rules for short answers: what they decide, and what they leave to a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rayloop.core.groups import Scored
from rayloop.judge.api import JudgeItem
from rayloop.judge.client import ClientSettings
from rayloop.judge.grader import decide as decide_item
from rayloop.judge.prompt import sanitise
from rayloop.judge.reward import JudgeReward
from rayloop.judge.rubric import calibration, load_rubrics
from rayloop.judge.rules.decision import decide, items, mean_relative_accuracy
from rayloop.judge.rules.plain import boxed, extract, is_blank, plain
from rayloop.judge.rules.quantities import first_number, quantity
from rayloop.judge.rules.question import Question
from tests.support.growth import grows_with_length

RUBRIC = load_rubrics()["equivalence"]
PAIRS = yaml.safe_load(
    (Path(__file__).parents[2] / "data" / "judge" / "rule_pairs.yaml").read_text(encoding="utf-8")
)
LABELS = {"right": True, "wrong": False, "open": None}


def pairs() -> list[tuple[str, str, str, str, str, str]]:
    """What the pair is about, question, source, reference, answer, label."""
    return [
        (group["about"], group.get("question", ""), group.get("source", ""), *pair)
        for group in PAIRS["groups"]
        for pair in group["pairs"]
    ]


@pytest.mark.parametrize(("about", "question", "source", "reference", "answer", "label"), pairs())
def test_rules_decide(
    about: str, question: str, source: str, reference: str, answer: str, label: str
) -> None:
    item = JudgeItem(question=question, source=source, reference=reference, answer=answer)
    decision = decide_item(RUBRIC, item)
    assert decision.correct is LABELS[label], (about, decision)
    assert bool(decision.rule) == (label != "open")


@pytest.mark.parametrize(
    "pair", PAIRS["disputed"], ids=lambda pair: f"{pair['reference']}-{pair['answer']}"
)
def test_disputed_pairs_are_left_to_a_model(pair: dict[str, str]) -> None:
    assert pair["why"]
    asked = {key: pair.get(key, "") for key in ("question", "source", "reference", "answer")}
    assert decide_item(RUBRIC, JudgeItem(**asked)).correct is None


def test_every_label_is_tried_in_many_pairs() -> None:
    labels = [label for *_, label in pairs()]
    assert set(labels) == set(LABELS)
    assert min(labels.count(label) for label in LABELS) >= 50


def test_an_overlong_answer_is_wrong_unless_it_is_the_reference() -> None:
    assert decide("x", "x" * 1000).rule == "too_long"
    assert decide("x", "x" * 999).rule != "too_long"
    assert decide("x" * 1001, "x" * 1001).correct is True


def test_a_long_reference_is_compared_letter_by_letter_only() -> None:
    text = "1, " * 3000 + "2"
    assert decide(text, text, max_length=10**6).correct is True
    assert decide(text, "1", max_length=10**6).correct is None


def test_a_tolerance_is_relative_and_for_measured_values_only() -> None:
    def said(reference: str, answer: str, question: str = "What is the value?") -> bool | None:
        return decide(reference, answer, question=question, tolerance=0.05).correct

    assert said("10.0", "10.4") is True
    assert said("-10.0", "-10.4") is True
    assert said("$100", "$104") is True
    assert said("100", "104") is None
    assert said("100", "106") is False
    assert said("-100", "104") is None
    assert said("-100", "106") is False
    assert said("10.0", "10.4", "Which decile?") is None
    assert said("100", "104", "How many are there?") is None
    assert said("100", "104", "Which page?") is None
    assert said("2010", "2011", "Which year?") is False
    assert said("2010", "2011") is None
    assert decide("100", "104", question="What is the value?").correct is False


@pytest.mark.parametrize(
    "source",
    [
        "geometry_figures",
        "math_tables",
        "tabletop_spatial",
        "tablet_ui",
        "vsi_figure",
        "charter",
        "research",
    ],
)
def test_no_source_is_a_chart_by_accident(source: str) -> None:
    assert RUBRIC.tolerance_for(source) == 0
    assert RUBRIC.family(source) != "chart"


def test_a_source_is_known_by_whole_words() -> None:
    assert {
        RUBRIC.tolerance_for(name)
        for name in ("chart", "ChartQA", "my/chart_qa", "plotqa-v2", "evochart")
    } == {0.05}
    assert all(RUBRIC.is_formula(name) for name in ("math_8k", "gsm8k", "geometry3k", "mathvista"))
    assert RUBRIC.family("hr_bench_4k") == RUBRIC.family("v_star") == "visual_search"
    assert RUBRIC.family("tv_starwars") == "default"


def test_no_rule_contradicts_a_label() -> None:
    decided = [(one, decide_item(RUBRIC, one.item)) for one in calibration()]
    wrong = [
        (one.id, d)
        for one, d in decided
        if d.correct is not None and d.correct is not (one.verdict == "correct")
    ]
    assert not wrong
    assert not [one.id for one, d in decided if one.attack and d.correct]
    nothing = [(one.item, d) for one, d in decided if one.kind in ("empty", "opener")]
    assert {(item.reference, item.answer) for item, d in nothing if d.correct is None} == {
        ("SUMMER SALE", "Solution"),
        ("Very satisfied", "Solution"),
        ("back-left", "解"),
        ("Norway, Finland", "-"),
        ("chair, lamp, door, sink", "かいせつ"),
    }, "a word or a dash may be meant where words are wanted"
    assert sum(d.correct is True for _, d in decided) >= 55
    assert sum(d.correct is False for _, d in decided) >= 85


def test_options_are_read_from_the_question() -> None:
    assert Question("Which? (A) cat (B) a dog").options == {"A": "cat", "B": "dog"}
    assert Question("Which?\nA. cat\nB. dog\nAnswer with a letter.").options == {
        "A": "cat",
        "B": "dog",
    }
    assert Question("Which? (a) cat (b) dog").options == {"A": "cat", "B": "dog"}
    assert Question("Which picture? (A) (B) (C)").options == {"A": "", "B": "", "C": ""}
    assert Question("Who is A. Smith?").options == {}
    assert Question("Which? (A) The dog (B) WWW").options == {"A": "dog", "B": "WWW"}
    assert Question("A: 3, B: 4. Which is larger?").options == {"A": "", "B": ""}
    assert Question("A. B\nB. A").options == {}
    assert Question("A. B\nB. A").ambiguous
    assert Question("Ａ．O Ｂ．A").ambiguous
    assert not Question("Who is A. Smith?").ambiguous


def test_long_lists_are_left_to_a_model() -> None:
    short, long = (", ".join(f"w{i}" for i in range(n)) for n in (64, 65))
    found = items(short)
    assert found is not None
    assert len(found[1]) == 64
    assert items(long) is None


PIECES = [
    "1",
    "2",
    "0",
    "9",
    "999",
    "1e",
    "e",
    "E",
    "10^",
    "x10^",
    "×",
    "^{",
    "}",
    "{",
    "/",
    "\\frac{",
    "\\boxed{",
    "\\text{",
    "%",
    "$",
    "€",
    ".",
    ",",
    "-",
    "−",
    "+",
    "k",
    "million",
    "half",
    "ten",
    "two-",
    "²",
    "⁵",
    "½",
    "٣",
    "m",
    "m2",
    "km/h",
    "per",
    "square",
    "°",
    "'",
    '"',
    "(",
    ")",
    "[",
    "]",
    "A",
    "B.",
    "yes",
    "no",
    "and",
    "or",
    ">",
    "->",
    "the",
    "inf",
    "nan",
    "İ",
    "ß",
    "ﬀ",
    "_",
    "1,000",
    ",000",
    "!",
    "?",
    "\u3164",
    "\ud83d",
    " ",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=7).map("".join) | st.text(max_size=60)


@given(TEXTS, TEXTS, TEXTS, st.sampled_from((0.0, 0.05)), st.booleans())
@example("1e999", "1e-999", "", 0.05, True)
@example("5 m", "1 " + "/".join("m" * 400), "", 0.0, False)
@example("9" * 999, "9" * 998 + "8", "", 0.05, False)
@example("(" * 400, "[" * 400, "A. ( B. [", 0.0, True)
def test_any_texts_get_a_decision(
    reference: str, answer: str, question: str, tolerance: float, exact: bool
) -> None:
    decision = decide(reference, answer, question=question, tolerance=tolerance, exact=exact)
    assert decision.correct in (True, False, None)
    assert (
        decide(reference, answer, question=question, tolerance=tolerance, exact=exact) == decision
    )


@given(TEXTS, TEXTS)
def test_the_reference_itself_is_right_whatever_is_asked(text: str, question: str) -> None:
    for answer in (text, f" {text}\n"):
        assert decide(text, answer, question=question).correct is not is_blank(text)


@given(TEXTS)
def test_only_a_blank_text_has_an_empty_plain_form(text: str) -> None:
    assert bool(plain(text)) == bool(text.split())


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_whole_numbers_are_equal_or_not(first: int, second: int) -> None:
    assert (
        decide(str(first), str(second)).correct is (first == second) or (first - second) % 100 == 0
    )
    assert decide(f"{first:,}", str(first)).correct is True


@given(st.floats(-1e9, 1e9, allow_nan=False))
def test_a_number_equals_itself_however_written(number: float) -> None:
    text = f"{number:.6f}"
    found = quantity(text)
    assert found is not None
    assert found.value == Fraction(text)
    assert decide(text, f"{float(text):,.6f}").correct is True


HOSTILE: dict[str, tuple[Callable[[str], object], Callable[[int], str]]] = {
    "boxes that never close": (boxed, lambda n: "\\boxed{" * n),
    "boxes in an answer block": (
        lambda text: extract(text, "tagged_box"),
        lambda n: "<answer>" + "\\boxed{" * n + "</answer>",
    ),
    "boxes that all close": (boxed, lambda n: "\\boxed{" * n + "}" * n),
    "tags that never close": (lambda text: extract(text, "tag"), lambda n: "<answer>" * n),
    "tokens in tokens": (lambda text: sanitise(text, 10**6), lambda n: "<s" * n + ">" * n),
    "bars in bars": (lambda text: sanitise(text, 10**6), lambda n: "<|" * n + "|>" * n),
    "a list": (
        lambda text: decide(text, text + ", x", max_length=10**6),
        lambda n: ",".join(f"w{i}" for i in range(n)),
    ),
    "a reversed list": (
        lambda text: decide(text, text[::-1], max_length=10**6),
        lambda n: "a, b" * n,
    ),
    "mark-up": (plain, lambda n: "the answer is **\\text{" * n),
    "slashes": (lambda text: decide("1 m", text, max_length=10**6), lambda n: "1 m" + "/m" * n),
    "options": (lambda text: Question(text).options, lambda n: "(A) a (B) b" * n),
}


@pytest.mark.parametrize(("work", "text"), HOSTILE.values(), ids=HOSTILE.keys())
def test_time_grows_with_the_length_not_with_its_square(
    work: Callable[[str], object], text: Callable[[int], str]
) -> None:
    assert grows_with_length(work, text, 4_000)


def test_mean_relative_accuracy() -> None:
    assert mean_relative_accuracy(10, 10) == 1
    assert mean_relative_accuracy(10, 9.7) == 1
    assert mean_relative_accuracy(10, 5) == 0
    assert mean_relative_accuracy(10, 7.9) == 0.6
    assert mean_relative_accuracy(0, 0) == 1
    assert mean_relative_accuracy(0, 1) == 0
    assert mean_relative_accuracy(-10, -9.7) == 1


@pytest.mark.parametrize(("reference", "answer"), [(10, 8.5), (10, 11.5), (100, 85), (20, 17)])
def test_an_error_of_exactly_fifteen_per_cent_is_not_below_it(
    reference: float, answer: float
) -> None:
    assert mean_relative_accuracy(reference, answer) == 0.7


def test_first_number() -> None:
    assert first_number("I count 3 chairs, answer 10") == 3
    assert first_number("about 1,250.5 m") == 1250.5
    assert first_number("none") is None
    assert first_number("１２ men") == 12
    assert first_number("1,0000") == 1


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("<answer>\n\\boxed{blue}\n</answer>", "tagged_box", "blue"),
        ("<answer>blue</answer>", "tagged_box", "blue"),
        ("<answer>a</answer> then <answer> b </answer>", "tag", "b"),
        ("<answer>a <answer>b</answer>", "tag", "b"),
        ("\\boxed{blue}", "tagged_box", None),
        ("no tags", "tag", None),
        ("so \\boxed{\\frac{1}{2}}.", "box", "\\frac{1}{2}"),
        ("\\boxed{a} and \\boxed{b", "box", "a"),
        ("\\boxed{b", "box", None),
        ("first\nlast ", "last_line", "last"),
        ("  ", "last_line", None),
        (" all of it ", "whole", "all of it"),
    ],
)
def test_extract(text: str, how: str, answer: str | None) -> None:
    assert extract(text, how) == answer  # type: ignore[arg-type]


def test_boxes_nest() -> None:
    assert boxed("\\boxed{\\boxed{blue}}") == "blue"
    assert boxed("\\boxed{a{b}c}") == "a{b}c"
    assert boxed("\\boxed{{7}}") == boxed("\\boxed{{{7} }}") == "7", (
        "braces around all of it only group"
    )
    assert boxed("\\boxed{{1},{2}}") == "{1},{2}"
    assert boxed("\\boxed{{}}") == ""


def test_a_brace_after_a_backslash_is_text() -> None:
    assert boxed(r"\boxed{a\}}") == r"a\}"
    assert boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert boxed(r"\boxed{a\\}") == r"a\\"
    assert boxed(r"\boxed{a\}") is None


TOKENS = [
    "<fim_prefix>",
    "<fim_suffix>",
    "<file_sep>",
    "<gh_stars>",
    "<reponame>",
    "<pad_0>",
    "<minimax:tool_call>",
    "<arg_key>",
    "]~b]",
    "[e~[",
    "]~!b[",
    "<seed:think>",
    "<seed:bos>",
    "<[begin▁of▁sentence]>",
    "<[end▁of▁sentence]>",
    "<ctrl99>",
    "<role>",
    "</role>",
    "<arg_value>",
    "<observation>",
    "<human>",
    "<R1>",
    "<escape>",
    "<fake_token_around_image>",
    "<row_1_col_1>",
    "<global-img>",
    "<doc_sep>",
    "<empty_output>",
    "<|im_start|>",
    "<s>",
    "[INST]",
    "<<SYS>>",
    "[IMG]",
]


@pytest.mark.parametrize("token", TOKENS)
def test_special_tokens_do_not_reach_a_model(token: str) -> None:
    assert sanitise(f"a{token}b", 100) == "ab"
    assert token not in sanitise(f"{token[:2]}{token}{token[2:]}", 100), (
        "nor come about by a removal"
    )


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "a[0][1]", "x ]~ y", "<b>bold</b>", "[[1,2],[3,4]]", "a < b > c", "<row>", "<file>"],
)
def test_what_only_looks_alike_stays(text: str) -> None:
    assert sanitise(text, 100) == text


@pytest.mark.parametrize(
    "head", ["<fim", "<", "<|", "<unused", "<tool_", "[END_", "[IMG_", "<candidate", "]~", "<["]
)
def test_no_answer_keeps_the_judge_busy(head: str) -> None:
    """A regular expression that can split a text in many ways tries them all where the end is none
    of a token.
    """
    began = time.thread_time()
    for part in ("_a", "a_", "1", "_1", "-a", "-", ":", " ", "/", "~"):
        for end in ("!>", "!]", ">", "]"):
            sanitise((head + part * ((78 - len(head)) // len(part)) + end) * 5, 32_768)
    assert time.thread_time() - began < 2


def test_a_reward_that_a_rule_decides_has_its_reason() -> None:
    source = JudgeReward(JudgeReward.Settings(judge=ClientSettings(url="http://127.0.0.1:9")))
    found = asyncio.run(source.grade("2+2?", "4", "4", "math", 5.0))
    assert isinstance(found, Scored)
    assert (found.value, found.reason) == (1.0, "exact: the same text")
