"""The compiled half of ``model.inference.step``: numba compiles it where it runs, so that no other compiler is needed.

All of it is in one file, as numba compiles a function again only when the function's own file changes. Small functions
take an array and a place in it instead of a slice: passing a slice counts references, which costs more than summing it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

LANES = 16  # float32 numbers per operation: one register of AVX-512, two of AVX2, four of NEON
_, _, _features = cpu_target.target_context.codegen().magic_tuple()  # of the CPU that numba compiles for
# Outputs of a matrix that lie together, and users that are multiplied with them at once: registers hold their sums.
PANEL, TILE = (4 * LANES, 4) if "+avx512f" in _features.split(",") else (2 * LANES, 3)
ROWS_PER_CHUNK = 128  # rows of a panel that stay in the first-level cache while user after user is multiplied with them
PREFETCH_WORDS = 4096 // 4  # of the tape, prefetched for a single user's product
PREFETCH_ROWS = 16  # prefetched if some rows are skipped
USERS_PER_CHUNK = 64  # users whose intermediate vectors stay in the second-level cache

SMALLEST_MASS = np.float32(1e-30)
SMALLEST_SHARE = np.float32(1e-9)  # of a row: smaller shares do not change a query, and their codewords are not read
EPSILON = np.float32(1e-5)  # of a layer norm
ABSENT_LOGIT = np.float32(-1e9)  # of a recent item that does not exist
EMPTY_BIN_LOGIT = np.float32(-np.inf)  # of an empty bin
ONE, HALF = np.float32(1), np.float32(0.5)
LN_2 = np.float32(np.log(2))

DONE, EMPTY_ROW, UNKNOWN_ITEM = 0, 1, 2

# Sums may be computed in any order, to allow vectorisation; nothing is assumed about NaN and infinity.
ANY_ORDER = {"contract", "reassoc", "nsz"}


class Sizes(NamedTuple):
    """The sizes of a model, passed as an array because that takes 0.3 µs instead of 1.7."""

    items: int  # N
    rates: int  # R
    books: int  # B
    words: int  # W
    last_books: int  # B'
    last_words: int  # W'
    width: int  # D
    inner: int  # of a feed-forward
    hops: int
    heads: int
    places: int  # K


def _any_array(number: types.Type, dimensions: int) -> types.Array:
    """Return the type of any array of this layout, including read-only and unaligned parts of messages."""
    return types.Array(number, dimensions, "C", readonly=True, aligned=False)


STEP_SIGNATURE = types.int64(
    _any_array(types.int64, 1),
    _any_array(types.float32, 1),
    _any_array(types.uint8, 1),
    _any_array(types.uint8, 1),
    _any_array(types.float32, 4),
    _any_array(types.int64, 1),
    _any_array(types.int64, 2),
    types.Array(types.float32, 2, "C"),
)


@numba.njit(cache=True, nogil=True)
def step(sizes, tape, codes, last_codes, bins, last, recent, queries):
    """Turn Q states into queries, as ``LisaMini.read`` does. It is compiled only for ``STEP_SIGNATURE``.

    sizes       (11,)         int64, in the order of ``Sizes``
    tape        float32, the tables and matrices of the model, in the order of ``model.inference.step``
    codes       (N * B,)      uint8, the history codes of each item
    last_codes  (N * B',)     uint8, the target codes of each item
    bins        (Q, R, B, W)  float32
    last        (Q,)          int64
    recent      (Q, K)        int64
    queries     (Q, D)        float32, written
    returns     DONE, EMPTY_ROW or UNKNOWN_ITEM
    """
    items, rates, books, words, last_books, last_words = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    width, inner, hops, heads, places = sizes[6], sizes[7], sizes[8], sizes[9], sizes[10]
    for q in range(len(last)):
        if not 0 <= last[q] < items:
            return UNKNOWN_ITEM
        for place in range(places if heads else 0):
            if recent[q, place] >= items:
                return UNKNOWN_ITEM
    rows = rates * books
    cells, histories, out = rows * words, bins.reshape(-1), queries.reshape(-1)
    codebooks = cells * words
    last_codebooks = codebooks + books * words * width
    recent_codebooks = last_codebooks + last_books * last_words * width
    matrices = recent_codebooks + (last_books * last_words * width if heads else 0)
    hidden_stride, wide_stride = _padded(width), _padded(max(cells, inner, heads * width))
    at_once = min(len(last), USERS_PER_CHUNK)
    hidden, normal = np.empty(at_once * hidden_stride, np.float32), np.empty(at_once * hidden_stride, np.float32)
    wide = np.empty(at_once * wide_stride, np.float32)
    chosen = np.empty(cells + PREFETCH_ROWS, np.int64)
    memory = np.empty((places if heads else 0) * (width + 1), np.float32)
    for begin in range(0, len(last), USERS_PER_CHUNK):
        users = min(USERS_PER_CHUNK, len(last) - begin)
        hidden[:] = 0
        for q in range(users):
            item, vector, history = last[begin + q], q * hidden_stride, (begin + q) * cells
            code, last_code = item * books, item * last_books
            _add_codewords(tape, codebooks, words, width, codes, code, books, hidden, vector)
            _add_codewords(tape, last_codebooks, last_words, width, last_codes, last_code, last_books, hidden, vector)
            if not _attention_by_codes(
                tape, codes, code, rates, books, words, histories, history, wide, q * wide_stride
            ):
                return EMPTY_ROW
        at = _add_table(users, wide, wide_stride, cells, tape, _padded(matrices), hidden, hidden_stride, width, chosen)
        at = _feed_forward(users, width, inner, tape, at, hidden, normal, hidden_stride, wide, wide_stride)
        for _ in range(hops):
            _normalise_each(users, hidden, hidden_stride, width, normal)
            at = _product(users, normal, hidden_stride, width, tape, at, wide, wide_stride, cells)
            for q in range(users):
                _attention_by_logits(rows, words, histories, (begin + q) * cells, wide, q * wide_stride)
            at = _add_values(users, wide, wide_stride, cells, tape, at, hidden, hidden_stride, width, chosen)
            at = _feed_forward(users, width, inner, tape, at, hidden, normal, hidden_stride, wide, wide_stride)
        if heads:
            _normalise_each(users, hidden, hidden_stride, width, normal)
            at = _product(users, normal, hidden_stride, width, tape, at, wide, wide_stride, heads * width)
            for q in range(users):
                _scale(wide, q * wide_stride, heads * width, ONE / np.sqrt(np.float32(width)))
                window = recent[begin + q]
                memory[: places * width] = 0
                for place in range(places):
                    code, vector = max(window[place], 0) * last_books, place * width
                    _add_codewords(
                        tape, recent_codebooks, last_words, width, last_codes, code, last_books, memory, vector
                    )
                    _write_recent_memory(place, width, tape, at, memory)
                _attend_to_recent(window, width, heads, tape, at + (1 + places) * width, memory, wide, q * wide_stride)
            at += (1 + places) * width + heads * places
            at = _add_bias(users, tape, at, hidden, hidden_stride, width)
            at = _add_product(users, wide, wide_stride, heads * width, tape, at, hidden, hidden_stride, width)
            at = _feed_forward(users, width, inner, tape, at, hidden, normal, hidden_stride, wide, wide_stride)
        _normalise_each(users, hidden, hidden_stride, width, normal)
        for q in range(users):
            _multiply(normal, q * hidden_stride, tape, at, out, (begin + q) * width, width)
            _add_row(tape, at + width, out, (begin + q) * width, width)
    return DONE


QUERY_PRODUCTS_SIGNATURE = types.void(
    _any_array(types.float32, 1),
    _any_array(types.int32, 2),
    _any_array(types.float32, 2),
    _any_array(types.float32, 1),
    _any_array(types.float32, 2),
    _any_array(types.int64, 2),
    _any_array(types.int32, 2),
    types.Array(types.float32, 2, "C"),
    types.Array(types.int64, 2, "C"),
    types.Array(types.float32, 2, "C"),
)


@numba.njit(cache=True, nogil=True)
def query_products(codebooks, followers, lift, decay, queries, recent, left_out, products, lifted, gains):
    """Multiply Q queries with the target codewords, and look up followers. It is compiled only for its signature.

    Items that are left out come after the followers, with a gain of minus infinity.

    codebooks  float32, the target codewords as the columns of a matrix (D, B' * W'), panel by panel
    followers  (N, K)  int32
    lift       (N, K)  float32
    decay      (n,)    float32, the weight of the followers of each of the newest items
    queries    (Q, D)  float32
    recent     (Q, K)  int64, rows, newest first, -1 for none
    left_out   (Q, m)  int32, rows, -1 for none
    products   (Q, padded B' * W')  float32, zeros, written
    lifted     (Q, n * K + m)  int64, written
    gains      (Q, n * K + m)  float32, written
    """
    users, width = queries.shape
    outputs = products.shape[1]
    _add_full_product(users, queries.reshape(-1), width, width, codebooks, 0, products.reshape(-1), outputs, outputs)
    each = followers.shape[1]
    for q in range(users):
        for place in range(len(decay)):
            item, begin = recent[q, place], place * each
            for nth in range(each):
                if 0 <= item < len(followers):
                    lifted[q, begin + nth] = max(followers[item, nth], 0)
                    gains[q, begin + nth] = lift[item, nth] * decay[place]
                else:
                    lifted[q, begin + nth], gains[q, begin + nth] = 0, 0
        begin = len(decay) * each
        lifted[q, begin:] = left_out[q]
        gains[q, begin:] = -np.inf


# The parts of the model.


@numba.njit(nogil=True)
def _add_codewords(tape, codebooks, words, width, codes, code, books, out, begin):
    """Add an item's codeword of each codebook to a vector."""
    total, fours = out[begin : begin + width], books // 4 * 4
    for book in range(0, fours, 4):  # four at once, because each pass reads and writes the sum
        one = codebooks + (words * book + np.int64(codes[code + book])) * width
        two = codebooks + (words * (book + 1) + np.int64(codes[code + book + 1])) * width
        three = codebooks + (words * (book + 2) + np.int64(codes[code + book + 2])) * width
        four = codebooks + (words * (book + 3) + np.int64(codes[code + book + 3])) * width
        first, second = tape[one : one + width], tape[two : two + width]
        third, fourth = tape[three : three + width], tape[four : four + width]
        for j in range(width):
            total[j] += (first[j] + second[j]) + (third[j] + fourth[j])
    for book in range(fours, books):
        _add_row(tape, codebooks + (words * book + np.int64(codes[code + book])) * width, out, begin, width)


@numba.njit(nogil=True, error_model="numpy")
def _attention_by_codes(match, codes, code, rates, books, words, bins, history, shares, mass):
    """Attend to the histogram by the last item's codes; return False if a row of the histogram is empty."""
    for row in range(rates * books):
        codeword = (row * words + np.int64(codes[code + row % books])) * words
        _multiply(bins, history, match, codeword, shares, mass, words)
        total = _sum(shares, mass, words)
        if not (total > 0 or _sum(bins, history, words) > 0):
            return False
        _scale_shares(shares, mass, words, ONE / max(total, SMALLEST_MASS))
        history += words
        mass += words
    return True


@numba.njit(nogil=True, error_model="numpy")
def _attention_by_logits(rows, words, bins, history, logits, begin):
    """Turn the logits of a hop into shares: exp(logit) * bin, divided by the sum over its row.

    A bin is split into its mantissa and a power of two, which is added to the exponent, so that no row scale overflows.
    """
    cells = rows * words
    _add_exponents(bins, history, logits, begin, cells)
    for row in range(begin, begin + cells, words):
        _add_number(logits, row, words, -_maximum(logits, row, words))
    _exp_times_mantissas(bins, history, logits, begin, cells)
    for row in range(begin, begin + cells, words):
        _scale_shares(logits, row, words, ONE / _sum(logits, row, words))


@numba.njit(nogil=True)
def _add_exponents(bins, history, logits, begin, cells):
    mass, logit = bins[history : history + cells], logits[begin : begin + cells]
    for cell in range(cells):
        raised = logit[cell] + LN_2 * _exponent(mass[cell])
        logit[cell] = raised if mass[cell] > 0 else EMPTY_BIN_LOGIT


@numba.njit(nogil=True, fastmath=ANY_ORDER)
def _exp_times_mantissas(bins, history, logits, begin, cells):
    mass, logit = bins[history : history + cells], logits[begin : begin + cells]
    for cell in range(cells):
        found = _exp(logit[cell]) * _mantissa(mass[cell])
        logit[cell] = found if mass[cell] > 0 else np.float32(0)


@numba.njit(nogil=True)
def _feed_forward(users, width, inner, tape, at, hidden, normal, hidden_stride, wide, wide_stride):
    """Add a feed-forward block's output to the hidden vectors; return the next position on the tape."""
    _normalise_each(users, hidden, hidden_stride, width, normal)
    at = _product(users, normal, hidden_stride, width, tape, at, wide, wide_stride, inner)
    for q in range(users):
        _gelu(wide, q * wide_stride, inner)
    at = _add_bias(users, tape, at, hidden, hidden_stride, width)
    return _add_product(users, wide, wide_stride, inner, tape, at, hidden, hidden_stride, width)


@numba.njit(nogil=True)
def _write_recent_memory(place, width, tape, at, memory):
    """Write a row of the heads' memory: a recent item's normalised vector, with gain, bias and position."""
    begin = place * width
    _normalise(memory, begin, width, memory, begin)
    _multiply(memory, begin, tape, at, memory, begin, width)
    _add_row(tape, at + width + begin, memory, begin, width)


@numba.njit(nogil=True, error_model="numpy")
def _attend_to_recent(recent, width, heads, tape, age_bias, memory, queries, query):
    """Attend by softmax; each head's query is replaced with its output."""
    places = len(recent)
    logits = places * width  # stored after the vectors
    for _ in range(heads):
        for place in range(places):
            logit = _dot(queries, query, memory, place * width, width) + tape[age_bias + place]
            memory[logits + place] = logit if recent[place] >= 0 else ABSENT_LOGIT
        _add_number(memory, logits, places, -_maximum(memory, logits, places))
        _exp_each(memory, logits, places)
        _scale(memory, logits, places, ONE / _sum(memory, logits, places))
        _scale(queries, query, width, np.float32(0))
        for place in range(places):
            _add_scaled(memory, place * width, memory[logits + place], queries, query, width)
        query += width
        age_bias += places


# Rows of numbers.


@numba.njit(nogil=True)
def _normalise_each(users, rows, stride, width, out):
    """Apply a layer norm without gain and bias, which are folded into the following matrix."""
    for q in range(users):
        _normalise(rows, q * stride, width, out, q * stride)


@numba.njit(nogil=True, fastmath=ANY_ORDER, error_model="numpy")
def _normalise(rows, begin, width, out, out_begin):
    row, normal = rows[begin : begin + width], out[out_begin : out_begin + width]
    squares, count = np.float32(0), np.float32(width)
    mean = _sum(rows, begin, width) / count
    for j in range(width):
        squares += (row[j] - mean) * (row[j] - mean)
    scale = ONE / np.sqrt(squares / count + EPSILON)
    for j in range(width):
        normal[j] = (row[j] - mean) * scale


@numba.njit(nogil=True)
def _multiply(ones, begin, others, others_begin, out, out_begin, length):
    one, other = ones[begin : begin + length], others[others_begin : others_begin + length]
    product = out[out_begin : out_begin + length]
    for j in range(length):
        product[j] = one[j] * other[j]


@numba.njit(nogil=True)
def _copy(rows, begin, out, out_begin, length):
    row, copy = rows[begin : begin + length], out[out_begin : out_begin + length]
    for j in range(length):
        copy[j] = row[j]


@numba.njit(nogil=True)
def _add_row(rows, begin, out, out_begin, length):
    row, total = rows[begin : begin + length], out[out_begin : out_begin + length]
    for j in range(length):
        total[j] += row[j]


@numba.njit(nogil=True, fastmath=ANY_ORDER)
def _add_scaled(rows, begin, number, out, out_begin, length):
    row, total = rows[begin : begin + length], out[out_begin : out_begin + length]
    for j in range(length):
        total[j] += number * row[j]


@numba.njit(nogil=True)
def _add_number(rows, begin, length, number):
    row = rows[begin : begin + length]
    for j in range(length):
        row[j] += number


@numba.njit(nogil=True)
def _scale(rows, begin, length, number):
    row = rows[begin : begin + length]
    for j in range(length):
        row[j] *= number


@numba.njit(nogil=True)
def _scale_shares(rows, begin, length, number):
    row = rows[begin : begin + length]
    for j in range(length):
        share = row[j] * number
        row[j] = np.float32(0) if share < SMALLEST_SHARE else share  # keep NaN


@numba.njit(nogil=True, fastmath=ANY_ORDER)
def _sum(rows, begin, length):
    row, total = rows[begin : begin + length], np.float32(0)
    for j in range(length):
        total += row[j]
    return total


@numba.njit(nogil=True, fastmath=ANY_ORDER)
def _dot(ones, begin, others, others_begin, length):
    one, other = ones[begin : begin + length], others[others_begin : others_begin + length]
    total = np.float32(0)
    for j in range(length):
        total += one[j] * other[j]
    return total


@numba.njit(nogil=True, fastmath=ANY_ORDER | {"nnan"})
def _maximum(rows, begin, length):
    """Return the largest number; any number if one of them is NaN, because the result is then NaN."""
    row, peak = rows[begin : begin + length], rows[begin]
    for j in range(length):
        peak = max(peak, row[j])
    return peak


@numba.njit(nogil=True, fastmath=ANY_ORDER)
def _exp_each(rows, begin, length):
    row = rows[begin : begin + length]
    for j in range(length):
        row[j] = _exp(row[j])


@numba.njit(nogil=True, fastmath=ANY_ORDER)
def _exp(x):
    """Compute exp(x) for x <= 0, with a relative error of 3e-7 and a lower limit of exp(-87).

    It is 2**whole * exp(rest), with a Taylor series for exp(rest). ln 2 is split in two parts to avoid rounding errors.
    """
    x = np.float32(-87) if x < np.float32(-87) else x
    whole = np.floor(x * np.float32(1 / np.log(2)) + HALF)
    rest = (x - whole * np.float32(0.693359375)) + whole * np.float32(0.693359375 - np.log(2))
    found = np.float32(1 / 5040) * rest + np.float32(1 / 720)
    found = found * rest + np.float32(1 / 120)
    found = found * rest + np.float32(1 / 24)
    found = found * rest + np.float32(1 / 6)
    found = found * rest + HALF
    found = found * rest + ONE
    found = found * rest + ONE
    return _times_power_of_two(found, whole)


@numba.njit(nogil=True, fastmath=ANY_ORDER, error_model="numpy")
def _gelu(rows, begin, length):
    """Compute x * (1 + erf(x / sqrt 2)) / 2, in place.

    Source: erf to 3e-7 as x times a ratio of two polynomials in its square, as in Eigen (generic_fast_erf_float).
    """
    row = rows[begin : begin + length]
    for j in range(length):
        x = row[j] * np.float32(np.sqrt(0.5))
        x = np.float32(-4) if x < -4 else x
        x = np.float32(4) if x > 4 else x
        square = x * x
        above = np.float32(-2.72614225801306e-10) * square + np.float32(2.77068142495902e-08)
        above = above * square + np.float32(-2.10102402082508e-06)
        above = above * square + np.float32(-5.69250639462346e-05)
        above = above * square + np.float32(-7.34990630326855e-04)
        above = above * square + np.float32(-2.95459980854025e-03)
        above = above * square + np.float32(-1.60960333262415e-02)
        below = np.float32(-1.45660718464996e-05) * square + np.float32(-2.13374055278905e-04)
        below = below * square + np.float32(-1.68282697438203e-03)
        below = below * square + np.float32(-7.37332916720468e-03)
        below = below * square + np.float32(-1.42647390514189e-02)
        row[j] = HALF * row[j] * (ONE + x * above / below)


# Products with matrices.


@numba.njit(nogil=True)
def _padded(outputs):
    """Round up to whole panels."""
    return (outputs + PANEL - 1) // PANEL * PANEL


@numba.njit(nogil=True)
def _product(users, rows, stride, inputs, tape, at, out, out_stride, outputs):
    """Compute out = bias + rows @ matrix."""
    for q in range(users):
        _copy(tape, at, out, q * out_stride, _padded(outputs))
    at += _padded(outputs)
    return _add_product(users, rows, stride, inputs, tape, at, out, out_stride, outputs)


@numba.njit(nogil=True)
def _add_bias(users, tape, at, out, stride, outputs):
    for q in range(users):
        _add_row(tape, at, out, q * stride, _padded(outputs))
    return at + _padded(outputs)


def _products(numbers):
    """Build the products with matrices that store this many numbers per word of the tape, as in ``_multiply_add``."""
    row_words = PANEL // numbers

    @intrinsic
    def add_tile(typing_context, rows, rows_at, stride, tape, at, part, out, out_at, out_stride):
        return _signature(rows, tape, out), _multiply_add(TILE, 0, numbers)

    @intrinsic
    def add_one(typing_context, rows, rows_at, stride, tape, at, part, out, out_at, out_stride):
        return _signature(rows, tape, out), _multiply_add(1, PREFETCH_WORDS, numbers)

    @intrinsic
    def add_chosen(typing_context, shares, chosen, tape, at, count, out, out_at):
        number = types.int64
        signature = types.void(shares, chosen, tape, number, number, out, number)
        return signature, _multiply_add(1, 0, numbers, PREFETCH_ROWS)

    @numba.njit(nogil=True)
    def add_product(users, rows, stride, inputs, tape, at, out, out_stride, outputs):
        """Compute out += rows @ matrix, in the same order for one user as for several."""
        tiles, chunk = users // TILE * TILE, inputs if users == 1 else ROWS_PER_CHUNK
        for panel in range(0, outputs, PANEL):
            for begin in range(0, inputs, chunk):
                part = min(chunk, inputs - begin)
                for q in range(0, tiles, TILE):
                    add_tile(rows, q * stride + begin, stride, tape, at, part, out, q * out_stride + panel, out_stride)
                for q in range(tiles, users):
                    add_one(rows, q * stride + begin, stride, tape, at, part, out, q * out_stride + panel, out_stride)
                at += part * row_words
        return at

    @numba.njit(nogil=True)
    def add_values(users, shares, stride, cells, tape, at, out, out_stride, width, chosen):
        """Compute out += shares @ values. For a single user, skip reading values without a share."""
        if users > 1:
            return add_product(users, shares, stride, cells, tape, at, out, out_stride, width)
        count = 0
        for cell in range(cells):
            chosen[count] = cell
            count += shares[cell] != 0
        chosen[count : count + PREFETCH_ROWS] = 0 if count == 0 else chosen[count - 1]
        for panel in range(0, width, PANEL):
            if count:
                add_chosen(shares, chosen, tape, at, count, out, panel)
            at += cells * row_words
        return at

    return add_product, add_values


def _multiply_add(users, ahead, numbers, further=0):
    """Return a code generator that adds the product of users' rows of ``part`` numbers with one panel to their sums.

    A word of the tape contains ``numbers`` numbers: a float32, or the upper halves of two, the first of which belongs
    to the panel's first half. With ``further``, only chosen rows of the panel are read, and this many are prefetched.
    """
    lanes, index, bit32 = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64), ir.IntType(32)
    undefined, parts = ir.Constant(lanes, ir.Undefined), range(PANEL // LANES)
    bits, row_words = ir.VectorType(bit32, LANES), PANEL // numbers
    upper, half = (ir.Constant(bits, [constant] * LANES) for constant in (0xFFFF0000, 16))

    def generate(context, builder, signature, args):
        if further:
            _, _, _, at, part, _, out_at = args
            rows_at = stride = out_stride = index(0)
        else:
            _, rows_at, stride, _, at, part, _, out_at, out_stride = args
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args, args, strict=True)
            if isinstance(kind, types.Array)
        ]
        rows, tape, out = arrays[0], arrays[-2], arrays[-1]

        def starts(array, first, step):
            return [
                builder.gep(array.data, [builder.add(first, builder.mul(step, index(user)))]) for user in range(users)
            ]

        def lanes_behind(start, place):
            return builder.bitcast(builder.gep(start, [place]), lanes.as_pointer())

        def in_all_lanes(number):
            one = builder.insert_element(undefined, number, bit32(0))
            return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(bit32, LANES), None))

        inputs, matrix = starts(rows, rows_at, stride), builder.gep(tape.data, [at])
        outs = starts(out, out_at, out_stride)
        sums_at = [lanes_behind(start, index(LANES * each)) for start in outs for each in parts]
        sums = [builder.load(place, align=4) for place in sums_at]
        before, loop, after = builder.block, *(builder.append_basic_block(name) for name in ("loop", "after"))
        builder.branch(loop)

        builder.position_at_end(loop)
        turn, running = builder.phi(index), [builder.phi(lanes) for _ in sums]

        def chosen(place):
            return builder.load(builder.gep(arrays[1].data, [place])) if further else place

        row = chosen(turn)
        row_at = builder.mul(row, index(row_words))
        reads = range(row_words // LANES)
        words = [
            builder.load(lanes_behind(matrix, builder.add(row_at, index(LANES * each))), align=4) for each in reads
        ]
        if numbers == 2:
            halves = [builder.bitcast(word, bits) for word in words]
            first = [builder.bitcast(builder.shl(both, half), lanes) for both in halves]
            words = first + [builder.bitcast(builder.and_(both, upper), lanes) for both in halves]
        if ahead or further:
            later = builder.mul(chosen(builder.add(turn, index(further))), index(row_words)) if further else row_at
            for each in reads:
                _prefetch(builder, builder.gep(matrix, [builder.add(later, index(ahead + LANES * each))]))
        added = []
        for user, start in enumerate(inputs):
            number = in_all_lanes(builder.load(builder.gep(start, [row])))
            for each, word in enumerate(words):
                product = builder.fmul(number, word, flags=("contract",))
                added.append(builder.fadd(running[user * len(parts) + each], product, flags=("contract",)))
        following = builder.add(turn, index(1))
        for phi, first, next_one in zip([turn, *running], [index(0), *sums], [following, *added], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(next_one, loop)
        builder.cbranch(builder.icmp_signed("<", following, part), loop, after)

        builder.position_at_end(after)
        for place, total in zip(sums_at, added, strict=True):
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    return generate


def _prefetch(builder, address):
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(address, byte), number(0), number(3), number(1)])  # to read, to keep, data


def _signature(rows, tape, out):
    number = types.int64
    return types.void(rows, number, number, tape, number, number, out, number, number)


_add_product, _add_values = _products(numbers=2)
_add_full_product, _add_table = _products(numbers=1)


# The bits of a float32: sign, 8 bits of exponent + 127, 23 bits of mantissa below the leading one.

_BITS = ir.IntType(32)


@intrinsic
def _exponent(typing_context, x):
    def generate(context, builder, signature, args):
        bits = builder.lshr(builder.bitcast(args[0], _BITS), _BITS(23))
        return builder.sitofp(builder.sub(bits, _BITS(127)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def _mantissa(typing_context, x):
    def generate(context, builder, signature, args):
        bits = builder.and_(builder.bitcast(args[0], _BITS), _BITS(0x7FFFFF))
        return builder.bitcast(builder.or_(bits, _BITS(0x3F800000)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def _times_power_of_two(typing_context, x, power):
    def generate(context, builder, signature, args):
        exponent = builder.add(builder.fptosi(args[1], _BITS), _BITS(127))
        scale = builder.bitcast(builder.shl(exponent, _BITS(23)), ir.FloatType())
        return builder.fmul(args[0], scale)

    return types.float32(types.float32, types.float32), generate
