"""Networks, their tokenizers, and which of their parameters train."""

from dpexp.models.build import ModelBundle, build_model, build_tokenizer

__all__ = ["ModelBundle", "build_model", "build_tokenizer"]
