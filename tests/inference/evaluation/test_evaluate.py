"""The whole evaluation of a tiny model, from the command line to the page."""

import json
from html.parser import HTMLParser

import pytest

from dalle_lean.cli import main
from inference.evaluation.asking import Answer, ask_all
from inference.evaluation.evaluate import Sizes
from inference.generator import Settings
from tests.inference.evaluation.drawings import write_data


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
    few = ("--best-of", "1,2", "--questions", 2, "--captions", 4, "--pictures", 4, "--grid", 1, "--device", "cpu")
    assert run(model_folder, "--data", data, "--out", out, *few) == 0
    return out


def test_the_report_tells_every_measure(report):
    content = json.loads((report / "report.json").read_text())
    assert set(content["attributes"]) == {"ground", "paint", "size", "side"}
    for found in content["attributes"].values():
        assert found["on_drawings"]["share"] == 1
        assert set(found["best_of"]) == {"1", "2"}
    assert content["bits_per_code"]["model"] > 0
    assert content["tokenizer"]["psnr_db"] > 0
    judged = content["judged"]
    assert judged["right_caption_first_of_50"]["best_of"]["2"]["of"] == 4
    assert judged["right_thing_first_of_200"]["on_drawings"]["of"] == 2
    assert set(judged["kernel_distance"]) == {"drawn", "floor", "trained"}
    assert len(judged["nearest_training_picture"]) == 4
    assert len(content["grid"]) == 6


def test_the_page_needs_nothing_but_itself(report):
    tags = Tags((report / "report.html").read_text())
    assert tags.found.count("img") >= 7 + 2 * 4
    assert tags.found.count("svg") == 1
    assert all(source.startswith("data:image/png;base64,") for source in tags.sources)


def test_the_same_command_writes_the_same_report(report, model_folder, data, tmp_path):
    few = ("--best-of", "1,2", "--questions", 2, "--captions", 4, "--pictures", 4, "--grid", 1, "--device", "cpu")
    assert run(model_folder, "--data", data, "--out", tmp_path, *few) == 0
    assert (tmp_path / "report.json").read_bytes() == (report / "report.json").read_bytes()


def test_the_best_of_a_few_is_the_best_ranked_of_the_first(generator):
    (answer,) = ask_all(generator, ["a red circle"], Settings(num_images=4, best=4))
    assert [picture.index for picture in answer.pictures] == [0, 1, 2, 3]
    assert answer.best_of(1) is answer.pictures[0].image
    best = max(answer.pictures[:3], key=lambda picture: picture.score)
    assert answer.best_of(3) is best.image
    alone = Answer(answer.pictures[:1])
    assert alone.best_of(16) is alone.pictures[0].image


@pytest.mark.parametrize("counts", [(), (0,), (4, 1), (2, 2)])
def test_numbers_of_pictures_that_make_no_curve_are_refused(counts):
    with pytest.raises(ValueError, match="best_of"):
        Sizes(best_of=counts)


def test_a_folder_without_data_is_one_line(model_folder, tmp_path, capsys):
    assert run(model_folder, "--data", tmp_path, "--out", tmp_path / "out", "--device", "cpu") == 2
    assert "make data" in capsys.readouterr().err
