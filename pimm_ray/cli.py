"""The command `pimm-ray`: checkpoints converted from and to pimm's format, and weights exported."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import time
from collections.abc import Sequence

from pimm_ray.checkpoint import pimm, pimm_write
from pimm_ray.checkpoint.find import candidates, check_marker, find_checkpoint, open_manifest
from pimm_ray.checkpoint.folder import Share, commit, prepare, read_document, read_rank, read_snapshot
from pimm_ray.checkpoint.layout import CheckpointName, FileEntry, Manifest
from pimm_ray.checkpoint.pimm_read import Adopted, Present, adopt
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    PimmRayError,
    StateMismatch,
    StorageError,
    WeightsError,
)

_FORMATS = ("pimm_ray", "pimm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 1 after one line on stderr (2, for a wrong use, exits itself).

    Args:
        arguments: words of the command line after the program's name; None takes those of this process.
    """
    parser = argparse.ArgumentParser(prog="pimm-ray", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "convert",
        help="a checkpoint of pimm to one of pimm_ray, or the other way",
        description="Convert a checkpoint: of pimm (model/last, model_last.pth, or the folder of a run) to one of "
        "pimm_ray, or the other way. Prints the path of what it made.",
    )
    command.add_argument("source", metavar="SOURCE", help="a checkpoint, or a run's folder for its newest good one")
    command.add_argument(
        "dest",
        metavar="DEST",
        help="where to make it, and where nothing is yet. For pimm_ray: a run's folder, or checkpoint_STEP-ATTEMPT-HEX "
        "in one; for pimm: such as exp/model/last",
    )
    command.add_argument("--to", choices=_FORMATS, help="the format of DEST (default: not that of SOURCE)")
    command.add_argument(
        "--iterations-per-epoch",
        type=int,
        metavar="N",
        help="of the run that saved SOURCE; only the oldest checkpoints of pimm do not tell their steps without it",
    )
    command.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read SOURCE by pickle, which runs whatever code it holds: only if you trust whoever wrote it",
    )
    command.set_defaults(run=_convert)
    command = commands.add_parser(
        "export",
        help="weights as a folder that safetensors, transformers and the Hub take",
        description="Write the weights of SOURCE as config.json and model.safetensors. Prints the path of the folder.",
    )
    command.add_argument("source", metavar="SOURCE", help="a checkpoint, run, file, folder or hf:// address")
    command.add_argument("dest", metavar="DEST", help="a folder that is not there yet")
    command.add_argument("--dtype", help="of the floating-point tensors, such as bfloat16 (default: their own)")
    command.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a file (default: %(default)s)")
    command.add_argument("--config", metavar="FILE", help="JSON for config.json (default: that of SOURCE)")
    command.add_argument("--push-to", metavar="ORG/NAME", help="also push it to this repository on the Hub")
    command.set_defaults(run=_export)
    words = parser.parse_args(arguments)
    try:
        print(words.run(words))
    except (PimmRayError, OSError) as error:
        said = " ".join(str(error).split())
        print(f"pimm-ray: {type(error).__name__}: {said}", file=sys.stderr)
        return 1
    return 0


def _convert(words: argparse.Namespace) -> str:
    made, notes = convert(
        words.source,
        words.dest,
        to=words.to,
        iterations=words.iterations_per_epoch,
        allow_pickle=words.allow_pickle,
    )
    for note in notes:
        print(f"pimm-ray: {note}", file=sys.stderr)
    return made


def _export(words: argparse.Namespace) -> str:
    from pimm_ray.weights.export import export_weights

    config = None
    if words.config:
        try:
            with open(words.config, encoding="utf-8") as file:
                config = json.load(file)
        except ValueError as error:
            raise WeightsError(f"--config {words.config} is not JSON: {error}") from None
    made = export_weights(
        words.source,
        words.dest,
        dtype=words.dtype,
        max_shard_size=words.max_shard_size,
        config=config,
        push_to=words.push_to,
    )
    return str(made)


def convert(
    source: str, dest: str, *, to: str | None = None, iterations: int | None = None, allow_pickle: bool = False
) -> tuple[str, list[str]]:
    """Make one checkpoint of another. Returns its path, and what was lost or assumed on the way.

    Args:
        source: path or URI of a checkpoint of either kind, or of a run.
        dest: path, or for pimm_ray a URI, where nothing is yet.
        to: "pimm" or "pimm_ray"; None means the other kind.
        iterations: micro-batches of an epoch on each rank, for checkpoints that do not tell.
        allow_pickle: as of `checkpoint.legacy.load_file`.

    Raises:
        PimmRayError, OSError: `source` is not good, or `dest` is there already or cannot be written.
    """
    from_store, to_store = open_store(source), open_store(dest)
    if to_store.exists():
        raise StorageError(f"{to_store.path} is there already: give a place where nothing is yet")
    of_pimm = pimm.locate(from_store)
    if of_pimm:
        present = Present(iterations=iterations)
        payload = pimm.read_payload(of_pimm, allow_pickle=allow_pickle)
        adopted = adopt(payload, of_pimm.path, present, allow_pickle=allow_pickle)
    else:
        adopted = _read(from_store)
    if to == "pimm" or (to is None and not of_pimm):
        if not isinstance(to_store, LocalStore):
            raise StorageError(f"{to_store.path} is not on a local disk, where pimm's checkpoints are: give a path")
        notes = pimm_write.write(to_store.path, adopted.head, adopted.snapshot, adopted.ranks)
        return to_store.path, [*adopted.notes, *notes]
    return _write(to_store, adopted), adopted.notes


def _read(store: Store) -> Adopted:
    """The whole of a checkpoint of ours, every byte verified."""
    if candidates(store):
        newest = find_checkpoint(store)
        if newest is None:
            raise CheckpointNotFound(f"no checkpoint of the run in {store.path} is good")
        store = store.child(newest.name)
    reader = Reader(store, open_manifest(store)[1])
    document = read_document(reader)
    snapshot = read_snapshot(reader, document)
    ranks = [read_rank(reader, rank) for rank in range(reader.manifest.world_size)]
    if errors := reader.rest():
        raise errors[0]
    if problems := check_marker(reader, document):
        raise CorruptCheckpoint(f"{store.path} is damaged: {problems[0]}", file=problems[0].file)
    return Adopted.of(document, snapshot, ranks)


def _write(dest: Store, adopted: Adopted) -> str:
    """A checkpoint of ours, by the writer that every save uses."""
    step, world = adopted.head["step"], len(adopted.ranks)
    given = CheckpointName.parse(dest.path.rsplit("/", 1)[-1])
    name = given or CheckpointName.new(step, attempt=1)
    if name.step != step:
        raise StateMismatch(f"{dest.path} is named for step {name.step}, and the checkpoint is of step {step}")
    folder = dest if given else dest.child(str(name))
    id = secrets.token_hex(16)
    entries: list[FileEntry] = []
    try:
        prepare(folder)
        for rank, own in enumerate(adopted.ranks):
            share = Share(adopted.snapshot, own, rank=rank, world=world)
            entries += share.write(folder, id)
            entries += share.write_state(folder, id, adopted.head) if rank == 0 else []
        manifest = Manifest(
            id=id,
            parent=None,
            step=step,
            epoch=adopted.head["epoch"],
            attempt=name.attempt,
            world_size=world,
            created=time.time(),
            reason="convert",
            files=tuple(entries),
        )
        commit(folder, manifest)
    except BaseException:
        with contextlib.suppress(Exception):
            dest.remove()
        raise
    return folder.path


if __name__ == "__main__":
    sys.exit(main())
