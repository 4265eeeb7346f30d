"""Hugging Face's `Trainer`, private: another import and one more argument.

    from dpexp.integrations.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=data, privacy={"epsilon": 8, "delta": 1e-5, "clip_norm": 0.1})
    trainer.train()
    trainer.save_model("my-model")  # with PRIVACY.md beside the weights
    print(trainer.engine.epsilon())

One step of the Trainer is one step of `dpexp.PrivacyEngine`: a Poisson sample whose expected size is
`per_device_train_batch_size * gradient_accumulation_steps` times the number of processes, in pieces of at most
`per_device_train_batch_size`. Schedulers, evaluation, callbacks, saving and `resume_from_checkpoint` are Hugging Face's own. The
ledger and the secret key lie beside the output folder, in `<output_dir>.privacy`, so that an upload of the model does not take
the key along.

Under torchrun all processes train together, each on its share of every sample (docs/many_processes.md). Another number of
processes goes on with a run whose accumulation makes the expected size the same.

An example is one row of `train_dataset`. Where the texts of several people are packed into one row, the row is protected, and
nobody in it.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dpexp.durable import kept_beside, read_json
from dpexp.errors import UserError
from dpexp.integrations.refusals import (
    balance_left_out,
    check_privacy,
    copies_measured,
    outside,
    refuse_arguments,
    refuse_overrides,
    refuse_private_rows,
)
from dpexp.integrations.row_losses import losses_of_rows
from dpexp.privacy.shown import upwards
from dpexp.training.own_loop.engine import PrivacyEngine
from dpexp.training.own_loop.units import units_of

# computed from private rows without noise, or measured of steps that take as long as they have rows
NOT_PRIVATE = (
    "loss", "train_loss", "total_flos", "train_runtime", "train_samples_per_second", "train_steps_per_second",
    *(f"train_mem_{kind}_{what}_delta" for kind in ("cpu", "gpu") for what in ("alloc", "peaked")),
)  # fmt: skip


UNREAD = (
    "a batch has labels and nothing that the model reads: cut the texts into tokens before training, as "
    "train_dataset.map(lambda rows: tokenizer(rows['text'], truncation=True), batched=True) does"
)


class Trainer(transformers.Trainer):
    """`transformers.Trainer` with differential privacy.

    Args:
        model, args and all others: as for `transformers.Trainer`. `max_grad_norm` is set to 0: the gradient of each example is
            clipped, and the noisy sum is not clipped again.
        privacy: required; what `dpexp.PrivacyEngine` takes besides model, optimizer, data, folder and sizes: ``epsilon`` or
            ``noise_multiplier``, ``delta``, ``clip_norm``, ``groups``, ``target_quantile``, ``data_name``, …
        show_losses: log the training loss, as ``not_private/loss``: it is computed without noise, and lands in
            `trainer_state.json` and wherever `report_to` sends it. So does what training took, in time and memory.

    Raises:
        UserError: an argument whose effect would not be private, or not exact, with the way out.
    """

    plain: type = transformers.Trainer
    """What is made private."""
    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        privacy: Mapping[str, Any] | None = None,
        show_losses: bool = False,
        **named: Any,
    ):
        args = copy.copy(args or transformers.TrainingArguments("trainer_output"))
        refuse_arguments(args)
        self.expected_batch = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        self.show_losses = show_losses
        self.privacy = check_privacy(privacy, inspect.signature(PrivacyEngine).parameters)
        self.engine: PrivacyEngine | None = None
        # whether the losses are another's than ours, and have not been looked at yet
        self._unknown_losses = type(self).per_example_losses is not Trainer.per_example_losses
        if self._unknown_losses and args.label_smoothing_factor:
            raise UserError(
                f"label_smoothing_factor={args.label_smoothing_factor} would change nothing: {type(self).__name__} has "
                "per_example_losses of its own. Smooth there (label_smoothing= of cross_entropy), and leave the argument out"
            )
        if args.max_grad_norm and args.max_grad_norm != transformers.TrainingArguments.max_grad_norm:
            transformers.utils.logging.get_logger(__name__).warning(
                f"max_grad_norm={args.max_grad_norm} is set to 0: every example's gradient is clipped to clip_norm instead"
            )
        # One step of the Trainer is a whole logical batch; the engine cuts it.
        args.gradient_accumulation_steps, args.max_grad_norm = 1, 0.0
        # The losses of an evaluation would be multiplied by the number of processes, also where a head takes its own mean.
        args.average_tokens_across_devices = False
        # as they were given: another Trainer may make new rows of them
        names = [name for name in inspect.signature(self.plain.__init__).parameters if name != "self"][2:]  # type: ignore[misc]
        given = dict(zip(names, others, strict=False)) | named
        self._private_rows = given.get("train_dataset")
        refuse_private_rows(self._private_rows, given.get("eval_dataset"))
        super().__init__(model, args, *others, **named)
        refuse_overrides(self, self.plain, Trainer)
        for sentence in (
            balance_left_out(self.model),
            copies_measured(self.train_dataset, self.eval_dataset),
        ):
            if sentence is not None:
                transformers.utils.logging.get_logger(__name__).warning(sentence)

    def per_example_losses(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute `[b]` losses, one for each row of a collated batch and of that row alone: see `losses_of_rows`. Override it for
        another head.

        Raises:
            UserError: the head is another one, or none whose labels can be smoothed, or the batch has no labels.
        """
        return losses_of_rows(model, inputs, self.args.label_smoothing_factor)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take one private step: all pieces of a Poisson sample."""
        assert self.engine is not None
        if self.engine.steps_taken != self.state.global_step:
            raise UserError(
                f"the Trainer is at step {self.state.global_step} and the privacy engine at {self.engine.steps_taken}: leave "
                "the counting of steps to train()"
            )
        if self.engine.finished:
            # resumed behind the last step: the loop counts another one, which is not taken
            self.state.global_step -= 1
            return torch.zeros((), device=self.args.device)
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            # of a schedule-free one, which keeps two points
            train()
        size = self.args.per_device_train_batch_size
        for batch in self.engine.batches(self._collate, size, length=self._length, steps=1):
            try:
                inputs = self._prepare_inputs(batch)
                if set(inputs) == {"labels"}:
                    raise UserError(UNREAD)
                if self._unknown_losses:
                    self._look_at_losses(inputs)
                with self.compute_loss_context_manager():
                    # not DistributedDataParallel around it: the engine adds up over processes, once for each sample
                    losses = self.per_example_losses(self.model, inputs)
                self.engine.step(losses)
            except (IndexError, RuntimeError) as error:
                if (sentence := outside(self.model, batch)) is None:
                    raise
                raise UserError(sentence) from error
        mean = self.engine.private_loss / self.expected_batch if self.show_losses else 0.0
        return torch.as_tensor(mean, device=self.args.device, dtype=torch.float32)

    def _look_at_losses(self, inputs: dict[str, Any]) -> None:
        """Refuse losses that go by their batch, at the first batch of two rows or more."""
        if self.engine is None or len(next(iter(inputs.values()))) < 2:
            return
        self._unknown_losses = False
        name = f"{type(self).__name__}.per_example_losses"
        note = self.engine._look_at_losses(self.per_example_losses, inputs, name)
        if note is not None:
            transformers.utils.logging.get_logger(__name__).warning(note)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any) -> Any:
        """As `transformers.Trainer.train`; the training loss of the result is NaN, and no time is told, unless they may be shown.

        With ``resume_from_checkpoint=True`` it goes on from the last checkpoint that is complete, or begins where there is none:
        a killed run is started again with the same line. Steps that were taken before are repeated bit for bit, and paid once.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_complete_checkpoint()
        result = super().train(resume_from_checkpoint, *arguments, **named)
        if self.show_losses:
            return result
        metrics = {name: value for name, value in result.metrics.items() if name not in NOT_PRIVATE}
        return result._replace(training_loss=math.nan, metrics=metrics)

    def evaluate(self, eval_dataset: Any = None, *arguments: Any, **named: Any) -> dict[str, float]:
        """As Hugging Face's, on public rows: what is measured is logged.

        Raises:
            UserError: they are rows of the training data.
        """
        measured = self.eval_dataset if eval_dataset is None else eval_dataset
        for private in (self._private_rows, self.train_dataset):
            refuse_private_rows(private, measured)
        return super().evaluate(eval_dataset, *arguments, **named)

    def log(self, logs: dict[str, float], *others: Any) -> None:
        """As Hugging Face's, with epsilon, and without what private rows leave in the clear."""
        private = {name: logs.pop(name) for name in NOT_PRIVATE if name in logs}
        if self.show_losses:
            logs |= {f"not_private/{name}": value for name, value in private.items() if name != "total_flos"}
        if private and self.engine is not None:
            # as few digits as Hugging Face prints, which it would round to the nearest
            logs["epsilon"] = float(upwards(self.engine.epsilon(), ".4g"))
        super().log(logs, *others)

    def get_train_dataloader(self) -> DataLoader:
        """The numbers of an epoch's steps: which rows a step sees is drawn by the engine."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        steps = max(1, round(self.num_units() / self.expected_batch))
        return DataLoader(range(steps), batch_size=1, collate_fn=lambda number: {"number": number})  # type: ignore[arg-type]

    def num_examples(self, dataloader: DataLoader) -> int:
        """N for the training data."""
        data: Any = dataloader.dataset
        return self.num_units() if isinstance(data, range) else len(data)

    def num_units(self) -> int:
        """N: users, where these are protected, whose number batches and epochs count too."""
        return units_of(len(self.train_dataset), self.privacy.get("users"), 1).count

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected size of a logical batch."""
        return self.expected_batch

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the number follows from the sizes of private samples."""
        return 0

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        """Refused."""
        raise UserError(
            "a hyperparameter search looks at private data again with every trial, and no epsilon covers it: train each "
            "configuration by itself, with its own output_dir"
        )

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super()._inner_training_loop(*arguments, **named)
        finally:
            if self.engine is not None:
                self.engine.close()
            if isinstance(self.optimizer, _Taken):
                self.optimizer = self.callback_handler.optimizer = self.optimizer.real

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        taken = _Taken(self.optimizer)
        self._read_columns()
        self.engine = PrivacyEngine(
            self.model, taken.real, self._rows,
            folder=kept_beside(self.args.output_dir), batch_size=self.expected_batch, steps=max_steps, checkpoint_every=0,
            **self.privacy,
        )  # fmt: skip
        self.optimizer = self.callback_handler.optimizer = taken
        if resume_from_checkpoint is not None:
            self.engine.load(Path(resume_from_checkpoint) / "privacy")
        elif self.engine.steps_taken:
            raise UserError(
                f"{self.args.output_dir} holds a finished private run: train(resume_from_checkpoint=True) goes back to it, "
                "another output_dir begins a new one"
            )
        return prepared

    def _last_complete_checkpoint(self) -> str | None:
        """The latest one that was written to its end: Hugging Face's trainer_state.json comes last."""
        complete = {
            int(folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")): folder
            for folder in Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*[0-9]")
            if read_json(folder / TRAINER_STATE_NAME) and read_json(folder / "privacy" / "latest.json")
        }
        return str(complete[max(complete)]) if complete else None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.engine is not None:
            self.engine.save(folder / "privacy")
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.engine is not None and self.engine.ledger.steps_charged:
            self.engine.write_card(output_dir or self.args.output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: each step seeds itself from the key, and the state of a generator would give its dropout away."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: see `_save_rng_state`."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Nothing: no gradient is left after a step."""

    def _read_columns(self) -> None:
        """The training data and its collate function, without the columns that the model does not take."""
        columns = getattr(self.train_dataset, "column_names", ())
        if columns:
            self._rows: Any = self._remove_unused_columns(self.train_dataset, description="training")
            self._collate: Any = self.data_collator
        else:
            self._rows = self.train_dataset
            self._collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        self._length: Callable[[int], int] | None = None
        if self.args.train_sampling_strategy == "group_by_length":
            rows, name = self._rows, self.args.length_column_name
            lengths = self.train_dataset[name] if name in columns else None
            self._length = lambda i: int(lengths[i]) if lengths is not None else len(rows[i]["input_ids"])


class _Taken:
    """Stands where the Trainer's loop steps its optimiser: the engine has taken that step already."""

    def __init__(self, optimizer: Any):
        self.wrapped = optimizer
        self.real: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        # or the scheduler, which holds the wrapper, warns that its optimiser never moves
        optimizer._opt_called = True

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
