"""What a peer contributes to an average, and what it accepts from others."""

import math
from functools import partial

import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionInfo, deserialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, MSGPackSerializer, get_dht_time

from training.swarm.averaging.averagers import is_possible
from training.swarm.averaging.gradient_averager import (
    SwarmGradientAverager,
    SwarmPowerSGDAverager,
    epoch_of_group,
    epoch_of_trainers,
)
from training.swarm.averaging.group_reports import NO_REPORT, STALE_EPOCH, out_of_step, with_checked_reports
from training.swarm.averaging.state_averager import STALE_WEIGHT, SwarmStateAverager
from training.swarm.averaging.state_validation import StateRefused, check_epoch, check_state, tensors_sha256
from training.swarm.averaging.wire import wire_compression
from training.swarm.config import WireSection
from training.swarm.host_peers import HostPeers


def state():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator), torch.randint(0, 255, (9,), generator=generator).byte()]


def metadata_of(tensors, epoch=7):
    return {"epoch": epoch, "sha256": tensors_sha256(tensors)}


def test_a_whole_state_is_taken():
    check_state(metadata_of(state()), state(), own=[torch.zeros(4, 3), torch.zeros(9, dtype=torch.uint8)])


@pytest.mark.parametrize("metadata", [None, [], {}, {"epoch": 1.0}, {"epoch": True}, {"epoch": -1}])
def test_a_state_without_a_step_is_refused(metadata):
    with pytest.raises(StateRefused, match="does not name its step"):
        check_epoch(metadata, 0)


def test_a_state_of_a_step_that_is_not_asked_for_is_refused():
    check_epoch({"epoch": 7}, 7, 7)
    with pytest.raises(StateRefused, match="of step 7, behind 8"):
        check_epoch({"epoch": 7}, 8)
    with pytest.raises(StateRefused, match="of step 8, and the schedule ends at 7"):
        check_epoch({"epoch": 8}, 0, 7)


OTHER_MODELS = {
    "one missing": [torch.zeros(4, 3)],
    "another shape": [torch.zeros(3, 4), torch.zeros(9, dtype=torch.uint8)],
    "another type": [torch.zeros(4, 3, dtype=torch.float64), torch.zeros(9, dtype=torch.uint8)],
    "one too many": [*state(), torch.zeros(1)],
}


@pytest.mark.parametrize("other", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_the_state_of_another_model_is_refused(other):
    with pytest.raises(StateRefused, match="another model"):
        check_state(metadata_of(other), other, own=state())


@pytest.mark.parametrize("place", [0, 1])
def test_a_state_that_changed_on_the_way_is_refused(place):
    arrived = state()
    arrived[place].view(-1)[2] += 1
    with pytest.raises(StateRefused, match="checksum"):
        check_state(metadata_of(state()), arrived, own=state())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_state_with_a_number_that_is_not_finite_is_refused(bad):
    arrived = state()
    arrived[0][1, 1] = bad
    with pytest.raises(StateRefused, match="not finite"):
        check_state(metadata_of(arrived), arrived, own=state())


def resting(kind, parameters, **options):
    """An averager without its process."""
    return kind(parameters, dht=None, prefix="test", client_mode=True, start=False, **options)


def test_batches_of_any_sizes_become_the_mean_over_their_samples():
    parameter = torch.nn.Parameter(torch.zeros(5))
    averager = resting(SwarmGradientAverager, [parameter])
    samples = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    for batch in samples.split([4, 2, 3]):
        parameter.grad = batch.mean(0)
        averager.accumulate_grads_(len(batch))
        averager.accumulate_grads_(0)  # a batch that was dropped
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as (averaged,):
        torch.testing.assert_close(averaged, samples.mean(0))
    assert averager.local_samples_accumulated == 9


def test_who_has_no_samples_brings_zeros():
    parameter = torch.nn.Parameter(torch.zeros(5))
    averager = resting(SwarmGradientAverager, [parameter])
    parameter.grad = torch.ones(5)
    averager.accumulate_grads_(0)
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as (averaged,):
        assert not averaged.any()
    assert averager.local_samples_accumulated == 0


def test_all_peers_begin_powersgd_with_the_same_thin_matrices():
    one, other = (
        resting(SwarmPowerSGDAverager, [torch.nn.Parameter(torch.zeros(40, 30))], averager_rank=2) for _ in "ab"
    )
    assert len(one._qs) == 1
    assert torch.equal(one._qs[0], other._qs[0])


@pytest.mark.parametrize("compression", ["fp32", "fp16", "8bit"])
def test_an_average_of_nothing_is_still_none_after_compression(compression):
    nothing = torch.full((5000,), math.nan)
    codec = wire_compression(WireSection(compression=compression, min_eight_bit_numel=1000))
    assert deserialize_torch_tensor(codec.compress(nothing, CompressionInfo.from_tensor(nothing))).isnan().all()


def report(bandwidth=1.0, mode=AveragingMode.NODE, gathered=7):
    return MSGPackSerializer.dumps((bandwidth, mode.value, MSGPackSerializer.dumps(gathered)))


def members(count):
    return tuple(PeerID(bytes([number]) * 34) for number in range(count))


@pytest.mark.parametrize(
    ("said", "left_out"),
    [
        ((7, 7, 6), [2]),
        ((7, 7, 7), []),
        ((3, 7), [0]),
        ((7, STALE_EPOCH, STALE_EPOCH), [1, 2]),
        ((STALE_EPOCH, STALE_EPOCH), []),
        ((7, 7, 10**9), [2]),
        ((7, 7, b"\xc1"), [2]),
        ((7, 7, "seven"), [2]),
        ((7, 7, None), [2]),
        ((7, 7, 7.0), [2]),
    ],
)
def test_weights_of_another_step_than_most_are_not_averaged(said, left_out):
    peers = members(len(said))
    reports = tuple(step if isinstance(step, bytes) else report(gathered=step) for step in said)
    assert out_of_step(GroupInfo(b"group", peers, reports)) == {peers[number] for number in left_out}


def test_helpers_have_no_step_that_counts():
    reports = (report(), report(mode=AveragingMode.CLIENT), report(mode=AveragingMode.AUX, gathered=0))
    assert not out_of_step(GroupInfo(b"group", members(3), reports))


@pytest.mark.parametrize(
    ("said", "own", "epoch"),
    [
        ([7, 7, 7], 7, 7),
        ([7, 7, 8], 7, 8),
        ([8, 8, 7], 7, 8),
        ([7, 8], 7, 8),
        ([7, 7, 50], 7, 7),
        ([7, 50], 7, 7),
        ([7, 7, 50], 50, 50),
        ([None, "8", 8.0, True, -3], 7, 7),
        ([], 7, 7),
    ],
)
def test_who_has_counted_a_step_too_few_counts_as_its_group_does(said, own, epoch):
    assert epoch_of_group(dict(enumerate(said)), own) == epoch


def test_the_step_of_a_donor_in_the_group_counts_and_nobody_elses():
    assert epoch_of_group({"donor": 7, "a": 8, "b": 8, "c": 8}, 7, {"donor"}) == 7
    assert epoch_of_group({"donor": 9, "a": 7, "b": 7, "c": 7}, 7, {"donor"}) == 9


@pytest.mark.parametrize(
    ("said", "own", "epoch"),
    [
        ([143, 143, 200], 88, 143),
        ([143, 200], 88, 143),
        ([200], 88, 89),
        ([], 88, 88),
        ([80, 80], 88, 88),
        ([None], 8, 8),
    ],
)
def test_a_donor_follows_most_of_those_it_computed_with_and_a_lone_one_a_single_step(said, own, epoch):
    assert epoch_of_trainers(dict(enumerate(said)), own) == epoch


def resting_state_averager(last_epoch, dht=None, **options):
    """A state averager without its process, over one parameter that SGD moves."""
    return SwarmStateAverager(
        dht=dht,
        prefix="test",
        params=[torch.nn.Parameter(torch.zeros(5))],
        optimizer=partial(torch.optim.SGD, lr=0.0),
        lr_of_epoch=lambda epoch: 0.0,
        last_epoch=last_epoch,
        client_mode=True,
        start=False,
        **options,
    )


@pytest.fixture
def state_averager():
    return resting_state_averager(last_epoch=100)


def step_control():
    control = StepControl(get_dht_time(), get_dht_time() + 9, allow_retries=False, weight=1.0, data_for_gather=b"")
    control.attach(MPFuture(), MPFuture())
    return control


def succeed(control):
    control.set_result({})


def fail(control):
    control.set_exception(ValueError())


def round_of(state_averager, end=succeed):
    """This peer's options in a round of weight averaging that was scheduled before the step; `end` ends it."""
    control = step_control()
    control._trigger.add_done_callback(lambda _: end(control))
    state_averager._do(None, False, False, True, control, None, True, timeout=5.0)
    return control


def test_weights_that_became_stale_after_their_round_was_found_count_for_nothing_in_it(state_averager):
    assert round_of(state_averager).weight == 1.0
    state_averager.skip_to(3)
    assert round_of(state_averager, fail).weight == STALE_WEIGHT
    assert round_of(state_averager).weight == STALE_WEIGHT
    assert round_of(state_averager).weight == 1.0


def test_weights_stay_stale_where_the_average_was_not_taken(state_averager):
    def refuse(control):
        state_averager._dropped_tensors.value += 1
        succeed(control)

    state_averager.skip_to(3)
    round_of(state_averager, refuse)
    assert state_averager.stale


def test_stale_weights_whose_round_found_nobody_count_for_nothing_in_the_next_one(state_averager, monkeypatch):
    failed, next_one = step_control(), step_control()
    failed.allow_allreduce()
    failed.set_exception(ValueError())
    next_one._trigger.add_done_callback(lambda _: next_one.set_result({}))
    monkeypatch.setattr(state_averager, "schedule_step", lambda **_: next_one)
    state_averager.skip_to(3)
    state_averager._do(None, False, False, True, failed, None, True, timeout=5.0)
    assert next_one.weight == STALE_WEIGHT
    assert not state_averager.stale


def test_a_state_is_handed_out_under_the_step_of_its_weights(state_averager):
    def step_handed_out():
        return state_averager.get_current_state()[0]["epoch"]

    state_averager.adopt(metadata_of([torch.ones(5)], epoch=7), [torch.ones(5)])
    assert step_handed_out() == 7
    state_averager.skip_to(9)  # the others are there
    state_averager._update_scheduler()
    assert step_handed_out() == 7
    state_averager.local_epoch += 1
    round_of(state_averager, fail)
    assert step_handed_out() == 8
    round_of(state_averager)  # with theirs
    assert step_handed_out() == 10


def test_a_state_of_the_same_step_that_was_taken_from_others_is_handed_out_in_place_of_the_own(state_averager):
    state_averager.adopt(metadata_of([torch.ones(5)]), [torch.ones(5)])
    assert state_averager.get_current_state()[1][0].tolist() == [1.0] * 5
    state_averager.adopt(metadata_of([torch.zeros(5)]), [torch.zeros(5)])
    assert state_averager.get_current_state()[1][0].tolist() == [0.0] * 5


NONSENSE = {
    "no MessagePack": b"\xc1garbage",
    "nothing": b"",
    "a number": MSGPackSerializer.dumps(3),
    "too few values": MSGPackSerializer.dumps((1.0, 0)),
    "no such mode": MSGPackSerializer.dumps((1.0, 9, MSGPackSerializer.dumps(7))),
    "no bytes for the others": MSGPackSerializer.dumps((1.0, 0, 7)),
    "a negative bandwidth": report(-1.0),
    "no number for a bandwidth": report("fast"),
    "a bandwidth of nan": report(math.nan),
    "an endless bandwidth": report(math.inf),
    "a megabyte": report(gathered="x" * 2**20),
}


@pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)
def test_a_report_that_makes_no_sense_counts_as_none_and_the_round_goes_on(content):
    group = with_checked_reports(GroupInfo(b"group", members(3), (report(), content, report(None))), HostPeers())
    assert group.gathered == (report(), MSGPackSerializer.dumps(NO_REPORT), report(None))
    bandwidth, mode, gathered = NO_REPORT
    assert (bandwidth, AveragingMode(mode)) == (0.0, AveragingMode.CLIENT)
    assert epoch_of_group(dict(enumerate([7, MSGPackSerializer.loads(gathered), 7])), 6) == 7
    assert out_of_step(group) == {members(3)[1]}


def reducing(host, **members):
    """The members of a group that reduce; each has a mode and may have a bandwidth."""
    peers = {name: PeerID(name.encode() * 34) for name in members}
    info = GroupInfo(b"group", tuple(peers.values()), tuple(report(*said) for said in members.values()))
    info = with_checked_reports(
        info, HostPeers(**{role: frozenset(map(peers.get, names)) for role, names in host.items()})
    )
    found = dict(zip(members, map(MSGPackSerializer.loads, info.gathered), strict=True))
    assert all(mode == members[name][1].value for name, (_, mode, _) in found.items())
    return "".join(name for name, (bandwidth, mode, _) in found.items() if bandwidth != 0 and mode != 1)


NODE, CLIENT, AUX = ((None, mode) for mode in (AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX))
HOST = {"helpers": "hi", "donors": "d"}


@pytest.mark.parametrize(
    ("members", "reducers"),
    [
        ({"h": AUX, "i": AUX, "d": NODE, "t": NODE, "e": (1e12, AveragingMode.NODE)}, "hi"),
        ({"h": AUX, "t": CLIENT, "x": AUX}, "h"),
        ({"d": NODE, "t": NODE, "x": AUX}, "d"),
        ({"h": (0.0, AveragingMode.CLIENT), "d": NODE, "t": NODE}, "d"),
        ({"t": NODE, "u": NODE, "c": CLIENT}, "tu"),
    ],
    ids=["helpers", "one helper", "no helper", "a helper without a report", "the host is away"],
)
def test_only_the_hosts_peers_reduce_while_they_are_there(members, reducers):
    assert reducing(HOST, **members) == reducers


def test_in_a_run_that_names_nobody_all_who_listen_reduce():
    assert reducing({}, t=NODE, u=NODE, c=CLIENT, x=AUX) == "tux"


@pytest.mark.parametrize("returned", [lambda own, mean: own, lambda own, mean: mean, lambda own, mean: 2 * mean - own])
def test_what_an_average_may_be_is_believed(returned):
    parts = torch.randn(5000, generator=torch.Generator().manual_seed(0)) + torch.randn(4, 5000)
    own, mean = parts[0], parts.mean(0)
    assert is_possible(own, returned(own, mean) - own, 1.0, math.inf)
    assert is_possible(own[:3], (returned(own, mean) - own)[:3], 1.0, math.inf)
    assert is_possible(torch.zeros(5), torch.ones(5), 1.0, math.inf)


@pytest.mark.parametrize(
    "returned", [lambda own: -10 * own, lambda own: 1e6 * torch.ones_like(own), lambda own: own / 0]
)
def test_what_no_average_can_be_is_not_believed(returned):
    own = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert not is_possible(own, returned(own) - own, 1.0, math.inf)
    assert not is_possible(own, -own, 1.0, SwarmStateAverager.max_shift)
