"""A run goes on from pimm's own checkpoints: exactly where the number of ranks is the same, and said where not."""

import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch

from pimm_ray import CheckpointManager, ElasticLoader, ElasticPolicy, errors
from pimm_ray.checkpoint import pimm_read
from pimm_ray.checkpoint.legacy import load_pickle
from pimm_ray.elastic import plan as elastic_plan
from tests.jobs import Numbers, identical
from tests.pimm_fixtures import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Parts,
    Pimm,
    payload_of,
    save_file,
    save_flat,
    save_split,
    save_whole,
)
from tests.ranks import run_ranks

LENGTH = SAMPLES // BATCH
MIDDLE, BOUNDARY = LENGTH + 2, 2 * LENGTH
SAVERS = {"last": save_split, "whole": save_whole, "model_last.pth": save_file}


def pimm_job(rank, at, saver, path, settings):
    job = Pimm(at, saver(path), **settings)
    return job.train()


def saved(tmp_path, at, name="last", world=1, **settings):
    """A checkpoint of pimm and, by rank, the steps that the run made after it."""
    path = tmp_path / name
    seen = run_ranks(world, pimm_job, at, SAVERS.get(name, save_flat), str(path), settings, group=world > 1)
    return path, seen


class Ours(Parts):
    """The same script with a manager, other seeds, and whatever it is resumed from."""

    def __init__(self, storage, checkpoint, *, elastic=None, seed=77, **settings):
        super().__init__(seed=seed, **settings)
        self.manager = CheckpointManager(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            loader=self.loader,
            storage=storage,
            elastic=elastic or ElasticPolicy(),
        )
        self.plan = self.manager.resume(checkpoint=checkpoint)
        self.start = self.manager.state

    def train(self, epochs=EPOCHS):
        seen = []
        for _ in self.manager.epochs(epochs):
            for batch in self.manager.batches():
                seen.append(self.learn(batch))
                self.manager.step()
        return seen


def our_job(rank, storage, checkpoint, settings):
    job = Ours(storage, checkpoint, **settings)
    return job.plan, job.start, job.train()


def resumed(tmp_path, path, world=1, **settings):
    return run_ranks(world, our_job, str(tmp_path / "run"), str(path), settings, group=world > 1)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SAVERS)
def test_in_mid_epoch_on_as_many_ranks_the_run_goes_on_bit_for_bit(tmp_path, name, world):
    at = LENGTH // world + 2
    path, expected = saved(tmp_path, at, name, world)
    for twin, (plan, state, seen) in zip(expected, resumed(tmp_path, path, world), strict=True):
        assert (state.epoch, state.iter_in_epoch, state.global_step) == (1, 2, at)
        assert state.samples_seen == at * BATCH * world and state.best_metric_value == 0.75
        assert plan.cursor == "kept" and plan.source == str(path) and "not told" in plan.explain()
        assert seen == twin


@pytest.mark.parametrize("name", SAVERS)
def test_at_an_epochs_end_the_next_epoch_comes_and_is_the_twins(tmp_path, name):
    path, expected = saved(tmp_path, BOUNDARY, name)
    ((plan, state, seen),) = resumed(tmp_path, path)
    assert (state.epoch, state.iter_in_epoch, state.global_step) == (2, 0, BOUNDARY)
    assert plan.cursor == "start" and not plan.samples_repeated
    assert seen == expected[0]


def test_workers_of_the_loader_keep_the_position_and_another_number_of_them_drops_it(tmp_path):
    path, expected = saved(tmp_path, MIDDLE, workers=2)
    ((plan, _, seen),) = resumed(tmp_path, path, workers=2)
    assert plan.cursor == "kept" and [ids for ids, *_ in seen] == [ids for ids, *_ in expected[0]]
    shutil.rmtree(tmp_path / "run")
    ((plan, state, _),) = resumed(tmp_path, path, workers=0)
    assert plan.cursor == "dropped" and "loader workers 2 -> 0" in plan.reason
    assert state.global_step == MIDDLE


@pytest.mark.parametrize("before, now", [(1, 2), (2, 1)])
def test_on_another_number_of_ranks_the_epoch_restarts_and_all_else_is_kept(tmp_path, before, now):
    at = LENGTH // before + 2
    path, _ = saved(tmp_path, at, world=before)
    results = resumed(tmp_path, path, now)
    for plan, state, _ in results:
        assert plan.cursor == "dropped" and plan.reason == f"workers {before} -> {now}"
        assert plan.samples_repeated == 2 * BATCH * before
        assert (state.epoch, state.iter_in_epoch, state.global_step) == (1, 0, at)
    first = [id for _, _, seen in results for ids, *_ in seen[: LENGTH // now] for id in ids]
    assert sorted(first) == list(range(SAMPLES))
    assert len({tuple(seen[0][0]) for _, _, seen in results}) == now
    assert ("derived" in results[0][0].rng) == (now > before)


def test_the_position_of_another_kind_of_loader_is_dropped_and_said(tmp_path):
    path, _ = saved(tmp_path, MIDDLE)
    parts = Parts(seed=77)
    loader = ElasticLoader(Numbers(SAMPLES, augment=False), BATCH)
    manager = CheckpointManager(
        model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, scaler=parts.scaler, loader=loader,
        storage=tmp_path / "run",
    )  # fmt: skip
    plan = manager.resume(checkpoint=path)
    assert plan.cursor == "dropped" and "no position of this loader" in plan.reason


def test_a_loader_that_could_not_tell_its_position_restarts_its_epoch_and_says_so(tmp_path, caplog):
    path, _ = saved(tmp_path, MIDDLE, stateful=False)
    job = Ours(tmp_path / "run", path)
    assert job.plan.cursor == "dropped" and "no position of this loader" in job.plan.reason
    assert "dataset" not in job.plan.reason and "order" not in job.plan.reason
    assert (job.start.epoch, job.start.iter_in_epoch, job.start.global_step) == (1, 0, MIDDLE)
    assert "without a loader position: epoch 1 restarts" in caplog.text
    with pytest.raises(errors.DataChanged):
        Ours(tmp_path / "other", path, elastic=ElasticPolicy(cursor="fail"))


@pytest.mark.parametrize("at, epoch, restarts", [(MIDDLE, 1, True), (BOUNDARY, 2, False)])
def test_the_older_flat_layout_resumes_at_the_right_epoch_and_step(tmp_path, caplog, at, epoch, restarts):
    held, save = [], save_flat(tmp_path / "model_last.pth")
    twin = Pimm(at, lambda job: (held.append(pickle.dumps(job.optimizer.state_dict())), save(job)))
    twin.train()
    job = Ours(tmp_path / "run", tmp_path / "model_last.pth")
    assert (job.start.epoch, job.start.iter_in_epoch, job.start.global_step) == (epoch, 0, at)
    assert job.start.best_metric_value == 0.75 and job.start.samples_seen == at * BATCH
    assert job.plan.cursor == ("dropped" if restarts else "start") and not job.plan.exact
    assert job.plan.samples_repeated == (2 * BATCH if restarts else 0)
    assert (f"epoch {epoch} restarts" in caplog.text) == restarts
    assert identical(job.optimizer.state_dict()["state"], pickle.loads(held[0])["state"])
    assert job.train()[0][1] == twin.seen[0][1], "the learning rates"


def test_the_moments_of_the_flat_layout_go_to_the_parameters_by_their_names_in_the_live_optimizer(tmp_path):
    Pimm(BOUNDARY, save_flat(tmp_path / "model_last.pth")).train(3)
    parts = Parts()
    parts.optimizer.param_groups.reverse()
    manager = CheckpointManager(
        model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, scaler=parts.scaler,
        loader=parts.loader, storage=tmp_path / "run",
    )  # fmt: skip
    with pytest.raises(errors.StateMismatch, match=r"numbers the parameters.*\[2, 3\]"):
        manager.resume(checkpoint=tmp_path / "model_last.pth")
    swapped = Parts()
    swapped.optimizer.param_groups[0]["params"].reverse()
    manager = CheckpointManager(
        model=swapped.model, optimizer=swapped.optimizer, scheduler=swapped.scheduler, scaler=swapped.scaler,
        loader=swapped.loader, storage=tmp_path / "run",
    )  # fmt: skip
    with pytest.raises(errors.StateMismatch, match="does not fit those of 4"):
        manager.resume(checkpoint=tmp_path / "model_last.pth")


def test_a_run_or_model_folder_gives_its_newest_complete_checkpoint(tmp_path, caplog):
    model = tmp_path / "exp" / "model"
    model.mkdir(parents=True)
    for number, (name, at) in enumerate([("last.prev", MIDDLE), ("last", MIDDLE + 1), ("model_last.pth", MIDDLE - 1)]):
        path, _ = saved(model, at, "last" if name != "model_last.pth" else name)
        if name == "last.prev":
            path.rename(model / name)
        marker = model / name if name.endswith(".pth") else model / name / ".complete"
        os.utime(marker, (1e9 + number * 10, 1e9 + number * 10 * (1 if number < 2 else -1)))
    assert Ours(tmp_path / "a", model).start.global_step == MIDDLE + 1
    assert Ours(tmp_path / "b", tmp_path / "exp").plan.source == str(model / "last")
    (model / "last" / "trainer.dcp" / ".complete").unlink()
    assert Ours(tmp_path / "c", model).start.global_step == MIDDLE
    assert "passed over" in caplog.text
    (model / "model_last.pth").unlink()
    (model / "last.prev" / ".complete").unlink()
    with pytest.raises(errors.IncompleteCheckpoint):
        Ours(tmp_path / "d", model)


@pytest.mark.parametrize("missing", [".complete", "trainer.dcp/.complete", "weights.pth", "trainer.dcp/.metadata"])
def test_a_folder_whose_save_never_finished_is_refused(tmp_path, missing):
    path, _ = saved(tmp_path, MIDDLE)
    (path / missing).unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="holds no " + missing):
        Ours(tmp_path / "run", path)
    assert not any((tmp_path / "run").glob("checkpoint_*"))


def test_weights_alone_are_refused_with_the_way_to_use_them(tmp_path):
    torch.save({"state_dict": Parts().model.state_dict()}, tmp_path / "model_best.pth")
    with pytest.raises(errors.StateMismatch, match=r"weights only.*warm_start"):
        Ours(tmp_path / "run", tmp_path / "model_best.pth")


def test_a_newer_schema_and_nonsense_are_refused(tmp_path):
    job = Pimm(1)
    job.train(1)
    good = payload_of(job)
    for change, kind in [
        ({"version": 4}, errors.CheckpointVersionError),
        ({"schema": "other"}, errors.CheckpointVersionError),
        ({"trainer": {**good["trainer"], "epoch": "x"}}, errors.CorruptCheckpoint),
        ({"trainer": {**good["trainer"], "global_step": -1}}, errors.CorruptCheckpoint),
        ({"rng": {"world_size": 1, "state": {"states": [{"python": 1}]}}}, errors.CorruptCheckpoint),
        ({"optimizer": {"state_dict": {"state": 3}, "class": "AdamW"}}, errors.CorruptCheckpoint),
        ({"model": {"state_dict": 5}}, errors.CorruptCheckpoint),
        ({"dataloader": []}, None),
    ]:
        torch.save(good | change, tmp_path / "x.pth")
        if kind is None:
            Ours(tmp_path / "run", tmp_path / "x.pth")
        else:
            with pytest.raises(kind, match=r"x\.pth"):
                Ours(tmp_path / "run", tmp_path / "x.pth")


def test_a_run_that_has_a_checkpoint_of_its_own_never_goes_back_to_pimms(tmp_path):
    path, _ = saved(tmp_path, MIDDLE)
    job = Ours(tmp_path / "run", path)
    info = job.manager.save()
    assert info.step == MIDDLE and info.parent.startswith("pimm-")
    shutil.rmtree(path)
    again = Ours(tmp_path / "run", path)
    assert again.plan.source == info.name and again.plan.step == MIDDLE and again.plan.cursor == "kept"


def test_moments_that_no_parameter_of_the_optimizer_takes_are_an_error_and_nothing_is_changed(tmp_path):
    path, _ = saved(tmp_path, MIDDLE)
    parts = Parts()
    before = {key: value.clone() for key, value in parts.model.state_dict().items()}
    model = torch.nn.ModuleDict({"net": parts.model, "other": torch.nn.Linear(1, 1)})
    payload = torch.load(path / "weights.pth")
    torch.save({"state_dict": {f"net.{k}": v for k, v in payload["state_dict"].items()}
                | {f"other.{k}": v for k, v in model["other"].state_dict().items()}}, path / "weights.pth")  # fmt: skip
    optimizer = torch.optim.AdamW(model["other"].parameters())
    manager = CheckpointManager(model=model, optimizer=optimizer, storage=tmp_path / "run")
    with pytest.raises(errors.StateMismatch, match="would start without any"):
        manager.resume(checkpoint=path)
    assert not optimizer.state and identical(dict(parts.model.state_dict()), before)


class Forgetful(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.state.clear()


@pytest.mark.parametrize("now, said", [("first", "holds none"), ("second", "would start without any")])
def test_an_optimizer_of_a_run_of_ours_that_would_lose_all_moments_is_an_error_too(tmp_path, now, said):
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(1, 1), "second": torch.nn.Linear(1, 1)})

    def manager(name):
        optimizer = Forgetful(model[name].parameters())
        return CheckpointManager(model=model, optimizer=optimizer, storage=tmp_path), optimizer

    saving, optimizer = manager("first")
    saving.resume()
    model["first"](torch.ones(1)).sum().backward()
    optimizer.step()
    saving.step()
    saving.save()
    with pytest.raises(errors.StateMismatch, match=said):
        manager(now)[0].resume()


def test_streams_of_the_devices_of_a_node_go_to_the_rank_of_each(tmp_path):
    job = Pimm(1)
    job.train(1)
    payload = payload_of(job)
    states = [torch.full((16,), device, dtype=torch.uint8) for device in range(2)]
    payload["rng"]["state"]["states"] = [payload["rng"]["state"]["states"][0] | {"torch_cuda": states}] * 4
    payload["trainer"]["best_metric_value"] = -float("inf")
    adopted = pimm_read.adopt(payload, "x", pimm_read.Present())
    assert [own["rng"]["cuda"][0].item() for own in adopted.ranks] == [0, 1, 0, 1]
    assert adopted.head["trainer"]["best_metric_value"] is None


def test_names_that_lead_out_of_an_archive_are_never_followed(tmp_path):
    job = Pimm(1, save_file(tmp_path / "in" / "model_last.pth"))
    (tmp_path / "in").mkdir()
    job.train(1)
    with zipfile.ZipFile(tmp_path / "in" / "model_last.pth", "a") as archive:
        for name in ("../evil", "/tmp/../evil", "model_last/../../evil", "a\\..\\evil"):
            archive.writestr(name, "x")
    with pytest.raises(errors.CorruptCheckpoint, match="evil"):
        Ours(tmp_path / "run", tmp_path / "in" / "model_last.pth")
    assert not list(tmp_path.rglob("*evil*"))


class Plant:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_position_that_would_run_code_is_refused_and_nothing_runs(tmp_path):
    job = Pimm(1)
    job.train(1)
    job.iteration = 1
    payload = payload_of(job)
    sentinel = tmp_path / "sentinel"
    payload["dataloader"]["state"]["state"] = pickle.dumps({"a": Plant(sentinel)})
    save_whole(tmp_path / "whole")(payload)
    with pytest.raises(errors.UnsafeCheckpoint, match=r"position.*posix\.system"):
        Ours(tmp_path / "run", tmp_path / "whole")
    assert not sentinel.exists()


def test_a_folder_whose_metadata_names_files_elsewhere_is_refused(tmp_path):
    path, _ = saved(tmp_path, MIDDLE)
    file = path / "trainer.dcp" / ".metadata"
    good = file.read_bytes()
    for name in ("../../secret", "/etc/passwd", "..", "a/../b", "a\\b", "a\0b", "", "%2e%2e%2fx"):
        meta = pickle.loads(good)
        for held in meta.storage_data.values():
            held.relative_path = name
        file.write_bytes(pickle.dumps(meta))
        with pytest.raises(errors.UnsafeCheckpoint, match="not a plain name"):
            Ours(tmp_path / "run", path)


def test_paths_of_leaves_that_collide_or_have_gaps_are_refused(tmp_path):
    path, _ = saved(tmp_path, MIDDLE)
    file = path / "trainer.dcp" / ".metadata"
    good = file.read_bytes()
    for key, other in [
        ("trainer.epoch", ("trainer", "global_step")),
        ("trainer.epoch", ("schema", "epoch")),
        ("rng.state.states.0.python", ("rng", "state", "states", 3, "python")),
        ("trainer.epoch", tuple("x" * 100)),
    ]:
        meta = pickle.loads(good)
        meta.planner_data[key] = other
        file.write_bytes(pickle.dumps(meta))
        with pytest.raises(errors.CorruptCheckpoint):
            Ours(tmp_path / "run", path)


@pytest.mark.parametrize("protocol", [4, 5])
def test_plain_data_arrays_and_tensors_come_through_the_door_from_a_pickle(protocol):
    value = {
        "t": torch.arange(6.0).reshape(2, 3).T, "half": torch.ones(2, dtype=torch.bfloat16), "u": torch.get_rng_state(),
        "array": np.arange(4, dtype=np.int16), "text": np.array(["a", "bc"]), "scalar": np.float64(3.5),
        "tuple": (1, (2, None)), "set": {1, 2}, "bytes": b"\0\xff", "size": torch.Size([2, 3]), "empty": torch.empty(0),
    }  # fmt: skip
    found = load_pickle(pickle.dumps(value, protocol), "x")
    for key, expected in value.items():
        assert type(found[key]) is type(expected) and str(found[key]) == str(expected), key


def test_the_table_of_a_pickle_is_not_changed_by_what_a_pickle_sets_on_it():
    def text(value):
        return b"\x8c" + bytes([len(value)]) + value.encode()

    planted = b"\x80\x04" + text("collections") + text("OrderedDict") + b"\x93N}" + text("__new__") + b"K\x01s\x86b."
    load_pickle(planted, "x")
    assert load_pickle(pickle.dumps(torch.ones(2)), "x").sum() == 2


def test_the_word_for_an_order_that_nobody_told_is_the_same_in_both_rooms():
    assert pimm_read.UNTOLD == elastic_plan.UNTOLD
