"""Setting up a run, or going on with one, and what `dalle-lean host` says of it."""

import ipaddress
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from dalle_lean import load_model, save_model
from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from dalle_lean.tokenizer import Tokenizer
from dalle_lean.vocabulary import Vocabulary
from tests.training.conftest import write_shards
from tests.training.swarm.host.small_run import ON_LOOPBACK, make, run_program
from training.commands.host import page_options_of, who_joins
from training.run.recipe import load_recipe
from training.swarm.config import WireSection, read_settings
from training.swarm.host import run_setup
from training.swarm.host import supervisor as host
from training.swarm.host.checkpoints import list_checkpoints
from training.swarm.host.host_config import HostConfig, identity_path
from training.swarm.host.run_setup import choose_ports, make_run, slug


def test_a_run_is_made_with_all_that_volunteers_need_and_nothing_secret(shards, tmp_path):
    settings = make(tmp_path / "my run", shards)
    assert settings == read_settings(tmp_path / "my run")
    assert settings.swarm.name == "my-run"
    assert len(settings.swarm.addresses) == 2
    assert settings.recipe.model["image_side"] == 4
    assert Vocabulary.load(tmp_path / "my run" / "vocabulary.json").unknown("a red zeppelin") == ["zeppelin"]
    host_config = HostConfig.load(tmp_path / "my run")
    for name in host_config.ports:
        path = identity_path(tmp_path / "my run", name)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_run_of_an_older_version_goes_on(shards, tmp_path):
    first = make(tmp_path / "run", shards)
    path = tmp_path / "run/host.json"
    write_json(path, {**read_json(path), "init": {"/models/birds/config.json": [200, 10**18]}})
    assert make(tmp_path / "run", shards) == first


def test_the_same_command_keeps_identities_ports_and_run_id(shards, tmp_path):
    first = make(tmp_path / "run", shards)
    for options in ({}, {"port": None, "announce": None, "listen": None}):
        again = make(tmp_path / "run", shards, **options)
        assert again.run_id == first.run_id
        assert again.swarm == first.swarm


def test_a_run_that_is_given_a_model_begins_with_its_weights_and_words(shards, given_model, tmp_path):
    settings = make(tmp_path / "run", shards, init=given_model)
    assert settings.model == load_model(given_model).config
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (given_model / "tokenizer.json").read_bytes()
    [first] = list_checkpoints(tmp_path / "run", print)
    assert (first.step, settings.first_epoch) == (1, 1)
    assert (first.folder / "model/model.safetensors").read_bytes() == (given_model / "model.safetensors").read_bytes()
    assert make(tmp_path / "run", shards, init=given_model) == settings
    assert make_run(tmp_path / "run", None, load_recipe("tiny"), on_notice=print) == settings
    with pytest.raises(ValueError, match=r"another .*first weights"):
        make(tmp_path / "run", shards)


def test_a_restart_loads_a_given_model_again_only_if_its_weights_changed(shards, given_model, tmp_path, monkeypatch):
    model = shutil.copytree(given_model, tmp_path / "model")
    first = make(tmp_path / "run", shards, init=model)
    for name in ("with_model_of", "load_init"):
        monkeypatch.setattr(run_setup, name, lambda *_: pytest.fail("the model was loaded again"))
    assert make(tmp_path / "run", shards, init=model) == first
    monkeypatch.undo()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        make(tmp_path / "run", shards, init=model)


def test_a_vqgan_that_a_given_model_gets_later_goes_into_the_checkpoints(shards, given_model, tmp_path, monkeypatch):
    model = shutil.copytree(given_model, tmp_path / "model")
    monkeypatch.setattr(run_setup, "holds_vqgan_of", lambda folder, _: (folder / "vqgan").exists())
    monkeypatch.setattr(run_setup, "matching_vqgan", lambda *_: None)
    first = make(tmp_path / "run", shards, init=model)
    assert HostConfig.load(tmp_path / "run").vqgan is None
    (model / "vqgan").mkdir()
    for _ in range(2):
        assert make(tmp_path / "run", shards, init=model) == first
        assert HostConfig.load(tmp_path / "run").vqgan == str(model / "vqgan")


def test_a_vqgan_named_when_a_run_goes_on_goes_into_the_checkpoints(shards, tmp_path):
    settings = make(tmp_path / "run", shards)
    vqgan = tmp_path / "vqgan"
    run_setup.make_run(tmp_path / "run", None, settings.recipe, vqgan=vqgan, on_notice=print, **ON_LOOPBACK)
    assert HostConfig.load(tmp_path / "run").vqgan == str(vqgan)


def test_a_run_that_began_with_new_weights_hashes_no_model(shards, given_model, tmp_path, monkeypatch):
    before = make(tmp_path / "run", shards)
    monkeypatch.setattr(run_setup, "sha256_file", lambda *_: pytest.fail("the model was hashed"))
    assert not run_setup.has_begun_with(tmp_path / "run", before, given_model)


def test_the_same_command_goes_on_however_the_given_tokenizer_is_written(shards, given_model, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({**read_json(given_model / "tokenizer.json"), "padding": None}))
    folder = saved_again(given_model, tmp_path / "model", tokenizer)
    assert make(tmp_path / "run", shards, init=folder) == make(tmp_path / "run", shards, init=folder)
    Tokenizer.train(["a blue sea"], 280).save(tokenizer)
    with pytest.raises(ValueError, match="holds a run with another tokenizer"):
        make(tmp_path / "run", shards, init=folder, tokenizer=tokenizer)


def test_a_model_without_a_tokenizer_needs_one_beside_it(shards, given_model, tmp_path):
    folder = saved_again(given_model, tmp_path / "model", None)
    with pytest.raises(ValueError, match=r"no tokenizer\.json: name its model's with --tokenizer"):
        make(tmp_path / "run", shards, init=folder)
    assert make(tmp_path / "run", shards, init=folder, tokenizer=given_model / "tokenizer.json").first_epoch == 1


def saved_again(model_folder, folder, tokenizer):
    """The same model with another tokenizer.json."""
    save_model(load_model(model_folder), folder, tokenizer=tokenizer, vqgan_fingerprint="a" * 64)
    return folder


def test_a_run_that_lost_the_weights_it_began_with_gets_them_by_the_same_command(shards, given_model, tmp_path):
    run = tmp_path / "run"
    make(run, shards, init=given_model)
    [first] = list_checkpoints(run, print)
    weights = first.folder / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    make(run, shards, init=given_model)
    assert weights.read_bytes() == (given_model / "model.safetensors").read_bytes()
    shutil.rmtree(first.folder)
    with pytest.raises(ValueError, match=r"has lost the weights .*: host it again with --data and --init"):
        make_run(run, None, load_recipe("tiny"), on_notice=print)
    make(run, shards, init=given_model)
    assert weights.exists()


def test_a_beginning_that_is_refused_leaves_nothing_to_a_later_one(shards, given_model, tmp_path):
    Tokenizer.train(["a blue sea"], 280).save(tmp_path / "other.json")
    with pytest.raises(ValueError, match="vocab"):
        make(tmp_path / "run", shards, init=given_model, tokenizer=tmp_path / "other.json")
    assert not (tmp_path / "run/tokenizer.json").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"announce": "localhost"},
        {"listen": "everywhere"},
        {"name": "No Name"},
        {"vqgan": Path("models/emoji/vqgan")},
        {"admission": "closed"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_option_is_refused_before_anything_is_written(shards, tmp_path, wrong):
    with pytest.raises(UserError):
        make(tmp_path / "run", shards, **wrong)
    assert not list((tmp_path / "run").iterdir())


def test_a_wrong_option_of_the_command_leaves_no_folder(shards, tmp_path, capsys):
    for options in (["--announce", "localhost"], ["--device", "nowhere"], ["--page", "--page-address", "nowhere"]):
        assert run_program("host", str(tmp_path / "run"), "--data", str(shards), "--config", "tiny", *options) == 2
        assert not (tmp_path / "run").exists(), options


class Killed(Exception):
    pass


def kill(*_):
    raise Killed


def test_a_set_up_that_was_killed_leaves_nothing_to_one_with_other_data(shards, tmp_path, monkeypatch):
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(run_setup, "write_settings", kill)
        with pytest.raises(Killed):
            make(killed, shards, publish="hf://me/birds")
    assert (killed / "tokenizer.json").exists()
    other = write_shards(tmp_path / "other", rows=3)
    make(killed, other)
    make(tmp_path / "fresh", other)
    for name in ("tokenizer.json", "vocabulary.json"):
        assert (killed / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()
    assert HostConfig.load(killed).publish is None


def test_a_run_that_would_end_where_it_begins_is_refused(shards, given_model, tmp_path):
    with pytest.raises(ValueError, match="total_steps=1: a run with --init begins at step 1; set more"):
        make(tmp_path / "run", shards, steps=1, init=given_model)


def test_a_model_of_other_codes_is_no_beginning(shards, given_model, tmp_path):
    other = shutil.copytree(given_model, tmp_path / "model")
    config = read_json(other / "config.json")
    write_json(other / "config.json", {**config, "vqgan_fingerprint": "b" * 64})
    with pytest.raises(ValueError, match="was trained on codes of the VQGAN bbbb"):
        make(tmp_path / "run", shards, init=other)
    assert not (tmp_path / "run/swarm.toml").exists()


def test_a_run_has_the_page_that_it_had_until_it_is_told_otherwise(tmp_path):
    page, export, local = ["--page", "--page-address", "0.0.0.0:80"], ["--export", str(tmp_path)], "127.0.0.1:7870"
    options = partial(page_options_of, prompt_page=None, before=page)
    assert options(None, local, None, before=()) == []
    assert options(True, "0.0.0.0:80", None, before=()) == page
    assert options(None, local, None) == page
    assert options(False, local, None) == []
    assert options(None, local, tmp_path) == export
    assert options(True, "0.0.0.0:80", tmp_path) == page + export


def test_a_run_publishes_where_it_did_until_it_is_told_not_to(shards, tmp_path):
    make(tmp_path / "run", shards, publish="hf://me/birds")
    for publish, expected in ((None, "hf://me/birds"), ("s3://b/birds", "s3://b/birds"), ("", ""), (None, "")):
        make(tmp_path / "run", shards, publish=publish)
        assert HostConfig.load(tmp_path / "run").publish == expected


def test_a_run_goes_on_by_its_folder_alone(shards, tmp_path):
    first = make(tmp_path / "run", shards, donors=2)
    assert len(first.swarm.donors) == 2
    assert make_run(tmp_path / "run", None, load_recipe("emoji64"), on_notice=print) == first


@pytest.mark.parametrize(
    "option",
    [
        ("--config", "emoji64"),
        ("--tokenizer", "tokenizer.json"),
        ("--name", "other"),
        ("--min-peers", "2"),
        ("--mode", "diloco"),
        ("--compression", "fp16"),
        ("--power-sgd-rank", "2"),
        ("--matchmaking-time", "3"),
        ("--steps", "50"),
        ("--batch-size", "64"),
        ("--lr", "1e-3"),
        ("--seed", "1"),
    ],
)
def test_a_run_that_goes_on_by_its_folder_alone_is_given_no_settings(shards, tmp_path, capsys, monkeypatch, option):
    make(tmp_path / "run", shards)
    before = (tmp_path / "run/swarm.toml").read_bytes()
    monkeypatch.setattr(host, "host_run", lambda *_, **__: pytest.fail("the host began"))
    assert run_program("host", str(tmp_path / "run"), *option, "--donors", "2") == 2
    error = capsys.readouterr().err
    assert f"leave out {option[0]}, or" in error
    assert (tmp_path / "run/swarm.toml").read_bytes() == before


@pytest.mark.parametrize("port", [None, 0])
def test_peers_that_a_run_had_keep_their_addresses_where_it_gets_another_donor(shards, tmp_path, port):
    before = make(tmp_path / "run", shards)
    ports = HostConfig.load(tmp_path / "run").ports
    more = make(tmp_path / "run", shards, port=port, donors=2)
    assert more.swarm.addresses == before.swarm.addresses
    now = HostConfig.load(tmp_path / "run").ports
    assert list(now) == ["helper-0", "helper-1", "donor-0", "donor-1"]
    assert {name: now[name] for name in ports} == ports
    assert now["donor-1"] not in ports.values()


def test_further_peers_have_the_ports_behind_the_others():
    assert choose_ports(["a", "b"], {}, None, "127.0.0.1") == {"a": 31337, "b": 31338}
    assert choose_ports(["a", "b"], {"a": 40000}, None, "127.0.0.1") == {"a": 40000, "b": 40001}
    assert choose_ports(["a", "b"], {"a": 40000}, 50000, "127.0.0.1") == {"a": 50000, "b": 50001}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 64}, "batch size"),
        ({"steps": 50}, "schedule"),
        ({"wire": WireSection(compression="fp16")}, "wire settings"),
        ({"name": "other"}, r"name \(run\)"),
    ],
)
def test_another_recipe_for_a_run_that_is_there_is_refused_by_name(shards, tmp_path, changes, named):
    before = make(tmp_path / "run", shards)
    with pytest.raises(ValueError, match=f"another {named}"):
        make(tmp_path / "run", shards, **changes)
    assert read_settings(tmp_path / "run") == before


def test_a_new_run_needs_data(tmp_path):
    with pytest.raises(ValueError, match="--data"):
        make_run(tmp_path / "run", None, load_recipe("tiny"), on_notice=print)


def test_a_name_comes_from_the_folder(tmp_path):
    assert slug(tmp_path / "My Run_2!") == "my-run-2"
    assert slug(tmp_path / "___") == "run"


@pytest.mark.parametrize(("address", "who"), [("127.0.0.1", "on this machine, join"), ("203.0.113.5", "any machine")])
def test_a_run_on_a_loopback_address_asks_no_other_machine_to_join(address, who):
    said = who_joins(ipaddress.ip_address(address))
    assert who in said
    assert ("any machine" in said) == (who == "any machine")
