"""What a pass proves, and what a gate refuses."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dalle_lean.errors import UserError
from training.swarm.admission.bans import Bans, change_bans
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SIGNATURE_BYTES, Forged, SigningKey, read_signed
from training.swarm.admission.passes import HELPER, REFUSALS, Invite, Pass, Refused

ANNA, BERT, HELP = "QmAnnaAnnaAnnaAnnaAnna", "QmBertBertBertBertBert", "QmHe1pHe1pHe1pHe1pHe1p"


def a_pass(peer=ANNA, role="trainer", lasts_s=60, **fields):
    return Pass(peer=peer, role=role, name="", ends=int(time.time() + lasts_s), **fields)


def reason(gate, peer, statement):
    with pytest.raises(Refused) as refusal:
        gate.check(peer, statement)
    return refusal.value.reason


def test_a_key_file_is_for_its_owner_only_and_stays_the_same(run_key, tmp_path):
    assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600
    assert SigningKey.load_or_create(tmp_path / "run.key").public == run_key.public


@pytest.mark.parametrize("content", [b"", b"no key", b"x" * 5000])
def test_a_file_that_holds_no_key_is_named(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ValueError, match="key"):
        SigningKey.load(tmp_path / "key")


def test_a_peer_with_a_pass_of_the_run_is_let_in(gate, run_key):
    given = a_pass()
    assert gate.check(ANNA, given.signed(run_key)) == given
    assert gate.is_admitted(ANNA)


def test_a_pass_of_another_run_is_refused(gate, other_key):
    assert reason(gate, ANNA, a_pass().signed(other_key)) == "forged"


def test_a_copied_pass_is_refused(gate, run_key):
    assert reason(gate, BERT, a_pass(ANNA).signed(run_key)) == "other peer"


def test_a_pass_that_has_ended_is_refused_even_if_it_was_let_in_before(gate, run_key, monkeypatch):
    statement = a_pass(lasts_s=60).signed(run_key)
    gate.check(ANNA, statement)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 120)
    assert reason(gate, ANNA, statement) == "ended"
    assert not gate.is_admitted(ANNA)


def test_a_changed_pass_is_refused(gate, run_key):
    statement = a_pass(role="trainer").signed(run_key)
    assert reason(gate, ANNA, statement.replace(b"trainer", b"helper")) == "forged"
    assert reason(gate, ANNA, bytes([statement[0] ^ 1]) + statement[1:]) == "forged"


@pytest.mark.parametrize("statement", [b"x", b"x" * 64, b"x" * 64 + b"[" * 1900, b"x" * 64 + b"{}", b"x" * 5000])
def test_garbage_is_no_pass(gate, statement):
    assert reason(gate, ANNA, statement) == "forged"


def test_who_shows_nothing_is_refused(gate):
    assert reason(gate, ANNA, b"") == "no pass"


def test_what_is_signed_as_something_else_is_no_pass(gate, run_key):
    content = {"peer": ANNA, "role": "trainer", "name": "", "ends": int(time.time() + 60)}
    assert reason(gate, ANNA, run_key.sign("bans", content)) == "forged"
    assert gate.check(ANNA, run_key.sign("pass", content)).peer == ANNA


@pytest.mark.parametrize(
    "change",
    [{"ends": "never"}, {"role": "host"}, {"name": 3}, {"more": 1}, {"sponsors": "a"}, {"sponsors": [3]}],
)
def test_a_pass_of_another_form_is_refused_even_if_the_run_signed_it(gate, run_key, change):
    content = {"peer": ANNA, "role": "trainer", "name": "", "ends": int(time.time() + 60), **change}
    assert reason(gate, ANNA, run_key.sign("pass", content)) == "forged"


@pytest.fixture
def helper(run_key, other_key):
    """The signed pass of a helper that admits trainers with `other_key`."""
    return a_pass(HELP, HELPER, lasts_s=60, key=other_key.public).signed(run_key)


def test_a_helper_admits_trainers(gate, helper, other_key):
    given = a_pass(issuer=HELP, lasts_s=30)
    assert gate.check(ANNA, given.signed(other_key, helper)) == replace(given, sponsors=(HELP,))


@pytest.mark.parametrize(
    "given",
    [
        a_pass(role="helper", issuer=HELP, lasts_s=30),
        a_pass(role="donor", issuer=HELP, lasts_s=30),
        a_pass(issuer=HELP, lasts_s=3600),
        a_pass(issuer="", lasts_s=30),
    ],
    ids=["a helper", "a donor", "for longer than itself", "in another's name"],
)
def test_a_helper_admits_nothing_else(gate, helper, other_key, given):
    assert reason(gate, ANNA, given.signed(other_key, helper)) == "forged"


def test_a_trainer_admits_nobody(gate, run_key, other_key):
    trainer = a_pass(BERT, key=other_key.public).signed(run_key)
    assert reason(gate, ANNA, a_pass(issuer=BERT, lasts_s=30).signed(other_key, trainer)) == "forged"


def test_a_helper_of_another_run_admits_nobody(gate, run_key, other_key):
    helper = a_pass(HELP, HELPER, key=other_key.public).signed(other_key)
    assert reason(gate, ANNA, a_pass(issuer=HELP, lasts_s=30).signed(other_key, helper)) == "forged"


@pytest.mark.parametrize("subject", [ANNA, "cafe0001", HELP, "beef0001"])
def test_a_ban_of_a_peer_its_helper_or_the_invitation_of_either_keeps_it_out_until_it_is_taken_back(
    gate, run_key, other_key, tmp_path, subject
):
    helper = a_pass(HELP, HELPER, lasts_s=60, key=other_key.public, invite="beef0001").signed(run_key)
    made_up = tuple("abcdefgh")  # what the helper claims of earlier helpers hides nobody
    statement = a_pass(issuer=HELP, lasts_s=30, invite="cafe0001", sponsors=made_up).signed(other_key, helper)
    gate.check(ANNA, statement)
    assert change_bans(tmp_path, run_key, subject, banned=True)
    assert not change_bans(tmp_path, run_key, subject, banned=True)
    assert not gate.is_admitted(ANNA)
    assert reason(gate, ANNA, statement) == "banned"
    with pytest.raises(Refused):
        gate.check_ban(ANNA)
    assert change_bans(tmp_path, run_key, subject, banned=False)
    gate.check(ANNA, statement)
    gate.check_ban(ANNA)


def test_bans_of_another_key_and_older_ones_change_nothing(gate, run_key, other_key):
    newest = Bans(5, frozenset([ANNA])).signed(run_key)
    gate.learn_bans(newest)
    for statement in (Bans(9).signed(other_key), Bans(4).signed(run_key), b"", b"x" * 100, run_key.sign("bans", [1])):
        gate.learn_bans(statement)
    assert gate.current_bans().banned == {ANNA}
    assert gate.bans_statement == newest
    again = Gate(run_key.public, gate.own.path, gate.bans_file.path)
    assert again.current_bans().banned == {ANNA}


def test_a_code_says_whom_it_is_for_and_only_the_run_makes_one(run_key, other_key):
    given = Invite(id="cafe0001", uses=3, ends=2_000_000_000, name="Änne")
    code = given.code(run_key)
    assert Invite.read(f" {code}\n", run_key.public) == given
    assert len(code) < 200
    for bad in (given.code(other_key), code[:-9], "", "x", "ß" * 20, "A" * 2000):
        with pytest.raises(Forged):
            Invite.read(bad, run_key.public)


def test_what_was_signed_is_what_is_read(run_key):
    statement = run_key.sign("pass", {"a": "ö"})
    assert read_signed("pass", statement, run_key.public) == {"a": "ö"}
    assert len(statement) == SIGNATURE_BYTES + len('{"a":"ö"}'.encode())


def test_memory_for_passes_is_bounded(gate, run_key, monkeypatch):
    monkeypatch.setattr("training.swarm.admission.gate.MAX_REMEMBERED", 10)
    given = a_pass()
    for number in range(30):
        peer = f"{ANNA}{number}"
        gate.check(peer, replace(given, peer=peer).signed(run_key))
    assert len(gate.admitted) == 10


@pytest.mark.parametrize("name", REFUSALS)
def test_every_refusal_is_a_sentence_that_says_why_and_what_to_do(name):
    refusal = Refused(name, ANNA)
    assert str(refusal) == f"{refusal.found}; {refusal.fix}"
    assert refusal.found
    assert refusal.fix
    assert "{" not in str(refusal)
    assert "\n" not in str(refusal)


def test_a_full_list_of_bans_is_said_and_stays_as_it_is(run_key, tmp_path, monkeypatch):
    monkeypatch.setattr("training.swarm.admission.bans.MAX_BANS_BYTES", 140)
    assert change_bans(tmp_path, run_key, ANNA, banned=True)
    before = (tmp_path / "bans").read_bytes()
    with pytest.raises(UserError, match=f"no room for {BERT}: 1 are banned already"):
        change_bans(tmp_path, run_key, BERT, banned=True)
    assert (tmp_path / "bans").read_bytes() == before


def test_bans_at_the_same_time_are_all_kept(run_key, tmp_path):
    subjects = [f"peer{number}" for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda subject: change_bans(tmp_path, run_key, subject, banned=True), subjects))
    assert Bans.read((tmp_path / "bans").read_bytes(), run_key.public).banned == set(subjects)
