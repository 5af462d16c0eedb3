"""Real averagers on loopback: who leads and reduces, and who is avoided."""

import asyncio
import multiprocessing as mp
from concurrent.futures import ThreadPoolExecutor

import hivemind
import pytest
import torch

from tests.training.swarm.enemy import LIE, return_two_averages
from tests.training.swarm.harness import wait_for
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.service import issue_own
from training.swarm.averaging.aggregation_rules import PartReducer
from training.swarm.averaging.averagers import FilteredAverager
from training.swarm.averaging.complaints import EVIDENCE, read_evidence
from training.swarm.averaging.state_averager import STALE_WEIGHT
from training.swarm.host_peers import HostPeers
from training.swarm.network.dht import open_dht
from training.swarm.observe.peer_metrics import record_validators

pytestmark = pytest.mark.swarm
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
TIMES = {"min_matchmaking_time": 6.0, "request_timeout": 4.0, "next_chunk_timeout": 4.0, "allreduce_timeout": 60.0}
TENSORS, SIZE = 12, 1000
"""Enough tensors for each member to reduce some."""


class Garbage(PartReducer):
    """An attacker's answers for the parts that it reduces."""

    def check_current_part_finished(self):
        if self.current_part_accumulated_from == self.num_current_senders:
            self.accumulator.fill_(1e6)
        super().check_current_part_finished()


async def say_nothing(*_, **__):
    await asyncio.sleep(3600)


@pytest.fixture
def averagers(tmp_path):
    """A helper and listening peers; all values of each are its index; each may have its own rule."""
    nodes, made = [], []

    def make(*rules, ghost=None, two_faced=None, enemy=PartReducer, hosted=True, **judgement):
        run_key = SigningKey.load_or_create(tmp_path / "run.key")
        for number in range(1 + len(rules)):
            addresses = [str(nodes[0].get_visible_maddrs()[0])] if nodes else []
            node = open_dht(addresses, client_mode=False, listen=LISTEN, identity=tmp_path / str(number))
            node.add_validators(record_validators("test"))
            folder = tmp_path / f"folder-{number}"
            folder.mkdir()
            node.gate = Gate(run_key.public, folder / "pass", folder / "bans")
            issue_own(node.gate, run_key, str(node.peer_id), "trainer")
            nodes.append(node)
        host = HostPeers(helpers=frozenset({nodes[0].peer_id}) if hosted else frozenset())
        for number, (node, rule) in enumerate(zip(nodes, (enemy, *rules), strict=True)):
            averager = FilteredAverager(
                [torch.full((SIZE,), float(number)) for _ in range(TENSORS)],
                node,
                prefix="test_grad_averager",
                client_mode=False,
                rule=rule,
                host=host,
                start=False,
                declare_state_period=600.0,
                target_group_size=1 + len(rules),  # a full group begins at once
                **TIMES,
            )
            for name, value in judgement.items():
                setattr(averager, name, value)
            if number == ghost:
                averager._run_allreduce_inplace_ = say_nothing
            with pytest.MonkeyPatch.context() as patch:  # for its own process
                if number == two_faced:
                    return_two_averages(lambda: True, patch.setattr)
                averager.run_in_background(await_ready=True)
            made.append(averager)
        return made

    yield make
    with ThreadPoolExecutor() as threads:  # each takes a second
        for running in (made, nodes):
            list(threads.map(lambda one: one.shutdown(), running))


def average(averagers, weights):
    """The group, and each peer's values, after a round."""
    steps = [
        averager.step(weight=weight, wait=False, timeout=40.0)
        for averager, weight in zip(averagers, weights, strict=True)
    ]
    results = [step.result(120.0) for step in steps]
    values = []
    for averager in averagers:
        with averager.get_tensors() as tensors:
            values.append(torch.stack(list(tensors)))
    return results, values


def test_a_peer_that_returns_garbage_for_its_parts_is_given_none(averagers):
    peers = averagers(PartReducer, Garbage)
    groups, values = average(peers, (0.0, 1.0, 1.0))
    assert all(set(group) == {peer.peer_id for peer in peers} for group in groups)
    for value in values:
        torch.testing.assert_close(value, torch.full((TENSORS, SIZE), 1.5))
    assert not any(peer.dropped_tensors for peer in peers)


def test_a_peer_does_not_announce_its_state_again_with_each_tensor_of_a_round(averagers, monkeypatch):
    announced, store = mp.Value("q", 0), hivemind.DHT.store

    def counted(self, key, *arguments, **options):
        with announced.get_lock():
            announced.value += key == "test_grad_averager.all_averagers"
        return store(self, key, *arguments, **options)

    monkeypatch.setattr(hivemind.DHT, "store", counted)
    peers = averagers(PartReducer)
    average(peers, (0.0, 1.0))
    assert 0 < announced.value <= 2 * len(peers)  # hivemind's averager does so once or twice when it begins


def test_an_average_far_from_what_was_sent_is_not_taken_whoever_reduced_it(averagers):
    peers = averagers(PartReducer, PartReducer, max_shift=0.4)
    _, (_, near, far) = average(peers, (0.0, 1.0, 1.0))
    # The mean is 1.5: its distance is half of the first one's norm, and a quarter of the second one's.
    torch.testing.assert_close(near, torch.ones(TENSORS, SIZE))
    torch.testing.assert_close(far, torch.full((TENSORS, SIZE), 1.5))
    assert [peer.dropped_tensors > 0 for peer in peers] == [False, True, False]


@pytest.mark.parametrize(("least_own_weight", "kept"), [(1e-3, False), (STALE_WEIGHT, True)])
def test_a_peer_with_stale_weights_keeps_them_where_the_average_is_far_away(averagers, least_own_weight, kept):
    peers = averagers(PartReducer, PartReducer, max_shift=0.4, least_own_weight=least_own_weight)
    _, (_, stale, far) = average(peers, (0.0, STALE_WEIGHT, 1.0))
    torch.testing.assert_close(stale, torch.full((TENSORS, SIZE), 1.0 if kept else 2.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(far, torch.full((TENSORS, SIZE), 2.0), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_peer_that_says_nothing_is_in_one_group_only(averagers):
    helper, honest, ghost = averagers(PartReducer, PartReducer, ghost=2)
    ghost.step(wait=False, timeout=40.0)
    (first, _), _ = average([helper, honest], (0.0, 1.0))
    ghost.step(wait=False, timeout=40.0)  # besides the first one, in which it is still silent
    (second, _), values = average([helper, honest], (0.0, 1.0))
    assert ghost.peer_id in first
    assert set(second) == {helper.peer_id, honest.peer_id}
    torch.testing.assert_close(values[1], torch.ones(TENSORS, SIZE))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_reducer_that_gives_two_senders_different_averages_proves_it_by_its_own_signature(averagers, tmp_path):
    enemy, one, other = averagers(PartReducer, PartReducer, two_faced=0, hosted=False)
    _, values = average([enemy, one, other], (1.0, 1.0, 1.0))
    assert (values[1] - values[2]).abs().max() > LIE / 2  # neither notices it alone
    files = [tmp_path / f"folder-{number}" / EVIDENCE / f"{enemy.peer_id}.json" for number in (1, 2)]
    wait_for(lambda: all(file.exists() for file in files), 60, "the evidence")
    assert [read_evidence(file) for file in files] == [enemy.peer_id] * 2
    enemy.step(wait=False, timeout=40.0)
    (group, _), _ = average([one, other], (1.0, 1.0))
    assert set(group) == {one.peer_id, other.peer_id}


@pytest.mark.timeout(280)
def test_without_a_host_what_an_enemy_reduces_is_ignored_and_the_round_ends(averagers):
    enemy, one, other = peers = averagers(PartReducer, PartReducer, enemy=Garbage, hosted=False)
    groups, values = average(peers, (1.0, 1.0, 1.0))
    assert all(set(group) == {peer.peer_id for peer in peers} for group in groups)
    assert enemy.dropped_tensors == 0
    for number, peer in ((1, one), (2, other)):
        assert peer.dropped_tensors == 1
        assert set(values[number].unique().tolist()) == {1.0, float(number)}  # the mean, and its own parts


@pytest.mark.timeout(280)
def test_an_honest_round_without_a_host_leaves_no_evidence(averagers, tmp_path):
    peers = averagers(PartReducer, PartReducer, hosted=False)
    for _ in "ab":
        groups, _ = average(peers, (1.0, 1.0, 1.0))
        assert all(set(group) == {peer.peer_id for peer in peers} for group in groups)
        assert not any(peer.dropped_tensors for peer in peers)
    assert not list(tmp_path.glob(f"*/{EVIDENCE}"))
