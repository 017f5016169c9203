"""Which stored tensor goes to which name of a model: wrappers off, then the longest rule that fits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pimm_ray.errors import WeightsError

Rules = Mapping[str, str] | Sequence[tuple[str, str]]
"""Prefixes of whole name parts and what takes their place; "" fits every name, or takes a prefix away."""


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """What became of the stored names."""

    targets: dict[str, str]
    """New names by stored ones."""
    by_rule: dict[str, int]
    """How many names each rule changed, by "old -> new"."""


def rename(stored: Iterable[str], wanted: Collection[str], rules: Rules = ()) -> Renamed:
    """Names for the stored tensors, as near to the wanted ones as wrappers and rules bring them.

    `module.` in front of all names and `_orig_mod.` anywhere are wrappers; a submodule that is really called `module`
    stays. Of the rules whose prefix fits whole parts of a name, the longest counts, in whatever order they come.

    Raises:
        WeightsError: two stored names would become one, or two rules have one prefix.
        TypeError: a rule is not a pair of strings.
    """
    table = _table(rules)
    given = list(stored)
    ours = {_opened(name) for name in wanted}
    theirs = dict(zip(given, _unwrapped([_opened(name) for name in given], ours), strict=True))
    first = {} if any(name.startswith("module.") for name in ours) else {"module"}
    prefixes = {_bare(old, first): (old, _bare(new, first)) for old, new in table.items()}
    if len(prefixes) < len(table):
        raise WeightsError(f"two rules have one prefix once wrappers are taken off: {sorted(table)}")
    counts = {f"{old or '(all)'} -> {new or '(nothing)'}": 0 for old, new in table.items()}
    targets: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in given:
        target = theirs[name]
        fitting = [prefix for prefix in prefixes if not prefix or f"{target}.".startswith(f"{prefix}.")]
        if fitting:
            best = max(fitting, key=len)
            old, new = prefixes[best]
            rest = target[len(best) :].removeprefix(".")
            target = f"{new}.{rest}" if new and rest else new or rest
            counts[f"{old or '(all)'} -> {table[old] or '(nothing)'}"] += 1
        if target not in ours:
            inner = ".".join(part for part in target.split(".") if part != "module")
            target = inner if inner in ours else target
        if target in taken:
            raise WeightsError(
                f"{taken[target]!r} and {name!r} both become {target!r}: change the rules {table} so that one does not"
            )
        targets[name], taken[target] = target, name
    return Renamed(targets=targets, by_rule=counts)


def _table(rules: Rules) -> dict[str, str]:
    pairs = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
    table: dict[str, str] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise TypeError(f"rule {pair!r} is not a pair of strings: use ('old prefix', 'new prefix') or a dict")
        old, new = (part.strip(".") for part in pair)
        if old in table:
            raise WeightsError(f"two rules have the prefix {old!r}: leave one")
        table[old] = new
    return table


def _opened(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _unwrapped(names: list[str], ours: Collection[str]) -> list[str]:
    """Without what wraps the whole model."""
    while names and all(name.startswith("module.") for name in names) and not _fits(names, ours):
        names = [name.removeprefix("module.") for name in names]
    return names


def _fits(names: list[str], ours: Collection[str]) -> bool:
    return any(name in ours for name in names)


def _bare(prefix: str, wrappers: Collection[str]) -> str:
    """A side of a rule without wrappers."""
    parts = _opened(prefix).split(".")
    while len(parts) > 1 and parts[0] in wrappers:
        parts = parts[1:]
    return ".".join(parts)
