"""load_weights: any source into any wrapping, what does not fit is named, and nothing is half-loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pimm_ray import CheckpointManager, errors, load_weights
from tests.ranks import run_ranks


class Net(nn.Module):
    """An inner part that is compiled where asked, a real submodule of the name `module`, a tied weight and buffers."""

    def __init__(self, classes: int = 3, compiled: bool = False, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.module = nn.Linear(4, 4)
        self.inner = torch.compile(inner, backend="eager") if compiled else inner
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.module.weight
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(self.inner(self.module(x))))


def bare(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in Net(seed=seed).state_dict().items()}


def values(model: nn.Module) -> list[torch.Tensor]:
    """In the order of the state_dict, whatever the names."""
    return list(model.state_dict().values())


def equal(model: nn.Module, seed: int) -> bool:
    return all(map(torch.equal, values(model), bare(seed).values()))


WRAPPINGS = {
    "plain": lambda seed: Net(seed=seed),
    "DDP": lambda seed: DistributedDataParallel(Net(seed=seed)),
    "compiled": lambda seed: torch.compile(Net(seed=seed), backend="eager"),
    "DDP of compiled": lambda seed: DistributedDataParallel(torch.compile(Net(seed=seed), backend="eager")),
    "compiled of DDP": lambda seed: torch.compile(DistributedDataParallel(Net(seed=seed)), backend="eager"),
    "inner compiled": lambda seed: Net(seed=seed, compiled=True),
}


def each_into_each(rank: int, folder: Path) -> None:
    for saved, make in WRAPPINGS.items():
        path = folder / f"{saved}.pth"
        torch.save(make(1).state_dict(), path)
        for loaded, make_other in WRAPPINGS.items():
            model = make_other(2)
            report = load_weights(model, path, strict=True)
            assert equal(model, 1), (saved, loaded)
            assert report.share == 1.0


def test_each_wrapping_loads_into_each_and_the_real_module_survives(tmp_path):
    run_ranks(1, each_into_each, tmp_path)


# ---- sources


def of_ours(folder: Path) -> Path:
    model = Net(seed=1)
    manager = CheckpointManager(model=model, storage=str(folder))
    manager.resume()
    info = manager.save()
    assert info is not None
    return Path(info.path)


def sharded(folder: Path) -> Path:
    folder.mkdir()
    tensors = bare(1)
    tensors.pop("tied.weight")
    names = [*tensors]
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"classes": 3}')
    return folder


def single(folder: Path) -> Path:
    folder.mkdir()
    tensors = {name: value for name, value in bare(1).items() if name != "tied.weight"}
    save_file(tensors, folder / "model.safetensors")
    return folder


def pickled(name: str, *keys: str) -> Any:
    def make(folder: Path) -> Path:
        folder.mkdir()
        held: Any = {f"module.{key}": value for key, value in bare(1).items()}
        for key in keys:
            held = {key: held, "epoch": 3}
        torch.save(held, folder / name)
        return folder

    return make


SOURCES = {
    "a checkpoint of ours": of_ours,
    "a run of ours": lambda folder: of_ours(folder).parent,
    "the weights of a checkpoint": lambda folder: of_ours(folder) / "weights",
    "sharded safetensors": sharded,
    "a folder with model.safetensors": single,
    "a file": lambda folder: single(folder) / "model.safetensors",
    "an index": lambda folder: sharded(folder) / "model.safetensors.index.json",
    "model.bin": pickled("model.bin"),
    "pytorch_model.bin": pickled("pytorch_model.bin"),
    "model_best.pth": pickled("model_best.pth", "state_dict"),
    "a lone .pth": pickled("epoch7.pth", "state_dict", "model"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_weights_are_loaded_to_the_bit_from(source, tmp_path):
    model = Net(seed=2)
    report = load_weights(model, SOURCES[source](tmp_path / "there"), strict=True)
    assert equal(model, 1) and report.share == 1.0 and not report.missing


def test_of_a_run_the_newest_good_checkpoint_counts(tmp_path):
    good = of_ours(tmp_path / "run")
    bad = of_ours(tmp_path / "run")
    file = bad / "weights" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    model = Net(seed=2)
    assert good.name in load_weights(model, str(tmp_path / "run")).origin or equal(model, 1)
    with pytest.raises(errors.CorruptCheckpoint, match="another digest"):
        load_weights(model, bad)


def test_values_take_the_dtype_of_the_model(tmp_path):
    model = Net(seed=2).to(torch.bfloat16)
    load_weights(model, single(tmp_path / "there"))
    assert model.head.weight.dtype == torch.bfloat16
    assert torch.equal(model.head.weight, bare(1)["head.weight"].bfloat16())


# ---- what does not fit


def test_other_shapes_are_skipped_and_listed_with_both(tmp_path):
    stored = {**bare(1), "head.weight": torch.zeros(10, 4), "head.bias": torch.zeros(10)}
    stored["inner.1.running_mean"] = torch.zeros(7)
    torch.save(stored, tmp_path / "ten.pth")
    model, before = Net(seed=2), bare(2)
    report = load_weights(model, tmp_path / "ten.pth")
    shapes = {"head.weight": ((10, 4), (3, 4)), "head.bias": ((10,), (3,)), "inner.1.running_mean": ((7,), (4,))}
    assert report.mismatched == shapes
    assert "head.weight [10, 4] stored, [3, 4] here" in str(report)
    after = model.state_dict()
    for name, value in stored.items():
        assert torch.equal(after[name], before[name] if name in shapes else value)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_strict_refuses_and_leaves_the_model_as_it_was(change, tmp_path):
    stored = bare(1)
    if change == "missing":
        del stored["head.bias"]
    else:
        stored["head.bias" if change == "shape" else "extra"] = torch.zeros(9)
    torch.save(stored, tmp_path / "w.pth")
    model = Net(seed=2)
    with pytest.raises(errors.StateMismatch) as caught:
        load_weights(model, tmp_path / "w.pth", strict=True)
    error = caught.value
    named = {"missing": error.missing, "unexpected": error.unexpected, "shape": [*error.shapes]}[change]
    assert named == (["extra"] if change == "unexpected" else ["head.bias"]) and equal(model, 2)


def test_nothing_that_fits_is_an_error_with_names_of_both_sides(tmp_path):
    torch.save({"encoder.w": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(errors.WeightsError, match=r"stores encoder\.w; the model has head\.bias.*rules now: none"):
        load_weights(Net(), tmp_path / "w.pth")


def test_a_small_share_is_a_loud_warning(tmp_path, caplog):
    torch.save({"head.bias": torch.ones(3)}, tmp_path / "w.pth")
    with caplog.at_level(logging.INFO, "pimm_ray"):
        load_weights(Net(), tmp_path / "w.pth")
        load_weights(Net(), tmp_path / "w.pth", min_match=0.05)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "only 8 % of the model was loaded" in caplog.text


def test_the_report_groups_names_and_counts_them(tmp_path):
    torch.save({f"backbone.enc.{n}.weight": torch.zeros(1) for n in range(212)} | bare(1), tmp_path / "w.pth")
    text = str(load_weights(Net(), tmp_path / "w.pth", rules={"head": "head"}))
    assert "loaded 12 of 12 tensors" in text and "rule head -> head: 2" in text
    assert "unexpected: backbone.enc.* (212): backbone.enc.0.weight, backbone.enc.1.weight ... +210 more" in text


def test_two_names_on_one_are_an_error_before_anything_is_loaded(tmp_path):
    torch.save({**bare(1), "old.weight": torch.zeros(3, 4)}, tmp_path / "w.pth")
    model = Net(seed=2)
    with pytest.raises(errors.WeightsError, match=r"'head.weight' and 'old.weight' both become 'head.weight'"):
        load_weights(model, tmp_path / "w.pth", rules={"old": "head"})
    assert equal(model, 2)


# ---- bad sources


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


BAD = {
    "cut safetensors": lambda folder: cut(single(folder) / "model.safetensors"),
    "cut .pth": lambda folder: cut(pickled("w.pth")(folder) / "w.pth"),
    "a cut shard": lambda folder: cut(sharded(folder) / "model-00002-of-00002.safetensors").parent,
    "no file": lambda folder: folder / "nothing",
    "an empty folder": lambda folder: [folder.mkdir(), folder][1],
    "a missing shard": lambda folder: [(sharded(folder) / "model-00002-of-00002.safetensors").unlink(), folder][1],
    "no address": lambda folder: "",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_source_is_an_error_of_ours_and_the_model_is_as_it_was(kind, tmp_path):
    model = Net(seed=2)
    source = BAD[kind](tmp_path / "there")
    with pytest.raises(errors.PimmRayError) as caught:
        load_weights(model, source)
    assert equal(model, 2)
    assert isinstance(caught.value, errors.CheckpointNotFound) == (kind == "no file")


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path):
    folder = sharded(tmp_path / "there")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(errors.UnsafeCheckpoint, match="passwd"):
        load_weights(Net(), folder)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run!",)


def test_code_in_a_file_is_never_run(tmp_path, capfd):
    torch.save({"state_dict": {"a": torch.zeros(1)}, "x": Evil()}, tmp_path / "w.pth")
    with pytest.raises(errors.UnsafeCheckpoint):
        load_weights(Net(), tmp_path / "w.pth")
    assert "run!" not in capfd.readouterr().out
