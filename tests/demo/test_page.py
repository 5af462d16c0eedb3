"""The page as served: its address, its endpoint, its port."""

import re
import urllib.request

import pytest

from dalle_lean.cli import main
from demo.page import draw
from demo.server import read_card


def test_the_page_is_served_and_asks_no_other_host(page_url):
    with urllib.request.urlopen(page_url, timeout=30) as response:
        text = response.read().decode()
    assert "dalle_lean" in text
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?://[^"]+)"', text)
    preconnect = re.findall(r'<link[^>]*rel="preconnect"[^>]*>', text)
    assert [address for address in loaded if not any(address in tag for tag in preconnect)] == []


def test_the_endpoint_draws_the_best(page_url, generator):
    from gradio_client import Client

    client = Client(page_url, verbose=False, analytics_enabled=False)
    status, gallery, seed = client.predict("a red heart", 6, 2, 0, 1.0, 1.0, 3, False, api_name="/draw")
    expected = generator("a red heart", num_images=6, best=2, top_k=0, top_p=1.0, seed=3)
    assert "2 pictures, best first" in status
    assert seed == 3
    assert [picture["caption"] for picture in gallery] == [
        f"score {picture.score:.3f} · no. {picture.index}" for picture in expected
    ]
    status, gallery, _ = client.predict("", 6, 2, 0, 1.0, 1.0, 3, False, api_name="/draw")
    assert "The prompt is empty" in status
    assert gallery == []


def test_a_setting_that_cannot_be_is_answered_with_a_sentence(generator):
    *_, (status, pictures, _) = draw(generator, "a red heart", 6, 2, 0, 1.0, 1.0, None, False)
    assert "Seed=None: it must be a whole number." in status
    assert pictures == []


def test_showing_more_than_are_drawn_is_answered_with_a_sentence(generator):
    *_, (status, pictures, _) = draw(generator, "a red heart", 2, 4, 0, 1.0, 1.0, 0, False)
    assert "Best=4 is more than num_images=2; draw more or show fewer." in status
    assert pictures == []


def test_a_new_seed_is_shown_so_that_the_pictures_can_be_had_again(generator):
    *_, (_, pictures, seed) = draw(generator, "a red heart", 6, 2, 0, 1.0, 1.0, 0, True)
    *_, (_, again, _) = draw(generator, "a red heart", 6, 2, 0, 1.0, 1.0, seed, False)
    assert [image.tobytes() for image, _ in pictures] == [image.tobytes() for image, _ in again]


def test_a_taken_port_is_one_line_and_exit_code_2(model_folder, taken_port, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--model", str(model_folder), "--port", str(taken_port)])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert (
        said
        == f"error: cannot listen on 127.0.0.1, port {taken_port}: Address already in use; choose another with --port"
    )


def test_the_cards_metadata_block_is_not_shown(tmp_path):
    assert read_card(tmp_path) == ""
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Emoji\n\n![drawn](pictures.png)\n")
    assert read_card(tmp_path) == "# Emoji"
