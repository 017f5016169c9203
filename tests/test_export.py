"""export_weights: what stock tools open is what was trained, to the bit; the Hub gets it whole or hears why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from pimm_ray import CheckpointManager, errors, export_weights, load_weights
from pimm_ray.cli import main
from tests.hub_uploads import Uploads
from tests.ranks import run_ranks

LAYERS = 14


class Pimm(nn.Module):
    """As a point model of pimm is laid out: over 200 entries of every kind, one of them tied."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Linear(6, 16, bias=False)
        self.backbone.enc = nn.ModuleList(self.block() for _ in range(LAYERS))
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.backbone.embedding.weight
        self.register_buffer("grid", torch.arange(9).reshape(3, 3))
        self.register_buffer("scale", torch.tensor(0.25, dtype=torch.float64))
        self.register_buffer("none", torch.zeros(0, 4))

    @staticmethod
    def block() -> nn.Module:
        return nn.ModuleDict(
            {
                "attn": nn.MultiheadAttention(16, 2),
                "norm": nn.BatchNorm1d(16),
                "mlp": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
                "low": nn.Linear(16, 4, dtype=torch.bfloat16),
            }
        )


def saved(rank: int, folder: str, seed: int = 1) -> None:
    manager = CheckpointManager(model=Pimm(seed), storage=folder)
    manager.resume()
    manager.save()


def held(folder: Path) -> dict[str, torch.Tensor]:
    """What the stock library reads of a folder."""
    index = folder / "model.safetensors.index.json"
    parts = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    found: dict[str, torch.Tensor] = {}
    for file in set(parts):
        found |= load_file(folder / file)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("limit", "parts"), [("5GB", 1), (60_000, 3)])
def test_a_run_exported_opens_in_the_stock_library_equal_to_the_bit(tmp_path, world, limit, parts):
    run_ranks(world, saved, str(tmp_path / "run"))
    made = export_weights(tmp_path / "run", tmp_path / "out", max_shard_size=limit, config={"kind": "pimm"})
    files = sorted(path.name for path in made.iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) >= parts
    assert ("model.safetensors.index.json" in files) == (parts > 1)
    assert json.loads((made / "config.json").read_text()) == {"kind": "pimm"}
    expected, found = Pimm(1).state_dict(), held(made)
    assert expected.keys() - found.keys() in ({"head.weight"}, {"backbone.embedding.weight"})
    assert all(same(expected[name], value) for name, value in found.items())
    model = Pimm(2)
    report = load_weights(model, made, strict=True)
    assert len(expected) >= 200 and report.share == 1
    assert all(same(expected[name], value) for name, value in model.state_dict().items())
    assert not list(tmp_path.glob("out.partial*"))


def test_names_of_one_tensor_are_known_to_the_stock_library_too(tmp_path):
    model, other = Pimm(1), Pimm(2)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pth")
    made = export_weights(tmp_path / "model.pth", tmp_path / "out")
    load_model(other, made / "model.safetensors")
    assert all(map(same, other.state_dict().values(), model.state_dict().values()))
    again = export_weights(made, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


def bert(classes: int = 3) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(classes)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=classes * 50, **small))


def resnet(classes: int = 3) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(classes)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=classes, **sizes))


@pytest.mark.parametrize("make", [bert, resnet])
@pytest.mark.parametrize("limit", ["5GB", "40KB"])
def test_a_model_of_transformers_goes_out_and_transformers_takes_it_back_equal_to_the_bit(tmp_path, make, limit):
    model = make()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    made = export_weights(tmp_path / "theirs", tmp_path / "ours", max_shard_size=limit)
    back = type(model).from_pretrained(made)
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(map(same, back.state_dict().values(), model.state_dict().values()))
    low = type(model).from_pretrained(export_weights(made, tmp_path / "low", dtype="bfloat16"), dtype="auto")
    assert all(
        same(value, model.state_dict()[name].bfloat16() if value.is_floating_point() else model.state_dict()[name])
        for name, value in low.state_dict().items()
    )
    assert any(value.dtype == torch.bfloat16 for value in low.state_dict().values())


def test_a_backbone_of_transformers_goes_into_a_pimm_like_model_by_rules_and_out_again(tmp_path):
    class Detector(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.backbone = nn.ModuleDict({"enc": inner.resnet})
            self.heads = nn.ModuleDict({"seg": nn.Linear(16, 5)})

    theirs = resnet()
    theirs.save_pretrained(tmp_path / "theirs")
    model = Detector(resnet(4))
    report = load_weights(model, tmp_path / "theirs", rules=[("resnet", "backbone.enc"), ("classifier.1", "heads.seg")])
    assert set(report.mismatched) == {"heads.seg.weight", "heads.seg.bias"} and not report.missing
    torch.save(model.state_dict(), tmp_path / "detector.pth")
    found = held(export_weights(tmp_path / "detector.pth", tmp_path / "out"))
    expected = {f"backbone.enc.{name}": value for name, value in theirs.resnet.state_dict().items()}
    assert len(expected) > 40 and all(same(found[name], value) for name, value in expected.items())


WORK = """
import resource, sys
from pimm_ray import export_weights
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_weights(sys.argv[1], sys.argv[2], dtype="bfloat16")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_holds_some_tensors_and_not_all(tmp_path):
    each, count = 8 * 2**20, 60
    model = nn.ModuleList(nn.Linear(1024, each // 4096, bias=False) for _ in range(count))
    manager = CheckpointManager(model=model, storage=tmp_path / "run")
    manager.resume()
    manager.save()
    words = [sys.executable, "-c", WORK, str(tmp_path / "run"), str(tmp_path / "out")]
    grown = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > count * each // 2
    assert grown < count * each // 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dtype": "bfloat61"}, errors.WeightsError, "dtype='bfloat61' is no floating-point type"),
        ({"dtype": torch.int8}, errors.WeightsError, "is no floating-point type"),
        ({"max_shard_size": "5 gigs"}, errors.WeightsError, "max_shard_size='5 gigs' is no size"),
        ({"max_shard_size": 0}, errors.WeightsError, "max_shard_size=0 is no size"),
        ({"source": "nowhere"}, errors.CheckpointNotFound, "nowhere"),
        ({"dest": "s3://bucket/out"}, errors.StorageError, "not on a local disk"),
        ({"dest": "full"}, errors.StorageError, "full is there already"),
        ({"push_to": "no repository"}, errors.WeightsError, "push_to='no repository' is no repository"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, monkeypatch, arguments, error, words):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/mine").touch()
    save_file({"a": torch.ones(2)}, "a.safetensors")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        export_weights(arguments.pop("source", "a.safetensors"), arguments.pop("dest", "out"), **arguments)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_source_leaves_nothing(tmp_path):
    saved(0, str(tmp_path / "run"))
    (file,) = (tmp_path / "run").rglob("weights/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint, match="is damaged"):
        export_weights(file.parent.parent, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_command_exports_and_says_where(tmp_path, capsys):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "c.json").write_text('{"torch_dtype": "float32"}')
    words = ["export", str(tmp_path / "a.safetensors"), str(tmp_path / "out"), "--dtype", "float16"]
    assert main([*words, "--config", str(tmp_path / "c.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/out\n"
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"torch_dtype": "float16"}
    assert held(tmp_path / "out")["a"].dtype == torch.float16
    assert main(words) == 1
    assert "is there already" in capsys.readouterr().err
    (tmp_path / "c.json").write_text("{")
    assert main([*words[:2], str(tmp_path / "new"), "--config", str(tmp_path / "c.json")]) == 1
    assert "c.json is not JSON" in capsys.readouterr().err


# ---- to the Hub


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    hub = Uploads()
    yield hub
    hub.close()


def push(hub: Uploads, folder: Path, *words: str, token: str = "good") -> subprocess.CompletedProcess[str]:
    """The command in a new process, since the client reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hf")}
    command = [sys.executable, "-m", "pimm_ray.cli", "export", *words, "--push-to", "lab/net"]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, cwd=folder)


def test_what_is_pushed_is_what_was_exported_with_a_card_and_nothing_of_an_earlier_push(tmp_path, uploads):
    model = Pimm(1)
    torch.save(model.state_dict(), tmp_path / "secret_place.pth")
    done = push(uploads, tmp_path, str(tmp_path / "secret_place.pth"), "out", "--max-shard-size", "60KB")
    assert done.returncode == 0, done.stderr
    there = uploads.repositories["lab/net"]
    assert {name: there[name] for name in there if name != "README.md"} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "README.md"
    }
    card = there["README.md"].decode()
    assert "# net" in card and 'load_weights(model, "hf://lab/net")' in card and str(tmp_path) not in card
    there["README.md"] = b"my own words"
    assert push(uploads, tmp_path, "secret_place.pth", "whole").returncode == 0
    assert sorted(there) == ["README.md", "model.safetensors"] and there["README.md"] == b"my own words"


def test_without_the_right_to_push_nothing_is_exported(tmp_path, uploads):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    done = push(uploads, tmp_path, "a.safetensors", "out", token="bad")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert "the Hub did not take lab/net" in done.stderr and "HF_TOKEN" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_push_that_fails_leaves_the_export_whole(tmp_path, uploads):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    uploads.fail_commits = True
    done = push(uploads, tmp_path, "a.safetensors", "out")
    assert done.returncode == 1 and "the export is whole in" in done.stderr and "over the quota" in done.stderr
    assert held(tmp_path / "out")["a"].tolist() == [1, 1]
