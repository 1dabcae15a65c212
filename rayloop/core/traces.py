"""Traces: conversations of loops outside of rayloop as aligned arrays, one branch each, that become
trajectories.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
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
    """``token_ids`` [T]; ``sampled_mask`` [T]; ``logprobs`` [T] (natural log), or of the sampled
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
        """Of turns as an episode has them, at least one of them sampled."""
        tokens = tuple(token for turn in turns for token in turn.token_ids)
        sampled = [turn for turn in turns if turn.sampled]
        return cls(
            tokens,
            tuple(turn.sampled for turn in turns for _ in turn.token_ids),
            tuple(
                value for turn in turns for value in turn.logprobs or (0.0,) * len(turn.token_ids)
            ),
            tuple(turn.version for turn in sampled if turn.version is not None),
            tuple(turn.finish for turn in sampled if turn.finish is not None),
            tuple(image for turn in turns for image in turn.images),
            dict(image_bytes),
        )

    def json(self) -> dict[str, Any]:
        """As plain data: versions as ``lineage.step``, images with their bytes in base64."""
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
        """``version``: of all its sampled tokens where the data name none, as verifiers' do.

        Raises DataFailure.
        """
        try:
            runs = sum(1 for sampled, _ in groupby(data["sampled_mask"]) if sampled)
            versions = (
                data["versions"] if version is None or "versions" in data else [str(version)] * runs
            )
            images = [(_ref(one), one.get("data")) for one in data.get("images", ())]
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
        images, at, run = iter(self.images), 0, 0
        for sampled, part in groupby(self.sampled_mask):
            size = len(list(part))
            tokens = self.token_ids[at : at + size]
            if sampled:
                finish = self.finishes[run] if self.finishes else FinishReason.END_TOKEN
                turn = Turn(
                    "assistant",
                    tokens,
                    logprobs=tuple(logprobs[at : at + size]),
                    version=self.versions[run],
                    finish=finish,
                )
                run += 1
            else:
                turn = Turn("user" if at else "prompt", tokens, _shown(tokens, image_token, images))
            turns.append(turn)
            at += size
        if left := list(images):
            raise DataFailure("trace", f"{len(left)} images have no image tokens; give image_token")
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
        tokens, sampled = len(self.token_ids), sum(self.sampled_mask)
        runs = sum(is_sampled for is_sampled, _ in groupby(self.sampled_mask))
        if len(self.sampled_mask) != tokens or len(self.logprobs) not in (tokens, sampled):
            sizes = (
                f"{tokens} tokens, {len(self.sampled_mask)} of a mask, {len(self.logprobs)}"
                " log-probs"
            )
            raise DataFailure("trace", f"its arrays differ in length: {sizes}")
        if not sampled or self.sampled_mask[0]:
            raise DataFailure(
                "trace",
                "it begins with a sampled token, or has none: there is no prompt, or no answer",
            )
        if len(self.versions) != runs or len(self.finishes) not in (0, runs):
            counts = (
                f"{runs} sampled turns, {len(self.versions)} versions, {len(self.finishes)} finish"
                " reasons"
            )
            raise DataFailure("trace", f"these differ in number: {counts}")
        found = iter(self.logprobs)
        every = len(self.logprobs) == tokens
        values = [next(found) if every or is_sampled else 0.0 for is_sampled in self.sampled_mask]
        wrong = [
            v
            for v, s in zip(values, self.sampled_mask, strict=True)
            if s and not -math.inf < v <= 1e-6
        ]
        if wrong:
            raise DataFailure("trace", f"{wrong[0]} is no log-prob of a token that was sampled")
        return [
            value if is_sampled else 0.0
            for value, is_sampled in zip(values, self.sampled_mask, strict=True)
        ]


def branches(answers: Iterable[Mapping[str, Any]]) -> list[Trace]:
    """The traces of chat completions with ``return_token_ids`` and ``logprobs``, in order.

    An answer whose prompt begins with all tokens of an earlier one continues it; others begin a
    branch. Raises DataFailure.
    """
    ends: list[tuple[Trace, bool]] = []  # and whether another one continues it
    for answer in answers:
        try:
            prompt = tuple(answer["prompt_token_ids"])
            choices = [_choice(choice) for choice in answer["choices"]]
            images = [
                (_ref(one), one.get("data")) for one in answer.get("rayloop", {}).get("images", ())
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise DataFailure(
                "chat completion", f"lacks {error}; ask with logprobs and return_token_ids"
            ) from error
        number = max(
            (i for i, (end, _) in enumerate(ends) if prompt[: len(end.token_ids)] == end.token_ids),
            key=lambda i: len(ends[i][0].token_ids),
            default=None,
        )
        if number is None:
            begun = _given(prompt)
        else:
            earlier, _ = ends[number]
            ends[number] = earlier, True
            begun = earlier + _given(prompt[len(earlier.token_ids) :])
        kept = {ref.sha256: base64.b64decode(data) for ref, data in images if data}
        begun = replace(
            begun, images=tuple(ref for ref, _ in images), image_bytes={**begun.image_bytes, **kept}
        )
        ends += [(begun + choice, False) for choice in choices]
    return [end for end, continued in ends if not continued]


def version_of(text: str) -> Version:
    """Of ``lineage.step``. Raises ValueError."""
    lineage, _, step = text.partition(".")
    return Version(int(lineage), int(step))


def _choice(choice: Mapping[str, Any]) -> Trace:
    """The sampled tokens alone. Raises KeyError, TypeError, ValueError."""
    finish = FINISHES[choice["finish_reason"]]
    if choice.get("stop_reason") is not None:
        finish = FinishReason.STOP_STRING
    logprobs = tuple(float(token["logprob"]) for token in choice["logprobs"]["content"])
    tokens = tuple(choice["token_ids"])
    return Trace(
        tokens, (True,) * len(tokens), logprobs, (version_of(choice["weight_version"]),), (finish,)
    )


def _given(tokens: TokenIds) -> Trace:
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
    return image_json(image) | ({} if data is None else {"data": base64.b64encode(data).decode()})


def _ref(data: Mapping[str, Any]) -> ImageRef:
    t, h, w = map(int, data["grid"])
    return ImageRef(
        str(data["sha256"]), int(data["width"]), int(data["height"]), (t, h, w), int(data["tokens"])
    )


def _shown(tokens: TokenIds, image_token: int | None, images: Any) -> tuple[ImageRef, ...]:
    """The next images, for as many image tokens as there are.

    Raises DataFailure when their numbers do not agree.
    """
    if image_token is None:
        return ()
    there, found = tokens.count(image_token), list[ImageRef]()
    while there > 0 and (image := next(images, None)) is not None:
        found.append(image)
        there -= image.tokens
    if there:
        raise DataFailure(
            "trace", f"its image tokens are not those of its images: {there} are left over"
        )
    return tuple(found)
