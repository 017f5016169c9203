"""Addresses of weights on the Hugging Face Hub: `hf://organisation/name[@revision][/path/to/file]`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pimm_ray.errors import WeightsError

PREFIX = "hf://"
_FORM = "write hf://organisation/name[@revision][/path/to/file]"
_NAME = re.compile(r"[A-Za-z0-9_](?!.*(--|\.\.))[\w.-]{0,94}(?<![.-])", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_](?!.*(\.\.|//))[\w./+-]{0,200}(?<![./])", re.ASCII)
_OTHER_KINDS = ("datasets", "spaces", "models")
_SPECIAL = re.compile(r"refs/(pr|convert)/[^/]+")
"""Revisions of the Hub's own that have slashes and may be written with them."""


@dataclass(frozen=True)
class Address:
    """A repository of models, the branch, tag or commit (None: its main branch), and a file of it (None: the one with
    the weights)."""

    repo: str
    revision: str | None
    path: str | None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises WeightsError, which names the part that is wrong."""
        if not isinstance(text, str) or not text.startswith(PREFIX):
            raise WeightsError(f"{text!r} is no address on the Hub: {_FORM}")
        organisation, _, rest = text.removeprefix(PREFIX).partition("/")
        if organisation in _OTHER_KINDS:
            raise WeightsError(f"{text}: {organisation}/ holds no weights that can be loaded: {_FORM}")
        name, at, rest = _split(rest)
        revision: str | None = None
        path = rest
        if at:
            special = _SPECIAL.match(rest)
            revision, _, path = (special.group(), "", rest[special.end() + 1 :]) if special else rest.partition("/")
            revision = re.sub("%2f", "/", revision, flags=re.IGNORECASE)
            if not _REVISION.fullmatch(revision):
                raise WeightsError(f"{text}: {revision!r} is no revision: give a branch, a tag or a commit after the @")
        for part in (organisation, name):
            if not _NAME.fullmatch(part):
                raise WeightsError(f"{text}: {part!r} is no name of an organisation or repository: {_FORM}")
        whole = text.removeprefix(PREFIX)
        if path or whole.endswith("/"):
            check_path(path, where=text)
        return cls(f"{organisation}/{name}", revision, path or None)


def check_path(path: str, *, where: str) -> None:
    """Refuse a path in a repository that could lead out of a folder, or that no repository has.

    Raises:
        WeightsError: it names the part that is wrong.
    """
    for part in path.split("/"):
        if part in ("", ".", "..") or any(sign in part for sign in "\\%") or not part.isprintable() or len(part) > 255:
            raise WeightsError(f"{where}: {part!r} in {path!r} is no part of a path in a repository: {_FORM}")


def _split(rest: str) -> tuple[str, str, str]:
    """The repository's name, "@" if a revision follows, and the rest."""
    name, slash, path = rest.partition("/")
    name, at, revision = name.partition("@")
    return name, at, f"{revision}{slash}{path}" if at else path
