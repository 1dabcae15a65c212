"""The peer's side of ``python -m benchmarks.evidence reasoning``: TRL's GRPOTrainer on the same
rows, with the same reward.

It runs in an environment of its own that has trl, torch, transformers, datasets and reasoning-gym,
and nothing of rayloop. The held-out rows are sampled before the first step and after every
``--every`` steps; the seconds of that are left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@cache
def made(name: str, seed: int, size: int, config: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))


def data_of(row: dict[str, Any]) -> Any:
    """The data set of a row {task, seed, index, size, config}, as rayloop's reader makes it."""
    return made(row["task"], row["seed"], row["size"], json.dumps(row["config"], sort_keys=True))


def prompt(row: dict[str, Any], shots: int) -> list[dict[str, str]]:
    """The row's question behind ``shots`` solved ones."""
    data, messages = data_of(row), []
    for index in range(shots):
        messages += [
            {"role": "user", "content": data[index]["question"]},
            {"role": "assistant", "content": data[index]["answer"]},
        ]
    return [*messages, {"role": "user", "content": data[row["index"]]["question"]}]


def scores(completions: list[Any], row: list[str], **columns: Any) -> list[float]:
    """The package's own score of each completion."""
    return [
        scored(text[-1]["content"], json.loads(each))
        for text, each in zip(completions, row, strict=True)
    ]


def scored(text: str, row: dict[str, Any]) -> float:
    """Of an answer that the scorer cannot read, 0."""
    data = data_of(row)
    try:
        return float(data.score_answer(text.strip(), data[row["index"]]))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
        return 0.0


class HeldOut(TrainerCallback):
    """Samples the held-out rows now and then, and notes the training seconds until then."""

    def __init__(
        self, shape: argparse.Namespace, tokenizer: Any, rows: list[dict[str, Any]]
    ) -> None:
        self.shape, self.tokenizer, self.rows = shape, tokenizer, rows
        self.found: dict[int, dict[str, float]] = {}
        self.seconds, self._began = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._measure(0, options["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if state.global_step % self.shape.every == 0:
            self._measure(state.global_step, options["model"])

    @torch.no_grad()
    def _measure(self, step: int, model: Any) -> None:
        if step:
            self.seconds += time.perf_counter() - self._began
        rewards = defaultdict(list)
        model.eval()
        for at in range(0, len(self.rows), 16):
            part = self.rows[at : at + 16]
            texts = [
                self.tokenizer.apply_chat_template(
                    prompt(row, self.shape.shots), tokenize=False, add_generation_prompt=True
                )
                for row in part
            ]
            prompts = self.tokenizer(
                texts, return_tensors="pt", padding=True, add_special_tokens=False
            )
            made = model.generate(
                **prompts,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.shape.completion,
                num_return_sequences=self.shape.samples,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            said = self.tokenizer.batch_decode(
                made[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for index, text in enumerate(said):
                row = part[index // self.shape.samples]
                rewards[row["task"]].append(scored(text, row))
        model.train()
        means = {name: round(fmean(values), 4) for name, values in sorted(rewards.items())}
        self.found[step] = {
            "all": round(fmean(means.values()), 4),
            **means,
            "train_s": round(self.seconds, 1),
        }
        print(step, self.found[step], flush=True)
        self._began = time.perf_counter()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--train", type=Path, required=True, help="JSON lines {task, seed, index, size, config}"
    )
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    for name in (
        "prompts",
        "group",
        "completion",
        "steps",
        "threads",
        "seed",
        "every",
        "samples",
        "micro",
        "shots",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    return parser.parse_args()


def main() -> None:
    shape = _arguments()
    torch.set_num_threads(shape.threads)
    tokenizer = AutoTokenizer.from_pretrained(shape.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    train, held_out = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in (shape.train, shape.eval)
    )
    watch = HeldOut(shape, tokenizer, held_out)
    batch = shape.prompts * shape.group
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            max_steps=shape.steps,
            per_device_train_batch_size=shape.micro,
            gradient_accumulation_steps=batch // shape.micro,
            num_generations=shape.group,
            max_completion_length=shape.completion,
            learning_rate=shape.lr,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            seed=shape.seed,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(shape.model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=scores,
            args=config,
            callbacks=[watch],
            train_dataset=Dataset.from_list(
                [{"prompt": prompt(row, shape.shots), "row": json.dumps(row)} for row in train]
            ),
        )
        trainer.train()
    logged = {
        name: [round(record[name], 4) for record in trainer.state.log_history if name in record]
        for name in ("reward", "entropy")
    }
    shown = {
        name: str(value)
        for name, value in vars(shape).items()
        if name not in ("train", "eval", "model")
    }
    print(
        json.dumps(
            {"tool": "trl", "trl": version("trl"), **shown, **logged, "held_out": watch.found}
        )
    )


if __name__ == "__main__":
    main()
