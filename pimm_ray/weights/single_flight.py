"""One process of a node works, the others wait for what it did: no collective, so that nothing can time out."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pimm_ray.errors import WeightsError

logger = logging.getLogger(__name__)

_SAY_EVERY = 10.0
_POLL = 0.05


@contextlib.contextmanager
def single_flight(key: str, what: str) -> Iterator[None]:
    """Hold the node's lock for `key`. Who waited for it looks first whether the work is done.

    The lock is a file of this machine, wherever the work's result goes: on network filesystems locks may do nothing. It
    falls with its process, so that the next one goes on where a killed one was. The error of the one that worked is
    that of all who waited meanwhile: they do not try again one after the other.

    Args:
        key: what is worked on, the same in all processes.
        what: for people who wait.

    Raises:
        WeightsError: the process that was waited for failed, with its words.
    """
    began = time.time()
    folder = Path(tempfile.gettempdir()) / f"pimm_ray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    failed = folder / f"{name}.failed"
    with open(folder / f"{name}.lock", "a") as lock:
        _acquire(lock, what)
        found = _read(failed)
        if found and found["time"] >= began:
            raise WeightsError(found["message"])
        try:
            yield
        except WeightsError as error:
            failed.write_text(json.dumps({"time": time.time(), "message": str(error)}))
            raise


def _acquire(lock: IO[str], what: str) -> None:
    said = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - said >= _SAY_EVERY:
                said = time.monotonic()
                logger.info("waiting for another process of this node to %s", what)
            time.sleep(_POLL)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(file.read_text())
        return {"time": float(said["time"]), "message": str(said["message"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
