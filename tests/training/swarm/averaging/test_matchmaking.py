"""Looking for a group costs little while nobody is there."""

import asyncio
import time
from itertools import pairwise
from types import SimpleNamespace

from hivemind.averaging.key_manager import GroupKeyManager

from training.swarm.averaging.matchmaking import LOOK_INTERVAL_S, with_patience


class Board:
    """A DHT that answers at once, with nothing."""

    peer_id = None

    def __init__(self):
        self.asked_s = []

    async def answer(self):
        self.asked_s.append(time.monotonic())

    def get(self, _key, **_options):
        return self.answer()


def test_the_others_are_looked_for_a_few_times_a_second_however_fast_the_answer():
    board = Board()
    keys = GroupKeyManager(board, "run", "", None)
    patient = with_patience(SimpleNamespace(group_key_manager=keys)).group_key_manager

    async def look() -> None:
        for _ in range(4):
            assert await patient.get_averagers(patient.current_key, only_active=True) == []

    asyncio.run(look())
    waits = [later - earlier for earlier, later in pairwise(board.asked_s)]
    assert len(waits) == 3
    assert min(waits) >= 0.95 * LOOK_INTERVAL_S
    assert (patient.current_key, patient.prefix) == (keys.current_key, keys.prefix)
