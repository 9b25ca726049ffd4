"""The compiled half of ``model.inference.scan``. Numba compiles it at run time, so no other compiler is needed.

All of it is in one file, because numba recompiles a function only when the function's own file changes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

BLOCK = 256  # items that are ruled out together
WORDS_PER_BLOCK = BLOCK // 64  # of a bitmap, per block
BLOCKS_PER_CHUNK = 64  # blocks that are scanned for all queries while they are in the cache
# Number of blocks, spread over the catalogue, to scan first. They bound the k-th best score, so that later blocks are
# cheap, even in a catalogue sorted from worst to best.
SAMPLED_BLOCKS = 16
MAX_DEFICIT = 254.0  # the largest sum of deficits that may still qualify
REQUANTISE_BELOW = 0.95  # recompute deficits when an item may lose less than this share of their range
PREFETCHED_BLOCKS = 4  # how far ahead codes are prefetched
FEWEST_RULED_OUT = 1 / 16  # of the blocks: where bounds rule out fewer, a query is scanned without them
PROMISING_BLOCKS = 32  # at most, that are scanned before all others
ALLOWED_PER_BEST = 4  # items of these blocks, for each one wanted, from which the best of them bound the others
RANGE_SIZES = 8  # of codes: 1, 2, 4, ... 128
NO_LIMIT = 1 << 16  # exceeds every bound of a block's deficits
FLOAT32_EPSILON = 2.0**-23  # of float32
ROUNDING_ERROR = 1e-5  # exceeds the relative rounding error of a score's last additions
SMALLEST_RANGE = 1e-30
SPARE_KEYS = 32  # in addition to twice k
FEW_KEYS = 64  # that are sorted by insertion
SIGN, BELOW_SIGN = np.uint32(1 << 31), np.uint32((1 << 31) - 1)  # of a float32's bits
FILTER_BITS = 4096  # of a Bloom filter with one hash, for some 300 lifted items
LARGE_GAIN = 1.0  # for smaller gains, ruling out items by their gains takes longer than it saves
MAX_ABSOLUTE_SCORE = 1e38  # of the sum of a score's absolute parts


class Catalogue(NamedTuple):
    """The catalogue of a scan.

    lanes    (blocks, rows, 256)  uint8, book by book the codes of 256 items; then their bias levels, if any
    codes    (N, B')              uint8, the same codes item by item, for items that are scored alone
    bias     (blocks * 256,)      float32, minus infinity past the last item
    levels   (256,) or (0,)       float32, the largest bias of each level
    highest  the largest bias
    farthest the largest absolute bias
    narrow   (R,)                 int64, the rows in which a block's codes are close together, if any
    ranges   (R, 2, blocks)       uint16, two ranges of 2**n codes that cover them, each as n * 256 + its first code
    """

    lanes: Any
    codes: Any
    bias: Any
    levels: Any
    highest: float
    farthest: float
    narrow: Any
    ranges: Any


class Batch(NamedTuple):
    """Q queries, and the progress of their scan.

    tables         (Q, B', W')  float32, inner products with the codewords
    excluded       (Q, words)   uint64, bitmaps of the excluded items; or (1, words), one for all queries
    scratch        memory whose type selects the path: (Q, 256) float32 for portable, uint8 deficits (Q, rows, 256) for
                   vbmi, (Q, rows, 16, 16) for avx2 and (Q, rows, 4, 4, 16) for neon
    lifted         (Q, F)       int64, distinct lifted items, padded with -1
    lifted_scores  (Q, F)       float32, their scores including the gains
    lifted_filter  (Q, 64)      uint64, their Bloom filter: the bit of an item is its number modulo 4096
    best_products  (Q, B')      float32, the largest product of each codebook
    bounds         (Q, 3)       float64: an upper bound of all scores, a lower bound of the k best scores, and the range
                                of the deficits; all without boosts
    boost_sets     (G, words)   uint64, bitmaps of boosted items
    boost_gains    (G,)         float32, their gains
    item_boosts    (N,) or (0,) float32, additional gain of each item
    is_boosted     whether there are boosts
    item_peak      the largest additional gain of an item, at least 0
    max_boost      the largest sum of gains
    found          (Q,)         int64, the number of kept items
    keys           (Q, room)    uint64, their sort keys in any order; with room for more than k, and a full array is
                                reduced to the best k
    deficits       (Q, blocks)  uint16, lower bounds of the deficits of each block's items, in narrow rows
    of_range       (Q,)         float64, the range of these deficits; 0 if they rule out nothing
    blocks         (64,)        int64, those to scan next
    """

    tables: Any
    excluded: Any
    scratch: Any
    lifted: Any
    lifted_scores: Any
    lifted_filter: Any
    best_products: Any
    bounds: Any
    boost_sets: Any
    boost_gains: Any
    item_boosts: Any
    is_boosted: bool
    item_peak: float
    max_boost: float
    found: Any
    keys: Any
    deficits: Any
    of_range: Any
    blocks: Any


@numba.njit(cache=True, nogil=True)
def pack_lanes(codes, bias, edges, lanes, levels):
    """Arrange codes (N, B') in lanes; find each item's bias level, and the largest bias of each level."""
    for item in range(len(codes)):
        block, place = item // BLOCK, item % BLOCK
        for book in range(codes.shape[1]):
            lanes[block, book, place] = codes[item, book]
        if len(edges):
            low, high = 0, len(edges)  # counts the edges that are not above the bias
            while low < high:
                middle = (low + high) // 2
                if edges[middle] <= bias[item]:
                    low = middle + 1
                else:
                    high = middle
            lanes[block, codes.shape[1], place] = low
            levels[low] = max(levels[low], bias[item])


@numba.njit(cache=True, nogil=True)
def find_ranges(lanes, narrow, ranges):
    """Find the ranges of each block's codes in narrow rows, as ``Catalogue`` has them."""
    for block in range(len(lanes)):
        for place in range(len(narrow)):
            codes = lanes[block, narrow[place]]
            least, largest, size = np.int64(codes.min()), np.int64(codes.max()), 0
            while size + 1 < RANGE_SIZES and 2 << size <= largest - least + 1:
                size += 1
            ranges[place, 0, block] = size * 256 + least
            ranges[place, 1, block] = size * 256 + largest + 1 - (1 << size)


@numba.njit(cache=True, nogil=True)
def scores(catalogue, tables, out):
    """Score all items: tables (Q, B', W') -> out (Q, blocks * 256)."""
    for block in range(len(catalogue.lanes)):
        for q in range(len(tables)):
            _score_block(catalogue.lanes, catalogue.bias, block, tables[q], out[q, block * BLOCK : (block + 1) * BLOCK])


@numba.njit(cache=True, nogil=True)
def rank(catalogue, table, lifted, gains, boosts, candidates, items, scores):
    """Rank distinct candidates; returns the number of ranked items."""
    own = np.empty(len(candidates), np.float32)
    scores_of(catalogue, table, lifted, gains, boosts, candidates, own)
    keys = np.empty(len(candidates), np.uint64)
    for place in range(len(candidates)):
        if not np.isfinite(own[place]):
            raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
        keys[place] = _sort_key(candidates[place], own[place])
    return _write_best(keys, len(keys), items, scores)


@numba.njit(cache=True, nogil=True)
def scores_of(catalogue, table, lifted, gains, boosts, items, scores):
    """Score the given items, in order."""
    distinct, lifted_scores = np.empty(len(lifted), np.int64), np.empty(len(lifted), np.float32)
    lifted_filter = np.zeros(FILTER_BITS // 64, np.uint64)
    codes, bias = catalogue.codes, catalogue.bias
    _score_lifted(codes, bias, table, lifted, gains, distinct, lifted_scores, lifted_filter)
    for number in range(len(items)):
        place = _find(items[number], distinct, lifted_filter)
        score = lifted_scores[place] if place >= 0 else _score_item(codes, bias, table, items[number])
        scores[number] = _add_boosts(items[number], score, boosts.sets, boosts.gains, boosts.by_item)


@numba.njit(cache=True, nogil=True)
def top_k(catalogue, tables, lifted, gains, boosts, excluded, scratch, k):
    """Find the k best items of each query, as ``Scan.top_k`` does."""
    queries, lifts = lifted.shape
    max_boost = item_peak = max(0.0, boosts.highest)
    for boost in boosts.gains:
        max_boost += max(0.0, boost)
    batch = Batch(
        tables,
        excluded,
        scratch,
        np.empty((queries, lifts), np.int64),
        np.empty((queries, lifts), np.float32),
        np.zeros((queries, FILTER_BITS // 64), np.uint64),
        np.empty(tables.shape[:2], np.float32),
        np.empty((queries, 3)),
        boosts.sets,
        boosts.gains,
        boosts.by_item,
        len(boosts.gains) + len(boosts.by_item) > 0,
        item_peak,
        max_boost,
        np.empty(queries, np.int64),
        np.empty((queries, 2 * k + SPARE_KEYS), np.uint64),
        np.empty((queries, len(catalogue.lanes)), np.uint16),
        np.zeros(queries),
        np.empty(BLOCKS_PER_CHUNK, np.int64),
    )
    for q in range(queries):
        batch.bounds[q, 0] = _upper_bound(catalogue, tables[q], batch.best_products[q])
        batch.bounds[q, 1] = -np.inf
        own = batch.lifted[q], batch.lifted_scores[q], batch.lifted_filter[q]
        _score_lifted(catalogue.codes, catalogue.bias, tables[q], lifted[q], gains[q], *own)
        _offer_lifted(batch, q, k)  # the first bound
    every, stride = np.arange(queries), len(catalogue.lanes) // SAMPLED_BLOCKS
    if stride > 8:
        expected = k / stride  # number of the k best in the sample, which rarely exceeds this by six deviations
        _scan(catalogue, batch, every, stride, min(k, 2 + int(expected + 6 * np.sqrt(expected))))
        if len(catalogue.narrow):
            for q in range(queries):
                _scan_promising(catalogue, batch, q, k)
    _scan(catalogue, batch, every, 1, k)
    items, scores = np.empty((queries, k), np.int64), np.empty((queries, k), np.float32)
    for q in range(queries):
        own = batch.keys[q], batch.found[q : q + 1], batch.bounds[q]
        if _drop_worst(k, *own, batch.max_boost) < batch.bounds[q, 1]:  # the sample's bound was too high
            batch.bounds[q, 1] = -np.inf
            _scan(catalogue, batch, every[q : q + 1], 1, k)
        _write_best(batch.keys[q], batch.found[q], items[q], scores[q])
    return items, scores


@numba.njit(nogil=True)
def _scan(catalogue, batch, queries, stride, room):
    """Find the best items of all blocks and of the lifted items, or of every stride-th block, for some queries."""
    blocks = len(catalogue.lanes)
    for q in queries:
        if stride == 1:
            _offer_lifted(batch, q, room)
        else:
            batch.found[q] = 0
        _requantise(catalogue, batch.tables[q], batch.best_products[q], batch.bounds[q], batch.scratch[q])
    for begin in range(0, blocks, BLOCKS_PER_CHUNK * stride):
        end = min(blocks, begin + BLOCKS_PER_CHUNK * stride)
        for q in queries:
            excluded, deficits, limit = _excluded_by(batch, q), batch.deficits[q], _limit(batch, q)
            count = _list_blocks(excluded, deficits, limit, begin, end, stride, batch.blocks)
            _scan_blocks(catalogue, batch, q, count, room)
    for q in queries:
        _drop_worst(room, batch.keys[q], batch.found[q : q + 1], batch.bounds[q], batch.max_boost)


@numba.njit(nogil=True)
def _scan_promising(catalogue, batch, q, room):
    """Bound the deficits of every block, and scan those of the least, whose items probably are among the best."""
    bounds, scratch, excluded, deficits = batch.bounds[q], batch.scratch[q], _excluded_by(batch, q), batch.deficits[q]
    if bounds[1] == -np.inf:  # too few items of the sample are allowed, so there is no range of deficits
        return
    _requantise(catalogue, batch.tables[q], batch.best_products[q], bounds, scratch)
    least = np.empty((len(catalogue.narrow), RANGE_SIZES * 256), np.uint8)
    if not _find_least(batch.tables[q], scratch, catalogue.narrow, least):
        return
    batch.of_range[q] = bounds[2]
    _bound_blocks(catalogue.ranges, least, deficits)
    count = _list_promising(excluded, deficits, batch.blocks)
    least = _scan_listed(catalogue, batch, q, count, room)
    if least < bounds[1] and _count_allowed(excluded, batch.blocks[:count]) >= ALLOWED_PER_BEST * room:
        bounds[1] = -np.inf  # the sample's bound may be too high, as it is if it has many of the best
        _requantise(catalogue, batch.tables[q], batch.best_products[q], bounds, scratch)
        _scan_listed(catalogue, batch, q, count, room)
    limit, ruled_out = np.uint16(max(0, min(_limit(batch, q), NO_LIMIT - 1))), 0
    for block in range(len(deficits)):
        ruled_out += deficits[block] >= limit
    if ruled_out < FEWEST_RULED_OUT * len(deficits):
        batch.of_range[q] = 0


@numba.njit(nogil=True)
def _scan_listed(catalogue, batch, q, count, room):
    """Find the best items of the first listed blocks and of the lifted items; return what ``_drop_worst`` returns."""
    _offer_lifted(batch, q, room)
    _scan_blocks(catalogue, batch, q, count, room)
    return _drop_worst(room, batch.keys[q], batch.found[q : q + 1], batch.bounds[q], batch.max_boost)


@numba.njit(nogil=True)
def _count_allowed(excluded, blocks):
    """Count the items of some blocks that are not excluded."""
    allowed = 0
    for block in blocks:
        for word in range(block * WORDS_PER_BLOCK, (block + 1) * WORDS_PER_BLOCK):
            left = ~excluded[word]
            while left:
                left &= left - np.uint64(1)
                allowed += 1
    return allowed


@numba.njit(nogil=True)
def _bound_blocks(ranges, least, deficits):
    """Find a lower bound of the deficits of each block's items: (blocks,)."""
    deficits[:] = 0
    for row in range(len(least)):
        of_row, first, second = least[row], ranges[row, 0], ranges[row, 1]
        for block in range(len(deficits)):
            deficits[block] += min(of_row[first[block]], of_row[second[block]])


@numba.njit(nogil=True)
def _list_promising(excluded, deficits, blocks):
    """List some blocks of the least deficits; return their number."""
    count, worst = 0, np.uint16(255)
    for block in range(len(deficits)):
        if deficits[block] < worst and not _is_excluded(excluded, block):
            place = count if count < PROMISING_BLOCKS else count - 1
            while place > 0 and deficits[blocks[place - 1]] > deficits[block]:
                blocks[place] = blocks[place - 1]
                place -= 1
            blocks[place] = block
            count = min(count + 1, PROMISING_BLOCKS)
            if count == PROMISING_BLOCKS:
                worst = deficits[blocks[count - 1]]
    return count


@numba.njit(nogil=True)
def _excluded_by(batch, q):
    return batch.excluded[min(q, len(batch.excluded) - 1)]


@numba.njit(nogil=True)
def _is_excluded(excluded, block):
    first = block * WORDS_PER_BLOCK
    return ~(excluded[first] & excluded[first + 1] & excluded[first + 2] & excluded[first + 3]) == 0


@numba.njit(nogil=True)
def _limit(batch, q):
    """Return the least deficit with which a block cannot have an item among the k best, in the units of its bound."""
    if batch.of_range[q] == 0:
        return NO_LIMIT
    left = batch.bounds[q, 0] - batch.bounds[q, 1]  # infinite while there is no k-th best score
    if left < 0:
        return 0
    return max(1, np.int64(min(np.ceil((MAX_DEFICIT + 1) * left / batch.of_range[q]), np.float64(NO_LIMIT))))


@numba.njit(nogil=True)
def _list_blocks(excluded, deficits, limit, begin, end, stride, blocks):
    """List the blocks that may have items among the k best; return their number."""
    count = 0
    for block in range(begin, end, stride):
        if limit == NO_LIMIT or deficits[block] < limit:
            blocks[count] = block
            count += not _is_excluded(excluded, block)
    return count


@numba.njit(nogil=True)
def _offer_lifted(batch, q, room):
    """Find the best lifted items of a query, in place of those found before."""
    lifted, lifted_scores, excluded = batch.lifted[q], batch.lifted_scores[q], _excluded_by(batch, q)
    keys, found, bounds = batch.keys[q, : 2 * room + SPARE_KEYS], batch.found[q : q + 1], batch.bounds[q]
    found[0] = 0
    for place in range(len(lifted)):
        item, score = lifted[place], lifted_scores[place]
        if item >= 0 and score >= bounds[1] and not _contains(excluded, item):
            if batch.is_boosted:
                score = _add_boosts(item, score, batch.boost_sets, batch.boost_gains, batch.item_boosts)
            _offer(item, score, room, keys, found, bounds, batch.max_boost)
    _drop_worst(room, keys, found, bounds, batch.max_boost)


@numba.njit(nogil=True)
def _scan_blocks(catalogue, batch, q, count, room):
    """Offer the items of the first listed blocks that may be among the k best."""
    lanes, bias = catalogue.lanes, catalogue.bias
    excluded, table, scratch = _excluded_by(batch, q), batch.tables[q], batch.scratch[q]
    lifted, lifted_filter = batch.lifted[q], batch.lifted_filter[q]
    best_products, bounds = batch.best_products[q], batch.bounds[q]
    keys, found = batch.keys[q, : 2 * room + SPARE_KEYS], batch.found[q : q + 1]
    item_boosts, item_deficits = batch.item_boosts, np.zeros(BLOCK, np.uint8)
    has_large_gains = len(item_boosts) > 0 and batch.item_peak >= LARGE_GAIN
    blocks, leaves_early, passing = batch.blocks, batch.of_range[q] > 0, np.empty(WORDS_PER_BLOCK, np.uint64)
    for place in range(count):
        block, later = blocks[place], place + PREFETCHED_BLOCKS
        following = blocks[later] if later < count else block + PREFETCHED_BLOCKS
        first = block * WORDS_PER_BLOCK
        if bounds[0] < bounds[1]:
            return  # no other item can reach the k best
        if bounds[2] > SMALLEST_RANGE and bounds[0] - bounds[1] < REQUANTISE_BELOW * bounds[2]:
            _requantise(catalogue, table, best_products, bounds, scratch)
        if has_large_gains and bounds[2] > 0:  # the smaller its gain, the less an item may lose
            gains = item_boosts[block * BLOCK : (block + 1) * BLOCK]
            _quantise(gains, np.float32(batch.item_peak), np.float32(MAX_DEFICIT / bounds[2]), item_deficits)
        _find_survivors(lanes, bias, block, following, leaves_early, table, bounds[1], item_deficits, scratch, passing)
        for word in range(WORDS_PER_BLOCK):
            left = passing[word] & ~excluded[first + word]
            while left:
                item = block * BLOCK + word * 64 + _lowest_bit(left)
                left &= left - np.uint64(1)
                score = _score_survivor(lanes, bias, table, item)
                if score == -np.inf:  # past the last item
                    continue
                if score >= bounds[1] and _find(item, lifted, lifted_filter) < 0:
                    if batch.is_boosted:  # numba counts a reference for each array taken from a tuple
                        score = _add_boosts(item, score, batch.boost_sets, batch.boost_gains, item_boosts)
                    _offer(item, score, room, keys, found, bounds, batch.max_boost)


@numba.njit(nogil=True)
def _offer(item, score, room, keys, found, bounds, max_boost):
    """Keep an item that may be among the best."""
    if score > -np.inf:
        keys[found[0]] = _sort_key(item, score)
        found[0] += 1
        if found[0] == len(keys):
            _drop_worst(room, keys, found, bounds, max_boost)


@numba.njit(nogil=True)
def _drop_worst(room, keys, found, bounds, max_boost):
    """Drop all but the best items; return the least score, without boosts, that can beat the worst of them.

    This is minus infinity while there is room for more items.
    """
    if found[0] < room:
        return -np.inf
    _select_smallest(keys, found[0], room)
    found[0] = room
    _, score = _decode_key(keys[room - 1])
    least = np.float64(score)
    if max_boost > 0:
        least -= max_boost + ROUNDING_ERROR * (max_boost + abs(least))
    bounds[1] = max(bounds[1], least)
    return least


@numba.njit(cache=True, nogil=True)
def add_gain(members, gain, by_item):
    """Add a set's gain to that of its items: (words,), (N,)."""
    for word in range(len(members)):
        bits = members[word]
        while bits:
            item = word * 64 + _lowest_bit(bits)
            if item < len(by_item):  # bits past the last item have no meaning
                by_item[item] += gain
            bits &= bits - np.uint64(1)


@numba.njit(nogil=True)
def _add_boosts(item, score, boost_sets, boost_gains, item_boosts):
    for place in range(len(boost_gains)):
        if _contains(boost_sets[place], item):
            score += boost_gains[place]
    if len(item_boosts):
        score += item_boosts[item]
    return score


@numba.njit(cache=True, nogil=True)
def look_up_products(products, codes, items, codewords):
    """Look up the product of each item's codewords: products (B', W') -> codewords (k, B')."""
    for place in range(len(items)):
        for book in range(len(products)):
            codewords[place, book] = products[book, codes[items[place], book]]


@numba.njit(cache=True, nogil=True)
def add_lifts(followers, gains, each, items, lifts):
    """Add the gains of each item from each of the K newest items, which have `each` followers: lifts (k, K)."""
    for place in range(len(items)):
        for newest in range(lifts.shape[1]):
            for one in range(newest * each, (newest + 1) * each):
                if followers[one] == items[place]:
                    lifts[place, newest] += gains[one]


@numba.njit(nogil=True)
def _upper_bound(catalogue, table, best_products):
    """Compute an upper bound of all scores, with a margin for the rounding of the k-th best score.

    A score that is L below the best codewords' has a rounding error of at most
    B' * FLOAT32_EPSILON / 2 * (L + their absolute sum). The margin is twice the second part. The first part is far
    smaller than L / 255, by which the score of a saturating item is too low.
    """
    total, best, all_of_it = catalogue.highest, abs(catalogue.highest), catalogue.farthest
    for book in range(len(table)):
        best_products[book] = _maximum(table[book])
        total += best_products[book]
        best += abs(best_products[book])
        all_of_it += _absolute_sum(table[book])
    if not all_of_it <= MAX_ABSOLUTE_SCORE:
        raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
    return total + (len(table) + 1) * FLOAT32_EPSILON * best


@numba.njit(nogil=True, fastmath={"reassoc", "nnan", "nsz"})  # to allow vectorisation; `_absolute_sum` finds NaN
def _maximum(products):
    peak = products[0]
    for word in range(len(products)):
        peak = max(peak, products[word])
    return peak


@numba.njit(nogil=True, fastmath={"reassoc"})  # in any order, to allow vectorisation
def _absolute_sum(products):
    size = np.float32(0)
    for word in range(len(products)):
        size += abs(products[word])
    return size


@numba.njit(nogil=True)
def _score_lifted(codes, bias, table, lifted, gains, distinct, lifted_scores, lifted_filter):
    """Score the lifted items, each once, with all its gains."""
    count = 0
    for place in range(len(distinct)):
        distinct[place] = -1
    for item, gain in zip(lifted, gains):  # noqa: B905 - numba has no strict
        if item < 0:
            continue
        place = _find(item, distinct, lifted_filter)
        if place < 0:
            place, bit = count, item % FILTER_BITS
            lifted_filter[bit // 64] |= np.uint64(1) << np.uint64(bit % 64)
            distinct[place], lifted_scores[place] = item, _score_item(codes, bias, table, item)
            count += 1
        lifted_scores[place] += gain


@numba.njit(nogil=True)
def _score_item(codes, bias, table, item):
    """Score an item by its codes."""
    score = bias[item]
    for book in range(len(table)):
        score += table[book, codes[item, book]]
    return score


@numba.njit(nogil=True)
def _score_survivor(lanes, bias, table, item):
    """Score an item of a block that was just read."""
    block, place = item // BLOCK, item % BLOCK
    score = bias[item]
    for book in range(len(table)):
        score += table[book, lanes[block, book, place]]
    return score


@numba.njit(nogil=True)
def _score_block(lanes, bias, block, table, out):
    """Score 256 items, each summed as in ``_score_item``, four at a time in registers."""
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
def _contains(bitmap, item):
    return (bitmap[item // 64] >> np.uint64(item % 64)) & np.uint64(1) != 0


@numba.njit(nogil=True)
def _find(item, items, lifted_filter):
    """Return the position of an item among others, or -1, with the help of their filter."""
    if not _contains(lifted_filter, item % FILTER_BITS):
        return -1
    for place in range(len(items)):
        if items[place] == item:
            return place
    return -1


# Sort keys of items by score: smaller is better. Of equal scores, the later item is worse.


@numba.njit(nogil=True)
def _sort_key(item, score):
    bits = np.float32(score + np.float32(0)).view(np.uint32)  # 0 for -0, which is the same
    return np.uint64(_reversed_bits(bits)) << np.uint64(32) | np.uint64(item)


@numba.njit(nogil=True)
def _decode_key(key):
    bits = _reversed_bits(np.uint32(key >> np.uint64(32)))
    return np.int64(key & np.uint64(0xFFFFFFFF)), np.uint32(bits).view(np.float32)


@numba.njit(nogil=True)
def _reversed_bits(bits):
    """Map a float32's bits to numbers in reversed order, and back."""
    return np.uint32(bits if bits >= SIGN else bits ^ BELOW_SIGN)


@numba.njit(nogil=True)
def _select_smallest(keys, found, room):
    """Move the `room` smallest keys, all distinct, to the front, the largest of them last."""
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
def _write_best(keys, found, items, scores):
    """Write the items of the best keys, best first, padded with -1 and minus infinity; return the number of items."""
    if found > len(items):
        _select_smallest(keys, found, len(items))
        found = len(items)
    if found <= FEW_KEYS:
        _sort_few(keys, found)
    else:
        keys[:found].sort()
    for place in range(found):
        items[place], scores[place] = _decode_key(keys[place])
    for place in range(found, len(items)):
        items[place], scores[place] = -1, -np.inf
    return found


@numba.njit(nogil=True)
def _sort_few(keys, found):
    """Sort the first keys by insertion."""
    for end in range(1, found):
        key, place = keys[end], end
        while place > 0 and keys[place - 1] > key:
            keys[place] = keys[place - 1]
            place -= 1
        keys[place] = key


# The paths differ in how they compute deficits and use them to rule out items.


def _requantise(catalogue, table, best_products, bounds, scratch):
    """Prepare ``_find_survivors`` for the k-th best score so far."""


def _find_least(table, deficits, narrow, least):
    """Find the least deficit of each range of codes in narrow rows; return whether they can rule out a block.

    least  (R, 2048)  uint8, numbered as in ``Catalogue.ranges``
    """


def _find_survivors(lanes, bias, block, following, leaves_early, table, worst, item_deficits, scratch, passing):
    """Find the items of a block whose scores may reach the worst kept one.

    following      the block to prefetch
    leaves_early   whether it pays to check after each row whether an item is left
    item_deficits  (256,)  uint8, additional losses of the items as deficits; the portable path ignores them
    passing        (4,)    uint64, receives a bitmap of the items
    """


@overload(_requantise, jit_options={"nogil": True})
def _choose_requantise(catalogue, table, best_products, bounds, scratch):
    return _skip_deficits if scratch.dtype == types.float32 else _compute_deficits


@overload(_find_least, jit_options={"nogil": True})
def _choose_find_least(table, deficits, narrow, least):
    return _find_none if deficits.dtype == types.float32 else _find_least_deficits


@overload(_find_survivors, jit_options={"nogil": True})
def _choose_find_survivors(lanes, bias, block, following, leaves_early, table, worst, item_deficits, scratch, passing):
    if scratch.dtype == types.float32:
        return _survivors_by_score
    return {2: _survivors_by_permute, 3: _survivors_by_shuffle, 4: _survivors_by_table}[scratch.ndim]


def _skip_deficits(catalogue, table, best_products, bounds, scratch):
    bounds[2] = 0


def _compute_deficits(catalogue, table, best_products, bounds, scratch):
    """Quantise each codeword's distance from the best of its codebook, in 1/254 of what an item may lose."""
    deficits = scratch.reshape(len(scratch), 256)
    bounds[2] = bounds[0] - bounds[1]
    if bounds[2] < SMALLEST_RANGE:  # only the best codewords can qualify
        bounds[2] = SMALLEST_RANGE
    scale = np.float32(MAX_DEFICIT / bounds[2])  # 0 while there is no k-th best score
    for book in range(len(table)):
        _quantise(table[book], best_products[book], scale, deficits[book])
    if len(deficits) > len(table):
        _quantise(catalogue.levels, np.float32(catalogue.highest), scale, deficits[len(table)])


def _find_none(table, deficits, narrow, least):
    return False


def _find_least_deficits(table, deficits, narrow, least):
    most = np.int64(0)
    for place in range(len(narrow)):
        of_row, own = deficits.reshape(len(deficits), 256)[narrow[place]], least[place]
        own[:256] = of_row
        for size in range(1, RANGE_SIZES):
            shorter, half = (size - 1) * 256, 1 << (size - 1)
            for first in range(256 - half):
                own[size * 256 + first] = min(own[shorter + first], own[shorter + first + half])
        most += np.int64(of_row[: table.shape[1]].max() if narrow[place] < len(table) else of_row.max())
    return most > MAX_DEFICIT


@numba.njit(nogil=True)
def _quantise(products, peak, scale, deficits):
    for word in range(len(products)):
        loss = (peak - products[word]) * scale
        deficits[word] = np.int32(loss if loss < np.float32(255) else np.float32(255))


def _survivors_by_score(lanes, bias, block, following, leaves_early, table, worst, item_deficits, scratch, passing):
    _score_block(lanes, bias, block, table, scratch)
    some = False
    for place in range(BLOCK):
        some |= scratch[place] >= worst
    for word in range(WORDS_PER_BLOCK):
        passing[word] = _mask(scratch[word * 64 : (word + 1) * 64], worst) if some else np.uint64(0)


@numba.njit(nogil=True)
def _mask(scores, worst):
    bits = np.uint64(0)
    for place in range(64):
        bits |= np.uint64(scores[place] >= worst) << np.uint64(place)
    return bits


def _survivors_by_permute(lanes, bias, block, following, leaves_early, table, worst, item_deficits, scratch, passing):
    _sum_by_permute(lanes, block, following, leaves_early, scratch, item_deficits, passing)


def _survivors_by_shuffle(lanes, bias, block, following, leaves_early, table, worst, item_deficits, scratch, passing):
    _sum_by_shuffle(lanes, block, following, leaves_early, scratch, item_deficits, passing)


def _survivors_by_table(lanes, bias, block, following, leaves_early, table, worst, item_deficits, scratch, passing):
    _sum_by_table(lanes, block, following, leaves_early, scratch, item_deficits, passing)


@intrinsic
def _lowest_bit(typing_context, word):
    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), True))

    return types.int64(word), generate


@intrinsic
def _sum_by_permute(typing_context, lanes, block, following, leaves_early, deficits, item_deficits, passing):
    """Find the items of a block that do not saturate: codes (rows, 256), deficits (rows, 256) -> four words."""
    vector = ir.VectorType(ir.IntType(8), 64)

    def look_up(builder, deficits, codes):
        permute = _declare(builder, "llvm.x86.avx512.vpermi2var.qi.512", vector, 3)
        tables = [_load(builder, deficits, 64 * part, vector) for part in range(4)]
        for one in codes:
            low, high = (builder.call(permute, [tables[half], one, tables[half + 1]]) for half in (0, 2))
            yield builder.select(builder.icmp_signed("<", one, vector(None)), high, low)

    args = lanes, types.intp, types.intp, types.boolean, deficits, item_deficits, passing
    return types.none(*args), _saturating_sum(look_up, vector, at_once=4)


@intrinsic
def _sum_by_shuffle(typing_context, lanes, block, following, leaves_early, deficits, item_deficits, passing):
    """Find the same items with deficits (rows, 16, 16) by the high and low half of the code."""
    vector, half = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(8), 16)

    def look_up(builder, deficits, codes):
        shuffle = _declare(builder, "llvm.x86.avx2.pshuf.b", vector, 2)
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

    args = lanes, types.intp, types.intp, types.boolean, deficits, item_deficits, passing
    return types.none(*args), _saturating_sum(look_up, vector, at_once=2)


@intrinsic
def _sum_by_table(typing_context, lanes, block, following, leaves_early, deficits, item_deficits, passing):
    """Find the same items with deficits (rows, 4, 4, 16): four tables of 64 entries, each in four registers."""
    vector = ir.VectorType(ir.IntType(8), 16)

    def look_up(builder, deficits, codes):
        table = _declare(builder, "llvm.aarch64.neon.tbl4.v16i8", vector, 5)  # 0 for codes that are not in the table
        registers = [_load(builder, deficits, 16 * part, vector) for part in range(16)]
        for one in codes:
            places = (builder.xor(one, ir.Constant(vector, [first] * 16)) for first in (0, 64, 128, 192))
            losses = [
                builder.call(table, [*registers[part : part + 4], place])
                for part, place in zip(range(0, 16, 4), places, strict=True)
            ]
            yield reduce(builder.or_, losses)

    args = lanes, types.intp, types.intp, types.boolean, deficits, item_deficits, passing
    return types.none(*args), _saturating_sum(look_up, vector, at_once=4)


def _saturating_sum(look_up, vector, at_once):
    """Return a code generator that adds deficits with saturation, for several vectors of items at once."""

    def generate(context, builder, signature, args):
        lanes, deficits, own, passing = (
            context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 4, 5, 6)
        )
        rows = builder.extract_value(lanes.shape, 1)
        block_size = builder.mul(rows, rows.type(BLOCK))
        codes = builder.gep(lanes.data, [builder.mul(args[1], block_size)])
        following = builder.gep(lanes.data, [builder.mul(args[2], block_size)])
        deficits = deficits.data
        add = _declare(builder, f"llvm.uadd.sat.v{vector.count}i8", vector, 2)
        full, bits = ir.Constant(vector, [255] * vector.count), ir.IntType(vector.count)
        masks = []
        for begin in range(0, BLOCK, at_once * vector.count):
            first = [_load(builder, own.data, begin + place * vector.count, vector) for place in range(at_once)]
            sums = [cgutils.alloca_once_value(builder, one) for one in first]

            def add_rows(leaves_early, sums=sums, begin=begin):
                with cgutils.for_range(builder, rows) as loop:
                    row = builder.mul(loop.index, loop.index.type(BLOCK))
                    columns, table, prefetched = (builder.gep(part, [row]) for part in (codes, deficits, following))
                    for line in range(0, at_once * vector.count, 64):
                        _prefetch(builder, prefetched, begin + line)
                    loaded = [_load(builder, columns, begin + place * vector.count, vector) for place in range(at_once)]
                    least = full
                    for total, loss in zip(sums, look_up(builder, table, loaded), strict=True):
                        added = builder.call(add, [builder.load(total), loss])
                        builder.store(added, total)
                        least = builder.and_(least, added)
                    if leaves_early:
                        left = builder.bitcast(builder.icmp_unsigned("!=", least, full), bits)
                        with builder.if_then(builder.icmp_unsigned("==", left, bits(0))):
                            loop.do_break()

            with builder.if_else(args[3]) as (early, late):
                with early:
                    add_rows(True)
                with late:
                    add_rows(False)
            masks += [builder.icmp_unsigned("!=", builder.load(total), full) for total in sums]
        for place, word in enumerate(_pack_masks(builder, masks, vector.count)):
            builder.store(word, builder.gep(passing.data, [ir.IntType(64)(place)]))
        return context.get_dummy_value()

    return generate


def _pack_masks(builder, masks, count):
    """Pack masks of `count` items each into words of 64 bits."""
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


def _declare(builder, name, vector, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * arguments), name)


def _load(builder, pointer, offset, vector):
    place = builder.gep(pointer, [ir.IntType(64)(offset)])
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=1)


def _prefetch(builder, pointer, offset):
    number = ir.IntType(32)
    kinds = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kinds, "llvm.prefetch.p0i8")
    builder.call(function, [builder.gep(pointer, [ir.IntType(64)(offset)]), number(0), number(3), number(1)])
