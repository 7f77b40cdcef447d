"""Compiled loops over stored rows, which extract rows from column numbers and values, and reorder rows."""

from __future__ import annotations

import numpy as np

from perturbdiff.runtime.compiled import kernel

SMALL = 64
"""The logarithms of counts below this are computed once per row. Nearly all counts of a cell are small."""


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
    """Write log1p(count * factor of the row) to the rows ``place`` of the dense ``out``, whose other values become 0.

    ``columns`` maps stored columns to those of ``out``, and -1 leaves a column out. If it is empty, they are equal.
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
    """Do the same as `dense_log1p`, but without changing the values."""
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
    """Write rows as CSR with float32 values log1p(count * factor of the row). Row i starts at ``offset[i]``."""
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
    """Write rows as CSR with unchanged values. Row i starts at ``offset[i]``."""
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
    """Renumber the columns of CSR rows in place, and remove the columns that ``columns`` maps to -1.

    ``offset`` holds the starts of the rows and the end of the last one. The new starts and end are written to
    ``starts``. Returns the number of values that remain.
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
    """Find the chunks that hold ascending rows, in groups of at most ``limit`` chunks. Return the number of groups.

    Row i holds the values ``starts[i]`` to ``stops[i]`` of its partition. The chunks of a partition have ``chunk``
    values and are numbered from ``base`` on. The chunks are written to ``numbers``. ``cuts`` receives the end of each
    group, as a position among the rows and one in ``numbers``.
    """
    count, begin, last, groups = 0, 0, -1, 0
    for i in range(len(starts)):
        if stops[i] == starts[i]:
            continue
        p = part[i]
        a, b = base[p] + starts[i] // chunk[p], base[p] + (stops[i] - 1) // chunk[p]
        if count > begin and count - begin + b - max(a, last + 1) + 1 > limit:
            cuts[groups, 0], cuts[groups, 1] = i, count
            groups += 1
            begin, last = count, -1
        for number in range(max(a, last + 1), b + 1):
            numbers[count] = number
            count += 1
        last = max(last, b)
    cuts[groups, 0], cuts[groups, 1] = len(starts), count
    return groups + 1


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
    """Cut rows at the borders of their chunks, which lie in slots of ``length`` values. Return the number of pieces."""
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
    """Pin the slots of chunks, after giving a slot to each chunk that has none.

    Slots of chunks that have not been used for long are reused, by the second-chance algorithm with a clock hand.
    Returns the hand and the number of chunks that got a slot now, which are listed in ``missing``. If too few slots
    are free, it returns -1 for the number and changes nothing.
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
    """Copy the positive values of kept rows in mapped columns, ascending by column. Return their number.

    Every value is written. If it is not wanted, the next one overwrites it, which saves a branch that the processor
    would mispredict. ``out_*`` therefore need room for one value more.
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
    """Copy row i from its ``starts[i]`` in ``indices`` and ``data`` to ``places[i]`` in the output."""
    for i in range(len(starts)):
        a, b, n = starts[i], places[i], lengths[i]
        out_indices[b : b + n] = indices[a : a + n]
        out_data[b : b + n] = data[a : a + n]


@kernel
def column_maximum(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, factors: np.ndarray, out: np.ndarray
) -> None:
    """Update ``out``, the maximum over rows of value * factor of the row in each column, in float32."""
    for i in range(len(indptr) - 1):
        factor = np.float32(factors[i])
        for k in range(indptr[i], indptr[i + 1]):
            out[indices[k]] = max(out[indices[k]], np.float32(data[k]) * factor)


@kernel
def shuffle_keys(seed: int, first: int, out: np.ndarray) -> None:
    """Write a 64-bit key for each row from ``first`` on: SplitMix64 of the seed and the row's number.

    Sorting by these keys gives a random order that depends only on the seed and the row numbers. It does not depend
    on how the rows were divided into blocks or buckets.
    """
    for i in range(len(out)):
        z = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(first + i + 1) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out[i] = z ^ (z >> np.uint64(31))
