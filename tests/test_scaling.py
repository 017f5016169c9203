"""How many workers to start, and the save that Ray's controller asks for first. Without Ray's processes."""

import logging
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import ray
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, FixedScalingPolicy
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, TorchTrainer
from pimm_ray.runtime import controller, ray_private, save_request
from pimm_ray.runtime.base import LocalRuntime
from pimm_ray.runtime.controller import ResizePolicy
from pimm_ray.runtime.scaling import Commits, fitting, possible_workers, unresponsive

GPU, TWO = {"CPU": 1, "GPU": 1}, {"CPU": 8, "GPU": 2}


@pytest.mark.parametrize(
    ("nodes", "need", "workers"),
    [
        ([], GPU, 0),
        ([TWO, TWO], GPU, 4),
        ([{"CPU": 3}], GPU, 0),
        ([{"CPU": 1, "GPU": 4}], GPU, 1),
        ([{"GPU": 1}, {"GPU": 1}], {"GPU": 2}, 0),
        ([{"GPU": 0.6}], {"GPU": 0.2}, 3),
        ([TWO], {"GPU": 1, "CPU": 0}, 2),
    ],
    ids=["none", "two each", "other", "scarcest", "a worker is not split", "fractions", "zero is no need"],
)
def test_a_worker_needs_all_of_its_resources_on_one_node(nodes, need, workers):
    assert fitting(nodes, need) == workers


@pytest.mark.parametrize(
    ("reserved", "free", "gone", "workers"),
    [
        ({"a": GPU, "b": GPU, "c": GPU}, {}, set(), 3),
        ({"a": GPU, "b": GPU, "c": GPU}, {}, {"c"}, 2),
        ({"a": GPU, "b": GPU, "c": GPU}, {"d": GPU}, {"c"}, 3),
        ({"a": GPU, "b": GPU}, {"d": TWO}, {"b"}, 2),
        ({"a": GPU}, {"d": TWO}, set(), 1),
        ({"a": GPU, "b": GPU}, {"d": TWO}, {"b", "d"}, 1),
        ({"a": GPU, "b": GPU}, {"a": TWO}, {"b"}, 1),
        ({"a": TWO, "b": TWO, "c": TWO}, {}, {"a"}, 4),
        ({}, {}, set(), 0),
    ],
    ids=[
        "all", "one gone", "a spare stands in", "only for what is lost", "what is free is not ours", "spare gone too",
        "what we use is not spare", "at most what is wanted", "nothing",
    ],
)  # fmt: skip
def test_lost_nodes_do_not_count_and_spare_ones_stand_in_for_them(reserved, free, gone, workers):
    assert possible_workers(GPU, reserved, free, gone, most=4) == workers


def test_workers_that_need_nothing_are_as_many_as_wanted():
    assert possible_workers({"CPU": 0}, {}, {}, set(), most=4) == 4


@pytest.mark.parametrize(
    ("answers", "refused", "lost"),
    [
        ({"a": {"yes"}, "b": {"yes"}}, set(), set()),
        ({"a": {"yes"}, "b": {"dead"}}, set(), set()),
        ({"a": {"yes"}, "b": {"dead"}}, {"b"}, {"b"}),
        ({"a": {"yes"}, "b": {"silent"}}, set(), {"b"}),
        ({"a": {"silent", "yes"}}, set(), set()),
        ({"a": {"yes"}}, {"c"}, {"c"}),
        ({"a": {"yes"}, "b": {"dead"}}, {"a", "b"}, set()),
    ],
    ids=["well", "process died", "node died", "node froze", "one busy worker", "node without workers", "firewall"],
)
def test_a_node_is_lost_when_it_refuses_or_its_workers_are_silent(answers, refused, lost):
    assert unresponsive(answers, refused) == lost


def test_a_checkpoint_is_committed_when_the_last_rank_has_handed_in_its_report():
    commits = Commits(2)
    polls = [{}, {0: True}, {0: False}, {1: True}, {1: False}, {0: True, 1: True}, {}]
    assert [commits.add(poll) for poll in polls] == [False, False, False, True, False, True, False]


# The save that is asked for.


@pytest.fixture(autouse=True)
def fresh_request():
    yield
    save_request.ask(False)
    save_request._listening.clear()
    save_request._withdrawn.clear()


def test_without_a_manager_in_the_process_the_request_is_deaf():
    assert save_request.ask(True) == "deaf"


def test_the_loop_holds_after_the_save_until_the_request_is_taken_back():
    save_request.listen()
    assert not save_request.wanted()
    assert save_request.ask(True) == save_request.ask(True) == "waiting" and save_request.wanted()
    loop = threading.Thread(target=save_request.hold)
    loop.start()
    while save_request.ask(True) != "saved":
        time.sleep(0.01)
    assert loop.is_alive()
    assert save_request.ask(False) == "waiting"
    loop.join(5)
    assert not loop.is_alive() and not save_request.wanted()


def test_a_loop_that_nobody_stops_goes_on_after_a_while(monkeypatch):
    monkeypatch.setattr(save_request, "HOLD_SECONDS", 0.05)
    save_request.listen()
    save_request.ask(True)
    save_request.hold()
    assert not save_request.wanted() and save_request.ask(True) == "waiting"


def test_without_a_request_nothing_holds():
    started = time.monotonic()
    save_request.hold()
    assert time.monotonic() - started < 1


def train(folder, monkeypatch, *, wanted_after, batches=8, **save):
    """Steps at which the loop held, and the checkpoints' steps and reasons; a save is wanted after that step."""
    manager = CheckpointManager(
        model=nn.Linear(2, 1), loader=list(range(batches)), save=SavePolicy(every_seconds=1e6, **save), storage=folder
    )
    held = []
    wanted = lambda _: manager.state.global_step >= wanted_after and not held  # noqa: E731
    monkeypatch.setattr(LocalRuntime, "save_wanted", wanted)
    monkeypatch.setattr(LocalRuntime, "hold", lambda _: held.append(manager.state.global_step))
    manager.resume()
    saved = []
    for _ in manager.epochs(1):
        for _ in manager.batches():
            manager.step()
            newest = manager._checked_saver.newest
            saved += [(newest.step, newest.reason)] if newest and newest.step not in dict(saved) else []
    manager.finish()
    return held, saved


def test_a_wanted_save_comes_at_the_next_step_and_the_loop_holds_right_after_it(tmp_path, monkeypatch):
    assert train(tmp_path, monkeypatch, wanted_after=3) == ([4], [(4, "resize")])


def test_a_save_that_was_due_anyway_serves_as_the_wanted_one(tmp_path, monkeypatch):
    assert train(tmp_path, monkeypatch, wanted_after=3, every_steps=4) == ([4], [(4, "every_steps")])


def test_a_run_that_is_about_to_end_does_not_wait_for_a_restart(tmp_path, monkeypatch):
    assert train(tmp_path, monkeypatch, wanted_after=7) == ([], [])


# The policy that stands in for Ray's.


def elastic(**config):
    return ElasticScalingPolicy(ScalingConfig(num_workers=(1, 3), **config))


def test_the_policy_travels_to_the_controller_with_every_hook_of_rays():
    policy = cloudpickle.loads(cloudpickle.dumps(ResizePolicy(elastic())))
    hooks = [name for name in vars(ControllerCallback) if not name.startswith("_")]
    assert len(hooks) > 5 and all(callable(getattr(policy, name)) for name in hooks)
    assert policy.scaling_config.max_workers == 3
    with pytest.raises(AttributeError):
        _ = policy.nothing


def test_a_monitor_interval_of_the_user_holds():
    assert ResizePolicy(elastic())._settle == controller.SETTLE_SECONDS
    assert ResizePolicy(elastic(elastic_resize_monitor_interval_s=7.0))._settle == 7.0


def test_when_anything_of_ours_fails_rays_policy_decides_and_it_is_said_once(caplog):
    class Rays(ElasticScalingPolicy):
        def make_decision_for_non_running_worker_group(self):
            return "restart as Ray would"

        def make_decision_for_running_worker_group(self, worker_group_state, worker_group_status):
            return f"{worker_group_state} and {worker_group_status} as Ray would"

    assert not ray.is_initialized()
    policy = ResizePolicy(Rays(ScalingConfig(num_workers=(1, 3))))
    for _ in range(2):
        assert policy.make_decision_for_running_worker_group("group", "status") == "group and status as Ray would"
    assert [r.levelno for r in caplog.records if "left to Ray's own policy" in r.getMessage()] == [logging.WARNING]
    policy._possible = lambda ended: 1 / 0
    assert policy.make_decision_for_non_running_worker_group() == "restart as Ray would"


class Running:
    """A policy whose group of two is polled once a second; what there is room for, and what it decides."""

    def __init__(self, monkeypatch, room=2, **config):
        self.room, self.now, self.renewed, self.start_time, self.frozen = room, 0.0, 0, 7.0, False
        self.policy = ResizePolicy(elastic(**config))
        self.policy._possible = lambda ended=None: self.room
        self.policy._frozen = lambda now: self.frozen
        self.policy._ask_for_save = lambda: save_request.ask(True)
        self.workers = [SimpleNamespace(actor=self, metadata=SimpleNamespace(node_id=str(i))) for i in range(2)]
        self.execute = SimpleNamespace(remote=lambda function, *arguments: function(*arguments))
        monkeypatch.setattr(controller.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ElasticScalingPolicy, "_maybe_send_resource_request", self.renew)

    def renew(self, _=None):
        self.renewed += 1

    def poll(self, seconds=1.0, checkpoint=False):
        self.now += seconds
        report = SimpleNamespace(checkpoint=object()) if checkpoint else None
        status = SimpleNamespace(worker_statuses={rank: SimpleNamespace(training_report=report) for rank in range(2)})
        decision = self.policy.make_decision_for_running_worker_group(self, status)
        return getattr(decision, "num_workers", "stay")


@pytest.fixture
def running(monkeypatch):
    return lambda **more: Running(monkeypatch, **more)


def test_a_larger_group_starts_once_the_loop_has_saved(running):
    save_request.listen()
    run = running(room=3)
    assert [run.poll(), run.poll(), run.poll(controller.SETTLE_SECONDS)] == ["stay"] * 3
    assert save_request.wanted()
    assert run.poll(0.5, checkpoint=True) == "stay", "a save that was under way is not the one that was asked for"
    save_request._saved.set()
    run.room = 4
    assert run.poll(0.5) == 4


def test_a_new_group_is_left_alone_for_a_while(running):
    run = running(room=3, elastic_resize_monitor_interval_s=50.0)
    run.poll()
    run.poll(49)
    assert not save_request.wanted()
    run.start_time += 1
    run.poll(2)
    assert not save_request.wanted()
    run.poll(50)
    assert save_request.wanted()


def test_when_the_room_is_gone_again_the_loop_is_told(running):
    save_request.listen()
    run = running(room=3)
    run.poll()
    run.poll(100)
    run.room = 2
    assert run.poll() == "stay" and not save_request.wanted()


def test_a_loop_without_a_manager_is_restarted_at_its_next_checkpoint(running):
    run = running(room=3)
    run.poll()
    assert [run.poll(100), run.poll(), run.poll(checkpoint=True)] == ["stay", "stay", 3]


def test_a_healthy_group_is_never_made_smaller(running):
    run = running(room=1)
    assert {run.poll(100, checkpoint=True) for _ in range(3)} == {"stay"}


def test_a_group_with_a_frozen_node_is_restarted_without_it(running, monkeypatch):
    run = running(room=1)
    monkeypatch.setattr(ResizePolicy, "_left_out", lambda _: "")
    run.poll()
    run.frozen = True
    assert run.poll() == 1


def test_nodes_are_asked_for_at_every_poll_as_the_cluster_forgets(running):
    run = running(room=2)
    run.poll(), run.poll(100), run.poll(0.1)
    assert run.renewed == 3


def test_a_node_that_answers_listens_and_a_frozen_or_dead_one_does_not(monkeypatch):
    monkeypatch.setattr(controller, "_PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert not controller._listens(node), "the kernel took the connection, nobody answered"
        server.accept()[0].close()
        answer = threading.Thread(target=lambda: server.accept()[0].sendall(b"x"))
        answer.start()
        assert controller._listens(node)
        answer.join()
    assert not controller._listens(node)


def test_after_a_while_the_clusters_word_holds_against_a_refusal(monkeypatch):
    monkeypatch.setattr(ray_private, "draining", lambda: {"d"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nodes, now = controller._Nodes(), time.monotonic()
    nodes.probe({"a": {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}}, [])
    assert nodes.gone() == {"a", "d"}
    monkeypatch.setattr(controller.time, "monotonic", lambda: now + 100)
    nodes.probe({"a": {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}}, [])
    assert nodes.gone() == {"d"}
    nodes.trust({"a"})
    assert nodes.suspected == {}


def trainer(folder, workers=1, **config):
    return TorchTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=str(folder), **config),
    )


def test_only_rays_own_elastic_policy_is_replaced(tmp_path):
    made = trainer(tmp_path)
    assert isinstance(made._adapt(elastic()), ResizePolicy)
    fixed = FixedScalingPolicy(ScalingConfig(num_workers=2))
    assert made._adapt(fixed) is fixed


@pytest.mark.parametrize("name", ["_get_resize_decision", "_maybe_send_resource_request"])
def test_with_another_ray_its_own_policy_stays_and_it_is_said(tmp_path, monkeypatch, caplog, name):
    from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy

    made, policy = trainer(tmp_path), elastic()
    monkeypatch.delattr(ElasticScalingPolicy if name in vars(ElasticScalingPolicy) else ScalingPolicy, name)
    assert made._adapt(policy) is policy
    assert name in caplog.records[-1].getMessage() and any(name in line for line in ray_private.check())


def test_a_ray_without_any_of_the_private_places_is_described_and_breaks_nothing(monkeypatch):
    monkeypatch.setattr(ray_private, "_private", lambda module, name: None)
    assert len(ray_private.check()) > 20
    assert not ray_private.is_elastic(elastic())


def test_failures_of_an_elastic_run_are_retried_unless_the_user_says_otherwise(tmp_path, caplog):
    assert trainer(tmp_path).run_config.failure_config.max_failures == 0
    assert not any(record.getMessage().startswith("retry:") for record in caplog.records)
    assert trainer(tmp_path, workers=(1, 2)).run_config.failure_config.max_failures == 8
    assert any(record.getMessage().startswith("retry: max_failures=8 ") for record in caplog.records)
    mine = FailureConfig(max_failures=-1)
    assert trainer(tmp_path, workers=(1, 2), failure_config=mine).run_config.failure_config is mine


def test_ray_polls_more_often_during_the_run_unless_the_user_says_otherwise(monkeypatch):
    seen = {}

    class Trainer:
        def _initialize_and_run_controller(self, **arguments):
            seen.update({name: os.environ.get(name) for name in ray_private.ELASTIC_DEFAULTS}, **arguments)

    class Ours(ray_private.ControllerHook, Trainer):
        pass

    poll, notices, start = ray_private.ELASTIC_DEFAULTS
    monkeypatch.setenv(poll, "3")
    monkeypatch.delenv(notices, raising=False)
    monkeypatch.delenv(start, raising=False)
    Ours()._initialize_and_run_controller(scaling_policy="theirs", others=1)
    assert seen == {poll: "3", notices: "1", start: None, "scaling_policy": "theirs", "others": 1}
    Ours()._initialize_and_run_controller(scaling_policy=elastic())
    assert seen[start] == "20"
    assert os.environ[poll] == "3" and not {notices, start} & {*os.environ}


def test_a_mistake_of_ours_leaves_the_run_to_rays_policy(caplog):
    class Trainer:
        def _initialize_and_run_controller(self, **arguments):
            return arguments

    class Ours(ray_private.ControllerHook, Trainer):
        def _adapt(self, policy):
            raise ValueError("ours")

    assert Ours()._initialize_and_run_controller(scaling_policy="theirs") == {"scaling_policy": "theirs"}
    assert "left to Ray's own policy: ValueError('ours')" in caplog.records[-1].getMessage()


def test_relaxed_collectives_are_warned_of(tmp_path, caplog):
    trainer(tmp_path, failure_config=FailureConfig(relax_collectives_on_preemption=True))
    assert "of no use to CheckpointManager" in caplog.text
