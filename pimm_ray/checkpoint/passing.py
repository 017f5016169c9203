"""Which errors of a storage may pass by themselves."""

from __future__ import annotations

import errno

_LASTING = {
    getattr(errno, name)
    for name in (
        "EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "ENAMETOOLONG", "ENOTDIR", "EISDIR", "EEXIST",
        "ENOTEMPTY", "EINVAL", "ELOOP", "EMFILE", "ENXIO",
    )
}  # fmt: skip
_LASTING_WORDS = (
    "ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "NO_SUCH_BUCKET", "allow_bucket_creation",
)  # fmt: skip


def may_pass(error: OSError | ValueError) -> bool:
    """Whether the same operation may well succeed a moment later."""
    lasting = isinstance(error, PermissionError) or getattr(error, "errno", None) in _LASTING
    return isinstance(error, OSError) and not lasting and not any(word in str(error) for word in _LASTING_WORDS)
