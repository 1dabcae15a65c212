"""The peer's side of ``python -m benchmarks compare``: the same GRPO step with TRL's GRPOTrainer,
measured alike.

It runs in an environment of its own that has trl, torch, transformers and datasets, and nothing of
rayloop. The last line is JSON. Generation is from the step's begin to its scored answers, training
the rest of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BEGAN = time.time()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def digit_share(completions: list[str], **columns: Any) -> list[float]:
    """The same toy reward as ours: the share of characters that are digits."""
    return [
        sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions
    ]


class Timed(GRPOTrainer):
    """Notes when each step has its scored answers, and how many tokens these have."""

    generation: list[float] = []
    tokens: list[int] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        scored = super()._generate_and_score_completions(inputs)
        self.generation.append(time.perf_counter() - began)
        self.tokens.append(int(scored["completion_mask"].sum()))
        return scored


class Ends(TrainerCallback):
    """When the first step began, and when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        if not self.times:
            self.times.append(time.perf_counter())

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.times.append(time.perf_counter())


def trainer(shape: argparse.Namespace, output: str) -> Timed:
    torch.set_num_threads(shape.threads)
    prompts = [
        json.loads(line)["prompt"] for line in shape.rows.read_text(encoding="utf-8").splitlines()
    ]
    config = GRPOConfig(
        output_dir=output,
        max_steps=shape.steps,
        per_device_train_batch_size=shape.prompts * shape.group,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        generation_kwargs={"min_new_tokens": shape.completion},
        learning_rate=shape.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        use_cpu=not torch.cuda.is_available(),
        bf16=shape.dtype == "bfloat16",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    return Timed(
        model=AutoModelForCausalLM.from_pretrained(shape.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(shape.model, padding_side="left"),
        reward_funcs=digit_share,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    )


def result(shape: argparse.Namespace, trained: Timed, ends: Ends, setup: float) -> dict[str, Any]:
    steps = [after - before for before, after in pairwise(ends.times)]
    training = [whole - part for whole, part in zip(steps, trained.generation, strict=True)]
    warm = slice(1 if len(steps) > 1 else 0, None)
    offset = time.time() - time.perf_counter()
    return {
        "tool": "trl",
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        **{name: value for name, value in vars(shape).items() if name not in ("model", "rows")},
        "model": str(shape.model),
        "params_m": round(sum(p.numel() for p in trained.model.parameters()) / 1e6, 3),
        "setup_s": round(setup, 2),
        "wall_s": round(ends.times[-1] - ends.times[0], 2),
        "step_s_median": round(median(steps[warm]), 3),
        "step_s": [round(seconds, 3) for seconds in steps],
        "warm_steps": [moment + offset for moment in ends.times[warm]],
        "gen_s_median": round(median(trained.generation[warm]), 3),
        "gen_s": [round(seconds, 3) for seconds in trained.generation],
        "train_s_median": round(median(training[warm]), 3),
        "completion_tokens": trained.tokens,
        "gen_tok_per_s": round(sum(trained.tokens[warm]) / sum(trained.generation[warm]), 1),
        "samples_per_s": round(shape.prompts * shape.group / median(steps[warm]), 2),
        "reward": [record["reward"] for record in trained.state.log_history if "reward" in record],
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines {prompt}")
    parser.add_argument("--model", type=Path, required=True)
    for name in ("prompts", "group", "completion", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        required=True,
        help="master weights stay float32",
    )
    shape = parser.parse_args()
    ends = Ends()
    with tempfile.TemporaryDirectory() as output:
        trained = trainer(shape, output)
        trained.add_callback(ends)
        setup = time.time() - BEGAN
        trained.train()
    print(json.dumps(result(shape, trained, ends, setup)))


if __name__ == "__main__":
    main()
