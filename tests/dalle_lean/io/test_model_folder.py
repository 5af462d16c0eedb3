import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dalle_lean import Dalle, DalleConfig, load_model, save_model
from dalle_lean.errors import UserError
from dalle_lean.io.files import fresh_folder, host_name
from dalle_lean.io.model_folder import bundled_model, check_parts, find_model, pack_model, replace_folder
from dalle_lean.vocabulary import Vocabulary
from tests.dalle_lean.io.test_safetensors_io import little_time_and_memory
from tests.tiny import DALLE_FIELDS

CONFIG = DalleConfig(**DALLE_FIELDS | {"num_heads": 2})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    vqgan = tmp_path / "vqgan"
    vqgan.mkdir()
    (vqgan / "config.json").write_text("{}")
    (vqgan / "checkpoint").mkdir()
    (vqgan / "checkpoint" / "state.pt").write_text("of the run, not of the model")
    torch.manual_seed(0)
    model = Dalle(CONFIG)
    save_model(model, tmp_path / "model", tokenizer=tmp_path / "tokenizer.json", vqgan=vqgan, card="# A card\n")
    return tmp_path / "model"


def test_a_model_comes_back_as_it_was_saved(folder):
    torch.manual_seed(0)
    original, loaded = Dalle(CONFIG), load_model(folder)
    assert loaded.config == CONFIG
    assert not loaded.training
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert sorted(check_parts(folder)["parts"]) == ["model.safetensors", "tokenizer.json", "vqgan/config.json"]
    assert (folder / "README.md").read_text() == "# A card\n"
    assert not (folder / "vqgan" / "checkpoint").exists()


def test_a_card_that_is_no_text_is_refused_by_name(folder, tmp_path):
    (tmp_path / "card.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"card\.md is not text in UTF-8"):
        pack_model(folder, tmp_path / "packed", card=tmp_path / "card.md")


def test_bfloat16_weights_load_as_float32(tmp_path):
    model = Dalle(CONFIG)
    save_model(model, tmp_path / "half", dtype=torch.bfloat16)
    assert load_file(tmp_path / "half" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    loaded = load_model(tmp_path / "half")
    assert torch.equal(loaded.output.weight, model.output.weight.bfloat16().float())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_model_keeps_its_stored_type_unless_it_gets_another(tmp_path, stored):
    save_model(Dalle(CONFIG), tmp_path / "model", dtype=stored)
    pack_model(tmp_path / "model", tmp_path / "same")
    pack_model(tmp_path / "model", tmp_path / "other", dtype=torch.float32)
    found = [load_file(tmp_path / name / "model.safetensors") for name in ("model", "same", "other")]
    assert [weights["norm.weight"].dtype for weights in found] == [stored, stored, torch.float32]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_packed_model_can_be_the_mean_of_itself_and_the_model_it_began_from(folder, tmp_path):
    further = Dalle(CONFIG)
    save_model(further, tmp_path / "further", tokenizer=tmp_path / "tokenizer.json")
    pack_model(tmp_path / "further", tmp_path / "mean", average=folder, dtype=torch.bfloat16)
    began = load_model(folder).state_dict()
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    for name, weight in further.state_dict().items():
        assert torch.equal(mean[name], ((weight + began[name]) / 2).bfloat16())
    assert sorted(check_parts(tmp_path / "mean")["parts"]) == ["model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("fields", "tokenizer", "fingerprint", "differs"),
    [
        ({"num_heads": 1}, "{}", None, "configuration"),
        ({}, '{"version": "1.0"}', None, "tokenizer"),
        ({}, "{}", "0" * 64, "VQGAN"),
    ],
)
def test_a_model_that_another_did_not_begin_from_is_not_averaged(
    folder, tmp_path, fields, tokenizer, fingerprint, differs
):
    (tmp_path / "words.json").write_text(tokenizer)
    config = DalleConfig(**DALLE_FIELDS | {"num_heads": 2} | fields)
    save_model(Dalle(config), tmp_path / "other", tokenizer=tmp_path / "words.json", vqgan_fingerprint=fingerprint)
    with pytest.raises(UserError, match=f"other has another {differs}; only the model that a training began from"):
        pack_model(folder, tmp_path / "packed", average=tmp_path / "other")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("caption_dropout", [0.1, None])
def test_a_packed_model_keeps_its_caption_dropout_and_its_guidance_unless_it_gets_another(tmp_path, caption_dropout):
    save_model(Dalle(CONFIG), tmp_path / "model", caption_dropout=caption_dropout, guidance=1.5)
    pack_model(tmp_path / "model", tmp_path / "same")
    pack_model(tmp_path / "model", tmp_path / "other", guidance=3.0)
    same, other = (check_parts(tmp_path / name) for name in ("same", "other"))
    assert same["caption_dropout"] == other["caption_dropout"] == caption_dropout
    assert (same["guidance"], other["guidance"]) == (1.5, 3.0)


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        ({"guidance": "much"}, "guidance must be a number"),
        ({"guidance": 10**400}, "guidance=1000.*must lie in 0..1000"),
        ({"guidance": math.nan}, "guidance=nan"),
        ({"caption_dropout": 2}, "caption_dropout must be a share"),
        ({"caption_dropout": math.nan}, "caption_dropout must be a share"),
    ],
)
def test_facts_that_cannot_be_are_refused(folder, fact, message):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fact))
    with pytest.raises(UserError, match=message):
        check_parts(folder)


@pytest.mark.parametrize("guidance", [-1.0, 1e6, math.nan])
def test_a_guidance_that_cannot_be_leaves_the_folder_as_it_was(folder, tmp_path, guidance):
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match="guidance="):
        pack_model(folder, folder, guidance=guidance)
    assert (folder / "config.json").read_bytes() == before


def test_saving_again_replaces_the_folder_whole(folder, tmp_path):
    save_model(Dalle(CONFIG), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_saving_again_leaves_alone_what_is_no_part_of_the_model(folder):
    (folder / "sub").mkdir()
    for name in ("pictures.png", "sub/notes.txt"):
        (folder / name).write_text("mine")
    pack_model(folder, folder)
    check_parts(folder)
    assert [(folder / name).read_text() for name in ("pictures.png", "sub/notes.txt")] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"clip": Path("vqgan")}, "is not of the format dalle_lean_clip/1"),
        ({"vqgan": Path("vqgan")}, "is not of the format dalle_lean_vqgan/1"),
        ({"card": Path("nothere.md")}, r"nothere\.md: no such file"),
        ({"vocabulary": Path("nothere.json")}, r"nothere\.json: no such file"),
    ],
    ids=["no CLIP", "no VQGAN", "no card", "no vocabulary"],
)
def test_a_part_that_is_none_leaves_the_folder_as_it_was(folder, tmp_path, monkeypatch, parts, complaint):
    monkeypatch.chdir(tmp_path)
    before = (folder / "config.json").read_bytes()
    with pytest.raises(UserError, match=complaint):
        pack_model(folder, folder, **parts)
    assert (folder / "config.json").read_bytes() == before


def test_a_folder_of_something_else_is_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="neither empty nor a model folder"):
        save_model(Dalle(CONFIG), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_kill_between_the_renames_loses_no_folder(folder, tmp_path):
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (folder / "pictures.png").write_text("mine")
    folder.rename(tmp_path / ".model.old")
    replace_folder(fresh, folder)
    assert [path.name for path in folder.iterdir()] == ["pictures.png"]
    assert not (tmp_path / ".model.old").exists()


def test_what_a_killed_pack_left_is_removed_by_the_next_one(folder, tmp_path):
    script = f"""
import os, signal
from pathlib import Path
import dalle_lean.io.model_folder as folder
folder.hashed_parts = lambda fresh: os.kill(os.getpid(), signal.SIGKILL)
folder.check_parts = lambda model: folder.read_folder_config(model, folder.FORMAT)
folder.pack_model(Path({str(folder)!r}), Path({str(tmp_path / "packed")!r}))
"""
    killed = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name[:8] for path in tmp_path.glob(".*.tmp")] == [".packed."]
    with fresh_folder(tmp_path / "packed") as begun:  # by a process that is alive
        pack_model(folder, tmp_path / "packed")
        assert list(tmp_path.glob(".*.tmp")) == [begun]
    assert not list(tmp_path.glob(".*.tmp"))
    check_parts(tmp_path / "packed")


def test_what_another_machine_writes_is_left_alone(folder, tmp_path):
    theirs = tmp_path / ".packed.999999999-another-machine.abcdefgh.tmp"
    other_place = tmp_path / f".packed2.999999999-{host_name()}.abcdefgh.tmp"
    ours = tmp_path / f".packed.999999999-{host_name()}.abcdefgh.tmp"
    for path in (theirs, other_place, ours):
        path.mkdir()
    pack_model(folder, tmp_path / "packed")
    assert [path.exists() for path in (theirs, other_place, ours)] == [True, True, False]


def test_packing_adds_parts_and_keeps_the_others(folder, tmp_path):
    clip = tmp_path / "clip"
    clip.mkdir()
    architecture = {"format": "dalle_lean_clip/1", "architecture": "", "image_mean": [], "image_std": []}
    (clip / "config.json").write_text(json.dumps(architecture | {"tokenizer": "open_clip", "sha256": {}}))
    pack_model(folder, tmp_path / "packed", clip=clip, dtype=torch.bfloat16)
    packed = check_parts(tmp_path / "packed")["parts"]
    assert sorted(packed) == ["clip/config.json", "model.safetensors", "tokenizer.json", "vqgan/config.json"]
    assert (tmp_path / "packed" / "README.md").read_text() == "# A card\n"
    pack_model(tmp_path / "packed", tmp_path / "packed")
    assert sorted(check_parts(tmp_path / "packed")["parts"]) == sorted(packed)


def test_a_vocabulary_is_hashed_and_kept_by_packing_which_can_add_one_too(folder, tmp_path):
    Vocabulary({"heart": 7}, 9).save(tmp_path / "words.json")
    pack_model(folder, tmp_path / "packed", vocabulary=tmp_path / "words.json")
    pack_model(tmp_path / "packed", tmp_path / "again")
    assert "vocabulary.json" in check_parts(tmp_path / "again")["parts"]
    assert Vocabulary.load(tmp_path / "again" / "vocabulary.json").words == {"heart": 7}
    (tmp_path / "again" / "vocabulary.json").write_bytes((tmp_path / "words.json").read_bytes() + b" ")
    with pytest.raises(UserError, match=r"vocabulary\.json is not the file"):
        check_parts(tmp_path / "again")


def test_what_is_no_vocabulary_is_not_packed(folder, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is not of the format dalle_lean_vocabulary/1"):
        pack_model(folder, tmp_path / "packed", vocabulary=folder / "config.json")
    assert not (tmp_path / "packed").exists()


def rewrite_config(folder, change):
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def drop_bias(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["output.bias"]
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "it has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not of the format"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "tokenizer.json is not the file"),
        (lambda f: (f / "clip.json").write_text("{}"), "clip.json does not belong"),
        (lambda f: (f / "vqgan" / "config.json").write_text("[]"), "vqgan/config.json is not the file"),
        (drop_bias, "model.safetensors is not the file"),
        (lambda f: rewrite_config(f, lambda c: c["dalle"].update(depth=3)), "unknown DalleConfig field: depth"),
        (lambda f: rewrite_config(f, lambda c: c["dalle"].update(num_heads=3)), "has shape"),
    ],
)
def test_a_damaged_folder_is_refused_by_part(folder, spoil, words):
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(words)):
        load_model(folder)


def test_what_is_hidden_in_a_folder_is_no_part_of_the_model(folder):
    notes = folder / ".cache" / "huggingface"
    notes.mkdir(parents=True)
    (notes / "tree.json").write_text("[]")
    load_model(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "it may have 16,777,216 at most"),
        ("tokenizer.json", "it may have 33,554,432 at most"),
        ("vqgan/config.json", "it may have 16,777,216 at most"),
        ("model.safetensors", "get a complete copy"),
    ],
)
def test_a_part_of_many_gigabytes_is_refused_without_reading_it(folder, name, words):
    os.truncate(folder / name, 2**37)
    with little_time_and_memory(), pytest.raises(UserError, match=words):
        load_model(folder)


def test_weights_larger_than_the_model_are_refused_without_reading_them(folder):
    numbers = 2**34
    header = json.dumps({"a": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(folder / "model.safetensors", 8 + len(header) + 4 * numbers)
    words = r"model\.safetensors has 68,719,.* bytes: the model's weights have"
    with little_time_and_memory(), pytest.raises(UserError, match=words):
        load_model(folder)


def test_a_model_is_found_by_folder_or_environment(folder, monkeypatch):
    assert find_model(str(folder)) == folder
    monkeypatch.setenv("DALLE_LEAN_MODEL", str(folder))
    assert find_model() == folder
    with pytest.raises(ValueError, match="no model folder at"):
        find_model("./nowhere")


def test_an_empty_environment_variable_names_no_model(monkeypatch):
    monkeypatch.setenv("DALLE_LEAN_MODEL", "")
    assert find_model() == bundled_model()


def test_a_folder_that_does_not_name_its_vqgan_is_packed(folder, tmp_path):
    content = json.loads((folder / "config.json").read_text())
    del content["vqgan_fingerprint"]
    (folder / "config.json").write_text(json.dumps(content))
    pack_model(folder, tmp_path / "packed")
    assert check_parts(tmp_path / "packed")["vqgan_fingerprint"] is None


def test_a_folder_that_is_not_there_is_said_before_the_failure_to_download(monkeypatch):
    def no_network(*_, **__):
        raise OSError("Got: ConnectError: name resolution failed")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(UserError, match=r"^there is no folder runs/none, and no model .* from the hub: Got: ConnectEr"):
        find_model("runs/none")


@pytest.mark.parametrize("name", ["modell", "./modell", "runs/modell"])
def test_a_misspelt_folder_leads_to_the_model_beside_it(name, tmp_path, monkeypatch):
    def not_there(*_, **__):
        raise OSError("404 Client Error")

    monkeypatch.setattr("huggingface_hub.snapshot_download", not_there)
    monkeypatch.chdir(tmp_path)
    meant = Path(name).with_name("model")
    meant.mkdir(parents=True)
    with pytest.raises(UserError, match=rf"^.*folder.* {name} \(did you mean {meant}\?\)"):
        find_model(name)


@pytest.mark.parametrize("name", ["README.md", "docs/README.md"])
def test_a_file_is_no_model_folder_and_is_not_sought_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path(name).touch()
    with pytest.raises(UserError, match=f"^{name} is a file, not a model folder"):
        find_model(name)


def test_a_link_keeps_leading_to_the_model(folder, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(folder)
    for _ in range(2):
        save_model(Dalle(CONFIG), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_model(Dalle(CONFIG), ".")
    assert (tmp_path / "here" / "config.json").is_file()
