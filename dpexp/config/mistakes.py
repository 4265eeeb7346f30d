"""What a person got wrong in settings, in a sentence: what is wrong, where, and the nearest thing that exists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp.config.usage import choices_of, groups_of
from dpexp.errors import UserError, did_you_mean, either, first_line
from dpexp.schemas import setting_names

# what other libraries call our settings
ELSEWHERE = {
    "learning_rate": "optim.lr", "num_epochs": "optim.epochs", "num_train_epochs": "optim.epochs", "max_steps": "optim.steps",
    "train_batch_size": "optim.batch_size", "per_device_train_batch_size": "runtime.physical_batch_size",
    "micro_batch_size": "runtime.physical_batch_size", "max_grad_norm": "clip.clip_norm", "max_norm": "clip.clip_norm",
    "target_epsilon": "privacy.epsilon", "eps": "privacy.epsilon", "target_delta": "privacy.delta",
    "sigma": "privacy.noise_multiplier", "noise": "privacy.noise_multiplier",
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


def check_choices(words: Sequence[str], config_name: str) -> None:
    """Refuse a number where the name of a choice belongs, which Hydra answers with a traceback.

    Raises:
        UserError: the word.
    """
    groups = groups_of(config_name)
    for word in words:
        group, equals, choice = word.partition("=")
        if equals and not group:
            raise UserError(f"cannot read {word!r}: write GROUP=CHOICE or KEY=VALUE")
        if group in groups and _NO_NAME.fullmatch(choice):
            raise UserError(f"{word} is not a choice: choose {', '.join(choices_of(group))}")


def explain(error: Exception, config_name: str, schema: type, overrides: Sequence[str]) -> UserError:
    """Say what one mistake is: what is wrong, where, and the nearest thing that exists."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return UserError(f"{mark.name}, line {mark.line + 1}: this is no YAML: {error.problem}")
    if isinstance(error, OverrideParseException):
        name, _, given = str(error.override).partition("=")
        if given[:1] in ("[", "{") and given[-1:] not in ("]", "}"):
            return UserError(
                f"cannot read {error.override!r}: its bracket is not closed; a list with blanks stands whole in quotes: "
                f"'{name}=[1, 2]'"
            )
        if not given:
            meant = [f"{group}={name}" for group in groups_of(config_name) if name in choices_of(group)]
            return UserError(
                f"cannot read {name!r}: write KEY=VALUE{f'; did you mean {meant[0]}?' if meant else ''}"
            )
        # once for the shell and once for Hydra, which reads lists and mappings as they are
        quoted = f""": '{name}="{given}"'""" if given and not re.search(r"""^[\[{]|['"]""", given) else ""
        return UserError(
            f"cannot read {error.override!r}: write KEY=VALUE, and quote values that hold special characters twice{quoted}"
        )
    text = str(error)
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if text.startswith("Primary config") or (missing and "/" not in missing):
        return UserError(
            "--config-path and --config-name find nothing here: settings of your own come by --config-dir FOLDER, as "
            "experiment=NAME of FOLDER/experiment/NAME.yaml"
        )
    if isinstance(error, MissingConfigException) and missing:
        group, _, choice = missing.rpartition("/")
        if group.startswith("task_at_scale/"):
            task = group.removeprefix("task_at_scale/")
            return UserError(
                f"task={task} has no settings for scale={choice}{did_you_mean(choice, choices_of(group))}"
            )
        if group.startswith("hydra/") and (extra := PLUGINS.get(choice.partition("_")[0])):
            return UserError(f"{group}={choice} is not installed: pip install 'dpexp[{extra}]'")
        options = [option for option in error.options or () if "/" not in option]
        other = "; any other epsilon is privacy.epsilon=NUMBER" if group == "privacy" else ""
        return UserError(f"{group}={choice} is not a choice{did_you_mean(choice, options)}{other}")
    # what an experiment chooses would else be choices within the experiment
    mine = [x for x in overrides if x.startswith("experiment=") and x[11:] not in choices_of("experiment")]
    header = f" ({mine[0]}: does the file begin with the line '# @package _global_'?)" if mine else ""
    # with -m Hydra looks for the files of a task first
    if text.startswith(("You must specify", "Error resolving interpolation '${task}")):
        return UserError(_missing_groups(config_name, overrides) + header)
    if text.startswith(("Ambiguous value for argument", "Sweep parameters")):
        parser = OverridesParser.create()
        grid = next((text for text in overrides if parser.parse_override(text).is_sweep_override()), "")
        name, _, value = grid.partition("=")
        if re.fullmatch(r"0,0\d+", value):
            return UserError(f"{grid}: decimals stand behind a point: {grid.replace(',', '.')}")
        if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
            return UserError(f"{grid}: a number has no commas: {grid.replace(',', '')}")
        if _is_list(name, schema):
            return UserError(f"{grid}: a list stands in brackets and in quotes: '{name}=[{value}]'")
        return UserError(
            f"{grid}: several values are a grid of runs, and that needs -m: add it to the command"
        )
    if match := re.search(r"Could not override '([^']+)'", text):
        return UserError(unknown_key(match[1], schema, config_name) + (header if "@" in match[1] else ""))
    lines = text.splitlines()
    if match := re.match(r"In '([^']+)': \w+ raised while composing config:", text):
        key = re.search(r"full_key: (\S+)", text)
        name, where = key[1] if key else "", f"{match[1]}.yaml"
        if " not in " in lines[1]:
            return UserError(f"{where}: {unknown_key(name, schema, config_name)}")
        return UserError(f"{where}: {name}: {lines[1]}")
    if match := re.match(r"Error merging override (.+)", text):
        reason, name = first_line(error.__cause__), match[1].partition("=")[0]
        if reason.endswith("is not Optional"):
            return UserError(f"{match[1]}: this setting needs a value; leave it out for the usual one")
        if re.search(r"is not a ListConfig|with ListConfig$|to Dict\[", reason):
            whole = "a list: write '[a, b]'" if _is_list(name, schema) else "a mapping: write '{name: value}'"
            return UserError(f"{match[1]} is not {whole}, in quotes")
        if number := re.match(r"Key (\S+) \(\w+\) is incompatible", reason):
            return UserError(f"{match[1]}: names in a mapping are words; give {name}.{number[1]}=… for each")
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
    """Write a fraction, or a power of ten, as a setting takes it; None: it is neither, or not whole."""
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
    return "not given: " + "; ".join(
        f"{group}=… (choices: {', '.join(choices_of(group))})" for group in missing
    )


def unknown_key(key: str, schema: type, config_name: str) -> str:
    """Say that there is no such setting, and which one may be meant."""
    settings = sorted(setting_names(schema))
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
        return f"there is no setting {key}; did you mean {either(whole)}?"
    return f"there is no setting {key}{did_you_mean(key, top)}"
