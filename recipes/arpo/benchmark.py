"""What a checkpoint of this recipe is measured on: the held-out seeds of its pages, played in the live browser."""

from rayloop.measure.benchmark import Benchmark, HeldOut

BENCHMARK = Benchmark(
    config="recipes/arpo/quickstart.yaml", sets={"val": HeldOut("recipes/arpo/tasks/val.jsonl", samples=4)}, score="success"
)
