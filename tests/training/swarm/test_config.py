"""swarm.toml: what all peers must agree on, and what may differ."""

import dataclasses
import tomllib

import pytest

from training.run.recipe import MemoryRecipe, load_recipe
from training.swarm.config import (
    SwarmSection,
    SwarmSettings,
    TimingSection,
    WireSection,
    parse_settings,
    read_settings,
    write_settings,
)

OTHER_WIRE = {
    "mode": "diloco",
    "compression": "fp16",
    "min_eight_bit_numel": 7,
    "power_sgd_rank": 2,
    "average_state_every": 3,
    "delayed": False,
    "inner_steps": 7,
    "outer_lr": 0.6,
    "outer_momentum": 0.5,
}
OTHER_OPTIMIZER = {"betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1, "clip_norm": 1.0, "bias_correction": True}
OTHER_SCHEDULE = {"peak_lr": 1e-4, "warmup_steps": 3, "hold_steps": 5, "total_steps": 99, "length_warmup": ((5, 2, 2),)}


def changed(settings, part, **values):
    """The settings with other values in one section."""
    if part in ("swarm", "wire", "timing"):
        return dataclasses.replace(settings, **{part: dataclasses.replace(getattr(settings, part), **values)})
    section = getattr(settings.recipe, part)
    section = {**section, **values} if part == "model" else dataclasses.replace(section, **values)
    return dataclasses.replace(settings, recipe=dataclasses.replace(settings.recipe, **{part: section}))


@pytest.fixture
def settings():
    swarm = SwarmSection(name="try", addresses=("/ip4/127.0.0.1/tcp/1/p2p/Qm",), data_fingerprint="d", min_peers=2)
    return SwarmSettings(recipe=load_recipe("tiny"), swarm=swarm, wire=WireSection(), timing=TimingSection())


def test_settings_come_back_from_their_file(settings, tmp_path):
    write_settings(tmp_path / "swarm.toml", settings)
    assert read_settings(tmp_path) == settings
    assert read_settings(tmp_path / "swarm.toml").run_id == settings.run_id


def test_settings_with_nothing_in_them_come_back(tmp_path):
    write_settings(tmp_path / "swarm.toml", SwarmSettings())
    assert read_settings(tmp_path).to_dict() == SwarmSettings().to_dict()


def test_the_run_id_still_counts_the_option_that_the_optimizer_once_had():
    assert SwarmSettings().fingerprints["optimizer"] == "41aa407e06091f6f"


@pytest.mark.parametrize(
    ("part", "name", "value", "called"),
    [
        *(("wire", name, value, "wire settings") for name, value in OTHER_WIRE.items()),
        *(("optimizer", name, value, "optimizer") for name, value in OTHER_OPTIMIZER.items()),
        *(("schedule", name, value, "schedule") for name, value in OTHER_SCHEDULE.items()),
        ("data", "batch_size", 256, "batch size"),
        ("data", "caption_dropout", 0.5, "caption dropout"),
        ("data", "heldout_share", 0.5, "held-out share"),
        ("data", "seed", 5, "seed of the first weights"),
        ("model", "num_layers", 6, "model"),
        ("swarm", "data_fingerprint", "other", "data"),
        ("swarm", "tokenizer_fingerprint", "other", "tokenizer"),
    ],
)
def test_peers_that_differ_in_what_they_share_do_not_meet_and_are_told_in_what(settings, part, name, value, called):
    other = changed(settings, part, **{name: value})
    assert other.run_id != settings.run_id
    assert settings.differences(other) == [called]


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("memory", {name: getattr(MemoryRecipe(precision="bf16"), name) for name in ("precision", "compile")}),
        ("timing", {"matchmaking_time_s": 7.0, "load_state_attempts": 9}),
        ("swarm", {"addresses": (), "donors": ("Qm",), "min_peers": 9, "data": "/elsewhere"}),
        ("data", {"shuffle_buffer": 3, "shuffle_shards": 1, "heldout_samples": 1}),
        ("schedule", {"log_every": 99, "heldout_every": 99, "sample_every": 0, "checkpoint_every": 0}),
    ],
)
def test_what_is_everybodys_own_keeps_nobody_apart(settings, part, values):
    other = changed(settings, part, **values)
    assert other != settings
    assert other.run_id == settings.run_id
    assert settings.differences(other) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[swarm]\nname = 'A b'", "lower-case"),
        ("[swarm]\nprotocol = 99", "this version of dalle-lean uses 2"),
        ("[swarm]\nmin_peers = 0", "min_peers = 0"),
        ("[swarm]\nrun_key = 'xyz'", "64 hexadecimal digits"),
        ("[swarm]\nfirst_weights = 'xyz'", "first_weights = 'xyz': must be 64 hexadecimal digits"),
        ("[swarm]\nadmission = 'closed'", "open, invite, list"),
        ("[swarm]\nhost = 'x'", r"\[swarm\] host: unknown key"),
        ("[wire]\nmode = 'x'", "gradients, diloco"),
        ("[wire]\nouter_momentum = 1.0", "outer_momentum = 1.0"),
        ("[wire]\nmode = 'diloco'\npower_sgd_rank = 4", "power_sgd_rank = 4"),
        ("[timing]\nrequest_timeout_s = 20.0", "less than matchmaking_time_s"),
        ("[timing]\nmatchmaking_time_s = 500.0", "less than averaging_timeout_s"),
        ("[timing]\naveraging_timeout_s = 0", "above 0"),
        ("[timing]\nload_state_attempts = 1000000", "below 1000000"),
        ("[optimizer]\nname = 'adamw'", "shares the state of LAMB"),
        ("[memory]\nprecision = 'bf16-weights'", "float32 weights"),
        ("[other]\nx = 1", r"unknown section \[other\]"),
        ("wire = 3", "must be a section"),
        ("[swarm", "swarm.toml: "),
    ],
)
def test_what_is_wrong_with_a_file_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        parse_settings(text, "swarm.toml")


def test_a_key_is_part_of_the_run_id_and_who_is_admitted_is_not(settings):
    keyed = changed(settings, "swarm", run_key="ab" * 32)
    assert settings.differences(keyed) == keyed.differences(settings) == ["key"]
    assert keyed.run_id not in (settings.run_id, changed(settings, "swarm", run_key="cd" * 32).run_id)
    assert changed(settings, "swarm", run_key="ab" * 32, admission="invite").run_id == keyed.run_id


def test_a_run_without_a_key_is_written_as_older_versions_read_it(settings, tmp_path):
    write_settings(tmp_path / "swarm.toml", settings)
    assert "run_key" not in (tmp_path / "swarm.toml").read_text()
    assert read_settings(tmp_path) == settings
    keyed = changed(settings, "swarm", run_key="ab" * 32, admission="list")
    write_settings(tmp_path / "swarm.toml", keyed)
    assert read_settings(tmp_path) == keyed


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"name a run's swarm\.toml"):
        read_settings(tmp_path / "none.toml")


def test_a_file_says_what_it_is_for(settings, tmp_path):
    write_settings(tmp_path / "swarm.toml", settings)
    text = (tmp_path / "swarm.toml").read_text()
    assert text.startswith("# What a volunteer needs")
    assert tomllib.loads(text)["swarm"]["name"] == "try"


def test_in_diloco_a_step_of_the_swarm_holds_many_of_the_schedule(settings):
    diloco = changed(settings, "wire", mode="diloco", inner_steps=7)
    assert (settings.steps_per_epoch, diloco.steps_per_epoch) == (1, 7)
    assert diloco.target_batch_size == 7 * settings.target_batch_size
