"""`neighbours.walk` compiled by numba: the same codes from the same bytes, several times faster."""

import numpy as np
from numpy.typing import NDArray

from dalle_lean.lamb_fused import compiled
from preprocessing.neighbours import FIRST_GROUP, KIND_BITS, SAME_AS_LEFT, Model, tables_of_contexts
from preprocessing.rans import LOW, Decoder, Lookup


def walk(decoder: Decoder, model: Model, side: int) -> NDArray[np.int16]:
    """As `neighbours.walk`."""
    kind_table, code_table = model.tables()
    num_tables, num_kinds = kind_table.frequency.shape
    kind_of_slot = np.repeat(np.tile(np.arange(num_kinds, dtype=np.uint8), num_tables), kind_table.frequency.ravel())
    of_codes = Lookup(code_table, model.members()[1], direct=False)
    rows = len(decoder.states)
    codes = np.empty((rows, side * side), np.int16)
    # A pass over the lanes takes a word for each at most: it may run so far beyond the end, where it is noticed.
    words = np.concatenate((decoder.words.astype(np.uint16, copy=False), np.zeros(rows, np.uint16)))
    used = walk_lanes(
        decoder.states,
        words,
        len(decoder.words),
        model.num_groups + 1,
        np.roll(model.groups_or_outside, 1).astype(np.uint8),
        tables_of_contexts(model.has_own, model.num_groups).astype(np.uint16),
        kind_of_slot,
        (kind_table.frequency | kind_table.start << 16).astype(np.uint32),
        of_codes.bits,
        of_codes.entry_of_slot,
        of_codes.entries,
        side,
        codes,
    )
    if used > len(decoder.words):
        raise ValueError("the words end too early")
    decoder.used = int(used)
    return codes


@compiled
def walk_lanes(
    states, words, num_words, across, group_after, table_of_context, kind_of_slot, share_of_kind, code_bits,
    code_of_slot, codes_by_kind, side, codes,
):  # fmt: skip
    """Fill `codes` [R, side * side]; the number of words taken, more than `num_words` where they do not last.

    `group_after` [K+1] has the group of code c at c + 1, and at 0 that of what stands outside, -1. Indices are
    unsigned, so that none is looked at for being negative.
    """
    rows = len(states)
    kind_mask, code_mask = 2**KIND_BITS - 1, 2**code_bits - 1
    above, here = np.full((side + 1, rows), -1, np.int16), np.full((side + 1, rows), -1, np.int16)
    others, first_slots = np.empty(rows, np.int64), np.empty(rows, np.int64)
    used = np.int64(0)
    for place in range(side * side - 1):
        y, x = divmod(place, side)
        num_others = np.int64(0)
        for r in range(rows):
            left, up, between = here[x, r], above[x + 1, r], above[x, r]
            pattern = (left == up) + 2 * (left == between) + 4 * (up == between)
            context = (pattern * across + np.int64(group_after[np.uint64(up + 1)])) * across
            context += np.int64(group_after[np.uint64(left + 1)])
            table = np.int64(table_of_context[np.uint64(context)])
            slot = states[r] & kind_mask
            kind = np.int64(kind_of_slot[np.uint64(table << KIND_BITS | slot)])
            share = np.int64(share_of_kind[np.uint64(table), np.uint64(kind)])
            state = (states[r] >> KIND_BITS) * (share & 0xFFFF) + slot - (share >> 16)
            # No branches: the processor could not foresee whether a word is due, nor of what kind a code is.
            short = np.int64(state < LOW)
            states[r] = (state << 16 * short) | (words[np.uint64(used)] & -short)
            used += short
            here[x + 1, r] = left if kind == SAME_AS_LEFT else up
            others[num_others], first_slots[num_others] = r, kind << code_bits
            num_others += kind >= FIRST_GROUP
        if used > num_words:
            return used
        for i in range(num_others):
            r = others[i]
            slot = states[r] & code_mask
            entry = codes_by_kind[code_of_slot[np.uint64(first_slots[i] | slot)]]
            state = (states[r] >> code_bits) * (entry >> 16 & 0xFFFFFF) + slot - (entry >> 40)
            short = np.int64(state < LOW)
            states[r] = (state << 16 * short) | (words[np.uint64(used)] & -short)
            used += short
            here[x + 1, r] = np.int16(entry & 0xFFFF)
        if used > num_words:
            return used
        if x == side - 1:
            codes[:, y * side : (y + 1) * side] = here[1:].T
            above, here = here, above
    here[side] = (states - LOW).astype(np.int16)
    codes[:, (side - 1) * side :] = here[1:].T
    return used
