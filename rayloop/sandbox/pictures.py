"""The conversion of a picture to RGB.

Prompts, engines, tools, data sets and the code of a sandbox all use it. It needs PIL.
"""

import importlib
from typing import Any

GREY_VALUES = 2**16
"""The number of values of a grey pixel of 16 bits."""


def rgb(image: Any) -> Any:
    """An opened PIL image as RGB, EXIF orientation applied.

    Grey values of 16 bits are divided by 257, and transparent pixels get a white background, as in
    qwen-vl-utils and vLLM. Raises ValueError for pixels of 32 bits, whose range no file states, and
    OSError and others for a broken file, as PIL does.
    """
    # Before the pixels are loaded: PIL then forgets how the file stored them.
    _scale_transparent_colour(image)
    importlib.import_module("PIL.ImageOps").exif_transpose(image, in_place=True)
    image.load()
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are numbers of 32 bits (mode {image.mode}) of unknown range. Save it with"
            " 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):
        picture, opacity = _from_16_bits(image)
    elif image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        picture = with_alpha.convert("RGB")
        opacity = with_alpha.getchannel("A")
    else:
        return image if image.mode == "RGB" else image.convert("RGB")
    background = importlib.import_module("PIL.Image").new("RGB", image.size, "white")
    background.paste(picture, mask=opacity)
    return background


def _scale_transparent_colour(image: Any) -> None:
    """Scale the colour that the header of a PNG declares transparent to 8 bits.

    PIL scales the pixels, but not this colour.
    """
    colour = image.info.get("transparency")
    if colour is None:
        return
    raw_mode = image.tile[0].args if getattr(image, "tile", None) else ""
    if raw_mode in ("L;2", "L;4"):
        bits = int(raw_mode[-1])
        image.info["transparency"] = colour * 255 // (2**bits - 1)
    elif raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(part >> 8 for part in colour)


def _from_16_bits(image: Any) -> tuple[Any, Any]:
    """The grey picture with 8 bits, and its opacity (0 or 255)."""
    values = image.convert("I")
    opacity = [255] * GREY_VALUES
    if "transparency" in image.info:
        opacity[image.info["transparency"]] = 0
    scaled = [round(value / 257) for value in range(GREY_VALUES)]
    grey = values.point(scaled, "L")
    return grey.convert("RGB"), values.point(opacity, "L")
