"""``python -m benchmarks.trainer.weight_sync_bytes``: what a weight sync moves over each hop, and
how long that takes at given speeds.

Bytes are those of the shapes of Qwen2.5-VL in bfloat16, of tensors without memory (device meta),
cut into buckets by the transport. Gathering is the same on all ways, and left out. Seconds are
computed, not measured: hops that follow each other, each at its speed; what runs beside, or once
the engines go on, is marked. Engines are on nodes of eight GPUs, the sender on the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEEDS = {"nvlink": 100e9, "ib": 40e9, "pcie": 25e9, "host": 5e9}
"""Bytes per second: NVLink as broadcasts see it, InfiniBand, host to GPU of each GPU, a core that
copies or sums.
"""
GPUS_PER_NODE = 8
"""Of a node."""
NODE_COUNTS = (1, 4)
TOWER = {"depth": 32, "hidden_size": 1280, "num_heads": 16}
MODELS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "7B": (
        1,
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18_944,
            "vocab_size": 152_064,
        },
        {"intermediate_size": 3420, "out_hidden_size": 3584},
    ),
    "72B": (
        4,
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 29_568,
            "vocab_size": 152_064,
        },
        {"intermediate_size": 3456, "out_hidden_size": 8192},
    ),
}
"""GPUs of an engine, language model and vision tower."""


@dataclass(frozen=True)
class Hop:
    """``total`` bytes, of all nodes and processes; ``longest``: those that follow each other at
    ``speed``. ``when``: "" is before the engines go on.
    """

    what: str
    speed: str
    total: int
    longest: int
    when: str = ""

    @property
    def seconds(self) -> float:
        return self.longest / SPEEDS[self.speed]


def sizes(model: str) -> tuple[int, list[int]]:
    """Bytes of the weights, and of each bucket in which they travel."""
    import torch
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    from rayloop.engines.models import hf_state
    from rayloop.transports.collective import buckets
    from rayloop.transports.settings import NcclTransport

    _, text, tower = MODELS[model]
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=TOWER | tower, tie_word_embeddings=False
    )
    with torch.device("meta"):
        made = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    tensors = hf_state(made)
    cut = buckets(tensors.items(), NcclTransport.bucket_bytes, torch.device("meta"))
    return sum(tensor.nbytes for tensor in tensors.values()), [len(bucket) for bucket, _ in cut]


def object_store(size: int, nodes: int, per_engine: int) -> Iterator[Hop]:
    """Weights are copied to the host, into the store, into a memory file of each node, and to the
    GPUs.
    """
    engines = nodes * GPUS_PER_NODE // per_engine
    yield Hop("sender: GPU to host", "pcie", size, size)
    yield Hop("sender: checksums", "host", size, size)
    yield Hop("sender: into the object store", "host", size, size)
    yield from _network(size, nodes)
    yield from _loaded(size, nodes, engines)


def collective_before(size: int, nodes: int, per_engine: int) -> Iterator[Hop]:
    """NCCL between the policy and the rollout actors, with the host's memory at both ends."""
    engines = nodes * GPUS_PER_NODE // per_engine
    yield Hop("sender: GPU to host", "pcie", size, size)
    yield Hop("sender: checksums", "host", size, size)
    yield Hop("sender: into the object store", "host", size, size)
    yield Hop("sender: into buckets", "host", size, size)
    yield Hop("sender: host to GPU", "pcie", size, size)
    yield Hop("broadcast to the actors", "ib" if nodes > 1 else "nvlink", engines * size, size)
    yield Hop("actors: GPU to host", "pcie", engines * size, size)
    yield from _loaded(size, nodes, engines)


def stream(size: int, nodes: int, per_engine: int) -> Iterator[Hop]:
    """NCCL between the policy and the engines' workers."""
    yield Hop(
        "broadcast to the workers",
        "ib" if nodes > 1 else "nvlink",
        nodes * GPUS_PER_NODE * size,
        size,
    )
    yield Hop("sender: GPU to host", "pcie", size, size, "beside")
    yield Hop("sender: into the object store", "host", size, size, "after")


def _network(size: int, nodes: int) -> Iterator[Hop]:
    if nodes > 1:
        yield Hop("store to the other nodes", "ib", (nodes - 1) * size, (nodes - 1) * size)


def _loaded(size: int, nodes: int, engines: int) -> Iterator[Hop]:
    workers = nodes * GPUS_PER_NODE
    yield Hop("actors: checksums", "host", engines * size, size)
    yield Hop("actors: into a memory file", "host", nodes * size, size)
    yield Hop("workers: checksums", "host", workers * size, size)
    yield Hop("workers: host to GPU", "pcie", engines * size, size * engines // workers)


WAYS = {
    "object_store": object_store,
    "collective before": collective_before,
    "stream (nccl)": stream,
}


def rows() -> Iterator[dict[str, Any]]:
    """One for each model, number of nodes and way."""
    for model, (per_engine, *_) in MODELS.items():
        size, cut = sizes(model)
        for nodes in NODE_COUNTS:
            for name, way in WAYS.items():
                hops = list(way(size, nodes, per_engine))
                waited = sum(hop.seconds for hop in hops if not hop.when)
                beside = sum(hop.seconds for hop in hops if hop.when == "beside")
                yield {
                    "model": model,
                    "weights_gb": round(size / 1e9, 2),
                    "buckets": len(cut),
                    "largest_bucket_gb": round(max(cut) / 1e9, 2),
                    "nodes": nodes,
                    "engines": nodes * GPUS_PER_NODE // per_engine,
                    "gpus_per_engine": per_engine,
                    "way": name,
                    "seconds_until_engines_go_on": round(max(waited, beside), 2),
                    "hops": [
                        {
                            "hop": hop.what,
                            "by": hop.speed,
                            "when": hop.when or "before",
                            "gb": round(hop.total / 1e9, 2),
                            "seconds": round(hop.seconds, 2),
                        }
                        for hop in hops
                    ],
                }


def main() -> None:
    """Print the table, and write it as JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = list(rows())
    for row in found:
        print(
            f"\n{row['model']} ({row['weights_gb']} GB, {row['buckets']} buckets), {row['nodes']}"
            f" nodes, {row['engines']} engines of {row['gpus_per_engine']} GPUs, {row['way']}:"
            f" {row['seconds_until_engines_go_on']} s"
        )
        for hop in row["hops"]:
            print(
                f"  {hop['hop']:<32}{hop['by']:<8}{hop['gb']:>10.2f} GB{hop['seconds']:>9.2f} s "
                f" {hop['when']}"
            )
    if arguments.out:
        speeds = {name: speed / 1e9 for name, speed in SPEEDS.items()}
        arguments.out.write_text(
            json.dumps({"speeds_gb_per_s": speeds, "rows": found}, indent=1) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
