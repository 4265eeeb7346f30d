"""Seeds of torch's generators, of which all bits count."""

import torch

from dpexp.training import seeding


def test_this_torch_keeps_its_generator_as_expected():
    """Otherwise the seed of dropout counts only in 32 bits."""
    assert seeding._state_layout() is not None


def test_all_of_a_seed_reaches_the_generator_that_dropout_draws_from():
    with torch.random.fork_rng():
        drawn = []
        for seed in (1, 1 + (1 << 40), 1):  # equal in the 32 bits that torch.manual_seed keeps
            seeding.seed_torch(seed)
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
