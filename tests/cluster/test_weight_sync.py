"""The proof at the start that engine and trainer agree: it passes on an honest model, and notices
each kind of sabotage.

WeightSync, player, pools, actors and engines are the real ones; the actors stand behind local
handles in this process.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.policy import LogprobGap, PolicyRank, RankSettings
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.loop.loggers import open_logger
from rayloop.cluster.loop.weight_check import WeightCheck
from rayloop.cluster.loop.weight_sync import WeightSync
from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.cluster.supervision.pool import Pool
from rayloop.core.failures import DataFailure, LogprobMismatch, WeightSyncError
from rayloop.core.ledger import Ledger
from rayloop.core.types import Completion, Sampling, TokenPrompt, Version
from rayloop.engines.models.saving import save_model
from rayloop.engines.training import collator
from rayloop.rollout.colocation import Colocation
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.manager import RolloutManager
from rayloop.run.config import RunConfig
from rayloop.run.order import training_rows
from rayloop.run.reporter import Reporter
from tests.engines.prompts import image
from tests.support import local
from tests.support.local import LocalActor
from tests.support.pictures import picture_rows
from tests.support.runs import settings

PARTS = ["embedding", "language", "merger", "vision"]
START = Version(0, 0)


def configuration(folder: Path, model: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        settings(
            folder,
            model,
            data={"train": str(picture_rows(folder, 4))},
            rollout__sampling={"max_tokens": 8, "min_tokens": 2, "temperature": 0.8},
            environment__episode__environment={"use": "rayloop.envs.single_turn:SingleTurn"},
            **{"weight_sync__logprob_check": "self_test", **changes},
        )
    )


class Stage:
    """What the driver has at step 0, without a cluster."""

    def __init__(self, c: RunConfig, rollout: type[RolloutActor], rank: type[PolicyRank]) -> None:
        folder = Path(c.output) / c.name
        folder.mkdir()
        self.config, self.reporter = c, Reporter(c, folder, open_logger)
        made = RankSettings(
            c.model,
            c.policy.engine,
            c.policy.optimizer,
            c.policy.loss,
            c.transport,
            str(folder / "weights"),
            0,
        )
        self.policy = PolicyGroup(c.policy, lambda number: LocalActor(rank(made, number, 1)))
        self.engine = rollout(c.model, c.engine, c.transport, str(folder / "weights"))
        environment = EnvironmentActor(c.model, c.environment.episode)
        self.services: Any = SimpleNamespace(
            policy=self.policy,
            rollout=self._pool("rollout", self.engine),
            environment=self._pool("env", environment),
            weights=str(folder / "weights"),
            colocation=Colocation(),
        )
        self.weight_sync = WeightSync(c, self.services, self.reporter)
        rollouts = RolloutManager(
            c,
            Ledger(),
            training_rows(c, self.reporter),
            self.reporter,
            FailureHistory(c.environment),
        )
        self.tasks = rollouts.scheduler.probe_tasks()
        self.runner = EpisodeRunner(
            c, self.services, None, self.reporter.event, rollouts.quarantine
        )

        self.found: float | None = None

    def _pool(self, role: str, actor: Any) -> Pool:
        return Pool(
            role, 1, lambda slot: LocalActor(actor), self.config.recovery, self.reporter.event
        )

    async def start(self) -> None:
        self.policy.ranks = [self.policy._spawn(0)]
        await self.policy.ranks[0].join.remote(f"file://{self.config.output}/rendezvous")
        await self.services.rollout.start()
        await self.services.environment.start()

    async def sync_and_verify(self) -> None:
        await self.weight_sync.send(START)
        await WeightCheck(self.weight_sync).verify(START, self.tasks, self.runner)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [
            record
            for kind, record in self.reporter.updates
            if kind == "event" and record["event"] == name
        ]


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ray, "get", local.get)


def act(
    config: RunConfig,
    play: Callable[[Stage], Awaitable[None]] = Stage.sync_and_verify,
    rollout: type[RolloutActor] = RolloutActor,
    rank: type[PolicyRank] = PolicyRank,
) -> Stage:
    """Start, play, and leave the process group."""

    async def main() -> Stage:
        stage = Stage(config, rollout, rank)
        await stage.start()
        try:
            async with asyncio.timeout(60):
                await play(stage)
        finally:
            stage.policy.ranks[0].actor.engine.close()
            stage.engine.engine.close()
        return stage

    return asyncio.run(main())


# Honest -------------------------------------------------------------------------------------------


def test_an_honest_run_passes(tmp_path: Path, picture_model: Path) -> None:
    stage = act(configuration(tmp_path, picture_model))
    [logprob_check] = stage.events("logprob_check")
    assert logprob_check["mean"] < 1e-5 < 1e-4 < logprob_check["swapped"]
    assert logprob_check["images"] == 4
    assert 4 * 2 <= logprob_check["tokens"] <= 4 * 8
    tests = stage.events("self_test")
    assert sorted(test["group"] for test in tests) == PARTS
    assert all(test["follows"] < 1e-5 < 1e-2 < test["moved"] for test in tests), tests
    assert stage.engine.health().version == START


def test_after_the_self_test_the_engine_holds_the_weights_of_the_start(
    tmp_path: Path, picture_model: Path
) -> None:
    stage = act(configuration(tmp_path, picture_model))
    start = load_file(picture_model / "model.safetensors")
    served = stage.engine.engine._parameters
    assert served.keys() == start.keys()
    assert [name for name in start if not torch.equal(served[name], start[name])] == []


# Log-probs that disagree --------------------------------------------------------------------------


class OtherImages(RolloutActor):
    """Shows the engine a picture that the trainer does not get."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        assert prompt.images
        other = dataclasses.replace(
            prompt, images=tuple(image(56, 56, seed=999) for _ in prompt.images)
        )
        return await super().generate(other, sampling)


class OtherTemperature(RolloutActor):
    """Forgets the run's temperature."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        return await super().generate(prompt, dataclasses.replace(sampling, temperature=1.0))


class OtherMask(RolloutActor):
    """Forgets the minimum length: end tokens are not masked."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        return await super().generate(prompt, dataclasses.replace(sampling, min_tokens=0))


@pytest.mark.parametrize("rollout", [OtherImages, OtherTemperature, OtherMask])
def test_an_engine_that_samples_from_another_distribution_is_noticed(
    rollout: type[RolloutActor], tmp_path: Path, picture_model: Path
) -> None:
    with pytest.raises(LogprobMismatch, match="rollout and trainer disagree"):
        act(configuration(tmp_path, picture_model), rollout=rollout)


def test_a_trainer_that_sees_no_pixels_is_noticed(
    tmp_path: Path, picture_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = collator._decoded
    monkeypatch.setattr(collator, "_decoded", lambda *a: torch.full_like(decoded(*a), 0.5))
    with pytest.raises(LogprobMismatch, match="rollout and trainer disagree"):
        act(configuration(tmp_path, picture_model))


def test_a_model_that_sees_no_pixels_is_noticed(tmp_path: Path, picture_model: Path) -> None:
    weights = load_file(picture_model / "model.safetensors")
    blind = {name: torch.zeros_like(t) if "merger" in name else t for name, t in weights.items()}
    save_model(str(picture_model), tmp_path / "blind", blind)
    with pytest.raises(
        LogprobMismatch, match=r"swapping the images of 4 probes .* pixels do not reach the model"
    ):
        act(configuration(tmp_path, tmp_path / "blind"))


# Weights that do not arrive -----------------------------------------------------------------------


class Forgetful(PolicyRank):
    """Leaves one tensor out of the second weight update, and says nothing about it in the manifest."""

    left_out = "model.layers.0.mlp.up_proj.weight"

    def join(self, init_method: str) -> None:
        super().join(init_method)
        export, engine = self.engine.export, self.engine
        engine.export = lambda version, **options: {  # type: ignore[method-assign]
            name: tensor
            for name, tensor in export(version, **options).items()
            if version == START or name != self.left_out
        }


class Lossy(PolicyRank):
    """Loses one tensor of the second weight update on the way, and damages another."""

    lost, damaged = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"

    def export(self, version: Version) -> Any:
        manifest, source = super().export(version)
        if version != START:
            del source[self.lost]
            source[self.damaged] = source[self.damaged][:-4]
        return manifest, source


async def sync_twice(stage: Stage) -> None:
    await stage.weight_sync.send(START)
    await stage.weight_sync.send(Version(0, 1))


def test_a_tensor_left_out_of_a_later_weight_update_is_named(
    tmp_path: Path, picture_model: Path
) -> None:
    with pytest.raises(
        WeightSyncError, match=rf"version 0\.1 .*missing \['{Forgetful.left_out}'\]"
    ):
        act(configuration(tmp_path, picture_model), sync_twice, rank=Forgetful)


def test_tensors_lost_and_damaged_on_the_way_are_named(tmp_path: Path, picture_model: Path) -> None:
    with pytest.raises(WeightSyncError) as raised:
        act(configuration(tmp_path, picture_model), sync_twice, rank=Lossy)
    assert f"{Lossy.lost}: missing" in str(raised.value)
    assert f"{Lossy.damaged}: " in str(raised.value)


class CustomHead(RolloutActor):
    """Its head is a copy of the embedding that loads do not reach."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        head = self.engine._model.lm_head
        head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)


class Stale(RolloutActor):
    """Accepts every weight update but keeps its first weights of one part."""

    part: Callable[[str], bool]

    async def load(self, manifest: Any, source: Any, order: int = 0) -> None:
        mine = {
            name: tensor
            for name, tensor in self.engine._parameters.items()
            if type(self).part(name)
        }
        kept = {name: tensor.clone() for name, tensor in mine.items()}
        assert kept
        await super().load(manifest, source, order)
        for name, tensor in mine.items():
            tensor.copy_(kept[name])


class StaleLanguage(Stale):
    part = staticmethod(lambda name: "layers.0.mlp.down_proj" in name)


class StaleVision(Stale):
    part = staticmethod(lambda name: "visual.blocks" in name)


class StaleMerger(Stale):
    part = staticmethod(lambda name: "visual.merger" in name)


class StaleFeatures(RolloutActor):
    """Keeps the image features that the old weights computed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.engine._decoder.forget = lambda: None  # type: ignore[method-assign]


SABOTAGE = {
    CustomHead: "embedding",
    StaleLanguage: "language",
    StaleVision: "vision",
    StaleMerger: "merger",
    StaleFeatures: "vision",
}


@pytest.mark.parametrize(("rollout", "part"), SABOTAGE.items())
def test_a_part_that_stays_stale_is_named(
    rollout: type[RolloutActor], part: str, tmp_path: Path, picture_model: Path
) -> None:
    with pytest.raises(
        WeightSyncError, match=f"syncing changed {part} weights .* this part did not arrive"
    ):
        act(configuration(tmp_path, picture_model), rollout=rollout)


class Unmoved(PolicyRank):
    """Its perturbations change nothing."""

    def perturb(self, group: str) -> None: ...


def test_a_self_test_that_proves_nothing_is_noticed(tmp_path: Path, picture_model: Path) -> None:
    with pytest.raises(WeightSyncError, match="the self-test could not see whether they arrive"):
        act(configuration(tmp_path, picture_model), rank=Unmoved)


@pytest.mark.parametrize(("dtype", "arrived"), [("bfloat16", True), ("float32", False)])
def test_rounding_in_bfloat16_is_no_failure_of_the_self_test(
    dtype: str, arrived: bool, tmp_path: Path, picture_model: Path
) -> None:
    """Two implementations of a network that is half noise differ in bfloat16 by more than those of
    a sound one may.
    """
    config = configuration(
        tmp_path, picture_model, rollout__engine__dtype=dtype, policy__engine__dtype=dtype
    )
    check = WeightCheck(WeightSync(config, None, None))  # type: ignore[arg-type]
    check._unchanged = LogprobGap(10, 1e-4, 1e-3)
    moved, follows = LogprobGap(10, 0.9, 3.0), LogprobGap(10, 0.2, 1.0)
    with nullcontext() if arrived else pytest.raises(WeightSyncError, match="did not arrive"):
        check._check_arrival("language", moved, follows)
    with pytest.raises(WeightSyncError, match="did not arrive"):
        check._check_arrival("language", moved, dataclasses.replace(follows, mean=0.31))


# Warnings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "says"), [(OtherTemperature, "disagree"), (CustomHead, "embedding")]
)
def test_a_warning_lets_the_run_go_on_with_the_weights_of_the_start(
    rollout: type[RolloutActor], says: str, tmp_path: Path, picture_model: Path
) -> None:
    config = configuration(tmp_path, picture_model, weight_sync__logprob_check="warn")

    async def go_on(stage: Stage) -> None:
        await stage.sync_and_verify()
        [warning] = stage.events("logprob_warning")
        assert says in warning["why"]
        served, start = stage.engine.engine, load_file(picture_model / "model.safetensors")
        assert served.health().version == START
        assert all(torch.equal(tensor, start[name]) for name, tensor in served._parameters.items())

    act(config, go_on, rollout=rollout)


# Later, when the steps train on nothing fresh -----------------------------------------------------


async def observe(stage: Stage) -> None:
    stage.tasks = stage.tasks[:3]
    await stage.weight_sync.send(START)
    stage.found = await WeightCheck(stage.weight_sync).observe(stage.tasks, stage.runner, 10)


@pytest.mark.parametrize(
    ("rollout", "low", "high"), [(RolloutActor, 0, 1e-5), (OtherTemperature, 1e-3, 10)]
)
def test_fresh_episodes_tell_how_far_engine_and_trainer_are_apart(
    rollout: type[RolloutActor], low: float, high: float, tmp_path: Path, picture_model: Path
) -> None:
    stage = act(configuration(tmp_path, picture_model), observe, rollout=rollout)
    [logprob_check] = stage.events("logprob_check")
    assert logprob_check["mean"] == stage.found
    assert low <= logprob_check["mean"] < high
    assert logprob_check["images"] == 3


class Broken(RolloutActor):
    """Refuses every prompt."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        raise DataFailure("prompt", "cannot be read")


def test_episodes_that_cannot_be_played_tell_nothing_and_end_nothing(
    tmp_path: Path, picture_model: Path
) -> None:
    stage = act(configuration(tmp_path, picture_model), observe, rollout=Broken)
    assert stage.found is None
    assert [event["purpose"] for event in stage.events("probe_failed")] == ["drift"] * 3
    assert len(stage.events("drift_unknown")) == 1
    assert stage.runner.history._groups == {}
