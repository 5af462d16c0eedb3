"""The whole evaluation of a tiny model, from the command line to the page."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image, ImageOps

from dalle_lean.cli import main
from inference.evaluation.clip_metrics import make_judge, same_clip
from inference.evaluation.eval_data import EvalConfig
from inference.evaluation.evaluate import evaluate
from inference.evaluation.prompt_sampling import PromptSampler, Samples, prompt_seed
from inference.evaluation.questions import ATTRIBUTES
from inference.evaluation.report import SHEET_CAPTION_LINES, SHEET_TILE_SIDE, write_report
from inference.gallery import LINE_HEIGHT, MARGIN, tile_sheet
from inference.request import Picture, Settings
from tests.inference.evaluation.drawings import HELDOUT, line, write_data

SIDE, LINES = SHEET_TILE_SIDE, SHEET_CAPTION_LINES
FEW = "--best-of 1,2 --curve 1,3 --questions 2 --captions 4 --pictures 9 --grid 1 --device cpu"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.sources = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "emoji")


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, arguments)])
    return ended.value.code


@pytest.fixture(scope="module")
def report(model_folder, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report"
    assert run(model_folder, "--data", data, "--out", out, *FEW.split()) == 0
    return out


def test_the_report_tells_every_measure(report):
    content = json.loads((report / "report.json").read_text())
    assert set(content["attributes"]) == {"ground", "paint", "size", "side", "binding", "count"}
    for found in content["attributes"].values():
        assert found["on_drawings"]["share"] == 1
        assert set(found["best_of"]) == {"1", "2"}
    assert content["bits_per_code"]["model"] > 0
    assert content["tokenizer"]["psnr_db"] > 0
    judged = content["judged"]
    assert judged["right_caption_first"]["best_of"]["2"]["of"] == judged["right_caption_first"]["among"] == 4
    assert content["right_thing_first"] == []
    assert set(judged["kernel_distance"]) == {"drawn", "floor", "trained", "pictures"}
    assert judged["kernel_distance"]["pictures"] == {"real": 4, "drawn": 4, "floor": 4, "trained": 3}
    assert judged["judge"] == "CLIP, which chose the pictures too"
    for copies in judged["nearest_training_picture"].values():
        assert len(copies) == 4
        assert {copy["file"] for copy in copies} <= {"0.png", "1.png", "2.png", "3.png"}
        assert all(-1 <= copy["similarity"] <= 1.001 for copy in copies)
    assert [claim["prompts"] for claim in content["claims"]] == [9, 6, 6, 6]
    assert content["claims"][0]["text"] == "To choose the best 1 of 3 pictures by CLIP helps"
    assert {name: set(found) for name, found in content["curve"].items()} == {name: {"1", "3"} for name in ATTRIBUTES}
    assert content["settings"]["guidance"] == 1
    assert content["sizes"]["questions"] == 2
    assert len(content["grid"]) == 6
    assert content["frechet_inception_distance"] is None


def test_the_page_needs_nothing_but_itself(report):
    tags = Tags((report / "report.html").read_text())
    assert tags.found.count("img") >= 7 + 2 * 4
    assert tags.found.count("svg") == 1
    assert all(source.startswith("data:image/png;base64,") for source in tags.sources)


def test_the_pictures_of_the_captions_are_on_a_sheet_of_their_own(report):
    with Image.open(report / "pictures.png") as sheet:
        assert sheet.size == tile_sheet([Image.new("RGB", (32, 32))] * 4, ["a"] * 4, SIDE, LINES).size
        first = sheet.crop((MARGIN, MARGIN, MARGIN + SIDE, MARGIN + SIDE))
    assert first.getextrema() != ((255, 255),) * 3


def test_captions_stand_below_their_pictures_in_rows_of_four():
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    sheet = tile_sheet([red, red, red, red, blue], ["", "", "", "", "a blue square " * 9], SIDE, LINES)
    cell = (SIDE + MARGIN, SIDE + LINES * LINE_HEIGHT + MARGIN)
    assert sheet.getpixel((MARGIN + 3 * cell[0], MARGIN)) == (255, 0, 0)
    assert sheet.getpixel((MARGIN, MARGIN + cell[1])) == (0, 0, 255)
    below = (0, MARGIN + cell[1] + SIDE + 1, sheet.width, sheet.height)
    written = ImageOps.invert(sheet.crop(below).convert("L")).getbbox()
    assert written is not None
    assert written[2] <= MARGIN + SIDE
    assert written[3] < below[3] - below[1]


def test_the_page_says_why_guidance_is_left_out(report):
    told = "Guidance is left out: the model folder does not say whether the model was trained with caption dropout."
    assert told in (report / "report.html").read_text()


def test_the_same_command_writes_the_same_report(report, model_folder, data, tmp_path):
    assert run(model_folder, "--data", data, "--out", tmp_path, *FEW.split()) == 0
    assert (tmp_path / "report.json").read_bytes() == (report / "report.json").read_bytes()


def test_only_captions_of_known_things_that_training_never_saw_are_drawn(generator, tmp_path):
    data = write_data(tmp_path / "emoji")
    with (data / "heldout" / "metadata.jsonl").open("a") as listing:
        listing.write(json.dumps({"file_name": "0.png", **line("a red ball", "drawing")}) + "\n")
    few = EvalConfig(best_of=(1,), curve_questions=0, grid_questions=0, questions=1, captions=20, pictures=20)
    drawn = evaluate(generator, data, few).clip.captions
    assert sorted(drawn) == sorted(facts["text"] for facts, _ in HELDOUT if facts["held_out"] != "concept")
    assert "a red ball" not in drawn


def test_every_prompt_has_noise_of_its_own(generator):
    settings = Settings(num_images=1)
    seeds = {prompt_seed(seed, prompt) for seed in (0, 1) for prompt in ("a red circle", "a blue circle")}
    assert len(seeds) == 4
    first, again = (PromptSampler(generator).draw(["a red circle"], "", (1,))[0].best_of[1] for _ in range(2))
    expected = generator.run("a red circle", replace(settings, seed=prompt_seed(0, "a red circle")))[0].image
    assert first.tobytes() == again.tobytes() == expected.tobytes()


def test_the_ranker_is_known_by_its_weights_whatever_its_name(generator, model_folder):
    same = make_judge(str(model_folder / "clip"), torch.device("cpu"))
    assert same_clip(same, generator.scorer)
    with torch.no_grad():
        next(same.model.parameters()).add_(1)
    assert not same_clip(same, generator.scorer)


def test_the_best_of_a_few_is_the_best_ranked_of_the_first(generator):
    seed = prompt_seed(0, "a red circle")
    pictures = generator.run("a red circle", Settings(num_images=4, best=4, seed=seed))
    (answered,) = PromptSampler(generator).draw(["a red circle"], "", (1, 3, 4))
    best_of_3 = max((picture for picture in pictures if picture.index < 3), key=lambda picture: picture.score)
    first = next(picture for picture in pictures if picture.index == 0)
    for count, expected in ((1, first), (3, best_of_3), (4, pictures[0])):
        assert answered.best_of[count].tobytes() == expected.image.tobytes()


def test_of_many_pictures_only_the_few_are_kept_that_are_looked_at():
    ranked = [Picture(f"picture {index}", score=float(index), index=index, codes=None) for index in range(127, -1, -1)]
    answered = Samples.select(ranked, (1, 4, 16, 64, 128))
    assert answered.best_of == {count: f"picture {count - 1}" for count in (1, 4, 16, 64, 128)}
    assert answered.first == ("picture 0", "picture 1", "picture 2", "picture 3")
    assert answered.best == ("picture 127", "picture 126", "picture 125", "picture 124")


class Brightness:
    """Stands for the Inception network."""

    def features(self, pixels, on_batch):
        on_batch(len(pixels))
        return pixels.float().mean(dim=(2, 3))


@pytest.fixture(scope="module")
def without_clip(generator_without_clip, data, tmp_path_factory):
    """The evaluation and its page."""
    sizes = EvalConfig(best_of=(1, 2), questions=1, captions=2, pictures=9, grid_questions=0)
    found, out = evaluate(generator_without_clip, data, sizes, inception=Brightness()), tmp_path_factory.mktemp("out")
    write_report(out, found, "Evaluation of <b>&")
    return found, (out / "report.html").read_text()


def test_a_model_without_a_clip_shows_its_first_picture(without_clip):
    found, content = without_clip
    assert (found.ranker, found.clip, found.settings.num_images) == (None, None, 1)
    assert all(set(attribute.by_best_of) == {1} for attribute in found.attributes.values())
    assert found.comparisons == []
    assert "Nothing ranked the pictures: one was drawn for each prompt." in content
    assert "<svg" not in content


def test_what_the_page_quotes_is_escaped(without_clip):
    assert "<h1>Evaluation of &lt;b&gt;&amp;</h1>" in without_clip[1]


def test_the_frechet_distances_are_of_as_many_pictures_of_each(without_clip):
    found, content = without_clip
    assert found.inception.pictures == {"real": 4, "drawn": 2, "floor": 2, "trained": 2}
    assert found.inception.drawn > 0
    assert "Frechet inception distance of 2 pictures to 4 held-out drawings" in content


def test_guidance_is_in_the_report_where_the_model_learnt_without_captions(generator, data, tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "caption_dropout", 0.1)
    few = EvalConfig(best_of=(1,), curve_questions=0, questions=1, captions=2, pictures=9, grid_questions=1)
    found = evaluate(generator, data, few)
    write_report(tmp_path, found, "Evaluation")
    assert [setting.guidance for setting in found.grid] == [1, 1, 1, 1, 1, 1, 2, 4, 2]
    assert "Guidance is left out" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("sizes", [{"captions": 1}, {"pictures": 3}, {"grid_questions": -1}, {"curve_questions": -1}])
def test_too_few_to_measure_are_refused(sizes):
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        EvalConfig(**sizes)


@pytest.mark.parametrize("counts", [(), (0,), (4, 1), (2, 2)])
def test_numbers_of_pictures_that_make_no_curve_are_refused(counts):
    for name in ("best_of", "curve"):
        with pytest.raises(ValueError, match=name):
            EvalConfig(**{name: counts})


def test_too_few_drawings_of_known_things_are_told_before_anything_is_drawn(generator, data):
    with pytest.raises(ValueError, match=r"at least 2 and 4 are needed"):
        evaluate(generator, data, EvalConfig(pictures=4, captions=2, train_pictures=2), seed=3)


def test_too_few_training_pictures_of_the_kinds_to_draw_are_told_before_anything_is_drawn(generator, data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "data")
    lines = [json.loads(text) for text in (folder / "train" / "metadata.jsonl").read_text().splitlines()]
    for number, facts in enumerate(lines):
        facts["kind"] = "counted" if number else "scene"
    (folder / "train" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"train: [01] of \d+ pictures are left"):
        evaluate(generator, folder, EvalConfig(questions=1, captions=4, pictures=8))


def test_two_classifiers_of_one_name_are_one_line(model_folder, data, tmp_path, capsys):
    folders = [tmp_path / name / "judge" / "classifier" for name in ("a", "b")]
    options = [word for folder in folders for word in ("--classifier", folder)]
    assert run(model_folder, "--data", data, "--out", tmp_path / "report", *options) == 2
    assert "their runs are called judge, judge; must be different" in capsys.readouterr().err


def test_a_file_in_the_reports_place_is_one_line(model_folder, data, tmp_path, capsys):
    (tmp_path / "report").write_text("mine")
    assert run(model_folder, "--data", data, "--out", tmp_path / "report", "--device", "cpu") == 2
    assert "is a file; --out needs a folder" in " ".join(capsys.readouterr().err.split())


def test_a_folder_without_data_is_one_line(model_folder, tmp_path, capsys):
    assert run(model_folder, "--data", tmp_path, "--out", tmp_path / "out", "--device", "cpu") == 2
    assert "make data" in capsys.readouterr().err


def test_a_file_of_no_inception_weights_is_one_line(model_folder, data, tmp_path, capsys):
    (tmp_path / "noise.pth").write_bytes(b"noise")
    assert run(model_folder, "--data", data, "--inception", tmp_path / "noise.pth", "--device", "cpu") == 2
    told = capsys.readouterr().err
    assert "noise.pth cannot be read as the weights pt_inception-2015-12-05" in " ".join(told.split())
