"""From a prompt to the best few pictures, with a whole tiny model."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dalle_lean import load_model, save_model
from dalle_lean.cli import main
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.io.files import sha256_file
from dalle_lean.io.model_folder import hashed_parts, pack_model
from inference import Generator
from inference.ranking import collect, decode_and_score
from inference.request import Request, Settings
from inference.sampling.sampler import sample_codes
from tests.inference.tiny_model import CODEBOOK_SIZE, TEXT_LEN, tiny_dalle
from tests.tiny import tiny_vqgan

SETTINGS = {"num_images": 11, "best": 3, "top_k": 0, "top_p": 1.0, "seed": 5}


def decode(generator, codes):
    return collect(decode_and_score(codes, "", generator.vqgan))[0]


def pixels(pictures):
    return [picture.image.tobytes() for picture in pictures]


def named(pictures):
    return [(picture.index, picture.score) for picture in pictures]


def test_the_best_come_first_and_are_the_best_of_all(generator):
    every = generator("a red heart", **SETTINGS | {"best": 11})
    scores = [picture.score for picture in every]
    assert scores == sorted(scores, reverse=True)
    assert sorted(picture.index for picture in every) == list(range(11))
    best = generator("a red heart", **SETTINGS)
    assert [picture.index for picture in best] == [picture.index for picture in every[:3]]


def test_a_picture_is_its_codes_decoded_and_its_score_is_clips(generator, model_folder):
    clip = ClipScorer.load(model_folder / "clip")
    for picture in generator("a green book", **SETTINGS):
        decoded = generator.vqgan.decode(picture.codes[None])
        assert picture.image.size == (32, 32)
        difference = np.array(picture.image).astype(int) - (decoded[0].permute(1, 2, 0) * 255).round().numpy()
        assert abs(difference).max() <= 1  # of 255: a batch of another size rounds differently
        assert abs(picture.score - clip.score(decoded, "a green book").item()) < 1e-5


@pytest.mark.parametrize("batch_size", [1, 4, 8, 11])
def test_the_seed_fixes_picture_i_whatever_the_batch_size(generator, batch_size):
    expected = generator("two black cats", **SETTINGS)
    pictures = generator("two black cats", **SETTINGS, batch_size=batch_size)
    assert named(pictures) == named(expected)
    assert pixels(pictures) == pixels(expected)


def test_picture_i_does_not_depend_on_how_many_are_drawn(generator):
    few = {picture.index: picture for picture in generator("a car", **SETTINGS | {"num_images": 3, "best": 3})}
    many = {picture.index: picture for picture in generator("a car", **SETTINGS | {"best": 11})}
    assert all(few[index].image.tobytes() == many[index].image.tobytes() for index in range(3))


@pytest.mark.parametrize("prompt", ["two  black cats", "two black\ncats", "  two black cats\t"])
def test_spaces_and_lines_of_a_prompt_change_nothing(generator, prompt):
    assert pixels(generator(prompt, **SETTINGS)) == pixels(generator("two black cats", **SETTINGS))


def test_equal_candidates_are_decoded_and_scored_once(generator, monkeypatch):
    scored = []
    score = generator.scorer.score
    monkeypatch.setattr(generator.scorer, "score", lambda pixels, prompt: scored.append(1) or score(pixels, prompt))
    equal = generator("a red heart", **SETTINGS | {"num_images": 24, "best": 24, "top_k": 1})
    assert len(scored) == 1  # 24 different ones are scored in three batches
    assert [picture.index for picture in equal] == list(range(24))
    assert len(set(pixels(equal))) == len({picture.score for picture in equal}) == 1


def test_without_clip_the_first_pictures_come_by_index_without_scores(generator_without_clip, generator):
    pictures = generator_without_clip("a house", **SETTINGS)
    assert named(pictures) == [(0, None), (1, None), (2, None)]
    ranked = {picture.index: picture for picture in generator("a house", **SETTINGS | {"best": 11})}
    assert pixels(pictures) == pixels([ranked[index] for index in range(3)])


def test_progress_counts_every_code(generator):
    seen = []
    generator("a house", **SETTINGS, batch_size=4, on_progress=lambda *progress: seen.append(progress))
    done = [progress[0] for progress in seen]
    assert done == sorted(done)
    assert done[-1] == 11 * 16
    assert {progress[1] for progress in seen} == {11 * 16}
    assert seen[-1][2] == "done"


def test_a_long_prompt_is_cut_and_said(generator):
    prompt = "a red heart on a white ground beside a green book and two black cats in a house"
    unread = generator.unread(prompt)
    read = prompt.removesuffix(unread)
    assert generator.tokenizer.count(read.rstrip()) <= TEXT_LEN < generator.tokenizer.count(read + unread.split()[0])
    with pytest.warns(UserWarning, match=f"'{unread}' is not read"):
        assert len(generator(prompt, num_images=1)) == 1


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(generator, prompt):
    with pytest.raises(ValueError, match="prompt is empty"):
        generator(prompt)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"num_images": 0},
            {"best": 0},
            {"num_images": 2.5},
            {"num_images": True},
            {"top_k": -1},
            {"top_k": 2**64},
            {"seed": None},
        ),
        *({"top_p": 1.1}, {"top_p": -0.1}, {"top_p": math.nan}, {"seed": -1}, {"seed": 2**64}, {"guidance": -0.5}),
        *({"temperature": value} for value in (None, -1.0, math.nan, 1e300)),
    ],
)
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Settings(**wrong)


def test_more_cannot_be_kept_than_are_drawn():
    with pytest.raises(ValueError, match="the best 9 of 8 candidates; draw more or keep fewer"):
        Settings(num_images=8, best=9)
    assert Settings(num_images=8, best=8).num_best == 8


@pytest.mark.parametrize(("num_images", "kept"), [(128, 4), (4, 4), (2, 2), (1, 1)])
def test_four_are_kept_unless_told_or_all_where_fewer_are_drawn(num_images, kept):
    assert Settings(num_images=num_images).num_best == kept


def test_a_batch_size_below_one_is_refused(generator):
    with pytest.raises(ValueError, match="batch_size=0"):
        generator("a house", batch_size=0)


def test_an_unusable_device_is_refused(model_folder):
    with pytest.raises(ValueError, match="device='toaster'"):
        Generator.from_folder(model_folder, device="toaster")


def hash_again(folder, *names):
    content = json.loads((folder / "config.json").read_text())
    content["parts"] |= {name: sha256_file(folder / name) for name in names}
    (folder / "config.json").write_text(json.dumps(content))


def test_another_vqgan_than_the_trained_one_is_refused(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tiny_vqgan(seed=1, codebook_size=CODEBOOK_SIZE).save(folder / "vqgan")
    hash_again(folder, "vqgan/config.json", "vqgan/model.safetensors")
    with pytest.raises(ValueError, match="not the VQGAN on whose codes"):
        Generator.from_folder(folder)


def test_parts_that_do_not_fit_are_refused(generator):
    with pytest.raises(ValueError, match="tokenizer has"):
        Generator(tiny_dalle(text_vocab_size=20), generator.tokenizer, generator.vqgan)


def codes_of(pictures):
    return torch.stack([picture.codes for picture in sorted(pictures, key=lambda picture: picture.index)])


def test_a_model_draws_with_the_guidance_of_its_folder_unless_told_otherwise(model_folder, tmp_path):
    pack_model(model_folder, tmp_path / "guided", guidance=3.0)
    guided, plain = (Generator.from_folder(folder, device="cpu") for folder in (tmp_path / "guided", model_folder))
    few = {"num_images": 2, "best": 2}
    assert torch.equal(codes_of(guided("a red heart", **few)), codes_of(plain("a red heart", guidance=3.0, **few)))
    assert torch.equal(codes_of(guided("a red heart", guidance=1.0, **few)), codes_of(plain("a red heart", **few)))
    assert not torch.equal(codes_of(guided("a red heart", **few)), codes_of(plain("a red heart", **few)))


def test_the_command_takes_the_guidance_of_the_folder(model_folder, tmp_path):
    pack_model(model_folder, tmp_path / "guided", guidance=3.0)
    for options, taken in (((), 3.0), (("--guidance", "1"), 1.0)):
        few = ("--num-images", "2", "--device", "cpu", *options)
        with pytest.raises(SystemExit) as ended:
            main(["generate", "a red heart", "--model", f"{tmp_path / 'guided'}", "--out", f"{tmp_path / 'out'}", *few])
        assert ended.value.code == 0
        assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["guidance"] == taken


def test_a_folder_without_vqgan_is_refused(model_folder, tmp_path):
    tokenizer = model_folder / "tokenizer.json"
    save_model(load_model(model_folder), tmp_path / "bare")
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Generator.from_folder(tmp_path / "bare")
    save_model(load_model(model_folder), tmp_path / "bare", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"vqgan/config\.json is missing; .* dalle-lean pack .* OUT --vqgan FOLDER"):
        Generator.from_folder(tmp_path / "bare")


def test_a_generator_tells_which_words_its_model_has_not_learnt(model_folder_with_vocabulary):
    generator = Generator.from_folder(model_folder_with_vocabulary, device="cpu", scorer="none")
    assert generator.unknown_words("a zeppelin beside two red hearts") == ["zeppelin", "beside"]
    assert generator.unknown_words("please draw two black cats") == []
    generator.vocabulary = None  # as without a vocabulary.json
    assert generator.unknown_words("a zeppelin") is None


def test_a_vocabulary_that_is_none_is_refused_by_name(model_folder_with_vocabulary, tmp_path):
    folder = shutil.copytree(model_folder_with_vocabulary, tmp_path / "model")
    (folder / "vocabulary.json").write_text("{}")
    hash_again(folder, "vocabulary.json")
    with pytest.raises(ValueError, match=r"vocabulary\.json is not of the format"):
        Generator.from_folder(folder, device="cpu")


def test_loading_hashes_every_part_once(model_folder, monkeypatch):
    hashed = []
    for module in ("io.model_folder", "clip.scorer"):
        monkeypatch.setattr(
            f"dalle_lean.{module}.sha256_file", lambda path: hashed.append(Path(path)) or sha256_file(path)
        )
    monkeypatch.setattr("dalle_lean.images.vqgan.VQGAN.fingerprint", lambda vqgan, dtype=None: hashed.append("weights"))
    Generator.from_folder(model_folder, device="cpu")
    assert "weights" not in hashed
    assert sorted(hashed) == sorted(model_folder / name for name in hashed_parts(model_folder))


@pytest.mark.parametrize("name", ["model.safetensors", "vqgan/model.safetensors", "clip/model.safetensors"])
def test_a_part_with_one_altered_byte_is_refused(model_folder, tmp_path, name):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not the file this model was saved with"):
        Generator.from_folder(folder)


PROMPTS = ["a red heart", "a green book", "two black cats"]


def by_request(progress):
    return {step.request: step.pictures for step in progress if step.pictures is not None}


@pytest.mark.parametrize("batch_size", [4, 8, 24])
@pytest.mark.parametrize("counts", [(4, 4, 4), (3, 6, 9), (3, 11, 4)])
def test_prompts_drawn_together_give_what_each_gives_alone(generator, batch_size, counts):
    settings = [
        Settings(num_images=count, best=2, top_k=0, seed=seed, guidance=2.0 if seed == 2 else 1.0)
        for seed, count in enumerate(counts)
    ]
    requests = [Request(prompt, setting) for prompt, setting in zip(PROMPTS, settings, strict=True)]
    together = by_request(generator.draw(requests, batch_size))
    assert sorted(together) == [0, 1, 2]
    for index, (prompt, setting) in enumerate(zip(PROMPTS, settings, strict=True)):
        alone = generator.run(prompt, setting)
        assert pixels(together[index]) == pixels(alone)
        assert named(together[index]) == named(alone)


def test_some_pictures_of_a_prompt_are_those_that_are_drawn_with_all_others(generator):
    whole = generator.run("a house", Settings(num_images=24, best=24, top_k=0, seed=5))
    some = Settings(num_images=8, best=8, top_k=0, seed=5)
    requests = [Request("a house", some, first=16), Request("a car", some), Request("a house", some, first=8)]
    drawn = by_request(generator.draw(requests))
    by_index = {picture.index: picture for picture in whole}
    for number, first in ((0, 16), (2, 8)):
        assert sorted(picture.index for picture in drawn[number]) == list(range(first, first + 8))
        assert pixels(drawn[number]) == pixels([by_index[picture.index] for picture in drawn[number]])
        assert all(picture.score == by_index[picture.index].score for picture in drawn[number])


def test_each_prompt_of_a_batch_shows_its_own_codes(generator):
    settings = Settings(num_images=3, best=3, top_k=0, seed=1)
    steps = list(generator.draw([Request(prompt, settings) for prompt in PROMPTS]))
    for number, pictures in by_request(steps).items():
        shown = [step.codes for step in steps if step.request == number and step.codes is not None]
        assert [codes.shape[1] for codes in shown] == [4, 8, 12, 16]
        assert sorted(shown[-1].tolist()) == sorted(picture.codes.tolist() for picture in pictures)


def test_a_picture_is_completed_from_its_upper_part(generator):
    codes = generator("a house", **SETTINGS)[0].codes
    *_, last = generator.draw([Request("a car", Settings(num_images=3, seed=8, top_k=0), codes[:8])])
    assert all(torch.equal(picture.codes[:8], codes[:8]) for picture in last.pictures)
    assert len({tuple(picture.codes.tolist()) for picture in last.pictures}) == 3


@pytest.mark.parametrize(
    "start",
    [torch.tensor([64]), torch.tensor([-1]), torch.zeros(16, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)],
)
def test_a_start_that_cannot_be_is_refused(generator, start):
    with pytest.raises(ValueError, match="start has"):
        next(generator.draw([Request("a car", Settings(num_images=1), start)]))


def test_an_empty_start_is_none(generator):
    settings = Settings(num_images=2)
    requests = [Request("a car", settings, torch.zeros(0, dtype=torch.long)), Request("a house", settings)]
    together = by_request(generator.draw(requests))
    assert pixels(together[0]) == pixels(generator.run("a car", settings))


def test_progress_does_not_count_given_codes(generator):
    steps = list(generator.draw([Request("a car", Settings(num_images=3), torch.zeros(8, dtype=torch.long))]))
    assert {step.total for step in steps} == {3 * 8}
    assert [step.done for step in steps if step.note == "drawing"] == [3 * 4, 3 * 8]


def test_a_read_picture_is_what_the_vqgan_encodes(generator):
    image = generator("a house", **SETTINGS)[0].image
    encoded = generator.vqgan.encode(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255)[0]
    assert torch.equal(generator.read_picture(image), encoded)


def test_a_preview_shows_the_rows_that_are_drawn_and_nothing_below(generator):
    codes = torch.stack([picture.codes for picture in generator("a house", **SETTINGS)])
    for image in generator.preview(codes[:, :9]):  # two rows of four, and one code of the third
        alpha = np.array(image)[:, :, 3]
        assert (alpha[:16] == 255).all()
        assert (alpha[16:] == 0).all()
    assert generator.preview(codes[:, :3]) == []
    finished = [np.array(image)[:, :, :3].tobytes() for image in generator.preview(codes)]
    assert finished == [image.tobytes() for image in decode(generator, codes)]


def test_where_memory_runs_out_half_as_many_are_drawn_at_once(generator, monkeypatch):
    expected = generator("a car", **SETTINGS)
    tried = []

    def cramped(decoder, prompts, rows):
        tried.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sample_codes(decoder, prompts, rows)

    monkeypatch.setattr("inference.generator.sample_codes", cramped)
    pictures = generator("a car", **SETTINGS)
    assert tried[:3] == [11, 5, 2]
    assert pixels(pictures) == pixels(expected)
    tried.clear()
    assert pixels(generator("a car", batch_size=4, **SETTINGS)) == pixels(expected)
    assert tried == [4, 2, 2, 2, 2, 3]  # later batches do not run out of memory again


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        ("DefaultCPUAllocator: can't allocate memory", MemoryError, "not enough memory to draw even one picture"),
        ("something else", RuntimeError, "something else"),
    ],
)
def test_only_a_lack_of_memory_for_one_picture_is_called_that(generator, monkeypatch, failure, kind, message):
    def fail(*_):
        raise RuntimeError(failure)

    monkeypatch.setattr("inference.generator.sample_codes", fail)
    with pytest.raises(kind, match=message):
        generator("a car", num_images=3)


@pytest.mark.parametrize("fastest", ["fp32", "bf16"])
def test_the_faster_precision_is_the_default(model_folder, monkeypatch, fastest):
    monkeypatch.setattr("inference.generator.fastest_precision", lambda device: fastest)
    assert Generator.from_folder(model_folder, device="cpu").decoder.precision == fastest
