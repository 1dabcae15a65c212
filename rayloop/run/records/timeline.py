"""What all actors did in a step as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing
open.
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
    """A process for each actor, and one for the driver; what overlaps in it lies in several lanes
    (threads).
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
        ts, dur = round(span.began * 1e6), round((span.ended - span.began) * 1e6)
        where = {"pid": tracks.index(span.track), "tid": lane, "cat": span.track.split()[0]}
        rows.append({"ph": "X", "name": span.name, "ts": ts, "dur": dur, **where})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _placed(span: Span) -> Span:
    """A call as its actor's, by what its name ends with; else it is the driver's."""
    if span.track:
        return span
    found = _PLACE.fullmatch(span.name)
    return (
        span._replace(track=f"{found[2]} {found[3]}", name=found[1])
        if found
        else span._replace(track="driver")
    )
