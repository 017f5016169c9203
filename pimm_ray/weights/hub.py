"""Weights from the Hugging Face Hub: which files an `hf://` address means, at which commit, and where they lie here."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub import errors as hub_errors

from pimm_ray.checkpoint.documents import short
from pimm_ray.checkpoint.names import some
from pimm_ray.errors import WeightsError
from pimm_ray.weights.address import Address, check_path
from pimm_ray.weights.hub_files import HTTP_ERROR, TIMEOUT, Cache, Wanted, may_pass, patiently, status_of
from pimm_ray.weights.single_flight import single_flight
from pimm_ray.weights.source import CONFIGS, FILES, parts_of

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FAILURES = (HTTP_ERROR, OSError, ValueError, KeyError, TypeError, AttributeError)
"""Of a request: the client takes a reply apart without looking whether it is one of the Hub's."""


@dataclass(frozen=True)
class Fetched:
    """Where the weights lie now (a file, or the index of its parts), and the commit they are of."""

    path: str
    commit: str


class _Silent(Exception):
    """The Hub did not answer, or not as the Hub does; the text is for the user."""


def resolve(address: str) -> str:
    """The commit that an address points to now. Where the Hub does not answer, what the cache knows, with a warning.

    Raises:
        WeightsError: there is no such repository or revision, or nobody knows.
    """
    return _Repository(address).resolve()


def fetch(address: str, *, commit: str | None = None) -> Fetched:
    """Have the weights, all their parts and their configuration in the cache. One process of a node downloads.

    Args:
        address: `hf://organisation/name[@revision][/path/to/file]`.
        commit: to take, whatever the revision points to now. With it, and with the files in the cache, no request is
            made.

    Raises:
        WeightsError: the address is wrong, the Hub refuses or fails, or what came is not what it announced.
    """
    repository = _Repository(address)
    return repository.fetch(commit or repository.resolve())


class _Repository:
    def __init__(self, address: str):
        self.address, self.at = address, Address.parse(address)
        self.cache = Cache(self.at.repo)

    def resolve(self) -> str:
        revision = self.at.revision or constants.DEFAULT_REVISION
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            return self._ask(revision)[0]
        except _Silent as silent:
            known = self.cache.commit_of(revision)
            if known is None:
                raise WeightsError(str(silent)) from silent
            logger.warning("%s. The cache has it at commit %s, which is used", silent, known)
            return known

    def fetch(self, commit: str) -> Fetched:
        found = self._held(commit)
        if found is None:
            with single_flight(f"{self.cache.folder} {commit}", f"download {self.address}"):
                found = self._held(commit) or self._download(commit)
        return Fetched(str(self.cache.place(commit, found)), commit)

    def _held(self, commit: str) -> str | None:
        """The name of the weights' file, if it and all that belongs to it is here."""
        files = self.cache.listing(commit)
        if files is None:
            return None
        chosen = self._choose(files)
        if not self.cache.has(commit, files[chosen]):
            return None
        beside = self._beside(commit, chosen, files)
        return chosen if all(self.cache.has(commit, files[name]) for name in beside) else None

    def _download(self, commit: str) -> str:
        try:
            files = self.cache.listing(commit) or self._ask(commit)[1]
        except _Silent as silent:
            files = self.cache.snapshot(commit)
            if not files:
                raise WeightsError(str(silent)) from silent
        chosen, began = self._choose(files), time.monotonic()
        logger.info("%s: fetching %s at commit %s to %s", self.address, chosen, commit, self.cache.root)
        new = [self._get(commit, files[chosen])]
        new += [self._get(commit, files[name]) for name in self._beside(commit, chosen, files)]
        logger.info(
            "%s: fetched %.0f MB in %.1f s; %d files were in the cache",
            self.address, sum(count or 0 for count in new) / 1e6, time.monotonic() - began, new.count(None),
        )  # fmt: skip
        return chosen

    def _ask(self, revision: str) -> tuple[str, dict[str, Wanted]]:
        """The commit, and what the repository holds at it.

        Raises:
            WeightsError: the Hub refuses.
            _Silent: it does not answer.
        """

        def ask() -> tuple[str, dict[str, Wanted]]:
            info = HfApi().model_info(self.at.repo, revision=revision, files_metadata=True, timeout=TIMEOUT)
            files = {}
            for file in info.siblings or []:
                digest = file.lfs.sha256 if file.lfs else file.blob_id
                size = file.size if isinstance(file.size, int) and file.size >= 0 else None
                known = isinstance(digest, str) and _DIGEST.fullmatch(digest)
                files[file.rfilename] = Wanted(file.rfilename, size, digest if known else None)
            if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
                raise ValueError(f"commit {short(info.sha)}")
            if _COMMIT.fullmatch(revision) and info.sha != revision:
                raise ValueError(f"commit {info.sha} instead of {revision}")
            return info.sha, files

        try:
            commit, files = patiently(ask)
        except _FAILURES as error:
            if status_of(error) is not None and not may_pass(error):
                raise WeightsError(self._told(error)) from error
            raise _Silent(self._told(error)) from error
        for name in files:
            check_path(name, where=f"{self.address} at commit {commit}")
        self.cache.note(revision, commit, files)
        return commit, files

    def _get(self, commit: str, file: Wanted) -> int | None:
        """Bytes that were downloaded; None when it was here."""
        if self.cache.has(commit, file):
            return None
        api = HfApi()
        url = hf_hub_url(self.at.repo, file.name, revision=commit, endpoint=api.endpoint)
        try:
            if file.size is None or file.digest is None:
                file = patiently(lambda: self._measured(file, url))
            self.cache.fetch(commit, file, url)
        except _FAILURES as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(self._told(error)) from error
        return self.cache.place(commit, file.name).stat().st_size

    def _measured(self, file: Wanted, url: str) -> Wanted:
        """With size and digest, where the listing had none."""
        said = get_hf_file_metadata(url, timeout=TIMEOUT)
        digest = said.etag if said.etag and len(said.etag) == 64 and _DIGEST.fullmatch(said.etag) else file.digest
        return replace(file, size=file.size if file.size is not None else said.size, digest=digest)

    def _choose(self, files: dict[str, Wanted]) -> str:
        """The file with the weights.

        Raises:
            WeightsError: there is none, or several that are equally good.
        """
        if self.at.path in files:
            return self.at.path
        base = f"{self.at.path}/" if self.at.path else ""
        inside = [name.removeprefix(base) for name in files if name.startswith(base)]
        loose = [name for name in inside if "/" not in name and name.endswith(".pth")]
        for name in (*FILES, "model_best.pth", "model_last.pth", *(loose if len(loose) == 1 else ())):
            if name in inside:
                return base + name
        seen = some(sorted(files)) or "nothing"
        if self.at.path and not inside:
            raise WeightsError(f"{self.address}: the repository has no {self.at.path}; it holds {seen}")
        raise WeightsError(f"{self.address}: no weights that are known by name; it holds {seen}. Name one file: "
                           f"hf://{self.at.repo}/path/to/file")  # fmt: skip

    def _beside(self, commit: str, chosen: str, files: dict[str, Wanted]) -> list[str]:
        """What belongs to the weights' file, which is here: the parts of an index, and a configuration."""
        folder = PurePosixPath(chosen).parent
        names = [str(folder / name) for name in CONFIGS if str(folder / name) in files][:1]
        if chosen.endswith(".index.json"):
            for part in parts_of(self.cache.place(commit, chosen).read_bytes(), where=f"{self.address}: {chosen}"):
                if str(folder / part) not in files:
                    raise WeightsError(f"{self.address}: {chosen} names {part}, which the repository does not have")
                names.append(str(folder / part))
        return names

    def _told(self, error: BaseException) -> str:
        """What went wrong and what to do, in one line."""
        repo, revision, status = self.at.repo, self.at.revision or constants.DEFAULT_REVISION, status_of(error)
        if isinstance(error, hub_errors.OfflineModeIsEnabled):
            why = f"it is not in {self.cache.root}, and HF_HUB_OFFLINE forbids to ask the Hub: unset it once"
        elif isinstance(error, hub_errors.GatedRepoError):
            why = f"{repo} is gated: accept its terms on its page, and set HF_TOKEN"
        elif isinstance(error, hub_errors.RevisionNotFoundError):
            why = f"{repo} has no revision {revision}: check it"
        elif isinstance(error, hub_errors.RepositoryNotFoundError) or status in (401, 403):
            why = f"there is no {repo}, or it is private: check the name, and set HF_TOKEN for a private one"
        elif isinstance(error, hub_errors.EntryNotFoundError) or status == 404:
            why = f"{repo} announces a file that it does not have: {_line(error)}"
        elif status == 429:
            why = "the Hub answers no more (too many requests): wait some minutes, or set HF_TOKEN"
        elif not isinstance(error, (HTTP_ERROR, OSError)):
            why = f"{HfApi().endpoint} does not answer as the Hub does ({_line(error)}): check HF_ENDPOINT"
        else:
            why = f"could not be fetched: {_line(error)}. Try again: a download goes on where it ended"
        return f"{self.address}: {why}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).partition("For more information check")[0].split()) or type(error).__name__
