"""Classes of transformers and timm that read images, sound or series."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.conform.case import Batch, Builder, Case
from dpexp.conform.classes.base import EXAMPLES, WIDTH, configured, squares, without_dropout

_PATCHES: dict[str, Any] = {"image_size": 16, "patch_size": 8, "num_channels": 3}
_HEADS = ["num_attention_heads", "num_heads", "n_head", "n_heads"]
_LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"]
_STAGES: dict[str, Any] = {
    "hidden_sizes": [4, 6, 8, 8],
    "depths": [1, 1, 1, 1],
    "embedding_size": 4,
    "layer_type": "basic",
}


def image_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Of images in ``pixel_values``, or of networks that take them by place."""
    if hasattr(model, "config"):
        return squares(model(pixel_values=batch["x"]))
    return squares(model(batch["x"]))


def image(name: str, size: int = 16, **options: Any) -> Builder:
    """A class of transformers that reads images."""

    def build() -> Case:
        return Case(configured(name, **(_PATCHES | options)), _images(size), image_losses)

    return build


def timm(name: str, size: int = 32, **options: Any) -> Builder:
    """A network of timm, under its name, without pretrained weights."""

    def build() -> Case:
        from timm import create_model

        model = create_model(name, pretrained=False, num_classes=3, **options)
        return Case(without_dropout(model), _images(size), image_losses)

    return build


def timm_class(module: str, name: str, size: int = 32, **options: Any) -> Builder:
    """A class of timm, for networks whose names fix their size. An option ``"module:name"`` is a class of timm as well."""

    def found(option: Any) -> Any:
        where, colon, what = option.partition(":") if isinstance(option, str) else ("", "", "")
        return getattr(import_module(f"timm.{where}"), what) if colon else option

    def build() -> Case:
        kind = getattr(import_module(f"timm.models.{module}"), name)
        options.update({key: found(value) for key, value in options.items()})
        return Case(without_dropout(kind(num_classes=3, **options)), _images(size), image_losses)

    return build


def sound(name: str, key: str, *shape: int, **options: Any) -> Builder:
    """A class of transformers that reads sound or series, of a shape for one example."""

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return squares(model(**{key: batch["x"]}))

    def build() -> Case:
        return Case(configured(name, **options), {"x": torch.randn(EXAMPLES, *shape)}, losses)

    return build


def _images(size: int) -> Batch:
    x = torch.randn(EXAMPLES, 3, size, size)
    x[-1] *= 5
    return {"x": x}


def _whisper() -> Case:
    options: dict[str, Any] = {"num_mel_bins": 6, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
               "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_source_positions": 5,
               "max_target_positions": 12, "decoder_start_token_id": 1}  # fmt: skip

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return squares(model(input_features=batch["x"], decoder_input_ids=batch["ids"]))

    batch = {"x": torch.randn(EXAMPLES, 6, 10), "ids": torch.randint(4, 23, (EXAMPLES, 4))}
    return Case(configured("WhisperForConditionalGeneration", **options), batch, losses)


_WAVES: dict[str, Any] = {
    "conv_dim": [6, 6], "conv_stride": [4, 2], "conv_kernel": [6, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 6, "mask_time_prob": 0.0,
    "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip
TRANSFORMERS: dict[str, Builder] = {
    "ViTForImageClassification": image("ViTForImageClassification"),
    "DeiTForImageClassification": image("DeiTForImageClassification"),
    "BeitForImageClassification": image(
        "BeitForImageClassification", use_relative_position_bias=True, layer_scale_init_value=0.1
    ),
    "Data2VecVisionForImageClassification": image(
        "Data2VecVisionForImageClassification", layer_scale_init_value=0.1
    ),
    "ViTMSNForImageClassification": image("ViTMSNForImageClassification"),
    "Dinov2ForImageClassification": image("Dinov2ForImageClassification", mlp_ratio=2),
    "SwinForImageClassification": image(
        "SwinForImageClassification", 32, image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[1, 2],
        window_size=4, leave_out=_HEADS,
    ),
    "Swinv2ForImageClassification": image(
        "Swinv2ForImageClassification", 32, image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[1, 2],
        window_size=4, leave_out=_HEADS,
    ),
    "ConvNextForImageClassification": image(
        "ConvNextForImageClassification", 32, image_size=32, patch_size=4, hidden_sizes=[4, 6], depths=[1, 1],
        num_stages=2, layer_scale_init_value=0.5,
    ),
    "ConvNextV2ForImageClassification": image(
        "ConvNextV2ForImageClassification", 32, image_size=32, patch_size=4, hidden_sizes=[4, 6], depths=[1, 1],
        num_stages=2,
    ),
    "ResNetForImageClassification": image("ResNetForImageClassification", 64, **_STAGES),
    "RegNetForImageClassification": image(
        "RegNetForImageClassification", 64, **(_STAGES | {"layer_type": "x"}), groups_width=2, leave_out=_LAYERS
    ),
    "BitForImageClassification": image(
        "BitForImageClassification", 32, hidden_sizes=[8, 8], depths=[1, 1], embedding_size=8, num_groups=2,
        layer_type="preactivation", leave_out=_LAYERS,
    ),
    "PoolFormerForImageClassification": image(
        "PoolFormerForImageClassification", 32, image_size=32, hidden_sizes=[4, 6, 8, 8], depths=[1, 1, 1, 1],
        patch_size=16, layer_scale_init_value=0.5,
    ),
    "SegformerForImageClassification": image(
        "SegformerForImageClassification", 32, image_size=32, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[4, 8], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    ),
    "PvtForImageClassification": image(
        "PvtForImageClassification", 32, image_size=32, num_encoder_blocks=2, depths=[1, 1],
        sequence_reduction_ratios=[2, 1], hidden_sizes=[4, 8], patch_sizes=[4, 2], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    ),
    "FocalNetForImageClassification": image(
        "FocalNetForImageClassification", 32, image_size=32, patch_size=4, embed_dim=4, hidden_sizes=[4, 8],
        depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3],
    ),
    "MobileViTForImageClassification": image(
        "MobileViTForImageClassification", 64, image_size=64, hidden_sizes=[8, 8, 8], patch_size=2,
        neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8], mlp_ratio=2.0,
    ),
    "CLIPVisionModel": image("CLIPVisionModel"),
    "SiglipVisionModel": image("SiglipVisionModel"),
    "ASTForAudioClassification": sound(
        "ASTForAudioClassification", "input_values", 16, 8, max_length=16, num_mel_bins=8, patch_size=4,
        time_stride=4, frequency_stride=4,
    ),
    "Wav2Vec2ForSequenceClassification": sound("Wav2Vec2ForSequenceClassification", "input_values", 90, **_WAVES),
    "HubertForSequenceClassification": sound("HubertForSequenceClassification", "input_values", 90, **_WAVES),
    "WavLMForSequenceClassification": sound(
        "WavLMForSequenceClassification", "input_values", 90, **_WAVES, num_buckets=8, max_bucket_distance=8
    ),
    "WhisperForConditionalGeneration": _whisper,
    "PatchTSTForClassification": sound(
        "PatchTSTForClassification", "past_values", 16, 2, num_input_channels=2, context_length=16, patch_length=4,
        patch_stride=4, num_targets=3, norm_type="layernorm", do_mask_input=False,
    ),
}  # fmt: skip
_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
_MIXER: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": WIDTH, "num_blocks": 2}
_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (4, 4, 6, 6)}
TIMM: dict[str, Builder] = {
    "vit_tiny_patch16_224": timm("vit_tiny_patch16_224", **_VIT, init_values=0.1),
    "vit_relpos_small_patch16_224": timm("vit_relpos_small_patch16_224", **_VIT),
    "deit_tiny_distilled_patch16_224": timm("deit_tiny_distilled_patch16_224", **_VIT),
    "beit_base_patch16_224": timm("beit_base_patch16_224", **_VIT),
    "eva02_tiny_patch14_224": timm("eva02_tiny_patch14_224", **_VIT),
    "cait_xxs24_224": timm("cait_xxs24_224", **_VIT),
    "MlpMixer": timm_class("mlp_mixer", "MlpMixer", **_MIXER),
    "ResMLP": timm_class(
        "mlp_mixer", "MlpMixer", **_MIXER, block_layer="models.mlp_mixer:ResBlock",
        norm_layer="models.mlp_mixer:Affine", mlp_ratio=4,
    ),
    "gMLP": timm_class(
        "mlp_mixer", "MlpMixer", **_MIXER, block_layer="models.mlp_mixer:SpatialGatingBlock",
        mlp_layer="layers:GatedMlp", mlp_ratio=4,
    ),
    "swin_tiny_patch4_window7_224": timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 1), num_heads=(1, 2)
    ),
    "swinv2_tiny_window8_256": timm(
        "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=8, depths=(2, 1), num_heads=(1, 2)
    ),
    "ConvNeXt": timm_class("convnext", "ConvNeXt", **_FOUR),
    "ConvNeXt V2": timm_class("convnext", "ConvNeXt", **_FOUR, use_grn=True, ls_init_value=None),
    "MetaFormer": timm_class("metaformer", "MetaFormer", **_FOUR),
    "ResNet V2 with standardised weights": timm_class(
        "resnetv2", "ResNetV2", layers=(1, 1), channels=(128, 128), stem_chs=32, conv_layer="layers:StdConv2d",
    ),
    "nf_resnet26, without norms": timm("nf_resnet26", 32, channels=(8, 8, 8, 8), stem_chs=8),
    "resnet10t": timm("resnet10t", 64),
    "mobilenetv3_small_050": timm("mobilenetv3_small_050", 64),
    "pit_ti_224": timm(
        "pit_ti_224", img_size=32, patch_size=8, stride=8, base_dims=(4, 4, 4), depth=(1, 1, 1), heads=(1, 2, 2)
    ),
    "twins_svt_small": timm(
        "twins_svt_small", img_size=32, embed_dims=(4, 8), num_heads=(1, 2), depths=(1, 1), wss=(4, 4),
        sr_ratios=(2, 1), mlp_ratios=(2, 2),
    ),
    "davit_tiny": timm("davit_tiny", depths=(1, 1), embed_dims=(4, 8), num_heads=(1, 2)),
    "FocalNet": timm_class("focalnet", "FocalNet", depths=(1, 1), embed_dim=4),
}  # fmt: skip
