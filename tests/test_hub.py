"""hf:// weights from a server on loopback: one download a node, nothing cut is ever loaded, one error on all ranks."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from pimm_ray import CheckpointManager, WarmStart, errors, load_weights
from pimm_ray.weights import hub as client
from pimm_ray.weights import hub_files
from pimm_ray.weights.address import Address
from tests.hub_server import Hub, serving, use_cache
from tests.ranks import die, run_ranks, try_ranks

REPO = "hf://lab/net"


def net(value: float = 0.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def weights(value: float) -> bytes:
    return save(net(value).state_dict())


def value_of(model: nn.Module) -> float:
    (found,) = {value.item() for parameter in model.parameters() for value in parameter.flatten()}
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(hub_files, "PAUSES", (0.0, 0.01, 0.02))
    with serving(monkeypatch, tmp_path / "cache") as server:
        yield server


def loaded(rank: int = 0, address: str = REPO) -> float:
    model = net()
    load_weights(model, address, strict=True)
    return value_of(model)


# ---- addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://lab/net", ("lab/net", None, None)),
        ("hf://lab/net@v1.0", ("lab/net", "v1.0", None)),
        ("hf://lab/net/model_last.pth", ("lab/net", None, "model_last.pth")),
        ("hf://lab/net@main/exp/model/last.pth", ("lab/net", "main", "exp/model/last.pth")),
        ("hf://lab/net/exp/a@2.pth", ("lab/net", None, "exp/a@2.pth")),
        ("hf://lab/net@refs/pr/7/exp/a.pth", ("lab/net", "refs/pr/7", "exp/a.pth")),
        ("hf://lab/net@refs/pr/7", ("lab/net", "refs/pr/7", None)),
        ("hf://lab/net@feature%2Fnew/a.pth", ("lab/net", "feature/new", "a.pth")),
        ("hf://lab/net.v2-b_c", ("lab/net.v2-b_c", None, None)),
    ],
)
def test_an_address_is_a_repository_a_revision_and_a_file(text, expected):
    at = Address.parse(text)
    assert (at.repo, at.revision, at.path) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hf:/lab/net", "hf:/lab/net"),
        ("hf://", "''"),
        ("hf://net", "''"),
        ("hf://lab/", "''"),
        ("hf:///net", "''"),
        ("hf://lab/net/", "''"),
        ("hf://lab/net@", "'' is no revision"),
        ("hf://lab/net@/a.pth", "'' is no revision"),
        ("hf://lab/net@../../x", "'..' is no revision"),
        ("hf://lab/net@a..b", "'a..b' is no revision"),
        ("hf://lab/net@..%2F..%2Fx", "'../../x' is no revision"),
        ("hf://../net", "'..'"),
        ("hf://lab/..", "'..'"),
        ("hf://lab/net/../../a", "'..'"),
        ("hf://lab/net/a//b", "''"),
        ("hf://lab/net//etc/passwd", "''"),
        ("hf://lab/net/a\\b", "'a\\\\\\\\b'"),
        ("hf://lab/net/a%2F..%2Fb", "'a%2F..%2Fb'"),
        ("hf://lab/net/a\0b", "'a\\\\x00b'"),
        ("hf://la b/net", "'la b'"),
        ("hf://datasets/lab/net", "datasets/"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_part_named(text, part, tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path)
    with pytest.raises(errors.WeightsError) as caught:
        load_weights(net(), text) if text.startswith("hf://") else Address.parse(text)
    assert part.replace("\\\\", "\\") in str(caught.value) and text.split("\0")[0] in str(caught.value)
    assert not list(tmp_path.iterdir())


# ---- which file


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["model_best.pth", "pytorch_model.bin", "model.bin", "model.safetensors"], "model.safetensors"),
        (["model_best.pth", "pytorch_model.bin", "model.bin"], "model.bin"),
        (["model_last.pth", "model_best.pth", "other.pth"], "model_best.pth"),
        (["other.pth", "model_last.pth"], "model_last.pth"),
        (["other.pth", "exp/more.pth"], "other.pth"),
    ],
)
def test_a_repository_gives_the_best_known_name(hub, tmp_path, files, chosen):
    def data(number: int, name: str) -> bytes:
        if name.endswith(".safetensors"):
            return weights(number)
        torch.save(net(number).state_dict(), tmp_path / "x")
        return (tmp_path / "x").read_bytes()

    hub.push("lab/net", {name: data(number, name) for number, name in enumerate(files, start=1)})
    assert loaded() == files.index(chosen) + 1
    assert hub.bodies() == [chosen], "nothing else is fetched"
    named = files[0]
    assert loaded(address=f"{REPO}/{named}") == 1


def test_without_a_known_name_what_is_there_is_listed(hub):
    hub.push("lab/net", {"a.pth": b"", "b.pth": b"", "README.md": b""})
    with pytest.raises(errors.WeightsError, match=r"it holds README\.md, a\.pth, b\.pth\. Name one file: hf://lab/net/"):
        loaded()
    with pytest.raises(errors.WeightsError, match=r"has no c\.pth; it holds README\.md, a\.pth, b\.pth"):
        loaded(address=f"{REPO}/c.pth")


def test_parts_come_with_their_index_and_the_configuration(hub):
    state = net(3).state_dict()
    parts = {"model-1.safetensors": ["0.weight", "0.bias"], "model-2.safetensors": ["1.weight", "1.bias"]}
    index = {"weight_map": {name: part for part, names in parts.items() for name in names}}
    files = {part: save({name: state[name] for name in names}) for part, names in parts.items()}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), "config.json": b'{"a": 1}', "big.txt": b"x"}
    hub.push("lab/net", {f"sub/{name}": data for name, data in files.items()})
    assert loaded(address=f"{REPO}/sub") == 3
    assert sorted(hub.bodies()) == ["config.json", *sorted(parts), "model.safetensors.index.json"]
    found = client.fetch(f"{REPO}/sub")
    assert loaded(address=str(Path(found.path).parent)) == 3, "its folder in the cache is a source like others"


# ---- one download a node


def test_one_process_of_each_node_downloads(hub, monkeypatch, tmp_path):
    hub.push("lab/net", {"model.safetensors": weights(5)})
    hub.fault("resolve", "slow")
    outcomes: list[Any] = []

    def node(number: int) -> None:
        outcomes.extend(run_ranks(4, on_node, tmp_path / f"node{number}", group=False))

    nodes = [threading.Thread(target=node, args=(number,)) for number in range(2)]
    for each in nodes:
        each.start()
    for each in nodes:
        each.join()
    assert outcomes == [5.0] * 8
    assert hub.bodies() == ["model.safetensors"] * 2


def on_node(rank: int, cache: Path) -> float:
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, cache)
        return loaded()


def test_when_the_one_that_downloads_is_killed_the_next_goes_on_where_it_was(hub, tmp_path, monkeypatch):
    large = save({"a": torch.arange(400_000)})
    hub.push("lab/net", {"model.safetensors": large})
    hub.fault("resolve", "cut", times=1)
    monkeypatch.setattr(hub_files, "PAUSES", (60.0,))
    (outcome,) = try_ranks(1, killed_in_pause, group=False)
    assert outcome.killed
    (partial,) = (tmp_path / "cache").rglob("*.incomplete")
    assert 0 < partial.stat().st_size < len(large)
    assert Path(client.fetch(REPO).path).read_bytes() == large
    assert hub.bodies() == ["model.safetensors"] * 2
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def killed_in_pause(rank: int) -> None:
    threading.Timer(1.5, die).start()
    client.fetch(REPO)


def test_those_who_waited_for_a_failure_hear_of_it_and_do_not_try_one_after_the_other(hub):
    hub.push("lab/net", {"model.safetensors": weights(1)})
    hub.fault("resolve", "other bytes")
    outcomes = try_ranks(4, loaded, group=False)
    assert {outcome.kind for outcome in outcomes} == {"WeightsError"}
    assert len({outcome.error.strip().splitlines()[-1] for outcome in outcomes}) == 1
    assert len(hub.bodies()) <= 2 * (1 + len(hub_files.PAUSES)), "one tried, or two that did not wait for each other"


# ---- faults

FAULTS = {
    "503 for ever": ("api", 503, "could not be fetched"),
    "rate limit": ("api", 429, "too many requests"),
    "not the Hub": ("api", "not JSON", "check HF_ENDPOINT"),
    "a login page": ("api", "login page", "check HF_ENDPOINT"),
    "no answer": ("api", "hang up", "could not be fetched"),
    "a private repository": ("api", 401, "set HF_TOKEN"),
    "no such file after all": ("resolve", 404, "404"),
    "body: 500": ("resolve", 500, "could not be fetched"),
    "body: cut at 60 %": ("resolve", "cut", "without sending complete message body"),
    "body: other bytes": ("resolve", "other bytes", "is not the file of its digest"),
    "body: longer": ("resolve", "longer", "and the reply"),
    "body: a login page": ("resolve", "login page", "and the reply 26"),
    "body: no answer": ("resolve", "hang up", "could not be fetched"),
}


def begun(rank: int, folder: Path) -> tuple[float, str, Any]:
    """A job that begins with the weights, and saves."""
    model = net()
    manager = CheckpointManager(model=model, storage=folder)
    plan = manager.resume(warm_start=WarmStart(REPO))
    manager.step()
    info = manager.save()
    return value_of(model), plan.explain(), info.path if info else None


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_ends_in_the_same_clear_error_on_all_ranks_and_nothing_is_loaded(hub, tmp_path, name):
    where, what, words = FAULTS[name]
    hub.push("lab/net", {"model.safetensors": weights(1)})
    hub.fault(where, what)
    outcomes = try_ranks(2, begun, tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["WeightsError"] * 2
    texts = {outcome.error.strip().splitlines()[-1].partition("WeightsError: ")[2] for outcome in outcomes}
    (said,) = {re.sub(r"^rank \d: ", "", text) for text in texts}
    assert said.startswith(REPO) and words in said
    assert not list((tmp_path / "cache").rglob("snapshots/*/*"))
    hub.heal()
    assert [value for value, *_ in run_ranks(2, begun, tmp_path / "run")] == [1.0, 1.0], "and is no hindrance later"


@pytest.mark.parametrize("what", [503, 429, "hang up", "cut here", "cut", "other bytes", "longer", "slow"])
def test_a_fault_that_passes_costs_nothing_but_time(hub, what):
    hub.push("lab/net", {"model.safetensors": weights(4)})
    hub.fault("resolve", what, times=1)
    hub.fault("api", 503, times=1)
    assert loaded() == 4


def test_a_connection_that_always_breaks_gets_there_piece_by_piece(hub):
    large = save({"a": torch.arange(50_000)})
    hub.push("lab/net", {"model.safetensors": large})
    hub.fault("resolve", "cut here", times=12)
    assert Path(client.fetch(REPO).path).read_bytes() == large
    assert len(hub.bodies()) == 13


def test_a_repository_that_is_gated_missing_or_without_the_revision_is_said(hub):
    hub.push("lab/net", {"model.safetensors": weights(1)})
    with pytest.raises(errors.WeightsError, match=r"there is no lab/nut, or it is private: check the name"):
        loaded(address="hf://lab/nut")
    with pytest.raises(errors.WeightsError, match=r"lab/net has no revision v9"):
        loaded(address="hf://lab/net@v9")
    hub.gated.add("lab/net")
    with pytest.raises(errors.WeightsError, match=r"lab/net is gated: accept its terms"):
        loaded()


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil", "a\\b", "a%2F..%2Fb", "a//b", "a\0b"])
def test_a_repository_with_names_that_lead_out_is_refused(hub, tmp_path, name):
    hub.push("lab/net", {"model.safetensors": weights(1), name: b"evil"})
    with pytest.raises(errors.WeightsError, match="is no part of a path in a repository"):
        loaded()
    assert hub.bodies() == [] and not list(tmp_path.rglob("*evil*"))


def test_an_index_that_names_parts_elsewhere_is_refused(hub):
    index = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    hub.push("lab/net", {"model.safetensors.index.json": index})
    with pytest.raises(errors.PimmRayError, match=r"\.\./\.\./x\.safetensors"):
        loaded()


def test_a_link_out_of_the_cache_is_not_followed(hub, tmp_path):
    commit = hub.push("lab/net", {"model.safetensors": weights(2)})
    (tmp_path / "secret").write_bytes(weights(9))
    place = tmp_path / f"cache/models--lab--net/snapshots/{commit}/model.safetensors"
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "secret")
    assert loaded() == 2


def test_a_mirror_that_tells_names_alone_serves_too_and_its_cut_files_are_seen(hub):
    hub.bare = True
    hub.push("lab/net", {"model.safetensors": weights(6)})
    hub.fault("resolve", "cut", times=2)
    assert loaded() == 6
    hub.push("lab/net", {"model.safetensors": weights(7)})
    hub.fault("resolve", "other bytes")
    with pytest.raises(errors.WeightsError, match="is not the file of its digest"):
        loaded()


# ---- the cache


def test_what_is_in_the_cache_at_the_commit_is_used_without_a_request(hub):
    old = hub.push("lab/net", {"model.safetensors": weights(1)})
    assert loaded() == 1
    hub.push("lab/net", {"model.safetensors": weights(2)})
    before = len(hub.log)
    assert loaded(address=f"{REPO}@{old}") == 1 and client.fetch(REPO, commit=old).commit == old
    assert len(hub.log) == before
    assert loaded() == 2


def test_a_file_of_the_cache_that_was_cut_is_fetched_again(hub):
    hub.push("lab/net", {"model.safetensors": weights(3)})
    path = Path(client.fetch(REPO).path)
    os.truncate(path.resolve(), 100)
    assert loaded() == 3


def test_a_silent_hub_is_replaced_by_the_cache_with_a_warning_and_the_commit(hub, caplog):
    commit = hub.push("lab/net", {"model.safetensors": weights(1)})
    assert loaded() == 1
    hub.fault("", 503)
    assert loaded() == 1
    (line,) = [line for line in caplog.messages if "The cache has it" in line]
    assert commit in line and "could not be fetched" in line


def test_stock_tools_and_pimm_ray_use_one_cache(hub, tmp_path):
    from huggingface_hub import hf_hub_download, scan_cache_dir

    hub.push("lab/net", {"model.safetensors": weights(1)})
    assert loaded() == 1
    before = hub.bodies()
    assert hf_hub_download("lab/net", "model.safetensors", endpoint=hub.url) == client.fetch(REPO).path
    assert hub.bodies() == before, "what we fetched is there for others"
    assert not scan_cache_dir(tmp_path / "cache").warnings


WORK = """
import sys, os
from pimm_ray.weights import hub
print(hub.fetch(sys.argv[1]).path)
print(os.environ.get("HF_HUB_CACHE"))
"""


def elsewhere(hub: Hub, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MODEL_DIR"))}
    command = [sys.executable, "-c", WORK, REPO]
    return subprocess.run(command, env=env | {"HF_ENDPOINT": hub.url} | settings, capture_output=True, text=True)


def test_the_cache_is_hugging_faces_own_and_else_that_of_the_model_folder(hub, tmp_path):
    hub.push("lab/net", {"model.safetensors": weights(1)})
    models, home = str(tmp_path / "models"), str(tmp_path / "home")
    path, variable = elsewhere(hub, MODEL_DIR=models).stdout.split()
    assert path.startswith(f"{models}/hub/models--lab--net/") and variable == f"{models}/hub"
    path, _ = elsewhere(hub, MODEL_DIR=models, HF_HOME=home).stdout.split()
    assert path.startswith(f"{home}/hub/models--lab--net/")
    path, _ = elsewhere(hub, MODEL_DIR=models, HF_HUB_CACHE=home).stdout.split()
    assert path.startswith(f"{home}/models--lab--net/")


def test_offline_the_cache_is_used_and_nobody_is_asked(hub, tmp_path):
    hub.push("lab/net", {"model.safetensors": weights(1)})
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    failed = elsewhere(hub, **settings)
    assert "HF_HUB_OFFLINE forbids to ask the Hub" in failed.stderr
    assert elsewhere(hub, HF_HOME=str(tmp_path)).returncode == 0
    before = len(hub.log)
    assert elsewhere(hub, **settings).returncode == 0 and len(hub.log) == before


def test_a_long_download_says_how_far_it_is(hub, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(hub_files, "_SAY_EVERY", 0.0)
    hub.push("lab/net", {"model.safetensors": save({"a": torch.zeros(1_000_000)})})
    client.fetch(REPO)
    assert any("of 4 MB" in line and "%" in line and "ETA" in line and "MB/s" in line for line in caplog.messages)


# ---- a run that begins with it


def state_of(path: str) -> dict[str, Any]:
    return json.loads(Path(path, "state.json").read_text())["warm_start"]


def test_a_run_holds_on_to_its_commit_and_a_resume_never_asks(hub, tmp_path):
    commit = hub.push("lab/net", {"model.safetensors": weights(1)})
    outcomes = try_ranks(2, killed_before_its_first_save, tmp_path / "run")
    assert all(outcome.killed for outcome in outcomes)
    hub.push("lab/net", {"model.safetensors": weights(2)})
    found = run_ranks(2, begun, tmp_path / "run")
    assert [value for value, *_ in found] == [1.0, 1.0], "the retry has the weights of the first try"
    assert state_of(found[0][2]) == {"source": REPO, "commit": commit}
    assert commit in found[0][1]
    before = len(hub.log)
    again = run_ranks(2, begun, tmp_path / "run")
    assert [value for value, *_ in again] == [1.0, 1.0] and len(hub.log) == before
    assert state_of(again[0][2]) == {"source": REPO, "commit": commit}, "and what it began with stays on record"
    hub.close()
    assert [value for value, *_ in run_ranks(2, begun, tmp_path / "run")] == [1.0, 1.0]


def killed_before_its_first_save(rank: int, folder: Path) -> None:
    manager = CheckpointManager(model=net(), storage=folder)
    manager.resume(warm_start=WarmStart(REPO))
    die()


def test_importing_pimm_ray_does_not_import_the_client():
    code = "import pimm_ray, sys; print('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
