"""The secret of a run: where it lies, what follows from it, and how a copy of it is told from the original.

Whoever has the key can redraw the noise and the batches, and can sign a forged ledger: epsilon is void. It comes from the
operating system and stays in the run's folder alone, until the run is finished.

A copy of the folder has the same key. If original and copy went on with the same samples, what they release together would
cost more than the sum of their epsilons (19.8 where the sum says 12.2). So each place draws from a key of its own: beside
the key stands which file it was (inode and time of change, which no copying carries over), and where it is another
file a new random salt is kept, from which all further draws follow. Both ledgers hold the common steps, so that the sum of
the epsilons covers what both have released. Moving a folder within a disk changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from dpexp.durable import flush_folder, read_json, write_json, write_private
from dpexp.errors import UserError

KEY_BYTES = 32
KEY, PLACE, LEDGER = "secret.key", "secret.place.json", "ledger.jsonl"

COPIED = (
    "the folder is a copy, or came from another disk or a backup (or the mode of its secret.key was changed): since then it "
    "draws samples and noise of its own; what another copy of it has released is not in this epsilon: add the two"
)


@dataclass(frozen=True)
class Keys:
    """The key of a run and the one that its draws follow from; both 32 bytes."""

    run: bytes = field(repr=False)
    """The same for the whole life of the run: signs the ledger."""
    draws: bytes = field(repr=False)
    """Of sampling, dropout and noise: another one in each copy of the folder."""

    @property
    def copied(self) -> bool:
        """Whether the folder was found to be a copy."""
        return self.run != self.draws


def open_keys(folder: str | os.PathLike[str], fixed_seed: int | None = None, name: str = "") -> Keys:
    """Read the keys of the run in ``folder``, or make them.

    Args:
        folder: of the run. Keeps `secret.key` (32 random bytes, mode 0600) and `secret.place.json`.
        fixed_seed: for tests; the keys then follow from this number and no file is used, so that a copy of the folder is not
            noticed, and the guarantee holds only while the number is secret.
        name: of the run, with a fixed seed: runs with different names share nothing.

    Raises:
        UserError: the key can't be kept, is no key, can be read by others, or is gone although the ledger has entries; or the
            ledger is gone although it had some.
    """
    if fixed_seed is not None:
        key = hashlib.sha256(f"dpexp fixed seed {fixed_seed} of {name}".encode()).digest()
        return Keys(key, key)
    folder = Path(folder)
    charged = (folder / LEDGER).exists() and (folder / LEDGER).stat().st_size > 0
    if charged and not (folder / KEY).exists():
        raise UserError(
            f"{folder / KEY} is gone, and without it this run cannot go on (its ledger cannot be checked, its noise not be "
            "repeated): put it back, or start a new run (another seed). A finished run deletes its key; privacy.keep_key=true "
            "keeps it"
        )
    if not charged and read_json(folder / PLACE).get("charged"):
        raise UserError(
            f"{folder / LEDGER} is gone or empty, and steps of this run were charged there: restore it from a copy, or begin a "
            "new run in another folder (of dpexp train: another seed), whose epsilon is added to that of this one"
        )
    key = _load_or_make(folder / KEY)
    salt = _salt(folder, charged)
    return Keys(key, hmac.digest(key, f"copy {salt}".encode(), "sha256") if salt else key)


def delete_key(folder: str | os.PathLike[str]) -> None:
    """Delete the key of a run that will not go on; nothing happens where there is none.

    The file system decides whether its bytes are overwritten. Record, model and ledger stay as they are.
    """
    folder = Path(folder)
    present = [folder / name for name in (KEY, PLACE) if (folder / name).exists()]
    for file in present:
        file.unlink()
    if present:
        flush_folder(folder)


def note_charged(folder: Path) -> None:
    """Remember beside the key, where there is one, that the ledger has begun: one that is gone later is missed."""
    if (folder / PLACE).exists():
        write_json(folder / PLACE, read_json(folder / PLACE) | {"charged": True})


def _load_or_make(file: Path) -> bytes:
    try:
        if not file.exists():
            write_private(file, secrets.token_bytes(KEY_BYTES))
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


def _salt(folder: Path, charged: bool) -> str:
    """Empty in the folder where the key was made; in a copy, 32 random hex digits, made when it is first seen."""
    status = (folder / KEY).stat()
    here = {"inode": status.st_ino, "changed_ns": status.st_ctime_ns}
    known = read_json(folder / PLACE)
    if known.get("key_file") == here and "salt" in known:
        if charged and not known.get("charged"):
            # cut off between the first line of the ledger and its mark
            note_charged(folder)
        return str(known["salt"])
    # A run that was killed before it knew its place has charged nothing; else somebody took the file away.
    copied = charged or bool(known)
    salt = secrets.token_hex(16) if copied else ""
    write_json(folder / PLACE, {"key_file": here, "salt": salt, "charged": charged})
    return salt
