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
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp import presets, sweeps
from dpexp.checks import check
from dpexp.composing import VERSION_BASE, composed, spelled
from dpexp.declared import declared_num_examples
from dpexp.durable import disk_error, flattened, memory_error
from dpexp.errors import INTERRUPTED, UserError, did_you_mean
from dpexp.schemas import RunConfig
from dpexp.settings import group_help, groups_asked
from dpexp.unread import neutralise
from dpexp.usage import (
    choices_of,
    conf_dir,
    dashed,
    groups_of,
    help_text,
    options_last,
    print_out,
    print_what_can_be,
)

__all__ = ["RunConfig", "compose", "conf_dir", "hydra_entry", "resolve", "run_folder", "signature", "to_dict"]

# what other libraries call our settings
ELSEWHERE = {
    "learning_rate": "optim.lr", "num_epochs": "optim.epochs", "num_train_epochs": "optim.epochs", "max_steps": "optim.steps",
    "train_batch_size": "optim.batch_size", "per_device_train_batch_size": "runtime.physical_batch_size",
    "micro_batch_size": "runtime.physical_batch_size", "max_grad_norm": "clip.clip_norm", "max_norm": "clip.clip_norm",
    "target_epsilon": "privacy.epsilon", "target_delta": "privacy.delta", "sigma": "privacy.noise_multiplier",
    "model_name_or_path": "model.id", "output_dir": "runtime.runs_dir", "num_examples": "data.num_examples",
    "dataset_size": "data.num_examples", "sample_size": "data.num_examples",
    "labels": "task.labels", "dtype": "runtime.precision", "bf16": "runtime.precision", "fp16": "runtime.precision",
}  # fmt: skip
# how a launcher or a sweeper begins -> the extra that brings it
PLUGINS = {"joblib": "parallel", "submitit": "slurm", "optuna": "search"}
# what OmegaConf says of a value of the wrong kind -> what is expected
KINDS = {
    "is not a valid bool": "true or false",
    "to string: ": "one word or number",
}
# what a person can get wrong
MISTAKES = (HydraException, OmegaConfBaseException, yaml.MarkedYAMLError)

# what YAML makes no text of
_NO_NAME = re.compile(r"[-+]?\.?\d[\d_]*\.?\d*(e[-+]?\d+)?|null|true|false", re.IGNORECASE)

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
    _check_choices(overrides, config_name)
    try:
        cfg = composed(config_name, overrides, schema)
    except MISTAKES as error:
        raise _explain(error, config_name, schema, overrides) from error
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
    known = set(_keys(schema))
    for key, _ in flattened(cast("dict[str, Any]", OmegaConf.to_container(cfg))):
        if key not in known and not any(key.startswith(f"{mapping}.") for mapping in known):
            raise UserError(_unknown_key(key, schema, config_name))
    try:
        if missing := sorted(OmegaConf.missing_keys(cfg)):
            needed = "; ".join(f"{key}=…" for key in missing)
            raise UserError(f"not given: {needed} (dpexp {config_name} --help says what they are)")
        settings = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise _explain(error, config_name, schema, overrides) from error
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
                if note := _borrowed_rate(settings, overrides, config_name, schema):
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
                    known = option in {*groups_of(config_name), *_keys(schema)}
                    meant = f"{option}=…" if known else _unknown_key(option, schema, config_name)
                    raise UserError(f"settings are written without dashes, as KEY=VALUE: {meant}")
                _check_choices(sys.argv[1:], config_name)
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
                _stop(_explain(error, config_name, schema, overrides))
            except Exception as error:
                if told := sweeps.killed(error):
                    _stop(told)
                raise
            finally:
                sweeps.report(config_name)

        return entry

    return decorate


def _check_choices(words: Sequence[str], config_name: str) -> None:
    """Refuse a number where the name of a choice belongs, which Hydra answers with a traceback.

    Raises:
        UserError: the word.
    """
    groups = set(groups_of(config_name))
    # those that a task chooses at its scale
    groups |= {"model", "optim"} if "task" in groups else set()
    for word in words:
        group, equals, choice = word.partition("=")
        if equals and not group:
            raise UserError(f"cannot read {word!r}: write GROUP=CHOICE or KEY=VALUE")
        if group in groups and _NO_NAME.fullmatch(choice):
            raise UserError(f"{word} is not a choice: choose {choices_of(group)}")


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
    for key in _keys(schema):
        if isinstance(mapping := OmegaConf.select(node, key), DictConfig):
            OmegaConf.set_struct(mapping, False)
    ConfigStore.instance().store(name=f"{config_name}_schema", node=node, provider="dpexp")


def _explain(error: Exception, config_name: str, schema: type, overrides: Sequence[str]) -> UserError:
    """One message for one mistake: what is wrong, where, and the nearest thing that exists."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return UserError(f"{mark.name}, line {mark.line + 1}: this is no YAML: {error.problem}")
    if isinstance(error, OverrideParseException):
        name, _, given = str(error.override).partition("=")
        if given[:1] in ("[", "{") and given[-1:] not in ("]", "}"):
            return UserError(
                f"cannot read {error.override!r}: a list or a mapping has no blanks, or stands whole in quotes: '{name}=[1, 2]'"
            )
        # once for the shell and once for Hydra, which reads lists and mappings as they are
        quoted = f""": '{name}="{given}"'""" if given and not re.search(r"""^[\[{]|['"]""", given) else ""
        return UserError(
            f"cannot read {error.override!r}: write KEY=VALUE, and quote values that hold special characters twice{quoted}"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if group.startswith("task_at_scale/"):
            task = group.removeprefix("task_at_scale/")
            scales = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
            return UserError(f"task={task} has no settings for scale={choice}{did_you_mean(choice, scales)}")
        if group.startswith("hydra/") and (extra := PLUGINS.get(choice.partition("_")[0])):
            return UserError(f"{group}={choice} is not installed: pip install 'dpexp[{extra}]'")
        options = [option for option in error.options or () if "/" not in option]
        other = "; any other epsilon is privacy.epsilon=NUMBER" if group == "privacy" else ""
        return UserError(f"{group}={choice} is not a choice{did_you_mean(choice, options)}{other}")
    text = str(error)
    if text.startswith("You must specify"):
        return UserError(_missing_groups(config_name, overrides))
    if text.startswith("Ambiguous value for argument"):
        grid = next((override for override in overrides if "," in override), "")
        name, _, value = grid.partition("=")
        if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
            return UserError(f"{grid}: a number has no commas: {grid.replace(',', '')}")
        if _is_list(name, schema):
            return UserError(f"{grid}: a list stands in brackets and in quotes: '{name}=[{value}]'")
        return UserError(
            f"{grid}: several values are a grid of runs, and that needs -m: add it to the command"
        )
    if match := re.search(r"Could not override '([^']+)'", text):
        return UserError(_unknown_key(match[1], schema, config_name))
    lines = text.splitlines()
    if match := re.match(r"In '([^']+)': \w+ raised while composing config:", text):
        key = re.search(r"full_key: (\S+)", text)
        name, where = key[1] if key else "", f"{match[1]}.yaml"
        if " not in " in lines[1]:
            return UserError(f"{where}: {_unknown_key(name, schema, config_name)}")
        return UserError(f"{where}: {name}: {lines[1]}")
    if match := re.match(r"Error merging override (.+)", text):
        reason, name = str(error.__cause__).splitlines()[0], match[1].partition("=")[0]
        if reason.endswith("is not Optional"):
            return UserError(f"{match[1]}: this setting needs a value; leave it out for the usual one")
        if re.search(r"is not a ListConfig|with ListConfig$|to Dict\[", reason):
            whole = "a list: write '[a, b]'" if _is_list(name, schema) else "a mapping: write '{name: value}'"
            return UserError(f"{match[1]} is not {whole}, in quotes")
        for kind, words, example in (("Float", "a number", "0.004"), ("Integer", "a whole number", "10000")):
            if reason.endswith(f"could not be converted to {kind}"):
                example = _written_out(match[1].partition("=")[2], whole=kind == "Integer") or example
                return UserError(f"{match[1]} is not {words}: write it out, such as {example}")
        for kind, words in KINDS.items():
            if re.search(kind, reason):
                return UserError(f"{match[1]} is not {words}")
        return UserError(f"{match[1]}: {reason}")
    full_key = getattr(error, "full_key", None)
    return UserError(f"{full_key}: {lines[0]}" if full_key else lines[0])


def _written_out(value: str, whole: bool) -> str | None:
    """A fraction, or a power of ten, as a setting takes it; None: it is neither, or not whole."""
    try:
        number = Fraction(value)
        return f"{float(number):.6g}" if not whole else str(number) if number.denominator == 1 else None
    except (ValueError, ArithmeticError):
        return None


def _is_list(name: str, schema: type) -> bool:
    return OmegaConf.is_list(OmegaConf.select(OmegaConf.structured(schema), name))


def _missing_groups(config_name: str, overrides: Sequence[str]) -> str:
    given = {override.partition("=")[0] for override in overrides}
    missing = [
        group for group, choice in groups_of(config_name).items() if choice == "???" and group not in given
    ]
    return "not given: " + "; ".join(f"{group}=… (choices: {choices_of(group)})" for group in missing)


def _unknown_key(key: str, schema: type, config_name: str) -> str:
    settings = sorted(_keys(schema))
    ours = ELSEWHERE.get(key.rpartition(".")[2], "")
    # `account` has the same settings, in no groups
    if there := [name for name in (ours, ours.rpartition(".")[2]) if name in settings]:
        return f"there is no setting {key}; did you mean {there[0]}?"
    top = sorted({*groups_of(config_name), *(name.partition(".")[0] for name in settings)})
    if "." in key:
        meant = did_you_mean(key, [name for name in settings if "." in name])
        # where none is near, all of them are more than anybody reads
        meant = meant if meant.startswith(";") else did_you_mean(key, top)
        return f"there is no setting {key}{meant}"
    # "lr" means optim.lr
    if whole := [name for name in settings if name.endswith(f".{key}")]:
        return f"there is no setting {key}; did you mean {' or '.join(whole)}?"
    return f"there is no setting {key}{did_you_mean(key, top)}"


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings of a dataclass; a mapping counts as one, whatever it holds."""
    for field in dataclasses.fields(schema):
        inner: Any = field.default_factory
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from _keys(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
