"""Writes tables, steps and types of charts by a teacher, for rows with a question and its answer.

``python -m rayloop data prepare chart_chains --rows ROWS.jsonl --url http://HOST:8000/v1 --model
NAME --out DIR``. The same command again continues, and one with the rows of another data set adds
to the file.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from rayloop.core.failures import ConfigError, DataFailure, InfrastructureFailure
from rayloop.core.files import write_whole
from rayloop.data.images import data_url, encoding, portable, read
from rayloop.data.messages import image_entry
from rayloop.data.rows import rows
from rayloop.recipes.chart_rvr.data import TYPES
from rayloop.recipes.chart_rvr.rewards.embedders import openai_client
from rayloop.recipes.chart_rvr.rewards.reading import as_table, parsed_table, steps_of

TEACHER_ATTEMPTS = 4
"""Requests to a teacher that cannot be reached, is busy or fails.

The pauses between them are 1, 2 and 4 seconds.
"""
TEACHER_TIMEOUT_S = 600.0
"""Seconds for one answer of the teacher."""
SYSTEM = f"""You see a chart, a question about it and the true answer. \
Write how the answer follows, in three sections:
### Table
the chart's data as one JSON object {{"columns": [...], "rows": [[...], ...]}} and nothing else
### Reasoning
<step-1>: what the question asks for
<step-2>: the data it needs, read from the chart
...
<step-n>: the last step, which ends with the answer
### Type
the kind of chart, one of: {", ".join(TYPES)}"""
_SECTION = re.compile(r"^#+ *(Table|Reasoning|Type)\b[: ]*", re.MULTILINE | re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask for each row that ``DIR/train.jsonl`` lacks.

    Returns exit code 0; raises ConfigError, InfrastructureFailure.
    """
    options = _parser().parse_args(arguments)
    teacher = Teacher(options.url, options.model, options.max_tokens, options.api_key_env)
    file = options.out / "train.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    _end_of_a_line(file)
    finished_ids = _finished_ids(file)
    wanted = _wanted(options.rows, options.max_samples)
    missing = [row for row in wanted if row["id"] not in finished_ids]

    def finish(row: Mapping[str, Any]) -> dict[str, Any]:
        return _finished(teacher, row, options.rows.parent, options.out)

    written, left_out = _ask_all(finish, missing, file, options.at_once)
    total = written + len(finished_ids)
    print(f"\n{file}: {total} rows")
    for reason, count in left_out.most_common():
        print(f"left out: {count} x {reason}")
    if not total:
        raise ConfigError(f"{file} has no row: {'; '.join(left_out) or f'{options.rows} is empty'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rayloop data prepare chart_chains", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write train.jsonl into")
    parser.add_argument(
        "--rows", type=Path, required=True, help="JSONL with image, query and label"
    )
    parser.add_argument(
        "--url", required=True, help="the teacher's OpenAI interface, up to and with /v1"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="the teacher's name there, such as Qwen/Qwen2.5-VL-72B-Instruct",
    )
    parser.add_argument(
        "--api-key-env",
        default="",
        metavar="NAME",
        help="environment variable with the server's key",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=8,
        metavar="N",
        help="questions at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=800,
        metavar="N",
        help="of one answer (default: %(default)s)",
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="rows at most, in their order")
    return parser


def _finished_ids(file: Path) -> set[str]:
    """The ids of the rows that the file has."""
    if not file.is_file() or not file.stat().st_size:
        return set()
    return {row["id"] for _, row in rows(file) if isinstance(row, Mapping)}


def _ask_all(
    finish: Callable[[Mapping[str, Any]], dict[str, Any]],
    missing: Sequence[Mapping[str, Any]],
    file: Path,
    at_once: int,
) -> tuple[int, Counter[str]]:
    """Add the finished rows to the file.

    Returns their number, and the number of rows that were left out for each reason. Raises
    InfrastructureFailure.
    """
    written = 0
    left_out: Counter[str] = Counter()
    # Each line is written at once, so that a kill costs no finished row.
    with (
        open(file, "a", encoding="utf-8", buffering=1) as out,
        ThreadPoolExecutor(at_once) as pool,
    ):
        for answer in as_completed([pool.submit(finish, row) for row in missing]):
            try:
                out.write(json.dumps(answer.result()) + "\n")
                written += 1
            except DataFailure as failure:
                left_out[failure.reason] += 1
            except InfrastructureFailure:
                # The end of the block would ask all remaining questions first.
                pool.shutdown(cancel_futures=True)
                raise
            progress = f"\r{written + left_out.total()} of {len(missing)} rows"
            print(progress, end="", file=sys.stderr, flush=True)
    return written, left_out


def _end_of_a_line(file: Path) -> None:
    """Cut an unfinished last line, as a kill leaves it."""
    text = file.read_bytes() if file.is_file() else b""
    if text and not text.endswith(b"\n"):
        write_whole(file, text[: text.rfind(b"\n") + 1])


def _wanted(file: Path, most: int | None) -> Iterator[dict[str, Any]]:
    """The rows, each with an ``id``. Raises ConfigError for a file without one of the columns."""
    if not file.is_file():
        raise ConfigError(f"--rows {file}: no such file")
    if file.suffix == ".parquet":
        raise ConfigError(
            f"--rows {file}: expected JSONL with images as files, as `data prepare` of a chart data"
            " set writes it"
        )
    for index, (where, row) in enumerate(rows(file)):
        if most is not None and index >= most:
            return
        columns = row if isinstance(row, Mapping) else {}
        missing = [name for name in ("image", "query", "label") if columns.get(name) is None]
        if missing:
            raise ConfigError(
                f"{where}: no {', '.join(missing)}: `data prepare` of a chart data set writes such"
                " rows"
            )
        row_id = str(columns.get("id", f"{file.stem}-{index}"))
        # Another data set may have the same id.
        if columns.get("data_source"):
            row_id = f"{columns['data_source']}-{row_id}"
        yield {**columns, "id": row_id}


def _finished(teacher: "Teacher", row: Mapping[str, Any], root: Path, out: Path) -> dict[str, Any]:
    """The row with the teacher's table, steps and type. Raises DataFailure."""
    row_id = str(row["id"])
    image = image_entry(row["image"], row_id, root)
    data = read(image)
    answer = teacher.answer(data, str(row["query"]), str(row["label"]))
    chain = parsed(answer, row_id)
    kept_image = _beside(data, out) if image.path else row["image"]
    return {**row, "image": kept_image, **chain}


def _beside(data: bytes, out: Path) -> str:
    """Keep an image with the rows that name it, which may name no other folder.

    Returns its path relative to ``out``.
    """
    name = f"images/{hashlib.sha256(data).hexdigest()[:20]}.{encoding(data)}"
    if not (out / name).exists():
        (out / "images").mkdir(exist_ok=True)
        write_whole(out / name, data, durable=False)
    return name


def parsed(text: str, where: str = "") -> dict[str, Any]:
    """``table`` (None when it is not one), ``reasoning`` and ``chart_type`` of a teacher's answer.

    Raises DataFailure for one without numbered steps or with another type: a guess would be paid as
    the truth.
    """
    _, *pieces = _SECTION.split(text)
    names = [name.lower() for name in pieces[::2]]
    bodies = [body.strip() for body in pieces[1::2]]
    sections = dict(zip(names, bodies, strict=True))
    kind = sections.get("type", "").strip(" .*`\"'").lower()
    if not steps_of(sections.get("reasoning", "")):
        raise DataFailure(where, "the teacher wrote no numbered steps")
    if kind not in TYPES:
        raise DataFailure(where, "the teacher named no type of chart that the prompt lists")
    table = as_table(parsed_table(sections.get("table")))
    return {
        "table": asdict(table) if table else None,
        "reasoning": sections["reasoning"],
        "chart_type": kind,
    }


class Teacher:
    """A server with the OpenAI interface, asked with a chart, its question and the answer."""

    def __init__(self, url: str, model: str, max_tokens: int, key: str) -> None:
        self._http = openai_client(url, key, TEACHER_TIMEOUT_S, ("--url", "--api-key-env"))
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0.0}

    def answer(self, image: bytes, question: str, label: str) -> str:
        """The teacher's text.

        Raises DataFailure when the teacher refuses the request, InfrastructureFailure when it gives
        no answer.
        """
        content = [
            {"type": "image_url", "image_url": {"url": data_url(portable(image))}},
            {"type": "text", "text": f"Question: {question}\nAnswer: {label}"},
        ]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
        problem = ""
        for attempt in range(TEACHER_ATTEMPTS):
            time.sleep(2 ** (attempt - 1) if attempt else 0)
            try:
                reply = self._http.post(
                    "chat/completions", json={**self._body, "messages": messages}
                )
                if reply.status_code < 400:
                    return str(reply.json()["choices"][0]["message"]["content"])
                problem = f"{reply.status_code}: {reply.text[:300]}"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            except (ValueError, LookupError, TypeError):
                problem = f"no chat completion: {reply.text[:300]}"
            else:
                if reply.status_code in (400, 413, 422):
                    raise DataFailure("", f"the teacher refused the request with {problem}")
                if reply.status_code < 500 and reply.status_code not in (408, 425, 429):
                    break
        raise InfrastructureFailure(
            f"the teacher at {self._http.base_url} gave no answer ({problem}); run the same command"
            " to continue"
        )
