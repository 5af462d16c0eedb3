"""`host --admission`, `invite`, `ban` and `unban` on the folder of a run that is not running."""

import dataclasses
import re
import shlex
import time

import pytest

from tests.training.swarm.host.small_run import ON_LOOPBACK, run_program
from training.commands.admission import new_invite, run_key_of
from training.commands.host import how_to_join
from training.run.recipe import load_recipe
from training.swarm.admission.bans import Bans
from training.swarm.admission.passes import Invite
from training.swarm.config import read_settings, write_settings
from training.swarm.host.host_gate import run_key_file
from training.swarm.host.run_setup import make_run

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def make(shards, tmp_path):
    def made(**options):
        return make_run(tmp_path / "run", str(shards), load_recipe("tiny"), on_notice=print, **ON_LOOPBACK, **options)

    return made


def without_key(run_dir):
    """A folder as an older version leaves it."""
    settings = read_settings(run_dir)
    write_settings(
        run_dir / "swarm.toml", dataclasses.replace(settings, swarm=dataclasses.replace(settings.swarm, run_key=""))
    )
    run_key_file(run_dir).unlink()


def run(capsys, *arguments):
    """The exit code and the output."""
    code = run_program(*map(str, arguments))
    said = capsys.readouterr()
    return code, re.sub(r"\s+", " ", said.out + said.err)


def test_a_new_run_has_a_key_that_only_its_host_can_read_and_keeps(make, tmp_path):
    first = make()
    assert first.swarm.admission == "open"
    assert run_key_file(tmp_path / "run").stat().st_mode & 0o777 == 0o600
    assert make(admission="invite").swarm.run_key == first.swarm.run_key
    again = make()
    assert (again.swarm.admission, again.run_id) == ("invite", first.run_id)


def test_a_run_that_was_begun_without_a_key_goes_on_without_one(make, tmp_path):
    make()
    without_key(tmp_path / "run")
    before = read_settings(tmp_path / "run")
    assert make().run_id == before.run_id
    assert make().swarm.run_key == ""
    with pytest.raises(ValueError, match="started without a key"):
        make(admission="invite")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"admission": "closed"}, "open, invite, list"), ({"admission": "list"}, "needs --peer-list")],
)
def test_an_admission_that_cannot_be_changes_nothing(make, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)
    assert not (tmp_path / "run/swarm.toml").exists()


def test_a_run_keeps_the_list_that_it_goes_by(make, tmp_path):
    (tmp_path / "peers.txt").write_text(PEER)
    assert make(admission="list", peer_list=str(tmp_path / "peers.txt")).swarm.admission == "list"
    assert make().swarm.admission == "list"


def test_an_invitation_is_printed_with_the_command_to_join_with(make, tmp_path, capsys):
    settings = make()
    code, said = run(capsys, "invite", tmp_path / "run", "--name", "Anna", "--uses", 3, "--days", 2)
    assert code == 0
    join = settings.swarm.join_arguments(settings.swarm.addresses)
    assert join.endswith(f" --data {settings.swarm.data}")
    [made] = re.findall(rf"dalle-lean join {re.escape(join)} --code (\S+)", said)
    invite = Invite.read(made, settings.swarm.run_key)
    assert (invite.uses, invite.name, invite.role) == (3, "Anna", "trainer")
    assert re.search(rf"until \d{{4}}-\d\d-\d\d \d\d:\d\d {time.strftime('%Z')};", said)
    code, said = run(capsys, "invite", tmp_path / "run", "--role", "helper")
    assert f"--helper-of {settings.swarm.addresses[0]}" in said


@pytest.mark.parametrize("hosted_here", [True, False])
def test_the_command_to_join_by_invitation_ends_in_a_code_and_says_where_that_comes_from(make, tmp_path, hosted_here):
    run_dir = tmp_path / "my run" if hosted_here else None
    command, source = how_to_join(make(admission="invite").swarm, ["ADDRESS"], run_dir).split("\n")
    assert command.endswith(" --code CODE")
    assert source == "with a CODE from " + (f"dalle-lean invite '{run_dir}'" if hosted_here else "its host")
    assert "CODE" not in how_to_join(make(admission="open").swarm, ["ADDRESS"], run_dir)


def test_printed_commands_work_for_a_folder_with_a_space(make, tmp_path, capsys):
    make()
    folder = (tmp_path / "run").rename(tmp_path / "my run")
    for words, printed in (
        (["invite", folder], r"dalle-lean ban (.*) \w+\. To"),
        (["ban", folder, PEER], "unban (.*) Qm"),
    ):
        [written] = re.findall(printed, run(capsys, *words)[1])
        assert shlex.split(written) == [str(folder)]


def test_no_code_begins_like_an_option(make, tmp_path):
    make()
    key = run_key_of(tmp_path / "run")
    codes = [new_invite(key, uses=1, ends=2**31, role="trainer", name="")[1] for _ in range(400)]
    assert not [code for code in codes if code.startswith("-")]


def banned(run_dir):
    return Bans.read((run_dir / "bans").read_bytes(), read_settings(run_dir).swarm.run_key).banned


def test_a_peer_or_a_code_is_banned_and_no_longer(make, tmp_path, capsys):
    make()
    run_dir = tmp_path / "run"
    invitation = run(capsys, "invite", run_dir)[1]
    [made], [name] = re.findall(r"--code (\S+)", invitation), re.findall(r"invitation ([0-9a-f]{8})", invitation)
    assert f"{PEER} is banned;" in run(capsys, "ban", run_dir, PEER)[1]
    assert f"{name} is banned;" in run(capsys, "ban", run_dir, made)[1]
    assert f"{name} is already banned" in run(capsys, "ban", run_dir, name)[1]
    assert banned(run_dir) == {PEER, name}
    assert f"{name} is no longer banned" in run(capsys, "unban", run_dir, made)[1]
    assert f"{name} is not banned" in run(capsys, "unban", run_dir, name)[1]
    assert banned(run_dir) == {PEER}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("ban", "nobody"), "neither a peer id"),
        (("invite", "--role", "donor"), "must be trainer or helper"),
        (("invite", "--name", "\x1b"), "user name"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(make, tmp_path, capsys, words, reason):
    make()
    code, said = run(capsys, words[0], tmp_path / "run", *words[1:])
    assert code == 2
    assert reason in said


def test_only_the_machine_with_the_runs_own_key_invites(make, tmp_path, capsys):
    make()
    key = run_key_file(tmp_path / "run")
    content = key.read_bytes()
    key.unlink()
    assert "on the machine that hosts the run" in run(capsys, "invite", tmp_path / "run")[1]
    key.write_bytes(content[:30])
    assert run(capsys, "invite", tmp_path / "run")[0] == 2
    without_key(tmp_path / "run")
    assert "started without a key" in run(capsys, "invite", tmp_path / "run")[1]


def test_a_code_for_a_helper_names_the_run_that_it_helps(tmp_path, capsys):
    code, said = run(capsys, "host", tmp_path / "run", "--code", "abc")
    assert code == 2
    assert "--helper-of" in said


@pytest.mark.parametrize("command", [["invite"], ["ban", PEER], ["unban", PEER], ["rollback"]], ids=lambda it: it[0])
@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_without_a_run_is_said_to_have_none(tmp_path, capsys, command, name):
    (tmp_path / "empty").mkdir()
    code, said = run(capsys, command[0], tmp_path / name, *command[1:])
    assert code == 2
    assert said.strip().endswith(f"{name} holds no run: name the RUN_DIR of `dalle-lean host`")
