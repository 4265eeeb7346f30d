"""The entry point of a command: its words become settings, and what is wrong with them one sentence."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpexp.config import sweeps
from dpexp.config.composing import VERSION_BASE, composed, register, spelled
from dpexp.config.group_help import group_help, groups_asked
from dpexp.config.mistakes import MISTAKES, check_choices, explain, unknown_key
from dpexp.config.resolving import resolve
from dpexp.config.unread import moves_weights
from dpexp.config.usage import (
    conf_dir,
    dashed,
    groups_of,
    help_text,
    options_last,
    print_out,
    print_what_can_be,
)
from dpexp.durable import disk_error, flattened, memory_error
from dpexp.errors import INTERRUPTED, UserError
from dpexp.schemas import RunConfig, setting_names


def _borrowed_rate(settings: Any, overrides: Sequence[str], config_name: str, schema: type) -> str:
    """Say where the command chooses an optimiser and leaves it the learning rate of another one; else nothing."""
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


def _unread_threshold(settings: Any, given: Sequence[str]) -> str:
    """Say where the command gives a C that adaptive thresholds neither begin with nor keep; else nothing.

    No refusal: a list of methods gives one C to all of them.
    """
    if not isinstance(settings, RunConfig) or not any(word.startswith("clip.clip_norm=") for word in given):
        return ""
    clip = settings.clip
    if not clip.adaptive or clip.rescale or clip.init_threshold in (None, clip.clip_norm):
        return ""
    return (
        f"clip.clip_norm={clip.clip_norm:g} does nothing with clip={clip.name}: its thresholds begin at "
        f"clip.init_threshold={clip.init_threshold:g} and adapt. Give that, or clip.init_threshold=null to begin with C"
    )


def _overruled(settings: Any, overrides: Sequence[str]) -> str:
    """Say where a person's own file of a choice sets what the task at its scale sets otherwise; else nothing."""
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
    """Name the optimiser whose steps are as long as those of this one."""
    name = moves_weights(optim)
    return "adam" if name in ("adamw", "adam_bc", "adamw_bc") else name


def hydra_entry(
    config_name: str, schema: type = RunConfig
) -> Callable[[Callable[[Any], object]], Callable[[], None]]:
    """Make ``function(settings)`` the entry point of ``python -m dpexp.<config_name>``.

    The primary configuration is ``conf/<config_name>.yaml``; its types are registered as ``<config_name>_schema``,
    which its defaults list names first. Bad input is printed as ``error: …`` and ends with exit status 2, without a
    traceback. In a multirun every job runs, whatever becomes of the others; a table shows how each one ended
    (`dpexp.config.sweeps`), and a failed one fails the whole.
    """

    def decorate(function: Callable[[Any], object]) -> Callable[[], None]:
        register(config_name, schema)

        @functools.wraps(function)
        def job(cfg: DictConfig) -> object:
            current = HydraConfig.get()
            overrides = list(current.overrides.task)
            try:
                of_grid = current.mode == RunMode.MULTIRUN
                settings = resolve(cfg, overrides, schema, config_name, of_grid)
                for note in (
                    _borrowed_rate(settings, overrides, config_name, schema),
                    _overruled(settings, overrides),
                    _unread_threshold(settings, overrides),
                ):
                    # of several processes the first one says it
                    if note and os.environ.get("RANK", "0") == "0":
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
