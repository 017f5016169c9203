"""Anyone's weights into a model, and an honest report of what went where."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pimm_ray.checkpoint.names import bare_names, some
from pimm_ray.errors import StateMismatch, WeightsError
from pimm_ray.weights.rules import Rules, rename
from pimm_ray.weights.source import Weights, open_weights

logger = logging.getLogger(__name__)

MIN_MATCH = 0.5
_EXAMPLES = 2

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load_weights` did. Printed, it groups the names by prefix and counts them.

    Args:
        origin, commit: where the weights are from; `commit` of a repository on the Hub.
        loaded: names of the model that got stored values, in the model's order.
        missing: names of the model that kept what they had, since nothing was stored for them.
        unexpected: stored names that the model has no place for.
        mismatched: (stored shape, model's shape) by names of the model that kept what they had.
        by_rule: how many stored names each rule changed.
    """

    origin: str
    commit: str | None
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[Shape, Shape]]
    by_rule: dict[str, int]

    @property
    def share(self) -> float:
        """How much of the model was loaded, of 1, in tensors."""
        return len(self.loaded) / max(1, len(self.loaded) + len(self.missing) + len(self.mismatched))

    def say(self, min_match: float = MIN_MATCH) -> None:
        """Log it: as a warning when the share is below `min_match`."""
        if self.share < min_match:
            logger.warning("only %.0f %% of the model was loaded: %s", 100 * self.share, self)
        else:
            logger.info("%s", self)

    def __str__(self) -> str:
        at = f" at commit {self.commit}" if self.commit else ""
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        lines = [f"loaded {len(self.loaded)} of {total} tensors from {self.origin}{at}"]
        lines += [f"  rule {rule}: {count}" for rule, count in self.by_rule.items()]
        shapes = [f"{name} {list(a)} stored, {list(b)} here" for name, (a, b) in self.mismatched.items()]
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            lines += [f"  {title}: {group}" for group in _grouped(names)]
        lines += [f"  skipped, other shape: {one}" for one in shapes[:20]]
        if len(shapes) > 20:
            lines.append(f"  skipped, other shape: +{len(shapes) - 20} more")
        return "\n".join(lines)


def load_weights(
    model: nn.Module, source: Any, *, rules: Rules = (), strict: bool = False, min_match: float = MIN_MATCH
) -> LoadReport:
    """Load weights into a model, in place. Each rank that calls it loads its own; no rank waits for another.

    Local safetensors and `.pth` files are mapped into memory, so that the ranks of a node share one copy.

    Args:
        model: plain, or wrapped (DDP, torch.compile). Values take the dtype and device of its tensors.
        source: a checkpoint or run of pimm_ray (a run: its newest good one), a safetensors or `torch.save` file, a
            folder of Hugging Face's or an export of pimm's, a checkpoint of pimm's, or `hf://repo[@revision][/file]`;
            as path, URI, or object with `.path` and `.filesystem` such as a `ray.train.Checkpoint`.
        rules: (old prefix, new prefix) pairs, or a dict. The longest that fits whole parts of a stored name counts.
        strict: refuse anything missing, unexpected or of another shape. Else those keep what they had, and are listed.
        min_match: below this share of the model's tensors, from 0 to 1, the report is a warning.

    Raises:
        CheckpointNotFound: there is nothing at `source`.
        WeightsError: no stored name fits, two become one, or the address or file cannot be used.
        StateMismatch: `strict`, and something does not fit. The model is as it was.
        CorruptCheckpoint, IncompleteCheckpoint, UnsafeCheckpoint: of the source.

    Example:
        >>> print(load_weights(model, "hf://org/model@v2", rules={"encoder": "backbone.enc"}))
        loaded 212 of 214 tensors from hf://org/model@v2 at commit 4f9c...
          rule encoder -> backbone.enc: 212
          missing: head.* (2): head.weight, head.bias
    """
    report = apply(model, open_weights(source), rules=rules, strict=strict)
    report.say(min_match)
    return report


def apply(model: nn.Module, weights: Weights, *, rules: Rules = (), strict: bool = False) -> LoadReport:
    """As `load_weights`, of opened weights, and says nothing."""
    keys = {bare: key for key, bare in bare_names(model).items()}
    live = model.state_dict()
    tensors = {bare: live[key] for bare, key in keys.items() if isinstance(live[key], torch.Tensor)}
    renamed = rename(weights.entries, tensors, rules)
    sources: dict[str, str] = {}
    mismatched: dict[str, tuple[Shape, Shape]] = {}
    for stored, name in renamed.targets.items():
        if name in tensors:
            theirs, ours = weights.entries[stored].shape, tuple(tensors[name].shape)
            if theirs == ours:
                sources[name] = stored
            else:
                mismatched[name] = theirs, ours
    held = {_place(tensors[name]) for name in sources}
    absent = [name for name in tensors if name not in sources and name not in mismatched]
    report = LoadReport(
        origin=weights.origin,
        commit=weights.commit,
        loaded=tuple(name for name in tensors if name in sources),
        missing=tuple(name for name in absent if _place(tensors[name]) not in held),
        unexpected=tuple(stored for stored, name in renamed.targets.items() if name not in tensors),
        mismatched=mismatched,
        by_rule=renamed.by_rule,
    )
    if strict and (report.missing or report.unexpected or mismatched):
        raise StateMismatch(
            f"strict=True: {report}", missing=report.missing, unexpected=report.unexpected, shapes=mismatched
        )
    if tensors and not sources:
        raise WeightsError(
            f"nothing in {weights.origin} fits the model: it stores {_some(weights.entries)}; the model has "
            f"{_some(tensors)}. Give rules=[(old prefix, new prefix)]; rules now: {renamed.by_rule or 'none'}"
        )
    wanted = {stored: keys[name] for name, stored in sources.items()}
    for batch in weights.read(wanted):
        model.load_state_dict({wanted[stored]: tensor for stored, tensor in batch.items()}, strict=False)
    return report


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Tied entries of a model have one."""
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else (id(tensor),)


def _some(names: Iterable[str]) -> str:
    return some(sorted(names), 4)


def _grouped(names: Iterable[str]) -> list[str]:
    """Names by their first two parts, with a count and some examples."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:-1][:2]), []).append(name)
    lines = []
    for prefix, held in groups.items():
        more = f" ... +{len(held) - _EXAMPLES} more" if len(held) > _EXAMPLES else ""
        lines.append(f"{prefix + '.*' if prefix else '*'} ({len(held)}): {', '.join(held[:_EXAMPLES])}{more}")
    return lines
