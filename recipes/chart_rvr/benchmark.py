"""What a checkpoint of this recipe is measured on: small generated charts that no training saw, with wrong images as controls.

The published benchmarks are files in ``benchmarks/``, each laid over the configuration of an evaluation.
"""

from rayloop.measure.benchmark import Benchmark, HeldOut

BENCHMARK = Benchmark(
    config="recipes/chart_rvr/quickstart.yaml",
    sets={"test": HeldOut("runs/data/chart_rvr/test.jsonl", controls=True, samples=4)},
    score="accuracy",
    missing="python -m rayloop data prepare chart_rvr --small --out runs/data/chart_rvr",
)
