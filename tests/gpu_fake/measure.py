"""``python -m tests.gpu_fake.measure CONFIG...``: one line of JSON each, of an update by rank 0 of
the configuration's ranks.

The engine, its collator, packing, loss and optimizer are the product's. Not there, and replaced:
CUDA, the other ranks (a fake process group), the weights' values, and images' contents. The
optimizer's own step, in place on what is resident, is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tests.gpu_fake import device

device.load()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  # it asks CUDA's own functions when it is imported
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # noqa: E402, F401
from transformers.models.qwen3_vl import modeling_qwen3_vl  # noqa: E402
from transformers.vision_utils import (  # noqa: E402
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from rayloop.core.types import ImageRef  # noqa: E402
from rayloop.engines import attention, models  # noqa: E402
from rayloop.engines.settings import ModelSettings, OptimizerSettings  # noqa: E402
from rayloop.engines.shape import Shape  # noqa: E402
from rayloop.engines.training import beforehand, collator, fsdp, lora, sharding, updates  # noqa: E402
from rayloop.estimate.memory import GIB, memory  # noqa: E402
from rayloop.run.config import RunConfig  # noqa: E402
from tests.gpu_fake.models import Row, run_of, shape_of, write_model  # noqa: E402
from tests.gpu_fake.shapes import ModelShape  # noqa: E402
from tests.gpu_fake.watch import Watch  # noqa: E402

P = ParamSpec("P")
R = TypeVar("R")


class Images:
    """Stands in for ``Vision``: pixels of the right shape, of which one patch exists until they are
    packed. ``numbers``: of a patch.
    """

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers

    def pixels(self, ref: Any, data: bytes | None = None, mask: int | None = None) -> Tensor:
        """[patches, numbers] of zeros."""
        return torch.zeros(1, self._numbers).expand(ref.grid[1] * ref.grid[2], -1)

    def dummy(self) -> tuple[Tensor, tuple[int, int, int], int]:
        """The smallest image."""
        return torch.zeros(4, self._numbers), (1, 2, 2), 1


def outside(work: Callable[P, R]) -> Callable[P, R]:
    """``work``, with real tensors on the CPU."""

    @wraps(work)
    def real(*arguments: P.args, **options: P.kwargs) -> R:
        with unset_fake_temporarily():
            return work(*arguments, **options)

    return real


class Stage:
    """What replaces the parts that cannot exist here, for one engine and the row that it trains."""

    def __init__(self, shape: ModelShape, images: Sequence[ImageRef]) -> None:
        self._grids = torch.tensor([image.grid for image in images])
        self.watch = Watch(sum(image.tokens for image in images))
        self.queries = {"language": [0, 0], "tower": [0, 0]}
        device.pretend(self.watch.attend)
        fsdp.on_all_ranks = sharding.on_all_ranks = lambda build, within=None: build()
        beforehand.total = updates.total = self._total
        sharding.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(
            pin_memory=False
        )  # fake tensors cannot be pinned
        fsdp.join = self._join
        fsdp.from_first = self._load
        fsdp.checkpoint_names = outside(models.checkpoint_names)
        collator.load_vision = lambda *_: Images(shape.patch_numbers)
        self._patched: list[tuple[Any, str, Any]] = []
        self._patch(collator.Collator, "_make_dummy", outside)
        self._patch(attention, "_samples", lambda make: self._counted("language", make))
        self._patch(attention, "_images", lambda make: self._counted("tower", make))
        self._patch(lora, "add_adapters", self._adapting)
        self._patch(modeling_qwen3_vl.Qwen3VLModel, "get_image_features", self._with_grids)

    def _patch(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        self._patched.append((owner, name, before))
        setattr(owner, name, around(before))

    def close(self) -> None:
        """Undo what another engine would do again."""
        for owner, name, before in self._patched:
            setattr(owner, name, before)
        self.watch.close()

    def _total(self, values: Sequence[Any], *_: Any) -> list[float]:
        self.watch.wait("total")
        return [float(value) for value in values]

    def _join(
        self, kind: str, rank: int, world_size: int, met: Any, timeout: float, replicas: int
    ) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        with unset_fake_temporarily():
            return sharding.join(kind, rank, world_size, None, timeout, replicas)

    def _load(self, load: Callable[[bool], Any], mesh: Any) -> Any:
        model = outside(load)(False)
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.get_input_embeddings().weight
        self.place(model)
        return model

    def place(self, model: nn.Module) -> None:
        """Put parameters and buffers on the device, as fake tensors."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.device.type != "cuda" and parameter not in made:
                    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                    made[parameter] = nn.Parameter(values, parameter.requires_grad)
                setattr(module, name, made.get(parameter, parameter))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda"))

    def _adapting(self, adapt: Callable[..., None]) -> Callable[..., None]:
        def adapted(model: nn.Module, *arguments: Any) -> None:
            move = nn.Module.to
            nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign]  # parameters that are fake cannot move
            try:
                adapt(model, *arguments)
            finally:
                nn.Module.to = move  # type: ignore[method-assign]
            self.place(model)

        return adapted

    def _with_grids(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        """Qwen3-VL's tower reads the images' grids from the device, where they have no values here.

        It computes these places from them on the device.
        """

        def encoded(model: Any, pixels: Tensor, _: Tensor, **options: Any) -> Any:
            self.watch.wait("grids")
            tower, grids = model.visual, self._grids
            merge = tower.spatial_merge_size
            with unset_fake_temporarily():
                rows = get_vision_position_ids(grids, merge)
                borders = get_vision_cu_seqlens(grids)
                indices, weights = get_vision_interpolation_indices_and_weights(
                    grids,
                    tower.num_grid_per_side,
                    tower.interpolation_mode,
                    tower.interpolation_align_corners,
                    merge,
                )
            places = {
                "position_ids": rows.to("cuda", non_blocking=True),
                "interp_indices": indices.to("cuda", non_blocking=True),
                "interp_weights": weights.to("cuda", non_blocking=True),
                "cu_seqlens": borders,
            }
            return encode(model, pixels, grids, **places, **options)

        return encoded

    def _counted(self, what: str, make: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def counted(source: Tensor) -> Any:
            layout = make(source)
            for i, number in enumerate(
                (sum(part.queries.numel() for part in layout.parts), layout.places.numel())
            ):
                self.queries[what][i] += number
            return layout

        return counted


def measure(config: RunConfig, layers: int | None = None) -> dict[str, Any]:
    """Peak, waits, calls and operations of an update of one of the longest rows, gradients of an
    earlier one being there, and what ``estimate`` says. ``layers``: of the language model, where
    not all.
    """
    row, settings = Row.longest(config), config.policy.engine
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    items = row.items()
    images = [image for item in items for image in item.trajectory.images]
    stage = Stage(shape_of(config), images)
    with tempfile.TemporaryDirectory() as folder, mode:
        write_model(config, Path(folder), layers)
        engine = fsdp.FsdpEngine(
            ModelSettings(path=folder),
            settings,
            OptimizerSettings(),
            config.policy.loss,
            rank=0,
            world_size=config.policy.ranks,
            init_method="fake",
            seed=0,
        )
        engine._optimizer._optimizer.step = lambda *_: None  # type: ignore[method-assign]
        _watch_resident(stage.watch, engine)
        resident = stage.watch.live
        with stage.watch:
            engine.train([items])
        found = _found(stage, engine, row, resident)
        shape = outside(_shape)(engine)
        engine.close()
    stage.close()
    (role,) = [role for role in memory(config, shape, row.lengths) if role.name == "policy"]
    parts = {name: round(size / GIB, 2) for name, size in role.of_gpu.items()}
    return found | {"estimate_gib": round(sum(parts.values()), 2), "estimate": parts}


def _watch_resident(watch: Watch, engine: fsdp.FsdpEngine) -> None:
    state = [
        tensor for tensors in engine._optimizer.state().values() for tensor in tensors.values()
    ]
    for parameter in engine._model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            state.append(parameter.grad)
    for tensor in [*engine._model.parameters(), *engine._model.buffers(), *state]:
        part = sharding.local(tensor.detach())
        if (
            part.device.type == "cuda"
        ):  # with cpu_offload parameters, gradients and moments are in main memory
            watch.see(part)


def _found(stage: Stage, engine: fsdp.FsdpEngine, row: Row, resident: int) -> dict[str, Any]:
    watch = stage.watch
    return {
        "tokens": row.tokens,
        "peak_gib": round(watch.peak / GIB, 2),
        "resident_gib": round(resident / GIB, 2),
        "at_peak": watch.at_peak,
        "devices": sorted(watch.devices),
        "flops": dict(watch.flops),
        "waits": dict(watch.waits),
        **watch.collectives,
        "attention": dict(watch.attention),
        "padded_queries": {
            name: round(all_ / real - 1, 3) for name, (all_, real) in stage.queries.items() if real
        },
    }


def _shape(engine: fsdp.FsdpEngine) -> Shape:
    """Of the model's checkpoint."""
    sizes = {
        fsdp.base_name(n): tuple(p.shape)
        for n, p in engine._model.named_parameters()
        if not fsdp.is_adapter(n)
    }
    config = engine._model.config
    return Shape(
        {engine._names[name]: size for name, size in sizes.items()},
        config.text_config.to_dict(),
        config.vision_config.to_dict(),
    )


def main(paths: Sequence[str]) -> None:
    """Print the lines."""
    for path in paths:
        path, _, layers = path.partition(":")
        began = time.perf_counter()
        found = measure(run_of(path), int(layers) if layers else None)
        print(
            json.dumps({"config": path, **found, "seconds": round(time.perf_counter() - began, 1)}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
