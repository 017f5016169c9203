"""A save is whole, shared out, durable and marked last, or it never happened."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pimm_ray import (
    CheckpointManager,
    KeepPolicy,
    SavePolicy,
    errors,
    find_checkpoint,
    open_checkpoint,
    verify_checkpoint,
)
from pimm_ray.checkpoint import layout, shards
from pimm_ray.checkpoint.folder import read_document, read_rank, read_snapshot
from pimm_ray.checkpoint.layout import Manifest
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.store import LocalStore, open_store
from tests.ranks import run_ranks


class Net(nn.Module):
    """Two tensors of many rows and some small ones; 60 kB."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.tall = nn.Linear(20, 300), nn.Linear(300, 30)
        self.norm = nn.BatchNorm1d(30)

    def forward(self, x):
        return self.norm(self.tall(torch.relu(self.wide(x))))


def make(folder, *, model=None, extra=None, **settings) -> tuple[CheckpointManager, nn.Module, torch.optim.Optimizer]:
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = CheckpointManager(model=model, optimizer=optimizer, storage=folder, extra=extra, **settings)
    return manager, model, optimizer


def train(manager, model, optimizer, steps=1, **metrics) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(80.0).reshape(4, 20).sin() + manager.state.global_step).square().mean().backward()
        optimizer.step()
        manager.step(**metrics)


def error_of(call, *args, **settings) -> Exception:
    with pytest.raises(Exception) as caught:
        call(*args, **settings)
    return caught.value


def checkpoints(folder) -> list[Path]:
    return sorted(Path(folder).glob("checkpoint_*"))


def saved_once(rank, folder):
    manager, model, optimizer = make(folder)
    manager.resume()
    train(manager, model, optimizer, 2)
    return manager.save().path


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_no_rank_writes_more_than_the_mean_and_one_indivisible_piece(tmp_path, world):
    folder = Path(run_ranks(world, saved_once, tmp_path)[0])
    tensors = {name: value for name, value in Net().state_dict().items()}
    headers = 4000
    weights = [file.stat().st_size for file in (folder / "weights").glob("*.safetensors")]
    assert len(weights) == world
    total = sum(value.nbytes for value in tensors.values())
    assert max(weights) <= total / world + max(value.nbytes for value in tensors.values()) + headers
    trainer = [file.stat().st_size for file in (folder / "trainer.dcp").iterdir()]
    assert len(trainer) == world
    moments = 2 * sum(parameter.nbytes for parameter in Net().parameters())
    assert max(trainer) <= moments / world + 1200 + headers, "one row of the widest moment has 1200 bytes"
    assert sorted(file.name for file in (folder / "ranks").iterdir()) == [f"{i:05}.safetensors" for i in range(world)]


def test_a_checkpoint_of_several_ranks_is_one_whole_with_one_id(tmp_path):
    paths = run_ranks(3, saved_once, tmp_path)
    assert len(set(paths)) == 1
    folder = Path(paths[0])
    manifest = json.loads((folder / layout.MARKER).read_text())
    state = json.loads((folder / layout.STATE).read_text())
    ids = {manifest["id"], state["id"]}
    shards = list(folder.rglob("*.safetensors"))
    for shard in shards:
        with safe_open(shard, "pt") as file:
            ids.add(file.metadata()[layout.ID_KEY])
    assert len(ids) == 1 and len(shards) == 9
    listed = {entry["path"]: entry["bytes"] for entry in manifest["files"]}
    found = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    assert found.pop(layout.MARKER) and found == listed
    assert verify_checkpoint(folder) == []
    info = open_checkpoint(folder)
    assert (info.step, info.world_size, info.attempt, info.bytes) == (2, 3, 1, sum(listed.values()))
    assert layout.CheckpointName.parse(folder.name) == layout.CheckpointName(1, 2, folder.name[-4:])


def test_the_documents_have_exactly_the_keys_that_the_design_fixes(tmp_path):
    folder = Path(saved_once(0, tmp_path))

    def strict(path):
        return json.loads(path.read_text(), parse_constant=pytest.fail)

    state = strict(folder / layout.STATE)
    designed = {
        "schema", "version", "step", "epoch", "position", "trainer", "shape", "generation", "drops", "seed",
        "optimizers", "schedulers", "scaler", "extra", "loggers", "warm_start", "versions",
    }  # fmt: skip
    assert set(state) == designed | {"id", "model", "ema", "replayed", "schedule_lag"}
    assert (state["schema"], state["version"]) == ("pimm_ray.checkpoint", 4)
    assert set(state["position"]) == {"epoch", "samples", "window"}
    trainer = {"epoch", "iter_in_epoch", "global_step", "samples_seen", "best_metric_value"}
    assert set(state["trainer"]) == trainer
    shape = {"world_size", "loader_workers", "global_batch", "micro_batch", "dataset_size", "order_id", "seed", "share"}
    assert set(state["shape"]) == shape
    assert state["optimizers"][0]["class"] == "AdamW"
    names = [name for name, _ in Net().named_parameters()]
    assert [group["params"] for group in state["optimizers"][0]["groups"]] == [names]
    assert {"python", "torch", "numpy"} <= set(state["versions"])
    manifest = strict(folder / layout.MARKER)
    designed = {"schema", "version", "id", "parent", "step", "attempt", "world_size", "created", "reason", "files"}
    assert set(manifest) == designed | {"epoch", "metrics", "xxh3"}
    assert all(set(entry) == {"path", "bytes", "xxh3", "block"} for entry in manifest["files"])
    assert (manifest["reason"], manifest["parent"]) == ("user", None)


class Drifting(nn.Module):
    """Its running statistics differ between ranks, as those of BatchNorm do under DDP."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.z = nn.Linear(2, 3), nn.BatchNorm1d(50)
        self.z.running_mean.fill_(rank + 1)


def save_drifting(rank, folder):
    model = Drifting(rank)
    average = AveragedModel(model, use_buffers=True)
    manager = CheckpointManager(model=model, ema=average, storage=folder)
    manager.resume()
    manager.save()
    model.z.running_mean.zero_(), average.module.z.running_mean.zero_()
    again = CheckpointManager(model=model, ema=average, storage=folder)
    again.resume()
    return {*model.z.running_mean.tolist()}, {*average.module.z.running_mean.tolist()}


def test_buffers_are_those_of_rank_zero_in_the_model_and_in_its_average(tmp_path):
    assert run_ranks(3, save_drifting, tmp_path) == [({1.0}, {1.0})] * 3


class Breakable:
    """State that can be stored, until it cannot."""

    def __init__(self):
        self.value: object = 1

    def state_dict(self):
        return {"inner": [0, self.value]}

    def load_state_dict(self, state):
        self.value = state["inner"][1]


def holds_a_lambda(rank, folder, where):
    part = Breakable()
    manager, model, optimizer = make(folder, extra={"part": part})
    manager.resume()
    train(manager, model, optimizer)
    good = manager.save()
    train(manager, model, optimizer)
    if rank in where:
        part.value = lambda: 0
    error = error_of(manager.save)
    manager._runtime.gather("rank 0 has tidied", None)
    left = [path.name for path in checkpoints(folder)]
    newest = find_checkpoint(folder)
    part.value = 5
    train(manager, model, optimizer)
    later = manager.save()
    return (type(error).__name__, str(error), getattr(error, "key", None), left == [good.name], newest == good,
            (later.step, later.parent == good.id, verify_checkpoint(later.path)))  # fmt: skip


@pytest.mark.parametrize(("world", "where"), [(1, [0]), (3, [0, 1, 2]), (3, [1])], ids=["1", "all of 3", "1 of 3"])
def test_a_leaf_that_needs_pickle_fails_the_save_on_all_ranks_by_name_and_nothing_else(tmp_path, world, where):
    for kind, text, key, alone, newest, later in run_ranks(world, holds_a_lambda, tmp_path, where):
        assert (kind, key) == ("UnstorableState", "extra.part.inner.1")
        assert "extra.part.inner.1: function cannot be stored without pickle" in text
        assert alone and newest, "the checkpoint before is still the only and the newest one"
        assert later == (3, True, [])


@pytest.mark.parametrize("where", ["extra", "loader"])
def test_a_state_that_would_be_too_large_to_read_back_fails_the_save_and_not_the_resume(tmp_path, monkeypatch, where):
    monkeypatch.setattr(layout, "MAX_DOCUMENT", 100_000)
    monkeypatch.setattr(shards, "_MAX_HEADER", 100_000)
    history: list[int] = []

    class Loader(list):
        def state_dict(self):
            return {"history": history if where == "loader" else []}

        def load_state_dict(self, state):
            pass

    model = Net()
    manager = CheckpointManager(
        model=model, loader=Loader(range(9)), storage=tmp_path, extra={"log": history if where == "extra" else []}
    )
    manager.resume()
    batches = manager.batches()
    next(batches)
    manager.step()
    manager.save()
    history += range(100_000)
    error = error_of(manager.save)
    assert isinstance(error, errors.UnstorableState) and "bytes and may have" in str(error)
    assert ("extra" if where == "extra" else "loader's state") in str(error)
    assert len(checkpoints(tmp_path)) == 1
    history.clear()
    again = CheckpointManager(model=model, loader=Loader(range(9)), storage=tmp_path, extra={"log": []})
    assert again.resume().step == 1


def test_a_reason_or_a_metric_s_name_that_is_no_string_is_refused(tmp_path):
    manager, *_ = make(tmp_path)
    manager.resume()
    assert "reason=None" in str(error_of(manager.save, reason=None))
    assert "metric 1 has a name" in str(error_of(manager.save, metrics={1: 0.5}))
    assert checkpoints(tmp_path) == []


def full_disk(real):
    def write(descriptor, data):
        real(descriptor, bytes(data)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    return write


def cannot_write(rank, folder, broken):
    manager, model, optimizer = make(folder)
    manager.resume()
    train(manager, model, optimizer)
    good = manager.save()
    train(manager, model, optimizer)
    real = os.write
    if rank == broken:
        os.write = full_disk(real)
    error = error_of(manager.save)
    os.write = real
    manager._runtime.gather("rank 0 has tidied", None)
    left = [path.name for path in checkpoints(folder)]
    newest = find_checkpoint(folder)
    later = manager.save()
    return (type(error).__name__, isinstance(error, OSError), str(error), left == [good.name], newest == good,
            (later.step, verify_checkpoint(later.path)))  # fmt: skip


@pytest.mark.parametrize(("world", "broken"), [(1, 0), (2, 0), (3, 2)])
def test_one_rank_with_a_full_disk_fails_the_save_on_all_and_the_next_one_works(tmp_path, world, broken):
    for rank, outcome in enumerate(run_ranks(world, cannot_write, tmp_path, broken, timeout=40)):
        kind, is_os_error, text, alone, newest, later = outcome
        assert (kind, is_os_error) == ("StorageError", True)
        assert "No space left on device" in text and str(tmp_path) in text
        assert text.startswith("cannot write" if rank == broken else f"rank {broken}: cannot write")
        assert alone, "the half-written folder is gone"
        assert newest
        assert later == (2, [])


def cannot_publish(rank, folder):
    manager, model, optimizer = make(folder)
    manager.resume()
    good = manager.save()
    train(manager, model, optimizer)
    real = os.replace
    os.replace = lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error"))
    error = error_of(manager.save)
    os.replace = real
    manager._runtime.gather("rank 0 has tidied", None)
    return type(error).__name__, [path.name for path in checkpoints(folder)] == [good.name], manager.save().step


def test_a_marker_that_cannot_be_put_in_place_leaves_no_checkpoint(tmp_path):
    assert run_ranks(2, cannot_publish, tmp_path) == [("StorageError", True, 1)] * 2


def unlike(rank, folder, difference):
    model = Net()
    if rank == 1 and difference == "name":
        model.register_parameter("surplus", nn.Parameter(torch.zeros(3)))
    if rank == 1 and difference == "dtype":
        model.norm.weight.data = model.norm.weight.data.double()
    if difference == "shape":
        model.tall = nn.Linear(300, 30 if rank != 1 else 31)
    manager, model, optimizer = make(folder, model=model)
    manager.resume()
    if rank == 1 and difference == "moments":
        train(manager, model, optimizer)
    elif difference == "moments":
        manager.step()
    error = error_of(manager.save)
    return type(error).__name__, str(error), checkpoints(folder)


def replicas(rank, folder):
    records = Records()
    logging.getLogger("pimm_ray").addHandler(records)
    model = Net()
    if rank == 1:
        nn.init.normal_(model.tall.bias)
    manager, _, _ = make(folder, model=model)
    manager.resume()
    manager.save()
    return [text for text in records.texts if "mixture" in text], checkpoints(folder)


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def test_ranks_that_train_models_of_their_own_are_warned_and_keep_their_save(tmp_path):
    (said, left), (silent, _) = run_ranks(2, replicas, tmp_path)
    assert len(said) == 1 and "ranks [1]" in said[0] and silent == []
    assert len(left) == 1


@pytest.mark.parametrize("difference", ["name", "dtype", "shape", "moments"])
def test_ranks_with_different_state_are_told_which_they_are_and_nothing_is_written(tmp_path, difference):
    for kind, text, left in run_ranks(3, unlike, tmp_path, difference):
        assert kind == "StateMismatch"
        assert "ranks [1] hold other tensors" in text
        assert left == []


def two_saves(rank, folder):
    manager, model, optimizer = make(folder)
    manager.resume()
    train(manager, model, optimizer)
    first = manager.save()
    train(manager, model, optimizer)
    return first.path, manager.save().path


@pytest.mark.parametrize("name", [layout.STATE, layout.trainer_file(1), layout.weights_file(0, 2), layout.rank_file(1)])
def test_a_file_of_another_checkpoint_is_detected_even_when_its_digest_is_listed(tmp_path, name):
    older, newer = map(Path, run_ranks(2, two_saves, tmp_path)[0])
    shutil.copy(older / name, newer / name)
    assert [problem.file for problem in verify_checkpoint(newer)] == [name]
    assert find_checkpoint(tmp_path).path == str(older)

    theirs = Manifest.parse((older / layout.MARKER).read_bytes(), path="")
    ours = Manifest.parse((newer / layout.MARKER).read_bytes(), path="")
    entry = next(entry for entry in theirs.files if entry.path == name)
    forged = Manifest(**{**vars(ours), "files": (*(e for e in ours.files if e.path != name), entry)})
    (newer / layout.MARKER).write_bytes(forged.to_json())
    reader = Reader(open_store(newer), forged)
    with pytest.raises(errors.CorruptCheckpoint, match="two checkpoints are mixed") as caught:
        read_snapshot(reader, read_document(reader))
        read_rank(reader, 1)
    assert caught.value.file == name


def slowed(rank, folder):
    manager, model, optimizer = make(folder, keep=KeepPolicy(last=10))
    manager.resume()
    write = LocalStore.write
    if rank == 1:
        LocalStore.write = lambda *call: (time.sleep(0.05), write(*call))[1]
    for _ in range(10):
        train(manager, model, optimizer)
        manager.save()


def test_ten_saves_with_one_slow_rank_are_all_whole_and_leave_nothing_else(tmp_path):
    run_ranks(2, slowed, tmp_path)
    assert [layout.CheckpointName.parse(path.name).step for path in checkpoints(tmp_path)] == list(range(1, 11))
    assert sorted(tmp_path.iterdir()) == checkpoints(tmp_path)
    for path in checkpoints(tmp_path):
        assert verify_checkpoint(path) == []
        assert {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()} == {
            layout.MARKER, *(entry.path for entry in Manifest.parse((path / layout.MARKER).read_bytes(), path="").files)
        }  # fmt: skip


def skips_a_save(rank, folder):
    manager, model, optimizer = make(folder, save=SavePolicy(timeout_seconds=20))
    manager.resume()
    train(manager, model, optimizer)
    if rank == 1:
        train(manager, model, optimizer)
    error = error_of(manager.save)
    return type(error).__name__, error.ranks, str(error), checkpoints(folder)


def test_a_rank_that_skips_a_save_is_named_at_the_next_one(tmp_path):
    for kind, ranks, text, left in run_ranks(3, skips_a_save, tmp_path):
        assert (kind, ranks) == ("RankMissing", [1])
        assert "save at step 1: rank 1 is at 'save at step 2' instead" in text
        assert left == []


def test_damaged_random_state_is_never_used_nor_passed_over_in_silence(tmp_path, caplog):
    older, newer = map(Path, two_saves(0, tmp_path))
    shard = newer / layout.rank_file(0)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    manager, _, _ = make(tmp_path)
    plan = manager.resume()
    assert (plan.source, plan.step) == (older.name, 1)
    said = f"passed over {newer.name}: {layout.rank_file(0)}: digest"
    assert [record.levelname for record in caplog.records if said in record.getMessage()] == ["WARNING"]


def with_metrics(rank, folder):
    manager, model, optimizer = make(folder, keep=KeepPolicy(best=1, metric="loss", mode="min"))
    manager.resume()
    train(manager, model, optimizer, loss=torch.tensor(float(rank), requires_grad=True), note=f"rank {rank}")
    info = manager.save(
        metrics={
            "tensor": torch.ones(1, 1) * rank, "half": torch.tensor(1.5, dtype=torch.bfloat16), "nan": math.nan,
            "inf": -math.inf, "numpy": np.float32(0.5), "array": np.array([3]), "flag": np.bool_(True),
            "count": np.int64(7), "true": True, "uneven": rank + 1, "text": np.str_("x"),
            **({"only": 4} if rank == 1 else {}),
        }
    )  # fmt: skip
    json.loads(Path(info.path, layout.MARKER).read_text(), parse_constant=pytest.fail)
    return info.metrics, open_checkpoint(info.path).metrics, manager.state.best_metric_value


def test_metrics_of_every_plain_kind_are_averaged_and_come_back_from_disk(tmp_path):
    for held, read, best in run_ranks(2, with_metrics, tmp_path):
        assert math.isnan(held.pop("nan")) and math.isnan(read.pop("nan"))
        assert held == read
        assert held == {
            "loss": 0.5, "note": "rank 0", "tensor": 0.5, "half": 1.5, "inf": -math.inf, "numpy": 0.5, "array": 3,
            "flag": True, "count": 7, "true": True, "uneven": 1.5, "text": "x", "only": 4,
        }  # fmt: skip
        assert best == 0.5


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.zeros(2, 3), "Tensor of 6 values"), (np.zeros(2), "ndarray of 2 values"), (None, "NoneType"),
     ([1.0], "list"), ({"a": 1}, "dict"), (1j, "complex"), (torch.tensor(1j), "complex"), (np.array(None), "object"),
     (np.datetime64("2026-01-01"), "datetime64"), (torch.zeros(0), "Tensor of 0 values")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_metric_that_is_not_one_plain_value_is_a_type_error_that_names_it(tmp_path, value, said):
    manager, model, optimizer = make(tmp_path)
    manager.resume()
    for call in (lambda: train(manager, model, optimizer, size=value), lambda: manager.save(metrics={"size": value})):
        with pytest.raises(TypeError, match=rf"metric 'size' is a .*{said}"):
            call()
    assert checkpoints(tmp_path) == []


def test_every_file_and_folder_is_on_the_disk_before_the_marker_and_the_marker_before_the_save_returns(
    tmp_path, monkeypatch
):
    run = tmp_path / "run"
    manager, model, optimizer = make(run, extra={"x": [torch.ones(2)]})
    manager.resume()
    train(manager, model, optimizer)
    events = []
    real_fsync, real_replace, real_write = os.fsync, os.replace, os.write

    def where(descriptor):
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), run)

    monkeypatch.setattr(os, "fsync", lambda d: (events.append(("sync", where(d))), real_fsync(d))[1])
    monkeypatch.setattr(os, "write", lambda d, data: (events.append(("write", where(d))), real_write(d, data))[1])
    monkeypatch.setattr(
        os, "replace", lambda a, b: (events.append(("rename", os.path.relpath(b, run))), real_replace(a, b))
    )
    name = manager.save().name
    events = [event for event in events if not event[1].startswith(".lease")]  # a thread of its own renews it

    files = {os.path.relpath(file, run) for file in (run / name).rglob("*") if file.is_file()}
    marker = f"{name}/{layout.MARKER}"
    files.remove(marker)
    assert {path for kind, path in events if kind == "write"} >= files
    renamed = events.index(("rename", marker))
    before, after = events[:renamed], events[renamed + 1 :]
    assert {kind for kind, _ in after} == {"sync"}
    folders = {name, *(f"{name}/{part}" for part in ("weights", "trainer.dcp", "ranks"))}
    for path in files:
        written = max(i for i, event in enumerate(before) if event == ("write", path))
        assert ("sync", path) in before[written:], path
    last_write = max(i for i, event in enumerate(before) if event[0] == "write" and layout.MARKER not in event[1])
    assert {("sync", path) for path in folders} <= set(before[last_write:])
    temporary = before[-1]
    assert temporary[0] == "sync" and temporary[1].startswith(marker), "the marker's own bytes, before it is renamed"
    assert {("sync", name), ("sync", ".")} <= set(after)


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace on this machine")
def test_the_system_calls_of_a_save_are_data_first_and_marker_last(tmp_path):
    script = (
        "import torch; from pimm_ray import CheckpointManager\n"
        f"manager = CheckpointManager(model=torch.nn.Linear(2, 2), storage={str(tmp_path / 'run')!r})\n"
        "manager.resume(); manager.save()\n"
    )
    log = tmp_path / "calls"
    command = ["strace", "-f", "--seccomp-bpf", "-y", "-o", str(log), "-e", "trace=fsync,rename,openat"]
    root = Path(__file__).parent.parent
    subprocess.run([*command, sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(root)})
    ours = [line for line in log.read_text().splitlines() if "/run/checkpoint_" in line]
    made = [i for i, line in enumerate(ours) if "O_CREAT" in line]
    (renamed,) = (i for i, line in enumerate(ours) if " rename(" in line)
    assert len(made) == 4 and '.complete"' in ours[renamed] and renamed > max(made)
    synced = [line for line in ours[:renamed] if " fsync(" in line]
    assert sum(".safetensors" in line or ".json" in line for line in synced) == 3
    assert not any("O_WRONLY" in line for line in ours[renamed:])


def test_nothing_is_ever_written_twice(tmp_path):
    store = LocalStore(open_store(tmp_path).filesystem, str(tmp_path))
    store.write("a", [b"one", b"", b"two"])
    with pytest.raises(errors.StorageError, match="File exists"):
        store.write("a", [b"three"])
    assert (tmp_path / "a").read_bytes() == b"onetwo"
