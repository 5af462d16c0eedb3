"""A model folder on the hub: published, replaced in part, and found there by its id."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dalle_lean import save_model
from dalle_lean.errors import UserError
from dalle_lean.io.model_card import CARD, markdown_table, model_files
from tests.hub import loopback_hub
from tests.tiny import tiny_dalle

ROOT = Path(__file__).parents[3]
# Publishes a first state and a second one, then reads what the hub gives.
SCRIPT = """
import sys
from dalle_lean import load_model
from dalle_lean.io.model_card import model_files
from dalle_lean.io.model_folder import find_model
from dalle_lean.io.publish import publish
from pathlib import Path

for folder in sys.argv[1:]:
    publish(model_files(Path(folder), "m"), "hf://me/model", message=f"Publish {folder[-3:]}")
print(load_model(find_model("me/model")).norm.weight[0].item())
"""


@pytest.fixture
def folders(tmp_path):
    """Two states of a model; only the first one has a VQGAN's folder."""
    (tmp_path / "vqgan").mkdir()
    (tmp_path / "vqgan" / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    model = tiny_dalle()
    save_model(model, tmp_path / "one", tokenizer=tmp_path / "tokenizer.json", vqgan=tmp_path / "vqgan")
    with torch.no_grad():
        model.norm.weight.fill_(7)
    save_model(model, tmp_path / "two", tokenizer=tmp_path / "tokenizer.json")
    return tmp_path / "one", tmp_path / "two"


def test_a_model_on_the_hub_is_its_newest_state_and_loads_by_its_id(folders, tmp_path):
    with loopback_hub() as hub:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | hub.environment(tmp_path / "home")
        command = [sys.executable, "-c", SCRIPT, *map(str, folders)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "7.0\n"
        _, first, second = hub.repos["model", "me/model"]
        assert first.keys() - second.keys() == {"vqgan/config.json"}
        assert {name for name in second if first[name] != second[name]} == {
            "model.safetensors",
            "config.json",
            ".published",
        }
        assert "pipeline_tag: text-to-image" in second["README.md"].decode()


def test_a_damaged_model_is_not_published(folders):
    (folders[0] / "tokenizer.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer\.json is not the file"):
        model_files(folders[0], "m")


def test_cards_name_the_paper(folders):
    generated = model_files(folders[0], "m")[CARD].decode()
    for card in (generated, (ROOT / "models/emoji" / CARD).read_text()):
        assert "https://arxiv.org/abs/2207.03481" in card


def test_what_a_table_says_is_text():
    rows = {"a|b": "<script>\n| x"}
    assert markdown_table(rows).splitlines()[2] == "| a\\|b | &lt;script> \\| x |"
