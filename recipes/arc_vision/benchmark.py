"""What a checkpoint of this recipe is measured on: pages of the types it trained on, with controls, and of types it never saw."""

from rayloop.measure.benchmark import Benchmark, HeldOut

BENCHMARK = Benchmark(
    config="recipes/arc_vision/learn.yaml",
    sets={
        "test": HeldOut("recipes/arc_vision/pages/test.parquet", controls=True, samples=4),
        "ood": HeldOut("recipes/arc_vision/pages/ood.parquet"),
    },
    score="iou",
)
