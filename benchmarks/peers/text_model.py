"""Makes the model of ``bench``: a Qwen2 of 8.1 M parameters with random weights and a tokenizer
trained on the spot.

python -m benchmarks.peers.text_model DIR
"""

from __future__ import annotations

import argparse
import random
import string
from pathlib import Path
from typing import Any

from rayloop.engines.tiny_vlm import write_tiny_vlm

SIZES: dict[str, Any] = {
    "hidden": 256,
    "layers": 8,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 1024,
    "vocabulary": 1024,
}


def texts(number: int, seed: int = 0) -> list[str]:
    """Made-up words and sums, enough of them for a tokenizer to fill its vocabulary."""
    generator = random.Random(seed)
    words = [
        "".join(generator.choices(string.ascii_lowercase, k=generator.randint(2, 7)))
        for _ in range(400)
    ]
    return [
        f"{' '.join(generator.choices(words, k=30))} {generator.randint(0, 99)} +"
        f" {generator.randint(0, 99)} = "
        for _ in range(number)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_tiny_vlm(folder, texts(800), vision=False, rope_theta=10_000.0, init=0.02, **SIZES)
    print(folder)


if __name__ == "__main__":
    main()
