"""A second run on a model that has learnt from the same rows: its own ε is not all that the weights tell of them."""

import copy
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers

from dpexp import PrivacyEngine
from tests.training.own_loop import data, make, network, train

ADD_UP = "that is in both data sets, epsilon and delta of both runs add up"


def second(folder, model, dataset=None):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = make(folder, model, dataset=dataset)
    return engine, [str(warning.message) for warning in told if "not proven" in str(warning.message)]


@pytest.fixture
def trained(tmp_path):
    model = network()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with make(tmp_path / "first", model) as engine:
        train(engine)
    return model, first


def test_a_second_run_on_the_same_rows_is_told_and_its_card_says_so(tmp_path, trained):
    model, _ = trained
    engine, told = second(tmp_path / "second", model)
    assert len(told) == 1
    assert ADD_UP in told[0]
    assert str(tmp_path / "first") in told[0]
    train(engine)
    engine.write_card(tmp_path / "model")
    assert ADD_UP in (tmp_path / "model" / "PRIVACY.md").read_text()
    engine.close()
    # another process goes on with it, and knows the model from its checkpoint alone
    with make(tmp_path / "second") as engine:
        engine.write_card(tmp_path / "again")
    assert ADD_UP in (tmp_path / "again" / "PRIVACY.md").read_text()


def test_a_run_on_more_or_fewer_rows_is_told_too(tmp_path, trained):
    """Rows are added to the first ones more often than not, and no hash of the whole shows it."""
    model, _ = trained
    engine, told = second(tmp_path / "fewer", model, dataset=torch.utils.data.Subset(data(), range(24)))
    engine.close()
    assert len(told) == 1
    assert str(tmp_path / "first") in told[0]


def test_a_run_whose_folder_was_deleted_still_has_taught_its_model(tmp_path, trained):
    """As where a cell of a notebook begins anew: the ledger is gone, and the weights are not."""
    model, _ = trained
    shutil.rmtree(tmp_path / "first")
    engine, told = second(tmp_path / "first", model)
    engine.close()
    assert len(told) == 1


@pytest.mark.parametrize("copied", ["deepcopy", "file"])
def test_trained_weights_in_another_model_are_known(tmp_path, trained, copied):
    model, _ = trained
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    else:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        other = network()
        other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    engine, told = second(tmp_path / "second", other)
    engine.close()
    assert len(told) == 1
    assert str(tmp_path / "first") in told[0]


def test_weights_that_a_run_did_not_change_say_nothing_of_it(tmp_path):
    model = network()
    with make(tmp_path / "first", model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)) as engine:
        train(engine)
    engine, told = second(tmp_path / "second", model)
    engine.close()
    assert not told


def test_what_adds_nothing_to_the_first_run_is_not_told(tmp_path, trained):
    model, first = trained
    # the run itself goes on, or is looked at again
    engine, told = second(tmp_path / "first", model)
    engine.close()
    assert not told
    model.load_state_dict(first)
    engine, told = second(tmp_path / "first_weights", model)
    engine.close()
    assert not told


def test_a_run_without_a_step_has_taught_nothing(tmp_path):
    model = network()
    make(tmp_path / "first", model).close()
    engine, told = second(tmp_path / "second", model)
    engine.close()
    assert not told


def test_weights_beside_a_card_have_learnt_from_private_data(tmp_path):
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
        max_position_embeddings=16,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "PRIVACY.md").write_text("# Privacy of this model")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    settings = {"batch_size": 8, "steps": 2, "noise_multiplier": 1.0, "delta": 1e-3}
    with pytest.warns(UserWarning, match=r"model holds a PRIVACY.md"):
        engine = PrivacyEngine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data(), folder=tmp_path / "run", **settings
        )
    engine.close()


@pytest.mark.parametrize(("way", "read"), [("eva", True), (True, False), ("pissa", False)])
def test_adapters_that_begin_by_rows_of_data_are_told(tmp_path, way, read):
    """PEFT's EVA takes the principal components of what the layers see of them."""
    model = network()
    model.peft_config = {"default": SimpleNamespace(init_lora_weights=way)}
    _, told = second(tmp_path, torch.nn.Sequential(model))
    assert bool(told) == read
    assert not read or "init_lora_weights=eva" in told[0]


def test_the_card_of_one_run_of_several_on_the_same_data_asks_for_trials(tmp_path):
    """As in a loop over learning rates: only who tried them knows that one was chosen."""
    own = torch.utils.data.TensorDataset(
        *(1 * tensor for tensor in data().tensors), torch.arange(len(data()))
    )
    for name in ("a", "b", "c"):
        train(make(tmp_path / name, dataset=own)).close()
    make(tmp_path / "no step", dataset=own).close()
    with (
        make(tmp_path / "c", dataset=own) as engine,
        pytest.warns(UserWarning, match=r"on the same data: 2\..*trials=3"),
    ):
        engine.write_card(tmp_path / "card")
    with make(tmp_path / "c", dataset=own, trials=3) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.write_card(tmp_path / "card")
    assert "the choice among 3 trials" in (tmp_path / "card" / "PRIVACY.md").read_text()
