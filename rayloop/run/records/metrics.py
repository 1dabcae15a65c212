"""Every metric's name (verl's where it has one), unit and meaning; ``<...>`` is any text. docs/metrics.md is made from it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Metric:
    """``unit`` "1" is a plain number or a fraction."""

    name: str
    unit: str
    meaning: str

    @property
    def prometheus(self) -> str:
        """The name for Prometheus: ``val/<source>/reward/mean`` is ``rayloop_val_reward_mean``, and ``source`` a label."""
        return re.sub(r"[^A-Za-z0-9]+", "_", "rayloop/" + _PART.sub("", self.name)).strip("_")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels: ``source`` of ``val/<source>/reward/mean``."""
        return tuple(_PART.findall(self.name))


_PART = re.compile(r"<(\w+)>")

METRICS = tuple(
    Metric(*row)
    for row in (
        ("step", "1", "The step, from 1."),
        # What the policy earned, over the trajectories that were finished for the step, before any filter
        ("reward/mean", "reward", "Mean reward of the scored trajectories finished for the step, before any filter."),
        ("reward/std", "reward", "Standard deviation of the same rewards."),
        ("reward/min", "reward", "Smallest of the same rewards."),
        ("reward/max", "reward", "Largest of the same rewards."),
        ("reward/<source>/mean", "reward", "The mean by data source."),
        ("reward/component/<name>/mean", "reward", "Mean of one component of the reward."),
        ("reward/<source>/component/<name>/mean", "reward", "The same by data source."),
        ("reward/calibration_error", "fraction", "Expected calibration error of stated confidences (component `confidence`)."),
        ("tool_call_counts/<source>/min", "calls", "Fewest calls of an episode (component `calls`), by data source."),
        ("tool_call_counts/<source>/max", "calls", "Most calls of an episode."),
        ("tool_call_counts/<source>/zero_ratio", "fraction", "Share of episodes without a call."),
        ("flag/<name>", "fraction", "Share of scored trajectories that carry this flag."),
        # Held-out tasks
        ("val/reward/mean", "reward", "Mean reward on the held-out tasks."),
        ("val/<source>/reward/mean", "reward", "The same by data source."),
        ("val/<component>/mean", "reward", "Mean of one component of the reward on the held-out tasks."),
        ("val/control/<arm>/<component>/mean", "reward", "The same with wrong images, or the best answers without one."),
        ("val/reward/low", "reward", "Lower bound of its 95 % interval (bootstrap over tasks); absent for fewer than 8."),
        ("val/reward/high", "reward", "Upper bound of the same."),
        ("val_sampled/reward/mean", "reward", "Mean reward of held-out answers sampled as in training, mean over tasks."),
        ("val_sampled/reward/low", "reward", "Lower bound of its 95 % interval (bootstrap over tasks)."),
        ("val_sampled/reward/high", "reward", "Upper bound of the same."),
        ("val_sampled/<component>/mean", "reward", "Mean of one component of the reward of the same answers."),
        ("val_sampled/scored", "trajectories", "Sampled held-out answers that got a reward."),
        ("val_sampled/unscored", "trajectories", "Sampled held-out answers without a reward."),
        ("val/best", "reward", "Highest mean reward on the held-out tasks so far; kept in the checkpoint."),
        ("val/best_step", "steps", "The step it belongs to."),
        ("val/scored", "trajectories", "Held-out tasks that got a reward."),
        ("val/unscored", "trajectories", "Held-out tasks without a reward; they are left out of the means."),
        # The trainer
        ("actor/loss", "1", "The loss (policy gradient, KL, entropy) as aggregated, mean over the step's updates."),
        ("actor/kl", "nats/token", "Mean k3 estimate of KL(current, reference) over computed tokens, without its coefficient."),
        ("actor/entropy", "nats/token", "Mean entropy (masked) over computed tokens; absent when the step computed none."),
        ("actor/grad_norm", "1", "Global gradient norm before clipping, mean over the step's updates."),
        ("actor/lr", "1", "Learning rate of the last update."),
        ("actor/updates", "updates", "Optimizer updates done in the step."),
        ("actor/skipped_updates", "updates", "Updates skipped because the gradient was not finite."),
        ("actor/tokens", "tokens", "Sampled tokens of what is trained on, once per epoch, those without a gradient included."),
        (
            "actor/computed_tokens",
            "tokens",
            "Of actor/tokens, those computed for the loss. Without a KL or entropy term, an advantage of 0 is skipped.",
        ),
        ("actor/sequences", "trajectories", "Trajectories that are trained on, once per epoch, those without a gradient included."),
        ("actor/tokens_per_second", "tokens/s", "The trainer's speed while it trains, over all ranks: computed tokens per second."),
        ("actor/ratio_max", "1", "Largest probability ratio of the clipped loss, of computed tokens."),
        ("actor/clip_low", "fraction", "Share of computed tokens whose ratio was clipped from below."),
        ("actor/clip_high", "fraction", "Share of computed tokens whose ratio was clipped from above."),
        ("actor/clip_dual", "fraction", "Share of computed tokens bounded by the dual clip."),
        ("actor/capped", "fraction", "Share of computed tokens whose correction weight reached its cap."),
        (
            "actor/effective_sample_size",
            "fraction",
            "(sum w)^2 / (n sum w^2) of uncapped weights of n computed tokens; 1 is on-policy.",
        ),
        (
            "actor/logprob_mismatch_mean",
            "nats",
            "Mean log-prob mismatch over computed tokens: the absolute difference of trainer and sampling engine.",
        ),
        ("actor/logprob_mismatch_max", "nats", "Largest log-prob mismatch of a computed token."),
        ("actor/logprob_mismatch_k3", "nats/token", "k3 estimate of KL between engine and trainer over computed tokens."),
        (
            "actor/logprob_mismatch_mean/lag_<lag>",
            "nats",
            "The mean by version lag (3: or more); the alarm `logprobs` looks at lag_0.",
        ),
        ("actor/logprob_mismatch_k3/lag_<lag>", "nats/token", "The same by version lag (3: or more)."),
        # Generation
        ("rollout/groups", "groups", "Groups finished for the step."),
        ("rollout/trajectories", "trajectories", "Trajectories finished for the step."),
        ("rollout/trained", "trajectories", "Trajectories the step trained on."),
        ("rollout/trained/<source>", "trajectories", "The same by data source."),
        ("rollout/played/<source>", "trajectories", "Trajectories finished for the step, by data source."),
        ("rollout/right_negative_advantage", "fraction", "Of trained right answers, those with an advantage below 0."),
        ("rollout/trained_share", "fraction", "rollout/trained as a share of the target groups_per_step * group_size."),
        ("rollout/trained_length_ratio", "1", "Mean sampled tokens, trained over played, of about 16 steps; 1: no bias by length."),
        ("rollout/acceptance", "fraction", "Running share of trajectories that survive the filters."),
        ("rollout/equal_rewards", "fraction", "Share of finished groups whose rewards are all equal, before any filter."),
        ("rollout/all_right", "fraction", "Share of finished groups with rewards of 1 or above only."),
        ("rollout/all_wrong", "fraction", "Share of finished groups with rewards of 0 or below only."),
        ("replay/stored", "trajectories", "Stored successes in the replay buffer (ARPO), if replay is on."),
        ("replay/tasks", "tasks", "Tasks of which it has any; `replay_buffer_stats.json` names them."),
        ("rollout/replayed", "groups", "Trained groups with a stored success in them (ARPO)."),
        ("rollout/reissued", "attempts", "Episodes played again because infrastructure failed, since the run began."),
        ("rollout/cache", "fraction", "Use of the fullest engine's cache of keys and values, when last asked (vLLM)."),
        ("rollout/waiting", "requests", "Requests that wait for room in the engines, when last asked (vLLM)."),
        ("rollout/in_flight_limit", "episodes", "Episodes that may play at once; absent while nothing limits them."),
        ("rollout/tokens", "tokens", "Sampled tokens of the finished trajectories."),
        ("rollout/images_sent", "images", "Images whose bytes went to an engine; those that it had were only named."),
        ("rollout/images_sent_again", "images", "Those that an engine had forgotten; its cache is too small if they are many."),
        ("rollout/image_bytes_sent", "bytes", "Bytes of those images."),
        ("rollout/turns/mean", "turns", "Sampled turns per trajectory."),
        ("rollout/seconds/mean", "s", "Wall time of an episode."),
        ("rollout/seconds/max", "s", "The slowest episode."),
        ("response_length/mean", "tokens", "Sampled tokens per trajectory."),
        ("response_length/max", "tokens", "Sampled tokens of the longest answer."),
        ("response_length/clip_ratio", "fraction", "Share of finished trajectories with a turn that a limit of tokens cut."),
        ("prompt_length/mean", "tokens", "Tokens per trajectory that were not sampled: prompt, observations, images."),
        ("end_reason/<reason>", "fraction", "Share of finished trajectories that ended for this reason; `done` always."),
        # Why trajectories were not trained (of those finished for the step)
        ("filtered/<reason>", "trajectories", "Removed by this filter."),
        ("excluded/<reason>", "trajectories", "Without a usable reward, for this reason."),
        ("stale/<source>", "trajectories", "Since the last step: begun too many versions ago, by data source."),
        ("surplus/<source>", "trajectories", "Since the last step: beyond the target of the step, by data source."),
        ("cancelled/<reason>", "trajectories", "Given up while in flight."),
        ("ledger/<state>", "trajectories", "Totals since the run began, by state and reason (`filtered[all_wrong]`)."),
        # What keeps the run alive: of no step, but at Prometheus' port at all times, and in `python -m rayloop status`
        ("recovery/wanted/<role>", "actors", "Actors that the role should have."),
        ("recovery/in_service/<role>", "actors", "Those of them that serve; 0 until all have started."),
        ("recovery/lost/<role>", "losses", "Actors lost since the run was started (policy: rebuilds; driver: deaths)."),
        ("recovery/budget_left/<role>", "losses", "How many more may be lost in this hour before a wait, or the run's end."),
        ("recovery/progress_age", "s", "Since anything that the driver waits for has ended, or an event reported progress."),
        ("recovery/checkpoint_age", "s", "Since the newest checkpoint; absent before the first."),
        ("recovery/steps_since_checkpoint", "steps", "Steps that a resume would repeat."),
        ("recovery/checkpoint_every", "steps", "What `checkpoint.every` says."),
        ("recovery/lock_age", "s", "Since the last sign of life of the process that owns the run folder; every 15 s."),
        # Time
        ("timing_s/step", "s", "The whole step: the sum of its parts."),
        ("timing_s/gen", "s", "Waiting for the step's groups."),
        ("timing_s/update_actor", "s", "The trainer's step, fetching included."),
        ("timing_s/update_weights", "s", "The weight sync to all engines."),
        ("timing_s/logprob_check", "s", "Playing and comparing fresh episodes, in the steps that do so (docs/algorithm.md, 10)."),
        ("timing_s/testing", "s", "Evaluation on held-out tasks."),
        ("timing_s/save_checkpoint", "s", "Saving, of the previous step's checkpoint."),
        ("timing_s/fetch", "s", "Fetching trajectories from the object store on rank 0, part of update_actor."),
        ("perf/tokens_per_second", "tokens/s", "Sampled tokens of finished trajectories per second, evaluation left out."),
        ("perf/trajectories_per_second", "trajectories/s", "Finished trajectories per second of the step without its evaluation."),
    )
)


def validate(names: Iterable[str]) -> tuple[str, ...]:
    """The names that are not in the table, in order."""
    return tuple(name for name in names if not any(pattern.fullmatch(name) for pattern in _patterns().values()))


def prometheus(name: str) -> tuple[Metric, dict[str, str]]:
    """The row of a metric, and its labels: all that metrics of the same Prometheus name have, "" for those this one lacks. Of
    several rows that fit, the one with the longest fixed text. A name that is not in the table is its own row."""
    fits = [(row, found.groupdict()) for row, pattern in _patterns().items() if (found := pattern.fullmatch(name))]
    row, labels = max(fits, key=lambda fit: len(_PART.sub("", fit[0].name)), default=(Metric(name, "1", ""), {}))
    return row, {label: labels.get(label, "") for label in _labels(row.prometheus)}


def _labels(prometheus_name: str) -> tuple[str, ...]:
    return tuple(sorted({label for m in METRICS if m.prometheus == prometheus_name for label in m.labels}))


@cache
def _patterns() -> dict[Metric, re.Pattern[str]]:
    return {m: re.compile(re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(m.name))) for m in METRICS}
