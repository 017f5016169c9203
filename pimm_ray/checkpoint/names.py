"""What the entries of a model are called: without wrappers, so that each wrapping loads into each other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from pimm_ray.errors import UnstorableState


def bare_names(module: nn.Module) -> dict[str, str]:
    """Map each state_dict key of `module` to its name without wrappers (DDP, torch.compile), at any depth."""
    prefixes = dict(_prefixes(module, "", ""))
    names = {}
    for key in module.state_dict():
        owner, leaf = key, ""
        while owner and owner + "." not in prefixes:
            owner, _, last = owner.rpartition(".")
            leaf = f"{last}.{leaf}" if leaf else last
        names[key] = (prefixes[owner + "."] if owner else prefixes[""]) + leaf
    if len(set(names.values())) != len(names):
        raise UnstorableState("two entries of the model's state_dict have one name once wrappers are taken off")
    return names


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Bare name of each parameter, by `id`. A parameter with several names gets its first."""
    names = bare_names(model)
    found: dict[int, str] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if key in names:  # a hook of state_dict() may leave it out
            found.setdefault(id(parameter), names[key])
    return found


def _prefixes(module: nn.Module, full: str, bare: str) -> Iterator[tuple[str, str]]:
    yield full, bare
    # Not named_children(): it leaves out the second name of a shared child, whose keys state_dict() has.
    for name, child in module._modules.items():
        if child is None:
            continue
        wrapped = name == "_orig_mod" or (
            name == "module" and isinstance(module, DistributedDataParallel | DataParallel | AveragedModel)
        )
        yield from _prefixes(child, f"{full}{name}.", bare if wrapped else f"{bare}{name}.")


def some(names: list[str], limit: int = 8) -> str:
    """Names as a message lists them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
