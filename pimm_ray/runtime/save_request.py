"""A save that Ray's controller asks of the training loop before it stops the workers to start more of them.

The controller runs `ask` in the process of rank 0, in another thread than the loop's.
"""

from __future__ import annotations

import threading
from typing import Literal

HOLD_SECONDS = 30.0
"""How long the loop waits for the restart that it saved for. A controller that is alive takes one poll."""

_listening, _wanted, _saved, _withdrawn = (threading.Event() for _ in range(4))

State = Literal["deaf", "waiting", "saved"]


def listen() -> None:
    """The loop of this process reads the request."""
    _listening.set()


def ask(wanted: bool) -> State:
    """Ask for a save, or take that back; says how far it has come. "deaf": no `CheckpointManager` reads it here."""
    if not wanted:
        _withdrawn.set()
        _wanted.clear()
        _saved.clear()
    elif not _wanted.is_set():
        _withdrawn.clear()
        _wanted.set()
    return "saved" if _saved.is_set() else "waiting" if _listening.is_set() else "deaf"


def wanted() -> bool:
    """Whether a save is asked for. The loop of rank 0 asks after each step."""
    return _wanted.is_set()


def hold() -> None:
    """Rank 0, with the save complete: wait to be stopped. Steps made now would be made again."""
    if _wanted.is_set():
        _saved.set()
        _withdrawn.wait(HOLD_SECONDS)
        ask(False)
