"""Networks for images: their sizes are the published ones, their layers compute what is said, and errors name the way out."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from dpexp.clipping import attach
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.explain import ExplainArguments, explain
from dpexp.models import build_model, build_tokenizer
from dpexp.models.cnn import MaxPool
from dpexp.models.images import ImageInputs, build_image_network, build_own_network, image_inputs
from dpexp.models.wide_resnet import ResidualBlock, StandardisedConv2d, WideResNet
from dpexp.schemas import ModelConfig, PeftConfig

TINY_TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def configured(name: str) -> ModelConfig:
    return compose(["task=cifar10", "clip=flat", f"model={name}"]).model


def built(
    model: ModelConfig,
    shape: tuple[int, int, int] = (3, 32, 32),
    labels: int = 10,
    scale: str = "demo",
    **peft,
):
    return build_model(
        model,
        PeftConfig(**peft),
        head="image_classifier",
        num_labels=labels,
        scale=scale,
        seed=0,
        image_shape=shape,
    )


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes_are_the_published_ones() -> None:
    assert size(built(configured("cnn_papernot"), (1, 28, 28)).model) == 26_010
    assert size(built(configured("cnn_mnist"), (1, 28, 28)).model) == 26_010
    assert size(built(configured("cnn_cifar")).model) == 550_570
    # 2.75 million weights of convolutions and head, and a gain and a bias for each of the 1,744 + 448 output channels
    wrn = built(configured("wrn16_4")).model
    assert sum(
        m.weight.numel() for m in wrn.modules() if isinstance(m, nn.Conv2d | nn.Linear)
    ) == pytest.approx(2.75e6, rel=2e-3)
    assert sum(isinstance(m, nn.Conv2d) for m in wrn.modules()) == 16
    assert not any(isinstance(m, nn.BatchNorm2d) for m in wrn.modules())
    assert {m.num_groups for m in wrn.modules() if isinstance(m, nn.GroupNorm)} == {16}


def test_pooling_with_the_channels_last_computes_the_same():
    x = torch.randint(4, (3, 5, 9, 9)).double()
    # every window has ties
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = MaxPool(2, 1)(ours)
    expected = nn.MaxPool2d(2, 1)(theirs)
    weights = torch.randn_like(expected)
    assert torch.equal(y, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        *(torch.autograd.grad((out * weights).sum(), x)[0] for out, x in ((y, ours), (expected, theirs)))
    )


def test_the_activations_are_those_that_the_names_say() -> None:
    for name, activation in (("cnn_papernot", nn.Tanh), ("cnn_mnist", nn.ReLU), ("cnn_cifar", nn.Tanh)):
        run = compose(["task=mnist", "clip=flat", f"model={name}"])
        model = built(run.model, (1, 28, 28)).model
        assert any(isinstance(m, activation) for m in model.modules()), name
        assert not any(isinstance(m, ({nn.Tanh, nn.ReLU} - {activation}).pop()) for m in model.modules()), (
            name
        )


def test_a_standardised_convolution_has_weights_of_mean_zero_and_variance_one_over_fan_in() -> None:
    torch.manual_seed(0)
    conv = StandardisedConv2d(3, 5, 3, stride=2, padding=1).double()
    with torch.no_grad():
        conv.weight.mul_(7).add_(1)
        conv.gain.normal_()
        conv.bias.normal_()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    expected = (
        torch.stack([(w - w.mean()) / (w.var(correction=0) + 1e-6).sqrt() for w in conv.weight])
        * conv.gain
        / 27**0.5
    )
    torch.testing.assert_close(conv(x), F.conv2d(x, expected, conv.bias, 2, 1))
    clipper = attach(conv)
    clipper.backward(conv(x).square().flatten(1).sum(1))
    assert "one back-propagation per example" not in clipper.choices.values()


def test_a_block_is_activation_norm_convolution_beside_its_shortcut() -> None:
    x = torch.randn(2, 4, 6, 6)
    same = ResidualBlock(4, 4, 1, 2, True, projected=False)
    inner = same.conv2(same.norm2(F.relu(same.conv1(same.norm1(F.relu(x))))))
    torch.testing.assert_close(same(x), x + inner)
    wider = ResidualBlock(4, 8, 2, 2, True, projected=True)
    inner = wider.conv2(wider.norm2(F.relu(wider.conv1(wider.norm1(F.relu(x))))))
    torch.testing.assert_close(wider(x), wider.shortcut(F.relu(x)) + inner)
    assert wider(x).shape == (2, 8, 3, 3)


def test_the_same_seed_gives_the_same_network_and_leaves_torch_alone() -> None:
    state = torch.get_rng_state()
    first, second = (built(configured("cnn_cifar")).model for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "beit_base_patch16_224"])
def test_the_transformers_of_timm_are_clipped_as_one_example_at_a_time_is(name: str) -> None:
    model = ModelConfig(family="random_timm", id=name, config=dict(TINY_TIMM))
    inputs = build_tokenizer(model, scale="demo")
    assert (inputs.size, inputs.channels) == (32, 3)
    agrees_with_a_loop(built(model, labels=5).model)


@pytest.mark.parametrize("architecture", ["vit", "beit"])
def test_the_transformers_of_hugging_face_are_clipped_as_one_example_at_a_time_is(architecture: str) -> None:
    config = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32,
        "patch_size": 8,
    }  # fmt: skip
    model = ModelConfig(
        family="random_hf", architecture=architecture, config=config, dropout=0.0, attention_dropout=0.0
    )
    if architecture == "beit":
        model.config["drop_path_rate"] = 0.0
    inputs = build_tokenizer(model, scale="demo")
    assert inputs == ImageInputs(32, 3, (0.5,) * 3, (0.5,) * 3)
    agrees_with_a_loop(built(model, labels=5).model)


def agrees_with_a_loop(model: nn.Module) -> None:
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # parameters that begin at zero would hide what hangs on them
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    x, y = torch.randn(3, 3, 32, 32, generator=generator, dtype=torch.float64), torch.tensor([1, 4, 0])

    def losses(where: slice) -> torch.Tensor:
        output = model(x[where])
        return F.cross_entropy(getattr(output, "logits", output), y[where], reduction="none")

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    grads = [torch.autograd.grad(losses(slice(i, i + 1)).sum(), parameters) for i in range(3)]
    norms = [torch.sqrt(sum(g.square().sum() for g in grad)) for grad in grads]
    clipper = attach(model, clip_norm=0.5)
    clipper.backward(losses(slice(None)))
    for k, (name, p) in enumerate(named):
        expected = sum(grad[k] * min(1.0, 0.5 / float(norm)) for grad, norm in zip(grads, norms, strict=True))
        torch.testing.assert_close(p.grad, expected, rtol=1e-7, atol=1e-10, msg=name)
    clipper.detach()


def test_large_models_want_large_images_and_come_from_the_hub_alone() -> None:
    for name in ("vit_base", "vit_large", "beit_large"):
        model = configured(name)
        assert build_tokenizer(model, scale="paper") == ImageInputs(224, 3, (0.5,) * 3, (0.5,) * 3)
        with pytest.raises(UserError, match=r"scale=demo needs no network"):
            built(model)


def test_a_model_that_the_hub_can_not_give_is_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"model.id=vit_tiny_patch16_224 could not be loaded.*HF_HUB_OFFLINE"):
        built(ModelConfig(family="timm", id="vit_tiny_patch16_224"), scale="paper")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ModelConfig(family="cnn", architecture="mnits"), "model.architecture=mnits is unknown: choose one of mnist, cifar"),
        (ModelConfig(family="cnn", architecture="cifar", config={"width": 3}), r"model.config.width: .* no such setting"),
        (ModelConfig(family="cnn", architecture="cifar", config={"activation": "sine"}), "activation=sine is unknown"),
        (ModelConfig(family="cnn", architecture="cifar", config={"hidden": 0}), "model.config.hidden=0: must be 1 or more"),
        (ModelConfig(family="cnn", architecture="cifar", dropout=0.1), "have no dropout"),
        (ModelConfig(family="wide_resnet", config={"depth": 17}), "model.config.depth=17: a wide ResNet has depth 10, 16"),
        (ModelConfig(family="wide_resnet", config={"groups": 3}), "groups=3: must divide the 16 channels"),
        (ModelConfig(family="random_timm", id="vit_bas_patch16_224"), "timm has no such model; did you mean vit_base"),
        (ModelConfig(family="random_timm", id="vit_base_patch16_224", config={"patches": 3}), "model.config does not make"),
        (ModelConfig(family="random_timm", id="vit_base_patch16_224", config={"pos_embed": "all"}), "of timm: AssertionError"),
    ],
)  # fmt: skip
def test_wrong_settings_name_the_way_out(model: ModelConfig, says: str) -> None:
    with pytest.raises(UserError, match=says):
        built(model)


@pytest.mark.parametrize("name", ["resnet18", "vgg11"])
def test_a_network_of_convolutions_sees_images_of_the_size_that_is_asked_for(name: str) -> None:
    config = {"img_size": 32} | ({"norm_layer": "groupnorm"} if name == "resnet18" else {})
    model = ModelConfig(name=name, family="random_timm", id=name, config=config)
    assert image_inputs(model).size == 32
    network, _ = build_image_network(model, (3, 32, 32), 10, "small", 0)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(UserError, match="images of 9x9 pixels are too small"):
        built(ModelConfig(family="cnn", architecture="mnist"), (1, 9, 9))
    assert isinstance(
        build_own_network(ModelConfig(family="wide_resnet", config={"depth": 10}), None, 10), WideResNet
    )


def test_a_network_with_batch_norm_is_refused_by_name() -> None:
    model = built(ModelConfig(family="random_timm", id="resnet10t")).model
    with pytest.raises(UserError, match="BatchNorm"):
        attach(model)


def test_heads_alone_train_where_this_is_asked_for() -> None:
    for model in (
        configured("cnn_cifar"),
        ModelConfig(family="random_timm", id="vit_base_patch16_224", config=dict(TINY_TIMM)),
    ):
        assert built(model, name="head").trainable == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [
        ("wrn16_4", 17, 2_753_818),
        ("cnn_papernot", 4, 26_010),
        ("cnn_small", 8, 34_930),
        ("vit_tiny_random", 14, 74_562),
    ],
)
def test_the_layers_of_every_network_can_be_explained(name: str, layers: int, parameters: int) -> None:
    found = explain(ExplainArguments(network=name, model=configured(name)))
    assert len(found["layers"]) == layers
    assert found["parameters"]["total"] == parameters


def test_fully_connected_networks_and_residual_ones_without_batch_statistics() -> None:
    model = configured("mlp_shallow")
    assert model.config == {"depth": 10, "width": 1000, "activation": "relu"}
    assert (
        size(built(model, labels=100).model) == 3072 * 1000 + 9 * 1000 * 1000 + 100 * 1000 + 10 * 1000 + 100
    )
    for name, millions in (("resnet18_gn", 11.69), ("vgg11", 132.86)):
        with torch.device("meta"):
            network = timm.create_model(configured(name).id, **configured(name).config)
        assert size(network) == pytest.approx(millions * 1e6, rel=1e-3)
        assert not any(isinstance(m, nn.BatchNorm2d) for m in network.modules())
    small = ModelConfig(family="cnn", architecture="mlp", config={"depth": 2, "width": 5})
    agrees_with_a_loop(built(small, labels=5).model)
    tiny = {"norm_layer": "groupnorm", "channels": [64] * 4, "layers": [1] * 4, "stem_width": 32}
    agrees_with_a_loop(built(ModelConfig(family="random_timm", id="resnet18", config=tiny), labels=5).model)
