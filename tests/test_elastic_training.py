"""Training on an ElasticLoader with real gloo ranks, loader workers and SIGKILL, against the run that was never killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.loader_jobs import Job, Kill, assert_same, broken


def random_run(seed: int) -> tuple[Job, list[tuple[int, Kill]], int]:
    """A job, attempts that are killed, and the number of ranks that finish it."""
    draw = random.Random(seed)
    length = draw.randint(30, 60)
    job = Job(
        length=length,
        batch=draw.randint(5, 13),
        micro=draw.choice([None, 2, 3]),
        tail=draw.choice(["drop", "even", "carry"]),
        workers=2,
        loader=(("order", draw.choice(["shuffle", "block", "sequential"])), ("block", 5)),
    )
    # A step is lost or two: the saves stand at even ones.
    kills = [Kill(at, draw.choice(["after", "before", "within"])) for at in (draw.randint(2, 4), draw.randint(5, 6))]
    return job, [(draw.randint(1, 4), kill) for kill in kills], draw.randint(1, 4)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_and_resized_at_random_is_the_run_that_never_was(tmp_path: Path, seed: int) -> None:
    job, attempts, last = random_run(seed)
    assert_same(job, tmp_path, broken(tmp_path, job, *attempts, last=last), len(attempts))
