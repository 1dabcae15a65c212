"""When a node takes its head for gone, on a clock that a test moves: an entry that cannot be read,
a network that is away.
"""

from __future__ import annotations

import argparse
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayloop.core.failures import START_AGAIN_EXIT_CODE
from rayloop.launch import node, rendezvous, restarts, slurm_job
from rayloop.launch.rendezvous import (
    HEAD_LOST_AFTER_S,
    UNPUBLISHED_TIMEOUT_S,
    Head,
    HeadLeft,
    NoHead,
    Rendezvous,
    Unpublished,
)
from rayloop.launch.signals import StopSignals


class Stage:
    """A rendezvous on a clock of its own, and a head in it that listens or does not."""

    def __init__(self, folder: Path) -> None:
        self.now, self.listens = 0.0, True
        self.place = Rendezvous(folder / "shared", "mine")
        self.place.open(insecure=True)
        self.head = Head("10.0.0.1:20001", "http://10.0.0.1:20002", None, "node", None, 0, 1.0)
        self.place.publish(self.head)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def entry(self) -> Path:
        return self.place.folder / "head.json"

    def after(self, look: Callable[[], bool], seconds: float, every: float = 0.5) -> float | None:
        """Look until that long has passed; when it was first true, counted from here."""
        began = self.now
        while self.now < began + seconds:
            self.now += every
            if look():
                return self.now - began
        return None


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path)
    monkeypatch.setattr(
        rendezvous, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    )
    monkeypatch.setattr(rendezvous, "accepts", lambda _: made.listens)
    return made


def unlinked(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    stage.entry.unlink()


def empty(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    stage.entry.write_text("", encoding="utf-8")


def partial(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    stage.entry.write_text(stage.entry.read_text(encoding="utf-8")[:20], encoding="utf-8")


def of_another_time(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    stage.entry.write_text('{"address": "10.0.0.1:20001"}', encoding="utf-8")


def failing(number: int) -> Callable[[Stage, pytest.MonkeyPatch], None]:
    def fail(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        def error(*_: object, **__: object) -> str:
            raise OSError(number, errno.errorcode[number])

        patch.setattr(Path, "read_text", error)
        patch.setattr(rendezvous, "write_whole", error)

    return fail


SPOILED = [
    unlinked,
    empty,
    partial,
    of_another_time,
    *map(failing, (errno.EIO, errno.ESTALE, errno.EACCES)),
]


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("saves", [False, True], ids=["worker", "train"])
def test_an_entry_that_cannot_be_read_for_30_s_changes_nothing_and_is_reported_once(
    stage: Stage, saves: bool, spoil: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    look = HeadLeft(stage.place, stage.head, saves)
    assert not look()
    with pytest.MonkeyPatch.context() as patch:
        spoil(stage, patch)
        assert stage.after(look, 30) is None
    said = capsys.readouterr().out
    assert said.count("node: ") == 1
    assert "10.0.0.1:20001 still listens, and this node stays" in said
    stage.place.publish(stage.head)
    assert not look()
    assert capsys.readouterr().out == "node: that is over\n"


def test_a_moment_is_not_reported(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    look = HeadLeft(stage.place, stage.head, saves=False)
    text = stage.entry.read_text(encoding="utf-8")
    stage.entry.unlink()
    assert stage.after(look, 2) is None
    stage.entry.write_text(text, encoding="utf-8")
    assert not look()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("spoil", [None, unlinked])
def test_a_head_that_cannot_be_reached_is_waited_for_45_s_and_not_for_ever(
    stage: Stage, spoil: Callable[..., None] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    look = HeadLeft(stage.place, stage.head, saves=False)
    if spoil is not None:
        spoil(stage, None)
    stage.listens = False
    assert stage.after(look, 45) is None
    assert (
        capsys.readouterr().out
        == "node: 10.0.0.1:20001 accepts no connection: waiting, 60 s at most\n"
    )
    stage.listens = True
    assert not look(), "the time counts anew"
    stage.listens = False
    assert stage.after(look, 300) == HEAD_LOST_AFTER_S + 0.5


def test_another_head_counts_at_once(stage: Stage) -> None:
    look = HeadLeft(stage.place, stage.head, saves=False)
    assert not look.replaced()
    stage.place.publish(Head(stage.head.address, stage.head.dashboard, None, "node", None, 0, 2.0))
    assert look(), "the same address, and Ray was started again behind it"
    assert look.replaced()


def test_when_a_head_begins_to_leave_programs_save_and_workers_stay_while_it_listens(
    stage: Stage,
) -> None:
    worker, program = (HeadLeft(stage.place, stage.head, saves) for saves in (False, True))
    stage.place.withdraw(stage.head, left=True)
    assert program()
    assert not program.replaced()
    assert stage.after(worker, 150) is None
    stage.listens = False
    assert worker()


def test_a_worker_that_waits_says_what_it_cannot_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "POLL_INTERVAL_S", 0.01)
    partial(stage, monkeypatch)
    with pytest.raises(NoHead, match=r"within 0\.05 s: .*head\.json cannot be read: ") as error:
        stage.place.wait(0.05)
    assert error.value.exit_code == START_AGAIN_EXIT_CODE
    stage.place.publish(stage.head)
    assert stage.place.wait(1) == stage.head


def test_a_head_publishes_itself_again(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    look = Unpublished(stage.place, stage.head)
    for spoil in (unlinked, empty):
        spoil(stage, pytest.MonkeyPatch())
        assert not look()
        assert stage.place.head() == stage.head
        assert not look()
        assert capsys.readouterr().out.count("it is written again, this head continues") == 1


def test_a_head_without_its_folder_goes_on_for_a_documented_time(stage: Stage) -> None:
    look = Unpublished(stage.place, stage.head)
    with pytest.MonkeyPatch.context() as patch:
        failing(errno.EIO)(stage, patch)
        assert stage.after(look, 1000) == UNPUBLISHED_TIMEOUT_S + 0.5
    assert "could not be published for 600 s: [Errno 5] EIO" in look.reason


def test_a_head_ends_for_another_one(stage: Stage) -> None:
    look = Unpublished(stage.place, stage.head)
    stage.place.publish(
        Head("10.0.0.2:20001", "http://10.0.0.2:20002", None, "other", None, 0, 2.0)
    )
    assert look()
    assert "has another head's entry, that of 10.0.0.2:20001 on other" in look.reason


# A head whose Ray ends ----------------------------------------------------------------------------


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[int]]]:
    """``node head`` over attempts of which each ends so; returns its code, and the port of each
    attempt.
    """
    now = [0.0]
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(
        ends: list[object], signals: StopSignals | None = None, seconds: float = 1.0
    ) -> tuple[int, list[int]]:
        ports: list[int] = []

        def lead(*given: object) -> int:
            taken = given[-1]
            assert isinstance(taken, node.Ports)
            ports.append(taken["port"])
            now[0] += seconds
            end = ends.pop(0)
            if isinstance(end, Exception):
                raise end
            assert isinstance(end, int)
            return end

        monkeypatch.setattr(node, "_lead", lead)
        arguments = argparse.Namespace(insecure=True, ports="13000-15999", program=[])
        return node.head(arguments, Rendezvous(tmp_path, "mine"), signals or StopSignals()), ports

    return run


def test_a_head_starts_ray_again_in_place(led: Callable[..., tuple[int, list[int]]]) -> None:
    code, ports = led([node.RayEnded("Ray ended"), node.NodeFailed("did not open"), 0])
    assert code == 0
    assert len(set(ports)) == 1, "with the same ports"
    assert len(ports) == 3


def test_a_head_whose_ray_ends_again_and_again_gives_up_with_a_rate(
    led: Callable[..., tuple[int, list[int]]],
) -> None:
    ends: list[object] = [node.RayEnded("Ray ended")] * 20
    with pytest.raises(node.RayEnded):
        led(ends)
    assert len(ends) == 20 - node.RESTARTS_PER_HOUR - 1
    assert led([node.RayEnded("Ray ended")] * 20 + [0], seconds=700.0)[0] == 0, (
        "one in ten minutes comes back"
    )


def test_a_head_that_never_was_is_not_started_again(
    led: Callable[..., tuple[int, list[int]]],
) -> None:
    with pytest.raises(node.NodeFailed, match="did not open"):
        led([node.NodeFailed("ray start did not open"), 0])


def test_a_head_in_whose_place_is_another_one_is_not_started_again(
    led: Callable[..., tuple[int, list[int]]],
) -> None:
    with pytest.raises(node.Displaced):
        led([node.RayEnded("Ray ended"), node.Displaced("another head's entry"), 0])


def test_a_head_that_was_asked_to_end_is_not_started_again(
    led: Callable[..., tuple[int, list[int]]],
) -> None:
    signals = StopSignals()
    signals(15, None)
    with pytest.raises(node.RayEnded):
        led([node.RayEnded("Ray ended"), 0], signals)


def test_without_slurm_a_program_that_the_machines_failed_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ends = [0.0], [69, node.NodeFailed("Ray ended"), 69, 0]

    def role(*_: object) -> int:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return int(end)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(node, "adopt_orphans", lambda: None)
    monkeypatch.setattr(slurm_job, "job", lambda: None)
    asks = argparse.Namespace(
        rendezvous=tmp_path,
        cluster="mine",
        role=role,
        program=["train"],
        requeue=3,
        ports="20000-29999",
    )
    assert node.run_node(asks) == 0
    assert now[0] == pytest.approx(15 + 30 + 60, abs=1)
    ends[:] = [69] * 5
    asks.requeue = 2
    assert node.run_node(asks) == 69
    assert len(ends) == 2, "the first, and two more"
    ends[:] = [1, 0]
    assert node.run_node(asks) == 1, "what is not the machines' doing is not done again"
