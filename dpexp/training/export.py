"""The trained model, ready for `from_pretrained`, with a card that says what is guaranteed about its training data."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpexp import provenance, statement
from dpexp.durable import read_json, write_atomic
from dpexp.models import adapters, rgp
from dpexp.privacy.caveats import MEANINGLESS
from dpexp.privacy.plan_checks import UNITS
from dpexp.privacy.shown import upwards
from dpexp.privacy.tradeoff import FPR, TPR
from dpexp.training.earlier import CARD

if TYPE_CHECKING:
    from dpexp.clipping import Clipper
    from dpexp.models import ModelBundle
    from dpexp.privacy.ledger import Ledger
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import RunConfig

WEIGHTS = "model.pt"
OF_WEIGHTS = f"""\
`{WEIGHTS}` holds the weights alone. Build the network as the training did (see the command above), and fill it with them:

```python
import torch
network.load_state_dict(torch.load("{WEIGHTS}", map_location="cpu", weights_only=True))
```"""


def export(bundle: "ModelBundle", summary: dict[str, Any], folder: Path, labels: Sequence[str] = ()) -> Path:
    """Write the model, its tokenizer and PRIVACY.md to `folder`.

    Under peft=lora, prefix, prompt and p_tuning it is what `peft.PeftModel.from_pretrained(network, folder)` puts back onto the
    network, under peft=adapters what `dpexp.models.adapters.load_adapters(network, folder)` does; else the whole network.

    Args:
        bundle: the model, with its clipper detached.
        summary: of the run.
        folder: made where it doesn't exist.
        labels: names of the classes.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = bundle.model
    if isinstance(model, nn.Module):
        rgp.restore_layers(model)
    if hasattr(model, "save_pretrained"):
        # it is loaded then; for any other model it would be for nothing
        from transformers.utils import logging

        logging.disable_progress_bar()
        name_classes(getattr(model, "config", None), labels)
    if isinstance(model, nn.Module) and adapters.has_adapters(model):
        adapters.save_adapters(model, folder, bundle.source)
    elif callable(save := getattr(model, "save_pretrained", None)):
        save(str(folder))
    else:
        torch.save(model.state_dict(), folder / WEIGHTS)
    if callable(save := getattr(bundle.tokenizer, "save_pretrained", None)):
        if (fast := getattr(bundle.tokenizer, "backend_tokenizer", None)) is not None:
            # it keeps the settings of its last call, which cut where a private text was too long and nowhere else
            fast.no_truncation()
            fast.no_padding()
        save(str(folder))
    write_card(summary, folder)
    return folder


def write_card(summary: dict[str, Any], folder: Path) -> None:
    """PRIVACY.md of an exported model; nothing where there is no such folder."""
    if folder.is_dir():
        loading = how_to_load(folder)
        write_atomic(
            folder / CARD, privacy_card(summary) + (f"\n## Loading\n\n{loading}\n" if loading else "")
        )


def how_to_load(folder: Path) -> str:
    """Say it to whoever is given a model that `from_pretrained` does not read as it was trained; else ""."""
    if (folder / WEIGHTS).exists():
        return OF_WEIGHTS
    if (folder / adapters.DESCRIPTION).exists():
        return (
            "`dpexp.models.adapters.load_adapters(network, folder)` puts these adapters onto their network."
        )
    if (folder / "config.json").exists():
        # whoever wrote this file has loaded transformers
        from dpexp.models.pooling import SETTING, loading_code

        config = read_json(folder / "config.json")
        if SETTING not in config:
            return ""
        return (
            "`dpexp.models.pooling.load_pooled(folder)` reads this model. `AutoModelForSequenceClassification` puts a random "
            "layer in front of its head, says no more than a warning, and is wrong. Without dpexp (transformers may report a "
            "pooler that is missing and a classifier that it does not know: neither is used):\n\n"
            f"```python\n{loading_code(config)}```"
        )
    return ""


def name_classes(config: Any, labels: Sequence[str]) -> None:
    """Write the names of the classes to a Hugging Face configuration, for whoever loads the model without dpexp."""
    if labels and getattr(config, "num_labels", None) == len(labels):
        config.id2label = {number: str(label) for number, label in enumerate(labels)}
        config.label2id = {str(label): number for number, label in enumerate(labels)}


def summary_of(
    run: "RunConfig",
    plan: "Plan",
    ledger: "Ledger",
    clipper: "Clipper",
    model: nn.Module,
    dataset: Any,
    *,
    copied: bool,
    unproven: Sequence[str] = (),
) -> dict[str, Any]:
    """Say of a run in a loop of one's own what `privacy_card` asks for.

    Args:
        run, plan, ledger, clipper: of the run.
        model, dataset: of which the types are named, and N.
        copied: the run's folder was found to be a copy (`dpexp.privacy.keys`).
        unproven: what of the model and the loop could not be proven, in words.
    """
    groups = len(clipper.groups)
    privacy = statement.privacy_block(
        run, plan, ledger.epsilons(plan.delta), groups, ledger.steps_charged,
        copied=copied, events=ledger.events(), unproven=unproven, again=ledger.charged_again,
    )  # fmt: skip
    return {
        "task": type(model).__name__,
        "clip": f"{clipper.rule} clipping, {groups} group{'s' * (groups > 1)}",
        "privacy": privacy,
        "data": {
            "name": type(dataset).__name__, "source": "own files", "sha256": None,
            "rows": {"train" if plan.unit == "example" else "users": plan.num_examples},
        },
        "command": provenance.command_line(),
        "git": provenance.git_state(),
    }  # fmt: skip


def privacy_card(summary: dict[str, Any]) -> str:
    """Markdown: ε, δ, accountant, sampling, neighbouring relation, what is public, and the command."""
    privacy, data = summary["privacy"], summary["data"]
    lines = [f"# Privacy of this model: {summary['task']}, {summary['clip']}", ""]
    if privacy["delta"] is None:
        lines += [
            "**Trained without differential privacy.** It may reveal anything about its training data.",
            "",
        ]
    else:
        spent, accountant = privacy["epsilon"][privacy["accountant"]], privacy["accountant"].upper()
        guarantee = (
            f"The {accountant} accountant gives no finite ε: there is no guarantee."
            if spent is None
            else f"No guarantee: the ε of {upwards(spent)} by the {accountant} accountant rests on what did not hold: see "
            "Conditions."
            if privacy["sampling"] == "shuffle" or privacy["accountant"] == "gdp"
            else f"Trained with ({upwards(spent)}, {upwards(privacy['delta'], '.6g')})-differential privacy, by the {accountant} "
            "accountant, if what is listed under Conditions holds."
        )
        lines += [
            guarantee,
            *_in_words(privacy, spent if guarantee.startswith("Trained") else None),
            *_cut_short(privacy),
            *_chosen(privacy),
            "",
            "| | |",
            "|---|---|",
            *(f"| ε by {_called(name)} | {upwards(value)} |" for name, value in privacy["epsilon"].items()),
            *_currency(privacy),
            f"| δ | {upwards(privacy['delta'], '.6g')} |",
            f"| neighbouring data sets | {privacy['neighbouring']} |",
            f"| sampling | {privacy['sampling']}, rate {privacy['sample_rate']:.6g}, {privacy['steps']} steps |",
            f"| noise multiplier | {_number(privacy['noise_multiplier'])} |",
            f"| released at every step | {', '.join(privacy['released'])}, with noise |",
            "",
        ]
    rows = ", ".join(f"{split} {count}" for split, count in data["rows"].items())
    lines += ["## Conditions", "", *(f"- {note}" for note in privacy["notes"]), ""]
    lines += [
        "## Public",
        "",
        "- the number of training examples, the configuration, public seeds, the dev set and all results on it",
        "- the pretrained weights, where there were any, with all that they know",
        "",
        "## Origin",
        "",
        f"- data: {data['name']} ({data['source']}), rows: {rows}{_hashes(data)}",
        f"- command: `{summary['command']}`",
        f"- commit of dpexp: {summary['git']['commit'] or 'unknown'}"
        + (" with local changes" if summary["git"]["dirty"] else ""),
        "",
    ]
    return "\n".join(lines)


def _in_words(privacy: dict[str, Any], spent: float | None) -> list[str]:
    """What the guarantee allows, for a reader who is given the model and knows no formula; nothing where it allows nearly all."""
    if spent is None or spent > MEANINGLESS:
        return []
    replaced = privacy["neighbouring"].startswith("replace")
    change = "replaced by another" if replaced else "left out of the training data"
    factor = float(upwards(math.exp(spent), ".3g"))
    return [
        "",
        f"If one {UNITS[privacy.get('unit', 'example')]} is {change}, the probability of anything that somebody could conclude "
        f"from this model changes at most by a factor of e^ε = {factor:,.10g}, and by δ. Smaller is safer.",
    ]


def _cut_short(privacy: dict[str, Any]) -> list[str]:
    """What holds where training ended before its plan: a composition of random length has no ε of the steps that were taken."""
    if (planned := privacy.get("planned")) is None:
        return []
    return [
        "",
        f"**Training ended after {planned['taken']} of {planned['steps']} planned steps.** The ε above is right where that had "
        "nothing to do with the weights. Where it was decided by how good the model was, on public data too, the guarantee is "
        f"that of the whole plan: ε = {upwards(planned['epsilon'])}.",
    ]


def _chosen(privacy: dict[str, Any]) -> list[str]:
    """What holds where the model was chosen among trials, in front of the table: the first ε is the one that is quoted."""
    name, spent = statement.with_choice(privacy) or ("gdp", 0.0)
    if name == "gdp" or privacy["sampling"] == "shuffle":
        return []
    return [
        "",
        f"**Chosen among {privacy['trials']} trials.** The ε above is that of this training alone. With the choice, by what the "
        f"trials gave, the guarantee has ε = {upwards(spent)}, by the {name.upper()} accountant.",
    ]


def _called(accountant: str) -> str:
    return (
        "GDP (an approximation that may under-estimate, no bound)"
        if accountant == "gdp"
        else accountant.upper()
    )


def _currency(privacy: dict[str, Any]) -> list[str]:
    """What an attacker can do at most, and what the choice among trials adds; as far as the record knows."""
    rows = []
    if (mu := privacy.get("mu")) is not None:
        rows.append(f"| μ of Gaussian DP, with its regret Δ | {upwards(mu)}, {privacy['mu_regret']:.4f} |")
    if (tpr := privacy.get(TPR)) is not None:
        rows.append(
            f"| true positives of any membership test, at {FPR:g} false positives | at most {upwards(tpr)} |"
        )
    if (tuned := statement.with_choice(privacy)) is not None:
        name, value = tuned
        rows.append(
            f"| ε with the choice among {privacy['trials']} trials, by {_called(name)} | {upwards(value)} |"
        )
    return rows


def _hashes(data: dict[str, Any]) -> str:
    """Of published data alone: a card goes with the model, and the hash of private data tells whether a guess at it is right."""
    if data["source"] == "own files" or not data["sha256"]:
        return ""
    return f", SHA-256: {', '.join(f'{split} {digest}' for split, digest in data['sha256'].items())}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
