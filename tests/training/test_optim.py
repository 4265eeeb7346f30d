"""The learning rate as a function of the step, and the optimisers."""

import pytest
import torch

from dpexp.errors import UserError
from dpexp.schemas import OptimConfig
from dpexp.training.optimizers.choice import build_optimizer, learning_rate
from tests.training.tiny import run_to_end, tiny_run


def test_linear_decay_after_a_warm_up():
    rates = [learning_rate(step, 10, 1.0, "linear", 0.2) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_constant_without_a_warm_up():
    assert {learning_rate(step, 7, 0.3, "constant", 0.0) for step in range(7)} == {0.3}


def test_one_step_is_a_full_step():
    assert learning_rate(0, 1, 0.5, "linear", 0.0) == 0.5


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UserError, match="linear"):
        learning_rate(5, 10, 1.0, "stairs", 0.0)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_settings_reach_the_optimiser(name):
    optim = OptimConfig(name=name, lr=0.1, betas=[0.8, 0.9], eps=1e-3, weight_decay=0.5, momentum=0.7)
    parameter = torch.nn.Parameter(torch.zeros(1))
    defaults = build_optimizer(optim, [parameter]).defaults
    assert (defaults["lr"], defaults["weight_decay"]) == (0.1, 0.5)
    if name == "sgd":
        assert defaults["momentum"] == 0.7
    else:
        assert (defaults["betas"], defaults["eps"]) == ((0.8, 0.9), 1e-3)


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(UserError, match="adamw"):
        build_optimizer(OptimConfig(name="lion"), [torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_moves_each_layer_by_its_own_length_with_and_without_weight_decay(weight_decay):
    """You et al. 2020, Algorithm 2: the ratio of the norms is part of LAMB, not of its weight decay."""
    layers = [torch.nn.Parameter(torch.full((n,), size)) for n, size in ((4, 3.0), (9, 0.5))]
    optim = OptimConfig(name="disk", base="lamb", lr=0.1, weight_decay=weight_decay, kappa=1.0)
    before = [layer.detach().clone() for layer in layers]
    for layer in layers:
        layer.grad = torch.ones_like(layer)
    build_optimizer(optim, layers).step()
    for layer, old in zip(layers, before, strict=True):
        assert float((layer.detach() - old).norm()) == pytest.approx(0.1 * float(old.norm()))


OWN = """
import torch

class Told(torch.optim.SGD):
    stds = None

    def tell_noise(self, stds):
        self.stds = stds

def slow(parameters, lr, share=0.5):
    return Told(parameters, lr=lr * share)

def some(parameters, lr):
    return torch.optim.SGD(parameters[:1], lr=lr)

def nothing(parameters, lr):
    return None
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return lambda name, **config: OptimConfig(
        name="custom", lr=0.5, factory=f"{tmp_path / 'mine.py'}:{name}", config=config
    )


def test_an_optimiser_of_ones_own_gets_the_rate_and_its_settings(own):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    assert build_optimizer(own("slow", share=0.2), parameters).defaults["lr"] == pytest.approx(0.1)
    library = OptimConfig(name="custom", lr=0.5, factory="torch.optim:RMSprop", config={"alpha": 0.9})
    assert build_optimizer(library, parameters).defaults["alpha"] == 0.9


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        # a name unlike all others, or Python 3.13 asks which one was meant
        ("slow", {"alpha": 1}, "unexpected keyword argument 'alpha'; it is called with the parameters, with lr=0.5"),
        ("some", {}, "moves 1 of the 2 parameters"),
        ("nothing", {}, "made a NoneType, and a torch.optim.Optimizer is wanted"),
        ("absent", {}, "has no absent"),
    ],
)  # fmt: skip
def test_what_is_no_optimiser_of_all_parameters_is_refused(own, name, config, says):
    with pytest.raises(UserError, match=says):
        build_optimizer(own(name, **config), [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])


class Averaging(torch.optim.SGD):
    """Moves other weights than those to evaluate, as schedule-free ones do."""

    def train(self):
        pass

    def eval(self):
        pass


def test_an_optimiser_with_other_weights_to_evaluate_is_refused():
    """Those that it trains would be evaluated and exported."""
    optim = OptimConfig(name="custom", factory=f"{__name__}:Averaging")
    with pytest.raises(UserError, match=r"Averaging trains other weights .* loop of your own"):
        build_optimizer(optim, [torch.nn.Parameter(torch.zeros(1))])


def test_an_optimiser_that_fails_is_named(tmp_path):
    run = tiny_run(steps=1)
    run.optim.name, run.optim.factory = "custom", "torch.optim:SparseAdam"
    with pytest.raises(UserError, match=r"step\(\) of SparseAdam failed .* dense gradients"):
        run_to_end(tmp_path, run)


def test_an_optimiser_that_asks_for_gradients_again_is_refused():
    with pytest.raises(UserError, match="asks for a closure"):
        build_optimizer(
            OptimConfig(name="custom", factory="torch.optim:LBFGS"), [torch.nn.Parameter(torch.zeros(1))]
        )
