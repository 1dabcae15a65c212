"""The calls of all actors in a step as a Chrome trace.

ui.perfetto.dev and chrome://tracing open this JSON.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rayloop.core.deadlines import Span

ROLES = ("driver", "policy", "rollout", "environment", "reward", "reference")
"""In the order in which they are shown."""
_PLACE = re.compile(rf"(.*) (?:of|on) ({'|'.join(ROLES)})(?: rank)? (\d+)")


def chrome(spans: Iterable[Span]) -> dict[str, Any]:
    """A process for each actor, and one for the driver.

    Spans that overlap in a process are in several lanes (threads).
    """
    placed = sorted(map(_placed, spans), key=lambda span: span.began)
    tracks = sorted(
        {span.track for span in placed},
        key=lambda track: (ROLES.index(track.split()[0]), len(track), track),
    )
    rows: list[dict[str, Any]] = []
    for number, track in enumerate(tracks):
        about = {"process_name": {"name": track}, "process_sort_index": {"sort_index": number}}
        rows += [
            {"ph": "M", "pid": number, "tid": 0, "name": name, "args": args}
            for name, args in about.items()
        ]
    lanes = defaultdict[str, list[float]](list)
    for span in placed:
        ends = lanes[span.track]
        lane = next((index for index, end in enumerate(ends) if end <= span.began), len(ends))
        ends[lane : lane + 1] = [span.ended]
        rows.append(
            {
                "ph": "X",
                "name": span.name,
                "ts": round(span.began * 1e6),  # microseconds
                "dur": round((span.ended - span.began) * 1e6),
                "pid": tracks.index(span.track),
                "tid": lane,
                "cat": span.track.split()[0],
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _placed(span: Span) -> Span:
    """The span on the track of the actor with which its name ends; else it is the driver's."""
    if span.track:
        return span
    match = _PLACE.fullmatch(span.name)
    if match is None:
        return span._replace(track="driver")
    return span._replace(track=f"{match[2]} {match[3]}", name=match[1])
