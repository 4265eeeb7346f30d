"""`PrivacyEngine`: arguments that cannot be meant get one sentence, at once."""

import warnings
from fractions import Fraction

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from dpexp.training.own_loop import rows as own_rows
from tests.training.own_loop import (
    TASK,
    adam_of,
    data,
    losses_of,
    make,
    network,
    train,
)


def diverged(model):
    with torch.no_grad():
        model[0].weight[0, 0] = float("inf")
        model[0].bias[:] = float("nan")
    return model


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class StreamOfKnownLength(Stream):
    def __len__(self):
        return 60


class SharpnessAware(torch.optim.SGD):
    """As it is usually written: a step down follows a step up."""

    def first_step(self):
        pass

    def step(self, closure=None):
        assert closure is not None


def test_an_engine_of_another_library_is_not_made_here():
    with pytest.raises(UserError, match="missing a required argument: 'model'"):
        PrivacyEngine()


def test_what_is_left_of_opacus_is_said(tmp_path):
    """Its wrappers would clip, and add noise, a second time; its calls have other names."""
    model = network()
    with pytest.raises(UserError, match="model: this is wrapped in Opacus' GradSampleModule"):
        make(tmp_path, GradSampleModule(network()))
    optimizer = DPOptimizer(
        adam_of(*model.parameters()), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=20
    )
    with pytest.raises(UserError, match="optimizer: this is wrapped in Opacus' DPOptimizer"):
        make(tmp_path, model, optimizer)
    engine = make(tmp_path, model)
    with pytest.raises(AttributeError, match=r"no get_epsilon; did you mean epsilon.*docs/from_opacus.md"):
        engine.get_epsilon(1e-5)
    with pytest.raises(AttributeError, match=r"no make_private \(choices: batches, .*docs/from_opacus.md"):
        engine.make_private(module=model)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"num_workers": 4},
            r"^num_workers= is no argument of engine.batches: the engine reads the examples",
        ),
        (
            {"batch_size": 16},
            "batch_size= is no argument of engine.batches; did you mean physical_batch_size",
        ),
        ({"max_physical_batch_size": 16}, "max_physical_batch_size= is called physical_batch_size= here"),
    ],
)
def test_arguments_of_a_data_loader_are_refused_in_one_sentence(tmp_path, given, says):
    with pytest.raises(UserError, match=says):
        make(tmp_path, network()).batches(**given)


def test_no_collate_function_is_torch_s_own_as_for_a_data_loader(tmp_path):
    features, labels = next(iter(make(tmp_path, network()).batches(None, 16)))
    assert features.shape[1:] == (10,)
    assert len(features) == len(labels)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            lambda model: {"optimizer": adam_of(model[0].weight)},
            "0.bias is trainable, and not in the optimizer",
        ),
        (
            lambda model: {"optimizer": adam_of(*model.parameters(), nn.Parameter(torch.zeros(1)))},
            "not in the model",
        ),
        (lambda model: {"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
        (lambda model: {"optimizer": SharpnessAware(model.parameters(), lr=0.1)}, "SharpnessAware asks for"),
        (
            lambda model: {"sampler": object()},
            "sampler= is no argument of PrivacyEngine: the engine reads the examples",
        ),
        (lambda model: {"max_grad_norm": 1.0}, "max_grad_norm= is called clip_norm= here"),
        (
            lambda model: {"max_physical_batch_size": 8},
            r"is no argument of PrivacyEngine: the loop takes it, engine.batches\(physical_batch_size=",
        ),
        (lambda model: {"target_epsilon": 1.0}, "target_epsilon= is called epsilon= here"),
        (lambda model: {"clip_nrom": 1.0}, "clip_nrom= is no argument .* did you mean clip_norm"),
        (lambda model: {"optimizer": adam_of(*model.requires_grad_(False).parameters())}, "nothing to train"),
        (
            lambda model: {"optimizer": adam_of(*diverged(model).parameters())},
            "2 tensors of .* infinity, 0.weight for one",
        ),
        (lambda model: {"rule": "none"}, "clips nothing.*: choose abadi, automatic or normalized"),
        (lambda model: {"epochs": 1}, "exactly one of epochs and steps"),
        (lambda model: {"epsilon": 1.0}, "exactly one of epsilon and noise_multiplier"),
        (lambda model: {"batch_size": 61}, "at most N"),
        (
            lambda model: {"steps": None, "epochs": 0.01},
            "epochs=0.01 is less than one step of batch_size=20 in 60: give 0.333 epochs",
        ),
        (lambda model: {"dataset": Stream()}, "map-style"),
        (lambda model: {"target_quantile": 1.5}, "give a number below 1"),
        (lambda model: {"dataset": StreamOfKnownLength(), "data_name": "s"}, "map-style"),
        (lambda model: {"clip_norm": 1e-20}, "no threshold below 1e-12"),
        (lambda model: {"scheduler": "cosine"}, "scheduler='cosine' is none"),
        (
            lambda model: {"scheduler": torch.optim.lr_scheduler.StepLR(adam_of(*model.parameters()), 1)},
            "learning rate of another optimizer",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_once(tmp_path, wrong, named):
    model = network()
    with pytest.raises(UserError, match=named):
        make(tmp_path, model, **wrong(model))
    assert not (tmp_path / "ledger.jsonl").exists()
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": "20"}, "batch_size='20' is not a number"),
        ({"batch_size": 0}, "batch_size=0 must be above 0"),
        ({"steps": 2.5}, "steps=2.5 is not a whole number"),
        ({"steps": None, "epochs": -1}, "epochs=-1 must be above 0"),
        ({"noise_multiplier": None, "epsilon": "8"}, "epsilon='8' is not a number"),
        ({"noise_multiplier": None, "epsilon": float("nan")}, "epsilon=nan is not a finite number"),
        ({"clip_norm": True}, "clip_norm=True is not a number"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be above 0"),
        ({"target_quantile": 1.0}, "target_quantile=1.0 is a share"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1 must be 0 or larger"),
        ({"clip_norm": None}, "clip_norm=None is not a number"),
        ({"clip_norm": 1e300}, r"clip_norm=1e\+300 must be at most 1e\+18"),
        ({"loss_scale": 1e300}, r"loss_scale=1e\+300 must be at most"),
        ({"loss_scale": 1e-22}, "loss_scale=1e-22 must be at least 1"),
        ({"users": 5}, "users=5 names nobody"),
        ({"scheduler": 3}, "scheduler=3 is none"),
        ({"allocation": "globl"}, "allocation=.globl. is not known; choose global"),
        ({"secure": "no"}, "secure='no' is neither True nor False"),
        ({"fixed_length": 1}, "fixed_length=1 is neither True nor False"),
        ({"quantile_budget": 0.5}, "quantile_budget=0.5 does nothing while thresholds are fixed"),
        ({"quantile_lr": 0.1}, "quantile_lr=0.1 does nothing while thresholds are fixed"),
        ({"rescale": "no"}, "rescale='no' is neither True nor False"),
        ({"rescale": False, "groups": "layer"}, "rescale=False does nothing with fixed thresholds"),
        ({"rescale": False, "target_quantile": 0.5}, "rescale=False does nothing with one group"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_number_that_cannot_be_meant_gets_one_sentence(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        make(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_folder_gets_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^folder=.*file is a file: give the run a folder of its own$"):
        make(tmp_path / "file")


def test_a_relative_folder_stays_where_it_was_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = train(make("run"), steps=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    other = train(make("run"), steps=1)
    train(engine)
    assert engine.finished
    assert [
        len((tmp_path / at / "run/ledger.jsonl").read_text().splitlines()) for at in (".", "elsewhere")
    ] == [6, 1]
    other.close()


def test_checkpoints_elsewhere_may_be_named_by_text(tmp_path):
    engine = train(make(tmp_path / "run"), steps=2)
    engine.save(str(tmp_path / "early"))
    engine.load(str(tmp_path / "early"))
    assert engine.steps_taken == 2
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"file/below can't be made .*: choose another one with save\(folder\)"
    ):
        engine.save(tmp_path / "file" / "below")


def test_numbers_and_flags_may_be_those_of_other_libraries(tmp_path):
    numbers = {
        "batch_size": np.float32(20),
        "steps": np.int64(2),
        "clip_norm": np.float32(0.5),
        "noise_multiplier": Fraction(3, 2),
        "target_quantile": np.float16(0.5),
        "checkpoint_every": np.int8(1),
        "groups": "layer",
        "rescale": np.False_,
    }
    engine = train(make(tmp_path, **numbers))
    assert engine.finished
    engine.close()
    own = {
        "batch_size": 20,
        "steps": 2,
        "noise_multiplier": 1.5,
        "target_quantile": 0.5,
        "checkpoint_every": 1,
    }
    assert make(tmp_path, **(numbers | own | {"rescale": False})).finished
    assert (
        engine.plan.to_dict()
        == make(tmp_path / "own", steps=2, noise_multiplier=1.5, target_quantile=0.5).plan.to_dict()
    )


@pytest.mark.parametrize("folder", [None, "", 3, "a\0b"])
def test_a_folder_that_is_none_is_refused(folder):
    with pytest.raises(UserError, match="is not the name of a folder"):
        make(folder)


@pytest.mark.parametrize("folder", ["x" * 300, "~nobody-of-this-name/runs"])
def test_a_name_that_no_folder_can_have_is_refused(folder):
    with pytest.raises(UserError, match="is no name of a folder"):
        make(folder)


def test_a_data_set_is_told_by_a_name(tmp_path):
    for name in ("", " ", 3):
        with pytest.raises(UserError, match="tells no data set from another one"):
            make(tmp_path, data_name=name)


def test_a_card_of_nothing_is_not_written(tmp_path):
    engine = make(tmp_path / "run")
    with pytest.raises(UserError, match="no step was taken yet"):
        engine.write_card(tmp_path / "model")
    train(engine, steps=1).write_card(tmp_path / "model")


def test_a_learning_rate_that_is_no_number_is_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=float("nan"))
    with pytest.raises(UserError, match="learning rate of nan"):
        make(tmp_path, model, optimizer)


@pytest.mark.parametrize("spoil", [lambda losses: losses + 0j, lambda losses: losses.long()])
def test_losses_are_real_numbers(tmp_path, spoil):
    with pytest.raises(UserError, match=r"complex numbers|carry no graph"):
        train(make(tmp_path), losses=lambda engine, batch: spoil(losses_of(engine, batch)))


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        make(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_guarantee_that_protects_nobody_is_said_at_once(tmp_path):
    with pytest.warns(UserWarning, match="not below 1/N"):
        make(tmp_path / "a", delta=0.5)
    with pytest.warns(UserWarning, match=r"delta = 0\.0011 is large: .* told whole"):
        make(tmp_path / "large", delta=0.0011)
    with pytest.warns(UserWarning, match="bounds next to nothing"):
        make(tmp_path / "b", noise_multiplier=None, epsilon=1e6)
    with pytest.warns(UserWarning, match="epsilon is infinite"):
        make(tmp_path / "zero", noise_multiplier=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "c")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: DataLoader(data(), batch_size=4), "give loader.dataset here"),
        (lambda: data().tensors, r"TensorDataset\(\*tensors\) makes one"),
        (lambda: {"train": data()}, "a dict has names and not examples by number"),
        (lambda: pandas.DataFrame({"x": [1.0, 2.0]}), "a DataFrame gives columns and not examples"),
        (lambda: pandas.Series([1.0, 2.0]), "a Series gives columns and not examples"),
        (lambda: pyarrow.table({"x": [1.0, 2.0]}), "a Table gives columns and not examples"),
        (lambda: zip(*data().tensors, strict=True), "map-style"),
    ],
    ids=["loader", "tuple", "dict", "frame", "series", "table", "zip"],
)
def test_what_has_no_examples_by_number_is_no_data_set(tmp_path, wrong, says):
    model = network()
    with pytest.raises(UserError, match=says):
        PrivacyEngine(
            model, adam_of(*model.parameters()), wrong(), folder=tmp_path, batch_size=1, steps=1, epsilon=1
        )


def test_arguments_in_another_order_are_told(tmp_path):
    model = network()
    settings = {"folder": tmp_path, "batch_size": 1, "steps": 1, "epsilon": 1}
    with pytest.raises(UserError, match="optimizer: this is of type TensorDataset and no torch Optimizer"):
        PrivacyEngine(model, data(), adam_of(*model.parameters()), **settings)
    with pytest.raises(UserError, match="model: this is of type Adam and no torch Module"):
        PrivacyEngine(adam_of(*model.parameters()), model, data(), **settings)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet"),
        (lambda: nn.Linear(3, 2, device="meta"), "weight lies on the meta device and has no values"),
    ],
    ids=["lazy", "meta"],
)
def test_a_model_without_weights_yet_is_told(tmp_path, model, says):
    made = model()
    settings = {"folder": tmp_path, "batch_size": 1, "steps": 1, "epsilon": 1}
    with pytest.raises(UserError, match=says):
        PrivacyEngine(made, torch.optim.SGD(made.parameters(), lr=0.1), data(), **settings)


def test_a_bare_tensor_or_array_is_hashed(tmp_path):
    x = torch.stack([x for x, _ in TASK.train])
    for number, plain in enumerate((x, x.numpy())):
        engine = make(tmp_path / str(number), dataset=plain)
        train(engine, losses=lambda engine, batch: engine.model(batch).square().sum(1))
        engine.close()
        with pytest.raises(UserError, match="the data differ"):
            make(tmp_path / str(number), dataset=plain + 1)


def test_examples_that_cannot_be_stacked_need_a_collate_function_that_pads(tmp_path):
    rows = [(torch.ones(3 + i % 4, dtype=torch.long), i % 3) for i in range(60)]
    engine = make(tmp_path, dataset=rows)
    with pytest.raises(
        UserError, match=r"default_collate cannot .*lengths differ.*collate_fn= of engine\.batches"
    ):
        next(engine.batches())

    def own(examples):
        raise ValueError("my own mistake")

    with pytest.raises(ValueError, match=r"^my own mistake$"):
        next(engine.batches(own))


def test_a_delta_in_the_place_of_the_accountant_is_named(tmp_path):
    with pytest.raises(UserError, match=r"δ is the plan's, 0\.001, as PrivacyEngine\(delta=\.\.\.\) says"):
        make(tmp_path).epsilon(1e-5)


def test_a_size_in_the_place_of_the_collate_function_is_named(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="physical_batch_size=64"):
        next(engine.batches(64))
    with pytest.raises(UserError, match="physical_batch_size='64' is not a number"):
        next(engine.batches(physical_batch_size="64"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schedule": {"name": "privacy_utility_released", "start": 1.5, "window": 1}}, "follows"),
        ({"schedule": 3}, "is no schedule"),
        ({"schedule": {"name": "time", "rate": 1.0}}, "is no schedule"),
        ({"schedule": {"name": "time", "decay_rate": "fast"}}, "is no schedule"),
        ({"schedule": {"name": "influence", "influences": ["a"]}}, "is no schedule"),
        ({"delta": None}, "neither a number nor a rule"),
        ({"delta": [1e-5]}, "neither a number nor a rule"),
    ],
)  # fmt: skip
def test_a_schedule_or_a_delta_that_is_none_gets_one_sentence(tmp_path, changes, says):
    with pytest.raises(UserError, match=says) as caught:
        make(tmp_path / "run", **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


ROWS = [(torch.full((10,), float(i)), i % 3) for i in range(30)]
DICTIONARIES = [{"x": x, "y": y} for x, y in ROWS]
TABLE = Dataset.from_dict({"x": [[float(i)] for i in range(30)], "y": list(range(30))})


@pytest.mark.parametrize(
    "repeated",
    [
        Subset(ROWS, [*range(30), 3, 3]),
        Subset(Subset(ROWS, range(5)), torch.tensor([0, 1, 1])),
        ConcatDataset([ROWS, Subset(ROWS, [7])]),
        TABLE.select([0, 1, 1]),
        concatenate_datasets([TABLE, TABLE.select(range(3))]),
    ],
)
def test_an_example_that_stands_in_the_data_set_twice_is_refused(tmp_path, repeated):
    """As where a rare class is put in several times: each copy would be protected by itself."""
    with pytest.raises(UserError, match=r"an example stands in the data set up to [23] times"):
        make(tmp_path, dataset=repeated, batch_size=2)
    users = list(range(len(repeated)))
    make(tmp_path, dataset=repeated, batch_size=2, users=users, data_name="rows 1").close()


SERIES = torch.arange(1200.0)


@pytest.mark.parametrize("windows", [SERIES.unfold(0, 10, 1), SERIES.reshape(-1, 2).unfold(0, 10, 5)])
def test_windows_that_overlap_are_named(tmp_path, windows):
    dataset = TensorDataset(windows)
    with pytest.warns(UserWarning, match="windows that overlap"):
        make(tmp_path / "a", dataset=dataset).close()
    users = [i // 20 for i in range(len(windows))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "b", dataset=dataset, users=users, batch_size=2).close()


@pytest.mark.parametrize(
    "rows",
    [
        SERIES.unfold(0, 10, 10),
        SERIES.reshape(10, -1).t(),
        SERIES.reshape(4, 60, 5).transpose(0, 1),
        SERIES.reshape(60, 20).unfold(1, 5, 1),
        SERIES.reshape(60, 2, 5, 2).to(memory_format=torch.channels_last),
        torch.zeros(10).expand(60, 10),
        torch.arange(60.0)[:, None].expand(60, 10),
    ],
)
def test_rows_that_are_apart_in_memory_are_not_windows(tmp_path, rows):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*windows that overlap")
        make(tmp_path, dataset=TensorDataset(rows)).close()


@pytest.mark.parametrize("repeated", [DICTIONARIES + DICTIONARIES[:5], ROWS + ROWS])
def test_a_row_that_stands_in_a_list_twice_is_named(tmp_path, repeated):
    with pytest.warns(UserWarning, match="a row stands in the data set up to 2 times"):
        make(tmp_path, dataset=repeated, batch_size=2).close()


@pytest.mark.parametrize("part", [False, True], ids=["all", "a part"])
def test_equal_rows_of_tensors_are_counted(tmp_path, part, monkeypatch):
    """As where rows of a rare class were put in again: nothing else tells that they are copies."""
    x, y = data().tensors
    rare = TensorDataset(torch.cat([x, x[y == 1]]), torch.cat([y, y[y == 1]]))
    count = 2 * int((y == 1).sum())
    dataset = Subset(rare, range(len(rare))) if part else rare
    with pytest.warns(UserWarning, match=f"{count} of {len(rare)} examples are equal to another one"):
        make(tmp_path / "a", dataset=dataset).close()
    table = Dataset.from_dict({"x": x.tolist() + x[:3].tolist(), "y": y.tolist() + y[:3].tolist()})
    with pytest.warns(UserWarning, match="6 of 63 examples are equal to another one"):
        make(tmp_path / "t", dataset=table).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "b").close()
        make(tmp_path / "c", dataset=dataset, users=[i % len(x) for i in range(len(rare))]).close()
        monkeypatch.setattr(own_rows, "MOST", 100)
        for name, large in (("d", dataset), ("e", table)):
            make(tmp_path / name, dataset=large).close()


@pytest.mark.parametrize(
    "scale", [lambda x: (x - x.mean(0)) / x.std(0), lambda x: (x - x.mean(0)) / x.std(0, correction=0)]
)
def test_columns_that_were_scaled_by_their_own_rows_are_told_and_on_the_card(tmp_path, scale):
    """As a StandardScaler does that is fitted to the training rows: its numbers go with the model, without noise."""
    x, y = data().tensors
    with pytest.warns(UserWarning, match="mean 0 and standard deviation 1 over exactly these rows"):
        engine = train(make(tmp_path / "a", dataset=TensorDataset(scale(3 * x + 5), y)))
    engine.write_card(tmp_path)
    assert "over exactly these rows" in (tmp_path / "PRIVACY.md").read_text()
    signs = torch.tensor([-1.0, 1.0]).repeat(len(x) // 2)[:, None].expand(-1, 10)
    by_row = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*over exactly these rows")
        for name, harmless in (("b", signs), ("c", by_row), ("d", scale(x)[: len(x) // 2])):
            make(tmp_path / name, dataset=TensorDataset(harmless, y[: len(harmless)])).close()


@pytest.mark.parametrize(
    "different",
    [
        ["a", "a", 1, 1, 1],
        Subset(ROWS, [3, 1, 2]),
        ConcatDataset([Subset(ROWS, range(10)), Subset(ROWS, range(10, 30))]),
        TABLE.select([2, 0, 1]),
        concatenate_datasets([TABLE.select(range(10)), TABLE.select(range(10, 30))]),
        concatenate_datasets([TABLE, Dataset.from_dict(TABLE.to_dict())]),
        concatenate_datasets([Dataset.from_dict({"x": [""] * 5}) for _ in range(3)]),
        concatenate_datasets([Dataset.from_dict({"x": [None] * 5}) for _ in range(3)]),
    ],
)
def test_different_examples_may_come_from_anywhere(tmp_path, different):
    make(tmp_path, dataset=different, batch_size=2, data_name="rows 1").close()


class Frozen(nn.Module):
    """A head on a part that is frozen by `no_grad` alone, or not at all."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen, self.body, self.head = frozen, nn.Linear(10, 4), nn.Linear(4, 3)

    def forward(self, x):
        with torch.set_grad_enabled(not self.frozen):
            features = self.body(x)
        return self.head(features)


@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_weights_that_no_loss_goes_through_are_told_once_where_the_loop_steps(tmp_path, engine):
    with pytest.warns(UserWarning, match=r"^body.weight trains \(2 such parameters\), and no loss") as told:
        train(make(tmp_path / "frozen", Frozen(True), engine=engine), steps=2)
    assert len([warning for warning in told if "no loss of the first batch" in str(warning.message)]) == 1
    assert told[0].filename.endswith("own_loop.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make(tmp_path / "whole", Frozen(False), engine=engine, groups="layer"), steps=2)
