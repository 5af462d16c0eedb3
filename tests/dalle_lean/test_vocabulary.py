"""The words that a model has learnt, and those of a prompt that it has not."""

import json

import pytest

from dalle_lean import vocabulary
from dalle_lean.vocabulary import FEWEST, LIKELY, MOST_WORDS, Vocabulary, content_words, enumerated, named, words_of

CAPTIONS = ["a red heart on a blue ground", "a whale and a small whale", "the woman's glasses", "a box, a knife"]


@pytest.fixture
def learnt():
    return Vocabulary.count(CAPTIONS * FEWEST)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A red HEART, please!", ["a", "red", "heart", "please"]),
        ("a witch's t-shirt & rock’n’roll", ["a", "witch's", "t", "shirt", "rock'n'roll"]),
        ("'quoted' snake_case 3 4k", ["quoted", "snake", "case", "3", "4k"]),
        ("cafe\u0301", ["café"]),
        ("лошадь 馬 حصان", ["лошадь", "馬", "حصان"]),
        ("लाल दिल", ["लाल", "दिल"]),
        ("❤️❤ 👋🏽 👩‍🚀🇩🇪", ["❤", "❤", "👋", "👩", "🚀", "🇩🇪"]),
        ("... \udcff \0 <>", []),
    ],
)
def test_a_word_is_a_run_of_letters_digits_and_marks_or_one_pictograph(text, words):
    assert words_of(text) == words


def test_the_most_frequent_words_come_first_and_rare_ones_are_left_out():
    often, rare = ["red car"] * (FEWEST + 1) + ["car"], ["zeppelin"] * (FEWEST - 1)
    learnt = Vocabulary.count([*often, *rare])
    assert list(learnt.words.items()) == [("car", FEWEST + 2), ("red", FEWEST + 1)]
    assert learnt.captions == len(often) + len(rare)


def test_only_so_many_words_are_kept_and_so_many_captions_read(monkeypatch):
    monkeypatch.setattr(vocabulary, "MOST_WORDS", 2)
    monkeypatch.setattr(vocabulary, "MOST_CAPTIONS", 10)
    endless = iter(lambda: "b a c " + "x" * 65, None)
    assert Vocabulary.count(endless) == Vocabulary({"a": 10, "b": 10}, 10)


def test_what_was_learnt_before_is_added(learnt):
    more = Vocabulary.count(["a zeppelin"] * FEWEST, before=learnt)
    assert more.unknown("a zeppelin and a whale") == []
    assert more.captions == learnt.captions + FEWEST
    assert more.words["a"] == learnt.words["a"] + FEWEST


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("a red heart", []),
        ("a zeppelin over a red heart, and a ZEPPELIN over Paris", ["zeppelin", "over", "paris"]),
        ("two whales", ["two"]),
        ("hearts, boxes and knives", []),
        ("a box's heart", []),
        ("a glass", ["glass"]),
        ("a bus", ["bus"]),
        ("please draw me some of these for my whale", []),
        ("ein rotes Herz", ["ein", "rotes", "herz"]),
        ("赤い ❤️ 3", ["赤い", "❤", "3"]),
        ("a zeppelin http://x.org/a?b=whales https://x.org www.x.org", ["zeppelin"]),
        ("<div class='x'>a <b>zeppelin</b></div><br/><!-- no -->, 1 < 2", ["zeppelin", "1", "2"]),
        ("?!", []),
        ("", []),
    ],
)
def test_unknown_words_are_named_in_order_and_once(learnt, prompt, unknown):
    assert learnt.unknown(prompt) == unknown


def test_a_word_is_known_by_its_plural():
    assert Vocabulary.count(["two cherries, grapes"] * FEWEST).unknown("a grape") == []


def test_an_emoji_that_captions_have_is_known():
    assert Vocabulary.count(["❤️ 🐋"] * FEWEST).unknown("❤ 🐋 🦖") == ["🦖"]


@pytest.mark.parametrize(
    ("prompt", "spelled_out"),
    [
        ("🐳", "spouting whale"),
        ("a ❤️ over two 🐳🐳", "a heart over two spouting whale spouting whale"),
        ("🏰 and 🦖", "castle and t-rex"),  # "european castle" in Unicode
        ("🐋 🎱 whale", "🐋 🎱 whale"),  # the first is learnt; of "billiards" no word is
        ("🍕👋🏽", "pizza 👋🏽"),  # "slice of pizza", "waving hand sign"
        ("🌽 🐈\u200d⬛", "🌽 cat ⬛"),  # "ear of maize"
        ("🇩🇪 a cat → ⚪ ● 3⃣", "🇩🇪 a cat → ⚪ ● 3⃣"),
    ],
)
def test_a_pictograph_is_spelled_out_with_the_words_of_its_name_that_are_learnt(prompt, spelled_out):
    learnt = Vocabulary.count(
        ["a black heart, a spouting whale, a castle, a T-Rex, 🐋, an ear of a cat, a pizza, a letter, an arrow"]
        * FEWEST
    )
    assert " ".join(learnt.spelled_out(prompt).split()) == spelled_out


@pytest.mark.parametrize(
    ("word", "meant"),
    [("elefant", "elephant"), ("elephannt's", "elephant"), ("whaile", "whale"), ("zeppelin", None), ("whle", None)],
)
def test_a_misspelt_word_suggests_the_learnt_one(word, meant):
    often, seldom = ["an elephant with a whale"] * LIKELY, ["a zepelin"] * FEWEST
    assert Vocabulary.count([*often, *seldom]).similar(word) == meant


def test_misspelt_words_get_suggestions_and_another_language_none():
    learnt = Vocabulary.count(["a purple elephant with roses and an engine"] * LIKELY)
    assert learnt.suggestions("a purpel elefant") == {"purpel": "purple", "elefant": "elephant"}
    assert learnt.suggestions("drei rotes engin") == {}


def test_of_a_prompt_only_function_words_say_nothing_of_what_is_seen():
    assert content_words("It's a picture of my cat's house without the cat") == [
        *("picture", "cat's", "house", "without", "cat")
    ]


def test_a_vocabulary_comes_back_as_it_was_saved(learnt, tmp_path):
    learnt.save(tmp_path / "vocabulary.json")
    loaded = Vocabulary.load(tmp_path / "vocabulary.json")
    assert loaded == learnt
    assert list(loaded.words) == list(learnt.words)


def test_the_largest_vocabulary_can_be_read_back(tmp_path):
    longest = Vocabulary({f"{number:05d}" + "🐋" * 59: vocabulary.LARGEST_COUNT for number in range(MOST_WORDS)}, 1)
    longest.save(tmp_path / "vocabulary.json")
    assert Vocabulary.load(tmp_path / "vocabulary.json") == longest


def content(**changes):
    return json.dumps({"format": "dalle_lean_vocabulary/1", "captions": 3, "words": {"heart": 5}} | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[]", "not of the format"),
        (content(format="dalle_lean_vocabulary/2"), "not of the format"),
        (content(captions=-1), "captions must be a whole number"),
        (content(captions=True), "captions must be a whole number"),
        (content(words=["heart"]), "words must be an object"),
        (content(words={str(number): 5 for number in range(MOST_WORDS + 1)}), "at most 50000 words"),
        (content(words={"heart": 0.5}), "'heart' must have"),
        (content(words={"heart": None}), "'heart' must have"),
        (content(words={"": 5}), "'' must have 1 to 64 printable characters"),
        (content(words={"x" * 65: 5}), "must have 1 to 64 printable characters"),
        (" " * (vocabulary.LARGEST_BYTES + 1), "it may have 14,400,000 at most"),
    ],
)
def test_what_is_no_vocabulary_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "vocabulary.json").write_text(text)
    with pytest.raises(ValueError, match=message) as refusal:
        Vocabulary.load(tmp_path / "vocabulary.json")
    assert "vocabulary.json" in str(refusal.value)


def test_words_are_enumerated_in_a_short_line_however_many_and_long():
    assert [enumerated("uvw"[:count], "or") for count in (1, 2, 3)] == ["u", "u or v", "u, v or w"]
    assert enumerated(named("abcdef")) == "a, b, c, d, e and f"
    assert enumerated(named("abcdefg")) == "a, b, c, d, e, f and 1 more word"
    assert enumerated(named("abcdefgh", ("<", ">"))) == "<a>, <b>, <c>, <d>, <e>, <f> and 2 more words"
    assert named(["x" * 2000, "y"]) == ["x" * 30 + "…", "y"]
