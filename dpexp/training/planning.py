"""What a configuration comes to: how many steps, which guarantee, which batches, and where they are computed."""

import re
from dataclasses import asdict

import numpy as np
import torch

from dpexp.errors import UserError
from dpexp.privacy.individual import draw_groups, read_groups
from dpexp.privacy.partition import partition, read_budgets
from dpexp.privacy.plan import Plan, make_plan
from dpexp.privacy.plan_checks import steps_of
from dpexp.privacy.searches import SearchBudget
from dpexp.schemas import RunConfig
from dpexp.training.batching import Sampler, sampler_for


def number_of_steps(run: RunConfig, num_examples: int) -> int:
    """T: as configured, or the epochs in steps of the expected batch.

    Raises:
        UserError: the epochs are less than half a step.
    """
    if run.optim.steps is not None:
        return run.optim.steps
    batch, epochs = run.optim.batch_size, run.optim.epochs or 0
    if steps := steps_of(epochs, num_examples, batch):
        return steps
    raise UserError(
        f"optim.epochs={epochs:g} is less than one step of optim.batch_size={batch:g} in {num_examples} examples: give "
        f"{batch / num_examples:.3g} epochs or more, or optim.epochs=null optim.steps=1"
    )


def budget_groups(run: RunConfig, num_examples: int) -> np.ndarray | None:
    """`[N]`, which budget each example has, from 0; None where all have the same. Public."""
    individual = run.individual
    if individual.name == "none":
        return None
    if individual.budgets is not None:
        return binned(run, num_examples)[1]
    if individual.groups is not None:
        return read_groups(individual.groups, num_examples, len(individual.epsilons))
    return draw_groups(num_examples, individual.shares, run.seed)


def binned(run: RunConfig, num_examples: int) -> tuple[list[float], np.ndarray]:
    """ε of each bin of examples, and `[N]` the bin of each, where every example has a budget of its own. Public."""
    individual, batch = run.individual, run.optim.batch_size
    assert individual.budgets is not None
    steps = number_of_steps(run, num_examples)

    def strength(target: float) -> float:
        return 1 / make_plan(
            num_examples=num_examples, expected_batch_size=batch, steps=steps, delta=run.privacy.delta, epsilon=target
        ).noise_multiplier  # fmt: skip

    value = strength if individual.partition == "utility" else None
    return partition(read_budgets(individual.budgets, num_examples), individual.bins, value)


def build_plan(
    run: RunConfig, num_examples: int, steps: int, groups: np.ndarray | None = None
) -> Plan | None:
    """The facts that fix the guarantee, from the configuration and the declared N alone; None without privacy or steps.

    ``groups``: see `budget_groups`.
    """
    if not run.clip.private or steps == 0:
        return None
    individual = None
    if groups is not None:
        own = run.individual
        epsilons = own.epsilons if own.budgets is None else binned(run, num_examples)[0]
        individual = own.name, epsilons, groups
    return make_plan(
        num_examples=num_examples,
        expected_batch_size=run.optim.batch_size,
        steps=steps,
        delta=run.privacy.delta,
        accountant=run.accountant.name,
        epsilon=run.privacy.epsilon,
        noise_multiplier=run.privacy.noise_multiplier,
        quantile_budget=run.clip.quantile_budget if run.clip.adaptive else 0.0,
        sampling=run.privacy.sampling,
        allow_clt=run.accountant.allow_clt,
        schedule=asdict(run.schedule),
        batches=run.optim.batch_growth or "constant",
        individual=individual,
        search=None if run.search.name == "none" else SearchBudget(run.search.mechanism, run.search.share),
        unit=run.unit.name,
        projections=run.clip.projections if run.clip.method == "jl" else 0,
        bands=run.privacy.bands,
    )


def build_sampler(
    run: RunConfig, plan: Plan | None, num_examples: int, key: bytes, groups: np.ndarray | None
) -> Sampler:
    """Draw the batches that the plan accounts for, under a secret key."""
    rates = plan.budgets.rates if plan is not None and plan.budgets is not None else ()
    rate_of = plan.rate if plan is not None and plan.grows else None
    bands = plan.bands if plan is not None else 1
    return sampler_for(
        run.privacy.sampling, num_examples, run.optim.batch_size, key, groups, rates, rate_of, bands
    )


def choose_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one.

    Raises:
        UserError: the device does not exist on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"runtime.device={name} is no device for this: choose auto, cpu, cuda or cuda:NUMBER")
    number, there = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if name != "cpu" and number >= there:
        gpus = f"{there} CUDA GPUs, counted from 0" if there else "no CUDA GPU"
        raise UserError(
            f"runtime.device={name}, but this machine has {gpus}: choose runtime=auto or runtime=cpu"
        )
    return torch.device(name)
