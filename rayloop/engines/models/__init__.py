"""Loads a policy model in Hugging Face layout, and makes its pixels and positions.

Engine and trainer must agree on both. The model's family (rayloop/core/model_families.py) says how
it takes images.
"""

import hashlib
from collections.abc import Mapping, Sequence
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
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from rayloop.core.failures import ConfigError, DataFailure, InfrastructureFailure, counted
from rayloop.core.files import content
from rayloop.core.model_families import family, unsupported
from rayloop.core.model_files import Resolved
from rayloop.core.threads import Cache
from rayloop.core.types import ImageRef, PromptImage, TokenPrompt
from rayloop.data.images import MOST_BYTES, decode, image_geometry, masked
from rayloop.engines.attention import packs_images, use_packed_vision
from rayloop.engines.models.weights import as_saved as as_saved
from rayloop.engines.models.weights import checkpoint_names as checkpoint_names
from rayloop.engines.models.weights import copy_weights as copy_weights
from rayloop.engines.models.weights import hf_state as hf_state
from rayloop.engines.models.weights import model_groups as model_groups
from rayloop.engines.settings import ModelSettings
from rayloop.transports.manifest import DTYPES as DTYPES
from rayloop.transports.manifest import has_nan


def has_vision(config: PreTrainedConfig) -> bool:
    """Whether the model reads images."""
    return "vision_config" in config.sub_configs


def load_model(
    settings: ModelSettings, *, dtype: torch.dtype = torch.float32, weights: bool = True
) -> PreTrainedModel:
    """Return the model with its pretrained weights, in eval mode on the CPU.

    ``weights=False``: its parameters are on the device meta, without memory, and not tied; only its
    buffers have values. Raises ConfigError for a folder that cannot be loaded or lacks weights, and
    for an unsupported vision model.
    """
    disable_progress_bar()
    settings = settings.here(weights=weights)
    folder = Resolved(Path(settings.path))
    folder.refuse_two_models()
    if weights:
        folder.stored()  # raises for tensors that are missing, with their file
    try:
        config = AutoConfig.from_pretrained(settings.path, trust_remote_code=False)
        _refuse_unsupported(config, settings.path)
        _without_dropout(config)
        model, missing = _instantiate(config, settings.path, dtype, weights)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"model.path {settings.path} cannot be loaded: {error}. Expected a folder in Hugging"
            " Face layout"
        ) from error
    if missing:
        raise ConfigError(
            f"model.path {settings.path} lacks {len(missing)} weights, first {missing[0]}"
        )
    if weights:
        # transformers loads NaN without a warning, and the first update would spread it.
        _refuse_nan(model, settings.path)
    if family(config.model_type).images == "patches":
        _patches_by_matmul(model)
        use_packed_vision(model)
    return model.eval()


def _refuse_unsupported(config: PreTrainedConfig, path: str) -> None:
    """Raise ConfigError for an unsupported model, before gigabytes are read."""
    text = config.get_text_config().to_dict()
    quantised = "quantization_config" in config.to_dict()
    reason = unsupported(config.model_type, has_vision(config), text, quantised)
    if reason:
        raise ConfigError(f"model.path {path}: {reason}")


def _instantiate(
    config: PreTrainedConfig, path: str, dtype: torch.dtype, weights: bool
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model, and the weights that its folder lacks."""
    auto = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    options = {"config": config, "dtype": dtype, "attn_implementation": _attention(config, dtype)}
    if weights:
        model, report = auto.from_pretrained(
            path, output_loading_info=True, trust_remote_code=False, **options
        )
        return model, sorted(report["missing_keys"])
    # The import takes a second, so that only the ranks that need it import it.
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return auto.from_config(trust_remote_code=False, **options), []


def _refuse_nan(model: PreTrainedModel, path: str) -> None:
    """Raise ConfigError for weights that no update and no engine can compute with."""
    defects = [name for name, parameter in model.named_parameters() if has_nan(parameter)]
    if defects:
        raise ConfigError(
            f"model.path {path}: NaN or an infinity in {counted(len(defects), 'tensor')}, first"
            f" {defects[0]}: the weights are not finite. Download or merge them again"
        )


def _without_dropout(config: PreTrainedConfig) -> None:
    """Set all dropout to 0.

    An engine samples without dropout, and an update computes the distribution that was sampled.
    """
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    for part in (config, *parts):
        for name in list(vars(part)):
            if "dropout" in name or name.endswith("pdrop"):
                setattr(part, name, 0.0)


def _patches_by_matmul(model: PreTrainedModel) -> None:
    """Embed patches by a matrix product.

    The convolution's kernel is its stride, and its bf16 backward is far slower.
    """
    embed = model.base_model.visual.patch_embed

    def forward(patches: Tensor) -> Tensor:
        weight, bias = embed.proj.weight, embed.proj.bias
        return torch.nn.functional.linear(patches.to(weight.dtype), weight.flatten(1), bias)

    embed.forward = forward


def _attention(config: PreTrainedConfig, dtype: torch.dtype) -> str:
    """Return the implementation of attention.

    That is eager where scores are capped, flash-attention-2 on CUDA when it is installed and the
    model is text-only, else SDPA.
    """
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping") is not None
    on_flash_gpu = torch.cuda.is_available() and is_flash_attn_2_available()
    if on_flash_gpu and dtype == torch.bfloat16 and not has_vision(config):
        return "flash_attention_2"
    return "eager" if capped else "sdpa"


def tensor_cache(limit: int = 256 << 20) -> Cache[str, Tensor]:
    """Return a cache of tensors by content hash, of at most ``limit`` bytes."""
    return Cache(limit, lambda tensor: tensor.nbytes)


def image_limits(settings: ModelSettings, config: PreTrainedConfig) -> dict[str, Any]:
    """Return ``min_pixels`` and ``max_pixels`` as the options of the family's image processor."""
    model_family = family(config.model_type)
    if model_family.images == "tiles":
        tiles = image_geometry(config.to_dict(), settings.min_pixels, settings.max_pixels).tiles
        return {"crop_to_patches": True, "min_patches": 1, "max_patches": tiles}
    return {
        "size": {
            "shortest_edge": model_family.frames * settings.min_pixels,
            "longest_edge": model_family.frames * settings.max_pixels,
        }
    }


def in_both_spellings(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``image_limits`` with the two numbers also outside ``size``.

    A folder may have them there, as Qwen-VL's folders do, and they then count.
    """
    size = limits.get("size")
    if not size:
        return dict(limits)
    pixels = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    return {**limits, **pixels}


class Vision:
    """Turns encoded images into the model's patches, the same in engine and trainer.

    Decoded images are cached by content.
    """

    def __init__(self, settings: ModelSettings, config: PreTrainedConfig) -> None:
        settings = settings.here(weights=False)
        processor = getattr(transformers, family(config.model_type).processor)
        limits = image_limits(settings, config)
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
        """Return pixels, grid and number of tokens of the smallest possible image."""
        geometry = self._geometry
        side = geometry.tile // geometry.patch or geometry.merge
        shape: tuple[int, ...] = (1, 3, geometry.tile, geometry.tile)
        if not geometry.tile:
            values = 3 * self._config.temporal_patch_size * geometry.patch**2
            shape = (side**2, values)
        return torch.zeros(shape), (1, side, side), (side // geometry.merge) ** 2

    def pixels(self, ref: ImageRef, data: bytes | None = None, mask: int | None = None) -> Tensor:
        """Return normalised patches [t * h * w, channels * temporal_patch * patch²], float32.

        Of a family of tiles: [t, channels, side, side]. Without ``data`` the image is read from
        ``ref.path``. With ``mask``, a seed, it is masked first. Raises DataFailure when it is
        missing, corrupt, not the image of ``ref.sha256``, or of another grid than ``ref.grid``;
        InfrastructureFailure when the file system fails.
        """
        # A mask is used in one step only, and would push images out of the cache.
        if mask is not None:
            return self._process(ref, data, mask)
        return self._cache.made(ref.sha256, lambda: self._process(ref, data, None))

    def _process(self, ref: ImageRef, data: bytes | None, mask: int | None) -> Any:
        name = _name(ref)
        encoded = read_image(ref, data)
        try:
            image = decode(encoded)
            if mask is not None:
                image = masked(image, mask)
            features = self._processor(images=[image], return_tensors="pt")
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
    """Return the encoded image: ``data``, or the file at ``ref.path``.

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
    """Return the model's ``Vision``, or None for a text-only model. Raises ConfigError."""
    return Vision(settings, config) if has_vision(config) else None


def image_features(model: PreTrainedModel, pixels: Tensor, grids: Tensor) -> Sequence[Tensor]:
    """Return the features [tokens, hidden] of each image. Only for a ``pooled`` family.

    ``pixels`` has the pixels of all images in a row, ``grids`` [n, 3] int64 is on the CPU.
    """
    if family(model.config.model_type).images == "tiles":
        pooled: Tensor = model.get_image_features(pixels, return_dict=True).pooler_output
        tiles_of_images = pooled.split(grids[:, 0].tolist())
        return [tiles.flatten(0, 1) for tiles in tiles_of_images]
    places = _tower_places(model, grids, pixels.device)
    grids = grids if places else grids.to(pixels.device)
    features: Sequence[Tensor] = model.get_image_features(
        pixels, grids, return_dict=True, **places
    ).pooler_output
    return features


def _tower_places(model: PreTrainedModel, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the values that a tower of Qwen2-VL and Qwen2.5-VL computes before its layers.

    They follow from ``grids`` [n, 3] on the CPU: on a GPU the tower would wait six times for the
    device. Empty for other towers.
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
    """Return the position ids of one whole sequence.

    They are [4, T] (text, then M-RoPE's t, h, w) for a model of images as patches, else [1, T].
    ``token_ids`` [T] int64, expanded; ``grids`` [n, 3] int64, in order. Raises DataFailure when
    tokens and grids disagree.
    """
    text = torch.arange(len(token_ids), device=token_ids.device)[None]
    config = model.config
    if not has_vision(config):
        return text
    image = token_ids == config.image_token_id
    patches = family(config.model_type).images == "patches"
    if patches:
        merge = config.vision_config.spatial_merge_size
    else:
        merge = round(1 / config.downsample_ratio)
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


def collapsed(prompt: TokenPrompt, image_token: int | None, *, around: bool = False) -> list[int]:
    """Return the prompt's tokens with one image token per image.

    ``around``: it also stands for the token on each side; ``image_token`` None: the model is
    text-only. Raises DataFailure for a prompt without tokens, or with more or fewer image tokens
    than needed.
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
    places = np.flatnonzero(ids == image_token)
    counts = [image.ref.tokens for image in prompt.images]
    if len(places) != sum(counts):
        raise DataFailure(
            "prompt", f"{len(places)} image tokens, but its {len(counts)} images need {sum(counts)}"
        )
    ends = np.cumsum([0, *counts])
    # The first token of each image stays; the engine expands it again to the number that its grid
    # needs.
    dropped: list[npt.NDArray[np.int64]] = [np.delete(places, ends[:-1])]
    if around and counts:
        dropped += [places[ends[:-1]] - 1, places[ends[1:] - 1] + 1]
    collapsed_ids: list[int] = np.delete(ids, np.concatenate(dropped)).tolist()
    return collapsed_ids


def picture(image: PromptImage, patch: int) -> Image.Image:
    """Return the image in the size that the model sees, so that an engine does not resize it.

    That is ``patch`` pixels for each patch of its grid; with 0 the image keeps its size. Raises
    DataFailure, InfrastructureFailure. Takes 0.2 s for 8 megapixels.
    """
    image_as_sent = decode(read_image(image.ref, image.data))
    if not patch:
        return image_as_sent
    _, rows, columns = image.ref.grid
    size = (columns * patch, rows * patch)
    return image_as_sent.resize(size, Image.Resampling.BICUBIC)
