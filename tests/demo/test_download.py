"""A downloaded picture says itself how to draw it again."""

import json
from dataclasses import replace

import torch
from PIL import Image

from demo.actions import write_pictures
from inference.request import Request, Settings


def draw(service, start=None):
    settings = Settings(num_images=6, best=2, top_k=0, top_p=1.0, seed=9)
    *_, last = service.draw(Request("a red heart ♥ <b>", settings, start))
    return last


def redrawn(service, path):
    """The picture drawn again from nothing but its file."""
    text = Image.open(path).text
    settings = json.loads(text["settings"])
    assert settings.pop("model_sha256") == service.generator.model_sha256
    assert (settings.pop("precision"), settings.pop("scorer")) == ("fp32", "CLIP")
    start = torch.tensor(settings.pop("start")) if "start" in settings else None
    *_, last = service.generator.draw([Request(text["prompt"], Settings(**settings), start)])
    return next(picture for picture in last.pictures if picture.index == int(text["index"]))


def test_the_file_is_the_picture_with_what_draws_it_again(service, tmp_path):
    drawn = draw(service)
    for path, picture in zip(write_pictures(drawn, tmp_path), drawn.pictures, strict=True):
        image = Image.open(path)
        assert image.convert("RGB").tobytes() == picture.image.tobytes()
        assert (image.text["prompt"], image.text["seed"]) == ("a red heart ♥ <b>", "9")
        assert float(image.text["score"]) == round(picture.score, 6)
        assert redrawn(service, path).image.tobytes() == picture.image.tobytes()


def test_a_continued_picture_carries_the_codes_it_was_given(service, tmp_path):
    drawn = draw(service, start=torch.arange(8))
    path = write_pictures(drawn, tmp_path)[0]
    assert redrawn(service, path).image.tobytes() == drawn.pictures[0].image.tobytes()


def test_no_file_name_holds_what_a_user_typed(service, tmp_path):
    drawn = draw(service)
    hostile = replace(drawn, request=replace(drawn.request, prompt="../../etc/passwd"))
    names = {path.relative_to(tmp_path).as_posix() for path in write_pictures(hostile, tmp_path)}
    assert names == {f"dalle_lean-seed9-no{picture.index}.png" for picture in drawn.pictures}
