"""Compiled loops over stored rows: they take rows out of column numbers and values, and put rows in order."""

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


@kernel
def select_columns(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    keep: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """Copy the positive values of kept rows in mapped columns, ascending by column; return how many.

    Every value is written and the next one over it unless it counts: no branch to mispredict. So ``out_*`` need room
    for one value more than there are.
    """
    end = 0
    for i in range(len(indptr) - 1):
        begin = end
        if keep[i]:
            places, values = indices[indptr[i] : indptr[i + 1]], data[indptr[i] : indptr[i + 1]]
            for k in range(len(places)):
                j = columns[places[k]]
                out_indices[end] = j
                out_data[end] = values[k]
                end += (j >= 0) & (values[k] > 0)
            ascending = True
            for k in range(begin + 1, end):
                ascending &= out_indices[k] > out_indices[k - 1]
            if not ascending:
                order = np.argsort(out_indices[begin:end])
                out_indices[begin:end] = out_indices[begin:end][order]
                out_data[begin:end] = out_data[begin:end][order]
        lengths[i] = end - begin
    return end


@kernel
def place_rows(
    starts: np.ndarray,
    lengths: np.ndarray,
    places: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """Copy the rows that begin at ``starts`` to where they belong: row i to ``places[i]`` on."""
    for i in range(len(starts)):
        a, b, n = starts[i], places[i], lengths[i]
        out_indices[b : b + n] = indices[a : a + n]
        out_data[b : b + n] = data[a : a + n]


@kernel
def column_maximum(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, factors: np.ndarray, out: np.ndarray
) -> None:
    """Raise ``out`` to the largest value * factor of its row seen in each column, in float32."""
    for i in range(len(indptr) - 1):
        factor = np.float32(factors[i])
        for k in range(indptr[i], indptr[i + 1]):
            out[indices[k]] = max(out[indices[k]], np.float32(data[k]) * factor)


@kernel
def shuffle_keys(seed: int, first: int, out: np.ndarray) -> None:
    """Write a 64-bit key for each of the rows from ``first``: SplitMix64 of seed and row.

    Sorting by these keys is a random order that depends on the seed and the row's number alone, not on how
    the rows were cut into blocks or buckets.
    """
    for i in range(len(out)):
        z = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(first + i + 1) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out[i] = z ^ (z >> np.uint64(31))
