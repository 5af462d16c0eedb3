"""What peers tell each other about those who spoil rounds, in short records that each signs with its identity's key.

A record says who let its owner's groups down, and what receipts its owner got. A peer is left out on the word of others
only if as many admitted peers complain as make up more than half of the latest group, and never on the word of one. Two
receipts that contradict each other need nobody's word.
"""

import asyncio
import logging
import math
import random
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from training.swarm.admission.gate import gate_of
from training.swarm.admission.keys import Forged
from training.swarm.admission.passes import Refused
from training.swarm.averaging.matchmaking import Absentees
from training.swarm.averaging.receipts import Receipt, contradiction
from training.swarm.host_peers import owner_peer
from training.swarm.observe.peer_metrics import owner_key

LASTS_S = 300.0
"""What is said and not said again."""
INTERVAL_S, SETTLE_S = 10.0, 2.0
"""Between two exchanges; until the others' records of the same round are there."""
MOST_ANSWERS = 3
"""Records in an exchange: digests, then a receipt that is disputed, then a proof."""
MAX_READ, MAX_COMPLAINTS, MAX_REDUCERS = 256, 8, 24
"""Records; peers complained about and reducers in each, so that it has room in the 4096 bytes of the run's records."""
LEAST_COMPLAINTS = 2
KEPT_GROUPS = 64
MAX_PROVEN = 64
SHORT_BYTES = 8
"""Of a peer id or digest, enough to tell it from the others in a group."""
EVIDENCE = "evidence"
"""Folder beside the list of bans, with a file for each reducer that is proven to have lied."""

Receipts = Mapping[PeerID, Receipt]
Record = Mapping[str, Any]


class Complaints:
    """One averager's; lives in the process that averages.

    Args:
        key: of the records in the DHT.
        absentees: whom this peer leaves out by itself; told whom enough others complain about.
    """

    def __init__(self, dht: DHT, key: str, absentees: Absentees):
        self.dht, self.key, self.absentees, self.gate = dht, key, absentees, gate_of(dht)
        self.receipts: dict[bytes, Receipts] = {}
        """By group, of the latest ones."""
        self.shown: list[Receipt] = []
        """One, where another sender says that it got another; or two that are a proof."""
        self.proven: set[PeerID] = set()
        self.enough = math.inf
        self.due_s = 0.0
        self.exchanging: asyncio.Task[None] | None = None

    def round_over(self, group: bytes, members: int, receipts: Receipts) -> None:
        """Exchange records in the background if it is time."""
        self.enough = max(LEAST_COMPLAINTS, members // 2 + 1)
        if receipts:
            self.receipts[group] = receipts
            for old in list(self.receipts)[:-KEPT_GROUPS]:
                del self.receipts[old]
        if time.monotonic() >= self.due_s:
            self.due_s = time.monotonic() + INTERVAL_S
            self.exchanging = asyncio.create_task(self.exchange())

    async def exchange(self) -> None:
        """Tell what there is to tell, read what others tell, and answer it."""
        try:
            for _ in range(MOST_ANSWERS):
                before = self.shown
                await self.tell()
                await asyncio.sleep(SETTLE_S)
                records = await self.read()
                self.count(records)
                self.compare(records)
                if self.shown == before:
                    break
        except Exception:  # a stranger's record may raise anything
            logging.getLogger("hivemind").exception("complaints could not be exchanged")

    async def tell(self) -> None:
        """Write this peer's record; none while all is well."""
        group = next(reversed(self.receipts), b"")
        given = sorted(self.receipts.get(group, {}).items())[:MAX_REDUCERS]
        told = {
            "absent": [str(peer) for peer in self.absentees.waiting()[:MAX_COMPLAINTS]],
            "receipts": [list(vars(receipt).values()) for receipt in self.shown],
            "digests": {short(peer): receipt.digest[:SHORT_BYTES] for peer, receipt in given},
        }
        if not any(told.values()):
            return
        if len(self.shown) == 2:
            del told["digests"]
        told |= {"group": group, "pass": b"" if self.gate is None else self.gate.shown}
        await self.dht.store(self.key, told, get_dht_time() + LASTS_S, subkey=owner_key(self.dht), return_future=True)

    async def read(self) -> dict[PeerID, Record]:
        """The other peers' records."""
        found = await self.dht.get(self.key, latest=True, return_future=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        records: dict[PeerID, Record] = {
            peer: entry.value
            for owner, entry in list(entries.items())[:MAX_READ]
            if (peer := owner_peer(owner)) is not None
            if isinstance(entry, ValueWithExpiration) and isinstance(entry.value, dict)
        }
        records.pop(self.dht.peer_id, None)
        return records

    def count(self, records: Mapping[PeerID, Record]) -> None:
        """Leave out whom enough admitted peers complain about."""
        complaints = Counter(map(str, self.absentees.waiting()))
        for peer, said in records.items():
            absent = said.get("absent")
            if isinstance(absent, list | tuple) and self.is_admitted(peer, said.get("pass")):
                complaints.update({name for name in absent[:MAX_COMPLAINTS] if isinstance(name, str)})
        self.absentees.leave_out(
            {name for name, count in complaints.items() if count >= self.enough}, until_s=time.monotonic() + LASTS_S
        )

    def is_admitted(self, peer: PeerID, shown: Any) -> bool:
        """Whether a record's owner has a pass; nobody has in a run without a key, where identities cost nothing."""
        try:
            return self.gate is not None and self.gate.genuine(str(peer), shown).ends > time.time()
        except (Refused, Forged, TypeError, ValueError):
            return False

    def compare(self, records: Mapping[PeerID, Record]) -> None:
        """Show a receipt if others have not got it; leave out who signed two that contradict each other."""
        known = {receipt.place: receipt for given in self.receipts.values() for receipt in given.values()}
        for receipt in [receipt for said in records.values() for receipt in receipts_in(said)]:
            if receipt.reducer is None:
                continue
            other = known.setdefault(receipt.place, receipt)
            peer = contradiction(other, receipt)
            if peer is not None and peer not in self.proven and len(self.proven) < MAX_PROVEN:
                self.proven.add(peer)
                self.shown = [other, receipt]
                self.absentees.note([], [peer])
                logging.getLogger("hivemind").warning(f"{peer} signed two averages of one part: it is left out")
                if self.gate is not None:
                    write_evidence(self.gate.bans_file.path.parent / EVIDENCE, peer, self.shown)
        banned = frozenset() if self.gate is None else self.gate.current_bans().banned
        if len(self.shown) < 2 or str(owner_peer(self.shown[0].owner)) in banned:
            disputed = [receipt for said in records.values() for receipt in self.disputed_by(said)]
            self.shown = [random.choice(disputed)] if disputed else []

    def disputed_by(self, said: Record) -> list[Receipt]:
        """The receipts that this peer got, and the owner of a record other ones."""
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
    """What a record shows, the signatures not checked."""
    shown = said.get("receipts")
    try:
        return [Receipt.parse(content) for content in shown[:2]] if isinstance(shown, list | tuple) else []
    except ValueError:
        return []


def short(peer: PeerID) -> bytes:
    return bytes(peer.to_bytes()[-SHORT_BYTES:])


def write_evidence(folder: Path, peer: PeerID, proof: list[Receipt]) -> None:
    """Keep two receipts that contradict each other in folder/PEER.json."""
    folder.mkdir(exist_ok=True)
    shown = [
        [b64encode(value).decode() if isinstance(value, bytes) else value for value in vars(receipt).values()]
        for receipt in proof
    ]
    write_json(folder / f"{peer}.json", shown)


def read_evidence(path: Path) -> PeerID:
    """The reducer that a file of `write_evidence` proves to have lied; ValueError if it proves nothing."""
    try:
        proof = [
            Receipt.parse([b64decode(value) if isinstance(value, str) else value for value in shown])
            for shown in read_json(path)
        ]
        peer = contradiction(*proof)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} holds no two receipts: {error}") from None
    if peer is None:
        raise UserError(f"{path} proves nothing: no key has signed both of its receipts for the same part")
    return peer
