"""``python -m tools.pages.parity`` prints docs/parity.md: the command, and where it ran.

The rows of its table are in parity.jsonl beside this file, as ``parity MODEL --out`` writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("parity.jsonl")
HEADER = """\
# Does the engine compute what the trainer computes?

Made by `python -m tools.pages.parity`; do not edit.

**For people who train a model elsewhere, with any trainer**, and want to know whether an engine's
log-probs are those of the model, before a run or when one fails. The command needs a model's
folder or its name on the Hub. It needs no configuration, no data and no Ray:

    python -m rayloop parity MODEL
    python -m rayloop parity MODEL --engine vllm --save case.json
    python -m rayloop parity MODEL --check case.json
    python -m rayloop parity MODEL --against http://host:8000/v1

It plays dialogues with the engine, ends the engine, loads the trainer's model and scores the same
tokens. Every dialogue is played three times: `first`; `repeat`, with other pictures under the same
tokens, which finds caches that ignore images; and `greedy`.

| rows | what is played |
|---|---|
| `text` | 8 turns without images (`--turns`) |
| `images` | one turn with 1, 2, 4 and 8 images (`--images`) |
| `screens` | 8 turns with an image in each |
| `depth` | one turn behind a long text (`--depth`) |

The default depths end at the model's context, at most at 2,048 tokens on a CPU and 32,768 on a GPU.

| column | what it says |
|---|---|
| `mean`, `largest` | the absolute difference of log-probs in nats |
| `k3` | mean of exp(d) - d - 1 with d = trainer - engine, an estimate of the KL |
| `outside` | share of tokens whose ratio leaves PPO's clip range, 0.8 to 1.2 |
| `wrong img` | mean change of the trainer's log-prob when every image is replaced |
| `greedy` | greedy tokens that are not the trainer's likeliest |
| `theirs` | mean difference between the engine and another trainer (below) |

A model whose log-probs do not change with its images is reported as blind. `--json` prints
everything with versions, attention kernels and seconds; `--out FILE` adds one line without the rows
to a file.

## The verdict

Exit code 1: in some row the mean difference of a play is above the limit, 1e-3 in float32 and 0.05
in bfloat16. A run's log-prob check has the same limits at its start (`weight_sync.logprob_check`);
`--limit` sets another. Exit code 2: something cannot be compared, and one sentence says why. The
last line names the first turn, image or depth that differs, and the usual causes:

| first difference | usual causes |
|---|---|
| turn 1 of text | weights, tied heads, adapters, norms, a missing first token, the chat template |
| the same, with vLLM | its default `logprobs_mode`: log-probs from before temperature and mask |
| turn 1 of text, while greedy tokens agree | the temperature, the sampling mask |
| a later turn of text | the chat template of earlier turns, the cache of prefixes |
| image 1 | positions (M-RoPE), patches |
| a later image | the resize, if it is the first image that is resized; else the order of images |
| the repeat alone | a cache of prefixes that ignores images |
| a depth | stretched positions, sliding windows |

`tests/engines/test_parity.py` plants ten faults and states the verdict on each.

## A case for another machine, or for your trainer

`--save` writes tokens, pictures and log-probs as JSON without paths. `--check` scores the file on
another machine. In a case, `episodes` have a `trajectory` with `turns`: runs of tokens in order. A
turn with `logprobs` was sampled from the distribution of `sampling`
([section 1](algorithm.md)). To compare your own trainer, add `trainer_logprobs` to the file: for
each episode a list with your log-probs of its sampled tokens, in order. `--check` then fills the
column `theirs`. Any other change of the file is refused.

## Servers

`--against URL` asks a server with vLLM's interface for the prompt log-probs of what transformers
played. Images need `vllm serve --enable-scale-out`, which takes them with token ids, in the size
that the model sees; without it, only text is compared. The tests compare images with a stand-in
that answers as vLLM 0.32's source does, not yet with its server. `--engine URL` lets the server
play text. Prompt log-probs ignore the temperature: both sides are then computed at 1. A server
without prompt log-probs, such as `policy serve`, is refused.

## Where it ran

Tiny models of random weights in each family's own layout (`tests/support/model_families.py`), with
the default options, and `--dtype`. Everything here ran on a CPU; nothing has run on a GPU. CPU
seconds are those of the whole command; the rows of vLLM lack its own processes.
"""
HEADINGS = (
    "`model_type`",
    "engine",
    "computed",
    "tokens",
    "mean",
    "largest",
    "wrong images",
    "greedy differ",
    "CPU seconds",
    "verdict",
)


def page() -> str:
    """docs/parity.md."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    table = [HEADINGS, ("---",) * len(HEADINGS)]
    table += [cells(json.loads(line)) for line in lines]
    return "\n".join([HEADER, *(f"| {' | '.join(row)} |" for row in table)]) + "\n"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one run of the command."""
    origin = row["origin"]
    versions = origin["versions"]
    total = row["total"]
    engine = origin["engine"]
    version = versions.get(engine, versions.get(f"{engine}-cpu", ""))
    changed = total["wrong_images"]
    return (
        f"`{row['family']}`",
        f"{engine} {version}".strip(),
        f"{origin['dtype']}, {row['device']}, torch {versions['torch']}",
        str(total["gap"]["tokens"]),
        f"{total['gap']['mean']:.1e}",
        f"{total['gap']['largest']:.1e}",
        "text only" if changed is None else f"{changed:.2g}",
        f"{total['other_choices']}/{total['greedy_tokens']}",
        f"{row['seconds']['of processors']:.0f}",
        row["agreement"]["sentence"],
    )


if __name__ == "__main__":
    print(page(), end="")
