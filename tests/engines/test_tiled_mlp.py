"""An MLP that is computed tile by tile gives the same update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayloop.engines.training import scorer
from tests.engines.training import VERSION, Sgd, engine, mixed_items


def test_tiles_change_no_update(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        with engine(tiny_vlm, optimizer=Sgd(lr=0.1)) as trainer:
            return trainer.train([mixed_items(tiny_vlm)]), trainer.export(VERSION)

    report, weights = trained()
    tiles, cut = list[int](), scorer.checkpoint

    def noted(function: object, tile: torch.Tensor, *rest: object, **options: bool) -> torch.Tensor:
        if not rest:  # the log-probs' chunks have more arguments
            tiles.append(tile.shape[-2])
        return cut(function, tile, *rest, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(scorer, "TILED_ABOVE_TOKENS", 8)
    monkeypatch.setattr(scorer, "TILE_TOKENS", 5)
    monkeypatch.setattr(scorer, "checkpoint", noted)
    tiled, own = trained()
    assert max(tiles) == 5
    assert tiled["actor/loss"] == pytest.approx(report["actor/loss"], rel=1e-6)
    assert tiled["actor/grad_norm"] == pytest.approx(report["actor/grad_norm"], rel=1e-6)
    for name, weight in weights.items():
        # A bias that began at 0 is one gradient: sums of float32 in another order differ by some
        # units of rounding (1.2e-7).
        assert (own[name] - weight).norm() <= 4e-6 * weight.norm(), name
