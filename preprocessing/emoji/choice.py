"""The emoji that the picture set shows: things that people ask for by name and can tell apart."""

from preprocessing.emoji.names import SHAPES

KEPT_SYMBOLS = frozenset((
    "atom symbol", "biohazard", "check mark", "cross mark", "fleur-de-lis", "infinity",
    "large blue diamond", "large orange diamond", "latin cross",
    "no entry", "peace symbol", "radioactive", "recycling symbol", "red exclamation mark", "red question mark",
    "red triangle pointed up", "SOS button", "star of David", "trident emblem", "warning", "wheelchair symbol",
    "yin yang",
))  # fmt: skip
KEPT_PEOPLE = frozenset((
    "baby", "baby angel", "boy", "brain", "bone", "child", "clapping hands", "crossed fingers", "ear", "eye", "eyes",
    "fairy", "flexed biceps", "folded hands", "foot", "footprints", "genie", "girl", "handshake", "heart hands",
    "horse racing", "leg", "lungs", "mage", "man", "man dancing", "mermaid", "mouth", "Mrs. Claus", "nail polish",
    "nose", "OK hand", "old man", "old woman", "person", "raised fist", "Santa Claus", "skier", "snowboarder",
    "superhero", "thumbs down", "thumbs up", "tongue", "tooth", "troll", "vampire", "victory hand", "waving hand",
    "woman", "woman dancing", "writing hand", "zombie",
))  # fmt: skip
NEUTRAL_PEOPLE = ("person-role", "person-sport")
GENDERED = ("man ", "woman ", "men ", "women ", "pregnant ", "person ", "people ")


def drop_reason(label: str, group: str, subgroup: str) -> str | None:
    """The reason to leave out an emoji with this name and group, or None to keep it."""
    if group == "flags":
        return "flag"
    if group in ("none", "component"):
        return "letter, skin or hair sample"
    if label.endswith(("o’clock", "-thirty")):
        return "clock face"
    if group == "symbols" and label not in KEPT_SYMBOLS and not label.endswith(tuple(SHAPES)):
        return "button or sign"
    if group == "people-body" and label not in KEPT_PEOPLE:
        neutral = subgroup in NEUTRAL_PEOPLE and not label.startswith(GENDERED)
        return None if neutral else "person or hand like others"
    if "small square" in label or "medium square" in label or label.startswith("small "):
        return "smaller copy of a shape"
    return None
