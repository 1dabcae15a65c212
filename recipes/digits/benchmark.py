"""What a checkpoint of this recipe is measured on: the share of held-out rows that it sorts altogether."""

from rayloop.measure.benchmark import Benchmark, HeldOut

BENCHMARK = Benchmark(
    config="recipes/digits/quickstart.yaml",
    sets={"eval": HeldOut("runs/data/digits/eval.jsonl", samples=4)},
    score="exact",
    missing="python -m rayloop data prepare digits --out runs/data/digits",
)
