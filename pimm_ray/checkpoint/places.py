"""Where a path, a URI or a handle points to: a pyarrow filesystem and a path on it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from pimm_ray.errors import StorageError

_SECRETS = re.compile(r"(?<=://)[^/@]*@")


def locate(source: Any, filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """As `open_store`. `filesystem`, of pyarrow or fsspec, is the one that a plain path is on."""
    if filesystem is None and hasattr(source, "filesystem") and hasattr(source, "path"):
        source, filesystem = source.path, source.filesystem
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"{source!r} is not a path, a URI or a ray.train.Checkpoint")
    path = os.fspath(source)
    if not path:
        raise StorageError("the path is empty: is the environment variable set that it comes from?")
    if filesystem is None:
        filesystem, path = _of_uri(path) if "://" in path else _of_path(path)
    return _native(filesystem), path


def _of_path(path: str) -> tuple[pafs.FileSystem, str]:
    if found := re.match(r"([a-z][a-z0-9+.-]+):/", path):
        uri = f"{found[0]}/{path[found.end() :]}"
        raise StorageError(f"{path} was a URI before pathlib took a slash from it: give it as a string, {uri!r}")
    return pafs.LocalFileSystem(), str(Path(path).expanduser().absolute())


def _of_uri(uri: str) -> tuple[pafs.FileSystem, str]:
    shown = _SECRETS.sub("", uri)
    if uri.startswith("hf://"):
        raise StorageError(
            f"{shown}: the Hugging Face Hub holds weights only, no runs or checkpoints. To begin with its weights: "
            "resume(warm_start=WarmStart(...)) or load_weights; to resume: give a folder or bucket"
        )
    if uri.startswith("s3://"):
        # One request for a small file instead of three, and none of which a killed process leaves a part behind.
        uri += ("&" if "?" in uri else "?") + "allow_delayed_open=true"
    try:
        return pafs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        if "Unrecognized filesystem type" not in str(error):
            raise StorageError(f"cannot open {shown}: {_SECRETS.sub('', str(error))}") from None
    try:
        return pafs.FileSystem.from_uri(f"fsspec+{uri}")
    except Exception as error:  # whatever a driver raises, or that it is not installed
        raise StorageError(
            f"cannot open {shown}: pyarrow does not know such URIs, and fsspec says: {error}. Give a path, a URI that "
            "one of them knows (s3://, gs://, abfs://, file://), or an object with .filesystem and .path"
        ) from None


def _native(filesystem: Any) -> pafs.FileSystem:
    """A local disk as pyarrow's own, for what only a POSIX filesystem can do; what else is fsspec's, in an adapter."""
    adapted = isinstance(filesystem, pafs.PyFileSystem) and isinstance(filesystem.handler, pafs.FSSpecHandler)
    inner = filesystem.handler.fs if adapted else filesystem
    if isinstance(inner, pafs.FileSystem):
        return inner
    if not hasattr(inner, "protocol"):
        raise TypeError(f"{inner!r} is not a filesystem of pyarrow or fsspec")
    return pafs.LocalFileSystem() if "file" in inner.protocol else pafs.PyFileSystem(pafs.FSSpecHandler(inner))
