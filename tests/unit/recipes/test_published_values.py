"""Each recipe's published.yaml: what is published is what the faithful preset sets, and what is
ours what the default sets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.engines.settings import FsdpSettings
from rayloop.estimate.memory import GIB, RoleMemory
from tests.support.runs import ROOT
from tools.pages.fits import SEVEN, THREE, of_cards, of_roles
from tools.pages.published import ABSENT, NOT_STATED, configurations, files, page, value_at

FILES = files()
ALWAYS = {"source", "default", "values", "differences"}
SECTIONS = ALWAYS | {"faithful", "cards", "sources", "missing", "prompts"}
ALLOWED = {
    "cards": ({"gpus", "gb", "from"}, set()),
    "values": ({"what", "published"}, {"key", "ours", "reason", "from"}),
    "differences": ({"what", "original", "corrected", "why", "run"}, set()),
    "missing": ({"what", "why"}, {"from"}),
    "prompts": ({"from"}, {"sha256", "file", "why"}),
}
"""Section -> what each of its entries must have, and what it may."""

COMPARED = ("algorithm", "policy.loss", "policy.update", "policy.optimizer", "evaluation")
"""Parts of a configuration each of whose keys an original must say something about."""
OURS_ALONE = {
    "algorithm.filtering.groups_per_generation": None,  # as many as a step needs
    "algorithm.replay.kind": "none",
    "algorithm.staleness.max_staleness": 0,
    "algorithm.staleness.when_late": "wait",  # nothing is late without staleness
    "algorithm.advantage.use": "",
    "algorithm.advantage.with": {},
    "policy.loss.kind": "ppo",
    "policy.loss.kl": "k3",
    "policy.loss.top_entropy_quantile": 1.0,
    "policy.loss.perception": None,
    "evaluation.limit": None,
    "evaluation.patience": None,
    "evaluation.over": {},
    "evaluation.samples": 0,
    "evaluation.solved": "reward",  # names what is counted
    "evaluation.by": [],
    "evaluation.controls": False,
    "evaluation.blind": None,
}
"""Key that an original may lack -> the value with which it changes nothing of what the original
does.
"""
SWITCHES = {"algorithm.filtering.filters": [], "evaluation.every": 0}
"""Key -> the value with which its neighbours do nothing; without filters these only make up for
what failed.
"""


def data(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def named(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def same(found: Any, said: Any) -> bool:
    if isinstance(found, list | tuple) and isinstance(said, list | tuple):
        return len(found) == len(said) and all(map(same, found, said))
    if isinstance(found, bool) or isinstance(said, bool):
        return found is said
    if isinstance(found, int | float) and isinstance(said, int | float):
        return float(found) == float(said)
    return bool(found == said)


def leaves(config: Mapping[str, Any]) -> set[str]:
    """The keys below ``COMPARED``, each as deep as the settings are: an empty mapping, or one of
    ``over``, is a value.
    """
    found = set()
    for part in COMPARED:
        settings = value_at(config, part)
        for name, value in settings.items():
            nested = isinstance(value, Mapping) and name not in ("over", "blind")
            found |= {f"{part}.{name}.{below}" for below in value} if nested else {f"{part}.{name}"}
    return found


def test_there_is_one_for_charts() -> None:
    assert ROOT / "recipes/chart_rvr/published.yaml" in FILES


@pytest.mark.parametrize("path", FILES, ids=named)
def test_its_form(path: Path) -> None:
    found = data(path)
    assert ALWAYS <= set(found) <= SECTIONS
    assert ("faithful" in found) == ("cards" in found), "memory is that of the faithful preset"
    assert {"repository", "commit", "licence"} == set(found["source"])
    for section, (must, may) in ALLOWED.items():
        for entry in found.get(section) or ():
            assert must <= set(entry) <= must | may, entry
    for entry in found["values"]:
        assert entry.get("reason") or ("key" in entry and "ours" not in entry), (
            f"{entry['what']}: a reason is needed"
        )


@pytest.mark.parametrize("path", [path for path in FILES if "sources" in data(path)], ids=named)
def test_every_value_names_its_sources(path: Path) -> None:
    found = data(path)
    missing = [entry["what"] for entry in found["values"] if not entry.get("from")]
    assert missing == []
    entries = [*found["values"], *(found.get("missing") or ()), *(found.get("prompts") or ())]
    used = {
        name.partition(":")[0]
        for entry in entries
        for name in entry.get("from", "").split(", ")
        if name
    }
    assert used == set(found["sources"])
    form = re.compile(
        r"[\w.-]+/[\w.-]+@[0-9a-f]{40}:\S+|[\w.-]+/[\w.-]+#\d+, .+|arXiv:\d{4}\.\d{5}, .+"
    )
    assert [at for at in found["sources"].values() if not form.fullmatch(at)] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_what_is_not_stated_has_our_value_and_its_reason(path: Path) -> None:
    unstated = [entry for entry in data(path)["values"] if entry["published"] == NOT_STATED]
    assert [one["what"] for one in unstated if not {"key", "ours", "reason"} <= set(one)] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_faithful_preset_has_what_is_published_and_the_default_what_is_ours(path: Path) -> None:
    default, faithful = configurations(path)
    found_data = data(path)
    wrong = []
    for entry in (entry for entry in found_data["values"] if "key" in entry):
        ours = entry.get("ours", entry["published"])
        repeated = entry["published"] != NOT_STATED and "faithful" in found_data
        said = {
            "faithful": (faithful, entry["published"] if repeated else ours),
            "default": (default, ours),
        }
        for which, (config, value) in said.items():
            found = value_at(config, entry["key"])
            if not same(None if found is ABSENT else found, value):
                wrong.append(
                    f"{entry['what']}: {entry['key']} is {found!r} in the {which} configuration,"
                    f" not {value!r}"
                )
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_key_of_the_algorithm_is_left_to_a_default(path: Path) -> None:
    """A default that the original does not have would go unseen."""
    _, faithful = configurations(path)
    compared = {entry["key"] for entry in data(path)["values"] if "key" in entry}
    assert OURS_ALONE.keys() <= leaves(faithful), "the list names keys that are gone"
    off = [
        key.rpartition(".")[0] + "."
        for key, value in SWITCHES.items()
        if key in compared and same(value_at(faithful, key), value)
    ]
    missing = {}
    for key in sorted(leaves(faithful) - compared):
        found = value_at(faithful, key)
        if not (key in OURS_ALONE and same(found, OURS_ALONE[key])) and not any(
            key.startswith(part) for part in off
        ):
            missing[key] = found
    assert missing == {}, f"{path.name} does not say what the original has"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_value_that_differs_is_another_one(path: Path) -> None:
    assert [
        e["what"] for e in data(path)["values"] if "ours" in e and same(e["ours"], e["published"])
    ] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_prompts_that_are_shipped_have_their_hash(path: Path) -> None:
    for prompt in data(path).get("prompts") or ():
        if "file" in prompt:
            text = (path.parent / prompt["file"]).read_bytes()
            assert hashlib.sha256(text).hexdigest() == prompt["sha256"], prompt["file"]
        else:
            assert prompt.get("why"), f"{prompt['from']}: why is it not shipped?"
            assert "sha256" in prompt or "sources" in data(path), prompt["from"]
    listed = [
        prompt.get("file")
        for one in path.parent.glob("published*.yaml")
        for prompt in data(one).get("prompts") or ()
    ]
    assert [
        file.name
        for file in path.parent.glob("prompts/*")
        if not file.name.startswith("LICENSE") and f"prompts/{file.name}" not in listed
    ] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_prompts_of_others_lie_beside_their_licence(path: Path) -> None:
    if any("file" in prompt for prompt in data(path).get("prompts") or ()):
        assert list(path.parent.glob("prompts/LICENSE*"))


TRL = {
    "learning rate, original: full training": 1e-6,
    "clip below": 0.2,
    "dual clip": None,
    "aggregation (dapo)": "token-mean",
    "passes over a step (num_iterations)": 1,
    "advantage": "grpo",
    "term beside the deviation": 1e-4,
    "temperature": 1.0,
    "generation": "transformers in the trainer",
    "first rows of a subset": "those of the file, shuffled",
}
"""trl/trainer/grpo_config.py and grpo_trainer.py at 8c26b7d (v0.26.2): learning_rate, epsilon
(epsilon_high is None), delta, loss_type, num_iterations, scale_rewards, the advantage's divisor,
temperature, use_vllm, shuffle_dataset.
"""
TRANSFORMERS = {
    "schedule": "linear",
    "warm-up": 0,
    "optimizer": "adamw_torch",
    "AdamW's betas": [0.9, 0.999],
    "weight decay": 0.0,
    "gradient norm": 1.0,
    "seed of order and answers": 42,
    "saves": 500,
    "checkpoints kept": "all",
}
"""transformers/training_args.py 4.57.3; ``optim`` is fused from torch 2.8 on, and the fork has
2.6.0.
"""


def test_values_that_chart_rvr_leaves_to_its_libraries_are_theirs() -> None:
    found = {
        one["what"]: one["published"]
        for one in data(ROOT / "recipes/chart_rvr/published.yaml")["values"]
    }
    assert {name: found.get(name, ABSENT) for name in TRL | TRANSFORMERS} == TRL | TRANSFORMERS


def test_shapes_have_the_parameters_that_are_published() -> None:
    """3B with adapters in Chart-RVR's log: 3,773,199,360; 7B on its model card: 8,292,166,656."""
    everywhere = FsdpSettings.model_validate({"lora": {"rank": 8}, "train_vision": True})
    assert THREE.parameters + THREE.trained(everywhere) == 3_773_199_360
    assert SEVEN.parameters == 8_292_166_656


def role(name: str, gpus: float, gib: float, spare: float = 0.0) -> RoleMemory:
    parts = {"process": 9 * GIB, "weights": round(gib * GIB), "cache": round(spare * GIB) + GIB}
    return RoleMemory(name, 2, gpus, parts, round(spare * GIB))


def test_a_preset_is_held_against_the_published_cards() -> None:
    """A GPU of 20 + 1 + 1 GiB, and one that two processes share, of 8 + 1 + 1 GiB each without the
    cache to spare.
    """
    roles = [role("policy", 1, 20), role("rollout", 0.5, 8, spare=2)]
    assert list(of_roles(roles)) == [
        ["policy", "2 x 1", "22.0", "weights 20.0, cache 1.0, CUDA 1.0", "24 GB"],
        [
            "rollout",
            "2 x 0.5",
            "10.0",
            "weights 8.0, cache 1.0, CUDA 1.0; 2.0 more for all sequences at once",
            "24 GB for all that share it",
        ],
    ]

    def held(gpus: int | None, gb: int | None) -> list[str]:
        (row,) = of_cards(roles, [{"gpus": gpus, "gb": gb, "from": "a page"}])
        return row

    assert held(3, 24) == ["3 x 24 GB (a page)", "yes", ""]
    assert held(2, 24) == ["2 x 24 GB (a page)", "no", "3 GPUs are asked for"]
    assert held(16, None) == ["16 x ? (a page)", "unknown: no card is named", ""]
    assert held(None, None) == ["? x ? (a page)", "unknown: no number and no card is named", ""]
    roles.append(role("reference", 0.5, 10))
    why = "4 GPUs are asked for; reference needs 24.0 GiB of 23.5"
    assert held(3, 24) == [
        "3 x 24 GB (a page)",
        "no",
        why,
    ], "four halves are more than a GPU: each has no more than its half"


def test_the_page_is_generated() -> None:
    assert (ROOT / "docs/published_values.md").read_text(encoding="utf-8") == page(), "make docs"


def test_a_place_is_found_with_the_defaults_of_components() -> None:
    reward = {
        "use": "rayloop.recipes.chart_rvr.rewards.reward:ChartReward",
        "with": {"weights": {"process": 0}},
    }
    config = {"reward": {"source": reward}, "over": {"a.b": 1}, "none": None}
    assert value_at(config, "reward.source.with.weights.process") == 0
    assert value_at(config, "reward.source.with.weights.format") == 1.0
    assert value_at(config, "over.a.b") == 1
    assert value_at(config, "none") is None
    assert value_at(config, "none.more") is ABSENT
    assert value_at(config, "reward.sauce") is ABSENT
