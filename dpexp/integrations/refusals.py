"""Arguments of Hugging Face's Trainer that private training does not bear, each with the reason and the way out."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from dpexp.errors import UserError, did_you_mean
from dpexp.tasks.origins import rows_in_common
from dpexp.tasks.sources import MOST_SHARED
from dpexp.tasks.target_loss import IGNORED
from dpexp.training.own_loop.arguments import ELSEWHERE
from dpexp.training.own_loop.rows import contents

_WHOLE = (
    "under this Trainer every process holds the whole model on one device: start one for each GPU with torchrun, or shard the "
    "model and use dpexp.PrivacyEngine in a loop of your own"
)
_PACKED = (
    "one row would hold the texts of several people, and privacy protects a row: one text per row, padded"
)

_MEASURED = (
    "metrics are logged without noise, and decide which weights are kept, so their rows must be public. Give other rows, or "
    "leave eval_dataset out; predict(...) tells its metrics to nobody but you"
)

ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fp16": (bool, "its gradient scaler skips steps, which tells something without noise: use bf16=True"),
    # as accelerate launch gives it
    "mixed_precision": (
        lambda value: value not in ("no", "bf16"),
        "small gradients become 0 in it: use bf16",
    ),
    "fsdp": (bool, _WHOLE),
    "deepspeed": (bool, _WHOLE),
    "parallelism_config": (bool, _WHOLE),
    "n_gpu": (lambda count: count > 1, _WHOLE + " (one process alone: CUDA_VISIBLE_DEVICES=0)"),
    "torch_compile": (bool, "it has not been tried together with per-example clipping: leave it out"),
    "use_liger_kernel": (bool, "its fused loss gives one number for the whole batch: leave it out"),
    "neftune_noise_alpha": (
        bool,
        "its noise depends on the length to which the others pad a row: leave it out",
    ),
    "auto_find_batch_size": (
        bool,
        "give a per_device_train_batch_size that fits: too small a one costs time alone, it changes no result",
    ),
    "enable_jit_checkpoint": (
        bool,
        "it may write a step of the engine that the Trainer has not counted yet: save_steps, and "
        "train(resume_from_checkpoint=True) goes on after any kill",
    ),
    "accelerator_config": (
        lambda config: bool(getattr(config, "gradient_accumulation_kwargs", None)),
        "a logical batch is cut by per_device_train_batch_size and gradient_accumulation_steps of the arguments alone",
    ),
    "dataloader_num_workers": (
        bool,
        "rows are read in the training process, whose random numbers are secret and repeatable: set it to 0",
    ),
    "dataloader_drop_last": (bool, "Poisson samples have no last batch: leave it out"),
    "include_num_input_tokens_seen": (
        lambda value: value not in ("no", False),
        "the count follows from private samples: leave it out",
    ),
    "train_sampling_strategy": (
        lambda value: str(value) not in ("random", "group_by_length"),
        "each step sees a Poisson sample, as the guarantee needs it: leave it out, or take group_by_length to pad less",
    ),
    "packing": (bool, _PACKED),
    "padding_free": (bool, _PACKED),
    "loss_type": (lambda value: value != "nll", "only the plain likelihood (nll) is known by example"),
    "router_aux_loss_coef": (
        bool,
        "the balance of experts is that of a batch, and no row's loss: leave it out",
    ),
    "activation_offloading": (bool, "it has not been tried together with per-example clipping: leave it out"),
    "optim": (
        lambda value: any(word in str(value).lower() for word in ("layerwise", "lomo")),
        "it moves weights within the backward pass, before there is noise: take adamw_torch, sgd, adafactor, …",
    ),
}


OF_THE_TRAINER = {
    "model": "the Trainer's",
    "optimizer": "made by the Trainer, or given as optimizers=",
    "dataset": "train_dataset=",
    "folder": "output_dir of the arguments, with .privacy behind it",
    "physical_batch_size": "per_device_train_batch_size of the arguments",
    "batch_size": "per_device_train_batch_size times gradient_accumulation_steps of the arguments",
    "steps": "max_steps of the arguments",
    "epochs": "num_train_epochs of the arguments",
    "scheduler": "lr_scheduler_type of the arguments",
    "checkpoint_every": "save_steps of the arguments",
}
"""What `dpexp.PrivacyEngine` and its loop take, and the Trainer gives them -> where that comes from."""


def check_privacy(privacy: Any, parameters: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of the engine that stand in ``privacy``.

    Args:
        privacy: what the Trainer was given.
        parameters: names that `dpexp.PrivacyEngine` takes.

    Raises:
        UserError: it is no mapping, or holds a name that is unknown, or the Trainer's own.
    """
    if not isinstance(privacy, Mapping):
        raise UserError(
            f'privacy={privacy!r}: give a dictionary, such as privacy={{"epsilon": 8, "delta": 1e-5, "clip_norm": 0.1}}; the '
            "plain Trainer trains without"
        )
    known = [name for name in parameters if name not in OF_THE_TRAINER]
    for name in privacy:
        if name in OF_THE_TRAINER:
            raise UserError(f"privacy[{name!r}] is set elsewhere here: {OF_THE_TRAINER[name]}")
        if name in ELSEWHERE:
            raise UserError(f"privacy[{name!r}] is unknown: it is called {ELSEWHERE[name]} here")
        if name not in known:
            raise UserError(f"privacy[{name!r}] is unknown{did_you_mean(str(name), known)}")
    if (privacy.get("epsilon") is None) == (privacy.get("noise_multiplier") is None):
        raise UserError('give exactly one of privacy["epsilon"] and privacy["noise_multiplier"]')
    return dict(privacy)


def refuse_arguments(args: Any) -> None:
    """Raise `UserError` for the first argument that cannot be had with privacy."""
    for name, (unwanted, why) in ARGUMENTS.items():
        value = getattr(args, name, None)
        if value is not None and unwanted(value):
            raise UserError(f"{name}={value} does not go together with privacy: {why}")


REPLACED = {
    "training_step": "takes the private step: keep the call, and write per_example_losses(model, inputs) for a loss of your own",
    "get_train_dataloader": "counts the steps of an epoch; the rows of each are drawn by the engine: leave it out",
}
"""Methods of the private Trainer that a subclass may add to and not replace -> why."""


def refuse_overrides(trainer: Any, plain: type, private: type) -> None:
    """Refuse a private step that is replaced, a loss for whole batches, a stream, or a collate function that packs rows.

    Args:
        trainer: with its data.
        plain: Hugging Face's class.
        private: ours, which its class may be a subclass of.

    Raises:
        UserError: the first of them, with the way out.
    """
    for name, why in REPLACED.items():
        if not _ends_in(getattr(type(trainer), name), name, getattr(private, name)):
            raise UserError(
                f"{name} of {type(trainer).__name__} does not call super().{name}(...), which {why}"
            )
    own = [
        n
        for n in ("compute_loss", "_get_train_sampler")
        if getattr(type(trainer), n) is not getattr(plain, n)
    ]
    if own or trainer.compute_loss_func is not None:
        what = own[0] if own else "compute_loss_func"
        raise UserError(
            f"{what} is not called in private training: write per_example_losses(model, inputs), one loss per row, in a subclass"
        )
    if isinstance(trainer.train_dataset, Mapping):
        splits = ", ".join(map(str, trainer.train_dataset))
        raise UserError(f"train_dataset holds several data sets ({splits}): give one of them")
    if trainer.train_dataset is not None and not hasattr(trainer.train_dataset, "__len__"):
        raise UserError(
            f"train_dataset is a {type(trainer.train_dataset).__name__} without a length, and Poisson sampling needs examples by "
            "number: load it without streaming=True"
        )
    packed = "seq_lengths" in getattr(trainer.train_dataset, "column_names", ())
    if packed or "Flattening" in type(trainer.data_collator).__name__:
        raise UserError(f"the rows are packed: {_PACKED}")
    refuse_private_rows(trainer.train_dataset, trainer.eval_dataset)
    if trainer.train_dataset is not None and trainer.expected_batch > trainer.num_units():
        raise UserError(
            f"a batch of {trainer.expected_batch} (per_device_train_batch_size · gradient_accumulation_steps · processes) "
            f"is more than the {trainer.num_units()} rows (or users) of train_dataset: make it smaller"
        )


def refuse_private_rows(private: Any, measured: Any) -> None:
    """Refuse rows of the training data to measure on, as far as the two data sets tell where their rows come from.

    Args:
        private: the training data; None: there is none.
        measured: a data set, or several by name; a name alone, or None, is nothing to look at.

    Raises:
        UserError: they have rows in common.
    """
    for part in _parts(measured):
        sized = all(hasattr(rows, "__len__") and not isinstance(rows, str) for rows in (private, part))
        if sized and (_same(private, part) or rows_in_common(private, part)):
            what = "is train_dataset" if _same(private, part) else "holds rows of train_dataset"
            raise UserError(f"eval_dataset {what}: {_MEASURED}")


def copies_measured(private: Any, measured: Any) -> str | None:
    """Say that most rows to measure on are equal to training rows: where a `datasets.Dataset` was mapped, it does not tell that.

    Args:
        private, measured: see `refuse_private_rows`.
    """
    known: set[int] = set()
    for part in _parts(measured):
        names, theirs = (sorted(getattr(rows, "column_names", None) or ()) for rows in (private, part))
        if not names or names != theirs or not hasattr(part, "__len__"):
            continue
        known = known or set(map(hash, contents(private.select_columns(names))))
        if sum(hash(row) in known for row in contents(part.select_columns(names))) > MOST_SHARED * len(part):
            return f"most rows of eval_dataset are equal to rows of train_dataset. Where they are the same ones: {_MEASURED}"
    return None


def _parts(measured: Any) -> Iterable[Any]:
    """The data sets to measure on: one, or several by name."""
    return measured.values() if isinstance(measured, Mapping) else [measured]


def balance_left_out(model: Any) -> str | None:
    """Say that a part of Hugging Face's own loss is left out, where a mixture of experts asks for their balance."""
    text = model.config.get_text_config() if hasattr(model, "config") else None
    coefficient = getattr(text, "router_aux_loss_coef", None)
    if not (coefficient and getattr(text, "output_router_logits", False)):
        return None
    return (
        f"router_aux_loss_coef={coefficient} of the model's configuration is left out of the losses: the balance of experts is "
        "that of a batch, and no row's loss"
    )


def outside(model: Any, batch: Any) -> str | None:
    """Say in one sentence which number of a collated batch the model has no place for.

    Asked only where a step has failed: to look at every batch would make a GPU wait, whose own word comes late and names nothing.

    Args:
        model: one of Hugging Face's, PEFT's too.
        batch: as it was collated, before it went to the device.

    Returns:
        The sentence; None where every number has a place, or that cannot be told.
    """
    try:
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        classes = model.config.num_labels if head is None else len(head.weight)
        tokens, longest = len(table.weight), getattr(model.config, "max_position_embeddings", math.inf)
    except (AttributeError, NotImplementedError):
        return None
    ways = {
        "labels": (classes, "number the classes from 0, and make the model with num_labels="),
        "input_ids": (
            tokens,
            "use the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer))",
        ),
    }
    for name, (places, way) in ways.items():
        numbers = batch.get(name)
        if not isinstance(numbers, Tensor) or numbers.is_floating_point():
            continue
        wrong = numbers[(numbers < 0) | (numbers >= places)]
        wrong = wrong[wrong != IGNORED] if name == "labels" else wrong
        if len(wrong):
            return f"{name} of the training data hold {int(wrong[0])}, and the model knows 0 to {places - 1}: {way}"
        if name == "input_ids" and numbers.shape[-1] > longest:
            return f"a row has {numbers.shape[-1]} tokens, and the model has places for {longest}: truncate the rows"
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two data sets are one, or were made in one way."""
    made = getattr(one, "_fingerprint", None)
    return one is other or (made is not None and made == getattr(other, "_fingerprint", None))


def _ends_in(method: Any, name: str, ours: Any) -> bool:
    """Whether a method is ours, or calls it: then the name stands in its code, or in that of what it decorates."""
    while method is not None:
        code = getattr(method, "__code__", None)
        if method is ours or code is None or name in code.co_names:
            return True
        method = getattr(method, "__wrapped__", None)
    return False
