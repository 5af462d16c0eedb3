"""The folder of a machine that joins a run."""

from dataclasses import replace

import pytest

from dalle_lean.errors import UserError
from training.run.folder import run_folder
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.passes import Invite
from training.swarm.config import SwarmSection, SwarmSettings
from training.swarm.preflight.checks import OK, PROBLEM, WARNING
from training.swarm.preflight.survey import (
    NAME,
    JoinOptions,
    RunFiles,
    check_code,
    check_helpers,
    check_name,
    choose_folder,
    default_folder,
    survey,
)

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_a_volunteer_keeps_its_folder_over_a_rollback(tmp_path):
    before = SwarmSettings()
    after, later = (replace(before, swarm=replace(before.swarm, name=f"{before.swarm.name}-back{n}")) for n in (1, 2))
    assert before.run_id != after.run_id
    assert {default_folder(tmp_path, one).name for one in (before, after, later)} == {before.run_id}
    (tmp_path / later.run_id).mkdir()  # of a version that had one for each name
    assert default_folder(tmp_path, later).name == later.run_id


def test_a_second_peer_of_a_machine_is_told_of_its_option_before_anything_is_checked(tmp_path):
    with run_folder(tmp_path), pytest.raises(ValueError, match=r"another process works in .* with --folder$"):
        survey([NOBODY], JoinOptions(folder=tmp_path), pytest.fail)


def test_a_second_peer_is_told_of_its_option_as_soon_as_the_run_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choose_folder(None, JoinOptions()) is None
    run = RunFiles(SwarmSettings(), "", b"")
    folder = choose_folder(run, JoinOptions())
    assert folder == tmp_path / "dalle-lean/runs" / SwarmSettings().run_id
    with run_folder(folder), pytest.raises(ValueError, match="with --folder"):
        choose_folder(run, JoinOptions())


def test_who_takes_over_an_identity_is_told_whose_it_was_and_how_to_get_another(tmp_path):
    assert check_name(tmp_path, "bob") is None
    (tmp_path / NAME).write_text("alice")
    assert check_name(tmp_path, "alice") is check_name(tmp_path, None) is None
    taken = check_name(tmp_path, "bob")
    assert taken.level == WARNING
    assert f"the identity in {tmp_path} went by the name alice" in taken.found
    assert "name another --folder" in taken.fix


@pytest.mark.parametrize("code", ["WRONGCODE", "x", "A" * 200])
def test_what_cannot_be_a_code_is_refused_before_anything_is_checked(code):
    with pytest.raises(UserError, match=r"not a code; .* leave it out for a run that anyone may join"):
        JoinOptions(code=code)


@pytest.mark.parametrize(("admission", "fix"), [("invite", "ask its host for one"), ("open", "it needs none")])
def test_a_code_of_another_run_is_refused_as_soon_as_the_run_is_known(tmp_path, admission, fix):
    ours, theirs = (SigningKey.load_or_create(tmp_path / name) for name in ("ours", "theirs"))
    swarm = SwarmSection(run_key=ours.public, admission=admission)
    invite = Invite(id="00000000", uses=1, ends=2**31)
    code, another = (JoinOptions(code=invite.code(key)).code for key in (ours, theirs))
    for accepted in (None, code):
        check_code(swarm, accepted)
    with pytest.raises(UserError, match=f"not a code of this run; {fix}"):
        check_code(swarm, another)


def test_a_helper_answers_or_the_reason_why_none_does_is_said():
    answered, silent = check_helpers(object(), ""), check_helpers(None, "no answer in 15 s")
    assert (answered.level, answered.found, answered.fix) == (OK, "a helper answers", "")
    assert (silent.level, silent.found) == (PROBLEM, "no answer in 15 s")
    assert "ask the host for its address" in silent.fix
