"""Trackers in a training run: rank 0 alone, the mean over the ranks, and one run from restart to restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, TensorBoardTracker
from pimm_ray.errors import TrackerError
from tests.ranks import die, run_ranks, try_ranks


class Lines:
    """A tracker that writes a line a call, with the rank that made it."""

    name = "lines"

    def __init__(self, file: Path, rank: int, state: Any = None):
        self.file, self.rank, self.state = file, rank, state or {"run": "first"}

    def _write(self, *said: Any) -> None:
        with self.file.open("a") as out:
            print(json.dumps([self.rank, *said]), file=out)

    def start(self, state: dict[str, Any] | None, *, step: int) -> None:
        self.state = state or self.state
        self._write("start", state, step)

    def log(self, metrics: Any, step: int) -> None:
        self._write("log", dict(metrics), step)

    def state_dict(self) -> Any:
        return self.state

    def finish(self) -> None:
        self._write("finish")


class Lost(Lines):
    def start(self, state: dict[str, Any] | None, *, step: int) -> None:
        raise TrackerError("which project?")


def said(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def train(rank: int, folder: Path, loggers: list[Any], steps: int, *, killed: bool = False, **settings: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(
        model=model, optimizer=optimizer, loggers=loggers, storage=str(folder / "run"), save=SavePolicy(every_steps=4),
        **settings,
    )  # fmt: skip
    manager.resume()
    while manager.state.global_step < steps:
        manager.step(loss=torch.tensor(10.0 * (rank + 1) + manager.state.global_step))
    if killed:
        die()
    manager.save(metrics={"accuracy": 0.5} if rank == 0 else {})
    manager.finish()


def every_rank_has_one(rank: int, folder: Path, steps: int, killed: bool) -> None:
    train(rank, folder, [Lines(folder / "lines", rank)], steps, killed=killed, log_every=3)


def rank_zero_has_one(rank: int, folder: Path) -> None:
    train(rank, folder, [Lines(folder / "lines", rank)] if rank == 0 else [], 2, log_every=1)


def test_rank_zero_logs_the_mean_of_all_and_goes_on_with_the_run_of_the_checkpoint(tmp_path):
    assert all(rank.killed for rank in try_ranks(2, every_rank_has_one, tmp_path, 6, True))
    run_ranks(2, every_rank_has_one, tmp_path, 10, False)
    assert said(tmp_path / "lines") == [
        [0, "start", None, 0],
        [0, "log", {"loss": 17.0}, 3],
        [0, "log", {"loss": 20.0}, 6],
        [0, "start", {"run": "first"}, 4],
        [0, "log", {"loss": 20.0}, 6],
        [0, "log", {"loss": 23.0}, 9],
        [0, "log", {"accuracy": 0.5}, 10],
        [0, "log", {"loss": 24.0}, 10],
        [0, "finish"],
    ]


def test_ranks_other_than_zero_need_not_have_any(tmp_path):
    run_ranks(2, rank_zero_has_one, tmp_path)
    assert [line[1:] for line in said(tmp_path / "lines")][1:3] == [
        ["log", {"loss": 15.0}, 1], ["log", {"loss": 16.0}, 2],
    ]  # fmt: skip


def loses_its_way(rank: int, folder: Path) -> None:
    train(rank, folder, [Lost(folder / "lines", rank)], 2)


def test_a_tracker_that_cannot_find_its_run_stops_all_ranks_before_they_train(tmp_path):
    ends = try_ranks(2, loses_its_way, tmp_path)
    assert all(end.kind == "TrackerError" and "which project?" in end.error for end in ends)


def test_a_state_that_is_no_json_is_a_warning_and_the_save_is_good(tmp_path, caplog):
    train(0, tmp_path, [Lines(tmp_path / "lines", 0, state={"run": torch.zeros(2)})], 4)
    assert "state_dict() failed: TypeError" in caplog.text
    newest = max((tmp_path / "run").glob("checkpoint_*"))
    assert json.loads((newest / "state.json").read_text())["loggers"] == {}


def on_tensorboard(rank: int, folder: Path, steps: int, killed: bool) -> None:
    train(rank, folder, [TensorBoardTracker(folder / "board")], steps, killed=killed, log_every=1)


def test_the_curve_of_a_killed_and_resumed_run_has_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    try_ranks(2, on_tensorboard, tmp_path, 6, True)
    run_ranks(2, on_tensorboard, tmp_path, 10, False)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(s, 14.0 + s) for s in range(1, 11)]


def test_log_every_must_be_a_number_of_steps(tmp_path):
    with pytest.raises(ValueError, match="log_every=0: use a number of steps"):
        CheckpointManager(model=nn.Linear(1, 1), storage=str(tmp_path), log_every=0)
