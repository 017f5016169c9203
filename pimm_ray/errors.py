"""Everything pimm_ray raises on purpose. `PimmRayError` is the base; where a builtin fits, the error is one too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "CheckpointNotFound",
    "CheckpointVersionError",
    "CorruptCheckpoint",
    "DataChanged",
    "IncompleteCheckpoint",
    "PimmRayError",
    "RankMissing",
    "RemoteRankError",
    "RunInUse",
    "StateMismatch",
    "StorageError",
    "TrackerError",
    "UnsafeCheckpoint",
    "UnstorableState",
    "WeightsError",
    "WorldSizeError",
]


class PimmRayError(Exception):
    """Base of all errors of this package. `.rank` is the rank that raised it first, where that was another one."""

    rank: int | None = None


class CheckpointNotFound(PimmRayError, FileNotFoundError):
    """An explicitly named checkpoint does not exist."""


class IncompleteCheckpoint(PimmRayError):
    """The folder exists but holds no valid `.complete`: its save never finished."""


class CorruptCheckpoint(PimmRayError):
    """Bytes on disk are not the bytes that were saved. `.file`, `.expected` and `.found` say where, `.kind` is that of
    a `Problem`."""

    def __init__(
        self, message: str, *, file: str = "", kind: str = "format", expected: object = None, found: object = None
    ):
        super().__init__(message)
        self.file, self.kind, self.expected, self.found = file, kind, expected, found


class UnsafeCheckpoint(PimmRayError):
    """Reading this would need pickle, or it names a path outside its own folder."""


class UnstorableState(PimmRayError, TypeError):
    """A leaf of the state cannot be stored without pickle. `.key` is its path."""

    def __init__(self, message: str, *, key: str = ""):
        super().__init__(message)
        self.key = key


class CheckpointVersionError(PimmRayError):
    """The checkpoint's schema or version is not one this release reads."""


class StateMismatch(PimmRayError):
    """The checkpoint does not fit the objects to be restored. `.missing`, `.unexpected`, `.shapes` hold leaf paths."""

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        shapes: Mapping[str, object] | None = None,
    ):
        super().__init__(message)
        self.missing, self.unexpected, self.shapes = list(missing), list(unexpected), dict(shapes or {})


class StorageError(PimmRayError, OSError):
    """Reading or writing the storage failed. `.file` is the checkpoint's file, where that is known."""

    file: str = ""


class TrackerError(PimmRayError, ValueError):
    """A tracker cannot go on with its run before a setting is given, which the message names."""


class RunInUse(PimmRayError, RuntimeError):
    """Another live job writes into this run folder, or has taken it over. `.path`, `.host` and `.pid` say which."""

    def __init__(self, message: str, *, path: str = "", host: str = "", pid: int = 0):
        super().__init__(message)
        self.path, self.host, self.pid = path, host, pid


class WorldSizeError(PimmRayError, ValueError):
    """The number of workers changed and the policy says to fail."""


class DataChanged(PimmRayError, ValueError):
    """The data set or its loader changed and the policy says to fail."""


class WeightsError(PimmRayError, ValueError):
    """An address or file of weights cannot be used, or nothing in it fits the model."""


class RankMissing(PimmRayError, TimeoutError):
    """One or more ranks did not come to a point that all must reach. `.ranks` names them."""

    def __init__(self, message: str, *, ranks: Iterable[int] = ()):
        super().__init__(message)
        self.ranks = list(ranks)


class RemoteRankError(PimmRayError, RuntimeError):
    """Another rank failed with an error that is not one of ours; the text quotes it."""
