"""The other side of ``python -m benchmarks rollout``: vLLM's offline ``generate`` on the same
prompts, nothing around it.

The last line is JSON. The first call warms up and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import islice
from pathlib import Path

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines {prompt}")
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--engine",
        type=json.loads,
        required=True,
        help="rayloop's settings of rollout.engine, as JSON",
    )
    parser.add_argument("--dtype", required=True)
    for name in ("prompts", "group", "completion", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, help="not used: nothing is trained")
    shape = parser.parse_args()
    from vllm import LLM, SamplingParams, __version__

    engine = shape.engine
    llm = LLM(
        shape.model,
        dtype=shape.dtype,
        **engine["extra"],
        max_num_seqs=shape.prompts * shape.group,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    sampling = SamplingParams(
        n=shape.group,
        max_tokens=shape.completion,
        min_tokens=shape.completion,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
    prompts = [
        json.loads(line)["prompt"] for line in shape.rows.read_text(encoding="utf-8").splitlines()
    ]
    seconds, tokens = [], []
    remaining = iter(prompts)
    while asked := list(islice(remaining, shape.prompts)):
        began = time.perf_counter()
        answers = llm.generate(asked, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        tokens.append(sum(len(output.token_ids) for answer in answers for output in answer.outputs))
    speed = sum(tokens[1:]) / sum(seconds[1:])
    print(
        json.dumps(
            {
                "tool": "vllm",
                "version": __version__,
                "gen_s": [round(s, 3) for s in seconds],
                "completion_tokens": tokens,
                "gen_tok_per_s": round(speed, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
