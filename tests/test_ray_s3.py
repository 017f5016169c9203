"""Real Ray on a real S3 server: two runs whose checkpoints are on no disk of this machine."""

import json

import pytest

from pimm_ray import find_checkpoint, verify_checkpoint
from tests.s3 import BUCKET, S3Server
from tests.test_ray_run import launch, notes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_a_run_on_s3_resumes_from_the_checkpoint_that_another_run_left_there(tmp_path):
    server = S3Server()
    server.filesystem(allow_bucket_creation=True).create_dir(BUCKET)
    log = tmp_path / "log"
    wait(launch("s3_job.py", tmp_path, server.endpoint, f"{BUCKET}/runs", log=log), log)
    results = json.loads((tmp_path / "results.json").read_text())
    for name, steps in (("first", 10), ("second", 20)):
        found = find_checkpoint(server.uri(f"{BUCKET}/runs/{name}"))
        assert (found.path, found.step) == (results[name], steps)
        assert verify_checkpoint(server.uri(found.path)) == []
    [start] = notes(tmp_path / "second.notes", event="start")
    assert start["step"] == 10 and start["source"] == results["first"]
    assert [line["step"] for line in notes(tmp_path / "second.notes", event="step")] == [*range(11, 21)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first.notes", "log", "results.json", "second.notes"]
