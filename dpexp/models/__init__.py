"""Networks, their tokenizers, and which of their parameters train.

`build` puts them together: `networks` and `images` make them, `sources` finds weights, `trainable` and `finetuning` choose.
"""

from dpexp.models.build import ModelBundle, build_model, build_tokenizer

__all__ = ["ModelBundle", "build_model", "build_tokenizer"]
