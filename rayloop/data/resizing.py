"""The sizes that the processors of transformers give an image."""

import math


def smart_resize(
    height: int,
    width: int,
    factor: int = 28,
    min_pixels: int = 56 * 56,
    max_pixels: int = 14 * 14 * 4 * 1280,
) -> tuple[int, int]:
    """(height, width) by the rule of transformers' Qwen2-VL.

    They are multiples of ``factor`` with an area in the range. A test compares the two.
    """
    # Python rounds halves to even, as the original does; floor or ceil would give other grids.
    rows = round(height / factor) * factor
    columns = round(width / factor) * factor
    if rows * columns > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    return rows, columns


def best_tiles(height: int, width: int, side: int, most: int) -> int:
    """The number of squares that transformers' InternVL cuts an image into.

    They are the rows x columns of the closest aspect ratio, at most ``most``; of equally close ones
    the last that the image fills by half. A test compares the two.
    """
    # sorted() is stable and equal areas stay in this order, which decides between equal ratios.
    shapes = [(w, h) for w in range(1, most + 1) for h in range(1, most // w + 1)]
    best = 1
    least_distance = math.inf
    for columns, rows in sorted(shapes, key=math.prod):
        distance = abs(width / height - columns / rows)
        half_filled = height * width > side * side * rows * columns / 2
        if distance < least_distance or (distance == least_distance and half_filled):
            best = rows * columns
            least_distance = distance
    return best
