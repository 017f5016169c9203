"""Checkpoints made to do harm: whatever their documents say, each public function answers with an error of ours, soon
and in little memory, and a resume that is refused has changed nothing."""

import copy
import json
import math
import os
import random
import resource
import shutil
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from pimm_ray import CheckpointManager, errors, find_checkpoint, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.layout import DOCUMENT_KEY, MARKER, STATE, rank_file, seal, trainer_file, weights_file
from tests.golden.make import Golden, committed
from tests.ranks import run_ranks

ROOM = 768 * 2**20
"""Bytes of address space that all hostile files of a test may take, beyond what the process has at its start."""
SECONDS = 5.0
"""For one hostile checkpoint, by all functions together; a resume of a good one takes a twentieth of that here."""


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def tagged(kind, value, **more):
    return {"$": kind, "v": value, **more}


STRANGE = [
    None, True, False, -1, 0, 1, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 10**400, 0.5, -1.5, 1e308, math.nan, math.inf,
    "", "x", "..", "../../x", "/etc/passwd", "a/../b", "C:\\x", "C:x", "a\\b", "\ud800", "\0", "a\nb", "x" * 5000,
    [], {}, [[]], [None], {"": {}}, nested(90), nested(400), [0] * 3000, {str(i): i for i in range(500)},
    tagged("tensor", None, key="absent"), tagged("tensor", None, key=[]), {"$": "tensor"}, {"$": []}, tagged("odd", 1),
    tagged("array", "", dtype="|O", shape=[1]), tagged("array", "", dtype="|S0", shape=[2**40]),
    tagged("array", "", dtype="<f8", shape=[2**62]), tagged("array", "", dtype="<f8", shape=[0, 2**62]),
    tagged("array", "AAAA", dtype="i4,f8", shape=[1]), tagged("array", "AA==", dtype="|u1", shape=[1.0]),
    tagged("array", "!", dtype="|u1", shape=[1]), tagged("scalar", "/////w==", dtype="<U1", shape=[]),
    tagged("scalar", "", dtype="<U999999999", shape=[]), tagged("array", "AA==", dtype={"names": []}, shape=[1]),
    tagged("set", [[1]]), tagged("dict", [[[1], 2]]), tagged("dict", [1]), tagged("dict", "ab"), tagged("Counter", 5),
    tagged("int", "0x" + "f" * 20_000), tagged("int", 5), tagged("float", "1e999"), tagged("float", 10**400),
    tagged("Size", [2**70]), tagged("Size", [-1]), tagged("complex", [10**400, 0]), tagged("bytes", "\u00e9"),
    tagged("tuple", {}),
]  # fmt: skip


def places(tree, path=()):
    """Every path into a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def spoil(tree, draw):
    """One change of a JSON value somewhere: swapped, dropped, said twice, moved, or made strange."""
    paths = list(places(tree))
    if not paths or draw.random() < 0.02:
        return copy.deepcopy(draw.choice(STRANGE))
    # The upper levels are few and mean most.
    level = draw.choice(sorted({len(path) for path in paths}))
    path = draw.choice([path for path in paths if len(path) == level])
    parent, key = at(tree, path[:-1]), path[-1]
    kind = draw.choice(["strange", "strange", "strange", "drop", "swap", "twice", "number", "rename"])
    if kind == "strange":
        parent[key] = copy.deepcopy(draw.choice(STRANGE))
    elif kind == "drop":
        del parent[key]
    elif kind == "swap":
        parent[key] = copy.deepcopy(at(tree, draw.choice(paths)))
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == "number" and type(parent[key]) in (int, float):
        old = parent[key]
        parent[key] = draw.choice([-old, old + 1, float(old), str(old), old * 2**40])
    elif isinstance(parent, dict):
        new = draw.choice(["", "x", "\ud800", "$", "params", "optimizer", "step", "x" * 5000, "../x"])
        parent[new] = parent.pop(key) if draw.random() < 0.5 else copy.deepcopy(draw.choice(STRANGE))
    return tree


def damage(data, draw):
    """One change of bytes: flipped, cut, repeated, or nested without end."""
    kind, at = draw.choice(["flip", "cut", "splice", "insert"]), draw.randrange(len(data) + 1)
    if kind == "flip":
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "splice":
        other = draw.randrange(len(data))
        return data[:at] + data[other : other + draw.randrange(1, 200)] + data[at:]
    odd = [b"[" * 200_000, b'{"a":' * 100_000, b"9" * 1_000_000, b'"\\ud800"', b"NaN", b"\xff", b"1e400", b'"id":"x",']
    return data[:at] + draw.choice(odd) + data[at:]


def hostile(data, draw):
    """A document of JSON, changed in one to three ways."""
    if draw.random() < 0.2:
        return damage(data, draw)
    tree = json.loads(data)
    for _ in range(draw.choice([1, 1, 2, 3])):
        tree = spoil(tree, draw)
    return json.dumps(tree).encode()


def header_of(data):
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


def with_header(text, rest):
    return len(text).to_bytes(8, "little") + text + rest


def marker(folder, draw):
    """The manifest: half of them with the digest that a manifest ends with."""
    data = hostile((folder / MARKER).read_bytes(), draw)
    with suppress(ValueError, AttributeError, KeyError):
        document = json.loads(data)
        if draw.random() < 0.7:
            document.pop("xxh3", None)
            data = seal(document)
    (folder / MARKER).write_bytes(data)


def state(folder, draw):
    forge(folder, STATE, hostile((folder / STATE).read_bytes(), draw))


def header(folder, draw):
    name = draw.choice([weights_file(0, 2), trainer_file(0), trainer_file(1), "state.safetensors", rank_file(0)])
    text, rest = header_of((folder / name).read_bytes())
    data = with_header(hostile(text, draw), rest)
    if draw.random() < 0.1:
        data = draw.choice([0, 1, 2**20, 2**40, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    forge(folder, name, data)


def rank(folder, draw):
    """What a rank stored of its own, which stands as text in the header of its file."""
    name = rank_file(draw.choice([0, 0, 1]))
    text, rest = header_of((folder / name).read_bytes())
    top = json.loads(text)
    top["__metadata__"][DOCUMENT_KEY] = hostile(top["__metadata__"][DOCUMENT_KEY].encode(), draw).decode("latin-1")
    forge(folder, name, with_header(json.dumps(top).encode(), rest))


def sharding(folder, draw):
    """Where the pieces of the trainer's tensors lie."""
    name = trainer_file(draw.choice([0, 1]))
    text, rest = header_of((folder / name).read_bytes())
    top = json.loads(text)
    info = top["__metadata__"]["DCP_SHARDING_INFO"].encode()
    top["__metadata__"]["DCP_SHARDING_INFO"] = hostile(info, draw).decode("latin-1")
    forge(folder, name, with_header(json.dumps(top).encode(), rest))


def forge(folder, name, data):
    """Write a file, and a manifest that lists it as it is now: nothing but its content can be found wrong."""
    (folder / name).write_bytes(data)
    document = json.loads((folder / MARKER).read_bytes())
    entry = next(entry for entry in document["files"] if entry["path"] == name)
    entry |= {"bytes": len(data), "xxh3": [xxh3_64_hexdigest(data)] if data else []}
    del document["xxh3"]
    (folder / MARKER).write_bytes(seal(document))


def stand(golden):
    """What a resume would change."""
    streams = random.getstate()[1][-1], torch.get_rng_state().tolist()[:40]
    return json.dumps([golden.facts(), golden.loader.state_dict(), streams])


def use(run, folder, golden, before):
    """All public functions on a hostile checkpoint; how the resume ended. Another error than ours fails the test."""
    for deep in (False, True):
        for problem in verify_checkpoint(folder, deep=deep):
            assert problem.file and problem.kind and len(str(problem)) < 5000
    find_checkpoint(run)
    with suppress(errors.PimmRayError):
        open_checkpoint(folder)
    try:
        golden.manager.resume(checkpoint=folder)
    except errors.PimmRayError as error:
        text = str(error)
        assert len(text) < 5000
        if "does not take" in text or isinstance(error, errors.DataChanged):
            return "refused by an object"
        assert stand(golden) == before, text
        return type(error).__name__
    return "benign"


def fuzz(_, tmp, make, examples):
    """In a process of its own, with an end to its memory: how often each outcome came."""
    torch.set_num_threads(1)
    outcomes, slowest = Counter(), 0.0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    before = stand(Golden(tmp / "first", 0, 1))

    # A seed does not shrink to anything simpler.
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.integers(0, 2**64))
    def each(seed):
        nonlocal slowest
        run = tmp / "run"
        shutil.rmtree(run, ignore_errors=True)
        folder = Path(shutil.copytree(committed(), run / committed().name))
        make(folder, random.Random(seed))
        golden = Golden(tmp / "own", 0, 1)
        start = time.perf_counter()
        outcomes[use(run, folder, golden, before)] += 1
        slowest = max(slowest, time.perf_counter() - start)

    each()
    assert slowest < SECONDS
    return outcomes


@pytest.mark.parametrize("make, examples", [(marker, 250), (state, 400), (header, 150), (rank, 200), (sharding, 50)])
def test_a_hostile_document_gives_an_error_of_ours_or_does_no_harm(tmp_path, make, examples):
    (outcomes,) = run_ranks(1, fuzz, tmp_path, make, examples, group=False, timeout=200)
    print(make.__name__, dict(outcomes))
    assert sum(outcomes.values()) >= examples
    assert outcomes["benign"] < sum(outcomes.values()) / 2


# Single tricks


@pytest.fixture
def run(tmp_path):
    shutil.copytree(committed(), tmp_path / "run" / committed().name)
    return tmp_path / "run"


def resume(folder, where):
    CheckpointManager(model=torch.nn.Linear(1, 1), storage=where).resume(checkpoint=folder)


def change_entry(folder, **changes):
    document = json.loads((folder / MARKER).read_bytes())
    document["files"][0] |= changes
    del document["xxh3"]
    (folder / MARKER).write_bytes(seal(document))


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../../x", "weights/..", "./x", "a//b", "a/", "", "a\\b", "..\\x", "C:\\x", "C:x", "c:/x",
     "a\0b", "a\nb", "a\x1b[2Jb", "\ud800", "\u202ex", "x" * 256, "/".join("abc" for _ in range(2000)), "~/x\x7f"],
)  # fmt: skip
def test_a_path_that_could_lead_out_of_the_folder_is_unsafe(run, tmp_path, path):
    folder = run / committed().name
    change_entry(folder, path=path)
    with pytest.raises(errors.UnsafeCheckpoint, match="not a plain path"):
        open_checkpoint(folder)
    with pytest.raises(errors.UnsafeCheckpoint):
        resume(folder, tmp_path / "new")
    (problem,) = verify_checkpoint(folder)
    assert problem.kind == "marker" and len(str(problem)) < 1000
    assert find_checkpoint(run) is None


@pytest.mark.parametrize(
    "changes",
    [{"path": STATE}, {"path": rank_file(1)}, {"block": 1}, {"block": 0}, {"block": 2**60}, {"block": True},
     {"bytes": 2**60}, {"bytes": -1}, {"bytes": 1.0}, {"bytes": 10**400}, {"xxh3": ["0" * 15]}, {"xxh3": ["Z" * 16]},
     {"xxh3": ["0" * 16] * 100_000}, {"xxh3": {}}, {"xxh3": "0" * 16}],
)  # fmt: skip
def test_an_entry_that_cannot_be_right_makes_the_marker_corrupt(run, changes):
    folder = run / committed().name
    change_entry(folder, **changes)
    with pytest.raises(errors.CorruptCheckpoint) as caught:
        open_checkpoint(folder)
    assert caught.value.file == MARKER and len(str(caught.value)) < 1000


def test_a_file_of_the_checkpoint_that_is_a_link_out_of_it_is_none_of_its_files(run, tmp_path):
    folder = run / committed().name
    outside = tmp_path / "outside"
    for name in (MARKER, STATE, weights_file(0, 2)):
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)
        (problem, *_) = verify_checkpoint(folder)
        assert problem.kind in ("missing", "marker") and find_checkpoint(run) is None
        with pytest.raises(errors.PimmRayError):
            resume(folder, tmp_path / "new")
        (folder / name).unlink()
        outside.rename(folder / name)
    shutil.move(folder / "weights", outside)
    (folder / "weights").symlink_to(outside)
    assert {problem.kind for problem in verify_checkpoint(folder)} == {"missing"}


def test_links_within_the_folder_hard_links_and_a_linked_folder_are_fine(run, tmp_path):
    folder = run / committed().name
    (folder / STATE).rename(folder / "kept.json")
    (folder / STATE).symlink_to("kept.json")
    os.link(folder / rank_file(0), tmp_path / "another name")
    (tmp_path / "link").symlink_to(folder)
    assert verify_checkpoint(folder) == verify_checkpoint(tmp_path / "link") == []


def test_links_in_circles_pipes_and_folders_in_place_of_files_are_neither_followed_nor_waited_for(run):
    folder = run / committed().name
    for name in ("a", "b", "c"):
        (folder / name).symlink_to(".")
    os.mkfifo(folder / "pipe")
    start = time.monotonic()
    assert verify_checkpoint(folder) == []
    for name in (STATE, MARKER):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert verify_checkpoint(folder)
        (folder / name).unlink()
        (folder / name).mkdir()
        assert verify_checkpoint(folder) and find_checkpoint(run) is None
    assert time.monotonic() - start < SECONDS


class Grudging:
    def __init__(self, error):
        self.error = error

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise self.error


@pytest.mark.parametrize("what", ["extra", "ema", "scheduler"])
def test_an_object_that_does_not_take_its_state_is_named_and_its_own_error_kept(tmp_path, what):
    error = KeyError("ticks")
    objects = {"extra": {"extra": {"clock": Grudging(error)}}, "ema": {"ema": Grudging(error)}}
    objects["scheduler"] = {"scheduler": Grudging(error)}
    manager = CheckpointManager(model=torch.nn.Linear(1, 1), storage=tmp_path, **objects[what])
    manager.resume()
    manager.save()
    name = {"extra": r"extra\['clock'\]", "ema": "ema", "scheduler": r"scheduler\.0"}[what]
    with pytest.raises(errors.StateMismatch, match=rf"^{name} does not take .* KeyError: 'ticks'") as caught:
        CheckpointManager(model=torch.nn.Linear(1, 1), storage=tmp_path, **objects[what]).resume()
    assert caught.value.__cause__ is error
