"""Complaints about peers that spoil rounds, exchanged as short DHT records that their owners sign.

A record names the peers that failed its owner's groups, and the receipts that its owner got. Complaints of others
exclude a peer only if they come from admitted peers that are more than half of the latest group, and from at least two.
Two contradicting receipts are a proof, which needs no further complaint.
"""

import asyncio
import logging
import math
import random
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from training.swarm.averaging.matchmaking import UnreliablePeers
from training.swarm.averaging.receipts import Receipt, contradiction
from training.swarm.network.owner_keys import owner_key, owner_peer, records_by_owner

RECORD_S = 300.0  # lifetime of a record, and of an exclusion by it
INTERVAL_S, SETTLE_S = 10.0, 2.0
"""Between two exchanges; until the others have stored their records of the same round."""
MOST_ANSWERS = 3  # records per exchange: digests, then a disputed receipt, then a proof
MAX_READ, MAX_COMPLAINTS, MAX_REDUCERS = 256, 8, 24
"""Records read; complaints and reducers in each record, so that it fits into the 4096 bytes of a run's record."""
LEAST_COMPLAINTS = 2
KEPT_GROUPS = 64
MAX_PROVEN, MAX_MET = 64, 1024
SHORT_BYTES = 8  # of a peer id or digest, enough to be unique within a group
SPENT_S = 86400  # age at which a receipt proves nothing any more
EVIDENCE = "evidence"  # folder beside the ban list, with a file for each reducer that is proven to have lied

Receipts = Mapping[PeerID, Receipt]
Record = Mapping[str, Any]


class Complaints:
    """The complaints of one averager; lives in the averager's process.

    Args:
        key: of the records in the DHT.
        unreliable: the peers that this one avoids; learns whom enough others complain about.
    """

    def __init__(self, dht: DHT, key: str, unreliable: UnreliablePeers):
        self.dht, self.key, self.unreliable, self.gate = dht, key, unreliable, dht.gate
        self.receipts: dict[bytes, Receipts] = {}  # by group, for the latest groups
        self.shown: list[Receipt] = []  # one receipt that another sender disputes, or two that are a proof
        self.proven: dict[PeerID, list[Receipt]] = {}  # peers that are proven to have lied, with the proofs
        self.unsaved: dict[PeerID, list[Receipt]] = {}  # proofs that are not in the evidence folder yet
        self.met: dict[PeerID, None] = {}  # members of the latest groups
        self.accusers: set[PeerID] = set()  # peers whose one proof against a peer never met is used up
        self.enough = math.inf
        self.due_s = 0.0
        self.exchanging: asyncio.Task[None] | None = None

    def round_over(self, group: bytes, members: Sequence[PeerID], receipts: Receipts) -> None:
        """Called after a round; exchanges records in the background when due."""
        self.enough = max(LEAST_COMPLAINTS, len(members) // 2 + 1)
        earlier = [peer for peer in self.met if peer not in members]
        self.met = dict.fromkeys([*earlier, *members][-MAX_MET:])
        if receipts:
            self.receipts[group] = receipts
            for old in list(self.receipts)[:-KEPT_GROUPS]:
                del self.receipts[old]
        if time.monotonic() >= self.due_s:
            self.due_s = time.monotonic() + INTERVAL_S
            self.exchanging = asyncio.create_task(self.exchange())

    async def exchange(self) -> None:
        """Publish this peer's record, read the others', and react to them."""
        try:
            for _ in range(MOST_ANSWERS):
                before = self.shown
                await self.publish()
                await asyncio.sleep(SETTLE_S)
                records = await self.read()
                self.count(records)
                self.compare(records)
                if self.shown == before:
                    break
        except Exception:  # an untrusted record may raise anything
            logging.getLogger("hivemind").exception("complaints could not be exchanged")
        finally:
            self.save_evidence()

    async def publish(self) -> None:
        """Store this peer's record, if it has anything to report."""
        group = next(reversed(self.receipts), b"")
        given = sorted(self.receipts.get(group, {}).items())[:MAX_REDUCERS]
        record = {
            "absent": [str(peer) for peer in self.unreliable.in_backoff()[:MAX_COMPLAINTS]],
            "receipts": [list(vars(receipt).values()) for receipt in self.shown],
            "digests": {short(peer): receipt.digest[:SHORT_BYTES] for peer, receipt in given},
        }
        if not any(record.values()):
            return
        if len(self.shown) == 2:
            del record["digests"]
        record |= {"group": group, "pass": b"" if self.gate is None else self.gate.own_statement}
        await self.dht.store(
            self.key, record, get_dht_time() + RECORD_S, subkey=owner_key(self.dht), return_future=True
        )

    async def read(self) -> dict[PeerID, Record]:
        """The records of others; where the run has a key, of admitted peers only."""
        found = records_by_owner(await self.dht.get(self.key, latest=True, return_future=True))
        records: dict[PeerID, Record] = {
            peer: entry.value
            for peer, entry in found.items()
            if peer != self.dht.peer_id and isinstance(entry.value, dict)
            if self.gate is None or self.is_admitted(peer, entry.value.get("pass"))
        }
        return dict(list(records.items())[:MAX_READ])

    def count(self, records: Mapping[PeerID, Record]) -> None:
        """Exclude the peers about which enough admitted peers complain. Without a key, where identities are free, no
        complaint counts."""
        complaints = Counter(map(str, self.unreliable.in_backoff()))
        for said in records.values() if self.gate is not None else ():
            absent = said.get("absent")
            if isinstance(absent, list | tuple):
                complaints.update({name for name in absent[:MAX_COMPLAINTS] if isinstance(name, str)})
        reported = {name for name, count in complaints.items() if count >= self.enough}
        self.unreliable.reported = (reported, time.monotonic() + RECORD_S)

    def is_admitted(self, peer: PeerID, shown: Any) -> bool:
        """Whether a record's owner has a valid pass; the run must have a key."""
        try:
            return self.gate.verify(str(peer), shown).ends > time.time()
        except (TypeError, ValueError):  # Refused and Forged among them
            return False

    def compare(self, records: Mapping[PeerID, Record]) -> None:
        """Show a receipt that others dispute; exclude a reducer that signed two contradicting ones."""
        known = {receipt.part_id: receipt for given in self.receipts.values() for receipt in given.values()}
        for accuser, receipt in [(peer, receipt) for peer, said in records.items() for receipt in receipts_in(said)]:
            if is_spent(receipt) or receipt.reducer is None:
                continue
            other = known.setdefault(receipt.part_id, receipt)
            peer = contradiction(other, receipt)
            if peer is not None and peer not in self.proven and self.accepts(accuser, peer):
                self.proven[peer] = [other, receipt]
                if peer in self.met:  # only these are passed on: readers take one proof against others from each peer
                    self.shown = [other, receipt]
                self.unreliable.proven.add(peer)
                logging.getLogger("hivemind").warning(f"{peer} signed two averages of one part: it is excluded")
                if self.gate is not None:
                    self.unsaved[peer] = [other, receipt]
        banned = frozenset() if self.gate is None else self.gate.current_bans().banned
        # A host may ban and unban a peer between two exchanges, so an exclusion ends with its proof at the latest.
        self.proven = {peer: proof for peer, proof in self.proven.items() if not any(map(is_spent, proof))}
        # From its ban on the host decides, so that unbanning readmits it.
        self.unreliable.proven = {
            peer for peer in self.unreliable.proven if peer in self.proven and str(peer) not in banned
        }
        if len(self.shown) < 2 or any(map(is_spent, self.shown)) or str(owner_peer(self.shown[0].owner)) in banned:
            disputed = [receipt for said in records.values() for receipt in self.disputed_by(said)]
            self.shown = [random.choice(disputed)] if disputed else []

    def save_evidence(self) -> None:
        """Save new proofs; one that cannot be saved, such as on a full disk, is tried again at the next exchange."""
        for peer, proof in list(self.unsaved.items()):
            try:
                write_evidence(self.gate.bans_file.path.parent / EVIDENCE, peer, proof)
                del self.unsaved[peer]
            except OSError as error:
                logging.getLogger("hivemind").warning(f"the evidence against {peer} was not saved yet: {error}")

    def accepts(self, accuser: PeerID, accused: PeerID) -> bool:
        """Whether there is room for one more proof. Keys are free: a peer that makes up keys and proves that they lied
        must not fill it. So against a peer that this one never met, each admitted peer's first proof alone counts."""
        if len(self.proven) >= MAX_PROVEN:
            return False
        if accused not in self.met:
            if self.gate is None or accuser in self.accusers:
                return False
            self.accusers.add(accuser)
        return True

    def disputed_by(self, said: Record) -> list[Receipt]:
        """This peer's receipts that differ from those of a record's owner."""
        group, digests = said.get("group"), said.get("digests")
        if not isinstance(group, bytes) or not isinstance(digests, dict):
            return []
        own = self.receipts.get(group, {})
        return [
            receipt
            for peer, receipt in own.items()
            if digests.get(short(peer), receipt.digest[:SHORT_BYTES]) != receipt.digest[:SHORT_BYTES]
        ]


def receipts_in(said: Record) -> list[Receipt]:
    """The receipts in a record, their signatures not checked."""
    shown = said.get("receipts")
    try:
        return [Receipt.parse(content) for content in shown[:2]] if isinstance(shown, list | tuple) else []
    except ValueError:
        return []


def is_spent(receipt: Receipt) -> bool:
    """Whether a receipt is too old to prove anything, or from as far in the future, so that it would never be."""
    return abs(time.time() - receipt.time) > SPENT_S


def short(peer: PeerID) -> bytes:
    return bytes(peer.to_bytes()[-SHORT_BYTES:])


def write_evidence(folder: Path, peer: PeerID, proof: list[Receipt]) -> None:
    """Save two contradicting receipts in folder/PEER.json."""
    folder.mkdir(exist_ok=True)
    shown = [
        [b64encode(value).decode() if isinstance(value, bytes) else value for value in vars(receipt).values()]
        for receipt in proof
    ]
    write_json(folder / f"{peer}.json", shown)


def read_evidence(path: Path) -> PeerID:
    """The reducer that lied, by a file of `write_evidence`; ValueError if the file proves nothing."""
    try:
        proof = [
            Receipt.parse([b64decode(value) if isinstance(value, str) else value for value in shown])
            for shown in read_json(path)
        ]
        peer = contradiction(*proof)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} does not hold two receipts: {error}") from None
    if peer is None:
        raise UserError(f"{path} proves nothing: no key signed both of its receipts for the same part")
    return peer
