"""Real processes for tests: forked from this one, joined in a gloo group, ended by SIGKILL where a test says so."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # An optimizer imports it, which takes a second: here once, not in every rank.
import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """How a rank ended: with a value, with an error (its traceback as text), or killed."""

    value: Any = None
    error: str | None = None
    kind: str | None = None
    killed: bool = False


def run_ranks(
    world: int, program: Callable[..., Any], *args: Any, timeout: float = 90, group: bool = True
) -> list[Any]:
    """`program(rank, *args)` in `world` processes; their return values by rank. Any failure fails the test."""
    outcomes = try_ranks(world, program, *args, timeout=timeout, group=group)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank} of {world}:\n{outcome.error}"
        assert not outcome.killed, f"rank {rank} of {world} was killed"
    return [outcome.value for outcome in outcomes]


def try_ranks(
    world: int, program: Callable[..., Any], *args: Any, timeout: float = 90, group: bool = True
) -> list[Outcome]:
    """As `run_ranks`, but failing and being killed are outcomes too. `group`: with torch.distributed even for one."""
    folder = tempfile.mkdtemp()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_child, args=(rank, world, folder, theirs, program, args, group))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    outcomes = [Outcome(killed=True) for _ in range(world)]
    deadline, waiting = time.monotonic() + timeout, dict(zip(pipes, range(world), strict=True))
    try:
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting.values())} of {world} did not end within {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    pass
    finally:
        end = time.monotonic() + 5
        for process in processes:
            # Not join(5): it waits until the loader workers of a killed rank are gone too.
            while process.is_alive() and time.monotonic() < end:
                time.sleep(0.002)
            if process.is_alive():
                process.kill()
                process.join()
    return outcomes


def die() -> None:
    """The rank's own end, without any clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def _child(
    rank: int, world: int, folder: str, pipe: Connection, program: Callable[..., Any], args: Any, group: bool
) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank))
    # A loader's workers outlive a killed rank by seconds: the pipe must not stay open in them.
    os.register_at_fork(after_in_child=pipe.close)
    try:
        if world > 1 or group:
            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        _send(pipe, Outcome(value=program(rank, *args)))
    except BaseException as error:
        _send(pipe, Outcome(error=traceback.format_exc(), kind=type(error).__name__))
    pipe.close()
    os._exit(0)


def _send(pipe: Connection, outcome: Outcome) -> None:
    # Plain pickle: multiprocessing's own would pass tensors as file descriptors of a process that is about to end.
    pipe.send_bytes(pickle.dumps(outcome))
