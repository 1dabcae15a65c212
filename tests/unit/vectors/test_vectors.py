"""The originals' numbers, reproduced; and the runner that compares them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import DataFailure
from rayloop.grpo.advantage import advantages as group
from rayloop.recipes.arc_vision import reward
from rayloop.recipes.pyvision import reward as paid
from tests.support.losses import policy_loss
from tests.vector_rules import advantages, algorithm, pyvision
from tests.vectors import check, main, matches, read

FILES = sorted((Path(__file__).parents[2] / "data" / "vectors").glob("*.json"))
CASES = [(path.stem, i) for path in FILES for i in range(len(read(str(path))))]


def entry(**changes: Any) -> dict[str, Any]:
    good = {
        "recipe": "arpo",
        "reward": "grpo_outcome_advantage",
        "inputs": {"group_rewards": [1, 0]},
        "expected": [0.707106, -0.707106],
    }
    return good | changes


def run(tmp_path: Path, rows: object, *options: str) -> int:
    path = tmp_path / "vectors.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return main([str(path), *options])


@pytest.mark.parametrize(("name", "number"), CASES)
def test_agrees_with_the_original_or_says_why_not(name: str, number: int) -> None:
    (path,) = (path for path in FILES if path.stem == name)
    file = read(str(path))
    verdict = check(file[number], file)
    assert verdict.ok or verdict.why, (
        f"{verdict.entry.reward}: expected {verdict.entry.expected}, got {verdict.got}"
    )


def test_the_runner_succeeds_on_the_committed_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--strict", *map(str, FILES)]) == 0
    deliberate = (
        1 + 3
    )  # ARPO's replay: a result of exactly 0.1; what PyVision's environment shows of a failure
    summary = (
        f"{len(CASES) - deliberate} agree, 0 mismatch, 0 unknown, {deliberate} deviate on purpose"
    )
    assert summary in capsys.readouterr().out


def estimate(expected: float, logp: float = -15.0) -> dict[str, Any]:
    """Of the KL term of one token, which verl caps at 10."""
    return entry(
        recipe="all",
        reward="low_var_kl",
        inputs={"logp": [logp], "ref_logp": [0.0]},
        expected=[expected],
    )


def test_a_deliberate_deviation_is_printed_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, [estimate(10.0)], "--strict") == 0
    out = capsys.readouterr().out
    assert "DEVIATES all: low_var_kl" in out
    assert "because  the estimate of one token is bounded by its log-ratio alone" in out
    assert "0 agree, 0 mismatch, 0 unknown, 1 deviate on purpose" in out


def test_a_deviation_is_none_when_the_settings_of_the_original_disagree(tmp_path: Path) -> None:
    assert run(tmp_path, [estimate(9.9)]) == 1


def test_a_reason_excuses_only_the_entries_it_is_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, [estimate(math.exp(1) - 2, -1.0)]) == 0
    assert "1 agree, 0 mismatch, 0 unknown\n" in capsys.readouterr().out
    assert run(tmp_path, [estimate(10.0, -1.0)]) == 1


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_a_changed_number_does_not_agree(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every entry alone, each number moved by a thousandth, each string and each expected error
    replaced.

    What our code answers otherwise on purpose, and no settings express, then still does.
    """

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: change(item) for key, item in value.items() if key != "raises"}
        if isinstance(value, list):
            return [change(item) for item in value]
        return f"{value}?" if isinstance(value, str) else value + max(1e-3, 1e-3 * abs(value))

    (path,) = (path for path in FILES if path.stem == name)
    for row in json.loads(path.read_text(encoding="utf-8")):
        raises = isinstance(row["expected"], dict) and "raises" in row["expected"]
        wrong = 12.5 if raises or row["expected"] is None else change(row["expected"])
        assert (
            run(tmp_path, [row | {"expected": wrong}]) == 1
            or "1 deviate on purpose" in capsys.readouterr().out
        ), row


def test_a_wrong_vector_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [entry(), entry(expected=[0.5, -0.5])]) == 1
    out = capsys.readouterr().out
    assert "MISMATCH arpo: grpo_outcome_advantage" in out
    assert "1 agree, 1 mismatch" in out


def test_an_error_that_does_not_come_or_comes_unexpectedly_is_a_mismatch(tmp_path: Path) -> None:
    assert run(tmp_path, [entry(expected={"raises": "AssertionError"})]) == 1
    assert run(tmp_path, [entry(inputs={"group_rewards": [1]}, expected=[0.0])]) == 1
    assert (
        run(tmp_path, [entry(inputs={"group_rewards": [1]}, expected={"raises": "AssertionError"})])
        == 0
    )


def test_unknown_entries_are_listed_and_fail_only_when_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for odd in (
        entry(reward="somebody's score"),
        entry(inputs={"group_rewards": [1, 0], "temperature": 2}),
    ):
        assert run(tmp_path, [odd]) == 0
        assert "UNKNOWN" in capsys.readouterr().out
        assert run(tmp_path, [odd], "--strict") == 1


def test_inputs_of_the_wrong_kind_are_a_mismatch_not_a_crash(tmp_path: Path) -> None:
    assert run(tmp_path, [entry(inputs={"group_rewards": None})]) == 1


@pytest.mark.parametrize("rows", [{"not": "a list"}, [{"recipe": "x"}]])
def test_a_file_that_is_no_list_of_entries_is_refused(rows: object, tmp_path: Path) -> None:
    assert run(tmp_path, rows) == 2
    assert main([str(tmp_path / "absent.json")]) == 2


def test_matching_knows_kinds() -> None:
    assert matches(1, 1.000001)
    assert matches((1.0, {"a": 2, "b": 3}), [1, {"a": 2}])
    assert not matches(1.0, True)
    assert not matches(True, 1)
    assert not matches(1.0001, 1.0)
    assert not matches([1.0], [1.0, 2.0])
    assert not matches({}, {"a": 1})
    assert not matches("a", "b")
    assert not matches(0, None)
    assert matches(math.nan, math.nan)
    assert not matches(0.0, math.nan)
    assert not matches(math.nan, 0.0)
    assert matches({"raises": "ConfigError: ..."}, {"raises": "AssertionError"})
    assert not matches({"score": 0.0}, {"raises": "AssertionError"})
    assert not matches({"raises": "ConfigError: ..."}, {"score": 0.0})


def mismatches() -> int:
    files = [read(str(path)) for path in FILES]
    return sum(
        v.ok is False and not v.why
        for file in files
        for v in (check(entry, file) for entry in file)
    )


def never(*arguments: Any) -> Any:
    raise DataFailure("here", "nothing pleases me")


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "no answer is a box": (reward, "trained_box", lambda text: None),
    "no true box is one": (reward, "true_box", never),
    "every reply is a no": (pyvision.original, "verdict", lambda reply: False),
    "every answer reads XXX": (pyvision.original, "answer", lambda text: "XXX"),
    "no number is near another": (
        paid,
        "mean_relative_accuracy",
        lambda wanted, got: float(wanted == got),
    ),
    "the KL term is tripled": (
        algorithm,
        "policy_loss",
        lambda *a, **k: replace(policy_loss(*a, **k), loss=3 * policy_loss(*a, **k).loss),
    ),
    "advantages are halved": (
        advantages,
        "advantages",
        lambda *a: replace(group(*a), values=tuple(v / 2 for v in group(*a).values)),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_function_is_a_mismatch_and_no_deviation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, attribute, broken = BROKEN[name]
    if isinstance(holder, dict):
        monkeypatch.setitem(holder, attribute, broken)
    else:
        monkeypatch.setattr(holder, attribute, broken)
    assert mismatches() > 0


def test_the_default_kl_term_alone_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    right = algorithm._kl_term
    monkeypatch.setattr(
        algorithm, "_kl_term", lambda c, r, s: right(c, r, s) * (3 if s.kl == "k3" else 1)
    )
    assert mismatches() > 0
