"""The summary of an evaluation as text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rayloop.measure.controls import NOT_PLAYED, WORDS, Table, looks
from rayloop.measure.intervals import MIN_ITEMS, Interval

MOST_NAMES = 12
"""Sources that a sentence names."""
JUDGED = {True: "looks", False: "not shown to look", None: "undecided"}
TOO_FEW = f"fewer than {MIN_ITEMS} tasks, or no other image of the source"


def table(summary: dict[str, Any]) -> list[str]:
    """The summary as lines of text.

    Where the run names a score (``evaluation.solved``), tables have that one, and a line the means
    of the others. Sources are shown where no other column is asked for.
    """
    arms = summary["arms"]
    main = summary.get("solved", "").partition(" ")[0]
    has_main = main != "reward" and all(main in row for row in arms.values())
    only = (main,) if has_main else ()
    protocol = f", protocol {summary['protocol']}" if "protocol" in summary else ""
    lines = [
        f"{summary['items']} items, mean and 95 % interval (bootstrap over items){protocol}",
        *_rows("", arms, only),
    ]
    if only:
        lines += _other_means(arms, main)
    lines += _column_lines(summary, only)
    for k, rate in summary.get("pass_at", {}).items():
        lines.append(f"pass@{k}  {_shown(rate)}  (an answer is right with {summary['solved']})")
    if summary.get("cut"):
        lines.append(
            f"{summary['cut']} answers were cut by sampling.max_tokens; --retries N plays them"
            " again with more room"
        )
    if summary["differences"]:
        lines += [
            "right image minus control, paired:",
            *_rows("  ", summary["differences"]),
            *_source_rows(summary),
            verdict(summary),
        ]
    if summary["unscored"]:
        lines.append(
            f"{summary['unscored']} answers have no score; run again once the reason in"
            " events.jsonl is removed"
        )
    return lines


def _other_means(arms: Table, main: str) -> list[str]:
    """A line with the means of the first arm's scores besides ``main``; none without others."""
    if not arms:
        return []
    arm, row = next(iter(arms.items()))
    means = [f"{score} {interval[0]:.3f}" for score, interval in row.items() if score != main]
    return [f"other means, {arm}: {'  '.join(means)}"] if means else []


def _column_lines(summary: Mapping[str, Any], only: Sequence[str]) -> Iterator[str]:
    """The right image's scores by the columns that were asked for, else by source."""
    columns = summary.get("by", {})
    if not columns and len(summary["sources"]) > 1:
        yield "by source, right image:"
        yield from _rows("  ", summary["sources"], only)
    for column, rows in columns.items():
        yield f"by {column}, right image:"
        yield from _rows("  ", rows, only)
        averages = summary.get("cells", {}).get(column)
        if averages:
            means = [
                f"{score} {mean:.3f}"
                for score, mean in averages.items()
                if not only or score in only
            ]
            yield f"  mean of these {len(rows)}  {'  '.join(means)}"


def verdict(summary: Mapping[str, Any]) -> str:
    """On how many sources the policy looks, and where it got worse.

    Names the sources on which it was not shown to look, and where that is undecided.
    """
    sources: Mapping[str, Mapping[str, Any]] = summary.get("by_source") or {}
    differences: Table = summary["differences"]
    if len(sources) > 1:
        sentences = [_over_sources(sources, differences)]
    else:
        sentences = [_on_average(differences)]
    sentences += _losses(sources)
    reasons = [reason for arm, reason in NOT_PLAYED.items() if arm not in differences]
    if reasons:
        sentences.append(f"Not compared with {'; nor with '.join(reasons)}.")
    return " ".join(sentences)


def _losses(sources: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Sentences on the sources whose reward fell since the first evaluation."""
    significant: list[str] = []
    by_chance: list[str] = []
    for name, source in sources.items():
        change: Interval | None = source["change"]
        if change is None or change[0] >= 0:
            continue
        upper = change[2]
        losses = significant if upper is not None and upper < 0 else by_chance
        losses.append(f"{name} {_shown(change)}")
    if significant:
        yield f"Worse than at the first evaluation: {_some(significant)}."
    if by_chance:
        yield f"Lower than at the first evaluation, which may be chance: {_some(by_chance)}."


def _over_sources(sources: Mapping[str, Mapping[str, Any]], differences: Table) -> str:
    """Sentences on the sources on which the policy looks, does not, or may."""
    names: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for name, source in sources.items():
        names[source["looks"]].append(name)
    if len(names[None]) == len(sources):
        return (
            f"{_on_average(differences)} That is a mean over {len(sources)} sources; on which it"
            f" holds is undecided ({TOO_FEW})."
        )
    if names[True]:
        sentences = [
            f"The policy looks on {len(names[True])} of {len(sources)} sources: there the right"
            " image scores above every control, and no interval holds 0."
        ]
    else:
        sentences = [
            f"No evidence that the policy looks: on none of {len(sources)} sources is the right"
            " image above every control."
        ]
    if names[False]:
        weakest = _some(_weakest(name, sources[name]) for name in names[False])
        sentences.append(f"Not shown to look: {weakest}.")
    if names[None]:
        sentences.append(f"Undecided ({TOO_FEW}): {_some(names[None])}.")
    return " ".join(sentences)


def _weakest(name: str, source: Mapping[str, Any]) -> str:
    """A source, the control whose interval reaches lowest, and how many answers it gave."""
    differences: Mapping[str, Interval] = source["differences"]
    lower_bounds = {arm: low for arm, (_, low, _) in differences.items() if low is not None}
    arm = min(lower_bounds, key=lambda arm: lower_bounds[arm])
    answers = f"{source['answers']} distinct answers to {source['items']} tasks"
    return f"{name} ({_shown(differences[arm])} against {WORDS[arm]}; {answers})"


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    text = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{text} and {more} more" if more > 0 else text


def _on_average(differences: Table) -> str:
    """One sentence on whether the policy looks, over all sources."""
    policy_looks = looks(differences)
    if policy_looks:
        controls = ", ".join(WORDS[arm] for arm in differences)
        return f"The policy looks: the right image scores above {controls}; no interval holds 0."
    lower_bounds = {arm: by_score["reward"][1] for arm, by_score in differences.items()}
    if policy_looks is False:
        failures = [
            WORDS[arm] for arm, bound in lower_bounds.items() if bound is not None and not bound > 0
        ]
        controls = ", ".join(failures)
        return f"No evidence that the policy looks: the right image is not above {controls}."
    unbounded = [WORDS[arm] for arm, bound in lower_bounds.items() if bound is None]
    if unbounded:
        return (
            f"Too few items to say whether the policy looks: fewer than {MIN_ITEMS} for"
            f" {', '.join(unbounded)}."
        )
    return "Whether the policy looks is undecided."


def _rows(indent: str, rows: Table, only: Sequence[str] = ()) -> Iterator[str]:
    """A line of each row, with all scores or only the scores in ``only``."""
    width = max(map(len, rows), default=0)
    for name, row in rows.items():
        cells = [f"{score} {_shown(row[score])}" for score in only or row if score in row]
        yield f"{indent}{name:<{width}}  {'  '.join(cells)}"


def _source_rows(summary: Mapping[str, Any]) -> list[str]:
    """The right image's reward minus each control by source, where there are several."""
    sources = summary.get("by_source") or {}
    if len(sources) < 2:
        return []
    width = max(map(len, sources))
    lines = ["the same by source, reward alone:"]
    for name, source in sources.items():
        cells = [
            f"{name:<{width}}",
            f"{JUDGED[source['looks']]:<17}",
            "  ".join(f"{arm} {_shown(gain)}" for arm, gain in source["differences"].items()),
            f"{source['answers']} answers to {source['items']}",
        ]
        if source["change"]:
            cells.append(f"change {_shown(source['change'])}")
        lines.append(f"  {'  '.join(cells)}")
    return lines


def _shown(interval: Interval) -> str:
    mean, low, high = interval
    if low is None:
        return f"{mean:.3f} [too few items]"
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
