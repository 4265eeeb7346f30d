"""`runtime.dry_run=true`: would this run start here?

Data and weights are looked for, tables that are here are read, the plan is made, and one step is taken.

The step is taken on embedded data, with a small network of the same kind where the real one would have to be read: with the
clipping, the noise, the schedule, the optimizer and the way to fine-tune of the run. Nothing is written, and nothing is charged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from dpexp.config import compose, signature
from dpexp.errors import UserError
from dpexp.models import build_tokenizer
from dpexp.models.images import FAMILIES, OWN_FAMILIES
from dpexp.models.networks import check_config
from dpexp.models.sources import hub_unreachable, locate
from dpexp.privacy.caveats import noise_that_follows, pointless
from dpexp.privacy.keys import open_keys
from dpexp.privacy.shown import upwards
from dpexp.schemas import DataConfig, ModelConfig, RunConfig, UnitConfig
from dpexp.schemas.declared import declared_num_examples, declared_units
from dpexp.tasks import build_task
from dpexp.tasks.base import check_num_examples
from dpexp.tasks.classification import read_labelled
from dpexp.tasks.features import freeze
from dpexp.tasks.image_folders import class_folders, find_in_folder
from dpexp.tasks.image_sources import ImageReader
from dpexp.tasks.infilling import read_prompt
from dpexp.tasks.pairs import PairReader, find_pairs
from dpexp.tasks.sources import Reader, is_demo
from dpexp.tasks.tables import TableReader
from dpexp.tasks.users import by_user, read_users
from dpexp.training.interrupt import Interrupts
from dpexp.training.learner import Learner
from dpexp.training.planning import budget_groups, build_plan, build_sampler, choose_device, number_of_steps

# of the step
BATCH, EXAMPLES = 8, 32
# networks that need no file
OWN = (*OWN_FAMILIES, "custom")
READERS: dict[str, Callable[..., Reader[Any]]] = {
    "text_classification": TableReader,
    "text_infilling": TableReader,
    "generation": PairReader,
    "image_classification": lambda task, data: ImageReader(task, data, Path(tempfile.gettempdir())),
}


@dataclass(frozen=True)
class Answer:
    """What a dry start found; `data` and `weights` say where they are, or begin with "missing: "."""

    data: str
    weights: str
    plan: str
    step: str

    @property
    def missing(self) -> list[str]:
        """What is not there; empty where the run would start."""
        return [text for text in (self.data, self.weights) if text.startswith("missing")]

    def lines(self, brief: bool = False) -> list[str]:
        """For the terminal; ``brief``: what tells a point of a grid from the others."""
        if brief:
            return [self.plan]
        said = {"data": self.data, "weights": self.weights, "plan": self.plan, "step": self.step}
        end = [] if self.missing else ["nothing was trained; this run would start"]
        return [*(f"{name + ':':9}{text}" for name, text in said.items()), *end]


def dry_run(run: RunConfig, console: Console | None = None, in_grid: bool = False) -> Answer:
    """Look for what a run needs, make its plan, take one step on embedded data.

    Args:
        run: the configuration.
        console: where the answer goes.
        in_grid: say one line, and take no step that another point of the grid has taken in this process.

    Raises:
        UserError: what the run itself would refuse.
    """
    data, network, elsewhere = whereabouts(run), weights(run.model), ("missing", "the hub's")
    # a mistake in a table is said before the step, which takes longest
    if run.task.kind == "text_infilling" and not network.startswith(elsewhere):
        read_prompt(run.task, run.data, run.scale.name, build_tokenizer(run.model, scale=run.scale.name))
    if not data.startswith(elsewhere):
        read_tables(run)
    answer = Answer(data, network, plan(run), (step_of_point if in_grid else one_step)(run))
    if console is not None:
        console.print("\n".join(answer.lines(in_grid)), markup=False)
    return answer


def whereabouts(run: RunConfig) -> str:
    """Where the data lies, or the files that are missing, with what would be tried next."""
    task, data = run.task, run.data
    if is_demo(data, run.scale.name):
        return "embedded"
    if data.train is not None:
        given = [path for path in (data.train, data.dev) if path is not None]
        missing = [path for path in given if not Path(path).expanduser().exists()]
        return f"missing: {', '.join(missing)}" if missing else f"own: {', '.join(given)}"
    if task.kind == "custom":
        return f"read by {task.factory}"
    reader = READERS[task.kind](task, data)
    wanted = reader.wanted()
    root = Path(data.root).expanduser() if data.root else None
    names = [stem for name, stem in wanted.items() if root is None or reader.place(root, name) is None]
    if wanted and not names and data.source in ("auto", "files"):
        return f"files below {root}"
    lacking = f"{', '.join(names) or 'its files'}, plain, .gz or .xz, below data.root={data.root or 'FOLDER'}"
    if not task.hub_id or data.source == "files":
        return f"missing: {lacking}"
    name = f"{task.hub_id}/{task.hub_config}" if task.hub_config else task.hub_id
    reason = hub_unreachable()
    return f"the hub's {name}" if reason is None else f"missing: {lacking}; or the hub's {name} ({reason})"


def read_tables(run: RunConfig) -> None:
    """Read the tables of a task of texts, as the run will: columns, classes, the number of rows, and who gave them. Of own
    images the folders are read, and no image is opened.

    Raises:
        UserError: what is wrong with them.
    """
    if run.task.kind in ("text_classification", "text_infilling"):
        read_labelled(run.task, run.data, run.scale.name)
    elif run.task.kind == "generation":
        train = find_pairs(run.task, run.data, run.scale.name).splits["train"]
        if run.task.drop_over is None:
            check_num_examples(run.task, run.data, run.scale.name, len(train), train.where)
    elif run.task.kind == "image_classification" and run.data.train is not None:
        folder = Path(run.data.train).expanduser()
        labels = [str(label) for label in run.task.labels] or class_folders(folder, "data.train")
        paths, *_ = find_in_folder(folder, labels, "data.train")
        check_num_examples(run.task, run.data, run.scale.name, len(paths), str(folder))
        if run.data.dev is not None:
            find_in_folder(Path(run.data.dev).expanduser(), labels, "data.dev")
    if run.unit.name == "user" and (rows := declared_num_examples(run)) is not None:
        read_users(run, rows)


def weights(model: ModelConfig) -> str:
    """Where the weights lie, or what is missing.

    Raises:
        UserError: `model.config` makes no network.
    """
    if model.family == "random_hf":
        check_config(model, None)
    if model.family in ("random_hf", "random_timm", "custom") or model.retrain:
        return "drawn at random" if model.family != "custom" else f"of {model.factory}"
    if model.family in FAMILIES:
        if model.family != "timm":
            return "drawn at random"
        reason = hub_unreachable()
        return f"timm's {model.id}" if reason is None else f"missing: timm's {model.id} ({reason})"
    try:
        source = locate(model)
    except UserError as error:
        return f"missing: {error}"
    if not source.is_remote:
        check_config(model, source)
        return source.name
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(source.location, "config.json"), str):
        check_config(model, source)
        return f"{source.location}, in the cache of the hub"
    reason = hub_unreachable()
    if reason is None:
        return f"the hub's {source.location}"
    return f"missing: the hub's {source.location} ({reason}); or model.id=FOLDER that holds a copy"


def plan(run: RunConfig) -> str:
    """The guarantee that the run would give, from its configuration alone."""
    total = declared_units(run)
    if total is None:
        return "made when the data is counted"
    steps = number_of_steps(run, total)
    made = build_plan(run, total, steps, budget_groups(run, total))
    who = " users" if run.unit.name == "user" else ""
    length = f"N = {total}{who}, {steps} steps of {run.optim.batch_size:g}"
    if made is None:
        return f"{length}, no privacy"
    said = "" if run.privacy.epsilon is None else f", ε = {run.privacy.epsilon:g}"
    notes = "".join(f"; {sentence}" for sentence in [*pointless(made), *noise_that_follows(made)])
    return f"{length}, noise multiplier {made.noise_multiplier:.4f}{said}, δ = {upwards(made.delta, '.3g')}{notes}"


# by what decides them
_steps: dict[str, str] = {}


def step_of_point(run: RunConfig) -> str:
    """`one_step`, once for points of a grid that differ in their learning rate, or in what a miniature has not."""
    small = miniature(run)
    alike = signature(replace(small, optim=replace(small.optim, lr=1.0)))
    if alike not in _steps:
        _steps[alike] = one_step(run)
    return _steps[alike]


def one_step(run: RunConfig) -> str:
    """Take a step of a small copy of the run, and say of what."""
    small = miniature(run)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        small.data.cache = place
        device = choose_device("cpu")
        tokenizer = build_tokenizer(small.model, scale="demo")
        task = build_task(small.task, small.data, "demo", tokenizer, small.seed)
        bundle = task.build_network(
            small.model, small.peft, scale="demo", seed=small.seed, tokenizer=tokenizer
        )
        if small.model.frozen_features:
            task, bundle = freeze(task, bundle, small.data, device, private=small.clip.private)
        task = by_user(small, task)
        groups = budget_groups(small, task.num_examples)
        made = build_plan(small, task.num_examples, 1, groups)
        keys = open_keys(folder, small.privacy.noise_seed, signature(small))
        sampler = build_sampler(small, made, task.num_examples, keys.draws, groups)
        learner = Learner(
            small, task, bundle, made,
            steps=1, sampler=sampler, keys=keys, signature=signature(small),
            folder=folder, device=device, groups=groups,
        )  # fmt: skip
        with Interrupts() as interrupts:
            learner.take_step(interrupts)
        learner.detach()
    kinds = f"clipping groups: {learner.num_groups}" if made is not None else "no clipping"
    return f"taken with {small.model.name} on embedded data (tensors that train: {len(bundle.trainable)}, {kinds})"


def miniature(run: RunConfig) -> RunConfig:
    """The same run on embedded data, with a network that needs no file and one step."""
    demo = _demo(run.task.name)
    model = run.model
    if model.family not in OWN:
        stand_in = _demo(run.task.name, _kind(run)).model
        kept = ("trainable", "dropout", "attention_dropout", "pooling", "head", "frozen_features")
        model = replace(stand_in, **{name: getattr(run.model, name) for name in kept})
    examples = replace(demo.task, num_examples={**demo.task.num_examples, "demo": EXAMPLES})
    privacy = run.privacy
    if run.clip.private and run.individual.name == "none":
        privacy = replace(privacy, epsilon=None, noise_multiplier=privacy.noise_multiplier or 1.0)
    individual = run.individual
    if individual.groups is not None or individual.budgets is not None:
        # files that name every example of the real data
        epsilons = list(individual.epsilons) or [1.0, 2.0]
        shares = [1 / len(epsilons)] * len(epsilons)
        individual = replace(individual, groups=None, budgets=None, epsilons=epsilons, shares=shares)
    unit = run.unit
    if unit.name == "user":
        unit = UnitConfig("user", size=2, rows=unit.rows)
    # of one step; the bands themselves are in the plan above it
    privacy = replace(privacy, delta="1e-5", bands="1")
    return replace(
        run,
        task=examples,
        unit=unit,
        individual=individual,
        data=DataConfig(source="demo"),
        scale=demo.scale,
        model=model,
        privacy=privacy,
        peft=replace(run.peft, rank=min(run.peft.rank, 4), blocks=min(run.peft.blocks, 2)),
        optim=replace(run.optim, batch_size=BATCH, steps=1, epochs=None),
        runtime=replace(run.runtime, device="cpu", physical_batch_size=str(BATCH), eval_every=0),
    )


@cache
def _demo(task: str, model: str = "") -> RunConfig:
    try:
        run: RunConfig = compose([f"task={task}", "scale=demo", *([f"model={model}"] if model else [])])
    except UserError as error:
        # a person's own task, whose run asks for another scale
        raise UserError(
            f"runtime.dry_run=true takes its step at scale=demo, and {error}. Write task_at_scale/{task}/demo.yaml beside the "
            "files for other scales, or leave runtime.dry_run=true out"
        ) from None
    return run


def _kind(run: RunConfig) -> str:
    if run.task.kind == "image_classification":
        return "vit_tiny_random"
    if run.task.kind == "generation":
        return "gpt2_tiny"
    return "roberta_tiny" if "roberta" in (run.model.id or run.model.name).lower() else "bert_tiny"
