"""Compiled loops that take rows out of stored column numbers and values; without interpreter lock and without state.

Rows come as *pieces*: a stretch of the flat arrays ``indices`` and ``data`` and the row of the request it belongs to.
A row is one piece in memory; read from chunks it is cut where a chunk ends. Pieces of one row follow each other, and a
row without values is a piece of size 0.
"""

from __future__ import annotations

import numpy as np

from perturbdiff.runtime.compiled import kernel

SMALL = 64
"""Counts below this have their logarithm taken once per row: nearly all counts of a cell are among few small ones."""


@kernel
def dense_log1p(
    begin: np.ndarray,
    size: np.ndarray,
    row: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    factors: np.ndarray,
    columns: np.ndarray,
    place: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write log1p(count * factor of the row) densely into rows ``place`` of ``out``, which are zeroed here.

    ``columns`` maps stored columns to those of ``out`` (-1: left out); empty: they are the same.
    """
    known = np.empty(SMALL, np.float32)
    mapped, before, factor = len(columns) > 0, -1, np.float32(0)
    for i in range(len(begin)):
        target = out[place[row[i]]]
        if row[i] != before:
            before, factor = row[i], np.float32(factors[row[i]])
            target[:] = 0
            known[:] = -1
        for k in range(begin[i], begin[i] + size[i]):
            j = np.int64(indices[k])
            if mapped:
                j = np.int64(columns[j])
                if j < 0:
                    continue
            count = data[k]
            if count < SMALL:
                value = known[np.int64(count)]
                if value < 0:
                    value = np.log1p(np.float32(count) * factor)
                    known[np.int64(count)] = value
            else:
                value = np.log1p(np.float32(count) * factor)
            target[j] = value


@kernel
def dense_values(
    begin: np.ndarray,
    size: np.ndarray,
    row: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    place: np.ndarray,
    out: np.ndarray,
) -> None:
    """`dense_log1p` with the values as they are."""
    mapped, before = len(columns) > 0, -1
    for i in range(len(begin)):
        target = out[place[row[i]]]
        if row[i] != before:
            before = row[i]
            target[:] = 0
        for k in range(begin[i], begin[i] + size[i]):
            j = np.int64(indices[k])
            if mapped:
                j = np.int64(columns[j])
                if j < 0:
                    continue
            target[j] = data[k]


@kernel
def take_log1p(
    begin: np.ndarray,
    size: np.ndarray,
    row: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    factors: np.ndarray,
    offset: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """Write rows as CSR, each from its ``offset`` on, with log1p(count * factor of the row), in float32."""
    known = np.empty(SMALL, np.float32)
    before, factor, end = -1, np.float32(0), np.int64(0)
    for i in range(len(begin)):
        if row[i] != before:
            before, factor, end = row[i], np.float32(factors[row[i]]), np.int64(offset[row[i]])
            known[:] = -1
        for k in range(begin[i], begin[i] + size[i]):
            count = data[k]
            if count < SMALL:
                value = known[np.int64(count)]
                if value < 0:
                    value = np.log1p(np.float32(count) * factor)
                    known[np.int64(count)] = value
            else:
                value = np.log1p(np.float32(count) * factor)
            out_indices[end] = indices[k]
            out_data[end] = value
            end += 1


@kernel
def take_values(
    begin: np.ndarray,
    size: np.ndarray,
    row: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    offset: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """Write rows as CSR, each from its ``offset`` on, with the values as they are."""
    before, end = -1, np.int64(0)
    for i in range(len(begin)):
        if row[i] != before:
            before, end = row[i], np.int64(offset[row[i]])
        for k in range(begin[i], begin[i] + size[i]):
            out_indices[end] = indices[k]
            out_data[end] = data[k]
            end += 1


@kernel
def drop_columns(
    offset: np.ndarray, columns: np.ndarray, indices: np.ndarray, data: np.ndarray, starts: np.ndarray
) -> int:
    """Rename the columns of CSR rows in place, leave out those that ``columns`` maps to -1, and close the gaps.

    ``offset`` says where rows start and the last one ends; ``starts`` gets the same of what is left, and the number
    of values left is returned.
    """
    end = 0
    for i in range(len(offset) - 1):
        starts[i] = end
        for k in range(offset[i], offset[i + 1]):
            j = columns[indices[k]]
            if j >= 0:
                indices[end] = j
                data[end] = data[k]
                end += 1
    starts[len(offset) - 1] = end
    return end


@kernel
def plan_chunks(
    starts: np.ndarray,
    stops: np.ndarray,
    part: np.ndarray,
    chunk: np.ndarray,
    base: np.ndarray,
    limit: int,
    numbers: np.ndarray,
    cuts: np.ndarray,
) -> int:
    """Write the chunks that ascending rows lie in, in batches of at most ``limit``; return how many batches.

    Row i holds the values ``starts[i]`` to ``stops[i]`` of its part, whose chunks have ``chunk`` values and are
    numbered from ``base`` on. ``cuts`` gets where each batch ends: among the rows, among ``numbers``.
    """
    count, begin, last, batches = 0, 0, -1, 0
    for i in range(len(starts)):
        if stops[i] == starts[i]:
            continue
        p = part[i]
        a, b = base[p] + starts[i] // chunk[p], base[p] + (stops[i] - 1) // chunk[p]
        if count > begin and count - begin + b - max(a, last + 1) + 1 > limit:
            cuts[batches, 0], cuts[batches, 1] = i, count
            batches += 1
            begin, last = count, -1
        for number in range(max(a, last + 1), b + 1):
            numbers[count] = number
            count += 1
        last = max(last, b)
    cuts[batches, 0], cuts[batches, 1] = len(starts), count
    return batches + 1


@kernel
def cut_into_pieces(
    starts: np.ndarray,
    stops: np.ndarray,
    part: np.ndarray,
    request: np.ndarray,
    chunk: np.ndarray,
    base: np.ndarray,
    slot_of: np.ndarray,
    length: int,
    begin: np.ndarray,
    size: np.ndarray,
    row: np.ndarray,
) -> int:
    """Write the pieces of rows whose chunks lie in slots of ``length`` values; return their number."""
    n = 0
    for i in range(len(starts)):
        a, b, p = starts[i], stops[i], part[i]
        if a == b:
            begin[n], size[n], row[n] = 0, 0, request[i]
            n += 1
        while a < b:
            number = a // chunk[p]
            first = number * chunk[p]
            end = min(b, first + chunk[p])
            begin[n] = np.int64(slot_of[base[p] + number]) * length + a - first
            size[n], row[n] = end - a, request[i]
            n += 1
            a = end
    return n


@kernel
def take_slots(
    numbers: np.ndarray,
    slot_of: np.ndarray,
    owner: np.ndarray,
    pins: np.ndarray,
    used: np.ndarray,
    hand: int,
    missing: np.ndarray,
) -> tuple[int, int]:
    """Pin the slots of chunks and give those that have none the slots of chunks not used for long.

    The replaced slots are found by a hand that goes round (second chance). Returns the hand and how many chunks are
    ``missing``, i.e. got a slot now; -1 if too few slots are free, and then nothing is changed.
    """
    free, wanted = 0, 0
    for s in range(len(pins)):
        free += pins[s] == 0
    for number in numbers:
        s = slot_of[number]
        wanted += s < 0
        free -= s >= 0 and pins[s] == 0
    if wanted > free:
        return hand, -1
    for number in numbers:
        s = slot_of[number]
        if s >= 0:
            pins[s] += 1
            used[s] = True
    count = 0
    for number in numbers:
        if slot_of[number] >= 0:
            continue
        while pins[hand] > 0 or used[hand]:
            used[hand] = False
            hand = (hand + 1) % len(pins)
        if owner[hand] >= 0:
            slot_of[owner[hand]] = -1
        owner[hand], slot_of[number] = number, hand
        pins[hand], used[hand] = 1, True
        missing[count] = number
        count += 1
        hand = (hand + 1) % len(pins)
    return hand, count
