"""Compositions by Hydra in a fraction of its time.

Files are parsed by libyaml, and what the choices of groups make of them is kept: the values that a command sets besides are put
on a copy, in Hydra's own way. A grid, a report or a notebook composes the same choices hundreds of times.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any

import hydra
import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, _utils

from dpexp.config import presets
from dpexp.config.usage import conf_dir
from dpexp.schemas import setting_names

VERSION_BASE = "1.3"
# what Hydra's grammar has no place for outside of quotes
_STRANGE = re.compile(r"[^\x20-\x7e]|[()<>;!#&~`']")
# a setting of a group, which chooses none; Hydra's own settings may name further folders of choices
_VALUE = re.compile(r"(?!hydra\.)\w+(\.\w+)+=")
# config name -> its schema as Hydra knows it: making a node of one takes a fifth of a composition
_registered: dict[str, type] = {}


def spelled(word: str) -> str:
    """Spell a word of a command for Hydra: what its grammar cannot read (``é.csv``, ``~/a.csv``, ``a (1).csv``) in quotes."""
    name, equals, value = word.partition("=")
    if not equals or '"' in value or not _STRANGE.search(value) or _reads(word):
        return word
    borders = r"[^,:\[\]{}]+" if value.startswith(("[", "{")) else r"[^,]+"
    quoted = re.sub(borders, lambda m: f'"{m[0].strip()}"' if _STRANGE.search(m[0]) else m[0], value)
    return f"{name}={quoted}" if _reads(f"{name}={quoted}") else word


def _reads(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def register(config_name: str, schema: type) -> None:
    """Tell Hydra the types of a primary configuration, whose defaults list names them ``<config_name>_schema``."""
    if _registered.get(config_name) is schema:
        return
    _registered[config_name] = schema
    for name, function in presets.RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    node = OmegaConf.structured(schema)
    # mappings such as model.config take new entries without Hydra's "+"
    for key in setting_names(schema):
        if isinstance(mapping := OmegaConf.select(node, key), DictConfig):
            OmegaConf.set_struct(mapping, False)
    ConfigStore.instance().store(name=f"{config_name}_schema", node=node, provider="dpexp")


def composed(config_name: str, overrides: Sequence[str], schema: type) -> DictConfig:
    """Let Hydra compose a primary configuration, whose schema is registered; without Hydra's own settings."""
    values = [override for override in overrides if _is_a_value(override, schema)]
    choices = tuple(override for override in overrides if not _is_a_value(override, schema))
    own_folder = any(choice.startswith("hydra.") for choice in choices)
    chosen = _chosen.__wrapped__ if own_folder else _chosen
    cfg = copy.deepcopy(chosen(config_name, choices, schema, _newest()))
    if values:
        parsed = OverridesParser.create().parse_overrides(values)
        ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
        ConfigLoaderImpl._apply_overrides_to_config(parsed, cfg)
    return cfg


def _is_a_value(override: str, schema: type) -> bool:
    """Does it set something, as ``optim.lr=1`` and ``seed=1`` do, and chooses no file of a group?"""
    name, equals, _ = override.partition("=")
    own = (field.name for field in fields(schema))
    return bool(_VALUE.match(override)) or bool(equals and name in own and not (conf_dir() / name).is_dir())


@lru_cache(maxsize=512)
def _chosen(config_name: str, choices: tuple[str, ...], schema: type, newest: int) -> DictConfig:
    # inside of a job Hydra is there
    there = GlobalHydra.instance().is_initialized()
    with nullcontext() if there else hydra.initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return hydra.compose(config_name, overrides=list(choices))


def _newest() -> int:
    """When a file of choices was last written, in nanoseconds: somebody may edit them between two compositions."""
    return max(path.stat().st_mtime_ns for path in conf_dir().rglob("*.yaml"))


_in_python = _utils.get_yaml_loader


@cache
def yaml_loader() -> Any:
    """Make OmegaConf's loader with the parser of libyaml, where PyYAML was built with it.

    What the words of a file mean (numbers, keys that stand there twice) is decided by the same code as before.
    """
    meaning: Any = _in_python()
    if not yaml.__with_libyaml__:
        return meaning

    class Loader(yaml.cyaml.CParser, meaning):
        def __init__(self, stream: Any) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


_utils.get_yaml_loader = yaml_loader

_all_choices = defaults_list._create_interpolation_map


def _choices_that_are_asked_for(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """Tell the defaults list of a file what was chosen so far, if one of its lines names a choice (``${task}``): few do."""
    asked = any(default.is_interpolation() for default in defaults)
    return _all_choices(overrides, defaults, self_added) if asked else OmegaConf.create()


defaults_list._create_interpolation_map = _choices_that_are_asked_for  # type: ignore[assignment]
# Hydra copies it with all schemas for each composition, and copies what it takes out of it again.
ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
