"""Classes of transformers that read text."""

from __future__ import annotations

from typing import Any

from dpexp.conform.case import Builder
from dpexp.conform.classes.base import EXAMPLES, WIDTH, pair, text

_MOE: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 6,
}
_SIDES: dict[str, Any] = {
    f"{side}_{part}": n
    for side in ("encoder", "decoder")
    for part, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 12))
}
_BART: dict[str, Any] = _SIDES | {"decoder_start_token_id": 2, "scale_embedding": True}
_T5: dict[str, Any] = {"d_kv": 4, "d_ff": 12, "num_decoder_layers": 1, "decoder_start_token_id": 0}

DECODERS: dict[str, Builder] = {
    "GPT2LMHeadModel": text("GPT2LMHeadModel"),
    "GPT2ForSequenceClassification": text("GPT2ForSequenceClassification"),
    "OpenAIGPTLMHeadModel": text("OpenAIGPTLMHeadModel"),
    "GPTNeoForCausalLM": text("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=4),
    "GPTNeoXForCausalLM": text("GPTNeoXForCausalLM"),
    "GPTJForCausalLM": text("GPTJForCausalLM", rotary_dim=2),
    "OPTForCausalLM": text("OPTForCausalLM", word_embed_proj_dim=WIDTH),
    "BloomForCausalLM": text("BloomForCausalLM"),
    "LlamaForCausalLM": text("LlamaForCausalLM"),
    "LlamaForSequenceClassification": text("LlamaForSequenceClassification"),
    "MistralForCausalLM": text("MistralForCausalLM"),
    "MixtralForCausalLM": text("MixtralForCausalLM", num_local_experts=3, num_experts_per_tok=2),
    "Qwen2ForCausalLM": text("Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": text("Qwen3ForCausalLM", head_dim=4),
    "Qwen2MoeForCausalLM": text("Qwen2MoeForCausalLM", **_MOE),
    "GemmaForCausalLM": text("GemmaForCausalLM", head_dim=4),
    "Gemma2ForCausalLM": text("Gemma2ForCausalLM", head_dim=4, sliding_window=4, query_pre_attn_scalar=4),
    "Gemma3ForCausalLM": text("Gemma3ForCausalLM", head_dim=4, sliding_window=4, query_pre_attn_scalar=4),
    "PhiForCausalLM": text("PhiForCausalLM"),
    "Phi3ForCausalLM": text("Phi3ForCausalLM"),
    "FalconForCausalLM": text("FalconForCausalLM"),
    "MptForCausalLM": text("MptForCausalLM"),
    "StableLmForCausalLM": text("StableLmForCausalLM"),
    "Starcoder2ForCausalLM": text("Starcoder2ForCausalLM"),
    "OlmoForCausalLM": text("OlmoForCausalLM"),
    "Olmo2ForCausalLM": text("Olmo2ForCausalLM"),
    "CohereForCausalLM": text("CohereForCausalLM"),
    "BioGptForCausalLM": text("BioGptForCausalLM"),
    "PersimmonForCausalLM": text("PersimmonForCausalLM"),
    "GraniteForCausalLM": text("GraniteForCausalLM"),
    "MambaForCausalLM": text("MambaForCausalLM", state_size=3),
}
ENCODERS: dict[str, Builder] = {
    "BertForSequenceClassification": text("BertForSequenceClassification"),
    "BertForMaskedLM": text("BertForMaskedLM"),
    "BertForTokenClassification": text("BertForTokenClassification"),
    "RobertaForSequenceClassification": text("RobertaForSequenceClassification", pad_token_id=0),
    "RobertaForMaskedLM": text("RobertaForMaskedLM", pad_token_id=0),
    "DistilBertForSequenceClassification": text("DistilBertForSequenceClassification"),
    "AlbertForSequenceClassification": text("AlbertForSequenceClassification", embedding_size=6),
    "ElectraForSequenceClassification": text("ElectraForSequenceClassification", embedding_size=6),
    "DebertaForSequenceClassification": text(
        "DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "DebertaV2ForSequenceClassification": text(
        "DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "MPNetForSequenceClassification": text("MPNetForSequenceClassification"),
    "XLNetForSequenceClassification": text(
        "XLNetForSequenceClassification", d_inner=12, leave_out=["max_position_embeddings"]
    ),
    "CamembertForSequenceClassification": text("CamembertForSequenceClassification"),
    "ConvBertForSequenceClassification": text("ConvBertForSequenceClassification", embedding_size=WIDTH),
    "SqueezeBertForSequenceClassification": text(
        "SqueezeBertForSequenceClassification", embedding_size=WIDTH, q_groups=2, k_groups=2, v_groups=2,
        post_attention_groups=1, intermediate_groups=2, output_groups=2,
    ),
    "MobileBertForSequenceClassification": text(
        "MobileBertForSequenceClassification", embedding_size=WIDTH, intra_bottleneck_size=8, num_feedforward_networks=1
    ),
    "FNetForSequenceClassification": text(
        "FNetForSequenceClassification",
        losses=lambda model, batch: (model(input_ids=batch["ids"]).logits - 0.3).square().sum(1),
    ),
    "BigBirdForSequenceClassification": text(
        "BigBirdForSequenceClassification", attention_type="original_full"
    ),
    "NystromformerForSequenceClassification": text(
        "NystromformerForSequenceClassification", num_landmarks=32, segment_means_seq_len=32
    ),
    "RoFormerForSequenceClassification": text("RoFormerForSequenceClassification", embedding_size=WIDTH),
    "ModernBertForSequenceClassification": text("ModernBertForSequenceClassification", cls_token_id=1, sep_token_id=2),
    "ErnieForSequenceClassification": text("ErnieForSequenceClassification"),
    "FunnelForSequenceClassification": text(
        "FunnelForSequenceClassification", block_sizes=[1, 1], d_head=4, d_inner=12, num_decoder_layers=1,
        leave_out=["num_hidden_layers"],
    ),
}  # fmt: skip
PAIRS: dict[str, Builder] = {
    "T5ForConditionalGeneration": pair("T5ForConditionalGeneration", **_T5),
    "MT5ForConditionalGeneration": pair("MT5ForConditionalGeneration", **_T5),
    "UMT5ForConditionalGeneration": pair("UMT5ForConditionalGeneration", **_T5),
    "LongT5ForConditionalGeneration": pair("LongT5ForConditionalGeneration", **_T5, local_radius=3),
    "SwitchTransformersForConditionalGeneration": pair(
        "SwitchTransformersForConditionalGeneration",
        **_T5, num_experts=3, expert_capacity=2 * EXAMPLES, router_jitter_noise=0.0,
    ),
    "BartForConditionalGeneration": pair("BartForConditionalGeneration", **_BART),
    "MBartForConditionalGeneration": pair("MBartForConditionalGeneration", **_BART),
    "PegasusForConditionalGeneration": pair("PegasusForConditionalGeneration", **_BART),
    "MarianMTModel": pair("MarianMTModel", **_BART, decoder_vocab_size=None),
    "BlenderbotForConditionalGeneration": pair("BlenderbotForConditionalGeneration", **_BART),
    "M2M100ForConditionalGeneration": pair("M2M100ForConditionalGeneration", **_BART),
    # a window that holds padding alone has no gradient (NaN in float64): smaller ones would ask nothing
    "LEDForConditionalGeneration": pair("LEDForConditionalGeneration", **_BART, attention_window=8),
}  # fmt: skip
