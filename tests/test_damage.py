"""Each damage of a checkpoint is said and passed over; what does no harm is not called a damage."""

import random
import shutil
from pathlib import Path

import pytest

from benchmarks.damage_matrix import DETECTED, FOREIGN, HARMLESS, Ours, content, damages, matrix, put
from pimm_ray import errors, find_checkpoint
from pimm_ray.checkpoint.layout import MARKER, STATE, CheckpointName, Manifest, rank_file, trainer_file
from tests.golden.make import NEWER, OLDER, committed, load, save
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """A run folder: the committed checkpoint, and one of an earlier step."""
    folder = tmp_path_factory.mktemp("damage")
    older = run_ranks(2, save, folder / "made", (OLDER,))[0][0]["path"]
    return Ours(folder / "run", older, committed(), width=5)


def test_every_damage_is_detected_and_foreign_files_do_no_harm(subject):
    counts = matrix(subject, flips=8)
    assert len(counts) == 11
    for kind, outcomes in counts.items():
        assert set(outcomes) == {HARMLESS if kind == FOREIGN else DETECTED}, kind


def test_a_flip_of_any_bit_of_a_marker_is_detected(subject):
    data = subject.newer[MARKER]
    assert Manifest.parse(data, path="").step == NEWER
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(errors.PimmRayError):
            Manifest.parse(bytes(flipped), path="")


@pytest.mark.parametrize("name", [MARKER, STATE, rank_file(1), trainer_file(0)])
def test_ranks_that_resume_together_pass_over_it_together(subject, name):
    put(subject.old_folder, subject.older)
    data = subject.newer[name]
    put(subject.folder, {**subject.newer, name: data[:-9] + bytes([data[-9] ^ 2]) + data[-8:]})
    for loaded in run_ranks(2, load, subject.run):
        assert loaded["source"] == subject.old_folder.name and loaded["facts"] == subject.old["facts"]


def test_a_checkpoint_whose_name_has_changed_is_never_taken_for_another_step(subject, tmp_path):
    put(tmp_path / subject.old_folder.name, subject.older)
    name = subject.folder.name
    outcomes = set()
    for at in range(len(name)):
        for bit in range(7):
            renamed = name[:at] + chr(ord(name[at]) ^ 1 << bit) + name[at + 1 :]
            if "/" in renamed or "\0" in renamed:
                continue
            put(tmp_path / renamed, subject.newer)
            found, parsed = find_checkpoint(tmp_path), CheckpointName.parse(renamed)
            if parsed and (parsed.step, parsed.attempt) == (NEWER, 1):
                assert found.name == renamed, "only its random part has changed"
            else:
                assert found.name == subject.old_folder.name
            outcomes.add(found.step)
            shutil.rmtree(tmp_path / renamed)
    assert outcomes == {OLDER, NEWER}


def test_a_damage_is_one_damage_and_leaves_the_original_alone(subject):
    before = dict(subject.newer)
    seen = list(damages(subject.newer, subject.older, 3, random.Random(0)))
    assert subject.newer == before == content(committed())
    for kind, name, files in seen:
        changed = {key for key in files.keys() | before.keys() if files.get(key) != before.get(key)}
        assert 1 <= len(changed) <= 2 and all(Path(key).name in name for key in changed), (kind, name)
