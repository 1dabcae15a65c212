"""Whether a run's cluster is still there, on a clock that a test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError

from rayloop.cluster import session
from rayloop.cluster.supervision import watchdog
from rayloop.cluster.supervision.watchdog import HEAD_LOST_AFTER_S, HeadDead, HeadWatch, NodeDead
from rayloop.core.failures import START_AGAIN_EXIT_CODE
from tests.support.runs import ROOT


class Stage:
    """A head that answers, does not, or is another one; each question takes a second."""

    def __init__(self) -> None:
        self.now, self.notes = 0.0, list[str]()
        self.error: Exception | None = None
        self.node = True

    def ask(self, seconds: float) -> None:
        self.now += 1.0
        if self.error is not None:
            raise self.error

    def lives(self, seconds: float) -> bool:
        return self.node

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(
        watchdog, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    )
    return made


def test_a_head_that_is_away_for_45_s_changes_nothing_and_is_reported_once(stage: Stage) -> None:
    watch = HeadWatch(stage.notes.append, stage.ask, stage.lives)
    for _ in range(2):
        stage.error, began = ConnectionError("no answer"), stage.now
        while stage.now < began + 45:
            assert not watch.look()
            watch.check()
        stage.error = None
        assert watch.look()
    assert stage.notes == ["the head does not listen (no answer): waiting, 50 s at most"] * 2


def test_then_the_run_ends_before_ray_ends_the_process(stage: Stage) -> None:
    watch = HeadWatch(stage.notes.append, stage.ask, stage.lives)
    stage.error = ConnectionError("no answer")
    with pytest.raises(HeadDead, match=r"has not listened for 5[0-9] s") as error:
        watch.decide()
    assert HEAD_LOST_AFTER_S < stage.now < 60 - watchdog.ANSWER_TIMEOUT_S
    assert error.value.exit_code == START_AGAIN_EXIT_CODE
    with pytest.raises(HeadDead):
        watch.check()


def test_another_head_counts_at_once(stage: Stage) -> None:
    watch = HeadWatch(stage.notes.append, stage.ask, stage.lives)
    stage.error = AuthenticationError(
        "RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted.."
        " Ensure"
    )
    with pytest.raises(
        HeadDead,
        match=(
            r"started again, and knows nothing of this run \(RPC error: WrongClusterID: .*"
            r" restarted\)"
        ),
    ):
        watch.decide()


def test_a_head_that_answers_is_not_why_something_was_lost(stage: Stage) -> None:
    HeadWatch(stage.notes.append, stage.ask, stage.lives).decide()
    assert stage.now == 1.0


def test_ray_on_the_own_node_that_has_ended_counts_at_once(stage: Stage) -> None:
    watch = HeadWatch(stage.notes.append, stage.ask, stage.lives)
    assert watch.look()
    watch.check()
    stage.node = False
    assert watch.look()
    with pytest.raises(
        NodeDead, match=r"Ray on .* has ended .* no driver can run next to this process"
    ) as error:
        watch.decide()
    assert error.value.exit_code == START_AGAIN_EXIT_CODE


def test_a_head_that_goes_while_it_is_asked_for_its_nodes_is_waited_for(stage: Stage) -> None:
    def lost(seconds: float) -> bool:
        raise ConnectionError("the GCS has gone")

    watch = HeadWatch(stage.notes.append, stage.ask, lost)
    assert not watch.look()
    watch.check()


@pytest.mark.parametrize(
    ("states", "lives"),
    [
        ({b"own": GcsNodeInfo.ALIVE, b"other": GcsNodeInfo.DEAD}, True),
        ({b"own": GcsNodeInfo.DEAD, b"other": GcsNodeInfo.ALIVE}, False),
    ],
)
def test_a_node_lives_until_the_head_says_that_it_is_dead(
    monkeypatch: pytest.MonkeyPatch, states: dict[bytes, int], lives: bool
) -> None:
    limits = list[float]()

    def nodes(timeout: float) -> dict[bytes, SimpleNamespace]:
        limits.append(timeout)
        return {
            node: SimpleNamespace(
                state=state,
                node_manager_hostname="host",
                node_manager_address="10.0.0.1",
                node_manager_port=1,
                metrics_export_port=2,
            )
            for node, state in states.items()
        }

    context = SimpleNamespace(get_node_id=lambda: b"own".hex())
    monkeypatch.setattr(session, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    client = SimpleNamespace(get_all_node_info=nodes)
    monkeypatch.setattr("ray._private.worker.global_worker.gcs_client", client, raising=False)
    assert session.node_lives(2.5) is lives
    assert limits == [2.5]


@pytest.mark.parametrize("call", ["ray.nodes(", "= ray.nodes", "available_resources_per_node"])
def test_nothing_asks_for_nodes_in_a_way_that_aborts_its_process(call: str) -> None:
    folders = ("actors", "cluster", "judge", "rayloop", "recipes", "serve_apps")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert [str(file) for file in files if call in file.read_text(encoding="utf-8")] == []
