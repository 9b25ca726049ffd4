"""The compiled half of ``model.scan``: by numba, so that no compiler is needed where it runs.

All of it stands in one file because numba compiles anew when the file of a function changes, and looks at no other.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

BLOCK = 256  # items that are looked at together
WORDS = BLOCK // 64  # of a bitmap, for one block
CHUNK = 64  # blocks that are scanned for one query after the other while they are in the cache
# Blocks spread over the catalogue that are scanned before all: what their best say of the k-th best score keeps the
# others' work small, even where the catalogue is sorted from worst to best.
SAMPLE = 16
BUDGET = 254.0  # the largest sum of deficits that may still qualify
RENEW_BELOW = 0.95  # deficits are made anew when an item may lose less than this share of what it could before
AHEAD = 8192  # bytes of codes that are asked for before they are needed
EPSILON = 2.0**-23  # of float32
ROUNDING = 1e-5  # more than the relative error of a score's last additions
SMALLEST = 1e-30
SPARE = 32  # keys that are kept beside twice as many as are wanted
SIGN, BELOW_SIGN = np.uint32(1 << 31), np.uint32((1 << 31) - 1)  # of a float32's bits
MARKS = 1024  # bits that tell most items from those that are lifted
LARGEST = 1e38  # of what the parts of a score may add up to


class Catalogue(NamedTuple):
    """What is scanned.

    lanes    (blocks, rows, 256)  uint8, book by book the codes of 256 items; then their bias levels, if there are any
    bias     (blocks * 256,)      float32, minus infinity past the last item
    levels   (256,) or (0,)       float32, the largest bias that each level stands for
    highest  the largest bias
    farthest the largest absolute bias
    """

    lanes: Any
    bias: Any
    levels: Any
    highest: float
    farthest: float


class Batch(NamedTuple):
    """What Q queries ask, and how far they are.

    tables    (Q, B', W')  float32, inner products with the codewords
    excluded  (Q, words)   uint64, bitmaps of what must not be shown
    work      scratch memory whose type chooses the path: (Q, 256) float32 portable, (Q, rows, 256) uint8 the deficits
              of vbmi, (Q, rows, 16, 16) uint8 those of avx2
    lifted    (Q, F)       int64, items that score more than their codes say, each once, -1 at the end
    raised    (Q, F)       float32, their scores
    marks     (Q, 16)      uint64, of each of them the bit that its number modulo 1024 has
    peaks     (Q, B')      float32, the largest product of each codebook
    bounds    (Q, 3)       float64: no score is above the first, none below the second can be among the k best, and
                           an item could lose the third when the deficits were made; all without boosts
    boosted   (G, words)   uint64, bitmaps of items whose scores gain something
    boosts    (G,)         float32, what they gain
    reach     what an item can gain at most
    found     (Q,)         int64, how many items are kept
    keys      (Q, room)    uint64, their keys, in any order; room for more than k, from which the best are taken when
                           it is full
    """

    tables: Any
    excluded: Any
    work: Any
    lifted: Any
    raised: Any
    marks: Any
    peaks: Any
    bounds: Any
    boosted: Any
    boosts: Any
    reach: float
    found: Any
    keys: Any


@numba.njit(cache=True, nogil=True)
def lay_out(codes, bias, edges, lanes, levels):
    """Bring codes (N, B') into lanes, and find each item's level of bias and the largest bias of each level."""
    for item in range(len(codes)):
        block, place = item // BLOCK, item % BLOCK
        for book in range(codes.shape[1]):
            lanes[block, book, place] = codes[item, book]
        if len(edges):
            low, high = 0, len(edges)  # how many edges are not above the bias
            while low < high:
                middle = (low + high) // 2
                if edges[middle] <= bias[item]:
                    low = middle + 1
                else:
                    high = middle
            lanes[block, codes.shape[1], place] = low
            levels[low] = max(levels[low], bias[item])


@numba.njit(cache=True, nogil=True)
def scores(catalogue, tables, out):
    """Scores of all items: tables (Q, B', W') -> out (Q, blocks * 256)."""
    for block in range(len(catalogue.lanes)):
        for q in range(len(tables)):
            _add_up(catalogue.lanes, catalogue.bias, block, tables[q], out[q, block * BLOCK : (block + 1) * BLOCK])


@numba.njit(cache=True, nogil=True)
def rank(catalogue, table, lifted, gains, boosted, boosts, candidates, items, scores):
    """The best of the candidates, which are distinct; returns how many are shown."""
    own = np.empty(len(candidates), np.float32)
    scores_of(catalogue, table, lifted, gains, boosted, boosts, candidates, own)
    keys = np.empty(len(candidates), np.uint64)
    for place in range(len(candidates)):
        if not np.isfinite(own[place]):
            raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
        keys[place] = _key(candidates[place], own[place])
    return _rank(keys, len(keys), items, scores)


@numba.njit(cache=True, nogil=True)
def scores_of(catalogue, table, lifted, gains, boosted, boosts, items, scores):
    """The scores of some items, in order."""
    alone, raised = np.empty(len(lifted), np.int64), np.empty(len(lifted), np.float32)
    marks = np.zeros(MARKS // 64, np.uint64)
    _lift(catalogue.lanes, catalogue.bias, table, lifted, gains, alone, raised, marks)
    for number in range(len(items)):
        place = _place(items[number], alone, marks)
        score = raised[place] if place >= 0 else _score(catalogue.lanes, catalogue.bias, table, items[number])
        scores[number] = _boosted(items[number], score, boosted, boosts)


@numba.njit(cache=True, nogil=True)
def top_k(catalogue, tables, lifted, gains, boosted, boosts, excluded, work, k):
    """The k best items of each query, best first, ties by item order: as ``Scan.top_k``."""
    queries, lifts = lifted.shape
    reach = 0.0
    for boost in boosts:
        reach += max(0.0, boost)
    batch = Batch(
        tables,
        excluded,
        work,
        np.empty((queries, lifts), np.int64),
        np.empty((queries, lifts), np.float32),
        np.zeros((queries, MARKS // 64), np.uint64),
        np.empty(tables.shape[:2], np.float32),
        np.empty((queries, 3)),
        boosted,
        boosts,
        reach,
        np.empty(queries, np.int64),
        np.empty((queries, 2 * k + SPARE), np.uint64),
    )
    for q in range(queries):
        batch.bounds[q, 0] = _highest(catalogue, tables[q], batch.peaks[q])
        batch.bounds[q, 1] = -np.inf
        own = batch.lifted[q], batch.raised[q], batch.marks[q]
        _lift(catalogue.lanes, catalogue.bias, tables[q], lifted[q], gains[q], *own)
    every, stride = np.arange(queries), len(catalogue.lanes) // SAMPLE
    if stride > 8:
        expected = k / stride  # of the k best in the sample; three deviations more are hardly ever there
        _scan(catalogue, batch, every, stride, min(k, 2 + int(expected + 3 * np.sqrt(expected))))
    _scan(catalogue, batch, every, 1, k)
    items, scores = np.empty((queries, k), np.int64), np.empty((queries, k), np.float32)
    for q in range(queries):
        own = batch.keys[q], batch.found[q : q + 1], batch.bounds[q]
        if _narrow(k, *own, batch.reach) < batch.bounds[q, 1]:  # the sample has promised more than there is
            batch.bounds[q, 1] = -np.inf
            _scan(catalogue, batch, every[q : q + 1], 1, k)
        _rank(batch.keys[q], batch.found[q], items[q], scores[q])
    return items, scores


@numba.njit(nogil=True)
def _scan(catalogue, batch, queries, stride, room):
    """Find the best of every block and of those that are lifted, or just of every stride-th block, for some queries."""
    blocks = len(catalogue.lanes)
    for q in queries:
        lifted, raised, excluded = batch.lifted[q], batch.raised[q], batch.excluded[q]
        keys, found, bounds = batch.keys[q, : 2 * room + SPARE], batch.found[q : q + 1], batch.bounds[q]
        found[0] = 0
        for place in range(len(lifted) if stride == 1 else 0):
            item = lifted[place]
            if item >= 0 and not _is_in(excluded, item):
                score = _boosted(item, raised[place], batch.boosted, batch.boosts)
                _keep(item, score, room, keys, found, bounds, batch.reach)
        _narrow(room, keys, found, bounds, batch.reach)
        _renew(catalogue, batch.tables[q], batch.peaks[q], bounds, batch.work[q])
    for begin in range(0, blocks, CHUNK * stride):
        end = begin + CHUNK * stride
        if end > blocks:
            end = blocks
        for q in queries:
            _scan_blocks(catalogue, batch, q, begin, end, stride, room)
    for q in queries:
        _narrow(room, batch.keys[q], batch.found[q : q + 1], batch.bounds[q], batch.reach)


@numba.njit(nogil=True)
def _scan_blocks(catalogue, batch, q, begin, end, stride, room):
    """Offer what may be among the k best."""
    lanes, bias = catalogue.lanes, catalogue.bias
    excluded, table, work = batch.excluded[q], batch.tables[q], batch.work[q]
    lifted, marks = batch.lifted[q], batch.marks[q]
    peaks, bounds = batch.peaks[q], batch.bounds[q]
    keys, found = batch.keys[q, : 2 * room + SPARE], batch.found[q : q + 1]
    for block in range(begin, end, stride):
        first = block * WORDS
        if ~(excluded[first] & excluded[first + 1] & excluded[first + 2] & excluded[first + 3]) == 0:
            continue
        if bounds[0] < bounds[1]:
            return  # nothing else is as good
        if bounds[2] > SMALLEST and bounds[0] - bounds[1] < RENEW_BELOW * bounds[2]:
            _renew(catalogue, table, peaks, bounds, work)
        passing = _passing(lanes, bias, block, table, bounds[1], work)
        for word in range(WORDS):
            left = passing[word] & ~excluded[first + word]
            while left:
                item = block * BLOCK + word * 64 + _lowest_bit(left)
                left &= left - np.uint64(1)
                score = _score(lanes, bias, table, item)
                if score >= bounds[1] and _place(item, lifted, marks) < 0:
                    score = _boosted(item, score, batch.boosted, batch.boosts)
                    _keep(item, score, room, keys, found, bounds, batch.reach)


@numba.njit(nogil=True)
def _keep(item, score, room, keys, found, bounds, reach):
    """Keep the item, as it may be among the best."""
    if score > -np.inf:
        keys[found[0]] = _key(item, score)
        found[0] += 1
        if found[0] == len(keys):
            _narrow(room, keys, found, bounds, reach)


@numba.njit(nogil=True)
def _narrow(room, keys, found, bounds, reach):
    """Keep no more than the best; returns what an item scores at least, without boosts, to be better than their worst.

    That is minus infinity where there is room for more.
    """
    if found[0] < room:
        return -np.inf
    _select(keys, found[0], room)
    found[0] = room
    _, score = _of_key(keys[room - 1])
    least = np.float64(score)
    if reach > 0:
        least -= reach + ROUNDING * (reach + abs(least))
    bounds[1] = max(bounds[1], least)
    return least


@numba.njit(nogil=True)
def _boosted(item, score, boosted, boosts):
    for place in range(len(boosts)):
        if _is_in(boosted[place], item):
            score += boosts[place]
    return score


@numba.njit(nogil=True)
def _highest(catalogue, table, peaks):
    """More than any item can score, and still so when the roundings of the k-th best score are added to it.

    An item that loses L against the best codewords rounds by at most B' * EPSILON / 2 * (L + their absolute sum). The
    second part is added here, twice over; the first is far below the L / 255 by which whoever saturates is too low.
    """
    total, best, all_of_it = catalogue.highest, abs(catalogue.highest), catalogue.farthest
    for book in range(len(table)):
        peaks[book] = _peak(table[book])
        total += peaks[book]
        best += abs(peaks[book])
        all_of_it += _size(table[book])
    if not all_of_it <= LARGEST:
        raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
    return total + (len(table) + 1) * EPSILON * best


@numba.njit(nogil=True)
def _peak(products):
    peak = products[0]
    for product in products:
        if product > peak:
            peak = product
    return peak


@numba.njit(nogil=True, fastmath={"reassoc"})  # in any order, or it would not be vectorised
def _size(products):
    size = np.float32(0)
    for product in products:
        size += abs(product)
    return size


@numba.njit(nogil=True)
def _lift(lanes, bias, table, lifted, gains, alone, raised, marks):
    """Score the lifted items, each once: its gains are added one after the other."""
    count = 0
    for place in range(len(alone)):
        alone[place] = -1
    for item, gain in zip(lifted, gains):  # noqa: B905 - numba has no strict
        place = _place(item, alone, marks)
        if place < 0:
            place, mark = count, item % MARKS
            marks[mark // 64] |= np.uint64(1) << np.uint64(mark % 64)
            alone[place], raised[place] = item, _score(lanes, bias, table, item)
            count += 1
        raised[place] += gain


@numba.njit(nogil=True)
def _score(lanes, bias, table, item):
    block, place = item // BLOCK, item % BLOCK
    score = bias[item]
    for book in range(len(table)):
        score += table[book, lanes[block, book, place]]
    return score


@numba.njit(nogil=True)
def _add_up(lanes, bias, block, table, out):
    """Scores of 256 items, each summed as ``_score`` does; four at a time stay in registers."""
    for place in range(0, BLOCK, 4):
        item = block * BLOCK + place
        one, two, three, four = bias[item], bias[item + 1], bias[item + 2], bias[item + 3]
        for book in range(len(table)):
            one += table[book, lanes[block, book, place]]
            two += table[book, lanes[block, book, place + 1]]
            three += table[book, lanes[block, book, place + 2]]
            four += table[book, lanes[block, book, place + 3]]
        out[place], out[place + 1], out[place + 2], out[place + 3] = one, two, three, four


@numba.njit(nogil=True)
def _is_in(bitmap, item):
    return (bitmap[item // 64] >> np.uint64(item % 64)) & np.uint64(1) != 0


@numba.njit(nogil=True)
def _place(item, items, marks):
    """Where the item stands among others, which are marked; -1 where it does not."""
    if not _is_in(marks, item % MARKS):
        return -1
    for place in range(len(items)):
        if items[place] == item:
            return place
    return -1


# Keys of items and their scores: the smaller, the better. Of equal scores the later item is worse.


@numba.njit(nogil=True)
def _key(item, score):
    bits = np.float32(score + np.float32(0)).view(np.uint32)  # 0 for -0, which is the same
    return np.uint64(_turned(bits)) << np.uint64(32) | np.uint64(item)


@numba.njit(nogil=True)
def _of_key(key):
    bits = _turned(np.uint32(key >> np.uint64(32)))
    return np.int64(key & np.uint64(0xFFFFFFFF)), np.uint32(bits).view(np.float32)


@numba.njit(nogil=True)
def _turned(bits):
    """Of a float32's bits numbers in the opposite order, and the other way round."""
    return np.uint32(bits if bits >= SIGN else bits ^ BELOW_SIGN)


@numba.njit(nogil=True)
def _select(keys, found, room):
    """Bring the smallest of the keys, which all differ, to the front, so many of them, the largest of these last."""
    low, high = 0, found - 1
    while low < high:
        left, right, pivot = low, high, keys[(low + high) // 2]
        while left <= right:
            while keys[left] < pivot:
                left += 1
            while keys[right] > pivot:
                right -= 1
            if left <= right:
                keys[left], keys[right] = keys[right], keys[left]
                left += 1
                right -= 1
        if room - 1 <= right:
            high = right
        elif room - 1 >= left:
            low = left
        else:
            return


@numba.njit(nogil=True)
def _rank(keys, found, items, scores):
    """The best of them first, and no items at minus infinity behind them; returns how many there are."""
    if found > len(items):
        _select(keys, found, len(items))
        found = len(items)
    keys[:found].sort()
    for place in range(found):
        items[place], scores[place] = _of_key(keys[place])
    for place in range(found, len(items)):
        items[place], scores[place] = -1, -np.inf
    return found


# What the paths differ in: making deficits, and ruling out items by them.


def _renew(catalogue, table, peaks, bounds, work):
    """Make what ``_passing`` needs for the k-th best score so far."""


def _passing(lanes, bias, block, table, worst, work):
    """Which of 256 items may have a score that is not below the worst: four words of a bitmap."""


@overload(_renew, jit_options={"nogil": True})
def _renew_of(catalogue, table, peaks, bounds, work):
    return _no_deficits if work.dtype == types.float32 else _deficits


@overload(_passing, jit_options={"nogil": True})
def _passing_of(lanes, bias, block, table, worst, work):
    if work.dtype == types.float32:
        return _not_below
    return _unsaturated if work.ndim == 2 else _unsaturated_halves


def _no_deficits(catalogue, table, peaks, bounds, work):
    bounds[2] = 0


def _deficits(catalogue, table, peaks, bounds, work):
    """How far each codeword stays behind the best of its codebook, in 1/254 of what an item may lose."""
    deficits = work.reshape(len(work), 256)
    bounds[2] = bounds[0] - bounds[1]
    if bounds[2] < SMALLEST:  # nothing but the best codewords can qualify
        bounds[2] = SMALLEST
    scale = np.float32(BUDGET / bounds[2])  # 0 while there is no k-th best score
    for book in range(len(table)):
        _quantise(table[book], peaks[book], scale, deficits[book])
    if len(deficits) > len(table):
        _quantise(catalogue.levels, np.float32(catalogue.highest), scale, deficits[len(table)])


@numba.njit(nogil=True)
def _quantise(products, peak, scale, deficits):
    for word in range(len(products)):
        loss = (peak - products[word]) * scale
        deficits[word] = np.int32(loss if loss < np.float32(255) else np.float32(255))


def _not_below(lanes, bias, block, table, worst, work):
    _add_up(lanes, bias, block, table, work)
    some = False
    for place in range(BLOCK):
        some |= work[place] >= worst
    if not some:
        return np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    return _bits(work[:64], worst), _bits(work[64:128], worst), _bits(work[128:192], worst), _bits(work[192:], worst)


@numba.njit(nogil=True)
def _bits(scores, worst):
    bits = np.uint64(0)
    for place in range(64):
        bits |= np.uint64(scores[place] >= worst) << np.uint64(place)
    return bits


def _unsaturated(lanes, bias, block, table, worst, work):
    return _permute(lanes, block, work)


def _unsaturated_halves(lanes, bias, block, table, worst, work):
    return _shuffle(lanes, block, work)


@intrinsic
def _lowest_bit(typing_context, word):
    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), True))

    return types.int64(word), generate


@intrinsic
def _permute(typing_context, lanes, block, deficits):
    """Which of 256 items do not saturate: codes (rows, 256), deficits (rows, 256) -> four words."""
    vector = ir.VectorType(ir.IntType(8), 64)

    def look_up(builder, deficits, codes):
        permute = _function(builder, "llvm.x86.avx512.vpermi2var.qi.512", vector, 3)
        tables = [_load(builder, deficits, 64 * part, vector) for part in range(4)]
        for one in codes:
            low, high = (builder.call(permute, [tables[half], one, tables[half + 1]]) for half in (0, 2))
            yield builder.select(builder.icmp_signed("<", one, vector(None)), high, low)

    return types.UniTuple(types.uint64, WORDS)(lanes, types.intp, deficits), _adding(look_up, vector, at_once=4)


@intrinsic
def _shuffle(typing_context, lanes, block, deficits):
    """The same, deficits (rows, 16, 16) by high and low half of the code."""
    vector, half = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(8), 16)

    def look_up(builder, deficits, codes):
        shuffle = _function(builder, "llvm.x86.avx2.pshuf.b", vector, 2)
        low = [builder.and_(one, ir.Constant(vector, [15] * 32)) for one in codes]
        high = {16: codes}  # the bit that halves so many tables comes first, where a sign is
        for tables in (8, 4, 2):
            high[tables] = [builder.add(one, one) for one in high[2 * tables]]

        def among(first, tables):
            if tables == 1:
                entries = _load(builder, deficits, 16 * first, half)
                entries = builder.shuffle_vector(
                    entries, entries, ir.Constant(ir.VectorType(ir.IntType(32), 32), [*range(16)] * 2)
                )
                return [builder.call(shuffle, [entries, one]) for one in low]
            lower, upper = among(first, tables // 2), among(first + tables // 2, tables // 2)
            return [
                builder.select(builder.icmp_signed("<", sign, vector(None)), above, below)
                for sign, below, above in zip(high[tables], lower, upper, strict=True)
            ]

        yield from among(0, 16)

    return types.UniTuple(types.uint64, WORDS)(lanes, types.intp, deficits), _adding(look_up, vector, at_once=2)


def _adding(look_up, vector, at_once):
    """Code that adds deficits up with saturation, so many vectors of items at once."""

    def generate(context, builder, signature, args):
        lanes, deficits = (context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 2))
        rows = builder.extract_value(lanes.shape, 1)
        codes = builder.gep(lanes.data, [builder.mul(args[1], builder.mul(rows, rows.type(BLOCK)))])
        deficits = deficits.data
        add = _function(builder, f"llvm.uadd.sat.v{vector.count}i8", vector, 2)
        masks = []
        for begin in range(0, BLOCK, at_once * vector.count):
            sums = [cgutils.alloca_once_value(builder, vector(None)) for _ in range(at_once)]
            with cgutils.for_range(builder, rows) as loop:
                row = builder.mul(loop.index, loop.index.type(BLOCK))
                columns, table = builder.gep(codes, [row]), builder.gep(deficits, [row])
                for line in range(0, at_once * vector.count, 64):
                    _prefetch(builder, columns, begin + line + AHEAD)
                loaded = [_load(builder, columns, begin + place * vector.count, vector) for place in range(at_once)]
                for total, loss in zip(sums, look_up(builder, table, loaded), strict=True):
                    builder.store(builder.call(add, [builder.load(total), loss]), total)
            full = ir.Constant(vector, [255] * vector.count)
            masks += [builder.icmp_unsigned("!=", builder.load(total), full) for total in sums]
        return cgutils.pack_array(builder, _words(builder, masks, vector.count))

    return generate


def _words(builder, masks, count):
    """Masks of so many items each as words of 64 bits."""
    word = ir.IntType(64)
    bits = [
        builder.zext(builder.bitcast(mask, ir.IntType(count)), word) if count < 64 else builder.bitcast(mask, word)
        for mask in masks
    ]
    while count < 64:
        bits = [
            builder.or_(low, builder.shl(high, word(count))) for low, high in zip(bits[::2], bits[1::2], strict=True)
        ]
        count *= 2
    return bits


def _function(builder, name, vector, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * arguments), name)


def _load(builder, pointer, offset, vector):
    place = builder.gep(pointer, [ir.IntType(64)(offset)])
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=1)


def _prefetch(builder, pointer, offset):
    number = ir.IntType(32)
    kinds = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kinds, "llvm.prefetch.p0i8")
    builder.call(function, [builder.gep(pointer, [ir.IntType(64)(offset)]), number(0), number(3), number(1)])
