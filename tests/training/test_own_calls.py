"""What an engine is asked for around a person's own loop: copies, its end, accountants, and sizes."""

import copy
import pickle

import numpy as np
import pytest

from dpexp.errors import UserError
from tests.training.own_loop import losses_of, make, train


def test_an_engine_is_neither_copied_nor_pickled(tmp_path):
    engine = make(tmp_path)
    for do in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            do(engine)


def test_a_sum_without_noise_is_not_left_behind_by_closing(tmp_path):
    engine = make(tmp_path)
    loop = engine.batches(physical_batch_size=4)
    engine.step(losses_of(engine, next(loop)))
    assert engine.model[0].weight.grad is not None
    engine.close()
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("accountant", ["gdp", "RDP", "moments"])
def test_epsilon_is_that_of_an_accountant_that_bounds(tmp_path, accountant):
    with pytest.raises(UserError, match=f"accountant={accountant}"):
        make(tmp_path).epsilon(accountant)


@pytest.mark.parametrize(
    "wrong", [{"steps": -1}, {"steps": 1.5}, {"steps": "3"}, {"physical_batch_size": 1.5}]
)
def test_sizes_of_a_loop_are_whole_numbers(tmp_path, wrong):
    with pytest.raises(UserError, match=r"is not a|must be above 0"):
        next(make(tmp_path).batches(**wrong))


def test_whole_numbers_of_any_type_are_sizes(tmp_path):
    engine = make(tmp_path)
    assert train(engine, 8.0, steps=np.int64(2)).steps_taken == 2
    assert list(engine.batches(steps=0)) == []
