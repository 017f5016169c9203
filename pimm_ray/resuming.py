"""Which checkpoint a run goes on from: looked for by rank 0, read and verified by all ranks."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from typing import Any

import xxhash

from pimm_ray.checkpoint import pimm
from pimm_ray.checkpoint.find import CheckpointInfo, Problem, candidates, check_marker, check_sizes, open_manifest
from pimm_ray.checkpoint.folder import open_rank, read_document, read_rank, read_snapshot
from pimm_ray.checkpoint.layout import DAMAGED, CheckpointName
from pimm_ray.checkpoint.pimm_read import Adopted, Present, adopt
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.state import Snapshot
from pimm_ray.checkpoint.store import Store, open_store
from pimm_ray.errors import CorruptCheckpoint, PimmRayError, StorageError
from pimm_ray.runtime.base import Runtime

logger = logging.getLogger(__name__)

VISIBLE_WITHIN = 5.0
"""Seconds within which what rank 0 sees in the storage must be seen by every rank."""
_PAUSE = 0.1
_UNSEEN = ("incomplete", "missing")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint as one rank has read it. Every byte that it holds was proven by this rank itself, every other byte
    of the checkpoint by some rank."""

    info: CheckpointInfo
    document: dict[str, Any]
    rank_state: dict[str, Any]
    """What this rank stored of its own; what rank 0 did, for a rank that is new."""
    read_rank: Callable[[int], dict[str, Any]]
    """Reads what any rank stored of its own."""
    snapshot: Snapshot


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The checkpoint to resume from, or none, and what a run must know of its folder."""

    contents: Contents | None = None
    own: bool = False
    """Whether it is one of this run's, not a given one."""
    attempt: int = 1
    damaged: frozenset[str] = field(default_factory=frozenset)
    """Names of this run's folders that were passed over although their saves had finished, or that an attempt before
    left a note in. They stay."""
    notes: tuple[str, ...] = ()

    @property
    def info(self) -> CheckpointInfo | None:
        return self.contents.info if self.contents else None


def choose(runtime: Runtime, given: Any, present: Callable[[], Present] = Present) -> Choice:
    """Newest good checkpoint of this run, else the given one, else none. Who calls it: every rank.

    Says in one line what was passed over, and leaves a note in the folder of what is damaged. `present`: what this rank
    knows of the run, for checkpoints that do not tell it.

    Raises:
        CheckpointNotFound, IncompleteCheckpoint, CorruptCheckpoint, ...: the given one would be used and is not good.
        StorageError: this run has checkpoints, but the storage cannot read them.
    """

    def listing(_: Any) -> dict[str, Any]:
        names = candidates(runtime.store)
        attempts = [parsed.attempt for name in names if (parsed := CheckpointName.parse(name))]
        noted = [name for name in names if runtime.store.child(name).exists(DAMAGED)]
        return {"names": names, "attempt": 1 + max(attempts, default=0), "noted": noted}

    found = runtime.exchange("resume: list the run folder", None, listing)
    contents, own, say, passed = None, False, runtime.rank == 0, dict[str, Problem]()
    foreign: list[str] = []
    damaged = set(found["noted"])
    for name in found["names"]:
        store = runtime.store.child(name)
        result = _read(runtime, store)
        if isinstance(result, Contents):
            contents, own = result, True
            if name in damaged and say:
                _change_note(store, None)
            damaged.discard(name)
            if given is not None and say:
                named = getattr(given, "path", given)
                logger.info("the given checkpoint %s is not used: this run has one of its own", named)
            break
        if say:
            logger.warning("passed over %s: %s", name, result)
        if result.is_damage and say and name not in damaged:
            _change_note(store, result)
        if result.kind != "incomplete":
            passed[name] = result
            damaged.add(name)
    if found["names"] and not own and say:
        number = len(found["names"])
        logger.warning("found nothing usable among the %d checkpoint folders of %s", number, runtime.store.path)
    unreadable = [name for name, problem in passed.items() if problem.kind == "unreadable"]
    if contents is None and unreadable:  # what cannot be read now may be good: never begin anew beside it
        raise StorageError(
            f"{len(unreadable)} checkpoints of {runtime.store.path} cannot be read, and none is good: "
            f"{unreadable[0]}: {passed[unreadable[0]]}. Start again when the storage is well, or give this run another "
            "name or storage"
        )
    if contents is None and given is not None:
        contents, foreign = _read_given(runtime, open_store(given), present)
    notes = (*_loss(passed, contents.info.step if contents else 0), *foreign)
    for note in notes if say else ():
        logger.warning(note)
    return Choice(contents=contents, own=own, attempt=found["attempt"], damaged=frozenset(damaged), notes=notes)


def _read(runtime: Runtime, store: Store) -> Contents | Problem:
    """A checkpoint, read by every rank, or the first thing wrong with it: then the same on every rank."""

    def look(_: Any) -> list[Any] | None:
        try:
            problems = check_sizes(store, open_manifest(store)[1])
        except (PimmRayError, OSError) as error:
            problems = [Problem.of(error)]
        return list(astuple(problems[0])) if problems else None

    found = runtime.exchange(f"resume: look at {store.path}", None, look)
    if found is not None:
        return Problem(*found)
    results: list[Contents] = []

    def read() -> list[Any]:
        result, deadline = _read_own(runtime, store), time.monotonic() + VISIBLE_WITHIN
        while isinstance(result, Problem) and result.kind in _UNSEEN and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            result = _read_own(runtime, store)
        if isinstance(result, Problem):
            return list(astuple(result))
        results.append(result)
        return [result.info.id]

    told = runtime.agree(f"resume: read {store.path}", read)
    problems = {rank: Problem(*said) for rank, said in enumerate(told) if len(said) > 1}
    blind = [rank for rank, problem in problems.items() if problem.kind in _UNSEEN]
    if blind and blind[0]:
        raise StorageError(
            f"ranks {blind} cannot open {store.path}, which rank 0 has opened: is the storage shared by all nodes? "
            f"({problems[blind[0]]})"
        )
    if problems:
        return next(iter(problems.values()))
    if told.count(told[0]) < len(told):
        raise StorageError(f"ranks see different checkpoints at {store.path}: is the storage shared by all nodes?")
    return results[0]


def _read_own(runtime: Runtime, store: Store) -> Contents | Problem:
    """What one rank needs of a checkpoint, and its share of what no rank needs."""
    try:
        info, manifest = open_manifest(store)
    except (PimmRayError, OSError) as error:
        return Problem.of(error)
    reader, rank, world = Reader(store, manifest), runtime.rank, runtime.world_size
    try:
        document = read_document(reader)
        if problems := check_marker(reader, document):
            return problems[0]
        own = read_rank(reader, rank if rank < manifest.world_size else 0)
        for other in range(rank + world, manifest.world_size, world):
            open_rank(reader, other)
        contents = Contents(
            info=info,
            document=document,
            rank_state=own,
            read_rank=partial(read_rank, reader),
            snapshot=read_snapshot(reader, document),
        )
        if errors := reader.rest(part=rank, parts=world):
            raise errors[0]
    except Exception as error:
        return _explain(reader, error)
    return contents


def _explain(reader: Reader, error: Exception) -> Problem:
    """What an error in reading says of a checkpoint. Bytes that make no sense may be damaged ones: then that is it."""
    if not isinstance(error, StorageError):
        errors = reader.rest()
        if errors:
            return Problem.of(errors[0])
    if not isinstance(error, PimmRayError | OSError):
        raise error
    return Problem.of(error)


def _read_given(runtime: Runtime, store: Store, present: Callable[[], Present]) -> tuple[Contents, list[str]]:
    """Also what a checkpoint of another program could not tell."""
    found = runtime.exchange(
        f"resume: look for a checkpoint of pimm at {store.path}", None, partial(_path_of_pimm, store)
    )
    if found is not None:
        return _read_pimm(runtime, store.at(found), present)
    runtime.exchange(f"resume: open {store.path}", None, lambda _: open_manifest(store)[0].id)
    result = _read(runtime, store)
    if isinstance(result, Contents):
        return result, []
    if not result.is_damage:
        raise StorageError(f"cannot read the checkpoint to resume from, {store.path}: {result}")
    raise CorruptCheckpoint(
        f"the checkpoint to resume from, {store.path}, is damaged: {result}. Use another",
        file=result.file,
        kind=result.kind,
        expected=result.expected,
        found=result.found,
    )


def _path_of_pimm(store: Store, _: Any) -> str | None:
    found = pimm.locate(store)
    return found.path if found else None


def _read_pimm(runtime: Runtime, store: Store, present: Callable[[], Present]) -> tuple[Contents, list[str]]:
    def read() -> Adopted:
        return adopt(pimm.read_payload(store), store.path, present())

    adopted = runtime.each(f"resume: read {store.path}", read)
    info = CheckpointInfo(
        path=store.path,
        filesystem=store.filesystem,
        id=f"pimm-{xxhash.xxh3_64_hexdigest(json.dumps(adopted.document).encode())}",
        step=adopted.head["step"],
        epoch=adopted.head["epoch"],
        attempt=0,
        world_size=len(adopted.ranks),
        created=pimm.written_at(store),
        bytes=pimm.size_of(store),
        reason="pimm",
        parent=None,
    )
    if len(set(runtime.gather(f"resume: compare {store.path}", info.id))) > 1:
        raise StorageError(f"ranks see different checkpoints at {store.path}: is the storage shared by all nodes?")
    contents = Contents(
        info=info,
        document=adopted.document,
        rank_state=adopted.ranks[runtime.rank if runtime.rank < len(adopted.ranks) else 0],
        read_rank=adopted.ranks.__getitem__,
        snapshot=adopted.snapshot,
    )
    return contents, adopted.notes


def _loss(passed: dict[str, Problem], step: int) -> tuple[str, ...]:
    if not passed:
        return ()
    steps = max(parsed.step for name in passed if (parsed := CheckpointName.parse(name))) - step
    what = ", ".join(f"{name} ({problem.file}: {problem.kind})" for name, problem in passed.items())
    return (f"stepped back over {what}: {max(0, steps)} steps lost",)


def _change_note(store: Store, problem: Problem | None) -> None:
    """Leave a note in a damaged checkpoint, or take one away. Nothing that is offered or read depends on it."""
    try:
        if problem is None:
            store.delete_file(DAMAGED)
        else:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            store.publish(DAMAGED, json.dumps({**asdict(problem), "when": when}, indent=1).encode())
    except (PimmRayError, OSError) as error:
        logger.warning("could not change the note %s in %s: %s", DAMAGED, store.path, error)
