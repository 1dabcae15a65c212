"""Loads a policy model in Hugging Face layout; makes the pixels and positions on which engine and
trainer must agree. How a model takes images is said of its family (rayloop/core/model_families.py).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from rayloop.core.failures import (
    ConfigError,
    DataFailure,
    InfrastructureFailure,
    WeightSyncError,
    counted,
)
from rayloop.core.files import content
from rayloop.core.model_families import family, unsupported
from rayloop.core.model_files import Resolved
from rayloop.core.protocols import Manifest
from rayloop.core.threads import Cache
from rayloop.core.types import ImageRef, PromptImage, TokenPrompt
from rayloop.data.images import MOST_BYTES, decode, image_geometry
from rayloop.engines.attention import packs_images, use_packed_vision
from rayloop.engines.settings import ModelSettings
from rayloop.transports.manifest import DTYPES as DTYPES
from rayloop.transports.manifest import has_nan, verify

FUSED = (".experts.gate_up_proj", ".experts.down_proj")
"""How the names end of the tensors that hold all experts of a layer: [experts, out, in]."""


def has_vision(config: PreTrainedConfig) -> bool:
    """Whether the model reads images."""
    return "vision_config" in config.sub_configs


def load_model(
    settings: ModelSettings, *, dtype: torch.dtype = torch.float32, weights: bool = True
) -> PreTrainedModel:
    """The model with its pretrained weights, in eval mode on the CPU. ``weights=False``: its
    parameters are on the device meta, without memory, and not tied; only its buffers have values.
    Raises ConfigError for a folder that cannot be loaded or lacks weights, and for an unsupported
    vision model.
    """
    disable_progress_bar()
    settings = settings.here(weights=weights)
    folder = Resolved(Path(settings.path))
    folder.refuse_two_models()
    if weights:
        folder.stored()  # raises for tensors that are missing, with their file
    try:
        config = AutoConfig.from_pretrained(settings.path, trust_remote_code=False)
        vision = has_vision(config)
        quantised = "quantization_config" in config.to_dict()
        # The configuration alone decides it, before gigabytes are read.
        if why := unsupported(
            config.model_type, vision, config.get_text_config().to_dict(), quantised
        ):
            raise ConfigError(f"model.path {settings.path}: {why}")
        _without_dropout(config)
        auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        made = {"config": config, "dtype": dtype, "attn_implementation": _attention(config, dtype)}
        if weights:
            model, report = auto.from_pretrained(
                settings.path, output_loading_info=True, trust_remote_code=False, **made
            )
        else:
            from accelerate import (
                init_empty_weights,
            )  # a second of imports, for the ranks that need it

            with init_empty_weights(include_buffers=False):
                model, report = (
                    auto.from_config(trust_remote_code=False, **made),
                    {"missing_keys": ()},
                )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"model.path {settings.path} cannot be loaded: {error}. Expected a folder in Hugging"
            " Face layout"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model.path {settings.path} lacks {len(missing)} weights, first {missing[0]}"
        )
    if weights:
        # transformers loads NaN without a word, and the first update would spread it.
        _refuse_nan(model, settings.path)
    if family(config.model_type).images == "patches":
        _patches_by_matmul(model)
        use_packed_vision(model)
    return model.eval()


def _refuse_nan(model: PreTrainedModel, path: str) -> None:
    """Raises ConfigError for weights that no update and no engine can compute with."""
    wrong = [name for name, parameter in model.named_parameters() if has_nan(parameter)]
    if wrong:
        raise ConfigError(
            f"model.path {path}: NaN or an infinity in {counted(len(wrong), 'tensor')}, first"
            f" {wrong[0]}: the weights are not finite. Download or merge them again"
        )


def _without_dropout(config: PreTrainedConfig) -> None:
    """An engine samples without dropout, and an update computes what it sampled from."""
    for part in (
        config,
        *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig)),
    ):
        for name in [name for name in vars(part) if "dropout" in name or name.endswith("pdrop")]:
            setattr(part, name, 0.0)


def _patches_by_matmul(model: PreTrainedModel) -> None:
    """Embed patches by a matrix product: the convolution's kernel is its stride, and its bf16
    backward is far slower.
    """
    embed = model.base_model.visual.patch_embed

    def forward(patches: Tensor) -> Tensor:
        weight, bias = embed.proj.weight, embed.proj.bias
        return torch.nn.functional.linear(patches.to(weight.dtype), weight.flatten(1), bias)

    embed.forward = forward


def _attention(config: PreTrainedConfig, dtype: torch.dtype) -> str:
    """flash-attention-2 on CUDA when it is installed and the model is text-only, else SDPA; eager
    where scores are capped.
    """
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping") is not None
    flash = torch.cuda.is_available() and is_flash_attn_2_available() and dtype == torch.bfloat16
    return (
        "flash_attention_2" if flash and not has_vision(config) else "eager" if capped else "sdpa"
    )


def tensor_cache(limit: int = 256 << 20) -> Cache[str, Tensor]:
    """Tensors by content hash, at most ``limit`` bytes of them."""
    return Cache(limit, lambda tensor: tensor.nbytes)


def image_limits(settings: ModelSettings, config: PreTrainedConfig) -> dict[str, Any]:
    """``min_pixels`` and ``max_pixels`` as the options of the family's image processor."""
    known = family(config.model_type)
    if known.images == "tiles":
        tiles = image_geometry(config.to_dict(), settings.min_pixels, settings.max_pixels).tiles
        return {"crop_to_patches": True, "min_patches": 1, "max_patches": tiles}
    return {
        "size": {
            "shortest_edge": known.frames * settings.min_pixels,
            "longest_edge": known.frames * settings.max_pixels,
        }
    }


def in_both_spellings(limits: Mapping[str, Any]) -> dict[str, Any]:
    """``image_limits`` for a folder that may also have the two numbers outside ``size``, as those
    of Qwen-VL, which then count.
    """
    size = limits.get("size")
    return {
        **limits,
        **(
            {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
            if size
            else {}
        ),
    }


class Vision:
    """Turns encoded images into the model's patches, alike in engine and trainer.

    Decoded images are cached by content.
    """

    def __init__(self, settings: ModelSettings, config: PreTrainedConfig) -> None:
        settings = settings.here(weights=False)
        processor, limits = (
            getattr(transformers, family(config.model_type).processor),
            image_limits(settings, config),
        )
        try:
            self._processor = processor.from_pretrained(settings.path, **in_both_spellings(limits))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path {settings.path}: no usable preprocessor_config.json: {error}"
            ) from error
        self._geometry = image_geometry(config.to_dict(), settings.min_pixels, settings.max_pixels)
        self._cache = tensor_cache()
        self._config = config.vision_config

    def dummy(self) -> tuple[Tensor, tuple[int, int, int], int]:
        """Pixels, grid and number of tokens of the smallest image that there can be."""
        cut, vision = self._geometry, self._config
        side = cut.tile // cut.patch or cut.merge
        shape = (
            (1, 3, cut.tile, cut.tile)
            if cut.tile
            else (side**2, 3 * vision.temporal_patch_size * cut.patch**2)
        )
        return torch.zeros(shape), (1, side, side), (side // cut.merge) ** 2

    def pixels(self, ref: ImageRef, data: bytes | None = None) -> Tensor:
        """Normalised patches [t * h * w, channels * temporal_patch * patch²], or tiles [t,
        channels, side, side], float32. Without ``data`` the image is read from ``ref.path``. Raises
        DataFailure when it is missing, corrupt, not the image of ``ref.sha256``, or of another grid
        than ``ref.grid``; InfrastructureFailure when the file system fails.
        """
        return self._cache.made(ref.sha256, lambda: self._made(ref, data))

    def _made(self, ref: ImageRef, data: bytes | None) -> Any:
        name, encoded = _name(ref), read_image(ref, data)
        try:
            features = self._processor(images=[decode(encoded)], return_tensors="pt")
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataFailure(name, f"the image cannot be decoded: {error}") from error
        pixels = features["pixel_values"]
        if self._geometry.tile:
            tiles, _, *sides = pixels.shape
            grid = (tiles, *(side // self._geometry.patch for side in sides))
        else:
            grid = tuple(features["image_grid_thw"][0].tolist())

        # The prompt has as many image tokens as its grid
        # says: another grid would shift all that follow.
        if grid != tuple(ref.grid):
            raise DataFailure(
                name,
                f"the processor's grid is {grid}, the prompt was rendered for {tuple(ref.grid)}",
            )
        return pixels


def _name(ref: ImageRef) -> str:
    return ref.path or f"image {ref.sha256[:12]}"


def read_image(ref: ImageRef, data: bytes | None = None) -> bytes:
    """The encoded image: ``data``, or what is at ``ref.path``.

    Raises DataFailure when it is missing or not the one that ``ref.sha256`` names,
    InfrastructureFailure when the file system fails.
    """
    name = _name(ref)
    if data is None:
        if ref.path is None:
            raise DataFailure(name, "the image has neither bytes nor a path")
        try:
            data = content(ref.path, MOST_BYTES)
        except FileNotFoundError as error:
            raise DataFailure(name, "the image does not exist") from error
        except OSError as error:
            raise InfrastructureFailure(f"{name}: the image cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise DataFailure(name, "the image's content is not the one the prompt was rendered for")
    return data


def load_vision(settings: ModelSettings, config: PreTrainedConfig) -> Vision | None:
    """The model's ``Vision``, or None for a text-only model. Raises ConfigError."""
    return Vision(settings, config) if has_vision(config) else None


def image_features(model: PreTrainedModel, pixels: Tensor, grids: Tensor) -> Sequence[Tensor]:
    """Of each image [tokens, hidden]; ``pixels`` of all after each other, ``grids`` [n, 3] int64 on
    the CPU. Only for a ``pooled`` family.
    """
    if family(model.config.model_type).images == "tiles":
        made: Tensor = model.get_image_features(pixels, return_dict=True).pooler_output
        return [tiles.flatten(0, 1) for tiles in made.split(grids[:, 0].tolist())]
    places = _tower_places(model, grids, pixels.device)
    grids = grids if places else grids.to(pixels.device)
    features: Sequence[Tensor] = model.get_image_features(
        pixels, grids, return_dict=True, **places
    ).pooler_output
    return features


def _tower_places(model: PreTrainedModel, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What a tower of Qwen2-VL and Qwen2.5-VL computes from ``grids`` [n, 3] before its layers,
    from a copy on the CPU: on a GPU it would wait six times for the device. Nothing for other
    towers.
    """
    tower = model.base_model.visual
    if model.config.model_type not in ("qwen2_vl", "qwen2_5_vl") or not packs_images(model):
        return {}
    merge = tower.spatial_merge_size
    rows = get_vision_position_ids(grids, merge)
    places = {
        "position_ids": rows.to(device, non_blocking=True),
        "cu_seqlens": get_vision_cu_seqlens(grids),
    }
    if model.config.model_type == "qwen2_5_vl":
        index, windows = get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        places |= {
            "window_index": index.to(device, non_blocking=True),
            "cu_window_seqlens": windows,
        }
    return places


def positions(model: PreTrainedModel, token_ids: Tensor, grids: Tensor) -> Tensor:
    """Position ids of one whole sequence: [4, T] (text, then M-RoPE's t, h, w) for a model of
    images as patches, else [1, T]. ``token_ids`` [T] int64, expanded; ``grids`` [n, 3] int64, in
    order. Raises DataFailure when tokens and grids disagree.
    """
    text = torch.arange(len(token_ids), device=token_ids.device)[None]
    config = model.config
    if not has_vision(config):
        return text
    image, patches = (
        token_ids == config.image_token_id,
        family(config.model_type).images == "patches",
    )
    merge = (
        config.vision_config.spatial_merge_size if patches else round(1 / config.downsample_ratio)
    )
    expected = int(grids.prod(-1).sum()) // merge**2
    if int(image.sum()) != expected:
        raise DataFailure(
            "token sequence",
            f"{int(image.sum())} image tokens, but the grids {grids.tolist()} need {expected}",
        )
    if not patches:
        return text
    if not len(grids):
        return text.expand(4, -1)
    rotary, _ = model.base_model.get_rope_index(
        token_ids[None], mm_token_type_ids=image[None].int(), image_grid_thw=grids
    )
    return torch.cat([text, rotary[:, 0]])


def checkpoint_names(model: PreTrainedModel) -> dict[str, str]:
    """The model's parameter names mapped to those of its Hugging Face checkpoint; a tied head is
    listed once, and experts by the name that all of a layer have here. Raises ConfigError for a
    model whose checkpoint is else no renaming of its parameters.
    """
    every = [name for name, _ in model.named_parameters()]
    fused = FUSED if family(model.config.model_type).experts else ()
    names = [name for name in every if not name.endswith(fused)]
    try:
        # A number stands for each tensor: where it comes out shows its name in the checkpoint. Two
        # elements show a merge by their shape.
        tags = revert_weight_conversion(
            model, {name: torch.tensor([i, i]) for i, name in enumerate(names)}
        )
    except (IndexError, RuntimeError, ValueError):  # a conversion of tensors of other shapes
        tags = {}
    by_index = {int(tag[0]): name for name, tag in tags.items() if tag.shape == (2,)}
    if sorted(by_index) != list(range(len(names))):
        raise ConfigError(
            f"{type(model).__name__}: its checkpoint merges or splits parameters, which a weight"
            " sync cannot send"
        )
    return {name: name for name in every} | {name: by_index[i] for i, name in enumerate(names)}


def hf_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters themselves (detached, same storage) under their checkpoint names."""
    names, layout = checkpoint_names(model), family(model.config.model_type).experts
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors |= as_saved(layout, names[name], parameter.detach())
    return tensors


def copy_weights(
    manifest: Manifest, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> None:
    """Verify the weights, then copy them into ``parameters`` (see ``hf_state``) in place, converted
    to their dtype. Raises WeightSyncError, also for weights of another model; nothing is copied
    then.
    """
    # All checks come before the first copy: half of
    # the new weights would be worse than the old ones.
    verify(manifest, tensors)

    # A tensor that is left out would keep the old weights without a sign.
    missing, unknown = parameters.keys() - tensors.keys(), tensors.keys() - parameters.keys()
    shapes = [
        name
        for name in parameters.keys() & tensors.keys()
        if parameters[name].shape != tensors[name].shape
    ]
    if missing or unknown or shapes:
        raise WeightSyncError(
            f"version {manifest.version} is of another model than the engine's: "
            f"missing {sorted(missing)}, unknown {sorted(unknown)}, other shapes {sorted(shapes)}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def model_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Checkpoint names by part of the model, for the self-test of the weight sync; parts that do
    not occur are left out.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_part(name), []).append(name)
    return groups


def _part(name: str) -> str:
    if "visual." in name or "vision_tower." in name or "multi_modal_projector." in name:
        return "merger" if "merger" in name or "projector" in name else "vision"
    if "embed_tokens" in name:
        return "embedding"
    return "head" if name.startswith("lm_head") else "language"


def collapsed(prompt: TokenPrompt, image_token: int | None, *, around: bool = False) -> list[int]:
    """The prompt's tokens with one image token per image, ``around``: it also stands for the token
    on each side; ``image_token`` None: the model is text-only. Raises DataFailure for a prompt
    without tokens, or with more or fewer image tokens than needed.
    """
    if not prompt.token_ids:
        raise DataFailure("prompt", "it has no tokens")
    if image_token is None:
        if prompt.images:
            raise DataFailure(
                "prompt", f"it has {len(prompt.images)} images, but the model is text-only"
            )
        return list(prompt.token_ids)
    ids = np.array(prompt.token_ids)
    where = np.flatnonzero(ids == image_token)
    counts = [image.ref.tokens for image in prompt.images]
    if len(where) != sum(counts):
        raise DataFailure(
            "prompt", f"{len(where)} image tokens, but its {len(counts)} images need {sum(counts)}"
        )
    ends = np.cumsum([0, *counts])
    # The first token of each image stays; the engine expands it again to as many as its grid needs.
    gone: list[npt.NDArray[np.int64]] = [np.delete(where, ends[:-1])]
    if around and counts:
        gone += [where[ends[:-1]] - 1, where[ends[1:] - 1] + 1]
    rest: list[int] = np.delete(ids, np.concatenate(gone)).tolist()
    return rest


def picture(image: PromptImage, patch: int) -> Image.Image:
    """Returns the image in the size that the model sees, ``patch`` pixels for each patch of its
    grid, so that an engine does not resize it; as it is with 0. Raises DataFailure,
    InfrastructureFailure. Takes 0.2 s for 8 megapixels.
    """
    if not patch:
        return decode(read_image(image.ref, image.data))
    size = (image.ref.grid[2] * patch, image.ref.grid[1] * patch)
    return decode(read_image(image.ref, image.data)).resize(size, Image.Resampling.BICUBIC)


def as_saved(layout: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor under the names of the checkpoint, as views of it.

    ``layout``: of the family (``ModelFamily.experts``).
    """
    if not layout or not name.endswith(FUSED):
        return {name: tensor}
    if layout == "transposed":
        return {name: tensor.transpose(1, 2)}
    experts, _, kind = name.rpartition(".")
    parts = kind.replace("gate_up", "gate up").replace("_proj", "").split()
    return {
        f"{experts}.{number}.{part}_proj.weight": view
        for number, expert in enumerate(tensor)
        for part, view in zip(parts, expert.chunk(len(parts)), strict=True)
    }
