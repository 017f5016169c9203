"""The manager that a training loop talks to: resume, batches, step, save."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from pimm_ray.checkpoint.find import CheckpointInfo
from pimm_ray.checkpoint.state import Objects, is_extra
from pimm_ray.elastic.plan import ElasticPolicy, ResumePlan
from pimm_ray.errors import PimmRayError
from pimm_ray.feed import Feed
from pimm_ray.job import Job
from pimm_ray.observe.loggers import Tracker, Trackers
from pimm_ray.pace import Pace
from pimm_ray.policy import KeepPolicy, SavePolicy
from pimm_ray.preemption import Preemption
from pimm_ray.progress import Progress, TrainState
from pimm_ray.restoring import restore
from pimm_ray.resuming import Choice, choose
from pimm_ray.runtime.base import make_runtime
from pimm_ray.saving import Saver, check_metrics, over_ranks
from pimm_ray.warm_start import WarmStart, begin

logger = logging.getLogger(__name__)

_SAVE, _REPORT, _RESIZE, _NOTICE = 1, 2, 4, 8
_DEFAULT_SAVE, _DEFAULT_KEEP, _DEFAULT_ELASTIC = SavePolicy(), KeepPolicy(), ElasticPolicy()


class CheckpointManager:
    """Saves a training job and brings it back, on the same or another number of workers.

    Every rank makes one, after `torch.distributed` is initialised (Ray and `torchrun` scripts do that), and every rank
    calls each method equally often.

    Args:
        model: the module, plain or wrapped (DDP, torch.compile). Holds every parameter that is optimized.
        optimizer, scheduler: one, or a list of several.
        scaler: a `torch.amp.GradScaler`.
        loader: what `batches()` iterates. An `ElasticLoader` resumes in mid-epoch on any number of workers, a torchdata
            `StatefulDataLoader` on the same number; any other iterable at an epoch's start.
        ema: averaged weights: a module (`torch.optim.swa_utils.AveragedModel`) or anything with state_dict().
        extra: more state by name: objects with state_dict() and load_state_dict(), or dicts and lists of plain data,
            which are restored in place.
        loggers: trackers such as `WandbTracker` and `TensorBoardTracker`; rank 0's are started by `resume()` and go on
            with the run of the checkpoint. They get the metrics of every `log_every`-th step and of each `save()`.
        log_every: steps from one reading of the metrics of `step()` to the next: it waits for the device.
        save, keep, elastic: when to save, what to keep, what to do when the run comes back changed.
        storage: the run folder, a path or URI; outside Ray only (Ray's RunConfig says it there).
        seed: for the random streams of ranks that a resume adds. None draws one and keeps it.

    Raises:
        PimmRayError: no run folder, or a distributed launch without an initialised process group.
        ValueError: `log_every` below 1, or two loggers of one name.
        TypeError: an `extra` that cannot be restored in place, or a loader inside Ray's `prepare_data_loader`.
        WorldSizeError: an `ElasticLoader` that was made before `torch.distributed` was initialised.

    Example:
        >>> manager = CheckpointManager(model=model, optimizer=optimizer, loader=loader, storage="runs/demo",
        ...                             save=SavePolicy(every_steps=100))
        >>> manager.resume()
        >>> for epoch in manager.epochs(10):
        ...     for x, y in manager.batches():
        ...         loss = loss_fn(model(x), y)
        ...         loss.backward()
        ...         optimizer.step(); optimizer.zero_grad()
        ...         manager.step(loss=loss)
        >>> manager.finish()
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Iterable[Any] | None = None,
        ema: Any = None,
        extra: Mapping[str, Any] | None = None,
        loggers: Iterable[Tracker] = (),
        log_every: int = 10,
        save: SavePolicy = _DEFAULT_SAVE,
        keep: KeepPolicy = _DEFAULT_KEEP,
        elastic: ElasticPolicy = _DEFAULT_ELASTIC,
        storage: Any = None,
        seed: int | None = 0,
    ):
        for name, value in (extra or {}).items():
            if not is_extra(value):
                raise TypeError(
                    f"extra[{name!r}] is a {type(value).__name__}, which cannot be restored in place: give a dict "
                    "or list of plain data, or an object with state_dict() and load_state_dict()"
                )
        if log_every < 1:
            raise ValueError(f"log_every={log_every}: use a number of steps, 1 or more")
        objects = Objects(
            model=model,
            optimizers=_as_list(optimizer),
            schedulers=_as_list(scheduler),
            scaler=scaler,
            ema=ema,
            extra=dict(extra or {}),
        )
        self._save_policy = save
        self._feed = Feed(loader)
        self._runtime = make_runtime(storage, timeout=save.timeout_seconds)
        self._feed.cursor.check(self._runtime.world_size)
        if keep is not _DEFAULT_KEEP and self._runtime.retains and self._runtime.rank == 0:
            logger.warning(
                "keep= has no effect under Ray (except every_steps and export_best): use "
                "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=..., checkpoint_score_attribute=...))"
            )
        self._given_seed = seed
        self._job = Job(
            runtime=self._runtime,
            objects=objects,
            feed=self._feed,
            pace=Pace(objects, self._feed, elastic),
            keep=keep,
            elastic=elastic,
            trackers=Trackers(loggers, live=self._runtime.rank == 0),
        )
        self._log_every, self._logs = log_every, False
        self._saver: Saver | None = None
        self._preemption: Preemption | None = None
        self._iteration: object | None = None
        self._epochs: int | None = None
        self._asked: tuple[str, Mapping[str, Any]] | None = None
        self._metrics: dict[str, Any] = {}
        self._saved_at = time.monotonic()

    @property
    def _progress(self) -> Progress:
        return self._job.progress

    @property
    def state(self) -> TrainState:
        """Where the run stands now: steps that are finished. `samples_seen` is over all ranks; with a loader other than
        an `ElasticLoader` it assumes between saves that all ranks have seen equally many."""
        ranks = 1 if self._feed.cursor.global_position else self._runtime.world_size
        return self._progress.state(self._progress.own_total_samples * ranks)

    def resume(
        self,
        *,
        checkpoint: Any = None,
        warm_start: WarmStart | None = None,
        warmup: Callable[[], Any] | None = None,
    ) -> ResumePlan:
        """Restore the newest good checkpoint of this run, else `checkpoint`; else begin, with the weights of
        `warm_start` if there are any. Every rank, once.

        Args:
            checkpoint: a path, URI or `ray.train.Checkpoint` for a run that has none of its own: of pimm_ray, or of
                pimm (`model/last`, `model_last.pth`, or the folder of its run). Under Ray, what
                `TorchTrainer(resume_from_checkpoint=...)` was given is used when this is None.
            warm_start: weights for the model of a run that begins; nothing else is taken from there. With anything to
                resume it is not even looked at.
            warmup: runs one forward and backward pass of the model. Called before the state is loaded; all traces of it
                are overwritten. DDP on 3 or more ranks needs it to resume bit for bit: it lays out its buckets anew
                after its first backward pass.

        Returns:
            What was restored and what was dropped; `explain()` is the line that is logged.

        Raises:
            StateMismatch: the checkpoint does not fit the objects; nothing was changed.
            CheckpointNotFound, IncompleteCheckpoint, CorruptCheckpoint: the given checkpoint, or the warm start that is
                needed, is not good.
            WeightsError: nothing in the warm start fits, or its address cannot be used.
            WorldSizeError, DataChanged: `ElasticPolicy(cursor="fail")` forbids what would be needed.
            RunInUse: another live job writes into this run folder.
            TrackerError: a tracker cannot go on with its run before a setting is given.
            StorageError: some rank cannot write into the run folder, or it has no room for one checkpoint.
            RankMissing: a rank did not come.
        """
        if not isinstance(warm_start, WarmStart | None):
            raise TypeError(f"warm_start={warm_start!r}: use WarmStart({warm_start!r})")
        if self._saver is not None:
            raise PimmRayError("resume() was called twice: call it once, before the loop")
        runtime = self._runtime
        given = checkpoint if checkpoint is not None else runtime.given_checkpoint
        model = self._job.objects.model
        tensors = (*model.parameters(), *model.buffers())
        runtime.claim(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        choice = choose(runtime, given, self._job.present)
        if choice.contents is None:
            drawn = self._given_seed if self._given_seed is not None else secrets.randbits(31)
            self._job.seed = runtime.broadcast("resume: seed", drawn)
            begun = (begin(self._job, warm_start),) if warm_start else ()
            plan = ResumePlan(source="fresh", notes=("nothing to resume from", *begun, *choice.notes), exact=True)
        else:
            if warm_start and runtime.rank == 0:
                logger.info("warm_start=%s is not used: there is a checkpoint to resume", warm_start.name)
            plan = restore(self._job, choice, warmup, self._given_seed)
        self._logs = self._start_trackers(choice)
        runtime.follow(self._progress)
        self._saver = Saver(runtime, self._job.keep, choice)
        if self._save_policy.on_preemption:
            runtime.listen()
            self._preemption = Preemption(runtime, self._saver, self._save_policy.poll_every_seconds)
        if runtime.rank == 0:
            logger.info("resume %s workers=%d attempt=%d", plan.explain(), runtime.world_size, choice.attempt)
        return plan

    def epochs(self, n: int) -> Iterator[int]:
        """Numbers of the epochs still to do, of `n` in all (counted from 0); none when the run has done them."""
        self._require_resume()
        if not self._feed.in_mid_epoch:
            self._feed.settle()
        progress = self._progress
        self._epochs = n
        if progress.epoch >= n and self._runtime.rank == 0:
            logger.info("nothing left to do: %d of %d epochs are done", progress.epoch, n)
        while progress.epoch < n:
            epoch = progress.epoch
            yield epoch
            if progress.epoch == epoch:
                self._end_epoch()
            self._save_if_asked()

    def batches(self) -> Iterator[Any]:
        """The batches of the current epoch, from the resumed position on. Leaving the loop early ends the epoch.

        Every rank iterates; each `step()` ends the window of the batches handed over before it.
        """
        self._require_resume()
        if self._iteration is not None:
            self._end_epoch()
        self._save_if_asked()
        mine = self._iteration = object()
        progress = self._progress
        final, say = progress.epoch + 1 == self._epochs, self._runtime.rank == 0
        try:
            for batch, samples, last in self._feed.begin(progress, self._job.seed, final=final, say=say):
                progress.hand_over(samples, last=last)
                yield batch
                if self._iteration is not mine:
                    return
        finally:
            if self._iteration is mine:
                self._end_epoch()

    def step(self, **metrics: Any) -> None:
        """Call after `optimizer.step()` (and `scheduler.step()`), on every rank: this step's samples are now used up.

        Saves when a save is due, answers notices of preemption, and reports to Ray from time to time. After a notice of
        Ray's with a deadline it goes on and saves again, the last time just before the deadline; then it waits for the
        restart.

        Args:
            metrics: numbers or tensors of one element (read only when they are reported, then averaged over ranks), or
                strings.

        Raises:
            TypeError: a metric is not one value.
            Exception: a due save failed on some rank; every rank raises it, or with `SavePolicy(on_error="warn")` goes
                on. The checkpoint before is still the newest.
            SystemExit: 143, on every rank: outside Ray, some rank got a SIGTERM, and this step is saved.
        """
        self._require_resume()
        self._metrics = check_metrics(metrics)
        if self._progress.idle and self._feed.cursor.loader is not None:
            self._job.warn_once(
                "step() without a batch of manager.batches(): the data position is not kept; iterate that"
            )
        self._feed.commit()
        self._progress.commit()
        if self._progress.step % self._log_every == 0:
            self._log(self._metrics)
        signal = self._runtime.collect_signal()
        policy = self._save_policy
        if self._asked is None:
            if policy.every_steps and self._progress.step % policy.every_steps == 0:
                self._asked = ("every_steps", {})
            elif signal & (_SAVE | _RESIZE):
                self._asked = ("resize" if signal & _RESIZE else "every_seconds", {})
        if not self._progress.at_last_batch:
            self._save_if_asked()
        if signal & _REPORT:
            self._checked_saver.report(self._metrics)
        if signal & _RESIZE and self._asked is None and self._runtime.rank == 0:
            self._runtime.hold()
        if signal & _NOTICE and self._preemption:
            self._preemption.answer(self._save_what_is_new)
        self._signal()

    def poll(self) -> None:
        """Call from time to time in a long evaluation: answers a notice of preemption as `step()` does, else costs
        next to nothing. Every rank calls it equally often.

        A save made here holds the position and the random streams of this moment: after an epoch's last batch, a
        resume goes on with the next epoch, and does not evaluate the finished one again. Inside a window it waits for
        the window's `step()`.

        Raises:
            Exception, SystemExit: as `step()`.
        """
        self._require_resume()
        signal = self._runtime.collect_signal()
        if signal & _NOTICE and self._preemption and not self._progress.open_batches:
            self._preemption.answer(self._save_what_is_new)
        self._signal()

    def save(self, *, reason: str = "user", metrics: Mapping[str, Any] | None = None) -> CheckpointInfo | None:
        """Save now. Every rank calls it.

        Args:
            reason: one word for the checkpoint's `reason`.
            metrics: of this rank; averaged over ranks, logged, used by `KeepPolicy(metric=...)` and sent to Ray.

        Returns:
            The new checkpoint. None inside a window, where the save waits for the window's `step()`, and for a save
            that failed under `SavePolicy(on_error="warn")`.

        Raises:
            UnstorableState: a leaf cannot be stored without pickle (the message names it).
            StorageError, StateMismatch, RankMissing: some rank failed; every rank raises. Nothing is left half-written.
        """
        self._require_resume()
        if not isinstance(reason, str):
            raise TypeError(f"save(reason={reason!r}): use a string")
        checked = check_metrics(metrics or {})
        self._log(checked)
        if self._progress.open_batches:
            self._asked = (reason, {**(self._asked[1] if self._asked else {}), **checked})
            return None
        return self._save(reason, checked)

    def finish(self) -> None:
        """The end of the run: a last save if the newest checkpoint is older, then wait until all is on record.

        Every rank calls it.

        Raises:
            Exception: the last save failed, whatever `SavePolicy(on_error=)` says: no later one can make up for it.
            SystemExit: 143, on every rank: outside Ray, some rank got a SIGTERM since the last step. All is saved.
        """
        self._require_resume()
        if self._iteration is not None:
            self._end_epoch()
        if self._progress.step % self._log_every:
            self._log(self._metrics)
        self._save_if_asked()
        saver = self._checked_saver
        if self._has_news and (self._save_policy.at_end or saver.failed):
            self._save("finish", {}, last=True)
        self._runtime.collect_signal()
        saver.drain(self._metrics)
        self._runtime.release()
        if self._preemption:
            self._preemption.close()
        self._job.trackers.finish()

    @property
    def failed_saves(self) -> int:
        """How many saves have failed since the last good one; the same on every rank. Above 0 only with
        `SavePolicy(on_error="warn")` or where the loop caught the error."""
        return self._checked_saver.failed

    @property
    def _checked_saver(self) -> Saver:
        if self._saver is None:
            raise PimmRayError("call manager.resume() first, on every rank, before the loop")
        return self._saver

    def _require_resume(self) -> None:
        _ = self._checked_saver

    def _start_trackers(self, choice: Choice) -> bool:
        """Rank 0's, and tell the others whether it has any."""
        trackers, contents = self._job.trackers, choice.contents

        def start(_: Any) -> bool:
            trackers.start(contents.document["loggers"] if contents else {}, step=self._progress.step)
            return bool(trackers)

        return bool(self._runtime.exchange("resume: start the loggers", None, start))

    def _log(self, metrics: Mapping[str, Any]) -> None:
        if self._logs:
            step = self._progress.step
            self._job.trackers.log(over_ranks(self._runtime, f"log step {step}", metrics), step)

    def _end_epoch(self) -> None:
        self._iteration = None
        self._progress.end_epoch()
        self._feed.end(self._progress.epoch, self._job.seed)

    def _signal(self) -> None:
        """Start telling all ranks what they do at the next step."""
        policy = self._save_policy
        if policy.every_seconds or policy.on_preemption or self._runtime.report_spacing:
            self._runtime.signal(self._decide() if self._runtime.rank == 0 else 0)

    def _decide(self) -> int:
        """Rank 0, after a step: what all ranks do at the next one."""
        every = self._save_policy.every_seconds
        due = every is not None and time.monotonic() - self._saved_at >= every
        resize = self._runtime.save_wanted()
        notice = self._preemption is not None and self._preemption.due()
        return due * _SAVE | self._checked_saver.report_is_due * _REPORT | resize * _RESIZE | notice * _NOTICE

    @property
    def _has_news(self) -> bool:
        """Whether there is anything that the newest checkpoint does not hold."""
        newest, progress = self._checked_saver.newest, self._progress
        here = progress.step, progress.epoch + progress.at_last_batch
        return newest is None or (newest.step, newest.epoch) != here

    def _save_what_is_new(self) -> None:
        if self._has_news:
            self._save("preemption", self._asked[1] if self._asked else {})

    def _save_if_asked(self) -> None:
        if self._asked is not None:
            self._save(*self._asked)

    def _save(self, reason: str, metrics: Mapping[str, Any], *, last: bool = False) -> CheckpointInfo | None:
        self._asked = None
        self._saved_at = time.monotonic()
        request = self._job.request(reason, {**self._metrics, **metrics})
        saved = self._checked_saver.save(request, forgive=self._save_policy.on_error == "warn" and not last)
        if saved is None:
            return None
        info, agreed = saved
        if self._job.saved(agreed):
            self._checked_saver.leave_best(info)
        return info


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
