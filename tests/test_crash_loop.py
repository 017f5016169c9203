"""When a run counts as being in a crash loop. Ray's own policy and errors, without its processes."""

import errno
import logging
from types import SimpleNamespace

import pytest
import ray.train.torch
import torch.distributed as dist
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.train import ControllerError, FailureConfig, PreemptionError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, TorchTrainer
from pimm_ray.checkpoint.store import open_store
from pimm_ray.errors import RankMissing, StorageError
from pimm_ray.runtime import crash_loop, ray_private
from pimm_ray.runtime.worker import WorkerLoop
from tests.test_ray_trainer import checkpoints
from tests.test_ray_worker import FakeRay

DIED = WorkerHealthCheckFailedError("a worker does not answer", ActorDiedError())


@pytest.fixture
def policy():
    """What the controller asks after each failure: whether the run goes on."""
    made = crash_loop.FailurePolicy(DefaultFailurePolicy(FailureConfig(max_failures=-1)))
    return lambda failure: made.make_decision(training_failed_error=failure).value == "RETRY"


def failure(*errors, place="after step 7"):
    """Of ranks 0, 1, ..., as it reaches the controller."""
    for error in errors:
        if error is not DIED:
            crash_loop.mark(error, lambda: place)
    return cloudpickle.loads(cloudpickle.dumps(WorkerGroupError("", dict(enumerate(errors)))))


def test_the_third_failure_at_one_step_with_one_error_ends_the_run(policy, caplog):
    assert [policy(failure(ValueError("bad"))) for _ in range(3)] == [True, True, False]
    assert "failure after step 7: ValueError: bad (2 in a row; at 3 the run stops)" in caplog.messages


@pytest.mark.parametrize("error", [ActorDiedError, lambda: ActorUnavailableError("socket closed", None)])
def test_a_worker_that_is_lost_while_its_group_starts_does_not_end_the_run(policy, error):
    assert all(policy(ControllerError(error())) for _ in range(crash_loop.LOST_TIMES))
    assert not policy(ControllerError(error())), "nodes do not go at that moment for ever"
    assert not policy(ControllerError(RuntimeError("a bug in a callback")))


def test_numbers_and_addresses_may_differ(policy):
    texts = ["loss 0.17 of <T at 0x7f31a0c2>", "loss 1e-09 of <T at 0x7f00beef>", "loss 12 of <T at 0xd1>"]
    assert [policy(failure(ValueError(text))) for text in texts] == [True, True, False]
    names = ["checkpoint_00000005-0001-d051", "checkpoint_00000010-0002-51d0", "checkpoint_00000005-0003-9999"]
    assert [policy(failure(ValueError(name))) for name in names] == [True, True, False]


def test_the_rank_may_differ_and_others_may_fail_of_something_else(policy):
    bad, other = ValueError("bad"), RuntimeError("another one")
    failures = [failure(bad), failure(other, bad), failure(KeyError("x"), other, bad)]
    assert [policy(each) for each in failures] == [True, True, False]


def test_an_error_that_did_not_come_each_time_is_not_in_a_row(policy):
    bad, other = ValueError("bad"), RuntimeError("another one")
    assert all(policy(each) for each in [failure(bad), failure(bad, other), failure(other), failure(other)])


@pytest.mark.parametrize(
    "different",
    [
        lambda: failure(ValueError("bad"), place="after step 8"),
        lambda: failure(TypeError("bad")),
        lambda: failure(ValueError("worse")),
    ],
    ids=["a later step", "another kind", "another text"],
)
def test_another_failure_in_between_begins_the_count_anew(policy, different):
    same = [failure(ValueError("bad")) for _ in range(4)]
    failures = [same[0], same[1], different(), same[2], same[3]]
    assert [policy(each) for each in failures] == [True] * 5


@pytest.mark.parametrize(
    "other",
    [
        lambda: PreemptionError(SimpleNamespace(preempted_ranks=[0])),
        lambda: failure(DIED),
        lambda: failure(ValueError("bad"), DIED),
        lambda: failure(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:345")),
        lambda: failure(dist.DistBackendError("remote process exited")),
        lambda: failure(RankMissing("rank 1 did not come")),
        lambda: failure(StorageError("the bucket does not answer")),
        lambda: failure(ConnectionResetError(errno.ECONNRESET, "reset")),
    ],
    ids=["preemption", "death", "death and error", "gloo", "backend", "rank missing", "storage", "network"],
)
def test_what_a_lost_node_or_the_network_brings_about_is_left_to_ray(policy, other):
    assert all(policy(other()) for _ in range(5))
    assert [policy(failure(ValueError("bad"))) for _ in range(2)] == [True, True]
    assert policy(other()) and not policy(failure(ValueError("bad"))), "in between it neither counts nor clears"


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "no data"), PermissionError(13, "denied"), OSError(errno.ENOSPC, "full")]
)
def test_what_does_not_pass_by_itself_counts_also_when_it_comes_from_the_storage(policy, error):
    assert [policy(failure(error)) for _ in range(3)] == [True, True, False]
    hidden = StorageError("cannot write")
    hidden.__cause__ = error
    assert [policy(failure(hidden)) for _ in range(3)] == [True, True, False]


def test_errors_of_the_controller_are_left_to_ray(policy):
    assert all(policy(ControllerError(WorkerGroupStartupTimeoutError(2))) for _ in range(5))


def test_b35_both_budgets_hold_and_are_counted_apart(caplog):
    caplog.set_level(logging.INFO, "ray.train")
    config = FailureConfig(max_failures=1, max_preemption_failures=2)
    policy = crash_loop.FailurePolicy(DefaultFailurePolicy(config))
    preempted = PreemptionError(SimpleNamespace(preempted_ranks=[0]))
    failures = [preempted, failure(ValueError("bad")), preempted, failure(ValueError("bad"))]
    assert [policy.make_decision(each).value for each in failures] == ["RETRY", "RETRY", "RETRY", "RAISE"]
    counts = [line.strip() for line in caplog.text.splitlines() if "Source: " in line or "Error count: " in line]
    assert counts[2:4] == ["Source: worker group", "Error count: 1 (max allowed: 1)"]
    assert counts[4:6] == ["Source: preemption", "Error count: 2 (max allowed: 2)"]


def test_a_mistake_of_ours_leaves_the_decision_to_ray(policy, monkeypatch, caplog):
    monkeypatch.setattr(crash_loop, "_marks", None)
    assert all(policy(failure(ValueError("bad"))) for _ in range(4))
    assert "crash loop: left to Ray's own policy" in caplog.text


def test_the_policy_travels_to_the_controller():
    made = crash_loop.FailurePolicy(DefaultFailurePolicy(FailureConfig(max_failures=-1)))
    there = cloudpickle.loads(cloudpickle.dumps(made))
    assert [there.make_decision(failure(ValueError("bad"))).value for _ in range(3)] == ["RETRY", "RETRY", "RAISE"]


def test_the_trainer_hands_it_to_the_controller_and_leaves_an_unknown_ray_alone(tmp_path, monkeypatch, caplog):
    made = TorchTrainer(print, run_config=ray.train.RunConfig(name="run", storage_path=str(tmp_path)))
    assert isinstance(made._watch("theirs"), crash_loop.FailurePolicy)
    monkeypatch.setattr(ray_private, "_FAILURES", "ray.gone")
    assert made._watch("theirs") == "theirs" and "another than expected" in caplog.text


@pytest.mark.parametrize("watched", [lambda policy: [policy], lambda policy: policy.gone], ids=["ours", "mistake"])
def test_the_controller_gets_our_policy_and_rays_own_when_ours_cannot_be_made(watched, caplog):
    class Trainer:
        def _initialize_and_run_controller(self, **arguments):
            return arguments

    class Ours(ray_private.ControllerHook, Trainer):
        _watch = staticmethod(watched)

    found = Ours()._initialize_and_run_controller(failure_policy="theirs")["failure_policy"]
    assert found == ["theirs"] or (found == "theirs" and "crash loop: left to Ray's own policy" in caplog.text)


def stopped(error, times=3):
    """What `fit()` raises after this error has come so often."""
    failures = [failure(error) for _ in range(times)]
    policy = crash_loop.FailurePolicy(DefaultFailurePolicy(FailureConfig(max_failures=-1)))
    for each in failures:
        policy.make_decision(each)
    return cloudpickle.loads(cloudpickle.dumps(failures[-1]))


def test_the_report_says_where_what_how_often_and_how_to_go_on(tmp_path, caplog):
    [path] = checkpoints(tmp_path, 1.0)
    error = stopped(ValueError("bad sample 12"))
    crash_loop.explain(error, open_store(tmp_path))
    first, second, *_ = str(error).splitlines()
    assert first == "crash loop: 3 failures in a row after step 7 with the same error: ValueError: bad sample 12"
    assert second.endswith(f"the same command again: it goes on from the newest checkpoint, {path} (step 1).")
    assert "Training failed due to worker errors" in str(error) and first in caplog.text


def test_without_a_checkpoint_the_report_says_so_and_without_a_loop_there_is_none(tmp_path):
    error, plain = stopped(ValueError("bad")), stopped(ValueError("bad"), times=2)
    text = str(plain)
    crash_loop.explain(error, open_store(tmp_path))
    crash_loop.explain(plain, open_store(tmp_path))
    assert "it starts fresh." in str(error) and str(plain) == text


def test_a_report_that_cannot_be_made_hides_no_error(caplog):
    error = stopped(ValueError("bad"))
    crash_loop.explain(error, None)
    assert "crash loop" not in str(error) and "cannot be explained" in caplog.text


@pytest.mark.parametrize(
    ("steps", "reports", "place"),
    [(2, 9, "after step 2"), (None, 4, "after report 4"), (None, 0, "at the start")],
    ids=["with the manager", "before it has resumed, or without it", "before anything"],
)
def test_the_worker_marks_where_the_loop_failed(tmp_path, monkeypatch, steps, reports, place):
    FakeRay(monkeypatch, tmp_path / "run")
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    monkeypatch.setattr(ray_private, "reports", lambda: reports)

    def loop(config):
        if steps is not None:
            manager = CheckpointManager(model=nn.Linear(2, 1), save=SavePolicy(on_preemption=False))
            manager.resume()
            for _ in range(steps):
                manager.step()
        raise ValueError("bad")

    with pytest.raises(ValueError) as caught:
        WorkerLoop(loop, None, None)({})
    assert crash_loop._marks(WorkerGroupError("", {0: caught.value}))[0].place == place


def test_a_worker_that_cannot_say_where_raises_the_loops_own_error(tmp_path):
    def loop():
        raise ValueError("bad")

    with pytest.raises(ValueError) as caught:
        WorkerLoop(loop, None, None)()
    assert crash_loop._marks(WorkerGroupError("", {0: caught.value})) == [None]


def test_fit_raises_with_the_report(tmp_path, monkeypatch):
    def end(self):
        raise stopped(ValueError("bad"))

    monkeypatch.setattr(ray.train.torch.TorchTrainer, "fit", end)
    made = TorchTrainer(print, run_config=ray.train.RunConfig(name="run", storage_path=str(tmp_path)))
    with pytest.raises(ray.train.TrainingFailedError, match="crash loop: 3 failures in a row after step 7"):
        made.fit()
