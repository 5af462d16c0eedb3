"""Who gets a pass under each policy, and what a code is good for."""

import json
import time

import pytest

from training.swarm.admission import desk as desks
from training.swarm.admission.bans import change_bans
from training.swarm.admission.desk import Application, Desk
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.passes import HELPER, HELPER_PASS_S, PASS_S, Invite, Pass, Refused, encoded

ANNA, BERT, CARL, HELP = (f"Qm{name}" * 4 for name in ("Anna", "Bert", "Car1", "Hejp"))
HOME = "192.0.2.1"


@pytest.fixture
def run_key(tmp_path):
    return SigningKey.load_or_create(tmp_path / "run.key")


@pytest.fixture
def gate(run_key, tmp_path, monkeypatch):
    monkeypatch.setattr("training.swarm.admission.bans.RELOAD_S", 0.0)
    return Gate(run_key.public, tmp_path / "pass", tmp_path / "bans")


@pytest.fixture
def desk(gate, run_key, tmp_path):
    return lambda policy, **options: Desk(gate, policy, tmp_path, tmp_path / "run.key", **options)


def code(run_key, *, uses=1, lasts_s=60, **fields):
    return Invite(id="cafe0001", uses=uses, ends=int(time.time() + lasts_s), **fields).code(run_key)


def refused(desk, asked, address=HOME):
    with pytest.raises(Refused) as refusal:
        desk.admit(asked, address)
    return refusal.value.reason


def test_an_open_run_admits_anybody_as_a_trainer_for_a_day(gate, desk):
    given = gate.check(ANNA, desk("open").admit(Application(peer=ANNA, name="Anna"), HOME))
    assert (given.role, given.name) == ("trainer", "Anna")
    assert abs(given.ends - time.time() - PASS_S) < 60


def test_an_open_run_admits_few_newcomers_at_once_from_one_address(desk):
    office, asked = desk("open"), [Application(peer=f"{ANNA}{number}") for number in range(1, 10)]
    for newcomer in asked[: desks.OPEN_PASSES_AT_ONCE]:
        office.admit(newcomer, HOME)
    assert refused(office, asked[-1]) == "busy"
    office.admit(asked[-1], "192.0.2.2")


def test_an_invited_run_asks_for_a_code(gate, desk, run_key):
    office = desk("invite")
    assert refused(office, Application(peer=ANNA)) == "no code"
    given = gate.check(ANNA, office.admit(Application(peer=ANNA, code=code(run_key, name="Anna"), name="Eve"), HOME))
    assert (given.name, given.invite) == ("Anna", "cafe0001")


def test_a_code_admits_as_many_machines_as_it_is_for_at_all_desks_of_a_host_together(desk, run_key):
    invited = code(run_key, uses=2)
    for office, peer in ((desk("invite"), ANNA), (desk("invite"), BERT), (desk("invite"), ANNA)):
        office.admit(Application(peer=peer, code=invited), HOME)
    assert refused(desk("invite"), Application(peer=CARL, code=invited)) == "used up"


def test_a_join_that_is_replayed_under_another_identity_is_refused(desk, run_key):
    office = desk("invite")
    seen = Application(peer=ANNA, code=code(run_key)).to_json()
    office.admit(Application.parse(seen), HOME)
    replayed = Application.parse(seen.replace(ANNA.encode(), BERT.encode()))
    assert refused(office, replayed) == "used up"
    office.admit(Application.parse(seen), HOME)  # a pass for Anna's machine, which nobody else can use


@pytest.mark.parametrize(
    ("made", "reason"), [({"lasts_s": -1}, "ended"), ({"key": "other"}, "forged"), ({"role": HELPER}, "")]
)
def test_codes_that_have_ended_or_are_forged_admit_nobody(gate, desk, run_key, tmp_path, made, reason):
    other = SigningKey.load_or_create(tmp_path / "other.key")
    key = other if made.pop("key", None) else run_key
    asked = Application(peer=ANNA, code=code(key, **made), key=other.public)
    if reason:
        assert refused(desk("open"), asked) == reason
    else:
        given = gate.check(ANNA, desk("invite").admit(asked, HOME))
        assert (given.role, given.key) == ("helper", other.public)
        assert abs(given.ends - time.time() - HELPER_PASS_S) < 60


def test_a_trainers_code_brings_no_key_to_admit_others_with(gate, desk, run_key):
    asked = Application(peer=ANNA, code=code(run_key), key="0" * 64)
    assert gate.check(ANNA, desk("invite").admit(asked, HOME)).key == ""


def test_a_listed_run_admits_those_on_its_list_as_it_is_now(gate, desk, tmp_path):
    names = tmp_path / "peers.txt"
    names.write_text(f"# friends\n{ANNA}  # Anna\n")
    office = desk("list", peer_list=names)
    statement = office.admit(Application(peer=ANNA), HOME)
    assert refused(office, Application(peer=BERT)) == "not listed"
    names.write_text(f"{BERT}\n")
    office.admit(Application(peer=BERT), HOME)
    assert refused(office, Application(peer=ANNA, current=encoded(statement))) == "not listed"


def test_a_member_renews_its_pass_without_a_code(gate, desk, run_key):
    first = desk("invite").admit(Application(peer=ANNA, code=code(run_key), name="Anna"), HOME)
    again = gate.check(ANNA, desk("invite").admit(Application(peer=ANNA, current=encoded(first)), HOME))
    assert (again.name, again.invite) == ("Anna", "cafe0001")


@pytest.mark.parametrize(("away_s", "comes_back"), [(7 * 24 * 3600, True), (40 * 24 * 3600, False)])
def test_who_was_away_comes_back_without_a_code_for_a_while(gate, desk, run_key, monkeypatch, away_s, comes_back):
    first = desk("invite").admit(Application(peer=ANNA, code=code(run_key)), HOME)
    asked, now = Application(peer=ANNA, current=encoded(first)), time.time()
    monkeypatch.setattr(time, "time", lambda: now + away_s)
    with pytest.raises(Refused, match="ended"):
        gate.check(ANNA, first)
    if comes_back:
        gate.check(ANNA, desk("invite").admit(asked, HOME))
    else:
        assert refused(desk("invite"), asked) == "no code"


def test_an_old_code_beside_a_pass_does_no_harm_and_another_one_counts(gate, desk, run_key, monkeypatch):
    old, now = code(run_key, lasts_s=60), time.time()
    first = desk("invite").admit(Application(peer=ANNA, code=old), HOME)
    monkeypatch.setattr(time, "time", lambda: now + 120)
    desk("invite").admit(Application(peer=ANNA, code=old, current=encoded(first)), HOME)
    other = Invite(id="cafe0002", uses=1, ends=int(now + 300), role=HELPER).code(run_key)
    asked = Application(peer=ANNA, code=other, current=encoded(first), key="0" * 64)
    assert gate.check(ANNA, desk("invite").admit(asked, HOME)).role == "helper"


def test_nobody_renews_the_pass_of_another(desk, run_key):
    first = desk("invite").admit(Application(peer=ANNA, code=code(run_key)), HOME)
    assert refused(desk("invite"), Application(peer=BERT, current=encoded(first))) == "no code"


@pytest.mark.parametrize("subject", [ANNA, "cafe0001"])
def test_who_is_banned_gets_no_pass(desk, run_key, tmp_path, subject):
    office = desk("invite")
    first = office.admit(Application(peer=ANNA, code=code(run_key)), HOME)
    change_bans(tmp_path, run_key, subject, banned=True)
    assert refused(office, Application(peer=ANNA, code=code(run_key))) == "banned"
    assert refused(office, Application(peer=ANNA, current=encoded(first), code=code(run_key))) == "banned"


@pytest.fixture
def helpers_desk(run_key, tmp_path):
    """Of a helper elsewhere, while the host is away."""

    def made(policy="open", lasts_s=3600):
        folder = tmp_path / "helper"
        own = SigningKey.load_or_create(folder / "helper.key")
        given = Pass(peer=HELP, role=HELPER, name="", ends=int(time.time() + lasts_s), key=own.public)
        (folder / "pass").write_bytes(given.signed(run_key))
        return Desk(Gate(run_key.public, folder / "pass", folder / "bans"), policy, folder, folder / "helper.key")

    return made


@pytest.mark.parametrize("policy", ["open", "invite"])
def test_a_helper_elsewhere_admits_newcomers_no_longer_than_itself(gate, helpers_desk, run_key, policy):
    asked = Application(peer=ANNA, code=code(run_key) if policy == "invite" else "")
    given = gate.check(ANNA, helpers_desk(policy).admit(asked, HOME))
    assert (given.role, given.issuer) == ("trainer", HELP)
    assert given.ends <= time.time() + 3600


def test_a_pass_of_a_helper_is_renewed_by_the_host_and_by_it(gate, desk, helpers_desk):
    helped = helpers_desk().admit(Application(peer=ANNA), HOME)
    by_host = desk("invite").admit(Application(peer=ANNA, current=encoded(helped)), HOME)
    assert gate.check(ANNA, by_host).issuer == ""
    again = helpers_desk("invite").admit(Application(peer=ANNA, current=encoded(by_host)), HOME)
    assert gate.check(ANNA, again).issuer == HELP


def test_a_helper_elsewhere_makes_no_helpers(helpers_desk, run_key):
    asked = Application(peer=BERT, code=code(run_key, role=HELPER), key="0" * 64)
    assert refused(helpers_desk(), asked) == "host only"


def test_a_helper_whose_pass_has_ended_admits_nobody(helpers_desk):
    assert refused(helpers_desk(lasts_s=-1), Application(peer=ANNA)) == "host only"


@pytest.mark.parametrize("content", [b"", b"x", b"[]", b"{}", b"[" * 5000, b'{"peer": 3}', b'{"peer": "x"}'])
def test_what_is_no_request_is_refused(content):
    with pytest.raises(Refused, match="does not understand"):
        Application.parse(content)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name in ("name", "code", "key") for value in (3, None)),
        {"more": 1},
        {"name": "\x1b[2J"},
        {"key": "0"},
        {"peer": f"../{ANNA}"},
    ],
)
def test_a_request_with_a_senseless_field_is_refused(fields):
    with pytest.raises(Refused, match="does not understand"):
        Application.parse(json.dumps({"peer": ANNA, **fields}).encode())
