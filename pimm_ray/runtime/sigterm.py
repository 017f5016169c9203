"""SIGTERM outside Ray: noted instead of obeyed, so that the job can save first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any


class Sigterm:
    """Stands in for this process's handler of SIGTERM between `install()` and `restore()`. A handler of the user's own
    still runs, at once."""

    def __init__(self) -> None:
        self.seen = False
        self._process: int | None = None
        self._before: Any = signal.SIG_DFL

    def install(self) -> None:
        """Not outside the main thread, where Python forbids it; not where SIGTERM is ignored or handled by C code."""
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and before not in (signal.SIG_IGN, None):
            self._process, self._before = os.getpid(), before
            signal.signal(signal.SIGTERM, self._handle)

    def restore(self) -> None:
        """Put the handler of before back, unless another one has been set since."""
        if self._process == os.getpid() and signal.getsignal(signal.SIGTERM) == self._handle:
            with contextlib.suppress(ValueError):  # in another thread: then the handler itself does it
                signal.signal(signal.SIGTERM, self._before)
        self._process = None

    def _handle(self, number: int, frame: Any) -> None:
        if self._process != os.getpid() and signal.getsignal(number) == self._handle:
            # A forked process of the user's, or all is over: as if this handler were not there.
            signal.signal(number, self._before)
            os.kill(os.getpid(), number)
            return
        self.seen = True
        if callable(self._before):
            self._before(number, frame)
