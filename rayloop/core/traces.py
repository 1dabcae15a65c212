"""Traces: conversations of external loops as aligned arrays that become trajectories.

Each trace is one branch of a conversation.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self

from rayloop.core.failures import DataFailure
from rayloop.core.types import (
    EndReason,
    FinishReason,
    ImageRef,
    Sampling,
    TokenIds,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)

FINISHES = {
    "stop": FinishReason.END_TOKEN,
    "tool_calls": FinishReason.END_TOKEN,
    "length": FinishReason.LENGTH,
}
"""OpenAI's names; ``stop`` with a ``stop_reason`` is a stop string."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One branch of a conversation, as aligned arrays.

    ``token_ids`` [T]; ``sampled_mask`` [T]; ``logprobs`` [T] (natural log), or of the sampled
    tokens only. ``versions`` and ``finishes`` belong to the runs of sampled tokens, ``images`` to
    the image tokens, in order.
    """

    token_ids: TokenIds
    sampled_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    finishes: tuple[FinishReason, ...] = ()
    images: tuple[ImageRef, ...] = ()
    image_bytes: Mapping[str, bytes] = field(default_factory=dict)

    def __add__(self, other: Self) -> Self:
        """The tokens of both, one after the other; the images of the first."""
        return replace(
            self,
            token_ids=self.token_ids + other.token_ids,
            sampled_mask=self.sampled_mask + other.sampled_mask,
            logprobs=self.logprobs + other.logprobs,
            versions=self.versions + other.versions,
            finishes=self.finishes + other.finishes,
        )

    @classmethod
    def of(cls, turns: Sequence[Turn], image_bytes: Mapping[str, bytes]) -> Self:
        """The trace of an episode's turns, at least one of which is sampled."""
        tokens: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        images: list[ImageRef] = []
        for turn in turns:
            size = len(turn.token_ids)
            tokens += turn.token_ids
            mask += [turn.sampled] * size
            logprobs += turn.logprobs or [0.0] * size
            images += turn.images
        sampled = [turn for turn in turns if turn.sampled]
        return cls(
            tuple(tokens),
            tuple(mask),
            tuple(logprobs),
            tuple(turn.version for turn in sampled if turn.version is not None),
            tuple(turn.finish for turn in sampled if turn.finish is not None),
            tuple(images),
            dict(image_bytes),
        )

    def json(self) -> dict[str, Any]:
        """Plain data: versions as ``lineage.step``, images with their bytes in base64."""
        return {
            "token_ids": list(self.token_ids),
            "sampled_mask": list(self.sampled_mask),
            "logprobs": list(self.logprobs),
            "versions": [str(version) for version in self.versions],
            "finishes": [str(finish) for finish in self.finishes],
            "images": [_image(image, self.image_bytes.get(image.sha256)) for image in self.images],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], version: Version | None = None) -> Self:
        """The trace of plain data. Raises DataFailure.

        ``version`` belongs to all sampled tokens where the data name none, as verifiers' do.
        """
        try:
            if version is None or "versions" in data:
                versions = data["versions"]
            else:
                runs = sum(1 for sampled, _ in groupby(data["sampled_mask"]) if sampled)
                versions = [str(version)] * runs
            images = [(_ref(image), image.get("data")) for image in data.get("images", ())]
            return cls(
                tuple(map(int, data["token_ids"])),
                tuple(map(bool, data["sampled_mask"])),
                tuple(map(float, data["logprobs"])),
                tuple(map(version_of, versions)),
                tuple(map(FinishReason, data.get("finishes", ()))),
                tuple(ref for ref, _ in images),
                {ref.sha256: base64.b64decode(encoded) for ref, encoded in images if encoded},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataFailure("trace", f"is not one: {type(error).__name__}: {error}") from error

    def trajectory(
        self,
        id: TrajectoryId,
        task_id: str,
        sampling: Sampling,
        *,
        image_token: int | None = None,
        seed: int = 0,
        attempt: int = 0,
        end_reason: EndReason = EndReason.DONE,
        env_result: float | None = None,
    ) -> Trajectory:
        """The trainer's form; ``image_token`` is the renderer's.

        Raises DataFailure where arrays, versions or images disagree.
        """
        logprobs = self._checked()
        turns: list[Turn] = []
        images = iter(self.images)
        start = 0
        run = 0
        for sampled, part in groupby(self.sampled_mask):
            end = start + len(list(part))
            tokens = self.token_ids[start:end]
            if sampled:
                finish = self.finishes[run] if self.finishes else FinishReason.END_TOKEN
                turn = Turn(
                    "assistant",
                    tokens,
                    logprobs=tuple(logprobs[start:end]),
                    version=self.versions[run],
                    finish=finish,
                )
                run += 1
            else:
                role = "user" if start else "prompt"
                turn = Turn(role, tokens, _next_images(tokens, image_token, images))
            turns.append(turn)
            start = end
        rest = list(images)
        if rest:
            raise DataFailure("trace", f"{len(rest)} images have no image tokens; give image_token")
        return Trajectory(
            id,
            attempt,
            task_id,
            seed,
            tuple(turns),
            sampling,
            end_reason,
            env_result,
            dict(self.image_bytes),
        )

    def _checked(self) -> list[float]:
        """The log-probs of all tokens, 0 where not sampled. Raises DataFailure."""
        tokens = len(self.token_ids)
        sampled = sum(self.sampled_mask)
        runs = sum(is_sampled for is_sampled, _ in groupby(self.sampled_mask))
        if len(self.sampled_mask) != tokens or len(self.logprobs) not in (tokens, sampled):
            raise DataFailure(
                "trace",
                f"its arrays differ in length: {tokens} tokens, {len(self.sampled_mask)} of a mask,"
                f" {len(self.logprobs)} log-probs",
            )
        if not sampled or self.sampled_mask[0]:
            raise DataFailure(
                "trace",
                "it begins with a sampled token, or has none: there is no prompt, or no answer",
            )
        if len(self.versions) != runs or len(self.finishes) not in (0, runs):
            raise DataFailure(
                "trace",
                f"these differ in number: {runs} sampled turns, {len(self.versions)} versions,"
                f" {len(self.finishes)} finish reasons",
            )
        has_all = len(self.logprobs) == tokens
        logprobs = iter(self.logprobs)
        values: list[float] = []
        for is_sampled in self.sampled_mask:
            value = next(logprobs) if has_all or is_sampled else 0.0
            values.append(value if is_sampled else 0.0)
            # Rounding may put the log-prob of a certain token a little above 0.
            if is_sampled and not -math.inf < value <= 1e-6:
                raise DataFailure("trace", f"{value} is not a log-prob of a sampled token")
        return values


def branches(answers: Iterable[Mapping[str, Any]]) -> list[Trace]:
    """The traces of chat completions with ``return_token_ids`` and ``logprobs``, in order.

    An answer whose prompt begins with all tokens of an earlier one continues it; others begin a
    branch. Raises DataFailure.
    """
    traces: list[Trace] = []
    continued: set[int] = set()
    for answer in answers:
        try:
            prompt = tuple(answer["prompt_token_ids"])
            choices = [_choice(choice) for choice in answer["choices"]]
            entries = answer.get("rayloop", {}).get("images", ())
            images = [(_ref(entry), entry.get("data")) for entry in entries]
        except (KeyError, TypeError, ValueError) as error:
            raise DataFailure(
                "chat completion", f"lacks {error}; ask with logprobs and return_token_ids"
            ) from error
        place = _longest_beginning(traces, prompt)
        if place is None:
            trace = _context(prompt)
        else:
            continued.add(place)
            earlier = traces[place]
            trace = earlier + _context(prompt[len(earlier.token_ids) :])
        new_bytes = {ref.sha256: base64.b64decode(data) for ref, data in images if data}
        trace = replace(
            trace,
            images=tuple(ref for ref, _ in images),
            image_bytes={**trace.image_bytes, **new_bytes},
        )
        traces += [trace + choice for choice in choices]
    return [trace for place, trace in enumerate(traces) if place not in continued]


def _longest_beginning(traces: Sequence[Trace], prompt: TokenIds) -> int | None:
    """The place of the longest trace with which a prompt begins; None without one."""
    best: int | None = None
    for place, trace in enumerate(traces):
        size = len(trace.token_ids)
        is_longest = best is None or size > len(traces[best].token_ids)
        if is_longest and prompt[:size] == trace.token_ids:
            best = place
    return best


def version_of(text: str) -> Version:
    """The version that ``lineage.step`` names. Raises ValueError."""
    lineage, _, step = text.partition(".")
    return Version(int(lineage), int(step))


def _choice(choice: Mapping[str, Any]) -> Trace:
    """A trace of the sampled tokens only. Raises KeyError, TypeError, ValueError."""
    finish = FINISHES[choice["finish_reason"]]
    if choice.get("stop_reason") is not None:
        finish = FinishReason.STOP_STRING
    logprobs = tuple(float(token["logprob"]) for token in choice["logprobs"]["content"])
    tokens = tuple(choice["token_ids"])
    return Trace(
        tokens, (True,) * len(tokens), logprobs, (version_of(choice["weight_version"]),), (finish,)
    )


def _context(tokens: TokenIds) -> Trace:
    """Tokens that were not sampled."""
    return Trace(tokens, (False,) * len(tokens), (0.0,) * len(tokens), ())


def image_json(image: ImageRef) -> dict[str, Any]:
    """A reference as plain data."""
    return {
        "sha256": image.sha256,
        "width": image.width,
        "height": image.height,
        "grid": list(image.grid),
        "tokens": image.tokens,
    }


def _image(image: ImageRef, data: bytes | None) -> dict[str, Any]:
    result = image_json(image)
    if data is not None:
        result["data"] = base64.b64encode(data).decode()
    return result


def _ref(data: Mapping[str, Any]) -> ImageRef:
    t, h, w = map(int, data["grid"])
    return ImageRef(
        str(data["sha256"]), int(data["width"]), int(data["height"]), (t, h, w), int(data["tokens"])
    )


def _next_images(
    tokens: TokenIds, image_token: int | None, images: Iterator[ImageRef]
) -> tuple[ImageRef, ...]:
    """The next images, for as many image tokens as there are.

    Raises DataFailure when their numbers do not agree.
    """
    if image_token is None:
        return ()
    remaining = tokens.count(image_token)
    result: list[ImageRef] = []
    while remaining > 0:
        image = next(images, None)
        if image is None:
            break
        result.append(image)
        remaining -= image.tokens
    if remaining:
        raise DataFailure(
            "trace", f"its images do not cover its image tokens: {remaining} are left over"
        )
    return tuple(result)
