"""Which files of a local folder are its own: plain ones, and links that do not lead out of it.

Pyarrow's listing goes through links to folders: anywhere, and for ever when two of them lead in a circle. A pipe that
is opened to be read waits for a writer. What is refused here was put there by others: nothing of ours is a link.
"""

from __future__ import annotations

import os

from pimm_ray.errors import UnsafeCheckpoint


def own_files(folder: str) -> dict[str, int]:
    """Sizes in bytes by path in `folder`, through no link to a folder; empty when there is no folder."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    paths = [os.path.join(at, name) for at, _, names in os.walk(folder, onerror=refuse) for name in names]
    own = [path for path in paths if (not os.path.islink(path) and os.path.isfile(path)) or is_own(folder, path)]
    return {os.path.relpath(path, folder): os.stat(path).st_size for path in own}


def is_own(folder: str, path: str) -> bool:
    """Whether `path` leads to a plain file in `folder`, whatever links it goes through."""
    root = _home(os.path.realpath(folder).rstrip("/"))
    return os.path.isfile(path) and os.path.realpath(path).startswith(f"{root}/")


def require_own(folder: str, path: str) -> None:
    """Raises UnsafeCheckpoint for what is there and is no own file. Without this, opening it could leave the folder."""
    if not is_own(folder, path) and os.path.lexists(path):  # in this order: another process may be deleting it
        raise UnsafeCheckpoint(f"{path} is a link out of its folder, or no plain file: put a copy of the file there")


def _home(folder: str) -> str:
    """Where links of `folder` may lead: into it. In Hugging Face's cache, where `models--org--name/snapshots/<commit>`
    is nothing but links to the files, into that cache."""
    repository, inside, _ = f"{folder}/".partition("/snapshots/")
    return os.path.dirname(repository) if inside and os.path.basename(repository).startswith("models--") else folder
