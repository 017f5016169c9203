"""The manager's world inside a Ray Train worker."""

from __future__ import annotations

import logging
import numbers
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from pimm_ray.checkpoint.find import CheckpointInfo, candidates, verify_checkpoint
from pimm_ray.checkpoint.layout import CheckpointName
from pimm_ray.checkpoint.store import LocalStore, open_store
from pimm_ray.errors import PimmRayError
from pimm_ray.runtime import crash_loop, ray_private, save_request
from pimm_ray.runtime.base import Notice, Runtime, show_messages
from pimm_ray.runtime.lease import Lease, Pass

logger = logging.getLogger(__name__)

_given: Any = None
"""What the trainer that started this worker was told to resume from."""
_owner: str | None = None
"""For whom that trainer holds the run folder; None under a trainer that is not ours."""
_progress: Any = None
"""Where the loop of this process stands; None before `CheckpointManager.resume()`."""


def in_train_worker() -> bool:
    """Whether this process runs a Ray Train V2 training loop that has a run folder. Anyone may call it; never raises.

    False in Ray's local mode (`num_workers=0`), which has no run folder: the manager needs `storage=` there.
    """
    return _ray_storage() is not None


def _ray_storage() -> Any:
    train = sys.modules.get("ray.train")
    if train is None or not hasattr(train, "get_all_reported_checkpoints"):
        return None
    try:
        return train.get_context().get_storage()
    except Exception:
        return None


class RayRuntime(Runtime):
    """The runtime of a Ray Train V2 worker, under our `TorchTrainer` or Ray's own. Every rank makes one."""

    retains = True

    def __init__(self, *, timeout: float):
        super().__init__(timeout=timeout)
        storage = _ray_storage()
        # Ray compares checkpoint paths as strings, so its own string is used, symlinks and all.
        self.store = open_store(storage.experiment_fs_path, storage.storage_filesystem)
        self.given_checkpoint = _given
        self.report_spacing = 1.25 * ray_private.poll_seconds()
        self._reported: set[str] = set()
        self._sees_notices = ray_private.sees_notices()
        self._noticed_at: float | None = None
        save_request.listen()

    @property
    def local_rank(self) -> int:
        from ray.train import get_context

        return int(get_context().get_local_rank())

    def _make_lease(self) -> Lease | Pass:
        # The next worker group of the same fit(), perhaps on other nodes, must not wait for this one's death.
        return Pass(self.store, _owner) if _owner else Lease(self.store, ray_private.run_id())

    def known(self) -> set[str]:
        """Names of the checkpoint folders that Ray holds. Rank 0 calls it; waits for reports that are under way."""
        names, settled = self._committed()
        return names if settled else names | self._reported

    def report(self, metrics: dict[str, Any], checkpoint: CheckpointInfo | None) -> None:
        """Tell Ray. Every rank calls it, with the same checkpoint.

        Raises:
            RankMissing: a rank did not come; Ray's own barrier would wait for it for ever.
            PimmRayError: the ranks do not agree on the checkpoint; Ray's controller would end the run.
        """
        import ray.train

        names = self.gather("report", checkpoint.name if checkpoint else None)
        if len(set(names)) > 1:
            raise PimmRayError(f"the ranks report different checkpoints: {', '.join(map(str, names))}")
        plain = {str(key): plain_value(value) for key, value in metrics.items()}
        if checkpoint is None:
            ray.train.report(plain)
            return
        ray.train.report(
            plain,
            checkpoint=ray.train.Checkpoint(checkpoint.path, checkpoint.filesystem),
            checkpoint_dir_name=checkpoint.name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            delete_local_checkpoint_after_upload=False,
        )
        self._reported.add(checkpoint.name)

    def save_wanted(self) -> bool:
        """Whether Ray's controller is about to restart this group with more workers. Rank 0 asks after each step."""
        return save_request.wanted()

    def hold(self) -> None:
        """Rank 0, with that save complete: wait for the restart."""
        save_request.hold()

    def settle(self) -> None:
        """Wait until Ray has put all reports on record. Every rank calls it.

        Raises:
            PimmRayError: Ray did not within the time limit, on every rank.
        """

        def wait(_: list[Any]) -> None:
            names, settled = self._committed()
            if not settled:
                missing = ", ".join(sorted(self._reported - names)) or "metrics"
                raise PimmRayError(
                    f"Ray has not recorded what was reported within {self.timeout:g} s (waiting for: {missing}). The "
                    "checkpoints are complete on disk and resume does not need Ray's record; look at Ray's controller"
                )

        self.exchange("settle", None, wait)

    def follow(self, progress: Any) -> None:
        global _progress
        _progress = progress

    def pending(self) -> bool | None:
        return ray_private.notice() is not None if self._sees_notices else None

    def notice(self) -> Notice | None:
        import ray.train

        # Ray's own call waits for all ranks, which takes 4 ms; and may leave out those that go.
        info = ray_private.notice() if self._sees_notices else ray.train.get_preemption_info()
        told = self.broadcast("notice", info and [info.deadline_ms, info.preempted_node_ids, info.preempted_ranks])
        if told is None:
            return None
        deadline, nodes, ranks = told
        if not deadline:
            self._noticed_at = self._noticed_at or time.time()
            deadline = 1000 * (self._noticed_at + ray_private.NOTICE_SECONDS)
        what = f"nodes={','.join(node[:8] for node in nodes)} ranks={','.join(map(str, ranks))}"
        return Notice(what=what, deadline=deadline / 1000)

    def _committed(self) -> tuple[set[str], bool]:
        """Names that Ray has on record, and whether they are all that was reported: Ray is silent on a time-out."""
        import ray.train

        start = time.monotonic()
        found = ray.train.get_all_reported_checkpoints(
            consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED, timeout_s=self.timeout
        )
        names = {reported.checkpoint.path.rsplit("/", 1)[-1] for reported in found}
        return names, time.monotonic() - start < self.timeout


class WorkerLoop:
    """The training loop as Ray calls it in each worker: prepares the process, then runs the user's function.

    Ray reads the number of parameters through `__wrapped__`, so the user's function keeps Ray's rules: none or one.
    """

    def __init__(self, loop: Callable[..., Any], given: Any, owner: str | None):
        self.__wrapped__ = loop
        self.__name__ = getattr(loop, "__name__", type(loop).__name__)
        self._given, self._owner = given, owner

    def __call__(self, *config: Any) -> Any:
        global _given, _owner, _progress
        _given, _owner, _progress = self._given, self._owner, None
        show_messages()
        try:
            _offer(self._given)
        except Exception as error:  # CheckpointManager.resume() does not depend on it
            logger.warning("ray.train.get_checkpoint() cannot show what this run starts from: %r", error)
        try:
            return self.__wrapped__(*config)
        except BaseException as error:
            crash_loop.mark(error, _place)
            raise


def _place() -> str:
    if _progress is not None:
        return f"after step {_progress.step}"
    return f"after report {reports}" if (reports := ray_private.reports()) else "at the start"


def _offer(given: Any) -> None:
    """Let stock `ray.train.get_checkpoint()` see what `CheckpointManager.resume()` will look at first.

    Ray's own answer may be older than the newest complete one (killed before Ray heard of it), or not complete.
    """
    import ray.train

    storage, shown = _ray_storage(), ray.train.get_checkpoint()
    if storage is None or (shown is not None and CheckpointName.parse(shown.path.rsplit("/", 1)[-1]) is None):
        return
    run = open_store(storage.experiment_fs_path, storage.storage_filesystem)
    own = (run.child(name) for name in candidates(run))
    source = next((store for store in own if not verify_checkpoint(store, deep=False)), None)
    if source is None and given is not None:
        source = open_store(given)
    if source is None:
        ray_private.show_checkpoint(None)
    elif shown is None or shown.path != source.path:
        ray_private.show_checkpoint(ray.train.Checkpoint(source.path, source.filesystem))


def plain_value(value: Any) -> Any:
    """A metric as Ray can send and store it: numbers, strings, None, and lists and dicts of these. NaN stays NaN.

    Tensors and arrays become numbers or lists; anything else becomes its `str`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and scalars
        return plain_value(value.detach().tolist() if hasattr(value, "detach") else value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    return str(value)


def absolute(source: Any) -> Any:
    """A local path made independent of the working directory, which in a worker is another; all else as it is."""
    from ray.train import Checkpoint

    if isinstance(source, Checkpoint):  # has __fspath__, which raises
        store = open_store(source)
        local = isinstance(store, LocalStore) and not os.path.isabs(store.path)
        return Checkpoint(os.path.abspath(source.path), source.filesystem) if local else source
    if isinstance(source, str | os.PathLike) and "://" not in os.fspath(source):
        return open_store(source).path
    return source
