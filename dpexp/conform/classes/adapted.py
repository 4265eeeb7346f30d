"""Ways of peft to train a part of a model: on GPT-2, whose layers are Conv1D, or on BERT, whose layers are linear."""

from __future__ import annotations

from typing import Any

from dpexp.conform.case import Builder, Case
from dpexp.conform.classes.base import WIDTH, configured, padded_words, text_losses, trimmed, without_dropout

_LINEAR = ["query", "value"]


def adapted(config: str, base: str = "bert", **options: Any) -> Builder:
    """A base model with a method of peft.

    Args:
        config: name of the method's configuration in peft.
        base: ``bert`` or ``gpt2``.
        options: of the method; ``target_modules`` are the layers that it acts on.
    """

    def build() -> Case:
        import peft

        causal = base == "gpt2"
        name = "GPT2LMHeadModel" if causal else "BertForSequenceClassification"
        model: Any = configured(name, num_key_value_heads=2)
        task = {"task_type": "CAUSAL_LM" if causal else "SEQ_CLS"}
        model = without_dropout(peft.get_peft_model(model, getattr(peft, config)(**(task | options))))
        for parameter in model.parameters():
            if parameter.requires_grad:
                # nothing that is zero at the start, or it would hide
                parameter.data.normal_(std=0.3)
        return Case(model, padded_words(), text_losses, trim=trimmed)

    return build


PEFT: dict[str, Builder] = {
    "LoRA on GPT-2": adapted("LoraConfig", "gpt2", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    "LoRA": adapted("LoraConfig", r=2, target_modules=_LINEAR),
    "LoRA with biases": adapted("LoraConfig", r=2, target_modules=_LINEAR, bias="lora_only"),
    "LoRA, rank-stabilised": adapted("LoraConfig", r=2, target_modules=_LINEAR, use_rslora=True),
    "LoRA of embeddings": adapted("LoraConfig", r=2, target_modules=["word_embeddings", "query"]),
    "DoRA": adapted("LoraConfig", r=2, target_modules=_LINEAR, use_dora=True),
    "AdaLoRA": adapted("AdaLoraConfig", init_r=3, target_r=2, target_modules=_LINEAR, total_step=10),
    "IA3": adapted("IA3Config", target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
    "LoHa": adapted("LoHaConfig", r=2, target_modules=_LINEAR),
    "LoKr": adapted("LoKrConfig", r=2, target_modules=_LINEAR),
    "OFT": adapted("OFTConfig", oft_block_size=4, r=0, target_modules=_LINEAR),
    "VeRA": adapted("VeraConfig", r=2, target_modules=_LINEAR),
    "HRA": adapted("HRAConfig", r=2, target_modules=_LINEAR),
    "FourierFT": adapted("FourierFTConfig", n_frequency=5, target_modules=_LINEAR),
    "VB-LoRA": adapted("VBLoRAConfig", r=2, num_vectors=6, vector_length=4, topk=2, target_modules=_LINEAR),
    "layer norms alone": adapted("LNTuningConfig", target_modules=["LayerNorm"]),
    "prompt tuning on GPT-2": adapted("PromptTuningConfig", "gpt2", num_virtual_tokens=3),
    "prompt tuning": adapted("PromptTuningConfig", num_virtual_tokens=3),
    "P-tuning": adapted("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=WIDTH),
    "prefix tuning on GPT-2": adapted("PrefixTuningConfig", "gpt2", num_virtual_tokens=3),
}  # fmt: skip
