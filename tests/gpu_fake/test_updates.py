"""An update of each shipped configuration with GPUs, by the trainer itself, on a CUDA device whose
tensors have no values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.train import flops
from rayloop.estimate.memory import CARDS, CUDA_CONTEXT_GIB
from tests.gpu_fake.models import Row, configurations, run_of, shape_of, write_model
from tests.gpu_fake.table import PEAKS, measured

pytestmark = [
    pytest.mark.gpu_fake,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="g++ is not installed: it compiles the device"
    ),
    pytest.mark.timeout(900),
]
TABLE: dict[str, float] = json.loads(PEAKS.read_text(encoding="utf-8"))
CARD = 80
ONCE = {
    "check_counts",
    "count_denominators",
    "equal_passes",
    "_update",
    "_global_norm",
    "summarize",
    "finalize",
}
"""Functions that wait for the device once in an update, however many micro-batches it has."""

QWEN3_VL = {"_inputs", "forward", "torch_compilable_check", "_deepstack_process", "backward"}
"""Functions that wait for the device in each micro-batch of Qwen3-VL.

Its tower reads the images' sizes from the device, and transformers finds the image tokens of the
first layers (DeepStack, arXiv:2406.04334) by a mask, in both passes.
"""

Found = dict[str, Any]


@pytest.fixture(scope="session")
def every() -> dict[str, Found]:
    """What was measured, by configuration."""
    return measured(configurations())


@pytest.fixture(params=sorted(TABLE))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def found(every: dict[str, Found], name: str) -> Found:
    return every[name]


def test_the_table_has_every_configuration(every: dict[str, Found]) -> None:
    assert sorted(TABLE) == sorted(every), "python -m tests.gpu_fake.table"


def test_an_update_needs_the_memory_that_it_did(found: Found, name: str) -> None:
    """Much below: write it down (``python -m tests.gpu_fake.table``), and mend the comments that
    name it.
    """
    assert found["peak_gib"] == pytest.approx(TABLE[name], rel=0.03), found["at_peak"]


def test_an_update_fits_the_card(found: Found, name: str) -> None:
    """Of a card that the trainer shares, it may have its part."""
    share = min(1.0, run_of(name).policy.placement.num_gpus)
    assert found["peak_gib"] + CUDA_CONTEXT_GIB <= share * CARDS[CARD]


def test_rows_of_arpo_leave_space_on_four_cards(every: dict[str, Found]) -> None:
    name = "recipes/arpo/arpo.yaml"
    assert run_of(name).policy.ranks == 4
    assert every[name]["peak_gib"] + CUDA_CONTEXT_GIB + 10 <= CARDS[CARD]


def test_the_estimate_is_that_memory(found: Found) -> None:
    assert found["estimate_gib"] == pytest.approx(found["peak_gib"], rel=0.05), (
        found["estimate"],
        found["at_peak"],
    )


@pytest.mark.parametrize(
    "name", ["recipes/arc_vision/arc_vision.yaml", "recipes/presets/gpu_1.yaml"]
)
def test_what_is_offloaded_is_in_main_memory_for_the_estimate_too(
    name: str, every: dict[str, Found]
) -> None:
    path = f"{name}+policy.engine.cpu_offload=true"
    found = measured([Path(path)])[path]
    assert found["estimate"].keys() == {"gathered", "activations", "logits"}
    assert found["estimate_gib"] == pytest.approx(found["peak_gib"], rel=0.05), (
        found["estimate"],
        found["at_peak"],
    )
    assert found["peak_gib"] < 0.6 * every[name]["peak_gib"]


def test_all_tensors_are_on_the_device(found: Found) -> None:
    assert found["devices"] == ["cuda:0"]


def test_only_micro_batches_of_qwen3_vl_wait_for_the_device(found: Found, name: str) -> None:
    expected = QWEN3_VL if shape_of(run_of(name)).family == "qwen3_vl" else set()
    waiting = {place.rpartition(" ")[2] for place in found["waits"]}
    assert waiting - ONCE == expected, found["waits"]


def test_each_unit_is_gathered_twice_and_reduced_once(found: Found, name: str) -> None:
    """The root stays gathered between the passes; a frozen tower has no backward pass, for which
    FSDP prefetches one unit in vain. One rank gathers nothing.
    """
    config = run_of(name)
    policy, shape = config.policy, shape_of(config)
    layers, depth = shape.text["num_hidden_layers"], shape.tower["depth"]
    if policy.ranks == 1:
        assert "all_gathers" not in found
        return
    trained, embedding = policy.engine.trains_vision, not shape.text["tie_word_embeddings"]
    assert found["all_gathers"] == 1 + 2 * (layers + 2 * embedding) + (
        2 * depth if trained else depth + 1
    )
    assert found["reduce_scatters"] == 1 + layers + 2 * embedding + (depth if trained else 0)


def test_members_that_share_a_prompt_run_one_masked_kernel(found: Found, name: str) -> None:
    config = run_of(name)
    row, layers = Row.longest(config), shape_of(config).text["num_hidden_layers"]
    assert found["attention"].get("masked", 0) == (
        2 * layers if row.share and row.trajectories > 1 else 0
    ), "forward, and again"
    assert max(found["padded_queries"].values()) < 0.1


def test_products_are_those_of_the_formula(every: dict[str, Found]) -> None:
    """``benchmarks.train.flops``, whose part that is linear in the tokens are the products.

    Layers are computed twice forward, but for the last product of each, the MLP's projection down:
    torch stops when it has what the backward pass needs.
    """
    name = "recipes/presets/gpu_8.yaml"
    row, shape = Row.longest(run_of(name)), shape_of(run_of(name))
    text, tower = shape.text, shape.tower

    def products(tokens: int, predicted: int) -> float:
        head = 6.0 * text["hidden_size"] * text["vocab_size"]
        linear = 2 * flops(text, 1, 0, tokens) - flops(text, 1, 0, 2 * tokens) / 2 - head * tokens
        down = (
            2.0
            * text["num_hidden_layers"]
            * text["hidden_size"]
            * text["intermediate_size"]
            * tokens
        )
        return 4 / 3 * (linear + head * predicted) - down

    patches = 4 * row.lengths.images
    layer = 4 * tower["hidden_size"] ** 2 + 3 * tower["hidden_size"] * tower["intermediate_size"]
    expected = (
        products(row.tokens, row.trajectories * row.lengths.response)
        + 8 * tower["depth"] * layer * patches
    )
    expected -= 2 * tower["depth"] * tower["hidden_size"] * tower["intermediate_size"] * patches
    assert every[name]["flops"]["products"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [("mobilegym", 4.44e9), ("webgym", 17.53e9 / 2)],
    ids=["4B", "8B, by the bytes of its files in bfloat16"],
)
def test_a_shape_has_the_parameters_of_its_model(
    recipe: str, parameters: float, tmp_path: Path
) -> None:
    write_model(run_of(f"recipes/screen_agents/{recipe}.yaml"), tmp_path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    assert model.num_parameters() == pytest.approx(parameters, rel=1e-3)


def test_the_recipes_with_gpus_are_found() -> None:
    assert Path("recipes/presets/gpu_1.yaml") in configurations()
