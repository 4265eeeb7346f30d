"""Bu et al.'s analysis: the modules, the formulas, the tables to the digit, and shapes read off arbitrary networks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dpexp.clipping import cost
from dpexp.clipping.gradients import Conv, Geometry, Lookup, Outer
from dpexp.complexity import architectures
from dpexp.complexity.architectures import build
from dpexp.complexity.formulas import (
    IMPLEMENTATIONS,
    NON_PRIVATE,
    SPACE,
    TIME,
    Layer,
    costs,
    depth_threshold,
    norm_space,
    relative_speed,
    views,
)
from dpexp.complexity.shapes import coverage, layers_of
from dpexp.errors import UserError
from dpexp.reproduce import complexity_tables, exact
from dpexp.reproduce.benchmarks import Measurement

COMPLETE = {
    "resnet18": ("399.9M", "11.68M", "1.05M"),
    "resnet34": ("444.8M", "21.78M", "2.33M"),
    "resnet50": ("548.5M", "25.50M", "3.07M"),
}
ONE = {x.name: x for x in IMPLEMENTATIONS}


def value(terms, layer, batch):
    return sum(factor * layer.terms(batch)[term] for term, factor in terms.items())


@pytest.mark.parametrize("sizes", [(3, 5, 7, 11), (2, 1, 4, 3)])
def test_terms_are_what_torch_counts_and_what_the_engine_knows(sizes):
    B, T, p, d = sizes
    layer, w = Layer("layer", "linear", T, p, d), torch.zeros(p, d)
    a, g = torch.zeros(B * T, d), torch.zeros(B * T, p)
    for name, task in {"1": lambda: a @ w.t(), "2a": lambda: g @ w, "2b": lambda: g.t() @ a}.items():
        with FlopCounterMode(display=False) as counter:
            task()
        assert value(TIME[name], layer, B) == counter.get_total_flops(), name
    for name, module in {"3": cost.ghost_norm, "4": cost.instantiation}.items():
        assert value(TIME[name], layer, B) == module(B, T, p, d).flops, name
        assert value(SPACE[name], layer, B) == module(B, T, p, d).floats, name


def test_layers_cost_what_their_gradients_say():
    """The ghost norms of grouped convolutions and embeddings, beside the engine's own account."""
    B = 2
    geometry = Geometry((1, 1), (0, 0), (1, 1), groups=2)
    grouped = Conv(torch.zeros(B, 4, 6, 6), torch.zeros(B, 8, 4, 4), (8, 2, 3, 3), geometry, B)
    lookup = Lookup(torch.zeros(B, 5, dtype=torch.long), torch.zeros(B, 5, 3), 7)
    outer = Outer(torch.zeros(B, 5, 7), torch.zeros(B, 5, 3))
    for layer, per_example in (
        (Layer("", "convolution", 16, 8, 18, groups=2), grouped),
        (Layer("", "embedding", 5, 3, 7), lookup),
        (Layer("", "linear", 5, 3, 7), outer),
    ):
        expected = per_example.cost("ghost")
        assert value(TIME["3"], layer, B) == expected.flops
        assert value(SPACE["3"], layer, B) == expected.floats == B * layer.ghost
        assert B * layer.instantiation == per_example.instantiate().numel()


def test_groups_move_the_rule():
    assert Layer("", "convolution", 10, 8, 30).prefers_ghost  # 2 · 10² < 8 · 30
    assert not Layer("", "convolution", 10, 8, 30, groups=2).prefers_ghost


def test_the_rule_is_strict():
    """Table 4, conv1 and the last layer of resnet18; and equal sides."""
    assert not Layer("", "convolution", 112 * 112, 64, 147).prefers_ghost
    assert Layer("", "linear", 1, 1000, 512).prefers_ghost
    assert not Layer("", "linear", 2, 4, 2).prefers_ghost


@pytest.mark.parametrize(
    ("name", "printed", "derived"),
    [
        ("FastGradClip", "8BTpd", "10BTpd"),
        ("improved FastGradClip", "6BTpd", "8BTpd"),
        ("Opacus", "8BTpd", "8BTpd + 2Bpd"),
        ("GhostClip", "10BTpd + 2BT²(p+d)", "10BTpd + 2BT²(p+d)"),
        ("BK", "6BTpd + 2BT²(p+d)", "6BTpd + 2BT²(p+d)"),
        ("MixGhostClip", "8BTpd + ⟨2BTpd, 2BT²(p+d)⟩", "10BTpd + ⟨2BTpd, 2BT²(p+d)⟩"),
        ("BK-MixGhostClip", "6BTpd + ⟨2BTpd, 2BT²(p+d)⟩", "6BTpd + ⟨2BTpd, 2BT²(p+d)⟩"),
        ("BK-MixOpt", "6BTpd + ⟨0, 2BT²(p+d)⟩", "6BTpd + ⟨2Bpd, 2BT²(p+d)⟩"),
    ],
)
def test_time_as_printed_and_as_derived(name, printed, derived):
    assert str(ONE[name].printed_time) == printed
    assert str(ONE[name].time) == derived


def test_space_as_printed_and_as_derived():
    assert str(NON_PRIVATE.printed_space) == "pd + 3BTd + BTp"
    assert str(NON_PRIVATE.space) == "2pd + 2BTd + BTp"
    assert str(ONE["BK"].space) == "2BT² + 2pd + 2BTd + BTp"  # not min{2BT², BTpd} more, as Table 2 has it
    for (
        implementation
    ) in IMPLEMENTATIONS:  # every private implementation needs what plain training needs, or more
        for terms in (implementation.space.instantiate, implementation.space.ghost):
            assert terms >= NON_PRIVATE.space.ghost, implementation.name


def test_hybrids_are_their_two_ends():
    """Where T is small the hybrids are the ghost methods, where it is large those that instantiate."""
    low, high = Layer("", "linear", 2, 50, 60), Layer("", "linear", 100, 5, 6)
    for layer, twins in (
        (low, {"MixGhostClip": "GhostClip", "BK-MixGhostClip": "BK", "BK-MixOpt": "BK"}),
        (high, {"BK-MixGhostClip": "improved FastGradClip", "BK-MixOpt": "improved Opacus"}),
    ):
        rows = {row["implementation"]: row for row in costs([layer], 3)}
        for hybrid, twin in twins.items():
            assert rows[hybrid]["time"] == rows[twin]["time"]
            assert rows[hybrid]["space"] == rows[twin]["space"]
    with pytest.raises(ValueError, match="without layers"):
        costs([], 1)


# The paper's numbers.


@pytest.fixture(scope="module")
def timm():
    return pytest.importorskip("timm")


def test_table_4_to_the_digit(timm):
    """Every cell of every stage, with two known slips, and every total."""
    for row in complexity_tables.complexity_bu_table4().rows:
        where = row["network"], row["stage"]
        if row["stage"] == "complete":
            assert (row["our 2T²"], row["our pd"], row["our mixed"]) == COMPLETE[row["network"]]
        elif row["stage"] != "total":
            assert (row["our 2T²"] == row["printed 2T²"]) == (where != ("resnet50", "conv5_x")), where
            assert (row["our pd"] == row["printed pd"]) == (where != ("resnet34", "conv4_x")), where
    for name in complexity_tables.NETWORKS:
        ghost, instantiation, mixed = complexity_tables.printed_totals(name)
        layers = views(complexity_tables._layers(name, image=224))[
            "without shortcut convolutions (as Table 4)"
        ]
        space = norm_space(layers)
        assert f"{space.ghost / 1e6:.0f}M" == ghost
        assert f"{space.instantiation / 1e6:.1f}M" == instantiation
        digits = len(mixed.partition(".")[2]) - 1
        assert f"{space.mixed / 1e6:.{digits}f}M" == mixed


def test_figure_7_and_section_3(timm):
    assert complexity_tables.depth_thresholds() == {
        ("resnet18", 224): 9, ("resnet18", 512): 13, ("vgg11", 224): 5, ("vit_base", 224): "none",
    }  # fmt: skip
    first = complexity_tables._layers("vgg11", image=224)[0]
    assert f"{first.ghost:.0e} {first.instantiation}" == "5e+09 1728"


def test_table_1_and_the_abstract(timm):
    sizes = {"roberta-large": {"tokens": 256}, "gpt2-large": {"tokens": 100}, "beit_large": {"image": 224}}
    found = {}
    for name, size in sizes.items():
        blocks = views(complexity_tables._layers(name, **size))["linear layers of the blocks (as Table 1)"]
        found[name] = f"{relative_speed(blocks):.3f}"
        assert f"{relative_speed(blocks):.2f}" == complexity_tables.printed_1(name)
    assert found == {"roberta-large": "0.889", "gpt2-large": "0.966", "beit_large": "0.921"}
    every = complexity_tables._layers("gpt2-large", tokens=100)
    rows = {row["implementation"]: row["time"] for row in costs(every, 1)}
    assert f"{rows['BK'] / rows['non-DP']:.2f} {rows['BK'] / rows['GhostClip']:.2f}" == "1.03 0.61"


# Shapes.


class Everything(nn.Module):
    """Weights used in every way: by modules, by functions, twice, tied, grouped, transposed, inside attention."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.twice = nn.Linear(8, 8)
        self.by_hand = nn.Linear(8, 8, bias=False)
        self.bare = nn.Parameter(torch.zeros(8, 6))
        self.never = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.grouped = nn.Conv1d(8, 4, 3, groups=2, stride=2)
        self.up = nn.ConvTranspose1d(4, 6, 2, stride=2)

    def forward(self, ids):
        x = self.twice(self.twice(self.embed(ids)))
        x = F.linear(x, self.by_hand.weight)
        x = self.attention(x, x, x)[0]
        y = self.up(self.grouped(x.transpose(1, 2)))
        return y.sum() + (x @ self.bare).sum() + F.linear(x, self.embed.weight).sum()


def test_every_use_of_a_weight_is_found():
    model = Everything()
    ids = torch.zeros(1, 9, dtype=torch.long)
    layers = layers_of(model, lambda: model(ids))
    assert [(x.name, x.kind, x.T, x.p, x.d, x.groups, x.tied) for x in layers] == [
        ("embed", "embedding", 9, 8, 20, 1, None),
        ("twice", "linear", 18, 8, 8, 1, None),
        ("by_hand", "linear", 9, 8, 8, 1, None),
        ("attention.in_proj_weight", "linear", 9, 24, 8, 1, None),
        ("attention.out_proj", "linear", 9, 8, 8, 1, None),
        ("grouped", "convolution", 4, 4, 12, 2, None),
        ("up", "convolution", 4, 4, 12, 1, None),
        ("bare", "linear", 9, 8 - 2, 8, 1, None),
        ("embed (as linear)", "linear", 9, 20, 8, 1, "embed"),
    ]
    weights = dict(model.named_parameters())
    for layer in layers:
        assert layer.sample is not None
        shape = layer.sample(2).instantiate().shape
        own = weights.get(f"{layer.name.removesuffix(' (as linear)')}.weight", weights.get(layer.name))
        assert own is not None
        assert shape[0] == 2
        assert shape[1:].numel() == own.numel() == layer.p * layer.d, layer.name
    total, covered, rest = coverage(model, layers)
    assert rest == ["never.weight"]
    assert covered == sum(p.numel() for n, p in weights.items() if p.dim() > 1) - 12
    assert total == sum(p.numel() for p in weights.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_cross_attention_has_two_lengths():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, memory = torch.zeros(1, 3, 8), torch.zeros(1, 5, 8)
    layers = layers_of(attention, lambda: attention(x, memory, memory))
    assert [(layer.T, layer.p, layer.d) for layer in layers] == [(3, 8, 8), (5, 16, 8), (3, 8, 8)]


def test_the_meta_device_changes_nothing():
    with torch.device("meta"):
        abstract = Everything()
    model = Everything()
    ids = torch.zeros(1, 9, dtype=torch.long)
    on_meta = layers_of(abstract, lambda: abstract(ids.to("meta")))
    assert on_meta == layers_of(model, lambda: model(ids))


def test_depth_threshold():
    ghost, instantiate = Layer("", "linear", 1, 9, 9), Layer("", "linear", 9, 1, 1)
    assert depth_threshold([]) == depth_threshold([ghost, ghost]) == 0
    assert depth_threshold([instantiate, ghost, instantiate, ghost]) == 3


# Names.


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-large", 774_030_080), ("FacebookAI/roberta-large", 355_361_794), ("bert_base", 109_483_778)],
)  # fmt: skip
def test_published_sizes(name, parameters):
    model = build(name).model
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.is_meta for p in model.parameters())


def test_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40)
    transformers.BertConfig(**sizes, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    network = build(str(tmp_path), tokens=600)
    layers = layers_of(network.model, network.run)
    assert layers[-1].tied == "bert.embeddings.word_embeddings"  # the masked language model's output
    assert {layer.T for layer in layers} == {600}
    assert "600 tokens are more than the 512" in network.notes[0]
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        build(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("gtp2", {}, "did you mean gpt2"),
        ("./nowhere", {}, "is no folder"),
        ("gpt2", {"image": 224}, "give tokens"),
        ("gpt2", {"tokens": 0}, "tokens=0"),
        ("a/b/c", {}, "no such folder"),
    ],
)
def test_bad_names_and_sizes(name, size, message):
    with pytest.raises(UserError, match=message) as caught:
        build(name, **size)
    assert "\n" not in str(caught.value)


def test_without_timm(monkeypatch):
    monkeypatch.setattr(architectures, "timm_names", list)
    with pytest.raises(UserError, match="pip install timm"):
        build("resnet18")


def test_images(timm):
    with pytest.raises(UserError, match="did you mean resnet18"):
        build("resnet81")
    with pytest.raises(UserError, match="give image"):
        build("resnet18", tokens=3)
    tiny = build("vgg11", image=8)
    with pytest.raises(UserError, match="does not run with image=8"):
        tiny.run()


def test_figure_6_of_bu_is_about_memory_as_far_as_arithmetic_goes(monkeypatch):
    """One image of VGG11 alone: 2T² of the first layer is 5e9 floats; the hybrid takes pd = 1.7e3 there."""
    said = complexity_tables.figure_6()
    assert said.said == "supports for a part of the claim, memory, by arithmetic at B = 32"
    assert said.ours == "vgg11: 79.04 and 1.05; beit_large: 1.06 and 1.06"
    # a network whose images are small takes ghost norms
    monkeypatch.setattr(
        complexity_tables, "_layers", lambda name, image: [Layer("one", "linear", 4, 64, 64)] * 2
    )
    assert complexity_tables.figure_6().word == "contradicts"


def test_the_memory_formula_of_monir_et_al_stands_beside_what_was_measured():
    def row(method, peak):
        return {
            "workload": "mlp",
            "method": method,
            "status": "ok",
            "trainable": 2**18,
            "batch_size": 4,
            "peak_mib": peak,
        }

    rows = [row("nonprivate", 10.0), row("auto/layer", 11.0), row("opacus:flat", 26.0)]
    others = [
        row("nonprivate", 10.0),
        {**row("opacus:flat", 0.0), "status": "out of memory"},
        row("auto/layer", 11.0),
    ]
    measured = [Measurement("one.json", {"rows": rows}), Measurement("two.json", {"rows": others})]
    (found,) = exact.memory_monir(measured).sections[1].rows
    # 1 MiB of weights: three gradients more than without privacy
    assert (found["L, MiB"], found["formula, MiB"], found["measured / formula"]) == ("1", "13", "2.00")
    assert found["measured / non-private"] == "1.10"
