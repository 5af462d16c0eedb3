import base64
import json
import resource
import subprocess
import sys

import pytest
import tokenizers
import torch

from dalle_lean.errors import UserError
from dalle_lean.tokenizer import SMALLEST_VOCABULARY, Tokenizer, find_tokenizer

CAPTIONS = ["a red heart", "A blue Heart on a green ground", "a cat left of a tree", "日本の赤い心", "crème brûlée"] * 3


@pytest.fixture(scope="module")
def trained():
    return Tokenizer.train(CAPTIONS, vocab_size=320)


def words(*, padding_id=None):
    """A foreign tokenizer of five whole words, with a padding section when `padding_id` is given."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 3, "heart": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="$0 </s>", special_tokens=[("</s>", 1)])
    if padding_id is not None:
        backend.enable_padding(pad_id=padding_id, pad_token="whatever")
    return backend


def test_captions_are_padded_on_the_right_and_cut_at_the_length(trained):
    short, long = trained.encode(["a red heart", "a red heart on a green ground"], length=5)
    assert short.dtype == torch.int64
    assert short.tolist()[: trained.count("a red heart")] == long.tolist()[: trained.count("a red heart")]
    assert short.tolist()[trained.count("a red heart") :] == [1] * (5 - trained.count("a red heart"))
    assert (long != 1).all()


def test_an_empty_caption_is_all_padding(trained):
    assert trained.encode(["", "a cat"], length=4)[0].tolist() == [1, 1, 1, 1]
    assert trained.count("") == 0
    assert trained.encode([], length=4).shape == (0, 4)


def test_many_captions_at_once_get_the_ids_that_each_gets_alone(trained):
    captions = [*CAPTIONS, "", "a" * 300, "half a pair \ud800", "<pad> </s>"]
    for length in (1, 5, 40):
        for row, caption in zip(trained.encode(captions, length).tolist(), captions, strict=True):
            assert row == trained.encode([caption], length)[0].tolist()
            assert row.count(trained.padding_id) == max(0, length - trained.count(caption))


@pytest.mark.parametrize("caption", ["a red heart on a GREEN ground", "un élephant 😀😀 rouge", "redredred heart"])
def test_what_is_unread_begins_with_the_word_that_is_cut(trained, caption):
    for length in range(1, trained.count(caption) + 2):
        read = caption.removesuffix(trained.unread(caption, length))
        assert trained.count(read.rstrip()) <= length
        rest = caption[len(read) :]
        assert not rest or trained.count(read + rest.split()[0]) > length
        assert not read or not rest or read.endswith(" ")


def test_capital_letters_make_no_difference(trained):
    ids = trained.encode(["A Red HEART", "a red heart"], length=8)
    assert ids[0].equal(ids[1])


@pytest.mark.parametrize(
    "caption",
    ["<unused> <pad> <unk>", "\x00\x01", "😀 שלום", "half a pair \ud800", "\u0301combining", "a" * 5000, " \n "],
)
def test_no_caption_yields_the_ids_0_padding_or_unknown(trained, caption):
    ids = trained.encode([caption], length=max(1, trained.count(caption)))
    assert ids.min() > 2
    assert ids.max() < trained.vocab_size


def test_training_gives_the_same_bytes_in_another_process(trained, tmp_path):
    trained.save(tmp_path / "here.json")
    there = str(tmp_path / "there.json")
    program = f"from dalle_lean.tokenizer import Tokenizer; Tokenizer.train({CAPTIONS!r}, 320).save({there!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()


def test_a_saved_tokenizer_reads_back_the_same_with_its_padding_id(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert (again.vocab_size, again.padding_id) == (trained.vocab_size, 1)
    assert again.encode(CAPTIONS, 16).equal(trained.encode(CAPTIONS, 16))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["padding"]["pad_id"] == 1


@pytest.mark.parametrize(("section", "expected"), [(None, 1), (0, 0), (2, 2)])
def test_the_padding_id_is_the_files_else_1(tmp_path, section, expected):
    words(padding_id=section).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.padding_id == expected
    assert tokenizer.encode(["red heart"], 4).tolist() == [[3, 4, expected, expected]]


def test_a_foreign_tokenizers_end_token_and_special_words_stay_out(tmp_path):
    words().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.count("red heart") == 2
    assert tokenizer.count("red </s> heart") > 3
    assert tokenizer.encode(["red </s> heart"], 8)[0].tolist()[1] == 2


def test_a_padding_id_outside_the_vocabulary_is_refused(tmp_path):
    words(padding_id=5).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json: padding id 5 is outside the vocabulary 0..4"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"{" * 10000])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.json is not a tokenizer"):
        Tokenizer.from_file(tmp_path / "bad.json")


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
LONG_FORMS = base64.b64encode(b"\4\0\0\0" + bytes(4) + b"x" * 100).decode()
DAMAGED_TRIE = base64.b64encode(b"\4\0\0\0" + bytes(4) + b"x").decode()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"normalizer": REPLACE}, "normalizer: it replaces {'String': 'a'} by 'aaaaaaaaaa', which is not supported"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, REPLACE]}}, "which is not supported"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 9}}, "9 in a sequence; at most 8"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": " "}}, "it replaces"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}}, "it replaces"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, r"it prepends 'x{79}\.\.\., which is not"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG_FORMS}}, "forms of more than 64 bytes"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "precompiled_charsmap is damaged"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "precompiled_charsmap is not base64"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "pre_tokenizer: type 'FixedLength' is not supported"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Removed"}}, "it splits at"),
        ({"post_processor": {"type": "Surprise"}}, "post_processor: type 'Surprise'"),
        ({"decoder": {"type": "CTC"}}, "decoder: type 'CTC'"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "(ab|c){50}"}, "content": " "}}, "decoder: it replaces"),
        ({"model": {"type": "Own"}}, "model: type 'Own' is not supported, only BPE, Unigram, WordPiece, WordLevel"),
        ({"model": {"type": "BPE", "dropout": 0.5}}, "with dropout, a caption has other ids each time"),
        ({"normalizer": 3}, "normalizer: it must be an object"),
        ({"normalizer": {"type": "Sequence"}}, "a sequence without its parts"),
    ],
)
def test_parts_that_no_published_tokenizer_has_are_refused(tmp_path, part, words):
    content = json.loads(words_of(tmp_path)) | part
    assert Tokenizer.from_file(tmp_path / "words.json").count("red heart") == 2
    (tmp_path / "mine.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"mine.json is not a tokenizer.json: .*{words}"):
        Tokenizer.from_file(tmp_path / "mine.json")


def words_of(folder):
    words().save(str(folder / "words.json"))
    return (folder / "words.json").read_text()


def test_a_table_that_makes_the_package_panic_is_a_mistake_in_a_sentence(tmp_path):
    content = json.loads(words_of(tmp_path))
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": DAMAGED_TRIE}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_file(tmp_path / "mine.json")
    for use in (lambda: tokenizer.encode(["red"], 4), lambda: tokenizer.count("red")):
        with pytest.raises(UserError, match="the tokenizer is damaged"):
            use()


@pytest.mark.parametrize("name", ["t5", "t5 of old", "clip", "gpt-2", "bert", "sentencepiece"])
def test_the_parts_of_published_tokenizers_are_taken(tmp_path, name):
    table = base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"a\0fi\0").decode()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": table}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    white = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
    clip = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    split = {"type": "Split", "pattern": {"Regex": clip}, "behavior": "Removed", "invert": True}
    normalizers = {
        "t5": {"type": "Sequence", "normalizers": [precompiled, spaces]},
        "t5 of old": precompiled,
        "clip": {"type": "Sequence", "normalizers": [{"type": "NFC"}, white, {"type": "Lowercase"}]},
        "gpt-2": None,
        "bert": json.loads(tokenizers.normalizers.BertNormalizer().__getstate__()),
        "sentencepiece": {"type": "Prepend", "prepend": "▁"},
    }
    pre_tokenizers = {
        "t5": metaspace,
        "t5 of old": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "clip": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "gpt-2": byte_level,
        "bert": {"type": "BertPreTokenizer"},
        "sentencepiece": None,
    }
    spaces_again = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    word_end = {"type": "Replace", "pattern": {"String": "</w>"}, "content": " " * 10}
    decoders = {
        "sentencepiece": {"type": "Sequence", "decoders": [spaces_again, {"type": "Fuse"}]},
        "clip": {"type": "Sequence", "decoders": [byte_level, word_end]},
    }
    content = json.loads(words_of(tmp_path))
    content |= {"normalizer": normalizers[name], "pre_tokenizer": pre_tokenizers[name], "decoder": decoders.get(name)}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    assert Tokenizer.from_file(tmp_path / "mine.json").encode(["red heart"], 4).shape == (1, 4)


def test_an_endless_caption_takes_little_memory(trained):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert trained.encode(["ab" * 10**8], length=8).shape == (1, 8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB, the caption's own 200 MB too


def test_wrong_arguments_are_refused(trained):
    with pytest.raises(ValueError, match="not one string"):
        trained.encode("a red heart", 8)
    with pytest.raises(ValueError, match="must be a string, not NoneType"):
        trained.encode(["a", None], 8)
    with pytest.raises(ValueError, match="length=0"):
        trained.encode(["a"], 0)
    with pytest.raises(ValueError, match=f"at least {SMALLEST_VOCABULARY}"):
        Tokenizer.train(CAPTIONS, vocab_size=100)


@pytest.mark.parametrize("address", ["google-t5/t5-small", "t5-small"])
def test_a_tokenizer_is_a_file_or_that_of_a_hub_id(hub_cache, tmp_path, address):
    Tokenizer.train(["a red heart"], 300).save(tmp_path / "tokenizer.json")
    hub_cache(address, "tokenizer.json", tmp_path / "tokenizer.json")
    found = find_tokenizer(address)
    assert Tokenizer.from_file(found).count("a red heart") > 0
    assert find_tokenizer(str(found)) == found
    assert find_tokenizer(None) is None


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tokenizer.json", "no tokenizer at tokenizer.json; give a tokenizer.json, or a hub id"),
        ("../up/there", "no tokenizer at"),
        ("owner/absent", "there is no file owner/absent, and no tokenizer of that name came from the hub: "),
    ],
)
def test_a_tokenizer_that_is_nowhere_is_named(hub_cache, name, complaint):
    with pytest.raises(UserError, match=complaint):
        find_tokenizer(name)
