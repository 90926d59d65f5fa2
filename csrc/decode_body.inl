// The loops of the decode kernel, written over the lanes that SIMD_FILE defines; included once per instruction set.
// See decode.cpp for the plan. Nothing here may read beyond a view's width in a row, or beyond the last key.

#include SIMD_FILE

INLINE vf exp2_polynomial(vf x) {  // 2^x on [-1/2, 1/2], relative error 7.5e-8 (Remez)
    vf y = fma(set1(1.327647199e-03f), x, set1(9.675541334e-03f));
    y = fma(y, x, set1(5.550713273e-02f));
    y = fma(y, x, set1(2.402211972e-01f));
    y = fma(y, x, set1(6.931469671e-01f));
    return fma(y, x, set1(1.000000072e+00f));
}

// How a row of E comes in: `G` vectors a time. Where G is 2 they hold even and odd elements; queries and sums are then
// kept in that order too (`place_of`).
template <class E>
struct Lanes {
    static constexpr int G = 1, STEP = N;
    static INLINE_MEMBER void full(const E* p, vf* x) { x[0] = load(p); }
    static INLINE_MEMBER void part(const E* p, int n, vf* x) { x[0] = load_part(p, n); }
};
template <>
struct Lanes<bf16> {
    static constexpr int G = 2, STEP = 2 * N;
    static INLINE_MEMBER void full(const bf16* p, vf* x) { load_pairs(p, x); }
    static INLINE_MEMBER void part(const bf16* p, int n, vf* x) { load_pairs_part(p, n, x); }
};

// ---- scores ----------------------------------------------------------------------------------------------------------

// A tile is read twice, to score and to sum, and memory would idle the second time. So while a tile is worked on the next
// one is fetched, from its first byte to its last: the first half while scoring, the second while summing. And what lies
// FAR behind it is called into the second-level cache, which has more requests to memory under way than the first.
constexpr int64_t LINE = 64, FAR = 32 << 10;

struct Ahead {
    const char* next;  // the (half) tile to fetch
    int64_t far;       // about FAR, or 0 where that would lie beyond what will be read
};

// What falls to bytes [from, from + BYTES) of a tile, when each pass fetches half as many bytes as it reads.
template <int64_t BYTES>
INLINE void fetch_half(const Ahead& ahead, int64_t from) {
    if constexpr (BYTES >= 2 * LINE) {
        UNROLL for (int64_t at = 0; at < BYTES / 2; at += LINE) {
            fetch(ahead.next, from / 2 + at);
            fetch_far(ahead.next, from / 2 + at + ahead.far);
        }
    } else if (from % (2 * LINE) == 0) {
        fetch(ahead.next, from / 2);
        fetch_far(ahead.next, from / 2 + ahead.far);
    }
}

// q . k over one row. STEPS > 0: the width is exactly that many steps, known to the compiler.
template <class E, int STEPS>
INLINE vf dot(const E* k, const float* q, int64_t width, const Ahead& ahead, int64_t from) {
    using L = Lanes<E>;
    vf x[L::G], sum = zero();
    if constexpr (STEPS > 0) {
        fetch_half<STEPS * L::STEP * static_cast<int64_t>(sizeof(E))>(ahead, from);
        UNROLL for (int i = 0; i < STEPS; ++i) {
            L::full(k + i * L::STEP, x);
            UNROLL for (int g = 0; g < L::G; ++g) sum = fma(x[g], load(q + i * L::STEP + g * N), sum);
        }
        return sum;
    }
    constexpr int PAIR = 2 * L::STEP;
    vf other = zero();
    int64_t i = 0;
    for (; i + PAIR <= width; i += PAIR) {
        fetch_half<PAIR * static_cast<int64_t>(sizeof(E))>(ahead, from + i * static_cast<int64_t>(sizeof(E)));
        L::full(k + i, x);
        UNROLL for (int g = 0; g < L::G; ++g) sum = fma(x[g], load(q + i + g * N), sum);
        L::full(k + i + L::STEP, x);
        UNROLL for (int g = 0; g < L::G; ++g) other = fma(x[g], load(q + i + L::STEP + g * N), other);
    }
    if (i + L::STEP <= width) {
        L::full(k + i, x);
        UNROLL for (int g = 0; g < L::G; ++g) sum = fma(x[g], load(q + i + g * N), sum);
        i += L::STEP;
    }
    if (i < width) {
        L::part(k + i, static_cast<int>(width - i), x);
        UNROLL for (int g = 0; g < L::G; ++g) other = fma(x[g], load(q + i + g * N), other);
    }
    return add(sum, other);
}

struct ScoreJob {
    const void* keys;
    int64_t stride, n, width;
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    Ahead ahead;
};

// One query row against N keys from key j on. STEPS as in `dot`.
template <class E, int STEPS>
INLINE void score_one(const ScoreJob& job, int64_t row, int64_t j) {
    const E* k = static_cast<const E*>(job.keys) + j * job.stride;
    const float* q = job.q + row * job.q_stride;
    const int64_t left = job.n - j;
    vf sums[N];
    if (left >= N) {
        constexpr int64_t ROW = STEPS * Lanes<E>::STEP * static_cast<int64_t>(sizeof(E));
        const int64_t row_bytes = STEPS ? ROW : job.width * static_cast<int64_t>(sizeof(E));
        const Ahead ahead{job.ahead.next + j * row_bytes / 2, job.ahead.far};
        if constexpr (STEPS > 0) {
            UNROLL for (int i = 0; i < N; ++i)
                sums[i] = dot<E, STEPS>(k + i * job.stride, q, job.width, ahead, i * row_bytes);
        } else {
            for (int i = 0; i < N; ++i)
                sums[i] = dot<E, STEPS>(k + i * job.stride, q, job.width, ahead, i * row_bytes);
        }
    } else {
        for (int i = 0; i < N; ++i) sums[i] = zero();
        for (int64_t i = 0; i < left; ++i) sums[i] = dot<E, STEPS>(k + i * job.stride, q, job.width, job.ahead, 0);
    }
    store(job.out + row * job.out_stride + j, reduce(sums));
}

// R query rows against N / R keys from key j on, so that a loaded key serves R rows.
template <class E, int R>
INLINE void score_block(const ScoreJob& job, int64_t row, int64_t j) {
    using L = Lanes<E>;
    constexpr int K = N / R;
    const E* keys = static_cast<const E*>(job.keys);
    const float* q = job.q + row * job.q_stride;
    const E* k[K];
    UNROLL for (int i = 0; i < K; ++i) k[i] = keys + std::min<int64_t>(j + i, job.n - 1) * job.stride;
    vf sums[N];
    UNROLL for (int i = 0; i < N; ++i) sums[i] = zero();
    auto step = [&](int64_t d, auto&& read) __attribute__((always_inline)) {
        vf x[K][L::G];
        UNROLL for (int i = 0; i < K; ++i) read(k[i] + d, x[i]);
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int g = 0; g < L::G; ++g) {
                vf y = load(q + r * job.q_stride + d + g * N);
                UNROLL for (int i = 0; i < K; ++i) sums[r * K + i] = fma(x[i][g], y, sums[r * K + i]);
            }
    };
    int64_t d = 0;
    for (; d + L::STEP <= job.width; d += L::STEP)
        step(d, [](const E* p, vf* x) __attribute__((always_inline)) { L::full(p, x); });
    if (d < job.width) {
        const int rest = static_cast<int>(job.width - d);
        step(d, [rest](const E* p, vf* x) __attribute__((always_inline)) { L::part(p, rest, x); });
    }
    float s[N];
    store(s, reduce(sums));
    UNROLL for (int r = 0; r < R; ++r) std::memcpy(job.out + (row + r) * job.out_stride + j, s + r * K, K * sizeof(float));
}

template <class E, int STEPS>
static void score_single(const ScoreJob& job, int64_t row) {
    for (int64_t j = 0; j < job.n; j += N) score_one<E, STEPS>(job, row, j);
}

// An even number of rows, N keys at a time: these stay in the first-level cache for all rows.
template <class E>
static void score_many(const ScoreJob& job, int64_t rows) {
    const int64_t row_bytes = job.width * static_cast<int64_t>(sizeof(E));
    for (int64_t j = 0; j < job.n; j += N) {
        const int64_t end = std::min<int64_t>(j + N, job.n);
        int64_t row = 0, fetched = j * row_bytes;
        // arithmetic takes most of the time, and sums over many rows fetch nothing: so fetch the whole next tile here
        auto fetch_until = [&](int64_t key) __attribute__((always_inline)) {
            for (; fetched < key * row_bytes; fetched += LINE) fetch(job.ahead.next, fetched);
        };
        for (; row + ROW_BLOCK <= rows; row += ROW_BLOCK)
            for (int64_t i = j; i < end; i += N / ROW_BLOCK) {
                fetch_until(std::min<int64_t>(i + N / ROW_BLOCK, end));
                score_block<E, ROW_BLOCK>(job, row, i);
            }
        for (; row + 2 <= rows; row += 2)
            for (int64_t i = j; i < end; i += N / 2) {
                fetch_until(std::min<int64_t>(i + N / 2, end));
                score_block<E, 2>(job, row, i);
            }
    }
}

template <class E>
static void score(const ScoreJob& job, int64_t rows) {
    constexpr int STEP = Lanes<E>::STEP;
    if (rows > 1) score_many<E>(job, rows / 2 * 2);
    if (rows % 2 == 0) return;
    if (job.width == 32 && 32 % STEP == 0) return score_single<E, 32 / STEP>(job, rows - 1);
    if (job.width == 64 && 64 % STEP == 0) return score_single<E, 64 / STEP>(job, rows - 1);
    if (job.width == 128 && 128 % STEP == 0) return score_single<E, 128 / STEP>(job, rows - 1);
    score_single<E, 0>(job, rows - 1);
}

// ---- values ----------------------------------------------------------------------------------------------------------

struct ValueJob {
    const void* values;
    int64_t stride, n, width;
    const float* weights;  // a row of n per query row
    int64_t weights_stride;
    float* sums;
    int64_t sums_stride;
    const float* keep;  // what the sums so far are multiplied by, per query row
    Ahead ahead;
};

// Adds n values to C vectors of R rows from element `at` on; P partial sums each hide the latency of the additions.
template <class E, int R, int C, bool PART>
static void value_block(ValueJob& job, int64_t row, int64_t at) {
    using L = Lanes<E>;
    constexpr int P = R * C >= 8 ? 1 : R * C >= 4 ? 2 : 4;
    const E* v = static_cast<const E*>(job.values) + at;
    const float* w = job.weights + row * job.weights_stride;
    float* out = job.sums + row * job.sums_stride + at;
    const int rest = static_cast<int>(job.width - at);
    constexpr int64_t BYTES = C * N * static_cast<int64_t>(sizeof(E));
    const Ahead ahead{job.ahead.next + at * job.n * static_cast<int64_t>(sizeof(E)) / 2, job.ahead.far};
    vf sums[P][R][C];
    UNROLL for (int r = 0; r < R; ++r) {
        vf keep = set1(job.keep[row + r]);
        UNROLL for (int c = 0; c < C; ++c) {
            sums[0][r][c] = mul(keep, load(out + r * job.sums_stride + c * N));
            UNROLL for (int p = 1; p < P; ++p) sums[p][r][c] = zero();
        }
    }
    auto one = [&](int64_t j, vf(&into)[R][C]) __attribute__((always_inline)) {
        vf x[C];
        if constexpr (R == 1) fetch_half<BYTES>(ahead, j * BYTES);
        if constexpr (PART) {
            L::part(v + j * job.stride, rest, x);
        } else {
            UNROLL for (int c = 0; c < C; c += L::G) L::full(v + j * job.stride + c * N, x + c);
        }
        UNROLL for (int r = 0; r < R; ++r) {
            vf y = set1(w[r * job.weights_stride + j]);
            UNROLL for (int c = 0; c < C; ++c) into[r][c] = fma(x[c], y, into[r][c]);
        }
    };
    int64_t j = 0;
    for (; j + P <= job.n; j += P) {
        UNROLL for (int p = 0; p < P; ++p) one(j + p, sums[p]);
    }
    for (; j < job.n; ++j) one(j, sums[0]);
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int c = 0; c < C; ++c) {
            vf sum = sums[0][r][c];
            UNROLL for (int p = 1; p < P; ++p) sum = add(sum, sums[p][r][c]);
            store(out + r * job.sums_stride + c * N, sum);
        }
}

// C vectors of all rows: the tile's columns stay in the first-level cache for all of them.
template <class E, int C, bool PART>
static void value_columns(ValueJob& job, int64_t rows, int64_t at) {
    int64_t row = 0;
    if constexpr (C * ROW_BLOCK <= VALUE_VECTORS)
        for (; row + ROW_BLOCK <= rows; row += ROW_BLOCK) value_block<E, ROW_BLOCK, C, PART>(job, row, at);
    if constexpr (C * 2 <= VALUE_VECTORS)
        for (; row + 2 <= rows; row += 2) value_block<E, 2, C, PART>(job, row, at);
    for (; row < rows; ++row) value_block<E, 1, C, PART>(job, row, at);
}

template <class E>
static void sum_values(ValueJob& job, int64_t rows) {
    constexpr int G = Lanes<E>::G, MANY = VALUE_VECTORS / ROW_BLOCK;
    int64_t at = 0;
    if (rows == 1)
        for (; at + 8 * N <= job.width; at += 8 * N) value_columns<E, 8, false>(job, rows, at);
    if constexpr (MANY >= 4)
        for (; at + 4 * N <= job.width; at += 4 * N) value_columns<E, 4, false>(job, rows, at);
    for (; at + 2 * N <= job.width; at += 2 * N) value_columns<E, 2, false>(job, rows, at);
    if constexpr (G == 1)
        if (at + N <= job.width) value_columns<E, 1, false>(job, rows, at), at += N;
    if (at < job.width) value_columns<E, G, true>(job, rows, at);
}

// ---- what depends on the dtype of a stream ---------------------------------------------------------------------------

#include INT8_FILE

// Where element i of a query or a sum stands.
static int64_t place_of(int64_t dtype, int64_t i) {
    if (dtype == BF16) return i / (2 * N) * (2 * N) + i % 2 * N + i % (2 * N) / 2;
    return dtype == I8 ? int8_place(i) : i;
}

static bool in_order(int64_t dtype) { return dtype == F32 || dtype == F16; }  // place_of(dtype, i) == i

static int64_t up_to(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Floats that a query of this width takes, and a row of sums.
static int64_t query_floats(int64_t dtype, int64_t width) {
    return dtype == I8 ? int8_query_floats(width) : up_to(width, dtype == BF16 ? 2 * N : N);
}
static int64_t sum_floats(int64_t dtype, int64_t width) {
    return up_to(width, dtype == I8 ? INT8_STEP : dtype == BF16 ? 2 * N : N);
}

static void score_any(int64_t dtype, const ScoreJob& job, int64_t rows) {
    switch (dtype) {
        case F32: return score<float>(job, rows);
        case BF16: return score<bf16>(job, rows);
        case F16: return score<f16>(job, rows);
        default: return score_int8(job, rows);
    }
}

static void sum_any(int64_t dtype, ValueJob& job, int64_t rows, const float* scale, float* scratch,
                    int64_t scratch_stride) {
    switch (dtype) {
        case F32: return sum_values<float>(job, rows);
        case BF16: return sum_values<bf16>(job, rows);
        case F16: return sum_values<f16>(job, rows);
        default: return sum_int8(job, rows, scale, scratch, scratch_stride);
    }
}

// ---- rotation on read ------------------------------------------------------------------------------------------------

// Turns n keys into rows of term.padded floats. Interleaved pairs leave in half order; their queries are stored alike.
template <class E>
static void rotate(const Term& term, const E* keys, int64_t n, const int32_t* positions, const float* cos,
                   const float* sin, float* out) {
    const int64_t half = term.rotated / 2, width = term.keys.width;
    const float* gain = term.gain;
    for (int64_t j = 0; j < n; ++j, keys += term.keys.stride_t, out += term.padded) {
        int64_t row = term.rows ? std::clamp<int64_t>(positions[j], 0, term.rows - 1) : j;
        const float *c = cos + row * term.cos_row, *s = sin + row * term.cos_row;
        int64_t i = 0;
        for (; i + N <= half; i += N) {
            vf a, b, ga, gb;
            if (term.rotate == HALF) {
                a = load(keys + i), b = load(keys + half + i);
                if (gain) ga = load(gain + i), gb = load(gain + half + i);
            } else {
                a = load(keys + 2 * i), b = load(keys + 2 * i + N);
                deinterleave(a, b);
                if (gain) {
                    ga = load(gain + 2 * i), gb = load(gain + 2 * i + N);
                    deinterleave(ga, gb);
                }
            }
            if (gain) a = mul(a, ga), b = mul(b, gb);
            vf x = load(c + i), y = load(s + i);
            store(out + i, sub(mul(a, x), mul(b, y)));
            store(out + half + i, fma(b, x, mul(a, y)));
        }
        for (; i < half; ++i) {
            int64_t at = term.rotate == HALF ? i : 2 * i, to = term.rotate == HALF ? half + i : 2 * i + 1;
            float a = to_float(keys[at]) * (gain ? gain[at] : 1.f), b = to_float(keys[to]) * (gain ? gain[to] : 1.f);
            out[i] = a * c[i] - b * s[i];
            out[half + i] = b * c[i] + a * s[i];
        }
        for (i = term.rotated; i < width; ++i) out[i] = to_float(keys[i]) * (gain ? gain[i] : 1.f);
        for (; i < term.padded; ++i) out[i] = 0.f;
    }
}

static void rotate_any(const Term& term, int64_t b, int64_t g, int64_t t, int64_t n, const int32_t* positions,
                       float* out) {
    const char* keys = term.keys.at(b, g, t);
    int64_t first = b * term.cos_b + (term.rows ? 0 : t * term.cos_row);
    const float *cos = term.cos + first, *sin = term.sin + first;
    switch (term.keys.dtype) {
        case F32: return rotate(term, reinterpret_cast<const float*>(keys), n, positions, cos, sin, out);
        case BF16: return rotate(term, reinterpret_cast<const bf16*>(keys), n, positions, cos, sin, out);
        case F16: return rotate(term, reinterpret_cast<const f16*>(keys), n, positions, cos, sin, out);
        default: return rotate(term, reinterpret_cast<const i8*>(keys), n, positions, cos, sin, out);
    }
}

// ---- softmax ---------------------------------------------------------------------------------------------------------

// The entries of a table row at the distances from a query at q to n keys.
static void distances(const Plan& plan, const float* row, int64_t q, const Tile& tile, const int32_t* positions,
                      int64_t n, float* out) {
    int64_t base = q - tile.start - plan.delta_min;  // where the first key's entry stands; the next ones stand before it
    // read backwards, which hardware does not foresee: fetch what the next tile needs
    for (int64_t j = 0; j < n; j += 16) fetch(row, 4 * (base - 2 * n + j));
    for (int64_t j = 0; j < n; j += N) {
        if (tile.start >= 0 && j + N <= n && base - j < plan.table_size && base - j - (N - 1) >= 0) {
            store(out + j, reverse(load(row + base - j - (N - 1))));
            continue;
        }
        for (int64_t i = j; i < std::min<int64_t>(j + N, n); ++i)
            out[i] = row[std::clamp<int64_t>(q - positions[i] - plan.delta_min, 0, plan.table_size - 1)];
    }
}

struct RowState {
    float *shift, *sum, *keep;  // what scores are taken relative to; N partial sums of weights; factor for earlier sums
};

// Scores (in units of log 2) to weights 2^(score - shift), in place, over n keys and on to a multiple of N.
// The shift follows the largest score only when that is more than LAG above it: weights up to 2^LAG lose nothing, and
// the exponentials need not wait for the maximum.
static void online_softmax(float* s, int64_t n, RowState state) {
    constexpr float LAG = 8.f;
    const int64_t padded = (n + N - 1) / N * N;
    for (int64_t j = n; j < padded; ++j) s[j] = -INFINITY;
    vf high = load(s);
    for (int64_t j = N; j < padded; j += N) high = vmax(high, load(s + j));
    vf sum = load(state.sum);
    *state.keep = 1.f;
    if (any_above(high, *state.shift + LAG)) {
        float now = hmax(high), factor[N];
        store(factor, exp2v(set1(*state.shift - now)));
        *state.keep = factor[0];
        *state.shift = now;
        sum = mul(sum, set1(factor[0]));
    } else if (*state.shift == -INFINITY) {  // nothing seen so far
        for (int64_t j = 0; j < padded; j += N) store(s + j, zero());
        return;
    }
    vf shift = set1(*state.shift);
    for (int64_t j = 0; j < padded; j += N) {
        vf a = exp2v(sub(load(s + j), shift));
        store(s + j, a);
        sum = add(sum, a);
    }
    store(state.sum, sum);
}

// ---- a unit of work --------------------------------------------------------------------------------------------------

struct Scratch {
    float *q, *scores, *weights, *keep, *tables[3], *rotated, *result;
};

static Scratch lay_out(const Plan& plan, float* memory) {
    auto take = [&memory](int64_t floats) {
        float* at = memory;
        memory += (floats + 15) / 16 * 16;
        return at;
    };
    Scratch s;
    s.q = take(plan.q_floats);
    s.scores = take(plan.max_rows * plan.chunk);
    s.weights = take(plan.max_rows * plan.tile);
    s.keep = take(plan.max_rows);
    for (float*& table : s.tables) table = take(plan.tile);
    s.rotated = take(plan.rotated_floats);
    s.result = take(plan.partial_floats);
    return s;
}

template <class E>
static void take_query(const Plan& plan, const Term& term, const E* q, float* out) {
    const float scale = plan.scale * 1.442695041f;  // scores are kept in units of log 2
    std::fill(out, out + term.padded, 0.f);
    int64_t i = 0;
    if (term.rotate == NONE && !term.gain && in_order(term.keys.dtype))
        for (; i + N <= term.keys.width; i += N) store(out + i, mul(load(q + i), set1(scale)));
    for (; i < term.keys.width; ++i) {
        float x = to_float(q[i]) * scale;
        if (term.rotate == NONE)
            out[term.keys.dtype == I8 ? i : place_of(term.keys.dtype, i)] = term.gain ? x * term.gain[i] : x;
        else if (term.rotate == INTERLEAVED && i < term.rotated)
            out[i % 2 * (term.rotated / 2) + i / 2] = x;
        else
            out[i] = x;
    }
    if (term.keys.dtype == I8 && term.rotate == NONE) pack_int8_query(out, term.keys.width);
}

static void take_queries(const Plan& plan, const Component& c, int64_t b, float* scratch) {
    for (const Term& term : plan.terms) {
        float* out = scratch + term.q_offset;
        for (int64_t h = c.h0; h < c.h1; ++h)
            for (int64_t m = 0; m < plan.M; ++m, out += term.padded) {
                const char* q = term.q + (b * term.q_b + h * term.q_h + m * term.q_m) * ITEM_SIZE[term.q_dtype];
                switch (term.q_dtype) {
                    case F32: take_query(plan, term, reinterpret_cast<const float*>(q), out); break;
                    case BF16: take_query(plan, term, reinterpret_cast<const bf16*>(q), out); break;
                    default: take_query(plan, term, reinterpret_cast<const f16*>(q), out);
                }
            }
    }
}

// Scores from the products of a term: times the keys' scales, added to what other terms gave.
static void gather_products(const float* products, int64_t stride, const float* scale, bool accumulate, int64_t rows,
                            int64_t n, float* scores, int64_t scores_stride) {
    for (int64_t r = 0; r < rows; ++r, products += stride, scores += scores_stride)
        for (int64_t j = 0; j < n; j += N) {
            const int left = static_cast<int>(n - j);
            vf s = load(products + j);
            if (scale) s = mul(s, left >= N ? load(scale + j) : load_part(scale + j, left));
            store(scores + j, accumulate ? add(s, load(scores + j)) : s);
        }
}

struct Run {  // keys of one head that are read one after another
    const char *end, *next;  // and where reading goes on, or null
};
struct Lead {  // from a tile to the one that is read next, and from there to what is read FAR later
    int64_t bytes = 0, far = 0;
};

static Lead lead_from(const Run& run, const char* tile, int64_t n, int64_t row_bytes) {
    const int64_t behind = run.end - tile - n * row_bytes;
    if (behind <= 0) return run.next ? Lead{run.next - tile, FAR} : Lead();
    // what lies beyond the end of this run is as far into the next one
    if (behind <= FAR) return Lead{n * row_bytes, run.next ? FAR + (run.next - run.end) : 0};
    return Lead{n * row_bytes, FAR};
}

// The memory that a unit reads first of a view.
static const char* first_of(const Plan& plan, const View& view, const Unit& unit) {
    return view.at(unit.b, shared_head(view.heads, plan.components[unit.component].h0), unit.t0);
}

// Adds a term's products with n keys to the scores of the query heads [h0, h1) whose scores begin at `scores`.
static void score_term(const Plan& plan, const Component& c, const Term& term, int64_t b, int64_t h0, int64_t h1,
                       int64_t t, int64_t n, bool accumulate, float* scores, const Scratch& scratch, int64_t end,
                       Lead lead, const char* after) {
    for (int64_t g = shared_head(term.keys.heads, h0); g < term.keys.heads.count; ++g) {
        int64_t a = std::max<int64_t>(term.keys.heads.bounds[g], h0);
        int64_t z = std::min<int64_t>(term.keys.heads.bounds[g + 1], h1);
        if (a >= h1) break;
        if (a >= z) continue;
        ScoreJob job;
        job.keys = term.keys.at(b, g, t);
        job.stride = term.keys.stride_t, job.n = n, job.width = term.keys.width;
        const float* scale = term.keys.scales(b, g, t);
        float* to = scores + (a - h0) * plan.M * plan.chunk;
        const bool raw = scale || accumulate;  // then products are put aside first
        job.q = scratch.q + term.q_offset + (a - c.h0) * plan.M * term.padded;
        job.q_stride = term.padded;
        job.out = raw ? scratch.weights : to;
        job.out_stride = raw ? plan.tile : plan.chunk;
        // a stream that is also the value is fetched ahead in the order of the value heads
        const char* here = term.keys.at(b, g, t);
        if (term.fetches) lead = lead_from(Run{term.keys.at(b, g, end), after}, here, n, term.keys.row_bytes());
        job.ahead = Ahead{here + lead.bytes, lead.far};
        int64_t dtype = term.keys.dtype;
        if (term.rotate) {
            rotate_any(term, b, g, t, n, plan.positions(b) + t, scratch.rotated);
            job.keys = scratch.rotated, job.stride = job.width = term.padded, dtype = F32;
        }
        const int64_t rows = (z - a) * plan.M;
        score_any(dtype, job, rows);
        if (raw) gather_products(scratch.weights, plan.tile, scale, accumulate, rows, n, to, plan.chunk);
    }
}

// Scores of one tile to weights, for the query heads [h0, h1).
static void weigh(const Plan& plan, const Component& c, int64_t b, int64_t h0, int64_t h1, int64_t t, int64_t n,
                  float* scores, const Scratch& scratch, RowState states) {
    const Tile& tile = plan.tile_at(b, t);
    const int32_t* positions = plan.positions(b) + t;
    for (int64_t h = h0; h < h1; ++h)
        for (int64_t m = 0; m < plan.M; ++m) {
            int64_t q = plan.query_position(b, m), row = (h - c.h0) * plan.M + m;
            float* s = scores + ((h - h0) * plan.M + m) * plan.chunk;
            const Table* tables[3] = {&plan.mul, &plan.add, &plan.value_mul};
            const float* entries[3] = {nullptr, nullptr, nullptr};
            Sight seen = sight(plan, tile, q);
            for (int i = 0; i < 3 && seen != HIDDEN; ++i) {
                if (!tables[i]->data) continue;
                if (i == 2 && tables[2]->data == tables[0]->data && tables[2]->stride == tables[0]->stride) {
                    entries[2] = entries[0];
                    continue;
                }
                distances(plan, tables[i]->data + h * tables[i]->stride, q, tile, positions, n, scratch.tables[i]);
                entries[i] = scratch.tables[i];
            }
            if (entries[0])
                for (int64_t j = 0; j < n; j += N) store(s + j, mul(load(s + j), load(entries[0] + j)));
            if (entries[1])
                for (int64_t j = 0; j < n; j += N)
                    store(s + j, fma(load(entries[1] + j), set1(1.442695041f), load(s + j)));
            if (seen != WHOLE)
                for (int64_t j = 0; j < n; ++j)
                    if (seen == HIDDEN || !visible(plan, q, positions[j])) s[j] = -INFINITY;
            online_softmax(s, n, RowState{states.shift + row, states.sum + row * N, states.keep + row});
            if (entries[2])
                for (int64_t j = 0; j < n; j += N) store(s + j, mul(load(s + j), load(entries[2] + j)));
        }
}

// Adds the values of one tile to the sums of the query heads [h0, h1), which share value head g (flat: all heads).
static void add_values(const Plan& plan, const Component& c, int64_t b, int64_t g, int64_t h0, int64_t h1, int64_t t,
                       int64_t n, float* scores, const Scratch& scratch, float* sums, Lead lead) {
    const View& value = plan.value;
    const int64_t rows = (h1 - h0) * plan.M, row0 = (h0 - c.h0) * plan.M, count = plan.flat ? value.heads.count : 1;
    for (int64_t i = 0; i < count; ++i) {
        ValueJob job;
        job.values = value.at(b, g + i, t);
        job.stride = value.stride_t, job.n = n, job.width = value.width;
        job.weights = scores, job.weights_stride = plan.chunk;
        job.sums = sums + row0 * plan.padded_value + i * (plan.padded_value / count);
        job.sums_stride = plan.padded_value;
        job.keep = scratch.keep + row0;
        job.ahead = Ahead{value.at(b, g + i, t) + (plan.flat ? 0 : lead.bytes + n * value.row_bytes() / 2), lead.far};
        sum_any(value.dtype, job, rows, value.scales(b, g + i, t), scratch.weights, plan.tile);
    }
}

template <class Out>
static void write_rows(const Plan& plan, const Component& c, int64_t b, const float* sums, const float* weights) {
    const int64_t count = plan.flat ? plan.value.heads.count : 1, each = plan.padded_value / count;
    Out* out = reinterpret_cast<Out*>(plan.out) + (b * plan.H + c.h0) * plan.M * plan.out_width;
    for (int64_t row = 0; row < (c.h1 - c.h0) * plan.M; ++row, sums += plan.padded_value) {
        const float total = hsum(load(weights + row * N));
        const float factor = total == 0.f ? 0.f : 1.f / total;  // a query that sees nothing gets zeros
        for (int64_t i = 0; i < count; ++i, out += plan.value.width) {
            const float* from = sums + i * each;
            if (in_order(plan.value.dtype))
                for (int64_t d = 0; d < plan.value.width; ++d) from_float(from[d] * factor, out[d]);
            else
                for (int64_t d = 0; d < plan.value.width; ++d)
                    from_float(from[place_of(plan.value.dtype, d)] * factor, out[d]);
        }
    }
}

static void write_out(const Plan& plan, const Component& c, int64_t b, const float* sums, const float* weights) {
    switch (plan.out_dtype) {
        case F32: return write_rows<float>(plan, c, b, sums, weights);
        case BF16: return write_rows<bf16>(plan, c, b, sums, weights);
        default: return write_rows<f16>(plan, c, b, sums, weights);
    }
}

// after: the unit that this thread takes next, or null.
static void run_unit(const Plan& plan, const Unit& unit, const Unit* after, float* memory, float* partials) {
    const Component& c = plan.components[unit.component];
    const Scratch scratch = lay_out(plan, memory);
    const int64_t b = unit.b, rows = (c.h1 - c.h0) * plan.M, groups = plan.flat ? 1 : c.v1 - c.v0;
    float* sums = unit.slot < 0 ? scratch.result : partials + unit.slot * plan.partial_floats;
    const RowState states{sums + plan.max_rows * plan.padded_value, sums + plan.max_rows * (plan.padded_value + 1),
                          scratch.keep};
    std::fill(sums, sums + plan.partial_floats, 0.f);
    std::fill(states.shift, states.shift + rows, -INFINITY);
    take_queries(plan, c, b, scratch.q);

    for (int64_t t = unit.t0; t < unit.t1; t += plan.chunk) {
        const int64_t stop = std::min(t + plan.chunk, unit.t1);
        bool scored = false;
        for (const Term& term : plan.terms) {
            if (!term.early) continue;
            for (int64_t at = t; at < stop; at += plan.tile)
                score_term(plan, c, term, b, c.h0, c.h1, at, std::min(plan.tile, stop - at), scored,
                           scratch.scores + (at - t), scratch, unit.t1, Lead(), nullptr);
            scored = true;
        }
        for (int64_t v = 0; v < groups; ++v) {
            const int64_t g = c.v0 + v;
            const int64_t h0 = plan.flat ? c.h0 : plan.value.heads.bounds[g];
            const int64_t h1 = plan.flat ? c.h1 : plan.value.heads.bounds[g + 1];
            Run run{plan.value.at(b, g, stop), nullptr};  // then comes the next value head, the next chunk, the next unit
            if (v + 1 < groups)
                run.next = plan.value.at(b, g + 1, t);
            else if (stop < unit.t1)
                run.next = plan.value.at(b, c.v0, stop);
            else if (after && !plan.flat)
                run.next = first_of(plan, plan.value, *after);
            for (int64_t at = t; at < stop; at += plan.tile) {
                if (!tile_seen(plan, plan.tile_at(b, at), b)) continue;
                const int64_t n = std::min(plan.tile, stop - at);
                float* scores = scratch.scores + (h0 - c.h0) * plan.M * plan.chunk + (at - t);
                const Lead lead =
                    plan.flat ? Lead() : lead_from(run, plan.value.at(b, g, at), n, plan.value.row_bytes());
                bool accumulate = scored;
                for (const Term& term : plan.terms) {
                    if (term.early) continue;
                    score_term(plan, c, term, b, h0, h1, at, n, accumulate, scores, scratch, unit.t1, lead,
                               after ? first_of(plan, term.keys, *after) : nullptr);
                    accumulate = true;
                }
                weigh(plan, c, b, h0, h1, at, n, scores, scratch, states);
                add_values(plan, c, b, g, h0, h1, at, n, scores, scratch, sums, lead);
            }
        }
    }
    if (unit.slot < 0) write_out(plan, c, b, sums, states.sum);
}

// Joins the partial softmaxes of a split range, in order; a range that saw nothing weighs nothing.
static void merge(const Plan& plan, const Item& item, float* partials) {
    const Component& c = plan.components[item.component];
    const int64_t width = plan.padded_value;
    float* sums = partials + item.first_slot * plan.partial_floats;
    float *shifts = sums + plan.max_rows * width, *weights = shifts + plan.max_rows;
    for (int64_t row = 0; row < (c.h1 - c.h0) * plan.M; ++row)
        for (int64_t slot = 1; slot < item.slots; ++slot) {
            const float* more = sums + slot * plan.partial_floats;
            const float *more_weights = more + (weights - sums), shift = more[shifts - sums + row];
            if (shift == -INFINITY) continue;
            float now = std::max(shifts[row], shift);
            float old_factor = std::exp2(shifts[row] - now), factor = std::exp2(shift - now);
            for (int64_t d = 0; d < width; ++d)
                sums[row * width + d] = sums[row * width + d] * old_factor + more[row * width + d] * factor;
            for (int64_t i = row * N; i < (row + 1) * N; ++i)
                weights[i] = weights[i] * old_factor + more_weights[i] * factor;
            shifts[row] = now;
        }
    write_out(plan, c, item.b, sums, weights);
}

static double read_bytes(const char* data, int64_t bytes) {
    constexpr int64_t step = 8 * N * static_cast<int64_t>(sizeof(float));
    vf x[8];
    UNROLL for (int i = 0; i < 8; ++i) x[i] = zero();
    int64_t at = 0;
    for (; at + step <= bytes; at += step) {
        const float* p = reinterpret_cast<const float*>(data + at);
        UNROLL for (int i = 0; i < 8; ++i) x[i] = vmax(x[i], load(p + i * N));
    }
    double sum = 0;
    for (const vf& lanes : x) sum += hsum(lanes);
    for (; at < bytes; ++at) sum += data[at];
    return sum;
}

// What a tile's positions are; see Tile.
static Tile scan(const int32_t* positions, int64_t n) {
    const int32_t none = std::numeric_limits<int32_t>::max(), first = positions[0];
    int32_t low = none, high = -1, padding = 0, gaps = 0;
    for (int32_t j = 0; j < n; ++j) {
        int32_t k = positions[j];
        padding |= k < 0;
        gaps |= k ^ (first + j);
        low = std::min(low, k < 0 ? none : k);
        high = std::max(high, k);
    }
    return Tile{low, high, padding || gaps ? -1 : first, padding != 0};
}
