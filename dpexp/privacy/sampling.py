"""Poisson sampling and the secret key from which sampling and noise draw.

The key is the one secret of a run: whoever has it can redraw the noise and the batches, and epsilon is
void. It comes from the operating system and stays in the run's folder alone."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpexp.errors import UserError

KEY_BYTES = 32


class PoissonSampler:
    """Each of ``num_examples`` is in the sample of a step with probability ``sample_rate``, independently
    of all else.

    Counter based: the draw of a step depends on (key, step, attempt) alone, so that resuming needs no
    state. Raises `UserError` for a rate outside [0, 1] or no examples."""

    def __init__(self, num_examples: int, sample_rate: float, key: bytes) -> None:
        if num_examples < 1 or not 0 <= sample_rate <= 1:
            raise UserError(
                f"cannot sample {num_examples} examples at rate {sample_rate}: N >= 1 and 0 <= q <= 1"
            )
        self.num_examples = num_examples
        self.sample_rate = sample_rate
        self._key = key

    def draw(self, step: int, attempt: int = 0) -> NDArray[np.int64]:
        """Indices of the sample, sorted and distinct; may be empty.

        A repeated step (another ``attempt`` in the ledger) must draw anew: its charge is that of an
        independent sample."""
        words = np.frombuffer(_derive(self._key, "sampling", step, attempt), dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(key=words[:2]))
        # Exactly Poisson sampling: given their number, which is binomial, all sets of that size are equally
        # likely.
        size = rng.binomial(self.num_examples, self.sample_rate)
        return np.sort(rng.choice(self.num_examples, size=size, replace=False, shuffle=False)).astype(
            np.int64
        )


class GroupedSampler:
    """Poisson sampling with a rate for each group of examples (`dpexp.privacy.individual`).

    Args:
        groups: ``[N]``, which group each example is in.
        rates: q_g of each group.
        key: secret; every group draws from a key of its own that follows from it.
    """

    def __init__(self, groups: NDArray[np.int64], rates: Sequence[float], key: bytes) -> None:
        self._members = [np.flatnonzero(groups == group) for group in range(len(rates))]
        self._samplers = [
            PoissonSampler(len(members), rate, _derive(key, "sampling of group", group, 0))
            for group, (members, rate) in enumerate(zip(self._members, rates, strict=True))
        ]

    def draw(self, step: int, attempt: int = 0) -> NDArray[np.int64]:
        """Indices of the sample, sorted and distinct; may be empty. See `PoissonSampler.draw`."""
        drawn = zip(self._members, self._samplers, strict=True)
        return np.sort(np.concatenate([members[sampler.draw(step, attempt)] for members, sampler in drawn]))


def stream(key: bytes, name: str, step: int, attempt: int = 0) -> int:
    """A seed in [0, 2^63) for the generator called ``name``, by HMAC-SHA-256 of the name, step and attempt.

    Different names, steps or attempts give unrelated seeds. An attempt that was charged again (see
    `dpexp.privacy.ledger`) must pass its number: two sums under the same noise reveal their difference."""
    return int.from_bytes(_derive(key, name, step, attempt)[:8], "little") >> 1


def load_or_make_key(path: str | os.PathLike[str], fixed_seed: int | None = None) -> bytes:
    """The run's 32-byte key: read from ``path``, or made from the system's randomness and kept there (mode
    0600).

    With ``fixed_seed`` (for tests; the guarantee then holds only while the seed is secret) the key follows
    from the seed and no file is used. Raises `UserError` where the file is not a key, or others may read
    it."""
    if fixed_seed is not None:
        return hashlib.sha256(f"dpexp fixed seed {fixed_seed}".encode()).digest()
    file = Path(path)
    try:
        if not file.exists():
            _write_secret(file, secrets.token_bytes(KEY_BYTES))
        key, mode = file.read_bytes(), file.stat().st_mode
    except OSError as error:
        raise UserError(f"cannot keep the noise key in {file}: {error.strerror}") from None
    if len(key) != KEY_BYTES:
        raise UserError(
            f"{file} is not a noise key ({len(key)} bytes, not {KEY_BYTES}): restore it, or start a new run"
        )
    if mode & 0o077:
        raise UserError(
            f"{file} can be read by others, who could remove the noise: chmod 600 it, or start a new run"
        )
    return key


def _derive(key: bytes, name: str, step: int, attempt: int) -> bytes:
    return hmac.digest(key, f"{name}\0{step}\0{attempt}".encode(), "sha256")


def _write_secret(file: Path, content: bytes) -> None:
    """Complete or not at all, and never readable by others, not even for a moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, file)
