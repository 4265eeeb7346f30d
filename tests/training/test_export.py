"""The exported model and its privacy card."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from dpexp import provenance, statement
from dpexp.models.pooling import PooledClassifier, load_pooled
from dpexp.schemas import RunConfig
from dpexp.tasks.tokens import tokenize
from dpexp.training.export import export, privacy_card
from dpexp.training.progress import summary_table
from tests.test_record import block, plan, summary


def test_the_card_states_the_guarantee_and_its_conditions():
    card = privacy_card(summary(block()))
    for words in (
        "(2.0000, 0.001)-differential privacy",
        "RDP accountant",
        "add or remove one example",
        "poisson, rate 0.1",
    ):
        assert words in card
    for note in block()["notes"]:
        assert note in card
    assert f"`{provenance.command_line()}`" in card


def test_the_card_says_in_words_what_the_two_numbers_allow():
    assert "If one example is left out of the training data" in (card := privacy_card(summary(block())))
    assert "by a factor of e^ε = 7.39, and by δ" in card  # ε = 2
    replaced = block(made=plan(sampling="fixed", expected_batch_size=100))
    assert "If one example is replaced by another" in privacy_card(summary(replaced))
    for spent in (25.0, float("inf")):  # no words make these a protection
        nothing = dict.fromkeys(("rdp", "gdp", "prv", "pld"), spent)
        assert "Smaller is safer" not in privacy_card(summary(block(spent=nothing)))


def test_the_card_goes_with_the_model_and_has_no_hash_of_private_data():
    written = summary(block())
    written["data"] |= {"sha256": {"train": "c0ffee"}}
    assert "SHA-256: train c0ffee\n" in privacy_card(written)
    written["data"] |= {"source": "own files"}
    assert "c0ffee" not in privacy_card(written)


def test_the_card_of_an_unprivate_model_promises_nothing():
    run = RunConfig()
    card = privacy_card(summary(statement.privacy_block(run, None, {}, 0, 0)))
    assert "without differential privacy" in card
    assert "ε by" not in card


def test_an_epsilon_without_bound_is_not_printed_as_a_number():
    card = privacy_card(summary(block(spent={"rdp": float("inf"), "gdp": None, "prv": None, "pld": None})))
    assert "no guarantee" in card
    assert "-differential privacy, by" not in card


@pytest.mark.parametrize("settings", [{"sampling": "shuffle"}, {"accountant": "gdp", "allow_clt": True}])
def test_what_is_no_guarantee_is_not_called_one_at_the_top(settings):
    card = privacy_card(summary(block(made=plan(**settings))))
    assert "No guarantee: the ε of" in card
    assert "-differential privacy, by" not in card


def test_by_shuffled_batches_neither_a_choice_nor_an_attack_is_bounded():
    """The epsilon of the choice, and the best attack, are those of Poisson batches too."""
    made = plan(sampling="shuffle")
    released = [made.event()]
    chosen = statement.privacy_block(RunConfig(trials=3), made, made.epsilons(), 3, 5, events=released)
    card = privacy_card(summary(chosen))
    assert "the guarantee has" not in card
    assert "membership test" not in card
    assert chosen["tpr_at_fpr_0.001"] is None
    table = summary_table(summary(chosen, device="cpu"))
    assert sum("no guarantee" in cell for cell in table.columns[1].cells) == len(chosen["epsilon"])


def test_an_approximation_is_not_listed_among_the_bounds():
    card = privacy_card(summary(block()))
    assert "| ε by PLD |" in card
    assert "| ε by GDP (an approximation that may under-estimate, no bound) |" in card
    chosen = block(made=plan(accountant="gdp", allow_clt=True)) | {
        "trials": 3,
        "epsilon_with_tuning": {"gdp": 4.0},
    }
    assert "among 3 trials, by GDP (an approximation that may" in (card := privacy_card(summary(chosen)))
    assert "Chosen among" not in card


def test_no_delta_is_shown_smaller_than_it_is():
    table = summary_table(summary(block(made=plan(delta="1.2341e-5")), device="cpu"))
    cells = dict(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert cells["δ"] == "1.24e-05"


def test_the_card_says_how_to_load_what_the_library_would_load_wrongly(tmp_path):
    small = dict(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    pooled = PooledClassifier(transformers.BertModel(transformers.BertConfig(**small)), "mean")
    plain = transformers.BertForSequenceClassification(transformers.BertConfig(**small))
    for model, name in ((pooled, "pooled"), (plain, "plain")):
        bundle = SimpleNamespace(model=model, tokenizer=None)
        export(bundle, summary(block()), tmp_path / name, ["bad", "good"])
        found = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert found.id2label == {0: "bad", 1: "good"}
        assert found.label2id == {"bad": 0, "good": 1}
    assert "load_pooled(folder)` reads this model" in (tmp_path / "pooled" / "PRIVACY.md").read_text()
    assert "Loading" not in (tmp_path / "plain" / "PRIVACY.md").read_text()
    assert load_pooled(tmp_path / "pooled").pooling == "mean"


@pytest.mark.parametrize(
    ("pooling", "head"), [("mean", "linear"), ("layers", "unbiased"), ("cls", "dense"), ("mean", "dense")]
)
def test_what_the_card_says_reads_a_pooled_model_without_us(tmp_path, pooling, head):
    from dpexp.models import pooling as pooled

    torch.manual_seed(0)
    small = dict(
        vocab_size=1000, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    encoder = transformers.BertModel(transformers.BertConfig(**small), add_pooling_layer=False)
    model = PooledClassifier(encoder, pooling, head).eval()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    tokenizer = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    export(SimpleNamespace(model=model, tokenizer=tokenizer), summary(block()), tmp_path / "model", [])
    card = (tmp_path / "model" / "PRIVACY.md").read_text()
    given = {"folder": str(tmp_path / "model"), "texts": ["a b c b", "c"]}
    exec(card.split("```python\n")[1].split("```")[0], given)
    inputs = tokenizer(given["texts"], padding=True, return_tensors="pt")
    torch.testing.assert_close(given["logits"], model(**inputs).logits)
    assert "dpexp" not in pooled.loading_code(model.config.to_dict())


def test_a_plain_module_is_saved_as_its_state_and_the_card_says_how_to_load_it(tmp_path, monkeypatch):
    model, network = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    export(SimpleNamespace(model=model, tokenizer=None), summary(block()), tmp_path / "model")
    card = (tmp_path / "model" / "PRIVACY.md").read_text()
    assert card.startswith("# Privacy of this model")
    monkeypatch.chdir(tmp_path / "model")
    exec(card.partition("```python\n")[2].partition("```")[0], {"network": network})
    assert torch.equal(network.weight, model.weight)


def test_a_pretrained_model_and_its_tokenizer_save_themselves(tmp_path):
    saved = []
    part = SimpleNamespace(save_pretrained=saved.append)
    export(SimpleNamespace(model=part, tokenizer=part), summary(block()), tmp_path)
    assert saved == [str(tmp_path)] * 2


def test_the_exported_tokenizer_does_not_tell_whether_a_private_text_was_cut(tmp_path):
    characters = Tokenizer(BPE({"a": 0, "[PAD]": 1}, []))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="[PAD]")
    told = []
    for text in ("a", "aaaaaaaa"):
        assert tokenize(fast, [text], None, 4).truncated == (len(text) > 4)
        export(SimpleNamespace(model=torch.nn.Linear(1, 1), tokenizer=fast), summary(block()), tmp_path)
        told.append((tmp_path / "tokenizer.json").read_text())
    assert told[0] == told[1]
