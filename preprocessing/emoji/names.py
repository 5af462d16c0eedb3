"""Emojibase's labels as natural English: a thing's name in captions, its article and its plural."""

import re
from collections.abc import Sequence

SHAPES = {
    "heart": ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "grey", "light"),
    "circle": ("red", "orange", "yellow", "green", "blue", "purple", "brown", "black", "white"),
    "square": ("red", "orange", "yellow", "green", "blue", "purple", "brown", "black", "white"),
    "book": ("red", "orange", "green", "blue"),
}
"""Things that come in many colours, and the first words of their names."""

# The labels are those of Emojibase 17 that `choice.drop_reason` keeps.
RENAMED = {
    "1st place medal": "first place medal",
    "2nd place medal": "second place medal",
    "3rd place medal": "third place medal",
    "automobile": "car",
    "black large square": "black square",
    "building construction": "building under construction",
    "camping": "tent under trees",
    "closed book": "red book",
    "cooking": "egg in a pan",
    "deciduous tree": "tree",
    "dizzy": "dizzy star",
    "flower playing cards": "flower playing card",
    "foggy": "foggy city",
    "gem stone": "gem",
    "glasses": "pair of glasses",
    "headphone": "pair of headphones",
    "high voltage": "lightning bolt",
    "hot beverage": "hot drink",
    "hourglass done": "hourglass",
    "hourglass not done": "running hourglass",
    "hundred points": "hundred points sign",
    "ice": "ice cube",
    "lady beetle": "ladybug",
    "large blue diamond": "blue diamond",
    "large orange diamond": "orange diamond",
    "link": "chain link",
    "locked": "closed lock",
    "locked with key": "closed lock with a key",
    "locked with pen": "closed lock with a pen",
    "mate": "mate drink",
    "mount fuji": "Mount Fuji",
    "oncoming automobile": "oncoming car",
    "performing arts": "pair of theatre masks",
    "pick": "pickaxe",
    "pool 8 ball": "pool ball",
    "rolling on the floor laughing": "face rolling on the floor laughing",
    "sake": "bottle of sake",
    "sauropod": "long-necked dinosaur",
    "snowman without snow": "plain snowman",
    "star-struck": "star-struck face",
    "Statue of Liberty": "the Statue of Liberty",
    "unlocked": "open lock",
    "white large square": "white square",
    "wood": "pile of wood",
    "ZZZ": "sleeping sign",
}

SUBGROUP_NOUNS = {"warning": "sign", "math": "sign", "religion": "symbol"}
"""The noun that a subgroup's bare labels lack: "no entry" is a sign."""

LAST_NOUNS = ("symbol", "cross", "David")  # labels that end in these lack none

# fmt: off
MASS = frozenset((
    "bacon", "badminton", "bowling", "bread", "butter", "calamari", "champagne", "cheese", "construction", "coral",
    "corn", "cutlery", "dna", "fire", "fog", "fondue", "garlic", "hockey", "ice", "lacrosse", "lettuce", "lightning",
    "luggage", "meat", "money", "oden", "pasta", "popcorn", "rice", "salt", "shrimp", "soap", "spaghetti", "sunshine",
    "sushi", "tennis", "yarn",
))
PROPER = ("Santa Claus", "Mrs. Claus", "Mount Fuji", "the Statue of Liberty")
SINGULAR_ENDINGS = ("ss", "us", "rhinoceros")
HEAD_ENDS = frozenset((
    "and", "at", "behind", "blowing", "down", "fluttering", "from", "holding", "in", "of", "on", "over", "playing",
    "savoring", "shaking", "showing", "spouting", "tilted", "under", "up", "with", "without",
))
IRREGULAR_PLURALS = {
    "avocado": "avocados", "bison": "bison", "child": "children", "deer": "deer", "die": "dice", "fish": "fish",
    "foot": "feet", "goose": "geese", "knife": "knives", "leaf": "leaves", "man": "men", "moose": "moose",
    "mouse": "mice", "ox": "oxen", "person": "people", "potato": "potatoes", "scarf": "scarves", "sheep": "sheep",
    "squid": "squid", "tomato": "tomatoes", "tooth": "teeth", "volcano": "volcanoes", "wolf": "wolves",
    "woman": "women",
}
SYNONYMS = {
    "airplane": ("plane", "aeroplane"), "alarm clock": ("clock",), "alien monster": ("space invader",),
    "angry face with horns": ("devil",), "articulated lorry": ("truck",), "axe": ("hatchet",), "baby chick": ("chick",),
    "bathtub": ("bath",), "beer mug": ("beer",), "beverage box": ("juice box", "carton of juice"), "bicycle": ("bike",),
    "birthday cake": ("cake",), "black bird": ("crow", "raven"), "blossom": ("flower",),
    "bottle with popping cork": ("champagne",), "bouquet": ("bunch of flowers",), "bug": ("caterpillar",),
    "bullseye": ("dartboard", "target"), "camera": ("photo camera",), "candy": ("sweet",),
    "car": ("automobile", "auto"), "cat": ("kitty", "kitten"), "cheese wedge": ("piece of cheese", "cheese"),
    "chicken": ("hen",), "chipmunk": ("squirrel",), "chocolate bar": ("bar of chocolate",),
    "cityscape": ("city skyline", "skyline"), "closed lock": ("lock", "padlock"), "cocktail glass": ("cocktail",),
    "cookie": ("biscuit",), "couch and lamp": ("couch", "sofa"), "crocodile": ("alligator",),
    "crossed swords": ("swords",), "cut of meat": ("steak", "meat"), "dagger": ("sword",),
    "desktop computer": ("computer",), "dog": ("doggy", "puppy"), "dollar banknote": ("dollar bill",),
    "doughnut": ("donut",), "dove": ("pigeon",), "droplet": ("drop of water", "water drop"), "ear of corn": ("corn",),
    "egg in a pan": ("fried egg",), "eggplant": ("aubergine",), "evergreen tree": ("fir tree", "pine tree"),
    "ewe": ("sheep", "lamb"), "fire": ("flame",), "fire engine": ("fire truck", "firetruck"),
    "fishing pole": ("fishing rod",), "flying saucer": ("ufo",), "fork and knife": ("cutlery",),
    "french fries": ("fries",), "fried shrimp": ("prawn",), "full moon": ("moon",), "game die": ("die",),
    "gem": ("diamond", "jewel"), "ghost": ("spook",), "globe showing Europe-Africa": ("earth", "globe"),
    "glowing star": ("shining star",), "green salad": ("salad",), "grinning face": ("smiley", "smiley face"),
    "hamburger": ("burger",), "honey pot": ("pot of honey",), "honeybee": ("bee",),
    "hot drink": ("cup of coffee", "coffee", "cup of tea"), "hot pepper": ("chili pepper",), "house": ("home",),
    "ice cream": ("sundae",), "jack-o-lantern": ("halloween pumpkin", "pumpkin"), "kitchen knife": ("knife",),
    "ladybug": ("ladybird",), "laptop": ("notebook computer",), "leafy green": ("lettuce",),
    "light bulb": ("lamp", "bulb"), "lightning bolt": ("lightning",), "locomotive": ("steam train",),
    "long-necked dinosaur": ("brontosaurus",), "luggage": ("suitcase",),
    "magnifying glass tilted left": ("magnifying glass",), "microphone": ("mic",),
    "mobile phone": ("phone", "smartphone", "cell phone"), "money bag": ("bag of money",), "motorcycle": ("motorbike",),
    "musical keyboard": ("piano",), "pair of glasses": ("glasses",), "pair of headphones": ("headphones",),
    "passenger ship": ("cruise ship",), "pickup truck": ("pickup",), "pile of poo": ("poop",),
    "potted plant": ("house plant", "plant in a pot"), "poultry leg": ("chicken leg", "drumstick"),
    "rabbit": ("bunny",), "racing car": ("race car",), "red apple": ("apple",), "red heart": ("heart",),
    "ringed planet": ("planet",), "rocket": ("spaceship", "space rocket"), "running shoe": ("shoe", "sneaker"),
    "sailboat": ("sailing boat", "boat"), "soccer ball": ("football",), "socks": ("pair of socks",),
    "soft ice cream": ("ice cream cone",), "spaghetti": ("noodles", "pasta"), "speedboat": ("fast boat",),
    "spiral shell": ("shell", "seashell"), "spouting whale": ("whale spouting water",), "squid": ("calamari",),
    "steaming bowl": ("bowl of soup",), "sun": ("sunshine",), "sun behind cloud": ("partly cloudy sky",),
    "T-Rex": ("tyrannosaurus", "dinosaur", "t rex"), "t-shirt": ("shirt",), "tangerine": ("mandarin", "orange"),
    "teddy bear": ("plush bear",), "television": ("tv",), "top hat": ("hat",), "turtle": ("tortoise",),
    "video game": ("gamepad", "game controller"), "wastebasket": ("trash can", "bin"), "watch": ("wristwatch",),
    "water pistol": ("water gun",), "water wave": ("wave",), "wine glass": ("glass of wine",), "worm": ("earthworm",),
    "wrapped gift": ("gift", "present"), "wrench": ("spanner",), "yarn": ("ball of yarn",),
}
# fmt: on
"""Other words for a thing; no two things share one."""

VOWEL_SOUND = re.compile(
    r"(?!uni|use|ufo|eu|ewe|one\b|once|u-)([aeiou]|hour|heir|honest|x-ray|sos\b|ng\b|8)", re.IGNORECASE
)


def caption_name(label: str, subgroup: str) -> str:
    """A label as a noun phrase: "closed book" is a "red book", "no entry" a "no entry sign"."""
    label = label.replace("’", "'").replace("ñ", "n")
    if label in RENAMED:
        return RENAMED[label]
    noun = SUBGROUP_NOUNS.get(subgroup)
    return f"{label} {noun}" if noun and not label.endswith(LAST_NOUNS) else label


def is_uncountable(name: str) -> bool:
    """Whether a name goes without "a": plurals, mass nouns and proper names."""
    if name in PROPER:
        return True
    words = name.split()
    head = words[head_end(words) - 1]
    return head in MASS or (head.endswith("s") and not head.endswith(SINGULAR_ENDINGS) and "'" not in head)


def head_end(words: Sequence[str]) -> int:
    """How many words of a noun phrase end with its head: 1 of "slice of pizza"."""
    ends = (i for i, word in enumerate(words) if i > 0 and (word in HEAD_ENDS or "'" in words[i - 1]))
    return next(ends, len(words))


def with_article(noun: str) -> str:
    """`noun` with "a" or "an" by its sound."""
    return f"{'an' if VOWEL_SOUND.match(noun) else 'a'} {noun}"


def plural(name: str) -> str | None:
    """The plural of a name, "red apples" for "red apple"; None if its head cannot be counted."""
    words = name.split()
    end = head_end(words)
    head = words[end - 1]
    if is_uncountable(name) or not head.isalpha() or not head.islower():
        return None
    if head in IRREGULAR_PLURALS:
        many = IRREGULAR_PLURALS[head]
    elif head.endswith(("s", "x", "z", "ch", "sh")):
        many = f"{head}es"
    elif head.endswith("y") and head[-2] not in "aeiou":
        many = f"{head[:-1]}ies"
    else:
        many = f"{head}s"
    return " ".join([*words[: end - 1], many, *words[end:]])


def contains_words(text: str, words: str) -> bool:
    """Whether `text` contains `words` as whole words, in order, ignoring case."""
    return re.search(rf"(?<![\w-]){re.escape(words.lower())}(?![\w-])", text.lower()) is not None
