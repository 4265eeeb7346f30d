"""From a command line to a checked `RunConfig`: with `dpexp.composing` and `dpexp.sweeps`, the only place that knows Hydra.

``conf/`` holds the values, ``dpexp.schemas`` the types, ``dpexp.checks`` what must hold between them. Who wins is the
order of the defaults list in ``conf/train.yaml``: command line > experiment > scale > task.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp import presets, sweeps
from dpexp.checks import check
from dpexp.composing import VERSION_BASE, composed, spelled
from dpexp.declared import declared_num_examples
from dpexp.durable import disk_error, flattened, memory_error
from dpexp.errors import INTERRUPTED, UserError
from dpexp.mistakes import MISTAKES, check_choices, explain, unknown_key
from dpexp.schemas import RunConfig, setting_names
from dpexp.settings import group_help, groups_asked
from dpexp.unread import neutralise
from dpexp.usage import (
    conf_dir,
    dashed,
    groups_of,
    help_text,
    options_last,
    print_out,
    print_what_can_be,
)

__all__ = ["RunConfig", "compose", "conf_dir", "hydra_entry", "resolve", "run_folder", "signature", "to_dict"]

# config name -> its schema as Hydra knows it: making a node of one takes a fifth of a composition
_registered: dict[str, type] = {}

_NOT_IN_SIGNATURE = frozenset(
    {
        "seed", "trials", "trials_law", "tracker", "data.root", "data.cache", "data.source", "task.hub_id",
        "task.hub_config", "task.files", "task.num_examples", "model.root", "runtime.eval_batch_size",
        "runtime.eval_every", "runtime.checkpoint_every", "runtime.log_every", "runtime.runs_dir", "runtime.parallel",
        "runtime.stages", "runtime.schedule", "runtime.microbatch", "runtime.flat", "runtime.rematerialise", "runtime.park",
        "runtime.dry_run", "privacy.keep_key", "analysis",
    }
)  # fmt: skip


def compose(
    overrides: Sequence[str] = (), config_name: str = "train", schema: type = RunConfig, of_grid: bool = False
) -> Any:
    """What ``python -m dpexp.<config_name> <overrides>`` would run, as an instance of the schema; or one job of a grid.

    For tests, reports and notebooks. Raises `UserError` for every mistake that the command line would print.
    """
    _register(config_name, schema)
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
    """A composed configuration as an instance of the schema (a checked `RunConfig` unless another one is given).

    Refuses keys that the schema doesn't have, lists everything that is missing in one message, resolves every
    interpolation, and sets what cannot matter (the quantile settings of a fixed threshold) to its neutral value. A command
    that gives such a setting is refused, unless it is a job of a grid, where it is meant for others.
    """
    if removed := [override for override in overrides if override.startswith("~")]:
        raise UserError(f"{removed[0]}: a setting can't be removed; choose another value, or null")
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    _forget_sizes_of_another_model(cfg, given)
    known = set(setting_names(schema))
    for key, _ in flattened(cast("dict[str, Any]", OmegaConf.to_container(cfg))):
        if key not in known and not any(key.startswith(f"{mapping}.") for mapping in known):
            raise UserError(unknown_key(key, schema, config_name))
    try:
        if missing := sorted(OmegaConf.missing_keys(cfg)):
            needed = "; ".join(f"{key}=…" for key in missing)
            raise UserError(f"not given: {needed} (dpexp {config_name} --help says what they are)")
        settings = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise explain(error, config_name, schema, overrides) from error
    if isinstance(settings, RunConfig):
        neutralise(settings)
        if settings.data.cache:
            settings.data.cache = os.path.expanduser(settings.data.cache)
        check(settings, {} if of_grid else given)
    return settings


def _borrowed_rate(settings: Any, overrides: Sequence[str], config_name: str, schema: type) -> str:
    """A sentence where the command chooses an optimiser and leaves it the learning rate of another one; else nothing."""
    keys = {override.partition("=")[0] for override in overrides}
    if "optim" not in keys or "optim.lr" in keys or not isinstance(settings, RunConfig):
        return ""
    kept = [override for override in overrides if not override.startswith(("optim=", "optim."))]
    usual, chosen = composed(config_name, kept, schema).optim, settings.optim
    if usual.lr != chosen.lr or _length_of_steps(usual) == _length_of_steps(chosen):
        return ""
    return (
        f"optim={chosen.name} begins with the learning rate of optim={usual.name}, {chosen.lr:g}: a step of the one is not as "
        "long as a step of the other. Give optim.lr=… too"
    )


def _overruled(settings: Any, overrides: Sequence[str]) -> str:
    """A sentence where a person's own file of a choice sets what the task at its scale sets otherwise; else nothing."""
    given = dict(override.partition("=")[::2] for override in overrides)
    folders = [
        Path(source.path)
        for source in HydraConfig.get().runtime.config_sources
        if source.provider == "command-line"
    ]
    holds = dict(flattened(dataclasses.asdict(settings)))
    for file, group in [
        (folder / group / f"{name}.yaml", group) for folder in folders for group, name in given.items()
    ]:
        if group in ("experiment", "recipe", "sweep") or not file.is_file():
            continue
        own = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))
        for key, value in flattened(own, f"{group}."):
            if key in holds and key not in given and value != holds[key]:
                return (
                    f"{file.name} sets {key}={value}, and the task at its scale {holds[key]}, which wins: give {key} on the "
                    "command line, or in a file of experiment="
                )
    return ""


def _length_of_steps(optim: Any) -> str:
    """The optimiser whose steps are as long as those of this one."""
    name = optim.base if optim.name in ("disk", "doppler") else optim.name
    return "adam" if name in ("adamw", "adam_bc", "adamw_bc") else name


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


def to_dict(run: RunConfig) -> dict[str, Any]:
    """The settings as plain nested dicts, ready for YAML or JSON."""
    return dataclasses.asdict(run)


def signature(run: RunConfig) -> str:
    """Ten hex characters that name a run up to its seed: the science, the engine and the runtime.

    Left out is what can't change a result: the seed (it names the folder below), the tracker, where data lies, and how
    often a run evaluates, logs and saves. Values equal to the schema's defaults are left out too, so that a new setting
    doesn't rename the runs of yesterday; a default must therefore never change its meaning.
    """
    neutral = dict(flattened(to_dict(RunConfig())))
    settings = {
        key: value for key, value in flattened(to_dict(run)) if key not in neutral or neutral[key] != value
    }
    kept = {
        key: value
        for key, value in settings.items()
        if not any(key == left_out or key.startswith(f"{left_out}.") for left_out in _NOT_IN_SIGNATURE)
    }
    kept["num_examples"] = declared_num_examples(run)
    if run.data.source == "demo":
        kept["data.source"] = "demo"
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]


def run_folder(run: RunConfig) -> Path:
    """``runs_dir/<task>/<signature>/seed<k>``: the same settings are the same run and the same folder."""
    return Path(run.runtime.runs_dir) / run.task.name / signature(run) / f"seed{run.seed}"


def hydra_entry(
    config_name: str, schema: type = RunConfig
) -> Callable[[Callable[[Any], object]], Callable[[], None]]:
    """Make ``function(settings)`` the entry point of ``python -m dpexp.<config_name>``.

    The primary configuration is ``conf/<config_name>.yaml``; its types are registered as ``<config_name>_schema``,
    which its defaults list names first. Bad input is printed as ``error: …`` and ends with exit status 2, without a
    traceback. In a multirun every job runs, whatever becomes of the others; a table shows how each one ended
    (`dpexp.sweeps`), and a failed one fails the whole.
    """

    def decorate(function: Callable[[Any], object]) -> Callable[[], None]:
        _register(config_name, schema)

        @functools.wraps(function)
        def job(cfg: DictConfig) -> object:
            current = HydraConfig.get()
            overrides = list(current.overrides.task)
            try:
                of_grid = current.mode == RunMode.MULTIRUN
                settings = resolve(cfg, overrides, schema, config_name, of_grid)
                if note := _borrowed_rate(settings, overrides, config_name, schema) or _overruled(
                    settings, overrides
                ):
                    print(f"note: {note}", file=sys.stderr)
                return function(settings)
            except Exception as error:
                told = error if isinstance(error, UserError) else disk_error(error) or memory_error(error)
                # The other jobs go on; Hydra raises the first failure at the end.
                if current.mode == RunMode.MULTIRUN:
                    reason = str(told or f"{type(error).__name__}: {error}")
                    print(f"error: {reason}\n  in the job {' '.join(overrides)}", file=sys.stderr)
                    raise UserError(reason) from error
                if told is not None:
                    _stop(told)
                raise

        @functools.wraps(function)
        def entry() -> None:
            # With this, Hydra hands its exceptions to us instead of printing advice such as "use +key=value".
            os.environ["HYDRA_FULL_ERROR"] = "1"
            print_what_can_be()
            if {"-h", "--help"} & set(sys.argv[1:]):
                groups = groups_asked(sys.argv[1:])
                try:
                    print_out(
                        group_help(config_name, schema, groups)
                        if groups
                        else help_text(config_name, function.__doc__ or "")
                    )
                except UserError as error:
                    _stop(error)
                return
            sys.argv[1:] = [spelled(word) for word in options_last(sys.argv[1:])]
            try:
                if (option := dashed(sys.argv[1:])) is not None:
                    known = option in {*groups_of(config_name), *setting_names(schema)}
                    meant = f"{option}=…" if known else unknown_key(option, schema, config_name)
                    raise UserError(f"settings are written without dashes, as KEY=VALUE: {meant}")
                check_choices(sys.argv[1:], config_name)
            except UserError as error:
                _stop(error)
            try:
                hydra.main(config_path=str(conf_dir()), config_name=config_name, version_base=VERSION_BASE)(
                    job
                )()
            except UserError:
                # a job of a multirun, printed above
                sys.exit(2)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                sys.exit(INTERRUPTED)
            except MISTAKES as error:
                overrides = [word for word in sys.argv[1:] if not word.startswith("-")]
                _stop(explain(error, config_name, schema, overrides))
            except Exception as error:
                # of two options that do not go together
                flags = isinstance(error, ValueError) and str(error).startswith("The --")
                if told := UserError(str(error)) if flags else sweeps.killed(error):
                    _stop(told)
                raise
            finally:
                sweeps.report(config_name)

        return entry

    return decorate


def _stop(error: UserError) -> NoReturn:
    if not error.told:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def _register(config_name: str, schema: type) -> None:
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
