"""Agreement among ranks: small JSON messages through rank 0, on gloo groups that training never uses."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pimm_ray import errors
from pimm_ray.errors import PimmRayError, RankMissing, RemoteRankError

T = TypeVar("T")

_FRAME = 4096
_TAG, _SIGNAL = 7, 8
_GRACE = 10.0
_HEARTBEAT = 1.0


class Ranks:
    """This process among the ranks of the job. Made by every rank at the same point of the program.

    Every agreement is one `exchange`: each rank sends a value to rank 0, rank 0 computes the answer, each rank gets
    it, or the same error. A rank that stays away longer than `timeout` seconds is named in `RankMissing` on all others.
    """

    def __init__(self, *, timeout: float):
        self.timeout = timeout
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise PimmRayError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() before CheckpointManager(...)"
            )
        else:
            self.rank, self.world_size = 0, 1
        self._pending_signal: tuple[dict[int, Any], torch.Tensor] | None = None
        if self.world_size > 1:
            # Two groups, because a receive that times out closes every connection of its gloo group: rank 0 still
            # has to tell the ranks that did come who is missing.
            limit = timedelta(seconds=2 * timeout + 6 * _GRACE)
            try:
                self._up = dist.new_group(backend="gloo", timeout=limit)
                self._down = dist.new_group(backend="gloo", timeout=limit)
            except RuntimeError as error:
                raise RankMissing(
                    f"CheckpointManager(): not every rank came to make one within {limit.total_seconds():g} s ({error})"
                ) from None

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def exchange(
        self, what: str, value: Any, on_zero: Callable[[list[Any]], Any], undo: Callable[[], None] = lambda: None
    ) -> Any:
        """Send `value` (JSON) to rank 0, which answers with `on_zero(values by rank)`; every rank returns that answer.

        Who calls it: every rank, in the same order. `what` says for people which point of the program this is. Where
        there is no answer, rank 0 runs `undo` before it tells the others.

        Raises:
            RankMissing: a rank did not come within the time limit, is gone, or is at another point of the program.
            Exception: whatever `on_zero` raised, on every rank (an error that is not ours arrives as RemoteRankError).
        """
        if self.rank == 0:
            return self._lead(what, value, on_zero, undo)
        limit = 2 * self.timeout + _GRACE  # rank 0 may come late itself, and then waits for others
        deadline = time.monotonic() + limit
        try:
            _send(self._up, 0, {"what": what, "value": value}, deadline)
            reply = _receive(self._down, 0, deadline)
        except RuntimeError as error:
            raise RankMissing(f"{what}: rank 0 {_plight(error, limit)}", ranks=[0]) from None
        if "error" in reply:
            raise _unpack_error(reply["error"], by=0)
        return reply["value"]

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        return self.exchange(what, value, lambda values: values)

    def broadcast(self, what: str, value: Any = None) -> Any:
        """Rank 0's value on every rank."""
        return self.exchange(what, None, lambda _: value)

    def agree(
        self,
        what: str,
        work: Callable[[], Any],
        on_zero: Callable[[list[Any]], Any] = lambda values: values,
        undo: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run `work` on every rank, then `on_zero(results by rank)` on rank 0; every rank returns what that returns.

        When `work` fails on any rank, `on_zero` does not run and every rank raises that rank's error; when either
        fails, or a rank is missing, rank 0 runs `undo` before any rank raises.
        """
        own: Exception | None = None
        result: dict[str, Any]
        try:
            result = {"ok": work()}
        except Exception as error:
            own, result = error, {"error": _pack_error(error)}

        def lead(results: list[dict[str, Any]]) -> Any:
            for rank, other in enumerate(results):
                if "error" in other:
                    raise own if own is not None and rank == 0 else _unpack_error(other["error"], by=rank)
            return on_zero([other["ok"] for other in results])

        try:
            return self.exchange(what, result, lead, undo)
        except RankMissing:
            raise
        except Exception:
            if own is not None:
                raise own from own.__cause__
            raise

    def each(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's own result; fails on all ranks when it fails on any."""
        results: list[T] = []
        self.agree(what, lambda: results.append(work()))
        return results[0]

    def patiently(self, what: str, work: Callable[[], T]) -> T:
        """As `each`, for work of any length: meanwhile the ranks tell each other every second that they are there.

        `work` runs in a thread of its own. Where it fails, no rank waits for what others still do.
        """
        own: Future[T] = Future()

        def run() -> None:
            try:
                own.set_result(work())
            except BaseException as error:
                own.set_exception(error)

        threading.Thread(target=run, name=what, daemon=True).start()
        while True:
            wait([own], timeout=_HEARTBEAT)
            told = self.gather(what, [own.done(), own.done() and own.exception() is not None])
            if any(failed for _, failed in told):
                self.agree(what, lambda: own.result() if own.done() else None, lambda _: None)
            if all(done for done, _ in told):
                return own.result()

    def signal(self, value: int) -> None:
        """Start sending rank 0's small int to all; collected by `collect_signal` one step later, so nobody waits."""
        tensor = torch.tensor([value if self.rank == 0 else 0])
        works: dict[int, Any] = {}
        self._pending_signal = works, tensor
        for rank in range(1, self.world_size) if self.rank == 0 else (0,):
            try:
                if self.rank == 0:
                    works[rank] = dist.isend(tensor, rank, group=self._down, tag=_SIGNAL)
                elif self.world_size > 1:
                    works[rank] = dist.irecv(tensor, 0, group=self._down, tag=_SIGNAL)
            except RuntimeError as error:
                works[rank] = error

    def collect_signal(self) -> int:
        """The int that rank 0 passed to the last `signal` (0 when there was none)."""
        if self._pending_signal is None:
            return 0
        works, tensor = self._pending_signal
        self._pending_signal = None
        deadline, lost = time.monotonic() + self.timeout, {}
        for rank, work in works.items():
            try:
                if isinstance(work, RuntimeError):
                    raise work
                _finish(work, deadline)
            except RuntimeError as error:
                lost[rank] = _plight(error, self.timeout)
        if lost:
            said = "; ".join(f"rank {rank} {why}" for rank, why in lost.items())
            raise RankMissing(f"step: {said}", ranks=[*lost])
        return int(tensor.item())

    def _lead(self, what: str, value: Any, on_zero: Callable[[list[Any]], Any], undo: Callable[[], None]) -> Any:
        others = range(1, self.world_size)
        deadline = time.monotonic() + self.timeout
        posted, values, lost, strayed = {}, [value], {}, {}
        for rank in others:
            try:
                posted[rank] = _post_receive(self._up, rank)
            except RuntimeError as error:  # gone already
                lost[rank] = _plight(error, self.timeout)
        for rank in others:
            if rank in lost:
                values.append(None)
                continue
            try:
                message = _finish_receive(self._up, rank, *posted[rank], deadline)
            except RuntimeError as error:
                lost[rank] = _plight(error, self.timeout)
                values.append(None)
                continue
            values.append(message["value"])
            if message["what"] != what:
                strayed[rank] = message["what"]
        answer: Any = None
        failure: Exception | None = None
        if lost or strayed:
            said = [f"rank {rank} {why}" for rank, why in lost.items()]
            said += [f"rank {rank} is at {where!r} instead" for rank, where in strayed.items()]
            advice = "every rank must call resume(), step(), save() and finish() equally often"
            failure = RankMissing(f"{what}: {'; '.join(said)} ({advice})", ranks=[*lost, *strayed])
        else:
            try:
                answer = on_zero(values)
            except Exception as error:
                failure = error
        if failure is not None:
            undo()
        reply = {"value": answer} if failure is None else {"error": _pack_error(failure)}
        answer_by = time.monotonic() + _GRACE
        for rank in others:
            if rank not in lost:
                try:
                    _send(self._down, rank, reply, answer_by)
                except RuntimeError as error:
                    failure = failure or RankMissing(f"{what}: rank {rank} {_plight(error, _GRACE)}", ranks=[rank])
        if failure is not None:
            raise failure
        return answer


def _finish(work: Any, deadline: float) -> None:
    work.wait(timedelta(seconds=max(0.05, deadline - time.monotonic())))


def _send(group: Any, rank: int, message: Any, deadline: float) -> None:
    body = json.dumps(message).encode()
    frame = bytearray(_FRAME)
    frame[:8] = len(body).to_bytes(8, "little")
    frame[8 : 8 + len(body)] = body[: _FRAME - 8]
    del frame[_FRAME:]
    _finish(dist.isend(torch.frombuffer(frame, dtype=torch.uint8), rank, group=group, tag=_TAG), deadline)
    if len(body) > _FRAME - 8:
        rest = torch.frombuffer(bytearray(body[_FRAME - 8 :]), dtype=torch.uint8)
        _finish(dist.isend(rest, rank, group=group, tag=_TAG), deadline)


def _post_receive(group: Any, rank: int) -> tuple[Any, torch.Tensor]:
    frame = torch.empty(_FRAME, dtype=torch.uint8)
    return dist.irecv(frame, rank, group=group, tag=_TAG), frame


def _finish_receive(group: Any, rank: int, work: Any, frame: torch.Tensor, deadline: float) -> Any:
    _finish(work, deadline)
    raw = frame.numpy().tobytes()
    size, body = int.from_bytes(raw[:8], "little"), raw[8:]
    if size > len(body):
        rest = torch.empty(size - len(body), dtype=torch.uint8)
        _finish(dist.irecv(rest, rank, group=group, tag=_TAG), deadline)
        body += rest.numpy().tobytes()
    return json.loads(body[:size])


def _receive(group: Any, rank: int, deadline: float) -> Any:
    return _finish_receive(group, rank, *_post_receive(group, rank), deadline)


def _plight(error: RuntimeError, limit: float) -> str:
    return f"did not come within {limit:g} s" if "imed out" in str(error) else "is gone (its connection closed)"


def _pack_error(error: Exception) -> dict[str, Any]:
    # Fields of ours only: those of others may not be sendable, and arrive as RemoteRankError anyway.
    held = vars(error) if isinstance(error, PimmRayError) else {}
    public = {key: value for key, value in held.items() if isinstance(value, str | int | float | list | dict)}
    return {"kind": type(error).__name__, "text": str(error), "fields": json.loads(json.dumps(public, default=str))}


def _unpack_error(packed: dict[str, Any], *, by: int) -> PimmRayError:
    kind, text, fields = getattr(errors, packed["kind"], None), packed["text"], packed["fields"]
    if not (isinstance(kind, type) and issubclass(kind, PimmRayError)):
        kind, text = RemoteRankError, f"{packed['kind']}: {text}"
    # An error that rank 0 passes on already says where it comes from.
    error: PimmRayError = kind(text if "rank" in fields else f"rank {by}: {text}")
    vars(error).update({"rank": by, **fields})
    return error
