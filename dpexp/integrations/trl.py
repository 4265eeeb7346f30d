"""TRL's `SFTTrainer`, private: another import and one more argument, as in `dpexp.integrations.transformers`.

    from dpexp.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, SFTConfig("out"), train_dataset=rows, privacy={"epsilon": 8, "delta": 1e-5, "clip_norm": 0.1})

An example is one row: one conversation, or one prompt with its completion. Its loss is the mean over its own targets, those that
TRL's `completion_only_loss` and `assistant_only_loss` leave.
"""

try:
    import trl
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ModuleNotFoundError(
        "dpexp.integrations.trl is for TRL: pip install 'dpexp[sft]'", name="trl"
    ) from None

from dpexp.integrations.transformers import Trainer


class SFTTrainer(Trainer, trl.SFTTrainer):
    """`trl.SFTTrainer` with the arguments, the steps and the refusals of `dpexp.integrations.transformers.Trainer`."""

    plain = trl.SFTTrainer
