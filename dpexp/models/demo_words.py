"""The words that the synthetic data is made of and that its tokenizers know whole. Written for this project."""

# Of the sentences for classifiers.
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
REVIEW_LINKS = ("and", "but", "is", "it", "makes", "never", "not", "the", "though", "with")
# of text infilling: Li et al. Table 10
TEMPLATES = ("great", "maybe", "no", "terrible", "was", "yes")
DEMO_PHRASES = SUBJECTS + PRAISE + BLAME + EVEN + ADVERBS + REVIEW_LINKS + TEMPLATES

# Of the pairs for text generation.
PLACES = (
    "amber", "birch", "cedar", "clover", "comet", "copper", "ember", "falcon", "garnet", "harbour", "hazel", "juniper",
    "lantern", "maple", "meadow", "orchid", "pebble", "saffron", "thistle", "willow",
)  # fmt: skip
KINDS_OF_PLACE = ("pub", "restaurant", "cafe", "bakery")
FOODS = ("french", "italian", "japanese", "indian", "english", "greek")
PRICES = ("cheap", "moderate", "high")
RATINGS = ("low", "average", "excellent")
AREAS = ("riverside", "centre")
PEOPLE = ("ada", "ben", "cleo", "dora", "emil", "finn", "gita", "hugo", "iris", "jon", "kaya", "lars")
TOWNS = ("arden", "brook", "corvel", "dunmore", "elstow", "farley", "grenada", "hollis")
THINGS = ("cake", "tent", "guitar", "bicycle", "book", "camera", "lamp", "map", "kite", "drum")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
HOBBIES = ("hiking", "painting", "chess", "sailing", "cooking", "reading", "running", "singing")
LINKS = (
    "a", "an", "and", "are", "area", "at", "bring", "bringing", "called", "can", "capital", "country", "customer", "do",
    "does", "family", "food", "for", "friendly", "good", "great", "has", "hello", "i", "in", "is", "it", "leader", "like",
    "likes", "lives", "love", "me", "mountain", "name", "near", "no", "not", "of", "on", "part", "partner", "persona", "place",
    "price", "rated", "rating", "region", "river", "serves", "sure", "the", "to", "too", "type", "wants", "what", "where",
    "who", "will", "with", "yes", "you", "your", "summarize", "following", "dialogue", "tl", "dr", "thanks", "lend", "see",
    "need", "prices", "also", "from", "by", "live", "birth", "born", "was",
)  # fmt: skip
DEMO_TEXT_WORDS = (
    *PLACES, *KINDS_OF_PLACE, *FOODS, *PRICES, *RATINGS, *AREAS, *PEOPLE, *TOWNS, *THINGS, *DAYS, *HOBBIES, *LINKS,
)  # fmt: skip
