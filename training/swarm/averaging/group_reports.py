"""The reports of a group's members before they average: bandwidth, mode and a value for the others."""

import dataclasses

from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.utils import MSGPackSerializer

from training.swarm.host_peers import HostPeers

MAX_REPORT_BYTES = 1024
MAX_BANDWIDTH = 1e12
NO_REPORT = MSGPackSerializer.dumps((0.0, AveragingMode.CLIENT.value, MSGPackSerializer.dumps(-1)))
"""The report of a member that reduces nothing and is at no step."""


def with_readable_reports(group_info: GroupInfo) -> GroupInfo:
    """The group with NO_REPORT in place of malformed reports, for which hivemind would fail the whole round."""
    gathered = tuple(content if is_report(content) else NO_REPORT for content in group_info.gathered)
    return dataclasses.replace(group_info, gathered=gathered)


def with_host_reducing(group_info: GroupInfo, host: HostPeers) -> GroupInfo:
    """The group with only the host's helpers as reducers, or its donors if no helper is there; unchanged without both.

    All members must agree on the reducers. They all know the same helpers, while a host may add donors later.
    """
    reports = dict(zip(group_info.peer_ids, map(MSGPackSerializer.loads, group_info.gathered), strict=True))
    clients = {peer for peer, (_, mode, _) in reports.items() if mode == AveragingMode.CLIENT.value}
    able = {peer for peer, (bandwidth, *_) in reports.items() if bandwidth != 0} - clients
    chosen = able & host.helpers or able & host.donors
    if not chosen:
        return group_info
    gathered = tuple(
        content if peer in chosen else MSGPackSerializer.dumps((0.0, *reports[peer][1:]))
        for peer, content in zip(group_info.peer_ids, group_info.gathered, strict=True)
    )
    return dataclasses.replace(group_info, gathered=gathered)


def is_report(content: bytes) -> bool:
    """Whether a report has a bandwidth, a mode and a value for the others."""
    if len(content) > MAX_REPORT_BYTES:
        return False
    try:
        bandwidth, mode, gathered = MSGPackSerializer.loads(content)
        AveragingMode(mode)
        MSGPackSerializer.loads(gathered)
    except Exception:  # untrusted bytes may raise anything
        return False
    return bandwidth is None or (type(bandwidth) in (int, float) and 0 <= bandwidth <= MAX_BANDWIDTH)
