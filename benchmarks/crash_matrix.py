"""SIGKILL at every change that a save makes to the run folder, then resume: what comes back, and is it the same run?

    python benchmarks/crash_matrix.py               the whole matrix, a Markdown table
        --sample 20     only so many points, spread over all of them
        --random 200    instead: kills at random times in runs that save all the time
        --json          points as JSON lines

A small training (ElasticLoader, dropout, BatchNorm, AdamW, cosine schedule; DDP over gloo for 2 ranks) saves every
second step with `KeepPolicy(last=1)`. One undisturbed run lists the changes (`Store._event`: folders made, files
created, written, synced, renamed, deleted) of every rank, in five sections: the start of a fresh run, its first save,
a later save with the deletion of the one before, the start of a resumed run, and the end. Then, for every change of
every rank, a run is killed just before it: that is just after the one before, and one more kill comes after the last.
The ranks that are left end by themselves; new processes with other seeds resume and train to the end. Each gives:

- newest, previous: resumed from the checkpoint being saved, or from the one before it (from the start where there was
  none), and at the end all is equal, bit for bit, to the twin that was never interrupted: samples, losses, rates and
  random draws of every step, weights, optimizer, schedule, next draws. Both are a pass.
- lost work: resumed from an older one.   hard fail: resume or training raised.   silent: other than the twin.
- litter: passed, but something else than one checkpoint is left in the run folder at the end.

That no change is missing in the list is for `traced()`: it runs one such training under strace and returns the
announced changes and the system calls that changed the run folder, for comparison. About 3 minutes on 2 cores, 200
random kills about 6; Linux only (fork).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pyarrow.fs import LocalFileSystem
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pimm_ray import CheckpointManager, ElasticLoader, KeepPolicy, SavePolicy, find_checkpoint
from pimm_ray.checkpoint.store import LocalStore
from tests.jobs import identical, next_draws, seed_streams
from tests.ranks import Outcome, die, run_ranks, try_ranks

BATCH, SAMPLES = 8, 24
SECTIONS = {
    "start": ("start of a fresh run", 0, 0),
    "save 2": ("first save", 2, 0),
    "save 4": ("later save", 4, 2),
    "restart": ("start of a resumed run", 4, 4),
    "end": ("end", 6, 6),
}
"""What each is called, and the steps of the newest checkpoint and the one before it."""
SURVIVORS = ("RankMissing", "RuntimeError")
"""What the ranks that are left raise."""
VERDICTS = ("newest", "previous", "lost work", "hard fail", "silent", "litter")


@dataclass(frozen=True)
class Kill:
    rank: int
    section: str
    number: int
    """Before this change of the section, from 0; after the last one at its end."""


BETWEEN_SAVES = Kill(0, "save 5", 0)


@dataclass(frozen=True)
class Change:
    section: str
    kind: str
    path: str
    """Relative to the run folder, without the random part of names."""
    at: int
    """Nanoseconds on a clock that all ranks share."""


@dataclass(frozen=True)
class Point:
    world: int
    kill: Kill
    change: str
    verdict: str
    seconds: float
    detail: str = ""


class Announced(LocalStore):
    """A run folder that lists its changes, by section, and dies at one of them."""

    aloud = False
    """Whether each is said in a system call, for strace."""

    def __init__(self, folder: str, kill: Kill | None = None):
        super().__init__(LocalFileSystem(), folder)
        self.root, self.kill, self.changes, self.now = self.real(""), kill, list[Change](), ["between"]

    def _event(self, kind: str, path: str) -> None:
        if self.aloud:
            os.access(f"<event> {kind} {path}", os.F_OK)
        if threading.current_thread() is not threading.main_thread():
            return  # comes when it comes: for the random kills
        self._die_at(sum(change.section == self.now[0] for change in self.changes))
        self.changes.append(Change(self.now[0], kind, shown(path, self.root), time.monotonic_ns()))

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.now[0] = name
        yield
        self._die_at(sum(change.section == name for change in self.changes))
        self.now[0] = "between"

    def _die_at(self, number: int) -> None:
        if self.kill is not None and (self.kill.section, self.kill.number) == (self.now[0], number):
            die()


def shown(path: str, root: str) -> str:
    drawn = r"(-\d{4})-[0-9a-f]{4}\b|\.[0-9a-f]{8}(?=\.tmp)|(?<=\.trial)-[0-9a-f]{8}"
    return re.sub(drawn, r"\1", os.path.relpath(path, root))


def train(
    rank: int,
    folder: str,
    seed: int,
    kill: Kill | None = None,
    *,
    start: str = "start",
    every: int = 2,
    epochs: int = 2,
    last: int = 1,
    shot: tuple[list[int], float | None] = ([], None),
    at_least: int = 0,
) -> dict[str, Any]:
    """One attempt on one rank; what it saw and became."""
    seed_streams(seed + 100 * rank)
    world = dist.get_world_size() if dist.is_initialized() else 1
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=40)
    numbers = torch.arange(SAMPLES)
    features = torch.sin(torch.arange(4) * (numbers[:, None] + 1.0))
    loader = ElasticLoader(TensorDataset(numbers, features, features.sum(1, keepdim=True)), BATCH, seed=3)
    seen: list[Any] = []  # of every step and rank: samples, loss, rate, a random draw
    store = Announced(folder, kill if kill is not None and kill.rank == rank else None)
    manager = CheckpointManager(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra={"seen": seen},
        save=SavePolicy(every_steps=every, timeout_seconds=10),
        keep=KeepPolicy(last=last),
        storage=store,
    )
    shoot(rank, *shot)  # not before: the others wait up to 80 s for one that dies while their groups are made
    with store.section(start):
        plan = manager.resume()
    if plan.step < at_least:
        raise LostWork(f"resumed from step {plan.step}, but step {at_least} was complete")
    for _ in manager.epochs(epochs):
        for ids, x, y in manager.batches():
            draw = random.random() + np.random.rand() + torch.rand(()).item()
            loss = nn.functional.mse_loss(model(x + 0.1 * draw), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own = [ids.tolist(), loss.item(), optimizer.param_groups[0]["lr"], draw]
            seen.append(gathered(own, world))
            scheduler.step()
            with store.section(f"save {manager.state.global_step + 1}"):
                manager.step(loss=loss)
    with store.section("end"):
        manager.finish()
    became = {
        "seen": list(seen),
        # The buffers of the other ranks are their own until the next forward pass brings them rank 0's.
        "weights": model.state_dict() if rank == 0 else dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "draws": next_draws(),
        "state": manager.state,
    }
    return {"step": plan.step, "exact": plan.exact, "became": became, "changes": store.changes}


def gathered(value: Any, world: int) -> list[Any]:
    values = [value] * world
    if world > 1:
        dist.all_gather_object(values, value)
    return values


def ranks(world: int, *args: Any, **settings: Any) -> list[Outcome]:
    """How each of them ended, forked from this process, which has torch but neither a process group nor threads."""
    return try_ranks(world, functools.partial(train, **settings), *args, group=world > 1)


def undisturbed(world: int) -> list[dict[str, Any]]:
    """What each rank of an uninterrupted run became, with the changes of all sections."""
    with tempfile.TemporaryDirectory() as folder:
        twin = run_ranks(world, train, f"{folder}/run", 1, group=world > 1)
        ranks(world, f"{folder}/again", 1, BETWEEN_SAVES)
        restarted = functools.partial(train, start="restart")
        for rank, again in enumerate(run_ranks(world, restarted, f"{folder}/again", 1, group=world > 1)):
            twin[rank]["changes"] += [change for change in again["changes"] if change.section == "restart"]
    return twin


def points(twin: list[dict[str, Any]]) -> Iterator[tuple[Kill, str]]:
    """Every moment to die at, with the change that it is just before."""
    for section in SECTIONS:
        for rank, found in enumerate(twin):
            changes = [change for change in found["changes"] if change.section == section]
            for number, change in enumerate(changes):
                yield Kill(rank, section, number), f"{change.kind} {change.path}"
            yield Kill(rank, section, len(changes)), "(after the last)"


def crash(kill: Kill, change: str, twin: list[dict[str, Any]]) -> Point:
    """Kill a run there, resume it, and judge."""
    world, started = len(twin), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run, start = f"{folder}/run", "start"
        if kill.section == "restart":
            ranks(world, run, 1, BETWEEN_SAVES)
            start = "restart"
        killed = ranks(world, run, 1 if start == "start" else 1001, kill, start=start)[kill.rank]
        assert killed.killed, f"{kill} did not come: {killed.error}"
        verdict, detail = judge(run, ranks(world, run, seed_for(run)), kill, twin)
    return Point(world, kill, change, verdict, time.monotonic() - started, detail)


def seed_for(run: str) -> int:
    """What is equal to the twin's after a resume was restored; what starts afresh has only its seed to become equal."""
    return 9999 if find_checkpoint(run, verified=False) else 1


def judge(run: str, outcomes: list[Outcome], kill: Kill, twin: list[dict[str, Any]]) -> tuple[str, str]:
    _, newest, previous = SECTIONS[kill.section]
    for outcome in outcomes:
        if outcome.value is None:
            return "hard fail", outcome.error or "killed"
    steps = {outcome.value["step"] for outcome in outcomes}
    if min(steps) < previous:
        return "lost work", f"resumed from step {min(steps)}"
    if wrong := differences([outcome.value for outcome in outcomes], twin):
        return "silent", wrong
    left = sorted(path.name for path in Path(run).iterdir())
    if len(left) != 1:
        return "litter", ", ".join(left)
    return ("newest" if steps == {newest} else "previous"), ""


def differences(found: list[dict[str, Any]], twin: list[dict[str, Any]]) -> str:
    """Which parts of what the ranks became are not those of the twin."""
    wrong = []
    for rank, (ours, theirs) in enumerate(zip(found, twin, strict=True)):
        wrong += [
            f"{key} of rank {rank}"
            for key, value in ours["became"].items()
            if not identical(value, theirs["became"][key])
        ]
        wrong += [] if ours["exact"] else [f"rank {rank} says that it is not exact"]
    return ", ".join(wrong)


def at_random(world: int, kills: int, seed: int = 0) -> Counter[str]:
    """Kill runs that save all the time, one rank or all of them, until `kills` have died; each is resumed to its end.

    Counts kills, those that left a save unfinished, and finished runs by verdict.
    """
    chance, counted = random.Random(seed), Counter[str]()
    settings: dict[str, Any] = {"every": 1, "last": 2, "epochs": 10}
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        twin = run_ranks(world, functools.partial(train, **settings), f"{folder}/twin", 1, group=world > 1)
        longest = 0.6 * (time.monotonic() - started)
        for number in itertools.count():
            run, reached = f"{folder}/{number}", 0
            while True:
                victims = chance.choice([[*range(world)], [chance.randrange(world)]])
                after = chance.uniform(0, longest) if counted["kills"] < kills else None
                outcomes = ranks(world, run, seed_for(run), shot=(victims, after), at_least=reached, **settings)
                killed = any(outcome.killed for outcome in outcomes)
                if not killed or any(outcome.kind not in (None, *SURVIVORS) for outcome in outcomes):
                    break
                unfinished = [path for path in Path(run).glob("checkpoint_*") if not (path / ".complete").exists()]
                counted["inside a save"] += bool(unfinished)
                counted["kills"] += 1
                if found := find_checkpoint(run):
                    reached = max(reached, found.step)
            if any(outcome.value is None for outcome in outcomes):
                counted["lost work" if "LostWork" in {outcome.kind for outcome in outcomes} else "hard fail"] += 1
                print(*(outcome.error for outcome in outcomes if outcome.error), sep="\n", file=sys.stderr)
            else:
                counted["silent" if differences([outcome.value for outcome in outcomes], twin) else "equal"] += 1
            if counted["kills"] >= kills:
                return counted


class LostWork(Exception):
    """A resume from an older checkpoint than the newest good one."""


def shoot(rank: int, victims: list[int], after: float | None) -> None:
    """Let another process kill this one, whatever it is doing then."""
    victim = os.getpid()
    if after is None or rank not in victims or os.fork():
        return
    time.sleep(after)
    if os.getppid() == victim:
        os.kill(victim, signal.SIGKILL)
    os._exit(0)


_CALLS = {
    "mkdir": "mkdir mkdirat",
    "create": "open openat openat2 creat",
    "write": "write writev pwrite64 pwritev pwritev2 sendfile splice copy_file_range",
    "fsync": "fsync fdatasync sync_file_range",
    "rename": "rename renameat renameat2",
    "link": "link linkat",
    "unlink": "unlink unlinkat",
    "rmdir": "rmdir",
    "other": "truncate ftruncate fallocate symlink symlinkat mknod mknodat chmod fchmod fchmodat utimensat setxattr"
    " fsetxattr",
    "said": "access faccessat faccessat2",
}
"""The kinds of change and the system calls that make them."""


def traced(folder: Path) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """The changes that a training and one that finds it finished announce, and those that strace sees in their run
    folder: the thread, the kind and the path of each, in the order of each thread.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: strace is not there or may not trace.
    """
    run, log = folder / "run", folder / "calls"
    calls = ",".join(f"?{call}" for names in _CALLS.values() for call in names.split())
    command = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={calls}"]
    subprocess.run([*command, sys.executable, __file__, "--announce", str(run)], check=True, capture_output=True)
    announced, called = [], []
    kinds = {call: kind for kind, names in _CALLS.items() for call in names.split()}
    for line in log.read_text().splitlines():
        match = re.match(r"(\d+) +(\w+)\((.*)", line)
        if not match or str(run) not in line or (re.search(r"= -1 \w+", line) and "<event>" not in line):
            continue
        thread, kind, text = match[1], kinds[match[2]], match[3]
        if kind == "said":
            if told := re.search(r'"<event> (\w+) ([^"]*)"', text):
                announced.append((thread, told[1], shown(told[2], str(run))))
            continue
        if kind == "create" and not re.search("O_CREAT|O_WRONLY|O_RDWR|O_TRUNC", text) and match[2] != "creat":
            continue
        if kind == "unlink" and "AT_REMOVEDIR" in text:
            kind = "rmdir"
        base = re.match(r"\w+<([^>]*)>", text)
        names = re.findall(r'"([^"]*)"', text) if kind != "write" else []
        path = os.path.join(base[1] if base else "/", names[-1] if names else "")
        called.append((thread, kind, shown(path.rstrip("/"), str(run))))
    in_order = [sorted(found, key=lambda change: change[0]) for found in (announced, called)]
    return in_order[0], in_order[1]


def spread(items: list[Any], count: int | None) -> list[Any]:
    """So many of them, evenly spaced, first and last included; None for all."""
    if count is None or count >= len(items):
        return items
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


THIRD_PARTY = """
Third-party figures for the same question, not measured here, as published at https://pypi.org/project/ckpt-chaos/ (a
kill at each file boundary of one save, NTFS; the events are others than above, so compare kinds, not counts):

| | points | pass | lost work | hard fail | silent |
|---|---|---|---|---|---|
| Hugging Face Trainer 5.18.0, 1 process | 19 | 2 | 0 | 17 | 0 |
| Hugging Face Trainer 5.18.0, 2 ranks | 22 | 1 | 0 | 19 | 2 |
| Lightning 2.6.6, 1 process | 5 | 3 | 2 | 0 | 0 |
| Lightning 2.6.6, 2 ranks | 5 | 3 | 2 | 0 | 0 |"""


def table(found: list[Point]) -> str:
    lines = [
        f"| ranks | killed | in | points | {' | '.join(VERDICTS)} | s a point |",
        "|---" * (5 + len(VERDICTS)) + "|",
    ]
    groups: dict[tuple[int, int, str], list[Point]] = {}
    for point in found:
        groups.setdefault((point.world, point.kill.rank, point.kill.section), []).append(point)
    for (world, rank, section), group in groups.items():
        verdicts = Counter(point.verdict for point in group)
        counts = " | ".join(str(verdicts[verdict]) for verdict in VERDICTS)
        pace = sum(point.seconds for point in group) / len(group)
        lines.append(f"| {world} | rank {rank} | {SECTIONS[section][0]} | {len(group)} | {counts} | {pace:.2f} |")
    verdicts = Counter(point.verdict for point in found)
    passed = verdicts["newest"] + verdicts["previous"]
    counts = " | ".join(str(verdicts[verdict]) for verdict in VERDICTS)
    lines.append(f"| | | all | {len(found)} | {counts} | {100 * passed / len(found):g} % pass |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many points, spread over all")
    parser.add_argument("--random", type=int, metavar="KILLS", help="kills at random times instead")
    parser.add_argument("--world", type=int, choices=(1, 2), help="only this number of ranks")
    parser.add_argument("--json", action="store_true", help="one line a point")
    parser.add_argument("--announce", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("pimm_ray").addHandler(logging.NullHandler())
    torch.set_num_threads(1)  # the ranks are forks, which a thread pool would not survive
    if options.announce:
        Announced.aloud = True
        train(0, options.announce, 1)
        train(0, options.announce, 1, start="restart")
        return 0
    started = time.monotonic()
    worlds = [options.world] if options.world else [1, 2]
    if options.random:
        print("| ranks | kills | inside a save | runs that ended equal | lost work | hard fail | silent |")
        print("|---|---|---|---|---|---|---|")
        bad = 0
        for world in worlds:
            counted = at_random(world, options.random // len(worlds))
            counts = [counted[key] for key in ("kills", "inside a save", "equal", "lost work", "hard fail", "silent")]
            bad += sum(counts[3:])
            print(f"| {world} | {' | '.join(map(str, counts))} |")
        print(f"\n{time.monotonic() - started:.0f} s")
        return bad > 0
    twins = {world: undisturbed(world) for world in worlds}
    wanted = [(world, *point) for world, twin in twins.items() for point in points(twin)]
    found = []
    for world, kill, change in spread(wanted, options.sample):
        point = crash(kill, change, twins[world])
        found.append(point)
        if options.json:
            print(json.dumps(asdict(point)), flush=True)
        elif point.verdict not in ("newest", "previous"):
            print(
                f"{point.verdict}: {point.world} ranks, {point.kill}, before {point.change}: {point.detail}",
                file=sys.stderr,
            )
    if not options.json:
        print(table(found) + f"\n\n{time.monotonic() - started:.0f} s\n{THIRD_PARTY}")
    return any(point.verdict not in ("newest", "previous") for point in found)


if __name__ == "__main__":
    sys.exit(main())
