import json
import subprocess
import sys

import pytest
import tokenizers
import torch

from dalle_lean.tokenizer import SMALLEST_VOCABULARY, Tokenizer

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
            ids = trained._ids(caption)[:length]
            assert row == ids + [trained.padding_id] * (length - len(ids))


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


@pytest.mark.parametrize(("section", "argument", "expected"), [(None, None, 1), (0, None, 0), (0, 2, 2), (None, 2, 2)])
def test_the_padding_id_is_the_argument_else_the_files_else_1(tmp_path, section, argument, expected):
    words(padding_id=section).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", padding_id=argument)
    assert tokenizer.padding_id == expected
    assert tokenizer.encode(["red heart"], 4).tolist() == [[3, 4, expected, expected]]


def test_a_foreign_tokenizers_end_token_and_special_words_stay_out(tmp_path):
    words().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.count("red heart") == 2
    assert tokenizer.count("red </s> heart") > 3
    assert tokenizer.encode(["red </s> heart"], 8)[0].tolist()[1] == 2


@pytest.mark.parametrize("padding_id", [-1, 5, True])
def test_a_padding_id_outside_the_vocabulary_is_refused(tmp_path, padding_id):
    words().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json: padding id .* is outside the vocabulary 0..4"):
        Tokenizer.from_file(tmp_path / "tokenizer.json", padding_id=padding_id)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"{" * 10000])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.json is not a tokenizer"):
        Tokenizer.from_file(tmp_path / "bad.json")


def test_wrong_arguments_are_refused(trained):
    with pytest.raises(ValueError, match="not one string"):
        trained.encode("a red heart", 8)
    with pytest.raises(ValueError, match="must be a string, not NoneType"):
        trained.encode(["a", None], 8)
    with pytest.raises(ValueError, match="length=0"):
        trained.encode(["a"], 0)
    with pytest.raises(ValueError, match=f"at least {SMALLEST_VOCABULARY}"):
        Tokenizer.train(CAPTIONS, vocab_size=100)
