"""Anyone's weights as a folder in Hugging Face's layout, which stock tools open and the Hub takes."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, split_state_dict_into_shards_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from pimm_ray.checkpoint.layout import CheckpointName
from pimm_ray.checkpoint.shards import Piece, Spec, write_shard
from pimm_ray.checkpoint.store import LocalStore, open_store
from pimm_ray.errors import StorageError, WeightsError
from pimm_ray.weights.source import Weights, open_weights

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_README = "README.md"
_AHEAD = 64 * 2**20
"""Bytes read at once."""
_CARD = """\
---
tags: [pytorch, safetensors]
---
# {title}

{tensors} tensors, {parameters:,} numbers, exported by pimm_ray from `{origin}`.

```python
from pimm_ray import load_weights

load_weights(model, "hf://{repo}")
```
"""


def export_weights(
    source: Any,
    dest: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    config: Mapping[str, Any] | None = None,
    push_to: str | None = None,
) -> Path:
    """Write weights as `config.json` and `model.safetensors`, or parts of it with their index. One process calls it.

    Tensors pass through memory some at a time. Nobody sees the folder before it is whole. A tensor with several names
    is written once; the others stand in the file's metadata, where `load_weights` finds them.

    Args:
        source: as of `load_weights`: a checkpoint, a run, a file, a folder, or `hf://repo[@revision][/file]`.
        dest: a local folder that is not there yet.
        dtype: of the floating-point tensors, such as `torch.bfloat16` or "bfloat16"; None leaves each its own.
        max_shard_size: of a file, in bytes or such as "500MB".
        config: for `config.json`; None takes that of the source, and where it has none there will be none.
        push_to: `org/name` on the Hub, which also gets a model card. A repository that is not there is made, public or
            private as the account says.

    Returns:
        The folder.

    Raises:
        CheckpointNotFound, CorruptCheckpoint, ...: of the source, as `load_weights`.
        StorageError: `dest` is there already, is not local, or cannot be written: nothing is left of it.
        WeightsError: `dtype`, `max_shard_size` or `push_to` cannot be used, or the Hub refused; then `dest` is whole.

    Example:
        >>> export_weights("runs/demo", "exported", dtype="bfloat16", push_to="org/demo")
        PosixPath('exported')
    """
    wanted, limit = _dtype(dtype), _shard_bytes(max_shard_size)
    if "://" in os.fspath(dest):
        raise StorageError(f"{os.fspath(dest)} is not on a local disk: export to a folder here, and copy that")
    target = open_store(Path(dest))
    assert isinstance(target, LocalStore)
    if target.exists() and (target.files() or target.folders()):
        raise StorageError(f"{target.path} is there already: give a place where nothing is yet")
    weights = open_weights(source)
    if push_to is not None:
        _make_repository(push_to)  # before the work, as most refusals come here
    _write(weights, target, wanted, limit, weights.config if config is None else dict(config))
    logger.info("exported %d tensors of %s to %s", len(weights.entries), weights.origin, target.path)
    if push_to is not None:
        _push(target, weights, push_to)
    return Path(target.path)


class _Tensors(Mapping[str, torch.Tensor]):
    """Read when they are asked for, together with those that come next in the file that is written."""

    def __init__(self, weights: Weights, specs: list[Spec]):
        self._weights = weights
        self._dtypes = {spec.key: spec.dtype for spec in specs}
        self._order = [spec.key for spec in specs]
        self._held: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._held:
            self._held = {}
            for batch in self._weights.read(self._next(name)):
                self._held |= batch
        return self._held[name].to(self._dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def _next(self, name: str) -> list[str]:
        found, room = [name], _AHEAD - self._weights.entries[name].bytes
        for other in self._order[self._order.index(name) + 1 :]:
            room -= self._weights.entries[other].bytes
            if room < 0:
                break
            found.append(other)
        return found


def _write(
    weights: Weights, target: LocalStore, dtype: torch.dtype | None, limit: int, config: dict[str, Any] | None
) -> None:
    specs = {
        name: spec._replace(dtype=dtype) if dtype and spec.dtype.is_floating_point else spec
        for name, spec in sorted(weights.entries.items())
        if name not in weights.aliases
    }
    if not specs:
        raise WeightsError(f"{weights.origin} holds no tensors: there is nothing to export")
    split = split_state_dict_into_shards_factory(
        specs, get_storage_size=_bytes, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    partial = target.at(f"{target.path}.partial-{secrets.token_hex(4)}")
    try:
        partial.make()
        for file, names in split.filename_to_tensors.items():
            pieces = sorted(Piece(specs[name], -1, 0, 1) for name in names)
            held = {name: to for name, to in weights.aliases.items() if to in names}
            ordered = sorted((specs[name] for name in names), key=lambda spec: (-spec.dtype.itemsize, spec.key))
            write_shard(partial, file, pieces, _Tensors(weights, ordered), {"format": "pt", **held})
        if split.is_sharded:
            size = sum(spec.bytes for spec in specs.values())
            index = {"metadata": {"total_size": size}, "weight_map": split.tensor_to_filename}
            partial.publish(_INDEX, json.dumps(index, indent=2).encode())
        if config is not None:
            if dtype:
                said = {"torch_dtype", "dtype"} & config.keys()
                config = {**config, **dict.fromkeys(said, str(dtype).removeprefix("torch."))}
            partial.publish("config.json", json.dumps(config, indent=2).encode())
        partial.sync()
        if target.exists():
            target.remove()
        os.rename(partial.path, target.path)
    except BaseException as error:
        shutil.rmtree(partial.path, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"cannot write {target.path}: {error}") from error
        raise


def _bytes(spec: Spec) -> int:
    return spec.bytes


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise WeightsError(f"dtype={dtype!r} is no floating-point type of torch: give such as torch.bfloat16 or 'bfloat16'")


def _shard_bytes(size: int | str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    text = str(size).strip().upper()
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        found = int(float(text.removesuffix(unit)) * units.get(unit, 1))
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise WeightsError(f"max_shard_size={size!r} is no size: give bytes, or such as '500MB' or '5GB'")
    return found


def _make_repository(repo: str) -> None:
    try:
        HfApi().create_repo(repo, exist_ok=True)
    except HFValidationError as error:
        raise WeightsError(f"push_to={repo!r} is no repository: give org/name ({error})") from None
    except (HfHubHTTPError, OSError) as error:
        raise _refused(repo, error, "nothing is exported") from error


def _push(folder: LocalStore, weights: Weights, repo: str) -> None:
    numbers = sum(
        spec.bytes // spec.dtype.itemsize for name, spec in weights.entries.items() if name not in weights.aliases
    )
    card = _CARD.format(
        title=repo.rpartition("/")[2],
        tensors=len(weights.entries),
        parameters=numbers,
        origin=_told(weights.origin),
        repo=repo,
    )
    try:
        api = HfApi()
        described = api.file_exists(repo, _README)
        folder.publish(_README, card.encode())
        api.upload_folder(
            repo_id=repo,
            folder_path=folder.path,
            commit_message=f"Weights of {_told(weights.origin)}",
            ignore_patterns=[_README] if described else None,
            delete_patterns=["model*.safetensors", _INDEX],  # of an earlier push, in other parts
        )
    except (HfHubHTTPError, OSError) as error:
        raise _refused(repo, error, f"the export is whole in {folder.path}") from error
    logger.info("pushed %s to %s", folder.path, repo)


def _told(origin: str) -> str:
    """The source as others may see it: no path of this machine."""
    if origin.startswith("hf://"):
        return origin
    parts = [part for part in origin.rstrip("/").split("/") if part]
    return next((part for part in reversed(parts) if CheckpointName.parse(part)), parts[-1] if parts else origin)


def _refused(repo: str, error: Exception, left: str) -> WeightsError:
    return WeightsError(
        f"the Hub did not take {repo}: {' '.join(str(error).split())}; {left}. Set HF_TOKEN to a token that may write "
        f"there (or run `hf auth login`), check the name, and try again"
    )
