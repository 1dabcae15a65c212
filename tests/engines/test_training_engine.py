"""One rank of the trainer: updates, old log-probs, skipping, freezing, adapters, export and
checkpoints.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayloop.core.failures import CheckpointError, ConfigError, DataFailure, Diverged
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    EndReason,
    Sampling,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.engines import models
from rayloop.engines.settings import FsdpSettings, LoraSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training import optimizer, state
from rayloop.engines.training.optimizer import learning_rate
from rayloop.engines.training.scorer import FrozenScorer
from rayloop.grpo.losses.settings import PpoLoss
from tests.engines.prompts import engine as generation
from tests.engines.prompts import image, prompt, vision_tokens
from tests.engines.training import VERSION, Sgd, engine, mixed_items, trajectory

SGD = Sgd(lr=0.1)


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def _changed(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


def _logprobs_differ(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> list[bool]:
    return [bool(abs(x - y).max() > 1e-4) for x, y in zip(a, b, strict=True)]


def test_learning_rate_warms_up_and_follows_the_cosine() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4, schedule="cosine").over(14)
    assert [learning_rate(settings, u) for u in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(settings, 4) == 1.0
    assert learning_rate(settings, 9) == pytest.approx(0.5)
    assert learning_rate(settings, 14) == learning_rate(settings, 99) == pytest.approx(0.0)
    assert learning_rate(OptimizerSettings(lr=1.0, warmup_steps=2), 100) == 1.0


def test_the_warm_up_counts_steps_of_the_run_each_with_its_updates() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=2).over(10, 4)
    assert settings.total_updates == 40
    assert [learning_rate(settings, update) for update in (0, 3, 7, 8)] == [0.125, 0.5, 1.0, 1.0]


def test_learning_rate_warms_up_stays_and_decays_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.engines.training.optimizer.DECAY_SHARE", 0.4)
    settings = OptimizerSettings(lr=1.0, warmup_steps=2, schedule="wsd").over(10)
    rates = [learning_rate(settings, u) for u in range(12)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])


def test_learning_rate_warms_up_and_falls_linearly() -> None:
    """As transformers' ``get_linear_schedule_with_warmup``, whose first update after the warm-up
    has the whole rate.
    """
    settings = OptimizerSettings(lr=1.0, warmup_steps=2, schedule="linear").over(10)
    rates = [learning_rate(settings, u) for u in range(12)]
    assert rates == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0])


def test_an_update_raises_the_probability_of_what_was_good(tiny_vlm: Path) -> None:
    items = mixed_items(tiny_vlm)
    played = [item.trajectory for item in items]
    with engine(tiny_vlm, FsdpSettings(cpu_offload=True), OptimizerSettings(lr=1e-3)) as trainer:
        before = trainer.logprobs(played)
        report = trainer.train([items])
        after = trainer.logprobs(played)
    gains = [float((b - a).sum()) for a, b in zip(before, after, strict=True)]
    assert sum(gain * item.advantage for gain, item in zip(gains, items, strict=True)) > 0
    assert report["actor/ratio_max"] == 1.0
    assert report["actor/tokens"] == sum(len(b) for b in before)
    assert report["actor/sequences"] == len(items)
    assert report["actor/updates"] == 1


def test_the_loss_is_the_textbook_one(tiny_vlm: Path) -> None:
    items = [dataclasses.replace(item, ref_logprobs=None) for item in mixed_items(tiny_vlm)]
    with engine(tiny_vlm, optimizer=SGD, loss=PpoLoss(correction="none")) as trainer:
        report = trainer.train([items])
    tokens = [int(item.trajectory.flatten().loss_mask.sum()) for item in items]
    expected = -sum(n * item.advantage for n, item in zip(tokens, items, strict=True)) / sum(tokens)
    assert report["actor/loss"] == pytest.approx(expected, rel=1e-5)


def test_an_update_without_an_image_is_given_up_whole(tiny_vlm: Path) -> None:
    """Found out after the first of its micro-batches: what they computed is not in the next update."""
    items = mixed_items(tiny_vlm)
    lost = trajectory(tiny_vlm, 50, [(2, (3, 3), 3)])
    bad = TrainItem(dataclasses.replace(lost, image_bytes={}), 1.0, items[0].ref_logprobs)
    settings = FsdpSettings(micro_batch_tokens=1)
    with engine(tiny_vlm, settings, SGD) as trainer:
        expected = trainer.train([items])["actor/grad_norm"]
    with engine(tiny_vlm, settings, SGD) as trainer:
        before = trainer.export(VERSION)
        with pytest.raises(DataFailure, match="neither bytes nor a path"):
            trainer.train([[*items, bad]])
        assert _same(before, trainer.export(VERSION))
        assert trainer.train([items])["actor/grad_norm"] == expected


def test_old_logprobs_are_those_before_the_first_update(tiny_vlm: Path) -> None:
    items = mixed_items(tiny_vlm)
    with engine(tiny_vlm, optimizer=SGD) as trainer:
        once = trainer.train([items])
    with engine(tiny_vlm, optimizer=SGD) as trainer:
        twice = trainer.train([items, items])
    assert once["actor/ratio_max"] == 1.0
    assert twice["actor/ratio_max"] > 1.001
    assert twice["actor/updates"] == 2
    assert twice["actor/logprob_mismatch_mean"] == pytest.approx(
        once["actor/logprob_mismatch_mean"], rel=1e-5
    )
    assert twice["actor/logprob_mismatch_max"] == pytest.approx(
        once["actor/logprob_mismatch_max"], rel=1e-5
    )


def test_advantage_zero_is_skipped_but_counted(tiny_vlm: Path) -> None:
    items = mixed_items(tiny_vlm)
    silent = [dataclasses.replace(item, advantage=0.0) for item in items[:2]]
    with engine(tiny_vlm, optimizer=SGD) as trainer:
        skipped = trainer.train([[*silent, *items[2:]]])
    with engine(tiny_vlm, optimizer=SGD, loss=PpoLoss(entropy_coef=1e-12)) as trainer:
        forwarded = trainer.train([[*silent, *items[2:]]])
    with engine(tiny_vlm, optimizer=SGD) as trainer:
        without = trainer.train([items[2:]])
    assert skipped["actor/grad_norm"] == pytest.approx(forwarded["actor/grad_norm"], rel=1e-5)
    ratio = without["actor/tokens"] / skipped["actor/tokens"]
    assert skipped["actor/grad_norm"] == pytest.approx(without["actor/grad_norm"] * ratio, rel=1e-5)
    assert (
        skipped["actor/entropy"]
        == pytest.approx(without["actor/entropy"])
        != forwarded["actor/entropy"]
    )
    assert (
        skipped["actor/computed_tokens"]
        == without["actor/computed_tokens"]
        < skipped["actor/tokens"]
    )
    assert (
        forwarded["actor/computed_tokens"] == forwarded["actor/tokens"] == skipped["actor/tokens"]
    )


def test_a_step_without_any_gradient_has_no_means_of_tokens(tiny_text: Path) -> None:
    items = [TrainItem(trajectory(tiny_text, 1, [(5, None, 6)]), 0.0)]
    with engine(tiny_text, optimizer=SGD) as trainer:
        report = trainer.train([items])
    assert (
        report["actor/computed_tokens"],
        report["actor/tokens"],
        report["actor/tokens_per_second"],
    ) == (0, 6, 0)
    assert not {"actor/entropy", "actor/clip_high", "actor/logprob_mismatch_mean"} & set(report)


def test_the_gradient_is_clipped(tiny_text: Path) -> None:
    items = [TrainItem(trajectory(tiny_text, 1, [(5, None, 6)]), 1.0)]
    moved = {}
    for clip in (1e-3, 2e-3):
        with engine(tiny_text, optimizer=Sgd(lr=1.0, grad_clip=clip)) as trainer:
            before = trainer.export(VERSION)
            report = trainer.train([items])
            after = trainer.export(VERSION)
        moved[clip] = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in before))
        assert report["actor/grad_norm"] > clip
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert moved[2e-3] == pytest.approx(2e-3, rel=1e-2)


def test_an_update_that_is_not_finite_is_skipped_and_too_many_stop_the_run(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "MAX_SKIPPED", 1)
    good = TrainItem(trajectory(tiny_text, 1, [(5, None, 6)]), 1.0)
    bad = dataclasses.replace(good, advantage=math.nan)
    with engine(tiny_text, optimizer=OptimizerSettings(lr=1e-3)) as trainer:
        before = trainer.export(VERSION)
        report = trainer.train([[good, bad]])
        assert (report["actor/skipped_updates"], report["actor/updates"]) == (1, 0)
        assert _same(before, trainer.export(VERSION))
        assert all(math.isfinite(value) for value in report.values())
        report = trainer.train([[good], [bad], [good]])
        assert (report["actor/skipped_updates"], report["actor/updates"]) == (1, 2)
        assert math.isfinite(report["actor/loss"])
        assert not _same(before, trainer.export(VERSION))
        with pytest.raises(Diverged, match="2 updates in a row"):
            trainer.train([[bad], [bad]])


def test_bfloat16_compute_keeps_float32_masters(tiny_text: Path, tmp_path: Path) -> None:
    """An update of 1e-6 is lost in bfloat16; it shows when the masters are exported in float32."""
    items = [TrainItem(trajectory(tiny_text, 1, [(5, None, 6)]), 1.0)]
    with engine(tiny_text, FsdpSettings(dtype="bfloat16"), OptimizerSettings(lr=1e-6)) as trainer:
        before = trainer.export(VERSION)
        trainer.train([items])
        assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
        rounded = _changed(before, trainer.export(VERSION))
        trainer.save(str(tmp_path / "state"))
    start = load_file(tiny_text / "model.safetensors")
    with engine(tiny_text) as trainer:
        trainer.load(str(tmp_path / "state"))
        masters = trainer.export(VERSION)
    assert "model.norm.weight" in _changed(start, masters)
    assert "model.norm.weight" not in rounded
    assert (masters["model.norm.weight"] - start["model.norm.weight"]).abs().max() == pytest.approx(
        1e-6, rel=0.2
    )


def test_bfloat16_follows_float32(tiny_vlm: Path) -> None:
    items = mixed_items(tiny_vlm)
    played = [item.trajectory for item in items]
    with engine(tiny_vlm) as trainer:
        exact = trainer.logprobs(played)
        norm = trainer.train([items])["actor/grad_norm"]
    settings = FsdpSettings(dtype="bfloat16", gradient_checkpointing=True)
    with engine(tiny_vlm, settings) as trainer:
        rounded = trainer.logprobs(played)
        assert trainer.train([items])["actor/grad_norm"] == pytest.approx(norm, rel=0.05)
    errors = np.concatenate([abs(a - b) for a, b in zip(exact, rounded, strict=True)])
    assert 1e-5 < errors.mean() < 0.05


@pytest.mark.parametrize("lora", [None, LoraSettings()])
def test_at_the_start_policy_and_reference_are_one_in_bfloat16(
    tiny_vlm: Path, lora: LoraSettings | None
) -> None:
    """Bit for bit, images too: any offset would be trained on as KL."""
    played = [item.trajectory for item in mixed_items(tiny_vlm)]
    settings = FsdpSettings(dtype="bfloat16", lora=lora)
    with engine(tiny_vlm, settings) as trainer:
        policy = trainer.logprobs(played)
    reference = FrozenScorer(ModelSettings(path=str(tiny_vlm)), settings).logprobs(played)
    assert [abs(a - b).max() for a, b in zip(policy, reference, strict=True)] == [0.0] * len(played)


def test_policy_and_engine_are_one_in_bfloat16(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, images too, where nothing forces another order of sums: prompts alone, and one
    attention for both.
    """
    monkeypatch.setattr(models, "_attention", lambda *_: "eager")
    sampling = Sampling(max_tokens=1, banned_tokens=vision_tokens(tiny_vlm))
    requests = [
        prompt(tiny_vlm, "See ", image(84, 56), "now"),
        prompt(tiny_vlm, image(112, 84, 1), image(56, 56, 2)),
    ]
    answers = asyncio.run(_answers(tiny_vlm, [*requests, prompt(tiny_vlm, "no image")], sampling))
    with engine(tiny_vlm, FsdpSettings(dtype="bfloat16", micro_batch_tokens=1)) as trainer:
        policy = trainer.logprobs(answers)
    rollout_logprobs = [answer.turns[-1].logprobs for answer in answers]
    assert [abs(a - b).max() for a, b in zip(policy, rollout_logprobs, strict=True)] == [0.0] * len(
        answers
    )


async def _answers(
    folder: Path, requests: Sequence[TokenPrompt], sampling: Sampling
) -> list[Trajectory]:
    """Each request answered alone by the transformers engine in bfloat16, as a trajectory."""
    served = await generation(folder, dtype="bfloat16")
    answers = []
    for number, request in enumerate(requests):
        done = await served.generate(request, sampling)
        asked = Turn("user", request.token_ids, tuple(shown.ref for shown in request.images))
        answered = Turn("assistant", done.token_ids, (), done.logprobs, done.version)
        data = {shown.ref.sha256: shown.data or b"" for shown in request.images}
        answers.append(
            Trajectory(
                TrajectoryId(number, 0),
                0,
                "task",
                number,
                (asked, answered),
                sampling,
                EndReason.DONE,
                image_bytes=data,
            )
        )
    served.close()
    return answers


def test_a_frozen_vision_tower_stays_bit_equal(tiny_vlm: Path) -> None:
    items = mixed_items(tiny_vlm)
    with engine(
        tiny_vlm, FsdpSettings(train_vision=False), OptimizerSettings(lr=1e-3, weight_decay=0.1)
    ) as trainer:
        before = trainer.export(VERSION)
        trainer.train([items])
        changed = _changed(before, trainer.export(VERSION))
    assert changed == {name for name in before if not name.startswith("visual.")}


def test_a_choice_about_the_vision_tower_needs_one(tiny_text: Path) -> None:
    with (
        pytest.raises(ConfigError, match="no vision tower"),
        engine(tiny_text, FsdpSettings(train_vision=False)),
    ):
        pass


def test_export_has_the_checkpoints_names_and_its_own_memory(
    tiny_vlm: Path, tiny_text: Path
) -> None:
    items = mixed_items(tiny_vlm)
    with engine(tiny_vlm) as trainer:
        exported = trainer.export(VERSION)
        assert _same(exported, load_file(tiny_vlm / "model.safetensors"))
        trainer.train([items])
        assert _same(exported, load_file(tiny_vlm / "model.safetensors"))
    with engine(tiny_text) as trainer:
        assert "lm_head.weight" in trainer.export(VERSION)


@pytest.mark.parametrize("vision", [None, False, True])
def test_adapters_go_where_the_settings_say(
    tiny_vlm: Path, vision: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rayloop.engines.training.fsdp")
    settings = FsdpSettings(lora=LoraSettings(rank=4), train_vision=vision)
    with engine(tiny_vlm, settings, OptimizerSettings(lr=1e-2)) as trainer:
        before = trainer.export(VERSION)
        trainer.train([mixed_items(tiny_vlm)])
        changed = _changed(before, trainer.export(VERSION))
    assert all(name.split(".")[-2] in LoraSettings().targets for name in changed)
    assert any(name.startswith("visual.") for name in changed) is bool(vision)
    assert len([name for name in changed if name.startswith("model.layers")]) == 2 * 7
    rank_times_sides = 4 * sum(sum(before[name].shape) for name in changed)
    assert f"training {rank_times_sides} of " in caplog.text


def test_merged_adapters_equal_the_adapters(tiny_vlm: Path, tmp_path: Path) -> None:
    items = mixed_items(tiny_vlm)
    played = [item.trajectory for item in items]
    with engine(tiny_vlm) as trainer:
        base = trainer.logprobs(played)
    with engine(
        tiny_vlm, FsdpSettings(lora=LoraSettings(rank=4)), OptimizerSettings(lr=1e-2)
    ) as trainer:
        off_before_training = trainer.logprobs(played, reference=True)
        trainer.train([items])
        adapted = trainer.logprobs(played)
        off = trainer.logprobs(played, reference=True)
        again = trainer.logprobs(played)
        merged = trainer.export(Version(0, 1))
        trainer.train([items])
    for file in tiny_vlm.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(merged, tmp_path / "model.safetensors", {"format": "pt"})
    with engine(tmp_path) as trainer:
        published = trainer.logprobs(played)
        with pytest.raises(ConfigError, match="adapter_off needs"):
            trainer.logprobs(played, reference=True)
    assert (
        _logprobs_differ(off, base)
        == _logprobs_differ(off_before_training, base)
        == [False] * len(played)
    )
    assert all(np.array_equal(a, b) for a, b in zip(adapted, again, strict=True))
    assert _logprobs_differ(adapted, base) == [True] * len(played)
    assert _logprobs_differ(published, adapted) == [False] * len(played)


def test_swapped_images_change_the_logprobs_of_image_trajectories_only(tiny_vlm: Path) -> None:
    played = [item.trajectory for item in mixed_items(tiny_vlm)]
    with engine(tiny_vlm) as trainer:
        plain, swapped = trainer.logprobs(played), trainer.logprobs(played, swap_images=True)
    assert _logprobs_differ(plain, swapped) == [bool(t.images) for t in played]


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("tiny_vlm", {"embedding", "language", "vision", "merger"}),
        ("tiny_text", {"embedding", "head", "language"}),
    ],
)
def test_each_parameter_group_is_perturbed_and_restored(
    request: pytest.FixtureRequest, model: str, groups: set[str]
) -> None:
    folder: Path = request.getfixturevalue(model)
    size = (2, 3) if model == "tiny_vlm" else None
    played = [trajectory(folder, 1, [(5, size, 6)])]
    with engine(folder) as trainer:
        plain, weights = trainer.logprobs(played), trainer.export(VERSION)
        assert set(trainer.parameter_groups()) == groups
        for group in groups:
            trainer.perturb(group)
            with pytest.raises(ValueError, match="restore_parameters in between"):
                trainer.perturb(group)
            assert abs(trainer.logprobs(played)[0] - plain[0]).max() > 0.05, group
            assert _changed(weights, trainer.export(VERSION))
            trainer.restore_parameters()
            assert _same(weights, trainer.export(VERSION))
            assert np.array_equal(trainer.logprobs(played)[0], plain[0])
        with pytest.raises(ValueError, match="cannot perturb 'legs'"):
            trainer.perturb("legs")


def test_perturbed_weights_are_never_saved_and_a_load_undoes_them(
    tiny_vlm: Path, tmp_path: Path
) -> None:
    """With frozen parts too, which a checkpoint does not hold."""
    with engine(tiny_vlm, FsdpSettings(train_vision=False)) as trainer:
        trainer.save(str(tmp_path / "state"))
        weights = trainer.export(VERSION)
        for group in ("vision", "language"):
            trainer.perturb(group)
            for save in (trainer.save, trainer.begin_save):
                with pytest.raises(
                    CheckpointError, match="perturbed by the weight sync's self-test"
                ):
                    save(str(tmp_path / "other"))
            assert not (tmp_path / "other").exists()
            trainer.load(str(tmp_path / "state"))
            assert _same(weights, trainer.export(VERSION))
            trainer.save(str(tmp_path / "state"))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_a_loaded_trainer_continues_bit_exactly(
    tiny_vlm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: LoraSettings | None,
    beside: bool,
) -> None:
    """Also when what was saved is written only after it has trained on."""
    items, folder = mixed_items(tiny_vlm), str(tmp_path / "state")
    settings, optimizer = FsdpSettings(lora=lora), OptimizerSettings(lr=1e-3, warmup_steps=5)
    with engine(tiny_vlm, settings, optimizer) as trainer:
        trainer.train([items])
        trained, write = Event(), state.save
        monkeypatch.setattr(state, "save", lambda *moment: trained.wait(60) and write(*moment))
        written = trainer.begin_save(folder) if beside else trained.set() or trainer.save(folder)
        reports = [trainer.train([items]) for _ in range(2)]
        expected = trainer.export(VERSION)
        trained.set()
        if isinstance(written, Future):
            assert len(written.result(60)) == 3
    with engine(tiny_vlm, settings, optimizer, seed=5) as trainer:
        trainer.load(folder)
        resumed = [trainer.train([items]) for _ in range(2)]
        assert _same(expected, trainer.export(VERSION))
    for a, b in zip(reports, resumed, strict=True):
        assert {k: v for k, v in a.items() if "second" not in k} == {
            k: v for k, v in b.items() if "second" not in k
        }
    assert resumed[-1]["actor/lr"] == pytest.approx(3e-3 / 5)


def test_a_broken_checkpoint_is_refused(tiny_text: Path, tiny_vlm: Path, tmp_path: Path) -> None:
    with engine(tiny_text) as trainer:
        trainer.save(str(tmp_path / "state"))
        with pytest.raises(CheckpointError, match="nowhere"):
            trainer.load(str(tmp_path / "nowhere"))
    with (
        engine(tiny_vlm) as trainer,
        pytest.raises(CheckpointError, match="the same model and optimizer"),
    ):
        trainer.load(str(tmp_path / "state"))


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_a_frozen_tower_has_no_backward_pass_when_activations_are_recomputed(
    tiny_vlm: Path, lora: LoraSettings | None
) -> None:
    settings = FsdpSettings(train_vision=False, gradient_checkpointing=True, lora=lora)
    with engine(tiny_vlm, settings) as trainer:
        tracked = list[bool]()
        for block in trainer._model.model.visual.blocks:
            block.register_forward_hook(
                lambda module, inputs, output: tracked.append(output.requires_grad)
            )
        trainer.train([mixed_items(tiny_vlm)])
    assert tracked
    assert not any(tracked)
