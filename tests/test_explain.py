"""The command that explains the layerwise decision."""

import json
import sys

import pytest
from torch import nn

from dpexp.config.usage import conf_dir
from dpexp.errors import UserError
from dpexp.explain import ExplainArguments, as_text, explain, main, short


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def command(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["explain", *arguments])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code
        assert list(tmp_path.iterdir()) == []  # no folder, no log
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return command


def test_a_network_of_timm_as_json(run):
    pytest.importorskip("timm")
    status, out, err = run("model=resnet18", "format=json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["input"] == {"image": 224}
    first, *_, last = result["layers"]
    assert (first["T"], first["p"], first["d"], first["choice"]) == (12544, 64, 147, "instantiate")
    assert (last["T"], last["p"], last["d"], last["choice"]) == (1, 1000, 512, "ghost")
    complete, printed = result["totals"].values()
    assert complete["norm_space"] == {"ghost": 399934572, "instantiation": 11678912, "mixed": 1045260}
    assert printed["norm_space"] == {"ghost": 398623626, "instantiation": 11506880, "mixed": 999498}
    assert printed["last_instantiated"] == 9
    assert "BatchNorm2d" in result["notes"][0]


def test_leaving_out_shortcuts_is_the_papers_count(run):
    pytest.importorskip("timm")
    status, out, _ = run("model=resnet18", "image=512", "leave_out='*downsample*'")
    assert status == 0
    assert "the last layer that instantiates: 13" in out
    assert "shortcut" not in out


def test_a_preset_of_the_training_command(run):
    """model=… means the same network as for training, with its own settings."""
    status, out, _ = run("model=bert_tiny", "tokens=32", "model.config.num_hidden_layers=1")
    assert status == 0
    assert "bert.encoder.layer.0.intermediate.dense" in out
    assert "layer.1." not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "not given: model"),
        (["model=hf"], "not given: model.id"),
        (["model=gtp2"], "did you mean gpt2"),
        (["model=gpt2", "formt=json"], "did you mean format"),
        (["model=gpt2", "batch=0"], "batch=0"),
        (["model=gpt2", "choice=rul"], "did you mean rule"),
        (["model=gpt2", "device=nowhere"], "device=nowhere"),
        (["model=gpt2", "device=meta", "choice=measured"], "device=meta computes nothing"),
        (["model=causal_lm"], "not given: model.id"),
        (["model=custom"], "not given: model.factory"),
        (["model=custom", "model.factory=a:b"], "give image=… or tokens=…"),
        (["model=minilm", "model.trainable=head"], "model.trainable=head does nothing here"),
        (["model=minilm", "model.pooling=mean"], "model.pooling=mean does nothing here"),
        (["model=gpt2", "model.retrain=true"], "model.retrain=true does nothing here"),
        (["model=gpt2", "model.untied=true"], "model.untied=true does nothing here"),
        (["model=vit_large", "model.dropout=0.3"], "model.dropout=0.3 does nothing here"),
    ],
)
def test_bad_input_is_one_line(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml")))
def test_every_choice_of_a_model_is_explained_or_says_what_it_needs(run, name):
    if name in ("vgg11", "vit_base", "vit_large", "beit_large") or name.startswith("resnet"):
        pytest.importorskip("timm")
    needs = {
        **dict.fromkeys(("custom", "hf", "causal_lm"), "not given"),
        "mpnet": "get_mpnet",
        # whose sizes only the hub knows
        **dict.fromkeys(("gpt", "dialogpt_medium"), "could not be loaded"),
    }
    status, out, err = run(f"model={name}")
    if status:
        assert needs[name] in err
    else:
        assert "parameters" in out


def tiny(num_labels, image_shape, width=4):
    """A network of one's own."""
    return nn.Sequential(
        nn.Conv2d(image_shape[0], width, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_labels),
    )


def test_a_network_of_ones_own_is_explained(run):
    factory = f"model.factory={__name__}:tiny"
    status, out, err = run("model=custom", factory, "model.config.width=6", "image=8", "format=json")
    assert (status, err) == (0, "")
    first, last = json.loads(out)["layers"]
    assert (first["kind"], first["T"], first["p"], last["d"]) == ("convolution", 36, 6, 6)


def test_a_random_network_has_the_words_of_its_tokenizer(run):
    _, out, _ = run("model=gpt2_tiny", "tokens=8", "format=json")
    (head,) = [layer for layer in json.loads(out)["layers"] if layer["name"] == "lm_head"]
    assert head["p"] < 10000


def test_text_holds_every_layer_and_implementation():
    result = explain(ExplainArguments(network="minilm", tokens=16))
    text = as_text(result)
    assert len(result["layers"]) == 3 + 6 * 6 + 2
    for layer in result["layers"]:
        assert layer["name"] in text
    for name in ("Opacus", "FastGradClip", "GhostClip", "MixGhostClip", "BK-MixOpt", "TF-Privacy"):
        assert name in text
    assert "linear layers of the blocks (as Table 1): 36" in text


def test_measured_choices_are_the_engines_methods():
    small = ExplainArguments(network="minilm", tokens=4, choice="measured", leave_out="*layer*|*word*")
    result = explain(small)
    assert {layer["kind"] for layer in result["layers"]} == {"embedding", "linear"}
    for layer in result["layers"]:
        methods = {"embedding": {"ghost", "segments"}, "linear": {"ghost", "instantiate", "loop"}}
        assert layer["measured"] in methods[layer["kind"]]
    assert "measured" in as_text(result)


def test_nothing_left():
    with pytest.raises(UserError, match="no layer is left"):
        explain(ExplainArguments(network="minilm", tokens=4, leave_out="*"))
    with pytest.raises(UserError, match="fits no layer"):
        explain(ExplainArguments(network="minilm", tokens=4, leave_out="conv*"))


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (2, "2"),
        (9408, "9408"),
        (36864, "36.86k"),
        (999498, "1.00M"),
        (1045260, "1.05M"),
        (399934572, "399.9M"),
        (5.03e9, "5.03G"),
    ],
)
def test_short(number, shown):
    assert short(number) == shown
