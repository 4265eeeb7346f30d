"""What is learnt from, and what learns: the task, its data, the network, the way to fine-tune it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerationConfig:
    """Prompts, and how text is generated from them (tasks of kind "generation")."""

    # before the source; {bos} is the tokenizer's own token for a beginning, {NAME} that of model.new_tokens=[NAME]
    prefix: str = ""
    # between source and target
    suffix: str = "{bos}"
    # in front of a target, and learnt with it: in byte-level vocabularies a blank belongs to the word behind it
    before_target: str = " "
    # between a target and its end token, and learnt with it: a blank in the code of Li et al.
    before_end: str = ""
    # who speaks in a line of the source: the words that it begins with, and behind them the token in their place, as in
    # "partner: {speaker2}", or none. Every token is then given a type: the last of these tokens, up to it; that of the suffix
    # before the first. Lines are joined without a break
    speakers: list[str] = field(default_factory=list)
    # which end of an over-long source is lost: end | start
    cut: str = "end"
    # tokens: the longest target that is learnt, and the most that are generated
    max_target: int = 128
    # beam search: how many texts are kept at each token
    num_beams: int = 5
    # the power of the length by which a beam's log-probability is divided
    length_penalty: float = 1.0
    # tokens that a beam's log-probability is divided by: of the text that is written, or of prompt and text together, as
    # transformers did when the papers were written
    # target | whole
    beam_length: str = "target"
    # strings that are never written, such as "\n"
    banned: list[str] = field(default_factory=list)
    # strings at which a written text ends, which are no part of it; with shots, also what stands between two pairs
    stop: list[str] = field(default_factory=list)
    # nucleus sampling from the most likely words that hold this share, in the place of beam search; null = beam search
    top_p: float | None = None
    # in-context learning without training: pairs of the training file in front of every source
    shots: int = 0
    # which pairs: He et al. average over three sets
    prompt_set: int = 0
    # hits@1: replies that a right one is ranked among, itself included (ConvAI2: 20); 0 = not measured
    candidates: int = 0
    # end | always (at every evaluation) | never
    when: str = "end"
    # which of dev and test text is generated for
    splits: list[str] = field(default_factory=lambda: ["dev"])
    # sources of each of them, spread evenly; null = all
    examples: int | None = None
    # rows of each split that loss and perplexity are measured on, spread evenly; null = all
    loss_examples: int | None = None
    # bertscore, bleurt -> folder, or id in the hub's cache, of the model; else the published one, where it is cached
    metric_models: dict[str, str] = field(default_factory=dict)


@dataclass
class TaskConfig:
    """A data set, how it is read and how the result is measured."""

    name: str = ""
    # text_classification | text_infilling | image_classification | generation | custom
    kind: str = "text_classification"
    # as they stand in the file; [] = the distinct values found there
    labels: list[str] = field(default_factory=list)
    # column names
    text: str = "text"
    # the column of a second text; null = one text
    text_pair: str | None = None
    label: str = "label"
    # what is reported on the dev set
    metric: str = "accuracy"
    # the data set on the hub
    hub_id: str | None = None
    # its configuration there
    hub_config: str | None = None
    # split -> path below data.root, without .gz or .xz
    files: dict[str, str] = field(default_factory=dict)
    # scale -> N; public; null = data.num_examples
    num_examples: dict[str, int | None] = field(default_factory=dict)
    # tokens of a text; longer ones are cut
    max_length: int = 128
    # tokens that every text is padded to, at least max_length; null = the longest of its batch
    pad_to: int | None = None
    # layout of a published text-to-text or image data set; "" = columns, or folders of images
    format: str = ""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    # of files without a header; [] = the first line names them
    columns: list[str] = field(default_factory=list)
    # rows with too few or too many cells: error | skip (and count)
    malformed: str = "error"
    # texts of more tokens than allowed: cut (and count) | error
    overlong: str = "cut"
    # generation: training rows of more tokens than this, prompt, target and end, are left out; N counts the others
    drop_over: int | None = None
    # the last rows of the training file that are dev, where there is no file for it
    held_out: int = 0
    # text infilling: <S1>, <S2> and one [MASK] among words
    template: str | None = None
    # text infilling: label -> word at the mask
    label_words: dict[str, str] = field(default_factory=dict)
    # images: what a record calls the data, where it is not what the task's name suggests
    title: str = ""
    # images: 1 = grey, 3 = colours
    channels: int = 3
    # images: make them squares of so many pixels; 0 = as they are
    image_size: int = 0
    # images: of each channel, pixels in [0, 1]; [] = 1/2; public
    mean: list[float] = field(default_factory=list)
    # images: of each channel, as for mean
    std: list[float] = field(default_factory=list)
    # images: M copies of each example, whose loss is their mean; 0 = the image as it is
    augmentations: int = 0
    # flip_crop | crop | flip
    augmentation: str = "flip_crop"
    # kind=custom: package.module:Class, a subclass of dpexp.tasks.Task
    factory: str | None = None


@dataclass
class DataConfig:
    """Where the examples come from; what is set here wins over the task's own."""

    # a folder in the published layout, with the files that conf/task/*.yaml names
    root: str | None = None
    # auto: own files, else those below root, else the hub (at scale=demo: embedded data)
    source: str = "auto"
    # a person's own files
    train: str | None = None
    # public; what is measured on it is written down without noise
    dev: str | None = None
    # the name of the column
    text: str | None = None
    # the column of a second text
    text_pair: str | None = None
    # the column of the label, or of the text to be written
    label: str | None = None
    # N of your own training file; public, so it is declared
    num_examples: int | None = None
    # tokens of a text; wins over task.max_length
    max_length: int | None = None
    # where prepared data are kept
    cache: str | None = None


@dataclass
class ModelConfig:
    """A network, where its weights come from, and which of its parameters train."""

    name: str = ""
    # hub id, local path, or "minilm"
    id: str | None = None
    # who builds the network
    family: str = "hf"
    # for random_hf: "bert", "roberta", ...
    architecture: str | None = None
    # overrides of the Hugging Face config
    config: dict[str, Any] = field(default_factory=dict)
    # null: the model's own
    tokenizer: str | None = None
    # names of tokens that join the vocabulary, each as <NAME>; bos, eos and pad take the place of the tokenizer's own. Their
    # embeddings are drawn, and learnt
    new_tokens: list[str] = field(default_factory=list)
    # where published tokenizer files may lie: data.root
    root: str | None = None
    # the network of the checkpoint, its weights drawn at random ("retrain" of Li et al. Table 2)
    retrain: bool = False
    # language models: the output layer has a weight of its own, which begins as a copy of the embedding
    untied: bool = False
    # which parameters train, under peft=full
    trainable: str = "all"
    # null: as the checkpoint says
    dropout: float | None = None
    # null: as the checkpoint says
    attention_dropout: float | None = None
    # classifiers of text: the architecture's own head, or a linear one on the first position, on the mean of all, or
    # on that of every layer
    # own | cls | mean | layers
    pooling: str = "own"
    # on what is pooled: one linear layer, the same without its bias, or RoBERTa's two layers (dense, tanh, linear)
    # linear | unbiased | dense
    head: str = "linear"
    # with trainable=head: what the frozen encoder makes of each text is computed once
    frozen_features: bool = False
    # family=custom: package.module:function, which makes the network
    factory: str | None = None


@dataclass
class PeftConfig:
    """The way to fine-tune: everything, or a small set of added parameters."""

    name: str = "full"
    # lora, rgp, adapters: of the added matrices, r
    rank: int = 0
    # lora: the update is scaled by alpha/r; 0 = r
    alpha: float = 0.0
    # lora: on the adapters' input
    dropout: float = 0.0
    # module names; [] = the library's choice for the architecture
    targets: list[str] = field(default_factory=list)
    # rgp: what is decomposed, weights | history
    carriers: str = "weights"
    # adapters: behind both sublayers, or behind the feed_forward one alone
    placement: str = "both"
    # top2: how many of the last blocks train
    blocks: int = 0
    # prefix, prompt, p_tuning: rows
    prefix_length: int = 0
    # prefix, p_tuning: units of the network that makes them; 0 = none, of p_tuning as many as the embedding is wide
    prefix_hidden: int = 0
