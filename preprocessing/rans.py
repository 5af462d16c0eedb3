"""Range asymmetric numeral systems (Duda 2013, arXiv 1311.2540) over many lanes at once.

Each lane is a coder of its own; all lanes share one sequence of words and take from it in turns (Giesen 2014, arXiv
1402.3392), so that numpy does each step for every lane together.

Shapes: R lanes, C contexts, S symbols.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LOW = 2**16
"""A lane's state is in LOW..2**32-1 between symbols; it takes and gives words of 16 bits."""
DIRECT_SLOTS = 2**18
MAX_LEVEL = 63
WEIGHTS = np.array([0, *(math.isqrt(2 ** (level + 7)) for level in range(1, MAX_LEVEL + 1))], dtype=np.int64)
"""Level -> weight: 16 for level 1, a factor of the square root of two for each further level, rounded down."""


def levels_of(counts: NDArray[np.integer]) -> NDArray[np.uint8]:
    """How often symbols come, on the scale of WEIGHTS; 0 for never."""
    levels = np.round(2 * np.log2(np.maximum(counts, 1))) + 1
    return np.where(counts > 0, np.minimum(levels, MAX_LEVEL), 0).astype(np.uint8)


class Table:
    """Frequencies of symbols in each context, as whole shares of 2**bits.

    A symbol of level 0 cannot be coded, one of a higher level has a frequency of 1 + weight * (2**bits - n) // total,
    n symbols having a level and `total` being the sum of their weights; what is left goes to the first of the most
    frequent symbols. A context without any level is sure of symbol 0.

    Args:
        levels: [C, S], 0..MAX_LEVEL, S at most 2**bits.
        bits: at most 16.
    """

    def __init__(self, levels: NDArray[np.uint8], bits: int):
        weights = WEIGHTS[levels]
        possible = (levels > 0).sum(axis=1, keepdims=True)
        total = np.maximum(weights.sum(axis=1, keepdims=True), 1)
        frequency = np.where(levels > 0, 1 + weights * (2**bits - possible) // total, 0)
        frequency[np.arange(len(levels)), frequency.argmax(axis=1)] += 2**bits - frequency.sum(axis=1)
        self.bits = bits
        self.frequency = frequency
        self.start = frequency.cumsum(axis=1) - frequency


class Decoder:
    """Takes symbols from the lanes in the order they are read; ValueError where the words do not last.

    Args:
        states: [R], LOW..2**32-1.
        words: all lanes' words, uint16.
    """

    def __init__(self, states: NDArray[np.integer], words: NDArray[np.uint16]):
        self.states = states.astype(np.int64)
        self.words = words
        self.used = 0

    def pop(self, lookup: "Lookup", contexts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The next symbol of every lane [R], by its name; `contexts` [R] are those of `Lookup.context`."""
        states = self.states
        slots = states & lookup.slot_mask
        # mode="clip" skips numpy's own check of the range; contexts and slots are never outside it.
        entries = lookup.entry_of_slot.take(contexts | slots, mode="clip")
        if lookup.entries is not None:
            entries = lookup.entries.take(entries, mode="clip")
        states >>= lookup.bits
        states *= (entries >> 16) & 0xFFFFFF
        states += slots
        states -= entries >> 40
        short = (states < LOW).nonzero()[0]
        words = self.words[self.used : self.used + len(short)]
        if len(words) < len(short):
            raise ValueError("the words end too early")
        states[short] = (states[short] << 16) | words
        self.used += len(short)
        entries &= 0xFFFF
        return entries


class Lookup:
    """A table turned round for decoding: an entry of symbol, frequency and start for every slot.

    Args:
        names: [C, S], what symbols are given out as, 0..2**16-1; by default their numbers.
        direct: slots may hold their entries themselves; otherwise they hold the numbers of `entries`.
    """

    def __init__(self, table: Table, names: NDArray[np.integer] | None = None, *, direct: bool = True):
        frequency = table.frequency.ravel()
        possible = np.flatnonzero(frequency)
        frequency = frequency[possible]
        symbols = possible % table.frequency.shape[1] if names is None else names.ravel()[possible].astype(np.int64)
        entries = symbols | (frequency << 16) | (table.start.ravel()[possible] << 40)
        self.bits = table.bits
        self.slot_mask = 2**table.bits - 1
        self.entries = None
        if direct and frequency.sum() <= DIRECT_SLOTS:
            self.entry_of_slot = np.repeat(entries, frequency)
        else:  # entries would not fit the processor's cache: slots hold their numbers
            self.entries = entries
            numbers = np.arange(len(possible), dtype=np.uint16 if len(possible) <= 2**16 else np.uint32)
            self.entry_of_slot = np.repeat(numbers, frequency)

    def context(self, number: NDArray[np.integer]) -> NDArray[np.int64]:
        """Contexts 0..C-1 as `Decoder.pop` takes them."""
        return number.astype(np.int64, copy=False) << self.bits


class Encoder:
    """Puts symbols onto the lanes, the last one first.

    Args:
        states: [R], LOW..2**17-1; what they hold beyond LOW the decoder finds at its end.
    """

    def __init__(self, states: NDArray[np.integer]):
        self.states = states.astype(np.int64)
        self.words: list[NDArray[np.uint16]] = []

    def push(self, table: Table, contexts: NDArray[np.int64], symbols: NDArray[np.int64]) -> None:
        """One symbol for every lane [R], each in its context [R]."""
        frequency, start = table.frequency[contexts, symbols], table.start[contexts, symbols]
        full = np.flatnonzero(self.states >= frequency << (32 - table.bits))
        self.words.append((self.states[full] & 0xFFFF).astype(np.uint16))
        self.states[full] >>= 16
        self.states = (self.states // frequency << table.bits) + self.states % frequency + start

    def finish(self) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
        """What a decoder starts from: states [R] and words."""
        return self.states.astype(np.uint32), joined(self.words[::-1])


def joined(parts: Sequence[NDArray[np.uint16]]) -> NDArray[np.uint16]:
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)
