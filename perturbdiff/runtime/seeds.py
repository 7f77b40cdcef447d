"""Random generators that belong to numbers: a draw depends on the seed and on what is drawn, never on other draws.

Those of NumPy come from `generator`. A generator of torch, which starts from one number, takes `state`.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(*words: int) -> np.random.Generator:
    """Return the random generator that belongs to these non-negative numbers, on any machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def state(*words: int) -> int:
    """Return the 64-bit number that belongs to these non-negative numbers."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def words(seed: int, labels: tuple[str, ...], number: int) -> tuple[int, ...]:
    """Return the numbers that seed set ``number`` - 1 of a condition; number 0 seeds its control cells."""
    digest = hashlib.sha256("\0".join(labels).encode()).digest()
    return (seed, int.from_bytes(digest[:8], "little"), number)
