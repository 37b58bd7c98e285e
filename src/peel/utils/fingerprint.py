"""Short hashes of contents."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(parts: Iterable[str | bytes | Tensor]) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of all parts; tensors count by their values."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]
