"""What is played: conversations by number of turns, number of images, and depth.

They need no data: texts and pictures are made here, the same on every machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image

from rayloop.chat.rendering import Renderer
from rayloop.core.types import ImageSource, Message, derive
from rayloop.data.images import png
from rayloop.measure.parity import Axis, Play

PICTURE_SIZES = ((224, 224), (224, 224), (150, 100), (60, 200))
"""Width and height of the pictures, in turn.

The first two have whole image tokens of 28 and of 32 pixels, so that no processor resizes them, and
the same shape, so that engines which mix up their order are found.
"""
SQUARES_PER_SIDE = 8
FIRST_QUESTION = "What do you see?"
FILLING_LINE = "This line is one of many that a long page has in front of the question.\n"


@dataclass(frozen=True)
class Coverage:
    """How much is played.

    ``turns``: of the dialogues with several; ``images``: in one prompt; ``depths``: tokens in front
    of the only turn; ``scale``: factor of the sides of pictures; ``room``: tokens of a dialogue;
    ``shows_images``: whether there are any.
    """

    turns: int
    images: Sequence[int]
    depths: Sequence[int]
    scale: int
    room: int
    shows_images: bool


@dataclass(frozen=True)
class Dialogue:
    """The user's messages, each of which the model answers. ``name`` is the same for all plays."""

    axis: Axis
    name: str
    messages: Sequence[Message]


def conversations(coverage: Coverage, play: Play, renderer: Renderer) -> Iterator[Dialogue]:
    """Yield all dialogues of one play."""
    # The repeat shows other pictures of the same sizes, under the same tokens.
    series = int(play is Play.REPEAT)
    questions = [f"{FIRST_QUESTION} Answer {number + 1}." for number in range(coverage.turns)]
    most = max(coverage.turns, *coverage.images, 1)
    pictures = [_picture(place, series, coverage.scale) for place in range(most)]
    text = [Message("user", (question,)) for question in questions]
    yield Dialogue(Axis.TEXT, "text", text)
    if coverage.shows_images:
        for number in coverage.images:
            message = Message("user", (*pictures[:number], FIRST_QUESTION))
            yield Dialogue(Axis.IMAGES, f"{number} images", [message])
        screens = [
            Message("user", (picture, question))
            for picture, question in zip(pictures, questions, strict=False)
        ]
        yield Dialogue(Axis.SCREENS, "screens", screens)
    for depth in coverage.depths:
        shown = pictures[:1] if coverage.shows_images else []
        filling = FILLING_LINE * (depth // len(renderer.encode(FILLING_LINE)))
        message = Message("user", (filling, *shown, FIRST_QUESTION))
        yield Dialogue(Axis.DEPTH, f"depth {depth}", [message])


def _picture(place: int, series: int, scale: int) -> ImageSource:
    """Squares of random colours: a screen of sorts, small as a PNG."""
    width, height = PICTURE_SIZES[place % len(PICTURE_SIZES)]
    colours = Random(derive(series, "parity", place)).randbytes(3 * SQUARES_PER_SIDE**2)
    squares = Image.frombytes("RGB", (SQUARES_PER_SIDE, SQUARES_PER_SIDE), colours)
    size = (width * scale, height * scale)
    return ImageSource(data=png(squares.resize(size, Image.Resampling.NEAREST)))
