"""The job whose checkpoint is committed here: it proves that a later release still reads what this one wrote.

    python -m tests.golden.make        writes checkpoint_* and expected.json anew, when the format has a new version

Every kind of file and of state is in it, as small as it goes. What is expected does not depend on the versions of torch
and numpy: digests of stored bytes, and draws of streams that are frozen.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pimm_ray import CheckpointManager, ElasticLoader, KeepPolicy
from tests.ranks import run_ranks

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
OLDER, NEWER = 4, 7
"""Steps of the two saves; an epoch has five. The newer one is committed."""
GROUP = ("lr", "betas", "eps", "weight_decay", "amsgrad", "initial_lr", "max_lr")


class Numbers:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class Clock:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.ticks = 0

    def state_dict(self) -> dict[str, Any]:
        return {"ticks": self.ticks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ticks = state["ticks"]


class Golden:
    """Fresh objects of the job on one rank."""

    def __init__(self, folder: Path, rank: int, world: int, *, width: int = 5, seed: int = 1):
        for start in (random.seed, np.random.seed, torch.manual_seed):
            start(seed + 100 * rank)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        model = DistributedDataParallel(self.net) if world > 1 else self.net
        slow, fast = self.net[0].parameters(), [*self.net[1].parameters(), *self.net[2].parameters()]
        groups = [{"params": slow, "weight_decay": 0.1}, {"params": fast, "lr": 0.02, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, [0.01, 0.02], total_steps=15)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.loader = ElasticLoader(Numbers(), 4, seed=3)
        self.clock = Clock()
        self.notes: dict[str, Any] = {}
        self.world, self.model = world, model
        self.manager = CheckpointManager(
            model=model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            loader=self.loader,
            ema=self.ema,
            extra={"clock": self.clock, "notes": self.notes},
            keep=KeepPolicy(last=9),
            storage=folder,
            seed=11,
        )

    def train(self, saves: tuple[int, ...]) -> list[dict[str, Any]]:
        """Save after these steps and leave in mid-epoch; what there was at each."""
        self.manager.resume()
        saved = []
        for _ in self.manager.epochs(3):
            for batch in self.manager.batches():
                noise = random.random() + np.random.rand() + torch.rand(()).item()
                x = torch.stack([batch.float().sin(), batch.float().cos() + noise], dim=1)
                loss = self.model(x).square().mean() * self.loader.weight
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.ema.update_parameters(self.net)
                self.clock.ticks += 3
                self.manager.step(loss=loss)
                if self.manager.state.global_step in saves:
                    self.notes.update(notes(self.manager.state.global_step))
                    info = self.manager.save(reason="golden", metrics={"score": 0.25, "worst": float("nan")})
                    saved.append({"path": Path(info.path), "facts": self.facts(), "draws": draws()})
                if len(saved) == len(saves):
                    return saved
        raise AssertionError("the run is over")

    def facts(self) -> dict[str, Any]:
        """What is restored, all but the streams; the same on every rank, and as JSON gives it back."""
        state, tree = self.manager.state, self.scheduler.state_dict()
        moments = {
            name: {leaf: digest(value) for leaf, value in self.optimizer.state[parameter].items()}
            for name, parameter in self.net.named_parameters()
        }
        facts = {
            "step": state.global_step,
            "epoch": state.epoch,
            "iter_in_epoch": state.iter_in_epoch,
            "samples_seen": state.samples_seen,
            "weights": {name: digest(value) for name, value in self.net.state_dict().items()},
            "ema": {name: digest(value) for name, value in self.ema.state_dict().items()},
            "moments": moments,
            "groups": [{key: group[key] for key in GROUP} for group in self.optimizer.param_groups],
            "scheduler": {key: tree[key] for key in ("last_epoch", "_step_count", "total_steps", "_last_lr")},
            "scaler": self.scaler.state_dict(),
            "clock": self.clock.ticks,
            "notes": spelled(self.notes),
        }
        return json.loads(json.dumps(facts))

    def next_ids(self) -> list[int]:
        """Samples of this rank's next micro-batch."""
        for _ in self.manager.epochs(3):
            for batch in self.manager.batches():
                return batch[: self.loader.real].tolist()
        raise AssertionError("the run is over")


def notes(step: int) -> dict[str, Any]:
    """One of each type that can be stored."""
    return {
        "half": torch.arange(3).to(torch.bfloat16) + step,
        "array": np.arange(4, dtype=">i2") * step,
        "scalar": np.float32(0.1),
        "day": np.datetime64("2026-01-02"),
        "tree": (None, True, 2**70, -0.0, float("inf"), 1 + 2j, "ünï", b"\0\xff", {3, 1}, frozenset("a"), [[]]),
        "keys": {1: "int", (2, "x"): "tuple", None: OrderedDict(b=1, a=2)},
        "counts": Counter("aab"),
        "size": torch.Size([2, 3]),
    }


def committed() -> Path:
    (path,) = HERE.glob("checkpoint_*")
    return path


def digest(value: Any) -> str:
    tensor = torch.as_tensor(value)
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def spelled(value: Any) -> Any:
    """A tree of plain data as JSON in which types and bits show."""
    if isinstance(value, dict):
        return [type(value).__name__, [[spelled(key), spelled(item)] for key, item in value.items()]]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, sorted(map(repr, value))]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [spelled(item) for item in value]]
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, np.ndarray | np.generic):
        return [type(value).__name__, value.dtype.str, list(value.shape), value.tobytes().hex()]
    return [type(value).__name__, repr(value)]


def draws() -> dict[str, Any]:
    """Where the three streams are, and what two of them give next. They do not move."""
    python, numpy = random.Random(), np.random.RandomState()
    python.setstate(random.getstate())
    numpy.set_state(np.random.get_state())
    return {
        "torch": digest(torch.get_rng_state()),
        "python": [python.random() for _ in range(2)],
        "numpy": numpy.rand(2).tolist(),
    }


def save(rank: int, folder: Path, steps: tuple[int, ...], width: int = 5) -> list[dict[str, Any]]:
    return Golden(folder, rank, dist.get_world_size(), width=width).train(steps)


def load(rank: int, folder: Path, checkpoint: Any = None, width: int = 5) -> dict[str, Any]:
    """What fresh objects are and draw after a resume."""
    golden = Golden(folder, rank, dist.get_world_size() if dist.is_initialized() else 1, width=width, seed=77)
    plan = golden.manager.resume(checkpoint=checkpoint)
    return {"source": plan.source, "facts": golden.facts(), "draws": draws(), "next": golden.next_ids()}


def main() -> None:
    for old in HERE.glob("checkpoint_*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory() as folder:
        saved = [rank[-1] for rank in run_ranks(2, save, Path(folder), (OLDER, NEWER))]
        path = Path(shutil.copytree(saved[0]["path"], HERE / saved[0]["path"].name))
        loaded = run_ranks(3, load, Path(folder))
    assert all(rank["facts"] == saved[0]["facts"] for rank in loaded)
    assert [rank["draws"] for rank in loaded[:2]] == [rank["draws"] for rank in saved]
    expected = {
        "facts": saved[0]["facts"],
        "draws": [rank["draws"] for rank in loaded],
        "next": sorted(index for rank in loaded for index in rank["next"]),
        "files": {str(f.relative_to(path)): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()},
    }
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")
    print(path.name, sum(expected["files"].values()), "bytes")


if __name__ == "__main__":
    main()
