"""Which checkpoint a run goes on from: chosen by rank 0, verified by all ranks, each its share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any

from pimm_ray.checkpoint.find import (
    CheckpointInfo,
    Problem,
    candidates,
    check_digests,
    check_marker,
    check_sizes,
    open_manifest,
)
from pimm_ray.checkpoint.layout import MARKER, CheckpointName, Manifest
from pimm_ray.checkpoint.store import Store, open_store
from pimm_ray.errors import CorruptCheckpoint, PimmRayError, StorageError
from pimm_ray.runtime.base import Runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The verified checkpoint to resume from, or none, and what a run must know of its folder."""

    store: Store | None = None
    info: CheckpointInfo | None = None
    manifest: Manifest | None = None
    own: bool = False
    """Whether it is one of this run's, not a given one."""
    attempt: int = 1
    damaged: frozenset[str] = field(default_factory=frozenset)
    """Names of this run's newer folders that were passed over although their saves had finished. They stay."""


def choose(runtime: Runtime, given: Any) -> Choice:
    """Newest good checkpoint of this run, else the given one, else none. Who calls it: every rank.

    Says in one line what was passed over. Changes nothing in the folder.

    Raises:
        CheckpointNotFound, IncompleteCheckpoint, CorruptCheckpoint, ...: the given one would be used and is not good.
    """

    def listing(_: Any) -> dict[str, Any]:
        names = candidates(runtime.store)
        attempts = [parsed.attempt for name in names if (parsed := CheckpointName.parse(name))]
        return {"names": names, "attempt": 1 + max(attempts, default=0)}

    found = runtime.exchange("resume: list the run folder", None, listing)
    passed: list[str] = []
    damaged: list[str] = []
    for name in found["names"]:
        store = runtime.store.child(name)
        problem = _problem(runtime, store)
        if problem is None:
            info, manifest = _open(runtime, store)
            if given is not None and runtime.rank == 0:
                named = getattr(given, "path", given)
                logger.info("the given checkpoint %s is not used: this run has one of its own", named)
            return Choice(
                store=store,
                info=info,
                manifest=manifest,
                own=True,
                attempt=found["attempt"],
                damaged=frozenset(damaged),
            )
        passed.append(name)
        if problem.kind != "incomplete":
            damaged.append(name)
        if runtime.rank == 0:
            logger.warning("passed over %s: %s", name, problem)
    if passed and runtime.rank == 0:
        logger.warning("found nothing usable among the %d checkpoint folders of %s", len(passed), runtime.store.path)
    if given is None:
        return Choice(attempt=found["attempt"], damaged=frozenset(damaged))
    store = open_store(given)
    info, manifest = _open(runtime, store)
    problem = _problem(runtime, store)
    if problem is not None:
        raise CorruptCheckpoint(
            f"the checkpoint to resume from, {store.path}, is damaged: {problem}. Use another",
            file=problem.file,
            expected=problem.expected,
            found=problem.found,
        )
    return Choice(store=store, info=info, manifest=manifest, attempt=found["attempt"], damaged=frozenset(damaged))


def _problem(runtime: Runtime, store: Store) -> Problem | None:
    """The first thing wrong with a candidate, found by all ranks together; the same answer on every rank."""

    def first(check: Callable[[Manifest], list[Problem]]) -> list[Any] | None:
        try:
            problems = check(open_manifest(store)[1])
        except (PimmRayError, OSError) as error:
            problems = [Problem.of(error)]
        return list(astuple(problems[0])) if problems else None

    found = runtime.exchange(
        f"resume: look at {store.path}", None, lambda _: first(lambda manifest: check_sizes(store, manifest))
    )
    if found is None:
        part, parts = runtime.rank, runtime.world_size
        own = first(lambda manifest: check_digests(store, manifest, part=part, parts=parts))
        shares = runtime.gather(f"resume: verify {store.path}", own)
        blind = [rank for rank, share in enumerate(shares) if share and share[0] == MARKER]
        if blind:
            raise StorageError(
                f"ranks {blind} cannot open {store.path}, which rank 0 has opened: is the storage shared by all nodes? "
                f"({shares[blind[0]][-1]})"
            )
        found = next((share for share in shares if share), None)
    if found is None:  # a marker that is damaged itself: nothing else holds its digest
        found = runtime.exchange(
            f"resume: compare {store.path}", None, lambda _: first(lambda manifest: check_marker(store, manifest))
        )
    return Problem(*found) if found else None


def _open(runtime: Runtime, store: Store) -> tuple[CheckpointInfo, Manifest]:
    """The manifest, by every rank; all have read the same one."""
    info, manifest = runtime.each(f"resume: open {store.path}", lambda: open_manifest(store))
    if len(set(runtime.gather(f"resume: id of {store.path}", info.id))) > 1:
        raise StorageError(f"ranks see different checkpoints at {store.path}: is the storage shared by all nodes?")
    return info, manifest
