"""Who gets a pass under each policy, and what a code permits."""

import json
import time
from functools import partial

import pytest

from training.swarm.admission import pass_issuer, service
from training.swarm.admission.bans import change_bans
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.pass_issuer import Application, PassIssuer
from training.swarm.admission.passes import HELPER, HELPER_PASS_S, PASS_S, Invite, Pass, Refused, encoded

ANNA, BERT, CARL, HELP = (f"Qm{name}" * 4 for name in ("Anna", "Bert", "Car1", "Hejp"))
HOME = "192.0.2.1"


@pytest.fixture
def issuer(gate, run_key, tmp_path):
    return lambda policy, **options: PassIssuer(gate, policy, tmp_path, tmp_path / "run.key", **options)


def code(run_key, *, uses=1, lasts_s=60, **fields):
    return Invite(id="cafe0001", uses=uses, ends=int(time.time() + lasts_s), **fields).code(run_key)


def refused(issuer, asked, address=HOME):
    with pytest.raises(Refused) as refusal:
        issuer.admit(asked, address)
    return refusal.value.reason


def test_an_open_run_admits_anybody_as_a_trainer_for_a_day(gate, issuer):
    given = gate.check(ANNA, issuer("open").admit(Application(peer=ANNA, name="Anna"), HOME))
    assert (given.role, given.name) == ("trainer", "Anna")
    assert abs(given.ends - time.time() - PASS_S) < 60


def test_an_open_run_admits_few_newcomers_at_once_from_one_address(issuer):
    one, asked = issuer("open"), [Application(peer=f"{ANNA}{number}") for number in range(1, 10)]
    for newcomer in asked[: pass_issuer.OPEN_PASSES_AT_ONCE]:
        one.admit(newcomer, HOME)
    assert refused(one, asked[-1]) == "busy"
    one.admit(asked[-1], "192.0.2.2")


def test_an_invited_run_asks_for_a_code(gate, issuer, run_key):
    one = issuer("invite")
    assert refused(one, Application(peer=ANNA)) == "no code"
    given = gate.check(ANNA, one.admit(Application(peer=ANNA, code=code(run_key, name="Anna"), name="Eve"), HOME))
    assert (given.name, given.invite) == ("Anna", "cafe0001")


def test_a_code_admits_as_many_machines_as_it_is_for_at_all_helpers_of_a_host_together(issuer, run_key):
    invited = code(run_key, uses=2)
    for one, peer in ((issuer("invite"), ANNA), (issuer("invite"), BERT), (issuer("invite"), ANNA)):
        one.admit(Application(peer=peer, code=invited), HOME)
    assert refused(issuer("invite"), Application(peer=CARL, code=invited)) == "used up"


def test_a_join_that_is_replayed_under_another_identity_is_refused(issuer, run_key):
    one = issuer("invite")
    seen = Application(peer=ANNA, code=code(run_key)).to_json()
    one.admit(Application.parse(seen), HOME)
    replayed = Application.parse(seen.replace(ANNA.encode(), BERT.encode()))
    assert refused(one, replayed) == "used up"
    one.admit(Application.parse(seen), HOME)  # a pass for Anna's machine, which nobody else can use


@pytest.mark.parametrize(
    ("made", "reason"), [({"lasts_s": -1}, "ended"), ({"key": "other"}, "forged"), ({"role": HELPER}, "")]
)
def test_codes_that_have_ended_or_are_forged_admit_nobody(gate, issuer, run_key, other_key, made, reason):
    key = other_key if made.pop("key", None) else run_key
    asked = Application(peer=ANNA, code=code(key, **made), key=other_key.public)
    if reason:
        assert refused(issuer("open"), asked) == reason
    else:
        given = gate.check(ANNA, issuer("invite").admit(asked, HOME))
        assert (given.role, given.key) == ("helper", other_key.public)
        assert abs(given.ends - time.time() - HELPER_PASS_S) < 60


def test_a_trainers_code_brings_no_key_to_admit_others_with(gate, issuer, run_key):
    asked = Application(peer=ANNA, code=code(run_key), key="0" * 64)
    assert gate.check(ANNA, issuer("invite").admit(asked, HOME)).key == ""


def test_a_listed_run_admits_those_on_its_list_as_it_is_now(gate, issuer, tmp_path):
    names = tmp_path / "peers.txt"
    names.write_text(f"# friends\n{ANNA}  # Anna\n")
    one = issuer("list", peer_list=names)
    statement = one.admit(Application(peer=ANNA), HOME)
    assert refused(one, Application(peer=BERT)) == "not listed"
    names.write_text(f"{BERT}\n")
    one.admit(Application(peer=BERT), HOME)
    assert refused(one, Application(peer=ANNA, current=encoded(statement))) == "not listed"


def test_a_member_renews_its_pass_without_a_code(gate, issuer, run_key):
    first = issuer("invite").admit(Application(peer=ANNA, code=code(run_key), name="Anna"), HOME)
    again = gate.check(ANNA, issuer("invite").admit(Application(peer=ANNA, current=encoded(first)), HOME))
    assert (again.name, again.invite) == ("Anna", "cafe0001")


@pytest.mark.parametrize(("away_s", "comes_back"), [(7 * 24 * 3600, True), (40 * 24 * 3600, False)])
def test_who_was_away_comes_back_without_a_code_for_a_while(gate, issuer, run_key, monkeypatch, away_s, comes_back):
    first = issuer("invite").admit(Application(peer=ANNA, code=code(run_key)), HOME)
    asked, now = Application(peer=ANNA, current=encoded(first)), time.time()
    monkeypatch.setattr(time, "time", lambda: now + away_s)
    with pytest.raises(Refused, match="expired"):
        gate.check(ANNA, first)
    if comes_back:
        gate.check(ANNA, issuer("invite").admit(asked, HOME))
    else:
        assert refused(issuer("invite"), asked) == "no code"


def test_an_old_code_beside_a_pass_does_no_harm_and_another_one_counts(gate, issuer, run_key, monkeypatch):
    old, now = code(run_key, lasts_s=60), time.time()
    first = issuer("invite").admit(Application(peer=ANNA, code=old), HOME)
    monkeypatch.setattr(time, "time", lambda: now + 120)
    issuer("invite").admit(Application(peer=ANNA, code=old, current=encoded(first)), HOME)
    other = Invite(id="cafe0002", uses=1, ends=int(now + 300), role=HELPER).code(run_key)
    asked = Application(peer=ANNA, code=other, current=encoded(first), key="0" * 64)
    assert gate.check(ANNA, issuer("invite").admit(asked, HOME)).role == "helper"


def test_nobody_renews_the_pass_of_another(issuer, run_key):
    first = issuer("invite").admit(Application(peer=ANNA, code=code(run_key)), HOME)
    assert refused(issuer("invite"), Application(peer=BERT, current=encoded(first))) == "no code"


@pytest.mark.parametrize("subject", [ANNA, "cafe0001"])
def test_who_is_banned_gets_no_pass(issuer, run_key, tmp_path, subject):
    one = issuer("invite")
    first = one.admit(Application(peer=ANNA, code=code(run_key)), HOME)
    change_bans(tmp_path, run_key, subject, banned=True)
    assert refused(one, Application(peer=ANNA, code=code(run_key))) == "banned"
    assert refused(one, Application(peer=ANNA, current=encoded(first), code=code(run_key))) == "banned"


@pytest.fixture
def helpers_issuer(run_key, tmp_path):
    """A PassIssuer of a helper elsewhere, while the host is offline."""

    def made(policy="open", lasts_s=3600, invite=""):
        folder = tmp_path / "helper"
        own = SigningKey.load_or_create(folder / "helper.key")
        ends = int(time.time() + lasts_s)
        given = Pass(peer=HELP, role=HELPER, name="", ends=ends, key=own.public, invite=invite)
        (folder / "pass").write_bytes(given.signed(run_key))
        return PassIssuer(Gate(run_key.public, folder / "pass", folder / "bans"), policy, folder, folder / "helper.key")

    return made


@pytest.mark.parametrize("policy", ["open", "invite"])
def test_a_helper_elsewhere_admits_newcomers_no_longer_than_itself(gate, helpers_issuer, run_key, policy):
    asked = Application(peer=ANNA, code=code(run_key) if policy == "invite" else "")
    given = gate.check(ANNA, helpers_issuer(policy).admit(asked, HOME))
    assert (given.role, given.issuer) == ("trainer", HELP)
    assert given.ends <= time.time() + 3600


def test_a_pass_of_a_helper_is_renewed_by_the_host_and_by_it(gate, issuer, helpers_issuer):
    helped = helpers_issuer().admit(Application(peer=ANNA), HOME)
    by_host = issuer("invite").admit(Application(peer=ANNA, current=encoded(helped)), HOME)
    assert gate.check(ANNA, by_host).issuer == ""
    again = helpers_issuer("invite").admit(Application(peer=ANNA, current=encoded(by_host)), HOME)
    assert gate.check(ANNA, again).issuer == HELP


def test_a_ban_of_the_code_that_a_helper_joined_with_reaches_those_whose_passes_the_host_has_renewed(
    gate, issuer, helpers_issuer, run_key, tmp_path
):
    helped = helpers_issuer(invite="beef0001").admit(Application(peer=ANNA), HOME)
    by_host = issuer("invite").admit(Application(peer=ANNA, current=encoded(helped)), HOME)
    change_bans(tmp_path, run_key, "beef0001", banned=True)
    with pytest.raises(Refused) as refusal:
        gate.check(ANNA, by_host)
    assert refusal.value.reason == "banned"
    assert refused(issuer("invite"), Application(peer=ANNA, current=encoded(by_host))) == "no code"


def test_a_helper_elsewhere_makes_no_helpers(helpers_issuer, run_key):
    asked = Application(peer=BERT, code=code(run_key, role=HELPER), key="0" * 64)
    assert refused(helpers_issuer(), asked) == "host only"


def test_a_helper_whose_pass_has_ended_admits_nobody(helpers_issuer):
    assert refused(helpers_issuer(lasts_s=-1), Application(peer=ANNA)) == "host only"


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


def test_what_the_host_says_counts_more_than_that_another_helper_cannot_reach_it(helpers_issuer, monkeypatch):
    refusals = iter(["host only", "banned"])
    monkeypatch.setattr(service, "call", lambda *_, **options: {"refused": next(refusals)})
    with pytest.raises(Refused, match="the host has banned this machine"):
        service.apply(None, ["another helper", "host"], helpers_issuer().gate, Application(peer=HELP))


@pytest.mark.parametrize(("lasts_s", "starts"), [(3600, True), (-1, False)])
def test_a_helper_elsewhere_starts_with_its_own_pass_while_the_host_is_offline(
    helpers_issuer, monkeypatch, lasts_s, starts
):
    monkeypatch.setattr(service, "call", lambda *_, **options: {"refused": "host only"})
    enter = partial(
        service.apply, None, ["another helper"], helpers_issuer(lasts_s=lasts_s).gate, Application(peer=HELP)
    )
    if starts:
        enter()
    else:
        with pytest.raises(Refused, match="only the host can admit a helper"):
            enter()
