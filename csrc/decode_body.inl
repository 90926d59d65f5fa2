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
// kept in that order too (`place`).
template <class E>
struct Lanes {
    static constexpr int G = 1, STEP = N;
    static INLINE_MEMBER void full(const E* p, vf* x) { x[0] = load(p); }
    static INLINE_MEMBER void part(const E* p, int n, vf* x) { x[0] = load_part(p, n); }
    static int64_t place(int64_t i) { return i; }
};
template <>
struct Lanes<bf16> {
    static constexpr int G = 2, STEP = 2 * N;
    static INLINE_MEMBER void full(const bf16* p, vf* x) { load_pairs(p, x); }
    static INLINE_MEMBER void part(const bf16* p, int n, vf* x) { load_pairs_part(p, n, x); }
    static int64_t place(int64_t i) { return i / STEP * STEP + i % 2 * N + i % STEP / 2; }
};

static int64_t place(int64_t dtype, int64_t i) { return dtype == BF16 ? Lanes<bf16>::place(i) : i; }

// ---- scores ----------------------------------------------------------------------------------------------------------

// q . k over one row. STEPS > 0: the width is exactly that many steps, known to the compiler.
template <class E, int STEPS>
INLINE vf dot(const E* k, const float* q, int64_t width) {
    using L = Lanes<E>;
    vf x[L::G], sum = zero();
    if constexpr (STEPS > 0) {
        UNROLL for (int i = 0; i < STEPS; ++i) {
            L::full(k + i * L::STEP, x);
            UNROLL for (int g = 0; g < L::G; ++g) sum = fma(x[g], load(q + i * L::STEP + g * N), sum);
        }
        return sum;
    }
    vf other = zero();
    int64_t i = 0;
    for (; i + 2 * L::STEP <= width; i += 2 * L::STEP) {
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
    const float* scale;  // one per key, or null
    const float* q;
    int64_t q_stride;
    float* scores;
    int64_t scores_stride;
    bool accumulate;
    Ahead ahead;
    int64_t lines;  // to fetch ahead per block of N keys
};

// One query row against all keys of the job, N keys at a time.
template <class E, int STEPS>
static void score_one(ScoreJob& job, int64_t row) {
    const E* keys = static_cast<const E*>(job.keys);
    const float* q = job.q + row * job.q_stride;
    float* out = job.scores + row * job.scores_stride;
    vf sums[N];
    for (int64_t j = 0; j < job.n; j += N) {
        job.ahead.fetch(job.lines);
        int64_t left = job.n - j;
        if (left >= N) {
            const E* k = keys + j * job.stride;
            UNROLL for (int i = 0; i < N; ++i) sums[i] = dot<E, STEPS>(k + i * job.stride, q, job.width);
        } else {
            for (int i = 0; i < N; ++i) sums[i] = zero();
            for (int64_t i = 0; i < left; ++i) sums[i] = dot<E, STEPS>(keys + (j + i) * job.stride, q, job.width);
        }
        vf s = reduce(sums);
        if (job.scale) s = mul(s, left >= N ? load(job.scale + j) : load_part(job.scale + j, static_cast<int>(left)));
        store(out + j, job.accumulate ? add(s, load(out + j)) : s);
    }
}

// R query rows against all keys, N / R keys at a time, so that a loaded key serves R rows.
template <class E, int R>
static void score_rows(ScoreJob& job, int64_t row) {
    using L = Lanes<E>;
    constexpr int K = N / R;
    const E* keys = static_cast<const E*>(job.keys);
    const float* q = job.q + row * job.q_stride;
    float* out = job.scores + row * job.scores_stride;
    for (int64_t j = 0; j < job.n; j += K) {
        if (j % N == 0) job.ahead.fetch(job.lines);
        const E* k[K];
        UNROLL for (int i = 0; i < K; ++i) k[i] = keys + std::min<int64_t>(j + i, job.n - 1) * job.stride;
        vf sums[N];
        UNROLL for (int i = 0; i < N; ++i) sums[i] = zero();
        int64_t d = 0;
        for (; d + L::STEP <= job.width; d += L::STEP) {
            vf x[K][L::G];
            UNROLL for (int i = 0; i < K; ++i) L::full(k[i] + d, x[i]);
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int g = 0; g < L::G; ++g) {
                    vf y = load(q + r * job.q_stride + d + g * N);
                    UNROLL for (int i = 0; i < K; ++i) sums[r * K + i] = fma(x[i][g], y, sums[r * K + i]);
                }
        }
        if (d < job.width) {
            vf x[K][L::G];
            UNROLL for (int i = 0; i < K; ++i) L::part(k[i] + d, static_cast<int>(job.width - d), x[i]);
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int g = 0; g < L::G; ++g) {
                    vf y = load(q + r * job.q_stride + d + g * N);
                    UNROLL for (int i = 0; i < K; ++i) sums[r * K + i] = fma(x[i][g], y, sums[r * K + i]);
                }
        }
        float s[N], scale[K];
        store(s, reduce(sums));
        for (int i = 0; i < K; ++i) scale[i] = job.scale ? job.scale[std::min<int64_t>(j + i, job.n - 1)] : 1.f;
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < K; ++i) {
                float* at = out + r * job.scores_stride + j + i;
                *at = s[r * K + i] * scale[i] + (job.accumulate ? *at : 0.f);
            }
    }
}

template <class E>
static void score(ScoreJob& job, int64_t rows) {
    using L = Lanes<E>;
    int64_t row = 0;
    for (; row + ROW_BLOCK <= rows; row += ROW_BLOCK, job.lines = 0) score_rows<E, ROW_BLOCK>(job, row);
    for (; row + 2 <= rows; row += 2, job.lines = 0) score_rows<E, 2>(job, row);
    if (row == rows) return;
    if (job.width == 64 && 64 % L::STEP == 0) return score_one<E, 64 / L::STEP>(job, row);
    if (job.width == 128 && 128 % L::STEP == 0) return score_one<E, 128 / L::STEP>(job, row);
    score_one<E, 0>(job, row);
}

static void score_any(int64_t dtype, ScoreJob& job, int64_t rows) {
    switch (dtype) {
        case F32: return score<float>(job, rows);
        case BF16: return score<bf16>(job, rows);
        case F16: return score<f16>(job, rows);
        default: return score<i8>(job, rows);
    }
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
    int64_t lines;  // to fetch ahead per key
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
        job.ahead.fetch(job.lines * P);
        UNROLL for (int p = 0; p < P; ++p) one(j + p, sums[p]);
    }
    for (; j < job.n; ++j) one(j, sums[0]);
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int c = 0; c < C; ++c) {
            vf sum = sums[0][r][c];
            UNROLL for (int p = 1; p < P; ++p) sum = add(sum, sums[p][r][c]);
            store(out + r * job.sums_stride + c * N, sum);
        }
    job.lines = 0;
}

template <class E, int R>
static void value_rows(ValueJob& job, int64_t row) {
    constexpr int G = Lanes<E>::G, MOST = VALUE_VECTORS / R < 8 ? VALUE_VECTORS / R : 8;
    int64_t at = 0;
    for (; at + MOST * N <= job.width; at += MOST * N) value_block<E, R, MOST, false>(job, row, at);
    if constexpr (MOST > 4)
        if (at + 4 * N <= job.width) value_block<E, R, 4, false>(job, row, at), at += 4 * N;
    if constexpr (MOST > 2)
        if (at + 2 * N <= job.width) value_block<E, R, 2, false>(job, row, at), at += 2 * N;
    if constexpr (G == 1)
        if (at + N <= job.width) value_block<E, R, 1, false>(job, row, at), at += N;
    if (at < job.width) value_block<E, R, G, true>(job, row, at);
}

template <class E>
static void sum_values(ValueJob& job, int64_t rows) {
    int64_t row = 0;
    for (; row + ROW_BLOCK <= rows; row += ROW_BLOCK) value_rows<E, ROW_BLOCK>(job, row);
    for (; row + 2 <= rows; row += 2) value_rows<E, 2>(job, row);
    if (row < rows) value_rows<E, 1>(job, row);
}

static void sum_values_any(int64_t dtype, ValueJob& job, int64_t rows) {
    switch (dtype) {
        case F32: return sum_values<float>(job, rows);
        case BF16: return sum_values<bf16>(job, rows);
        case F16: return sum_values<f16>(job, rows);
        default: return sum_values<i8>(job, rows);
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
    float *high, *sum, *keep;  // largest score so far, sum of weights, factor for what was summed before
};

// Scores (in units of log 2) to weights, in place, over n keys and the tile's padding up to a multiple of N.
static void online_softmax(float* s, int64_t n, RowState state) {
    int64_t padded = (n + N - 1) / N * N;
    for (int64_t j = n; j < padded; ++j) s[j] = -INFINITY;
    vf high = load(s);
    for (int64_t j = N; j < padded; j += N) high = vmax(high, load(s + j));
    float before = *state.high, now = std::max(before, hmax(high));
    *state.keep = 1.f;
    if (now == -INFINITY) {
        for (int64_t j = 0; j < padded; j += N) store(s + j, zero());
        return;
    }
    if (now > before) {
        float factor[N];
        store(factor, exp2v(set1(before - now)));
        *state.keep = factor[0];
        *state.sum *= factor[0];
        *state.high = now;
    }
    vf sum = zero(), shift = set1(now);
    for (int64_t j = 0; j < padded; j += N) {
        vf a = exp2v(sub(load(s + j), shift));
        store(s + j, a);
        sum = add(sum, a);
    }
    *state.sum += hsum(sum);
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
    for (int64_t i = 0; i < term.padded; ++i) out[i] = 0.f;
    for (int64_t i = 0; i < term.keys.width; ++i) {
        float x = to_float(q[i]) * scale;
        if (term.rotate == NONE)
            out[place(term.keys.dtype, i)] = term.gain ? x * term.gain[i] : x;
        else if (term.rotate == INTERLEAVED && i < term.rotated)
            out[i % 2 * (term.rotated / 2) + i / 2] = x;
        else
            out[i] = x;
    }
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

// The memory of keys t .. t + n - 1, to be fetched ahead; nothing where the view is a small part of its rows.
static Ahead memory_of(const View& view, int64_t b, int64_t g, int64_t t, int64_t n) {
    Ahead ahead;
    if (n <= 0 || view.row_bytes() > 2 * view.width * ITEM_SIZE[view.dtype]) return ahead;
    ahead.next = view.at(b, g, t);
    ahead.end = ahead.next + n * view.row_bytes();
    return ahead;
}

// Adds a term's products with n keys to the scores of the query heads [h0, h1) whose scores begin at `scores`.
static void score_term(const Plan& plan, const Component& c, const Term& term, int64_t b, int64_t h0, int64_t h1,
                       int64_t t, int64_t n, bool accumulate, float* scores, const Scratch& scratch, int64_t end,
                       Ahead* shared) {
    for (int64_t g = shared_head(term.keys.heads, h0); g < term.keys.heads.count; ++g) {
        int64_t a = std::max<int64_t>(term.keys.heads.bounds[g], h0);
        int64_t z = std::min<int64_t>(term.keys.heads.bounds[g + 1], h1);
        if (a >= h1) break;
        if (a >= z) continue;
        ScoreJob job;
        job.keys = term.keys.at(b, g, t);
        job.stride = term.keys.stride_t, job.n = n, job.width = term.keys.width;
        job.scale = term.keys.scales(b, g, t);
        job.q = scratch.q + term.q_offset + (a - c.h0) * plan.M * term.padded;
        job.q_stride = term.padded;
        job.scores = scores + (a - h0) * plan.M * plan.chunk;
        job.scores_stride = plan.chunk;
        job.accumulate = accumulate;
        int64_t blocks = (n + N - 1) / N, parts = blocks;
        if (shared) {  // the value's memory: half of it while scoring, the rest while summing
            job.ahead = *shared;
            parts *= 2;
        } else {
            job.ahead = memory_of(term.keys, b, g, t + n, std::min(plan.tile, end - t - n));
        }
        job.lines = ((job.ahead.end - job.ahead.next) / 64 + parts) / parts;
        int64_t dtype = term.keys.dtype;
        if (term.rotate) {
            rotate_any(term, b, g, t, n, plan.positions(b) + t, scratch.rotated);
            job.keys = scratch.rotated, job.stride = job.width = term.padded, dtype = F32;
        }
        score_any(dtype, job, (z - a) * plan.M);
        if (shared) *shared = job.ahead;
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
            online_softmax(s, n, RowState{states.high + row, states.sum + row, states.keep + row});
            if (entries[2])
                for (int64_t j = 0; j < n; j += N) store(s + j, mul(load(s + j), load(entries[2] + j)));
        }
}

// Adds the values of one tile to the sums of the query heads [h0, h1), which share value head g (flat: all heads).
static void add_values(const Plan& plan, const Component& c, int64_t b, int64_t g, int64_t h0, int64_t h1, int64_t t,
                       int64_t n, float* scores, const Scratch& scratch, float* sums, Ahead ahead) {
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
        job.ahead = plan.flat ? Ahead() : ahead;
        job.lines = ((job.ahead.end - job.ahead.next) / 64 + n) / n;
        if (const float* scale = value.scales(b, g + i, t)) {
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t j = 0; j < n; ++j)
                    scratch.weights[r * plan.tile + j] = scores[r * plan.chunk + j] * scale[j];
            job.weights = scratch.weights, job.weights_stride = plan.tile;
        }
        sum_values_any(value.dtype, job, rows);
    }
}

template <class Out>
static void write_rows(const Plan& plan, const Component& c, int64_t b, const float* sums, const float* weights) {
    const int64_t count = plan.flat ? plan.value.heads.count : 1, each = plan.padded_value / count;
    Out* out = reinterpret_cast<Out*>(plan.out) + (b * plan.H + c.h0) * plan.M * plan.out_width;
    for (int64_t row = 0; row < (c.h1 - c.h0) * plan.M; ++row, sums += plan.padded_value) {
        float factor = weights[row] == 0.f ? 0.f : 1.f / weights[row];  // a query that sees nothing gets zeros
        for (int64_t i = 0; i < count; ++i)
            for (int64_t d = 0; d < plan.value.width; ++d)
                from_float(sums[i * each + place(plan.value.dtype, d)] * factor, *out++);
    }
}

static void write_out(const Plan& plan, const Component& c, int64_t b, const float* sums, const float* weights) {
    switch (plan.out_dtype) {
        case F32: return write_rows<float>(plan, c, b, sums, weights);
        case BF16: return write_rows<bf16>(plan, c, b, sums, weights);
        default: return write_rows<f16>(plan, c, b, sums, weights);
    }
}

static void run_unit(const Plan& plan, const Unit& unit, float* memory, float* partials) {
    const Component& c = plan.components[unit.component];
    const Scratch scratch = lay_out(plan, memory);
    const int64_t b = unit.b, rows = (c.h1 - c.h0) * plan.M, groups = plan.flat ? 1 : c.v1 - c.v0;
    float* sums = unit.slot < 0 ? scratch.result : partials + unit.slot * plan.partial_floats;
    const RowState states{sums + plan.max_rows * plan.padded_value, sums + plan.max_rows * (plan.padded_value + 1),
                          scratch.keep};
    std::fill(sums, sums + plan.partial_floats, 0.f);
    std::fill(states.high, states.high + rows, -INFINITY);
    take_queries(plan, c, b, scratch.q);

    for (int64_t t = unit.t0; t < unit.t1; t += plan.chunk) {
        const int64_t stop = std::min(t + plan.chunk, unit.t1);
        bool scored = false;
        for (const Term& term : plan.terms) {
            if (!term.early) continue;
            for (int64_t at = t; at < stop; at += plan.tile)
                score_term(plan, c, term, b, c.h0, c.h1, at, std::min(plan.tile, stop - at), scored,
                           scratch.scores + (at - t), scratch, unit.t1, nullptr);
            scored = true;
        }
        for (int64_t v = 0; v < groups; ++v) {
            const int64_t g = c.v0 + v;
            const int64_t h0 = plan.flat ? c.h0 : plan.value.heads.bounds[g];
            const int64_t h1 = plan.flat ? c.h1 : plan.value.heads.bounds[g + 1];
            for (int64_t at = t; at < stop; at += plan.tile) {
                if (!tile_seen(plan, plan.tile_at(b, at), b)) continue;
                const int64_t n = std::min(plan.tile, stop - at);
                float* scores = scratch.scores + (h0 - c.h0) * plan.M * plan.chunk + (at - t);
                // what comes after this tile: the next one, or the next value head's, or the next chunk
                int64_t next = at + n, next_g = g;
                if (next == stop) next_g = v + 1 < groups ? g + 1 : c.v0, next = v + 1 < groups ? t : stop;
                Ahead ahead = memory_of(plan.value, b, next_g, next, std::min(plan.tile, unit.t1 - next));
                bool accumulate = scored;
                for (const Term& term : plan.terms) {
                    if (term.early) continue;
                    score_term(plan, c, term, b, h0, h1, at, n, accumulate, scores, scratch, unit.t1,
                               term.fetches ? nullptr : &ahead);
                    accumulate = true;
                }
                weigh(plan, c, b, h0, h1, at, n, scores, scratch, states);
                add_values(plan, c, b, g, h0, h1, at, n, scores, scratch, sums, ahead);
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
    float *highs = sums + plan.max_rows * width, *weights = highs + plan.max_rows;
    for (int64_t row = 0; row < (c.h1 - c.h0) * plan.M; ++row)
        for (int64_t slot = 1; slot < item.slots; ++slot) {
            const float* more = sums + slot * plan.partial_floats;
            float high = more[plan.max_rows * width + row], weight = more[plan.max_rows * (width + 1) + row];
            if (high == -INFINITY) continue;
            float now = std::max(highs[row], high);
            float old_factor = std::exp2(highs[row] - now), factor = std::exp2(high - now);
            for (int64_t d = 0; d < width; ++d)
                sums[row * width + d] = sums[row * width + d] * old_factor + more[row * width + d] * factor;
            weights[row] = weights[row] * old_factor + weight * factor;
            highs[row] = now;
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
