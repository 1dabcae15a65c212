"""The one conversion of a picture to RGB: for prompts, engines, tools, data sets, and the code of a
sandbox. Needs PIL.
"""

import importlib
from typing import Any

GREYS = 2**16
"""Values of a grey pixel of 16 bits."""


def rgb(image: Any) -> Any:
    """An opened PIL image as RGB, EXIF orientation applied.

    Grey values of 16 bits are divided by 257, and a white page is put behind what is transparent,
    as qwen-vl-utils and vLLM do. Raises ValueError for pixels of 32 bits, whose range no file says,
    and OSError and others for a broken file, as PIL does.
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
        shown, opaque = _from_16_bits(image)
    elif image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        shown, opaque = with_alpha.convert("RGB"), with_alpha.getchannel("A")
    else:
        return image if image.mode == "RGB" else image.convert("RGB")
    page = importlib.import_module("PIL.Image").new("RGB", image.size, "white")
    page.paste(shown, mask=opaque)
    return page


def _scale_transparent_colour(image: Any) -> None:
    """PIL scales the pixels of a PNG to 8 bits, but not the colour that its header calls
    transparent.
    """
    colour = image.info.get("transparency")
    kind = image.tile[0].args if getattr(image, "tile", None) else ""
    if kind in ("L;2", "L;4"):
        if colour is not None:
            image.info["transparency"] = colour * 255 // (2 ** int(kind[-1]) - 1)
    elif kind == "RGB;16B" and colour is not None:
        image.info["transparency"] = tuple(part >> 8 for part in colour)


def _from_16_bits(image: Any) -> tuple[Any, Any]:
    """The grey picture with 8 bits, and where it is opaque (255)."""
    values = image.convert("I")
    opaque = [255] * GREYS
    if "transparency" in image.info:
        opaque[image.info["transparency"]] = 0
    grey = values.point([round(value / 257) for value in range(GREYS)], "L")
    return grey.convert("RGB"), values.point(opaque, "L")
