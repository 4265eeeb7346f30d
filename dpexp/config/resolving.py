"""What a command composes, as an instance of its schema, checked: what ``conf/`` holds becomes the `RunConfig` that runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp.config.checks import check
from dpexp.config.composing import composed, register, spelled
from dpexp.config.mistakes import MISTAKES, check_choices, explain, unknown_key
from dpexp.config.unread import neutralise
from dpexp.config.usage import conf_dir
from dpexp.durable import flattened
from dpexp.errors import UserError
from dpexp.schemas import RunConfig, setting_names


def compose(
    overrides: Sequence[str] = (), config_name: str = "train", schema: type = RunConfig, of_grid: bool = False
) -> Any:
    """Compose what ``python -m dpexp.<config_name> <overrides>`` would run, as an instance of the schema; or one job of a grid.

    For tests, reports and notebooks. Raises `UserError` for every mistake that the command line would print.
    """
    register(config_name, schema)
    overrides = [spelled(override) for override in overrides]
    check_choices(overrides, config_name)
    try:
        cfg = composed(config_name, overrides, schema)
    except MISTAKES as error:
        raise explain(error, config_name, schema, overrides) from error
    return resolve(cfg, overrides, schema, config_name, of_grid)


def resolve(
    cfg: DictConfig,
    overrides: Sequence[str] = (),
    schema: type = RunConfig,
    config_name: str = "train",
    of_grid: bool = False,
) -> Any:
    """Make a composed configuration an instance of the schema (a checked `RunConfig` unless another one is given).

    Refuses keys that the schema doesn't have, lists everything that is missing in one message, resolves every
    interpolation, and sets what cannot matter (the quantile settings of a fixed threshold) to its neutral value. A command
    that gives such a setting is refused, unless it is a job of a grid, where it is meant for others.
    """
    if removed := [override for override in overrides if override.startswith("~")]:
        raise UserError(f"{removed[0]}: a setting can't be removed; choose another value, or null")
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    _forget_sizes_of_another_model(cfg, given)
    known = set(setting_names(schema))
    told = cast("dict[str, Any]", OmegaConf.to_container(cfg))
    for key, _ in flattened(told):
        if key not in known and not any(key.startswith(f"{mapping}.") for mapping in known):
            raise UserError(unknown_key(key, schema, config_name))
    try:
        # to look for them takes a fifth of a composition
        if MISSING in str(told) and (missing := sorted(OmegaConf.missing_keys(cfg))):
            needed = "; ".join(f"{key}=…" for key in missing)
            raise UserError(f"not given: {needed} (dpexp {config_name} --help says what they are)")
        settings = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise explain(error, config_name, schema, overrides) from error
    if isinstance(settings, RunConfig):
        neutralise(settings)
        if settings.data.cache:
            settings.data.cache = os.path.expanduser(settings.data.cache)
        check(settings, given, of_grid=of_grid)
    return settings


def _forget_sizes_of_another_model(cfg: DictConfig, given: Mapping[str, str]) -> None:
    """Leave a model that the command line chose as its own file describes it: a scale's `model.config` is meant for its own."""
    file = conf_dir() / "model" / f"{given.get('model')}.yaml"
    if not file.is_file() or "model.config" in given:
        return
    own = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))
    if "defaults" in own or not cfg.model.get("config"):
        return
    for key in set(cfg.model.config) - set(own.get("config") or ()):
        if f"model.config.{key}" not in given:
            cfg.model.config.pop(key)
