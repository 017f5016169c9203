"""The manager's world inside a worker, with Ray's side played; test_ray_run.py has the real one."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray.train
import torch
from ray.train import Checkpoint, PreemptionInfo
from ray.train.v2._internal.execution.storage import StorageContext
from torch import nn

from pimm_ray import open_checkpoint
from pimm_ray.errors import PimmRayError
from pimm_ray.runtime.base import Notice, make_runtime
from pimm_ray.runtime.worker import RayRuntime, in_train_worker, plain_value
from tests.test_ray_trainer import checkpoints


class FakeRay:
    """What `ray.train` says in a worker of a run in `folder`."""

    def __init__(self, monkeypatch, folder):
        self.committed, self.delay, self.reports = [], 0.0, []
        storage = StorageContext(str(folder.parent), folder.name)
        context = SimpleNamespace(get_storage=lambda: storage, get_local_rank=lambda: 5)
        monkeypatch.setattr(ray.train, "get_context", lambda: context)
        monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", self.get_all_reported_checkpoints)
        monkeypatch.setattr(ray.train, "report", lambda *args, **more: self.reports.append((args, more)))

    def get_all_reported_checkpoints(self, *, consistency_mode, timeout_s):
        assert consistency_mode == ray.train.CheckpointConsistencyMode.COMMITTED
        time.sleep(min(self.delay, timeout_s))
        return [SimpleNamespace(checkpoint=Checkpoint.from_directory(path)) for path in self.committed]


def test_outside_a_worker_and_under_v1_there_is_no_ray_runtime(monkeypatch):
    assert in_train_worker() is False
    monkeypatch.delattr(ray.train, "get_all_reported_checkpoints")
    monkeypatch.setattr(ray.train, "get_context", lambda: pytest.fail("V1 answers everywhere"))
    assert in_train_worker() is False


def test_a_worker_has_the_run_folder_of_ray_and_refuses_another(tmp_path, monkeypatch):
    FakeRay(monkeypatch, tmp_path / "run")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.8")
    runtime = make_runtime(None, timeout=5)
    assert isinstance(runtime, RayRuntime) and runtime.store.path == f"{tmp_path}/run"
    assert (runtime.local_rank, runtime.retains, runtime.report_spacing) == (5, True, 1.0)
    with pytest.raises(PimmRayError, match="remove storage="):
        make_runtime(tmp_path, timeout=5)


def test_a_report_points_ray_to_the_folder_itself_and_lets_it_copy_and_delete_nothing(tmp_path, monkeypatch):
    [path] = checkpoints(tmp_path / "run", 1.0)
    worker = FakeRay(monkeypatch, tmp_path / "run")
    make_runtime(None, timeout=5).report({"loss": torch.tensor(0.5)}, open_checkpoint(path))
    [((metrics,), more)] = worker.reports
    assert metrics == {"loss": 0.5} and more["checkpoint"].path == str(path)
    assert more["checkpoint_dir_name"] == path.name
    assert more["checkpoint_upload_mode"] == ray.train.CheckpointUploadMode.NO_UPLOAD
    assert more["delete_local_checkpoint_after_upload"] is False


def test_settle_raises_when_ray_does_not_record_in_time_and_known_errs_on_the_safe_side(tmp_path, monkeypatch):
    one, two = checkpoints(tmp_path / "run", 1.0, 2.0)
    worker = FakeRay(monkeypatch, tmp_path / "run")
    runtime = make_runtime(None, timeout=0.2)
    runtime.report({}, open_checkpoint(two))
    worker.committed = [one]
    assert runtime.known() == {one.name}
    runtime.settle()
    worker.delay = 1.0
    assert runtime.known() == {one.name, two.name}
    with pytest.raises(PimmRayError, match=rf"not recorded .* within 0.2 s \(waiting for: {two.name}\)"):
        runtime.settle()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(2.5), 2.5),
        (torch.tensor([1, 2]), [1, 2]),
        (nn.Parameter(torch.ones(1)), [1.0]),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.arange(2), [0, 1]),
        ({"a": torch.tensor(1)}, {"a": 1}),
        ((1, "x", None), [1, "x", None]),
        (Path("/x"), "/x"),
        (math.inf, math.inf),
    ],
)
def test_metrics_become_plain_values(value, plain):
    found = plain_value(value)
    assert found == plain and type(found) is type(plain)
    assert json.dumps(found)


def test_nan_stays_nan():
    assert math.isnan(plain_value(torch.tensor(math.nan))) and math.isnan(plain_value(np.float64("nan")))


def test_where_rays_private_place_for_notices_is_gone_its_public_call_asks_all_ranks(tmp_path, monkeypatch):
    FakeRay(monkeypatch, tmp_path / "run")
    runtime, told = RayRuntime(timeout=5), []
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: told[-1] if told else None)
    assert runtime.pending() is None and runtime.notice() is None
    ranks = {"b" * 56: [3], "a" * 56: [0, 1]}
    told.append(PreemptionInfo(deadline_ms=1_700_000_000_500, preempted_node_to_ranks=ranks))
    assert runtime.notice() == Notice(what="nodes=aaaaaaaa,bbbbbbbb ranks=0,1,3", deadline=1_700_000_000.5)


def test_a_notice_without_a_deadline_has_the_one_that_ray_restarts_at(tmp_path, monkeypatch):
    FakeRay(monkeypatch, tmp_path / "run")
    runtime = RayRuntime(timeout=5)
    info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"a" * 56: [0]})
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: info)
    first = runtime.notice()
    assert abs(first.deadline - time.time() - 120) < 1
    time.sleep(0.01)
    assert runtime.notice() == first, "counted from when it was first seen"
