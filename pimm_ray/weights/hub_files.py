"""Files of a repository on the Hub in Hugging Face's own cache: fetched in pieces that are kept, and compared."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants, get_session
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, tqdm  # type: ignore[attr-defined]

from pimm_ray.errors import WeightsError

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = 30.0
PAUSES = (1.0, 2.0, 4.0)
"""Seconds between tries of a request whose error may pass."""
_MAX_PAUSE = 60.0
_SAY_EVERY = 10.0
_CHUNK = 2**20
HTTP_ERROR: Any = hub_errors.HfHubHTTPError.__bases__[0]
"""httpx's base of errors, of whichever release the client uses."""


class Cut(OSError):
    """A reply ended too early. What came is kept, and the next try goes on from there."""


class Wrong(OSError):
    """What came is not what the repository holds. It was thrown away."""


@dataclass(frozen=True)
class Wanted:
    """A file of a repository: its path there, its bytes, and its digest as git (40) or git-lfs (64 digits) has it."""

    name: str
    size: int | None = None
    digest: str | None = None


class Cache:
    """The folder of one repository in Hugging Face's cache, in its layout: `refs/`, `blobs/` and `snapshots/`."""

    def __init__(self, repo: str):
        self.root = _root()
        self.folder = self.root / f"models--{repo.replace('/', '--')}"

    def place(self, commit: str, name: str) -> Path:
        return self.folder / "snapshots" / commit / name

    def has(self, commit: str, file: Wanted) -> bool:
        """Whether it is there, with its size, and not behind a link that leads out of the cache."""
        place = self.place(commit, file.name).resolve()
        inside = self.root.resolve() in place.parents
        return inside and place.is_file() and file.size in (None, place.stat().st_size)

    def commit_of(self, revision: str) -> str | None:
        """What the revision pointed to when it was last asked for."""
        try:
            return (self.folder / "refs" / revision).read_text().strip() or None
        except OSError:
            return None

    def listing(self, commit: str) -> dict[str, Wanted] | None:
        """What the repository holds at this commit, which never changes, if the Hub has told."""
        try:
            return {name: Wanted(**file) for name, file in json.loads(self._listing_of(commit).read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def snapshot(self, commit: str) -> dict[str, Wanted]:
        """What anybody has downloaded of this commit."""
        base = self.place(commit, "")
        names = (str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())
        return {name: Wanted(name) for name in names}

    def note(self, revision: str, commit: str, files: dict[str, Wanted]) -> None:
        """Keep what the Hub told."""
        _publish(self._listing_of(commit), json.dumps({name: asdict(file) for name, file in files.items()}))
        if revision != commit:
            _publish(self.folder / "refs" / revision, commit)

    def fetch(self, commit: str, file: Wanted, url: str) -> None:
        """Download one file, or go on where an earlier process ended.

        Raises:
            Cut, Wrong, HfHubHTTPError, ...: after some tries.
            WeightsError: the disk has no room for it.
        """
        blobs = self.folder / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        blob = blobs / (file.digest or hashlib.sha256(f"{commit}/{file.name}".encode()).hexdigest())
        if not (blob.is_file() and _is_whole(blob, file)):
            # A name of its own for each machine: several may share the cache, on a filesystem without locks.
            partial = blobs / f"{blob.name}.{re.sub('[^A-Za-z0-9-]', '-', socket.gethostname())}.incomplete"
            free = shutil.disk_usage(blobs).free + (partial.stat().st_size if partial.exists() else 0)
            if file.size is not None and free < file.size:
                room = f"{blobs} has room for {free} bytes, and {file.name} has {file.size}"
                raise WeightsError(f"{room}: make room, or set HF_HOME to another disk")
            best = [0]
            patiently(lambda: _continue(partial, file, url), goes_on=lambda: _has_grown(partial, best))
            os.replace(partial, blob)
        place = self.place(commit, file.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        link = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        link.symlink_to(os.path.relpath(blob, place.parent))
        os.replace(link, place)

    def _listing_of(self, commit: str) -> Path:
        return self.folder / ".pimm_ray" / f"{commit}.json"


def patiently(work: Callable[[], T], *, goes_on: Callable[[], bool] = lambda: False) -> T:
    """Try again where an error may pass; as long as `goes_on` says that tries get further, without end."""
    number = 0
    while True:
        try:
            return work()
        except Exception as error:
            number = 0 if goes_on() else number + 1
            if number > len(PAUSES) or not may_pass(error):
                raise
            pause = min(_MAX_PAUSE, max(PAUSES[max(0, number - 1)], _retry_after(error)))
            logger.warning("%s; trying again in %g s", " ".join(str(error).split()), pause)
            time.sleep(pause)


def may_pass(error: BaseException) -> bool:
    """Whether the same request may well succeed a moment later."""
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return False
    if (status := status_of(error)) is not None:
        return status >= 500 or status in (408, 429)
    return isinstance(error, (HTTP_ERROR, ConnectionError, TimeoutError, Cut, Wrong))


def status_of(error: BaseException) -> int | None:
    """Of the reply that the error is about."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _retry_after(error: Exception) -> float:
    try:
        return float(error.response.headers.get("Retry-After", 0))  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return 0.0


def _root() -> Path:
    """Hugging Face's own folder; `$MODEL_DIR/hub`, for all of this process, where none of its variables is set."""
    chosen = any(os.environ.get(name) for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"))
    if not chosen and (base := os.environ.get("MODEL_DIR")):
        constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"] = str(Path(base).expanduser() / "hub")
    return Path(constants.HF_HUB_CACHE)


def _continue(partial: Path, file: Wanted, url: str) -> None:
    """Append what is missing, and see that it is what the repository holds."""
    offset = partial.stat().st_size if partial.exists() else 0
    if file.size is not None and offset > file.size:
        partial.unlink()
        offset = 0
    if file.size is None or offset < file.size:
        _append(partial, offset, file, url)
    if not _is_whole(partial, file):
        partial.unlink()
        raise Wrong(f"{file.name} is not the file of its digest {file.digest}")


def _append(partial: Path, offset: int, file: Wanted, url: str) -> None:
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={offset}-"}
    if not offset:
        del headers["Range"]
    session: Any = get_session()
    with session.stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as reply:
        if reply.status_code == 416:
            partial.unlink()
            raise Cut(f"{file.name}: the Hub does not go on at byte {offset}")
        hf_raise_for_status(reply)
        goes_on = reply.status_code == 206
        length = reply.headers.get("Content-Length")
        total = int(length) + (offset if goes_on else 0) if length and length.isdecimal() else None
        if file.size is not None and total is not None and total != file.size:
            raise Wrong(f"{file.name} has {file.size} bytes and the reply {total}")
        with open(partial, "ab" if goes_on else "wb") as out, _Progress(file, offset if goes_on else 0) as progress:
            for chunk in reply.iter_bytes():
                out.write(chunk)
                progress.update(len(chunk))
            out.flush()
            os.fsync(out.fileno())
    size = partial.stat().st_size
    expected = file.size if file.size is not None else total
    if expected is not None and size < expected:
        raise Cut(f"{file.name}: the reply ended at {size} of {expected} bytes")


def _has_grown(partial: Path, best: list[int]) -> bool:
    size = partial.stat().st_size if partial.exists() else 0
    grown, best[0] = size > best[0], max(size, best[0])
    return grown


def _is_whole(path: Path, file: Wanted) -> bool:
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return False
    if file.digest is None:
        return True
    digest = hashlib.sha256() if len(file.digest) == 64 else hashlib.sha1(f"blob {size}\0".encode())
    with open(path, "rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == file.digest


def _publish(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.write_text(text)
    os.replace(partial, path)


class _Progress:
    """A bar on a terminal; in a log, a line each ten seconds."""

    def __init__(self, file: Wanted, offset: int):
        self._file, self._done, self._offset = file, offset, offset
        self._began = self._said = time.monotonic()
        self._bar = tqdm(total=file.size, initial=offset, unit="B", unit_scale=True, desc=file.name, disable=None)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if sys.stderr.isatty() or now - self._said < _SAY_EVERY:
            return
        self._said = now
        rate = (self._done - self._offset) / (now - self._began)
        line = f"{self._file.name}: {self._done / 1e6:.0f}"
        if self._file.size:
            left = (self._file.size - self._done) / max(rate, 1.0)
            line += f" of {self._file.size / 1e6:.0f} MB, {self._done / self._file.size:.0%}, ETA {left:.0f} s"
        else:
            line += " MB"
        logger.info("%s, %.1f MB/s", line, rate / 1e6)
