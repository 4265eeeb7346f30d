"""The words that the demo's tokenizer knows and the demo's sentences are made of. Written for this project."""

SUBJECTS = (
    "acting", "camera work", "cast", "comedy", "dialogue", "direction", "drama", "editing", "ending", "film",
    "hero", "music", "opening", "pacing", "plot", "romance", "script", "sequel", "story", "villain",
)  # fmt: skip
PRAISE = (
    "brilliant", "charming", "clever", "delightful", "excellent", "fresh", "funny", "gripping", "honest", "lively",
    "moving", "superb", "tender", "touching", "warm", "witty", "wonderful", "vivid",
)  # fmt: skip
BLAME = (
    "awful", "boring", "bland", "clumsy", "dreary", "dull", "empty", "flat", "hollow", "lazy",
    "messy", "painful", "pointless", "shallow", "stale", "tedious", "tired", "weak",
)  # fmt: skip
EVEN = (
    "average", "conventional", "decent", "familiar", "fair", "modest", "ordinary", "passable", "plain", "standard",
)  # fmt: skip
ADVERBS = ("", "quite", "rather", "really", "so", "truly", "very")
LINKS = ("and", "but", "is", "it", "makes", "never", "not", "the", "though", "with")
TEMPLATES = ("great", "maybe", "no", "terrible", "was", "yes")  # of text infilling: Li et al. Table 10
DEMO_PHRASES = SUBJECTS + PRAISE + BLAME + EVEN + ADVERBS + LINKS + TEMPLATES
