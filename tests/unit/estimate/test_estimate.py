"""Estimates: steps and time by the right formula, parameters and adapters of a known model, memory
of each role.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from rayloop.cli import main
from rayloop.core.failures import ConfigError
from rayloop.engines.generation.vllm_process import common_arguments
from rayloop.engines.settings import FsdpSettings, VllmEngineSettings
from rayloop.engines.shape import ModelSource, Shape
from rayloop.estimate.memory import (
    HOST,
    Lengths,
    activations,
    card,
    fitted,
    memory,
    with_micro_batch,
)
from rayloop.estimate.run import duration, lengths, measured, most_image_tokens, plan
from rayloop.run.config import RunConfig, read
from rayloop.run.preflight import prepare
from tests.gpu_fake.models import write_model
from tests.support.runs import ROOT

PRESETS = ROOT / "recipes/chart_rvr/presets"
QUICKSTART = ROOT / "recipes/arc_vision/quickstart.yaml"
MINUTE = 60.0


@pytest.mark.parametrize(
    ("preset", "takes"),
    [
        ("paper", "95.0 days"),
        ("safe", "23.7 days"),
        ("moderate", "11.9 days"),
        ("fast", "3.5 days"),
        ("ultra_fast", "8.3 hours"),
    ],
)
def test_more_answers_a_row_are_more_steps(preset: str, takes: str) -> None:
    """At 60 s a step of four completions, as Chart-RVR's guide takes it without the answers in its
    formula.
    """
    made = plan(read(PRESETS / f"{preset}.yaml", []), None, 1280, MINUTE)
    assert made.target == 4
    assert duration(made.seconds or 0) == takes


def qwen3b() -> Shape:
    """Qwen2.5-VL-3B's linear layers: 36 of the language model, and the MLPs of 32 blocks of the
    tower.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for layer in range(36):
        at = f"model.layers.{layer}"
        sizes |= {
            f"{at}.self_attn.{name}_proj.weight": (out, 2048)
            for name, out in (("q", 2048), ("k", 256), ("v", 256), ("o", 2048))
        }
        sizes |= {f"{at}.mlp.{name}_proj.weight": (11008, 2048) for name in ("gate", "up")}
        sizes[f"{at}.mlp.down_proj.weight"] = (2048, 11008)
        sizes[f"{at}.self_attn.q_proj.bias"] = (2048,)
    for block in range(32):
        sizes |= {
            f"visual.blocks.{block}.mlp.{name}_proj.weight": (3420, 1280) for name in ("gate", "up")
        }
        sizes[f"visual.blocks.{block}.mlp.down_proj.weight"] = (1280, 3420)
        sizes[f"visual.blocks.{block}.attn.qkv.weight"] = (3840, 1280)
    text = {
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "vocab_size": 151936,
    }
    return Shape(sizes, text, {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420})


def test_charts_fit_one_card_of_40_gb_together() -> None:
    """Trainer and engine, at the guide's lengths, with a fifth left free."""
    config = with_micro_batch(prepare(read(PRESETS / "one_gpu.yaml", []))).config
    roles = [role for role in memory(config, qwen3b(), Lengths(850, 768, 320)) if role.gpus]
    assert [role.gpus for role in roles] == [0.5, 0.5]
    assert (
        sum(size for role in roles for part, size in role.parts.items() if part not in HOST)
        < 0.8 * 40 * 2**30
    )
    assert [card(role, roles) for role in roles] == [40, 40]


def test_adapters_are_counted_as_the_published_run_reports_them() -> None:
    shape = qwen3b()
    lora = FsdpSettings.model_validate({"lora": {"rank": 8}})
    assert shape.trained(lora) == 14_966_784
    assert (
        shape.trained(FsdpSettings.model_validate({"lora": {"rank": 8}, "train_vision": True}))
        == 18_576_384
    )
    assert shape.trained(FsdpSettings()) == shape.parameters
    assert (
        shape.trained(FsdpSettings(train_vision=False))
        == shape.parameters - shape.vision_parameters
    )
    assert shape.cache == 2 * 36 * 256


def run_of(**changes: Any) -> RunConfig:
    return read(
        QUICKSTART,
        [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()],
    )


LENGTHS = Lengths(1000, 200, 300)


def test_an_episode_that_may_be_all_answer_has_an_estimate() -> None:
    """Where the turns' tokens fill the episode's, nothing is left for the prompt."""
    assert memory(run_of(environment__episode__max_turns=3), qwen3b(), Lengths(0, 1200, 0))


def parts(config: RunConfig, role: str) -> dict[str, int]:
    (found,) = [one for one in memory(config, qwen3b(), LENGTHS) if one.name == role]
    return dict(found.parts)


def test_a_rank_holds_its_part_of_master_weights_gradients_and_moments() -> None:
    shape, whole = qwen3b(), parts(run_of(), "policy")
    assert [whole[name] for name in ("weights", "gradients", "optimizer")] == [
        n * shape.parameters for n in (4, 4, 8)
    ]
    half = parts(run_of(policy__ranks=2), "policy")
    assert half["optimizer"] == whole["optimizer"] // 2
    lora = parts(run_of(policy__engine__lora={"rank": 8}), "policy")
    assert lora["weights"] == 4 * (shape.parameters + 14_966_784)
    assert (lora["gradients"], lora["optimizer"]) == (4 * 14_966_784, 8 * 14_966_784)


def test_activations_follow_what_is_computed_at_once() -> None:
    whole = parts(run_of(), "policy")["activations"]
    checked = parts(run_of(policy__engine__gradient_checkpointing=True), "policy")["activations"]
    assert checked < whole / 10
    assert parts(run_of(policy__placement__num_gpus=1), "policy")["activations"] == checked, (
        "the default on a GPU"
    )
    on = {"policy__placement__num_gpus": 1, "policy__engine__gradient_checkpointing": False}
    assert parts(run_of(**on), "policy")["activations"] == whole
    small = parts(run_of(policy__engine__micro_batch_tokens=2000), "policy")["activations"]
    assert small == pytest.approx(whole / 8, rel=0.3)
    assert (
        parts(
            run_of(policy__engine__dtype="bfloat16", rollout__engine__dtype="bfloat16"), "policy"
        )["activations"]
        == whole // 2
    )
    assert parts(run_of(policy__engine__train_vision=False), "policy")["activations"] < whole


def test_only_the_first_prompt_is_shared() -> None:
    """A step of one group of eight, in one micro-batch: 1000 + 8 x 200 tokens, or 8 x 1200 where
    each turn has its observation.
    """
    step = {
        "algorithm__groups_per_step": 1,
        "algorithm__group_size": 8,
        "policy__engine__train_vision": False,
    }
    one = parts(run_of(**step), "policy")["activations"]
    many = parts(run_of(**step, environment__episode__max_turns=3), "policy")["activations"]
    cache = 2 * 256
    layer = 8 * 2048 + cache + 4 * 11008
    assert many / one == pytest.approx(
        8 * 1200 * (layer + cache) / (2600 * layer + 8 * 1200 * cache)
    )


def test_activations_are_those_that_were_measured() -> None:
    """Of the quickstart's first micro-batch.

    Training took 571 MB more than the finished model, of which gradients, moments and logits are 46
    MB; autograd kept 468 MB, weights of 15 MB among them.
    """
    config, shape = run_of(), ModelSource(str(ROOT / "recipes/arc_vision/tiny")).shape
    tokens, images = 4258, 16 * 48
    found = activations(config.policy.engine, False, shape, tokens, 240 * 90, images)
    assert found == pytest.approx(571e6 - 46e6, rel=0.05)


def smollm2() -> Shape:
    """SmolLM2-135M, whose head is tied."""
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576)}
    for layer in range(30):
        at = f"model.layers.{layer}"
        projections = (("q", 576), ("k", 192), ("v", 192), ("o", 576))
        sizes |= {f"{at}.self_attn.{name}_proj.weight": (out, 576) for name, out in projections}
        sizes |= {f"{at}.mlp.{name}_proj.weight": (1536, 576) for name in ("gate", "up")}
        sizes[f"{at}.mlp.down_proj.weight"] = (576, 1536)
    text = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    }
    return Shape(sizes, text, {})


@pytest.mark.parametrize(
    ("lengths", "tokens", "policy", "rollout"),
    [
        (Lengths(53, 56, 0), 16384, 12.3, 2.57),
        (Lengths(53, 56, 0), 1024, 6.83, 2.3),
        (Lengths(46, 36, 0), 16384, 10.4, 2.2),
        (Lengths(46, 36, 0), 1024, 6.6, 2.2),
    ],
)
def test_a_cpu_run_takes_the_memory_that_was_measured(
    lengths: Lengths, tokens: int, policy: float, rollout: float
) -> None:
    """GB of PSS, at most, of full training of a 135M model with 8 x 8 answers, whose random weights
    (53 tokens read and 56 written) or trained ones ran on two cores.
    """
    found = memory(
        run_of(
            algorithm__groups_per_step=8,
            algorithm__group_size=8,
            policy__engine__micro_batch_tokens=tokens,
        ),
        smollm2(),
        lengths,
    )
    assert {one.name: one.bytes / 1e9 for one in found if one.name in ("policy", "rollout")} == {
        "policy": pytest.approx(policy, rel=0.1),
        "rollout": pytest.approx(rollout, rel=0.1),
    }


@pytest.mark.parametrize(
    ("memory", "tokens"), [(128, None), (64, 8192), (32, 4096), (16, 2048), (8, 1024), (2, 1024)]
)
def test_a_micro_batch_that_nobody_sized_fits_the_machine(memory: int, tokens: int | None) -> None:
    """With ``memory`` GiB."""
    plain = FsdpSettings()
    assert fitted(plain, smollm2(), 1, False, memory * 2**30).micro_batch_tokens == tokens
    assert fitted(plain, smollm2(), 1, True, memory * 2**30) == plain, "a GPU has memory of its own"
    named = FsdpSettings(micro_batch_tokens=9)
    assert fitted(named, smollm2(), 1, False, memory * 2**30) == named
    assert plain.micro_batch == 16384


ON_GPU = {
    "policy__placement__num_gpus": 1,
    "policy__engine__dtype": "bfloat16",
    "rollout__engine__dtype": "bfloat16",
}


def test_what_is_offloaded_is_not_on_the_gpu() -> None:
    """The optimizer's step runs in main memory; a GPU has a layer at a time, activations and
    logits.
    """
    kept, offloaded = (
        next(
            role
            for role in memory(run_of(**ON_GPU, policy__engine__cpu_offload=on), qwen3b(), LENGTHS)
            if role.name == "policy"
        )
        for on in (False, True)
    )
    moved = {"weights", "gradients", "optimizer"}
    assert kept.parts == offloaded.parts, "nothing is smaller for it"
    assert (
        kept.of_gpu.keys() - offloaded.of_gpu.keys()
        == moved
        == offloaded.of_host.keys() - kept.of_host.keys()
    )
    gone = sum(kept.parts[name] for name in moved)
    assert offloaded.needed == pytest.approx(kept.needed - gone / 2**30)
    small, large = card(offloaded, [offloaded]), card(kept, [kept])
    assert small is not None
    assert large is None or small < large
    for role in (kept, offloaded):
        assert sum(role.of_gpu.values()) + sum(role.of_host.values()) == role.bytes


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_role_with_gpus_has_two_sums(
    offloaded: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(ROOT)
    chosen = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in ON_GPU.items()]
    command = [
        "estimate",
        str(QUICKSTART),
        f"output={tmp_path}",
        *chosen,
        f"policy.engine.cpu_offload={json.dumps(offloaded)}",
    ]
    assert main(command) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if "x policy on 1 GPU: GPU " in line)
    on_gpu, on_host = line.partition("GPU: GPU ")[2].split("; host ")
    assert ("optimizer" in on_host) is offloaded
    assert ("optimizer" in on_gpu) is not offloaded
    for text in (on_gpu, on_host.partition(";")[0]):
        whole, _, each = text.partition(" = ")
        assert sum(float(part.rpartition(" ")[2]) for part in each.split(", ")) == pytest.approx(
            float(whole), abs=0.05
        )
    assert "fits a card of" in on_host
    assert "1 optimizer update each" in said
    assert main([*command, "--json"]) == 0
    policy = next(
        role for role in json.loads(capsys.readouterr().out)["memory"] if role["role"] == "policy"
    )
    assert policy["gpu_bytes"] + policy["host_bytes"] == policy["bytes"]


def test_an_engine_holds_its_weights_and_the_cache_of_what_it_decodes() -> None:
    shape, engine = qwen3b(), parts(run_of(), "rollout")
    assert engine["weights"] == 4 * shape.parameters
    assert engine["cache"] == shape.cache * 4 * 1200 * 256
    assert (
        parts(run_of(rollout__engine__max_sequences=64), "rollout")["cache"] == engine["cache"] // 4
    )
    remote = run_of(
        rollout__engine={"kind": "openai_http", "base_url": "http://a/v1", "model": "b"}
    )
    assert set(parts(remote, "rollout")) == {"process"}


def test_sequences_wait_for_room_in_sglangs_cache_as_in_vllms() -> None:
    """So a card fits that holds one of them; ``extra`` has the names of ``sglang.Engine``."""

    def cache(**extra: Any) -> tuple[int, int]:
        config = run_of(**ON_GPU, rollout__engine={"kind": "sglang", "extra": extra})
        [role] = [role for role in memory(config, qwen3b(), LENGTHS) if role.name == "rollout"]
        return role.parts["cache"], role.spare

    whole, spare = cache()
    sequences = whole // (whole - spare)
    assert sequences > 16
    assert cache(tp_size=2) == (whole // 2, spare // 2)
    assert cache(max_running_requests=16)[0] == 16 * (whole - spare)


@pytest.mark.parametrize(("extra", "gib"), [({}, 1), ({"mm_processor_cache_gb": 4}, 4)], ids=str)
def test_the_pictures_that_vllm_keeps_are_counted_in_main_memory(
    extra: dict[str, Any], gib: int
) -> None:
    """vLLM's own default is 4 GiB for each engine.

    ``extra`` overrides what the engine is started with.
    """
    config = run_of(**ON_GPU, rollout__engine={"kind": "vllm", "extra": extra})
    engine = config.engine
    assert isinstance(engine, VllmEngineSettings)
    given = common_arguments("model", engine) | engine.extra
    assert given["mm_processor_cache_gb"] == gib
    [role] = [role for role in memory(config, qwen3b(), LENGTHS) if role.name == "rollout"]
    assert role.of_host["pictures"] == gib * 2**30


def test_an_engine_has_room_for_the_longest_episode_of_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Up to 9,000 tokens; the trainer sees no evaluation."""
    monkeypatch.chdir(ROOT)
    over = (
        'evaluation.over={"environment.episode.max_turns": 3, "environment.episode.max_tokens":'
        " 9000}"
    )

    def said(*more: str) -> tuple[dict[str, dict[str, int]], str]:
        command = ["estimate", str(QUICKSTART), f"output={tmp_path}", "evaluation.every=10", *more]
        assert main([*command, "--json"]) == 0
        roles = {role["role"]: role for role in json.loads(capsys.readouterr().out)["memory"]}
        assert main(command) == 0
        return roles, capsys.readouterr().out

    (usual, _), (longer, text) = said(), said(over)
    made = plan(read(QUICKSTART, []), None, 1280)
    assert longer["rollout"]["cache"] / usual["rollout"]["cache"] == pytest.approx(
        9000 / (made.prompt + made.response), rel=1e-3
    )
    assert longer["policy"] == usual["policy"]
    assert "evaluations, whose trajectories have up to 9000 tokens" in text
    never, _ = said(over, "evaluation.every=0")
    assert never["rollout"] == usual["rollout"], "it is never played"
    shorter, text = said('evaluation.over={"rollout.sampling.max_tokens": 1}')
    assert shorter["rollout"] == usual["rollout"]
    assert "have up to" not in text
    run = steps_of(tmp_path / "run", 9.0, 7.0, 2.0)
    measured_too, _ = said(over, "--from", str(run))
    assert measured_too["rollout"]["cache"] == longer["rollout"]["cache"], (
        "steps say nothing about its lengths"
    )


def qwen7b() -> Shape:
    """Qwen2.5-VL-7B: 8.29 billion parameters by its card, of which 0.68 in the tower."""
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (152064, 3584),
        "lm_head.weight": (152064, 3584),
    }
    for layer in range(28):
        at = f"model.layers.{layer}"
        projections = (("q", 3584), ("k", 512), ("v", 512), ("o", 3584))
        sizes |= {f"{at}.self_attn.{name}_proj.weight": (out, 3584) for name, out in projections}
        sizes |= {f"{at}.mlp.{name}_proj.weight": (18944, 3584) for name in ("gate", "up")}
        sizes[f"{at}.mlp.down_proj.weight"] = (3584, 18944)
    for block in range(32):
        sizes |= {
            f"visual.blocks.{block}.mlp.{name}_proj.weight": (3420, 1280)
            for name in ("gate", "up", "down")
        }
        sizes[f"visual.blocks.{block}.attn.qkv.weight"] = (3840, 1280)
        sizes[f"visual.blocks.{block}.attn.proj.weight"] = (1280, 1280)
    sizes |= {
        "visual.merger.mlp.0.weight": (5120, 5120),
        "visual.merger.mlp.2.weight": (3584, 5120),
    }
    text = {
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    return Shape(sizes, text, {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420})


def qwen3_vl(name: str) -> Shape:
    """The shapes of a configuration's Qwen3-VL, without values."""
    config = read(ROOT / name, [])
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder))
        described = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(described)
    sizes = {key: tuple(value.shape) for key, value in model.named_parameters()}
    return Shape(sizes, described.text_config.to_dict(), described.vision_config.to_dict())


@pytest.fixture
def fresh_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has the recipes and no runs."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)


RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_an_estimate_and_fits_cards_of_80_gb(
    name: str,
    fresh_clone: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a model of the size that the recipe names."""
    try:
        config = read(ROOT / name, [])
    except ConfigError:
        pytest.skip("not a run's file")

    def shape(model: ModelSource) -> Shape:
        if name.startswith("recipes/screen_agents/"):
            return qwen3_vl(name)
        return qwen3b() if "3B" in model.path or "2B" in model.path else qwen7b()

    monkeypatch.setattr(ModelSource, "shape", property(shape))
    assert main(["estimate", name]) == 0
    said = capsys.readouterr().out
    assert said.count("fits a card of") == (config.policy.placement.num_gpus > 0) + (
        config.rollout.placement.num_gpus > 0
    ) + (config.reference_kind == "actor" and config.reference.placement.num_gpus > 0)
    assert "FITS NO CARD" not in said
    assert "141 GB" not in said


def of_patches(model_type: str, patch: int) -> dict[str, Any]:
    vision = {"patch_size": patch, "spatial_merge_size": 2}
    return {"model_type": model_type, "vision_config": vision}


INTERNVL = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "vision_config": {"patch_size": [14, 14], "image_size": [448, 448]},
}


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        (of_patches("qwen2_5_vl", 14), 1280),
        (of_patches("glm4v", 14), 1280),
        (of_patches("qwen3_vl", 16), 980),
        (INTERNVL, 256 * (5 + 1)),
        ({"model_type": "qwen3"}, 1280),
        ({}, 1280),
    ],
    ids=["Qwen2.5-VL", "GLM-4V", "Qwen3-VL", "InternVL with a thumbnail", "text", "none"],
)
def test_an_image_has_the_tokens_of_the_runs_model(
    content: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = run_of(model__path=str(tmp_path), model__max_pixels=1_003_520)
    assert most_image_tokens(prepare(config)) == tokens


def test_a_larger_image_token_leaves_fewer_tokens_to_read() -> None:
    """An episode whose turns may fill all its tokens reads at least its ten images."""
    config = run_of(
        environment__episode__max_turns=10,
        environment__episode__max_images=10,
        environment__episode__max_tokens=30_000,
        rollout__sampling__max_tokens=3000,
    )
    made = plan(config, None, 980)
    assert (made.prompt, made.response) == (9800, 20_200)
    assert lengths(made).images == 9800


def test_the_command_asks_the_model_for_its_image_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Patches of 28 pixels instead of 14: fewer image tokens keep fewer activations."""
    monkeypatch.chdir(ROOT)
    model = tmp_path / "model"
    shutil.copytree(ROOT / "recipes/arc_vision/tiny", model)
    overrides = [f"model.path={model}", "model.max_pixels=50176", f"output={tmp_path}"]
    command = ["estimate", str(QUICKSTART), *overrides, "--json"]

    def activations_of_a_rank() -> int:
        assert main(command) == 0
        roles = json.loads(capsys.readouterr().out)["memory"]
        (rank,) = [role for role in roles if role["role"] == "policy"]
        return int(rank["activations"])

    usual = activations_of_a_rank()
    file = model / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["vision_config"]["patch_size"] = 28
    file.write_text(json.dumps(content), encoding="utf-8")
    assert activations_of_a_rank() < 0.995 * usual


def test_two_ranks_are_too_few_for_arpos_episodes(
    fresh_clone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelSource, "shape", property(lambda model: qwen7b()))
    assert (
        main(
            [
                "estimate",
                "recipes/arpo/arpo.yaml",
                "policy.ranks=2",
                "policy.engine.sequence_parallel=1",
            ]
        )
        == 0
    )
    assert "fits a card of 141 GB" in capsys.readouterr().out
    assert main(["estimate", "recipes/arpo/arpo.yaml", "policy.ranks=1"]) == 0
    assert "FITS NO CARD" in capsys.readouterr().out


def test_a_file_that_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", encoding="utf-8"
    )
    with pytest.raises(
        ConfigError,
        match=r"model\.safetensors is not a safetensors file; is it a pointer of git-lfs",
    ):
        _ = ModelSource(str(tmp_path)).shape


def test_the_shipped_model_is_read_from_its_headers(tmp_path: Path) -> None:
    shape = ModelSource(str(ROOT / "recipes/arc_vision/tiny")).shape
    assert 2_000_000 < shape.parameters < 3_500_000
    assert 0 < shape.vision_parameters < shape.parameters
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        _ = ModelSource(str(tmp_path)).shape


def steps_of(folder: Path, *seconds: float) -> Path:
    lines = [
        {
            "step": n,
            "time": 60.0 * n,
            "timing_s/step": s,
            "timing_s/testing": 5.0 if n == 2 else 0.0,
            "rollout/trained": 100,
            "rollout/trajectories": 150,
            "prompt_length/mean": 70,
            "response_length/mean": 30,
        }
        for n, s in enumerate(seconds, start=1)
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    return folder


def test_time_is_measured_where_there_are_finished_steps(tmp_path: Path) -> None:
    found = measured(steps_of(tmp_path / "run", 60.0, 7.0, 2.0, 2.0))
    assert (found.seconds, found.evaluation, found.played_per_trained) == (2.0, 5.0, 1.5)
    made = plan(run_of(steps=10, evaluation__every=5), found, 1280)
    assert made.evaluations == 3
    assert made.seconds == pytest.approx(2.0 * 256 / 100 * 10 + 3 * 5.0)
    assert made.trajectories == 10 * 256 * 1.5
    assert made.tokens == made.trajectories * 100
    with pytest.raises(ConfigError, match="has 1 finished step, "):
        measured(steps_of(tmp_path / "short", 60.0))


def test_the_command_says_it_for_people_and_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["estimate", str(QUICKSTART), f"output={tmp_path / 'none'}"]) == 0
    said = capsys.readouterr().out
    assert "60 steps of 16 groups x 16 = 256 trajectories" in said
    assert "3000 rows: 187.5 steps an epoch, 0.32 epochs in all" in said
    assert "time: unknown until steps have been measured" in said
    assert "1 x policy" in said
    run = steps_of(tmp_path / "run", 9.0, 7.0, 2.0)
    assert (
        main(["estimate", str(QUICKSTART), "--from", str(run), "--json", "evaluation.every=0"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] == pytest.approx(2.0 * 2.56 * 60)
    assert {role["role"] for role in found["memory"]} == {
        "driver",
        "policy",
        "rollout",
        "environment",
        "reward",
    }
    assert main(["estimate", str(QUICKSTART), f"output={tmp_path}", "name=run"]) == 0
    assert f"measured: 3 steps of {run}" in capsys.readouterr().out, (
        "its own run is measured without being named"
    )
