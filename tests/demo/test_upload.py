"""Uploaded files may be anything."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import islice
from threading import Event

import pytest
from PIL import Image

from demo import progress_views as views
from demo.form import read_request
from demo.service.drawing_service import MAX_UPLOAD_BYTES, UPLOADS_WAITING, upload_pixels
from demo.service.scheduler import Busy
from tests.demo.conftest import TAB, encoded, named_actions


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_common_formats_are_read(kind):
    assert upload_pixels(encoded(Image.new("RGB", (40, 30), "red"), kind), 8).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("upload", "said"),
    [
        (b"", "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (encoded(Image.new("RGB", (40, 30)), "PPM"), "not a picture"),
        (encoded(Image.new("RGB", (40, 30)), "EPS"), "not a picture"),
        (encoded(Image.new("1", (20000, 20000)), "PNG"), "too large"),
        (bytes(MAX_UPLOAD_BYTES + 1), "16 MiB; the limit is 16"),
    ],
)
def test_everything_else_is_refused_in_a_sentence(upload, said):
    with pytest.raises(ValueError, match=said):
        upload_pixels(upload, 8)


def test_a_flood_of_uploads_is_told_busy_and_drawings_keep_their_turns(service):
    upload, begun, free = encoded(Image.new("RGB", (64, 64), "red")), Event(), Event()
    with ThreadPoolExecutor(32) as visitors:
        visitors.submit(service.scheduler.run, lambda: (begun.set(), free.wait(30)))
        begun.wait(30)
        uploads = [visitors.submit(service.read_upload, upload) for _ in range(30)]
        refused = list(islice(as_completed(uploads, timeout=30), 30 - 1 - UPLOADS_WAITING))
        assert sum(one.done() for one in uploads) == len(refused)  # the others wait behind the turn that is taken
        assert all(isinstance(one.exception(), Busy) for one in refused)
        drawing = visitors.submit(service.scheduler.run, lambda: [one.done() for one in uploads if one not in refused])
        free.set()
        assert drawing.result(30).count(True) <= 1  # only the one upload that was before it
        assert [len(one.result(30)) for one in uploads if one not in refused] == [16] * (1 + UPLOADS_WAITING)
    assert len(service.read_upload(upload)) == 16


def test_an_upload_is_shown_whole_and_faded_below_the_rows_that_are_kept(service):
    shown = named_actions(service).preview_upload(encoded(Image.new("RGB", (64, 64), "red")), 1)
    assert "the upper 1 of 4 rows are kept" in shown
    alpha = Image.open(io.BytesIO(base64.b64decode(shown.partition("base64,")[2].partition('"')[0]))).getchannel("A")
    assert alpha.size == (32, 32)
    assert alpha.crop((0, 0, 32, 8)).getextrema() == (255, 255)
    assert alpha.crop((0, 8, 32, 32)).getextrema() == (views.FADED, views.FADED)


def test_an_upload_with_an_empty_number_of_rows_is_answered_with_the_fields_label(service):
    shown = named_actions(service).preview_upload(encoded(Image.new("RGB", (64, 64), "red")), None)
    assert "“Rows kept” must be a whole number from 1 to 3." in shown


def test_who_uploads_to_a_busy_page_reads_the_sentence_of_those_who_draw(service):
    upload = encoded(Image.new("RGB", (64, 64), "red"))
    actions = named_actions(service)
    assert "busy" not in actions.preview_upload(upload, 2)
    with ExitStack() as others:
        for _ in range(1 + UPLOADS_WAITING):
            others.enter_context(service.uploads.ticket(7.0))
        assert "The page is busy" in actions.preview_upload(upload, 2)
        asked = {"num_images": 2, "best": 2, "top_k": 0, "upload": upload, "rows": 2}
        *_, last = actions.answer(TAB, lambda: read_request(service, "a red heart", **asked), Event())
        assert "The page is busy: 1 drawing, 3 waiting. Please try again in about 7 s" in last["status"]


def test_a_picture_cut_short_is_refused_when_it_is_read(service):
    whole = encoded(Image.effect_noise((200, 200), 80))
    with pytest.raises(ValueError, match="picture"):
        service.read_upload(whole[: len(whole) // 2])
