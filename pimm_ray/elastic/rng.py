"""Random streams of one rank: captured, restored, and derived anew for ranks that did not exist before."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pimm_ray.errors import StateMismatch


def capture(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """The state of this process's python, numpy and torch streams (CPU, and the current CUDA device when CUDA is in
    use) and of the given generators, as plain data and tensors. Draws nothing."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "generators": {name: generator.get_state() for name, generator in (generators or {}).items()},
    }


def restore(state: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Continue the streams where `capture` saw them. Generators without a saved state are left alone."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    restore_generators(state, generators or {})


def restore_generators(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """The part of `restore` that concerns generators only."""
    for name, generator in generators.items():
        if (saved := state["generators"].get(name)) is None:
            continue
        if saved.shape != generator.get_state().shape:
            raise StateMismatch(f"the saved state of the generator of {name} is of another device's: make it as it was")
        generator.set_state(saved)


def derive(seed: int, rank: int, generation: int) -> None:
    """Start streams for a rank that has none: a function of (seed, rank, generation), unlike any other's.

    Follows numpy's SeedSequence spawning.
    """
    words = np.random.SeedSequence(entropy=abs(seed), spawn_key=(rank, generation)).generate_state(8)
    random.seed(int.from_bytes(words[:4].tobytes(), "little"))
    np.random.seed(words[4:6])
    torch.manual_seed(int(words[6]) << 32 | int(words[7]))


def reseeded(seed: int, epoch: int, drops: int) -> int:
    """Seed of a sampler's generator in an epoch that was restarted `drops` times: equal on all ranks."""
    words = np.random.SeedSequence(entropy=abs(seed), spawn_key=(epoch, drops)).generate_state(2)
    return int(words[0]) << 32 | int(words[1])
