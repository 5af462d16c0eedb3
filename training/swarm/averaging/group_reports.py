"""The reports of a group's members before they average: bandwidth, mode and a value for the others."""

import dataclasses
from statistics import median_high

from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from training.swarm.host_peers import HostPeers

MAX_REPORT_BYTES = 1024
MAX_BANDWIDTH = 1e12
STALE_EPOCH = -1  # reported by peers whose weights are older than the current step
NO_REPORT = (0.0, AveragingMode.CLIENT.value, MSGPackSerializer.dumps(STALE_EPOCH))
"""In place of a malformed report: of a member that reduces nothing and is at no step."""


def read_report(content: bytes) -> tuple[float | None, int, bytes]:
    """A report's bandwidth, mode and serialized value for the others; NO_REPORT if it is malformed."""
    if len(content) > MAX_REPORT_BYTES:
        return NO_REPORT
    try:
        bandwidth, mode, gathered = MSGPackSerializer.loads(content)
        report = bandwidth, AveragingMode(mode).value, gathered
        MSGPackSerializer.loads(gathered)
    except Exception:  # untrusted bytes may raise anything
        return NO_REPORT
    is_possible = bandwidth is None or (type(bandwidth) in (int, float) and 0 <= bandwidth <= MAX_BANDWIDTH)
    return report if is_possible else NO_REPORT


def with_checked_reports(group_info: GroupInfo, host: HostPeers) -> GroupInfo:
    """The group with readable reports, since hivemind would fail the whole round for a malformed one. Only the host's
    helpers reduce, or its donors if no helper is there; without both, every member that can.

    All members must agree on the reducers. They all know the same helpers, while a host may add donors later.
    """
    reports = list(zip(group_info.peer_ids, map(read_report, group_info.gathered), strict=True))
    able = {peer for peer, (bandwidth, mode, _) in reports if bandwidth != 0 and mode != AveragingMode.CLIENT.value}
    chosen = able & host.helpers or able & host.donors or able
    gathered = tuple(
        MSGPackSerializer.dumps((bandwidth if peer in chosen else 0.0, mode, value))
        for peer, (bandwidth, mode, value) in reports
    )
    return dataclasses.replace(group_info, gathered=gathered)


def out_of_step(group_info: GroupInfo) -> set[PeerID]:
    """The members of a group whose reported step is not the median; those without weights have no step."""
    reports = zip(group_info.peer_ids, map(read_report, group_info.gathered), strict=True)
    epochs = {
        peer: epoch if type(epoch := MSGPackSerializer.loads(value)) is int else STALE_EPOCH
        for peer, (_, mode, value) in reports
        if mode != AveragingMode.AUX.value
    }
    current = median_high([epoch for epoch in epochs.values() if epoch != STALE_EPOCH] or [STALE_EPOCH])
    return {peer for peer, epoch in epochs.items() if epoch != current}
