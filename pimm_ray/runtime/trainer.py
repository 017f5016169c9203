"""Ray's TorchTrainer, which takes `resume_from_checkpoint` again."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray.train
import ray.train.torch

from pimm_ray.checkpoint import pimm
from pimm_ray.checkpoint.find import candidates, find_checkpoint, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.store import Store, open_store
from pimm_ray.errors import CorruptCheckpoint, PimmRayError, StorageError
from pimm_ray.policy import KeepPolicy
from pimm_ray.runtime import crash_loop, ray_private
from pimm_ray.runtime.base import show_messages
from pimm_ray.runtime.controller import ResizePolicy
from pimm_ray.runtime.lease import Lease
from pimm_ray.runtime.worker import WorkerLoop, absolute

logger = logging.getLogger(__name__)

_MAX_FAILURES = 8
"""A node that goes without notice counts as a failure, also as the last of several that went with notice."""


class TorchTrainer(ray_private.ControllerHook, ray.train.torch.TorchTrainer):
    """`ray.train.torch.TorchTrainer` with the same arguments and the same `Result`, that can start from a checkpoint.

    What a run starts from: its own newest good checkpoint (so the same command after a crash goes on); when it has
    none, `resume_from_checkpoint`; when that is not given, nothing. One line says which, and what was passed over. A
    failure during the run never goes back to `resume_from_checkpoint` once the run has a checkpoint of its own.

    Who calls it: the driver. The loop restores itself with `CheckpointManager.resume()`; a loop that does without the
    manager finds the same checkpoint in `ray.train.get_checkpoint()`.

    Args:
        train_loop_per_worker: your loop, with no parameter or one (`train_loop_config`).
        scaling_config: with `num_workers=(min, max)` the run goes on with the nodes that are left when some are lost,
            and takes in new ones at the price of no step: the loop's `CheckpointManager` saves first.
        run_config: give it a `name`: it is how the run is found again after the driver has died. Without a
            `checkpoint_config` the newest 3 checkpoints are kept; without a `failure_config` an elastic run survives
            8 failures. Nodes that go with notice are counted apart, without limit (`max_preemption_failures`).
        resume_from_checkpoint: path, URI or `ray.train.Checkpoint` of one checkpoint of any run, also of pimm's
            (`model/last`). Relative paths are relative to the driver's working directory. It is only read.
        arguments: all others of Ray's trainer.

    Raises:
        CheckpointNotFound, IncompleteCheckpoint, CorruptCheckpoint, CheckpointVersionError, UnsafeCheckpoint:
            `resume_from_checkpoint` cannot be used (before any worker starts).
        StorageError: the run folder cannot be read.
        PimmRayError: Ray Train V2 is switched off, or `resume_from_checkpoint` names the Hugging Face Hub.

    Example:
        >>> TorchTrainer(
        ...     train_loop,
        ...     scaling_config=ScalingConfig(num_workers=4),
        ...     run_config=RunConfig(name="demo-2", storage_path="s3://bucket/runs"),
        ...     resume_from_checkpoint="s3://bucket/runs/demo/checkpoint_00004000-0002-51d0",
        ... ).fit()
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        resume_from_checkpoint: ray.train.Checkpoint | str | os.PathLike[str] | None = None,
        **arguments: Any,
    ):
        if not ray_private.v2_enabled():
            raise PimmRayError(
                "pimm_ray needs Ray Train V2, which is switched off here: unset RAY_TRAIN_V2_ENABLED before ray.train "
                "is imported (it is on by default since Ray 2.51)"
            )
        show_messages()
        given = _checked_source(resume_from_checkpoint)
        if run_config is None:
            run_config = ray.train.RunConfig()
        self._run: Store | None = None
        self._lease: Lease | None = None
        local_mode = scaling_config is not None and scaling_config.num_workers == 0
        if local_mode and given is not None:
            raise PimmRayError(
                "resume_from_checkpoint needs workers, and ScalingConfig(num_workers=0) has none: use num_workers=1, "
                "or give the checkpoint to CheckpointManager.resume(checkpoint=...) in the loop"
            )
        if isinstance(run_config, ray.train.RunConfig) and not local_mode:
            elastic = scaling_config is not None and isinstance(scaling_config.num_workers, tuple)
            run_config = _completed(run_config, elastic=elastic)
            self._run = _run_folder(run_config)
            self._lease = Lease(self._run)
            _announce(self._run, given)
        loop = WorkerLoop(train_loop_per_worker, given, self._lease.owner if self._lease else None)
        super().__init__(loop, scaling_config=scaling_config, run_config=run_config, **arguments)

    def fit(self) -> ray.train.Result:
        """Run the training; see Ray's `TorchTrainer.fit`.

        One driver at a time: the run folder is held until this returns, and a driver that was killed holds nothing.

        Ray keeps a list of a run's checkpoints in the run folder, and dies of it when it is torn, of another Ray, or
        names a folder that was deleted by hand. Such a list is moved aside first and written anew.

        Raises:
            RunInUse: another driver, which lives, runs under this name. Nothing was started or changed.
            StorageError: the run folder cannot be written.
            ray.train.TrainingFailedError: training failed more often than `FailureConfig` allows, or three times in a
                row at the same step with the same error.
        """
        if self._run is None or self._lease is None:
            return super().fit()
        self._run.make()
        self._lease.acquire()
        try:
            _mend_snapshot(self._run, self.run_config.checkpoint_config)
            return super().fit()
        except ray.train.TrainingFailedError as error:
            crash_loop.explain(error, self._run)
            raise
        finally:
            self._lease.release()

    def _adapt(self, policy: Any) -> Any:
        if not ray_private.is_elastic(policy) or policy.scaling_config.use_tpu:
            return policy
        if missing := ray_private.check_scaling():
            logger.warning("resize: left to Ray's own policy, because this Ray is another than expected: %s", missing)
            return policy
        return ResizePolicy(policy)

    def _watch(self, policy: Any) -> Any:
        if missing := ray_private.check_failures():
            logger.warning("crash loop: left to Ray, because this Ray is another than expected: %s", missing)
            return policy
        return crash_loop.FailurePolicy(policy)


def _checked_source(source: Any) -> Any:
    if isinstance(source, str) and source.startswith("hf://"):
        raise PimmRayError(
            f"cannot resume from {source}: the Hub holds weights only, and a run resumes with its optimizer, loader "
            "position and random state too. Give a checkpoint folder of a run, or load these weights in the loop"
        )
    return None if source is None else absolute(source)


def _completed(run_config: ray.train.RunConfig, *, elastic: bool) -> ray.train.RunConfig:
    """The user's RunConfig, with what we add; theirs stays as it is."""
    if ray_private.made_up_name(run_config.name or ""):
        warnings.warn(
            "RunConfig has no name, so this run cannot be found again when its driver dies: write "
            'RunConfig(name="my-run", ...) and start the same command again to continue',
            stacklevel=3,
        )
    changes: dict[str, Any] = {}
    if run_config.storage_filesystem is None and "://" not in str(run_config.storage_path):
        changes["storage_path"] = absolute(str(run_config.storage_path))
    if run_config.checkpoint_config == ray.train.CheckpointConfig():
        last = KeepPolicy().last
        logger.info(
            "keep: last=%d (RunConfig has no checkpoint_config; CheckpointConfig(num_to_keep=...) says otherwise)", last
        )
        changes["checkpoint_config"] = ray.train.CheckpointConfig(num_to_keep=last)
    if getattr(run_config.failure_config, "relax_collectives_on_preemption", False):
        logger.warning(
            "FailureConfig(relax_collectives_on_preemption=True) is of no use to CheckpointManager, which saves on all "
            "ranks, before the deadline; a rank on a node that goes may hang in a report by it"
        )
    if elastic and run_config.failure_config == ray.train.FailureConfig():  # also one that says 0: it cannot be told
        logger.info(
            "retry: max_failures=%d instead of 0, as nodes of an elastic run come and go without notice, too "
            "(FailureConfig(max_failures=...) other than 0 holds)",
            _MAX_FAILURES,
        )
        changes["failure_config"] = ray.train.FailureConfig(max_failures=_MAX_FAILURES)
    return replace(run_config, **changes)


def _run_folder(run_config: ray.train.RunConfig) -> Store:
    return open_store(str(run_config.storage_path), run_config.storage_filesystem).child(str(run_config.name))


def _announce(run: Store, given: Any) -> None:
    """Check the given checkpoint, and say what the run will start from and what is passed over."""
    own = find_checkpoint(run, verified=False)
    named = getattr(given, "path", given)
    if own is not None:
        if given is None:
            logger.info("start: checkpoint=%s (newest of this run, not yet verified)", own.path)
            return
        try:
            _open_given(given)
        except (PimmRayError, OSError) as error:
            logger.warning("resume_from_checkpoint=%s cannot be used (%s); this run does not need it", named, error)
        logger.warning(
            "start: checkpoint=%s (newest of this run, not yet verified) passed_over=%s (resume_from_checkpoint: only "
            "for a run without a checkpoint of its own; to start from it, give RunConfig another name)",
            own.path,
            named,
        )
        return
    names = candidates(run)
    found = f"nothing usable among {len(names)} checkpoint folder(s)" if names else "no checkpoint"
    if given is None:
        logger.log(logging.WARNING if names else logging.INFO, "start: fresh (%s in %s)", found, run.path)
        return
    what = _open_given(given)
    logger.info("start: checkpoint=%s (resume_from_checkpoint; %s in %s)", what, found, run.path)


def _open_given(given: Any) -> str:
    """Check it, as far as that is quick; what it is, for people."""
    if of_pimm := pimm.locate(open_store(given)):
        return f"{of_pimm.path} of pimm"
    info = open_checkpoint(given)
    if problems := verify_checkpoint(given, deep=False):
        raise CorruptCheckpoint(
            f"{info.path} cannot be resumed from: {problems[0]}. Use an older checkpoint",
            file=problems[0].file,
            expected=problems[0].expected,
            found=problems[0].found,
        )
    return f"{info.path} step={info.step}"


def _mend_snapshot(run: Store, config: Any) -> None:
    """Give Ray's controller a list of this run's checkpoints that it can start from."""
    reason, aside = ray_private.snapshot_problem(run), None
    if reason is None and run.exists(ray_private.SNAPSHOT):
        if config.checkpoint_score_attribute:
            ray_private.restore_lost_scores(run, config.checkpoint_score_attribute)
        return
    if reason is not None:
        aside = f"{ray_private.SNAPSHOT}.aside-{int(time.time())}"
        try:
            run.filesystem.move(run.full(ray_private.SNAPSHOT), run.full(aside))
        except OSError as error:
            raise StorageError(
                f"Ray cannot start on {run.full(ray_private.SNAPSHOT)} ({reason}), and moving it aside failed: {error}"
            ) from error
    folders = {name: run.child(name) for name in reversed(candidates(run))}
    metrics = {
        name: open_checkpoint(store).metrics
        for name, store in folders.items()
        if not verify_checkpoint(store, deep=False)
    }
    written = bool(metrics or aside) and ray_private.write_snapshot(run, aside, metrics, config)
    if reason is not None:
        logger.warning(
            "Ray's list of checkpoints in %s could not be used because %s; it was moved aside to %s%s",
            run.path,
            reason,
            aside,
            " and written anew from what is in the folder" if written else "",
        )
