"""The judge finds what is wrong with a library, whatever it is, and nothing wrong with one that is right."""

import pytest
import torch
from rich.console import Console

from dpexp.conform.__main__ import ConformArguments, conform
from dpexp.conform.adapters import adapters, ours
from dpexp.conform.judge import Adapter, Reference, judge
from dpexp.conform.traps import FAMILIES, trap_case, traps
from dpexp.errors import UserError


def by_hand(change=lambda gradients, norm, limit: min(1.0, limit / norm), after=lambda model, batch: None):
    """A library that clips one example after another, and has one defect."""

    def make_step(model, loss_fn, clip_norm):
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}

        def step(*pieces):
            total = {name: torch.zeros_like(p) for name, p in params.items()}
            for piece in pieces:
                for i in range(len(piece["x"])):
                    losses = loss_fn(model, {name: value[i : i + 1] for name, value in piece.items()})
                    grads = torch.autograd.grad(losses.sum(), list(params.values()), materialize_grads=True)
                    found = dict(zip(params, grads))
                    norm = torch.stack([g.norm() for g in found.values()]).norm()
                    for name, gradient in found.items():
                        total[name] += change(name, norm, clip_norm) * gradient
                after(model, piece)
            return total

        return step

    return Adapter("by hand", make_step)


def asked(name, adapter):
    case = trap_case(name)
    return judge(case, Reference(case), adapter)


def test_a_right_library_is_exact():
    verdict = asked("a layer called twice", by_hand())
    assert verdict.verdict == "exact"
    assert verdict.error < 1e-12
    assert 0.5 < verdict.sensitivity <= 1 + 1e-9


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda name, norm, limit: 1.0, "moves the sum"),
        (lambda name, norm, limit: min(1.0, 1.001 * limit / norm), "moves the sum"),
        (lambda name, norm, limit: 0.999 * min(1.0, limit / norm), "is off by"),
        (lambda name, norm, limit: 1.0 if name == "out.bias" else min(1.0, limit / norm), "is off by"),
        (lambda name, norm, limit: float("nan"), "is off by nan"),
    ],
    ids=["nothing is clipped", "a little too much", "a little too little", "one bias is not clipped", "NaN"],
)
def test_a_defect_is_seen(change, found):
    verdict = asked("a layer called twice", by_hand(change))
    assert verdict.verdict == "wrong"
    assert found in verdict.message


def test_a_buffer_that_follows_the_batch_is_seen_although_the_sum_is_right():
    def keeps(model, piece):
        model.register_buffer("seen", piece["x"].sum())

    assert "buffer seen depends" in asked("a layer called twice", by_hand(after=keeps)).message


def refuses(error):
    def make_step(model, loss_fn, clip_norm):
        raise error

    return Adapter("refuses", make_step)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (ValueError("inner (Linear) can't be done"), "refused"),
        (ValueError("nn.LayerNorm is unknown here"), "refused"),
        (ValueError("something went wrong"), "crash"),
        (RuntimeError("inner (Linear): sizes differ"), "crash"),
    ],
)
def test_a_refusal_is_an_error_of_the_librarys_kind_that_names_the_part(error, verdict):
    assert asked("layers that see [B·T, d]", refuses(error)).verdict == verdict


def test_a_wrong_number_outweighs_the_error_after_it():
    calls = []

    def make_step(model, loss_fn, clip_norm):
        def step(*pieces):
            calls.append(pieces)
            if len(calls) > 1:
                raise ValueError("out (Linear)")
            return {name: 10 * torch.ones_like(p) for name, p in model.named_parameters()}

        return step

    assert asked("a layer called twice", Adapter("late", make_step)).verdict == "wrong"


def test_there_are_forty_kinds_of_traps_and_every_one_can_be_asked():
    assert len(traps()) >= 100
    assert sum(len(family) for family in FAMILIES.values()) == len(traps())
    for name in traps():
        case = trap_case(name)
        total = Reference(case).clipped_sum(case.batch, "layer")
        assert all(value.isfinite().all() for value in total.values()), name


# One trap of each way to be wrong; the whole table is results/conform/traps.md, made by `make conform`.
SURE = [
    "tied embedding and head", "position table looked up once, [T]", "positions as many as examples", "bare parameters",
    "a layer called twice", "a frozen bias", "a layer that is never used", "weight norm", "spectral norm",
    "a grouped convolution", "a convolution with circular padding", "an embedding bag with offsets", "multi-head attention",
    "layers that see [T·B, d]", "rows sorted by length", "a mixture of experts", "batch norm", "x - x.mean(0)",
    "nearest neighbours in the batch", "an empty batch between two others", "an example whose values are NaN",
    "bf16 autocast", "accumulation over two physical batches", "two forward passes for one loss", "activation checkpointing",
    "in-place writes to what a layer gave", "reentrant activation checkpointing",
]  # fmt: skip


@pytest.mark.parametrize("engine", ["auto layer", "ghost flat"])
@pytest.mark.parametrize("name", SURE)
def test_our_engines_are_exact_or_say_no(name, engine):
    adapter = ours(*engine.split())
    verdict = asked(name, adapter)
    assert verdict.verdict in ("exact", "refused"), verdict.message


def test_another_library_needs_a_function_alone(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "def make_step(model, loss_fn, clip_norm):\n    raise NotImplementedError('no Linear here')\n"
    )
    arguments = ConformArguments(
        suite="traps", only="a perceptron", library=f"{file}:make_step", out=str(tmp_path / "found")
    )
    assert conform(arguments, Console()) == 0
    assert "refused" in capsys.readouterr().out
    assert "| a perceptron |" in (tmp_path / "found" / "traps.json").read_text().replace(
        '"name": "a perceptron"', "| a perceptron |"
    )
    with pytest.raises(UserError, match="can't be imported"):
        adapters(f"{tmp_path / 'absent.py'}:make_step")
    with pytest.raises(UserError, match="not a choice"):
        adapters("absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suite": "trap"}, "suite=trap"),
        ({"only": "no such trap"}, "no case"),
        ({"engines": ["gost"]}, "engines=gost"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        conform(ConformArguments(**({"suite": "traps", "out": None} | change)), Console(quiet=True))
