"""Pickles in every place where a loader might look are never unpickled: a file that each would make does not appear."""

import base64
import contextlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from xxhash import xxh3_64_hexdigest

from pimm_ray import TorchTrainer, errors, find_checkpoint, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.layout import DOCUMENT_KEY, MARKER, STATE, rank_file, trainer_file, weights_file
from tests.elastic_jobs import change_marker
from tests.golden.make import EXPECTED, Golden, committed, load
from tests.ranks import try_ranks

expected = json.loads(EXPECTED.read_text())

BESIDE = [
    ".metadata", "__0_0.distcp", "rng.pt", "state.pkl", "model.bin", "weights.pth", "model_last.pth", "optimizer.pt",
    "training_args.bin", "data.pkl", ".metadata.json", ".tune_metadata", "dict_checkpoint.pkl",
    "weights/pytorch_model.bin", "weights/pytorch_model.bin.index.json", "weights/.metadata", "weights/model.pt",
    "trainer.dcp/.metadata", "trainer.dcp/__0_0.distcp", "trainer.dcp/__1_0.distcp",
    "ranks/00000.pt", "ranks/00000.pkl", "ranks/00002.safetensors", "state.pt",
]  # fmt: skip
"""Files that are not of the checkpoint, in its folder."""
IN_RUN = [
    "checkpoint_manager_snapshot.json", "tuner.pkl", "trainer.pkl", "searcher-state.pkl", "model_last.pth", ".metadata",
    ".metadata.json", "state.json", ".complete", "journal", "experiment_state-1.json",
    "checkpoint_00000099-0009-abcd/.complete", "checkpoint_00000098-0009-abcd/state.json",
]  # fmt: skip
"""Files of the run folder."""
OF_IT = [MARKER, STATE, "state.safetensors", rank_file(0), trainer_file(0), weights_file(0, 2)]


class Plant:
    """Makes a file when it is unpickled."""

    def __init__(self, sentinel: Path):
        self.sentinel = sentinel
        self.pickle = pickle.dumps(self)
        self.text = base64.b64encode(self.pickle).decode()

    def __reduce__(self):
        return open, (str(self.sentinel), "w")

    def zip(self, folder: Path) -> bytes:
        """What torch.save makes of it."""
        torch.save({"state_dict": self}, folder / "zip")
        return (folder / "zip").read_bytes()

    def sprung(self) -> bool:
        there = self.sentinel.exists()
        self.sentinel.unlink(missing_ok=True)
        return there


@pytest.fixture
def plant(tmp_path):
    return Plant(tmp_path / "sentinel")


@pytest.fixture
def run(tmp_path):
    """A run folder with the committed checkpoint."""
    shutil.copytree(committed(), tmp_path / "run" / committed().name)
    return tmp_path / "run"


def put(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def accept(folder: Path) -> None:
    """List every file as it is now in the marker, as one would who wants the pickles to be read."""
    names = [entry["path"] for entry in json.loads((folder / MARKER).read_bytes())["files"]]
    files = []
    for name in names:
        data = (folder / name).read_bytes()
        files.append({"path": name, "bytes": len(data), "xxh3": [xxh3_64_hexdigest(data)], "block": 2**24})
    change_marker(folder, files=files)


def use_everything(run: Path, tmp_path: Path) -> list[str]:
    """Each public function that looks at a checkpoint or run folder; the names of the errors. All are ours."""
    path, failures = run / committed().name, []

    def attempt(call, *arguments, **more):
        try:
            return call(*arguments, **more)
        except errors.PimmRayError as error:
            failures.append(type(error).__name__)

    for deep in (False, True):
        verify_checkpoint(path, deep=deep)
        find_checkpoint(run, verified=deep)
        for folder in run.glob("checkpoint_*"):
            verify_checkpoint(folder, deep=deep)
    attempt(open_checkpoint, path)
    attempt(load, 0, shutil.copytree(run, tmp_path / "own"))
    attempt(load, 0, tmp_path / "given", path)
    for where, given in ((shutil.copytree(run, tmp_path / "own 2"), None), (tmp_path / "given 2", path)):
        kinds = {outcome.kind for outcome in try_ranks(2, load, where, given)} - {None}
        assert all(issubclass(getattr(errors, kind, type), errors.PimmRayError) for kind in kinds), kinds
    for name in ("run", "new"):
        with_ray(tmp_path, name, path)
    return failures


def with_ray(storage: Path, name: str, path: Path) -> None:
    """All that TorchTrainer does in the driver; Ray itself refuses the loop and does not start."""
    from ray.train import RunConfig

    config = RunConfig(name=name, storage_path=str(storage))
    try:
        made = TorchTrainer(lambda a, b: None, run_config=config, resume_from_checkpoint=path)
    except errors.PimmRayError:
        return
    with pytest.raises(ValueError, match="0 or 1 required arguments"):
        made.fit()


def test_the_plants_are_alive(plant, tmp_path):
    pickle.loads(plant.pickle)
    assert plant.sprung() and not plant.sprung()
    put(tmp_path / "zip.pt", plant.zip(tmp_path))
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert plant.sprung()
    put(tmp_path / "dcp" / ".metadata", plant.pickle)
    with pytest.raises(BaseException):  # noqa: B017  DCP's own is no Exception
        dcp.load({"a": torch.zeros(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert plant.sprung(), "stock DCP runs it"


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_pickles_beside_the_checkpoint_s_own_files_are_not_looked_at(run, plant, tmp_path, kind):
    data = plant.pickle if kind == "pickle" else plant.zip(tmp_path)
    for name in BESIDE:
        put(run / committed().name / name, data)
    for name in IN_RUN:
        put(run / name, data)
    assert use_everything(run, tmp_path) == []
    assert not plant.sprung()
    loaded = load(0, shutil.copytree(run, tmp_path / "again"))
    assert loaded["source"] == committed().name and loaded["facts"] == expected["facts"]
    assert not plant.sprung()


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", OF_IT)
def test_pickles_in_place_of_the_checkpoint_s_own_files_are_refused(run, plant, tmp_path, name, kind):
    folder = run / committed().name
    put(folder / name, plant.pickle if kind == "pickle" else plant.zip(tmp_path))
    if name != MARKER:
        assert [problem.file for problem in verify_checkpoint(folder)] == [name]
        accept(folder)
    assert use_everything(run, tmp_path)
    assert not plant.sprung()


def rewrite_json(file: Path, change) -> None:
    document = json.loads(file.read_bytes())
    change(document)
    file.write_text(json.dumps(document))


def rewrite_header(file: Path, change) -> None:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def tagged(plant):
    """Values that ask a decoder to unpickle."""
    text = plant.text
    yield {"$": "pickle", "v": text}
    yield {"$": "object", "v": text, "class": "builtins.open"}
    yield {"$": "array", "v": text, "dtype": "|O", "shape": [1]}
    yield {"$": "scalar", "v": text, "dtype": "|O", "shape": []}
    yield {"$": "builtins.open", "v": [str(plant.sentinel), "w"]}
    yield {"$": "bytes", "v": text}
    yield {"py/reduce": [{"py/function": "builtins.open"}, {"py/tuple": [str(plant.sentinel), "w"]}]}
    yield text


def test_pickles_inside_documents_and_headers_are_text(run, plant, tmp_path):
    folder, whole = run / committed().name, tmp_path / "whole"
    shutil.copytree(folder, whole)
    for number, value in enumerate(tagged(plant)):
        for where in ("notes", "scaler", "schedulers", "optimizers", "own", "stray"):
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)

            def in_state(document, where=where, value=value):
                if where == "notes":
                    document["extra"]["notes"] = {"state": value}
                elif where == "optimizers":
                    document["optimizers"][0]["state"]["0.weight"]["exp_avg"] = value
                else:
                    document[where] = [value] if where == "schedulers" else value

            def in_header(metadata, where=where, value=value):
                metadata["pickle"] = metadata["DCP_SHARDING_INFO" if where == "stray" else "format"] = plant.text
                if where == "own":
                    metadata[DOCUMENT_KEY] = json.dumps({**json.loads(metadata[DOCUMENT_KEY]), "rng": value})

            if where == "own":
                rewrite_header(folder / rank_file(0), in_header)
            else:
                rewrite_json(folder / STATE, in_state)
            if where == "stray":
                rewrite_header(folder / trainer_file(0), in_header)
            accept(folder)
            change_marker(folder, reason=plant.text, metrics={"score": plant.text}, pickle=plant.text)
            assert {problem.kind for problem in verify_checkpoint(folder)} <= {"format"}, "the digests fit"
            with contextlib.suppress(errors.PimmRayError):
                Golden(shutil.copytree(run, tmp_path / f"{number} {where}"), 0, 1).manager.resume()
            assert not plant.sprung(), (value, where)


def test_pickles_inside_ray_s_list_are_text(run, plant, tmp_path):
    entry = {"version": 0, "checkpoint_dir_name": committed().name, "metrics": {"score": plant.text}}
    for document in (
        {"checkpoint_results": [entry], "latest_checkpoint_result": entry, "ray_version": plant.text},
        {"_type": "CLOUDPICKLE_FALLBACK", "value": plant.pickle.hex()},
        {"checkpoint_results": [{"_type": "CLOUDPICKLE_FALLBACK", "value": plant.pickle.hex()}]},
    ):
        put(run / "checkpoint_manager_snapshot.json", json.dumps(document).encode())
        with_ray(tmp_path, "run", run / committed().name)
        assert not plant.sprung()
