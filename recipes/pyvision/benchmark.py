"""What a checkpoint of this recipe is measured on: scenes that no training saw."""

from rayloop.measure.benchmark import Benchmark, HeldOut

BENCHMARK = Benchmark(
    config="recipes/pyvision/quickstart.yaml",
    sets={"test": HeldOut("runs/data/pyvision/test.jsonl", samples=4)},
    score="accuracy",
    missing="python -m rayloop data prepare pyvision --out runs/data/pyvision",
)
