"""What is left on disk: pictures, contact sheet, results, through the command a user types."""

import hashlib
import json
import re

import pytest
from PIL import Image

from dalle_lean.cli import main
from inference.gallery import contact_sheet, png_bytes, prompt_metadata, slug


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["generate", *map(str, arguments)])
    return stop.value.code


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_generate_leaves_pictures_contact_sheet_and_results(model_folder, tmp_path):
    assert run("a red heart", "--out", tmp_path, "--model", model_folder, "--num-images", 6, "--best", 2) == 0
    assert set(contents(tmp_path)) == {"00.png", "01.png", "contact_sheet.png", "results.json"}
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["prompt"] == "a red heart"
    assert results["settings"]["num_images"] == 6
    assert results["settings"]["seed"] == 0
    model_sha256 = hashlib.sha256((model_folder / "model.safetensors").read_bytes()).hexdigest()
    assert results["settings"]["model_sha256"] == model_sha256
    assert [picture["file"] for picture in results["pictures"]] == ["00.png", "01.png"]
    scores = [picture["score"] for picture in results["pictures"]]
    assert scores == sorted(scores, reverse=True)


def test_fewer_than_four_drawings_are_all_kept(model_folder, tmp_path):
    assert run("a red heart", "--out", tmp_path, "--model", model_folder, "--num-images", 2) == 0
    assert set(contents(tmp_path)) == {"00.png", "01.png", "contact_sheet.png", "results.json"}
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["best"] == 2


def test_keeping_more_than_are_drawn_is_a_mistake_and_writes_nothing(model_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("a red heart", "--out", out, "--model", model_folder, "--num-images", 2, "--best", 3) == 2
    assert capsys.readouterr().err == "error: cannot keep the best 3 of 2 candidates; draw more or keep fewer\n"
    assert not out.exists()


def test_results_name_the_codes_of_each_picture(model_folder, generator, tmp_path):
    settings = ("--num-images", 6, "--best", 2, "--precision", "fp32")
    run("a red heart", "--out", tmp_path, "--model", model_folder, *settings)
    results = json.loads((tmp_path / "results.json").read_text())
    for picture, line in zip(generator("a red heart", num_images=6, best=2), results["pictures"], strict=True):
        codes = picture.codes.numpy().astype("<i4")
        assert line["codes_sha256"] == hashlib.sha256(codes.tobytes()).hexdigest()
        assert Image.open(tmp_path / line["file"]).tobytes() == picture.image.tobytes()


def test_the_same_call_writes_the_same_bytes(model_folder, tmp_path):
    for name in ("first", "second"):
        arguments = ("--model", model_folder, "--num-images", 5, "--best", 3, "--seed", 3)
        assert run("a car", "--out", tmp_path / name, *arguments) == 0
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_a_picture_says_itself_how_it_was_drawn(model_folder, tmp_path):
    run("a red heart", "--out", tmp_path, "--model", model_folder, "--num-images", 5, "--best", 2, "--seed", 9)
    results = json.loads((tmp_path / "results.json").read_text())
    for line in results["pictures"]:
        with Image.open(tmp_path / line["file"]) as picture:
            said = picture.text
        assert set(said) == {"Software", "prompt", "seed", "settings", "model_sha256", "index", "score"}
        assert (said["prompt"], said["seed"], said["index"]) == ("a red heart", "9", str(line["index"]))
        assert float(said["score"]) == pytest.approx(line["score"], abs=1e-6)
        assert json.loads(said["settings"]) == results["settings"]
        assert said["model_sha256"] == results["settings"]["model_sha256"]
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        assert sheet.text["prompt"] == "a red heart"


def test_bytes_of_a_prompt_that_are_not_utf8_are_replaced(model_folder, tmp_path):
    assert run("caf\udce9", "--out", tmp_path, "--model", model_folder, "--num-images", 1) == 0
    assert json.loads((tmp_path / "results.json").read_text())["prompt"] == "caf?"


def test_another_programs_results_are_left_alone_before_anything_is_drawn(model_folder, tmp_path, capsys):
    (tmp_path / "results.json").write_text("one\ntwo\n")
    assert run("a red heart", "--out", tmp_path, "--model", model_folder, "--num-images", 1) == 2
    assert "drawing" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("", ""),
        ("a cat\nand a dog", "a cat\nand a dog"),
        ("Käse 猫 🐈", "Käse 猫 🐈"),
        ("end\0not", "end\ufffdnot"),
        ("byte \udcff", "byte \ufffd"),
    ],
)
def test_whatever_is_typed_stands_in_the_chunk(value, read, tmp_path):
    image = Image.new("RGBA", (4, 4))
    (tmp_path / "x.png").write_bytes(png_bytes(image, {"prompt": value}))
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.text == {"prompt": read}
        assert picture.tobytes() == image.tobytes()


def test_the_chunks_come_before_the_pixels_so_that_a_reader_need_not_decode(tmp_path):
    content = png_bytes(Image.new("RGB", (4, 4)), {"prompt": "a cat"})
    assert content.index(b"iTXt") < content.index(b"IDAT")
    assert content == png_bytes(Image.new("RGB", (4, 4)), {"prompt": "a cat"})


def test_a_model_made_of_parts_has_no_hash_to_tell():
    assert "model_sha256" not in prompt_metadata("a cat", {"seed": 0, "model_sha256": None})


def test_several_prompts_get_a_numbered_folder_each(model_folder, tmp_path):
    arguments = ("--out", tmp_path, "--model", model_folder, "--num-images", 2, "--best", 1)
    assert run("A red heart!", "Two cats", *arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00-a-red-heart", "01-two-cats"]


def test_a_shorter_gallery_leaves_no_picture_of_the_longer_one_before(model_folder, tmp_path):
    for best in (4, 2):
        run("a car", "--out", tmp_path, "--model", model_folder, "--num-images", 4, "--best", best)
    assert sorted(path.name for path in tmp_path.glob("0*.png")) == ["00.png", "01.png"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("A red heart!", "a-red-heart"), ("Crème brûlée", "creme-brulee"), ("../../etc", "etc"), ("猫", "prompt")],
)
def test_slugs_are_safe_file_names(prompt, expected):
    assert slug(prompt) == expected
    assert len(slug(prompt * 50)) <= 48


def test_a_contact_sheet_holds_every_picture_enlarged(generator):
    pictures = generator("a red heart", num_images=6, best=6)
    sheet = contact_sheet("a red heart", pictures)
    assert sheet.width > 4 * 256
    assert sheet.height > 2 * 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((" ",), "prompt is empty"),
        (("a car", "--top-p", "7"), r"top_p=7"),
        (("a car", "--temperature", "-1"), r"temperature=-1.0: it must be from 0, which .* to 1,000,000"),
        (("a car", "--model", "nowhere"), "no model folder at nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, message):
    assert run(*arguments, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert re.search(message, said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "/proc/x"), "/proc/x: no file can be created in /proc; name another folder"),
        (("--start", "/nope"), "--start: there is no file /nope"),
        (("--start", "/proc"), "--start: /proc is a folder; name a picture"),
        (("--start", "/dev/null"), "--start: /dev/null: picture missing, it must be a file of at most 64 MiB"),
        (("--start", __file__), f"--start: {__file__} is not a picture that can be read (JPEG, PNG, "),
        (("--out", ""), "an argument is empty"),
        (("--precision", "fp17"), "precision='fp17': it must be one of fp32"),
        (("--scorer", "hello"), "scorer='hello': must be clip, none"),
        (("--device", "tpu"), "device='tpu'"),
    ],
)
def test_a_mistake_in_an_option_is_noticed_before_the_model_is_sought(
    tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr("inference.generator.find_model", lambda _: pytest.fail("looked for the model"))
    assert run("a car", "--out", tmp_path / "out", *arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_long_prompt_is_drawn_and_the_cut_is_said(model_folder, tmp_path, capsys):
    prompt = "a red heart on a white ground beside a green book and two black cats in a house"
    assert run(prompt, "--out", tmp_path, "--model", model_folder, "--num-images", 1) == 0
    assert re.search("the prompt is too long; I do not read '.*black cats in a house'", capsys.readouterr().err)
    assert (tmp_path / "00.png").exists()


FEW = ("--num-images", 2, "--best", 1, "--device", "cpu", "--scorer", "none")


def test_a_long_prompt_is_shortened_wherever_it_is_shown(model_folder, tmp_path, capsys):
    prompt = " ".join(["a red heart"] * 170)
    assert run(prompt, "--out", tmp_path, "--model", model_folder, *FEW) == 0
    said = capsys.readouterr()
    assert max(map(len, [*said.out.splitlines(), *said.err.splitlines()])) < 200 + len(str(tmp_path))
    assert "of 'a red heart a red" in said.out
    assert json.loads((tmp_path / "results.json").read_text())["prompt"] == prompt
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        assert sheet.height < 400


@pytest.mark.parametrize(
    ("top_k", "said"),
    [("0", "'a heart'\n"), ("1", "'a heart', all alike: other words make others\n")],
)
def test_pictures_that_are_all_alike_are_called_so(model_folder, tmp_path, capsys, top_k, said):
    assert run("a heart", "--out", tmp_path, "--model", model_folder, *FEW, "--best", 2, "--top-k", top_k) == 0
    assert capsys.readouterr().out.endswith(said)


def test_fewer_candidates_than_asked_for_are_said_where_the_model_has_no_clip(
    model_folder_without_clip, model_folder, tmp_path, capsys
):
    eight = ("--num-images", 8, "--top-k", 0)
    assert run("a heart", "--out", tmp_path / "0", "--model", model_folder_without_clip, *eight) == 0
    assert "this model has no CLIP to rank 8 candidates, so only 4 are drawn" in capsys.readouterr().err
    for number, options in enumerate(([model_folder_without_clip, "--scorer", "none"], [model_folder]), start=1):
        assert run("a heart", "--out", tmp_path / str(number), "--model", *options, *eight) == 0
        assert "CLIP" not in capsys.readouterr().err


def test_unknown_words_are_named_in_a_line_for_each_prompt(model_folder_with_vocabulary, tmp_path, capsys):
    prompts = ("a zeppelin", "two red hearts", "ein rotes Herz", "🧶", "❤️", "a herat")
    assert run(*prompts, "--out", tmp_path, "--model", model_folder_with_vocabulary, *FEW) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "'❤️': I read this as 'heart'" in lines
    said = [line for line in lines if "learnt" in line]
    assert said == [
        "'a zeppelin': I have not learnt to draw: zeppelin",
        "'ein rotes Herz': I have not learnt to draw: ein, rotes and herz",
        "'🧶': I have not learnt to draw: 🧶",
        "'a herat': I have not learnt to draw: herat; did you mean heart?",
    ]
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/results.json"))]
    assert [result["unknown_words"] for result in results] == [
        *(["zeppelin"], [], ["ein", "rotes", "herz"], ["🧶"], [], ["herat"])
    ]
    assert len(list(tmp_path.glob("*/00.png"))) == 6


def test_a_prompt_without_quotes_is_told_that_it_needs_them(model_folder, tmp_path, capsys):
    for number, (prompts, said) in enumerate(((["red", "heart"], True), (["a red heart", "heart"], False))):
        assert run(*prompts, "--out", tmp_path / str(number), "--model", model_folder, *FEW) == 0
        assert ("a prompt of several words needs quotes" in capsys.readouterr().err) == said


def test_of_a_long_prompt_the_line_names_a_few_words(model_folder_with_vocabulary, tmp_path, capsys):
    prompt = " ".join(f"word{number}" for number in range(260))[:2000]
    assert run(prompt, "--out", tmp_path, "--model", model_folder_with_vocabulary, *FEW) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "learnt" in line]
    unknown = json.loads((tmp_path / "results.json").read_text())["unknown_words"]
    assert unknown == prompt.split()
    assert said == f"I have not learnt to draw: {', '.join(unknown[:6])} and {len(unknown) - 6} more words"


def test_a_model_without_a_vocabulary_says_nothing(model_folder, tmp_path, capsys):
    assert run("a zeppelin", "--out", tmp_path, "--model", model_folder, *FEW) == 0
    assert "learnt" not in capsys.readouterr().err
    assert json.loads((tmp_path / "results.json").read_text())["unknown_words"] is None


def test_pictures_of_one_colour_are_called_so(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("inference.ranking.BLANK_SHARE", 2.0)
    assert run("a heart", "--out", tmp_path, "--model", model_folder, *FEW) == 0
    assert "all of one colour: the model draws nothing for these words" in capsys.readouterr().out


def test_pictures_of_earlier_prompts_in_the_same_folder_stay_and_are_said(model_folder, tmp_path, capsys):
    asked = ("--out", tmp_path, "--model", model_folder, "--num-images", 1)
    run("a red heart", *asked)
    run("a cat", *asked)
    assert "also holds" not in capsys.readouterr().err  # the cat took the heart's place
    run("a cat", "a dog", *asked)
    assert f"{tmp_path} also holds the pictures of 1 earlier prompt" in capsys.readouterr().err.replace("\n", "")
    assert {"00.png", "00-a-cat/00.png", "01-a-dog/00.png"} <= {*contents(tmp_path)}


def test_results_of_another_program_beside_the_pictures_do_not_fail_the_command(model_folder, tmp_path):
    (tmp_path / "2026-trip").mkdir()
    (tmp_path / "2026-trip" / "results.json").write_text("not JSON")
    assert run("a red heart", "--out", tmp_path, "--model", model_folder, "--num-images", 1) == 0
