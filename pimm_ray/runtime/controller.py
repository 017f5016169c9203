"""What Ray's controller decides about the number of workers, with a view of the cluster that is not out of date."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from pimm_ray.runtime import ray_private, save_request
from pimm_ray.runtime.base import show_messages
from pimm_ray.runtime.scaling import Answer, Commits, possible_workers, unresponsive

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 20.0
"""How long a new group is left alone: nodes that were asked for together seldom arrive together."""
_RAYS_MONITOR_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_REST_SECONDS = 0.5
_PROBE_SECONDS = 1.0
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How every HTTP/2 connection begins; Ray's nodes speak gRPC, which is HTTP/2."""
_PING_SECONDS, _FROZEN_SECONDS = 5.0, 10.0
_ANSWER_SECONDS, _UNLIKELY_SECONDS = 2.0, 0.3
_FORGET_SECONDS = 90.0
_RECHECK_SECONDS = 20.0
_SAY_SECONDS = 60.0


class ResizePolicy:
    """Stands in for Ray's elastic scaling policy in the controller.

    After a loss it counts only nodes that are alive, not draining, and answer: Ray's own view is up to 20 s old and
    counts nodes that are gone, so its restart waits 60 s for a worker on one of them. Before it stops a healthy group
    to start a larger one, it has the loop save, so that no step is lost. Anything unexpected is left to Ray's policy:
    an exception here would end the run.
    """

    def __init__(self, rays: Any):
        self._rays = rays
        interval = rays.scaling_config.elastic_resize_monitor_interval_s
        self._settle = SETTLE_SECONDS if interval == _RAYS_MONITOR_SECONDS else interval
        self._nodes = _Nodes()
        self._group: float | None = None
        self._group_since = self._looked = self._asked_at = self._said_at = float("-inf")
        self._workers: list[tuple[Any, str]] = []
        self._commits = Commits(0)
        self._asking = False
        self._answer: Any = None
        self._pings: dict[Any, str] = {}
        self._pinged_at = float("-inf")
        self._said = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_rays" not in self.__dict__:  # while it is pickled or unpickled
            raise AttributeError(name)
        return getattr(self._rays, name)

    def make_decision_for_non_running_worker_group(self) -> Any:
        return self._guarded(self._restart, self._rays.make_decision_for_non_running_worker_group)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        return self._guarded(
            lambda: self._grow(worker_group_state, worker_group_status),
            lambda: self._rays.make_decision_for_running_worker_group(
                worker_group_state=worker_group_state, worker_group_status=worker_group_status
            ),
        )

    def _guarded(self, ours: Callable[[], Any], rays: Callable[[], Any]) -> Any:
        try:
            return ours()
        except Exception as error:
            self._say(f"resize: left to Ray's own policy: {error!r}", level=logging.WARNING)
            return rays()

    def _restart(self) -> Any:
        """The group has ended or never was: start as many workers as there is room for."""
        ray_private.renew_request(self._rays)
        ended, self._workers, self._group, self._asking = self._workers, [], None, False
        workers, config = self._possible(ended), self._rays.scaling_config
        if workers >= config.min_workers:
            self._say(f"resize: start workers={workers} of at most {config.max_workers}{self._left_out()}")
            return ray_private.start(self._rays, workers)
        self._say(f"resize: waiting for nodes: room for {workers} workers of at least {config.min_workers}")
        # Ray's controller asks again at once, and does nothing else meanwhile: it would use up a core.
        time.sleep(_REST_SECONDS)
        return ray_private.stay()

    def _grow(self, group: Any, status: Any) -> Any:
        """The group is healthy: start a larger one as soon as there is room and all its work is saved."""
        ray_private.renew_request(self._rays)
        now, stay = time.monotonic(), ray_private.stay()
        self._workers = ray_private.workers_of(group)
        size = len(self._workers)
        if group.start_time != self._group:
            self._group, self._group_since, self._commits = group.start_time, now, Commits(size)
            self._asking, self._answer, self._said = False, None, ""
            self._nodes.trust({node for _, node in self._workers})
            self._pings = {}
        committed = self._commits.add(ray_private.reports_in(status))
        if self._frozen(now):
            return self._restart()
        if size >= self._rays.scaling_config.max_workers or now - self._group_since < self._settle:
            return stay
        if not self._asking and now - self._looked < _LOOK_SECONDS:
            return stay
        self._looked = now
        workers = self._possible()
        if workers <= size:  # never a smaller group on purpose: nodes that go take their workers with them
            if self._asking:
                self._asking, self._answer = False, None
                ray_private.run_on(self._workers[0][0], save_request.ask, False)
                self._say(f"resize: stays at workers={size}: the room for more is gone")
            return stay
        if not self._asking:
            self._asking, self._asked_at = True, now
            self._say(f"resize: room for workers={workers} instead of {size}: asking for a save first")
        state = self._ask_for_save()
        if state == "saved" or (state == "deaf" and committed):
            self._say(f"resize: workers={size} -> {workers}, saved {now - self._asked_at:.1f} s after asking")
            return ray_private.start(self._rays, workers)
        if now - self._asked_at > _SAY_SECONDS:
            self._say(f"resize: workers={size} -> {workers} waits for a checkpoint: a restart would lose steps")
        return stay

    def _frozen(self, now: float) -> bool:
        """Whether a node has stopped to answer, with all that runs on it: the cluster itself takes a minute to tell."""
        if not self._pings and now - self._pinged_at > _PING_SECONDS:
            self._pings = {ray_private.run_on(actor, os.getpid): node for actor, node in self._workers}
            self._pinged_at = now
        if not self._pings:
            return False
        _, silent = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0)
        self._pings = {ping: self._pings[ping] for ping in silent}
        if not silent or now - self._pinged_at < _FROZEN_SECONDS:
            return False
        return any(node["NodeID"] in self._pings.values() and not _listens(node) for node in ray.nodes())

    def _ask_for_save(self) -> save_request.State | None:
        """What rank 0 says; None while it has not answered."""
        if self._answer is None:
            self._answer = ray_private.run_on(self._workers[0][0], save_request.ask, True)
        ready, _ = ray.wait([self._answer], timeout=0.2)
        if not ready:
            return None
        answer, self._answer = self._answer, None
        state: save_request.State = ray.get(answer)
        return state

    def _possible(self, ended: list[tuple[Any, str]] | None = None) -> int:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        reserved = ray_private.reserved(self._rays, fresh=self._nodes.changed(set(nodes)))
        doubtful = {*nodes} if ended else {*reserved, *self._nodes.suspected} & {*nodes}
        doubtful -= {node for _, node in self._workers}
        self._nodes.probe({node: nodes[node] for node in doubtful}, ended or [])
        gone = self._nodes.gone() | ({*reserved} - {*nodes})
        config = self._rays.scaling_config
        use_spare = gone & {*reserved} and not config.label_selector
        free = ray_private.free() if use_spare else {}
        return possible_workers(ray_private.need_of_worker(self._rays), reserved, free, gone, config.max_workers)

    def _left_out(self) -> str:
        gone = self._nodes.gone()
        return f" left_out={','.join(sorted(node[:8] for node in gone))} (draining or not answering)" if gone else ""

    def _say(self, text: str, level: int = logging.INFO) -> None:
        now = time.monotonic()
        if text != self._said or now - self._said_at > _SAY_SECONDS:
            show_messages()
            logger.log(level, "%s", text)
            self._said, self._said_at = text, now


class _Nodes:
    """Which nodes not to count on, although the cluster still lists them.

    A node that was killed stays listed for 5 to 20 s, one that froze for a minute. After that long the cluster's word
    holds again, so that a mistake here cannot keep a run from starting.
    """

    def __init__(self) -> None:
        self._listed: set[str] = set()
        self._checked_at = float("-inf")
        self._answers: dict[str, set[Answer]] = {}
        self.suspected: dict[str, float] = {}

    def changed(self, listed: set[str]) -> bool:
        """Whether the cluster's list of nodes is another than last time, or has not been compared for long."""
        now = time.monotonic()
        if listed == self._listed and now - self._checked_at < _RECHECK_SECONDS:
            return False
        self._listed, self._checked_at = listed, now
        return True

    def trust(self, nodes: set[str]) -> None:
        """Workers have started there: what was held against these nodes is over."""
        self._answers = {node: answers for node, answers in self._answers.items() if node not in nodes}
        self.suspected = {node: since for node, since in self.suspected.items() if node not in nodes}

    def probe(self, nodes: dict[str, Any], ended: list[tuple[Any, str]]) -> None:
        """Look which of these nodes take a connection, and which workers answer.

        Args:
            ended: the workers of a group that has ended since the last call. Those that are silent are killed: Ray
                would wait 5 s for them before it starts new ones.
        """
        asked = {ray_private.run_on(actor, os.getpid): (actor, node) for actor, node in ended}
        refused = set()
        if nodes:
            with ThreadPoolExecutor(32) as pool:
                listening = zip(nodes, pool.map(_listens, nodes.values()), strict=True)
                refused = {node for node, listens in listening if not listens}
        if asked:
            self._answers = {}
            likely = [question for question, (_, node) in asked.items() if node not in refused]
            if likely:
                ray.wait(likely, num_returns=len(likely), timeout=_ANSWER_SECONDS)
            ray.wait(list(asked), num_returns=len(asked), timeout=_UNLIKELY_SECONDS)
        for question, (actor, node) in asked.items():
            answer = _answered(question)
            self._answers.setdefault(node, set()).add(answer)
            if answer == "silent":
                ray.kill(actor)
        now, lost = time.monotonic(), unresponsive(self._answers, refused)
        self.suspected = {node: self.suspected.get(node, now) for node in lost}

    def gone(self) -> set[str]:
        recent = time.monotonic() - _FORGET_SECONDS
        return ray_private.draining() | {node for node, since in self.suspected.items() if since > recent}


def _answered(question: Any) -> Answer:
    ready, _ = ray.wait([question], timeout=0)
    if not ready:
        return "silent"
    try:
        ray.get(question)
    except Exception:
        return "dead"
    return "yes"


def _listens(node: Any) -> bool:
    """Whether the node's Ray answers at all. A frozen one takes the connection, but says nothing."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _PROBE_SECONDS) as line:
            line.sendall(_GREETING)
            line.recv(1)
            return True
    except ConnectionResetError:  # it answers, if another language
        return True
    except OSError:
        return False
