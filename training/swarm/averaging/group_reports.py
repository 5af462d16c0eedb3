"""What the members of a group report before they average: their bandwidth, their mode and something for the others."""

import dataclasses

from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.utils import MSGPackSerializer

from training.swarm.host_peers import HostPeers

MAX_REPORT_BYTES = 1024
MAX_BANDWIDTH = 1e12
NO_REPORT = MSGPackSerializer.dumps((0.0, AveragingMode.CLIENT.value, MSGPackSerializer.dumps(-1)))
"""Reduces nothing and is at no step."""


def with_readable_reports(group_info: GroupInfo) -> GroupInfo:
    """The group with NO_REPORT for members whose report makes no sense: hivemind would give up the whole round."""
    gathered = tuple(content if is_report(content) else NO_REPORT for content in group_info.gathered)
    return dataclasses.replace(group_info, gathered=gathered)


def with_host_reducing(group_info: GroupInfo, host: HostPeers) -> GroupInfo:
    """The group in which only the host's helpers reduce, or its donors where no helper is; unchanged without either.

    All members must agree on who reduces, and they know the same helpers however many donors a host has added since.
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
    """Whether a member of a group tells its bandwidth, its mode and something for the others."""
    if len(content) > MAX_REPORT_BYTES:
        return False
    try:
        bandwidth, mode, gathered = MSGPackSerializer.loads(content)
        AveragingMode(mode)
        MSGPackSerializer.loads(gathered)
    except Exception:  # a stranger's bytes may raise anything
        return False
    return bandwidth is None or (type(bandwidth) in (int, float) and 0 <= bandwidth <= MAX_BANDWIDTH)
