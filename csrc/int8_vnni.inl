// Streams in int8 with AVX-512 VNNI: products of bytes, summed in 32 bits, 64 elements an instruction.
//
// Queries become 16-bit numbers and weights 16-bit fractions of the largest one in the tile, each as a high and a low byte.
// What that rounds off, 2^-16 of the largest query element and 2^-17 of the largest weight, is small beside the rounding of
// the stream itself (2^-8 of its largest element).

constexpr int64_t INT8_STEP = 64;

// Sums leave in the order in which four rows of bytes interleave.
static int64_t int8_place(int64_t i) { return i / 64 * 64 + i % 16 / 4 * 16 + i % 64 / 16 * 4 + i % 4; }

static int64_t padded64(int64_t width) { return (width + 63) / 64 * 64; }
struct QueryTail {
    float factor;
    int32_t sum;
};
static int64_t int8_query_floats(int64_t width) { return padded64(width) / 2 + 16; }

// A row of `width` floats becomes, in place: high bytes, low bytes, and the factor and sum of these numbers.
static void pack_int8_query(float* q, int64_t width) {
    // 32512 = 127 * 256 keeps the high byte a byte; sums of products must fit 31 bits
    const float most = std::min(32512.f, 2147483647.f / (127.f * static_cast<float>(width)) - 1.f);
    float largest = 0.f;
    for (int64_t i = 0; i < width; ++i) largest = std::max(largest, std::fabs(q[i]));
    const float inverse = largest > 0.f ? most / largest : 0.f;
    QueryTail tail{largest / most, 0};
    // rounded into a block that no longer overlaps what is still to be read
    const int64_t padded = padded64(width);
    int8_t* bytes = reinterpret_cast<int8_t*>(q);
    for (int64_t at = 0; at < width; at += 64) {
        int8_t high[64] = {}, low[64] = {};
        for (int64_t i = 0; i < std::min<int64_t>(64, width - at); ++i) {
            int32_t x = static_cast<int32_t>(std::lrintf(q[at + i] * inverse));
            high[i] = static_cast<int8_t>((x + 128) >> 8);
            low[i] = static_cast<int8_t>(x - 256 * high[i]);
            tail.sum += x;
        }
        std::memcpy(bytes + at * 2, high, 64);
        std::memcpy(bytes + at * 2 + 64, low, 64);
    }
    std::memcpy(bytes + 2 * padded, &tail, sizeof tail);
}

INLINE __m512i load_bytes(const int8_t* p) { return _mm512_loadu_si512(p); }
INLINE __m512i load_bytes(const int8_t* p, int64_t left) { return _mm512_maskz_loadu_epi8((1ull << left) - 1ull, p); }
struct Bytes64 {  // reads 64 bytes
    INLINE_MEMBER __m512i operator()(const int8_t* p) const { return load_bytes(p); }
};
struct BytesLeft {  // reads the first of 64 bytes, the others are 0
    int64_t left;
    INLINE_MEMBER __m512i operator()(const int8_t* p) const { return load_bytes(p, left); }
};
INLINE __m512i add_ints(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

INLINE __m512i reduce_ints(const __m512i* a) {  // as `reduce`
    __m512i t[8], u[4];
    UNROLL for (int i = 0; i < 8; ++i)
        t[i] = add_ints(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; ++i)
        u[i] = add_ints(_mm512_unpacklo_epi64(t[2 * i], t[2 * i + 1]), _mm512_unpackhi_epi64(t[2 * i], t[2 * i + 1]));
    __m512i v = add_ints(_mm512_shuffle_i32x4(u[0], u[1], 0x44), _mm512_shuffle_i32x4(u[0], u[1], 0xEE));
    __m512i w = add_ints(_mm512_shuffle_i32x4(u[2], u[3], 0x44), _mm512_shuffle_i32x4(u[2], u[3], 0xEE));
    return add_ints(_mm512_shuffle_i32x4(v, w, 0x88), _mm512_shuffle_i32x4(v, w, 0xDD));
}

// R query rows against N / R keys from key j on. WIDTH > 0: a multiple of 64 that the compiler knows. WHOLE: all the keys
// are there.
template <int R, int WIDTH, bool WHOLE>
INLINE void score_int8_block(const ScoreJob& job, int64_t row, int64_t j) {
    constexpr int K = N / R, PART = R == 4 ? 2 : R == 2 ? 4 : 2;  // keys that are worked on at a time
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    const int8_t* keys = static_cast<const int8_t*>(job.keys) + j * job.stride;
    const int64_t width = WIDTH ? WIDTH : job.width, whole = width / 64 * 64;
    const Ahead ahead{job.ahead.next + j * width / 2, job.ahead.far};
    const int8_t* q[R];
    UNROLL for (int r = 0; r < R; ++r) q[r] = reinterpret_cast<const int8_t*>(job.q + (row + r) * job.q_stride);
    __m512i sums[N];
    UNROLL for (int part = 0; part < K; part += PART) {
        const int8_t* k[PART];
        __m512i high[R][PART], low[R][PART];
        UNROLL for (int i = 0; i < PART; ++i) {
            k[i] = keys + (WHOLE ? part + i : std::min<int64_t>(part + i, job.n - 1 - j)) * job.stride;
            UNROLL for (int r = 0; r < R; ++r) high[r][i] = low[r][i] = _mm512_setzero_si512();
        }
        auto step = [&](int64_t d, auto&& read) __attribute__((always_inline)) {
            __m512i x[PART];
            UNROLL for (int i = 0; i < PART; ++i) {
                if constexpr (R == 1) fetch_half<64>(ahead, (part + i) * width + d);
                // the instruction multiplies unsigned by signed bytes: keys + 128, taken away again below
                x[i] = _mm512_xor_si512(read(k[i] + d), flip);
            }
            UNROLL for (int r = 0; r < R; ++r) {
                const __m512i h = load_bytes(q[r] + 2 * d), l = load_bytes(q[r] + 2 * d + 64);
                UNROLL for (int i = 0; i < PART; ++i) {
                    high[r][i] = _mm512_dpbusd_epi32(high[r][i], x[i], h);
                    low[r][i] = _mm512_dpbusd_epi32(low[r][i], x[i], l);
                }
            }
        };
        if constexpr (WIDTH > 0) {
            UNROLL for (int64_t d = 0; d < WIDTH; d += 64) step(d, Bytes64{});
        } else {
            for (int64_t d = 0; d < whole; d += 64) step(d, Bytes64{});
            if (whole < width) step(whole, BytesLeft{width - whole});
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int i = 0; i < PART; ++i)
                sums[r * K + part + i] = add_ints(_mm512_slli_epi32(high[r][i], 8), low[r][i]);
    }
    // unsigned: sums may wrap on the way, their difference fits
    const int64_t tail_at = 2 * padded64(width);
    const __m512i raw = reduce_ints(sums);
    if constexpr (R == 1) {
        QueryTail tail;
        std::memcpy(&tail, q[0] + tail_at, sizeof tail);
        __m512i s = _mm512_sub_epi32(raw, _mm512_slli_epi32(_mm512_set1_epi32(tail.sum), 7));
        store(job.out + row * job.out_stride + j, mul(_mm512_cvtepi32_ps(s), set1(tail.factor)));
    } else {
        int32_t bias[N];
        float factor[N], out[N];
        UNROLL for (int r = 0; r < R; ++r) {
            QueryTail tail;
            std::memcpy(&tail, q[r] + tail_at, sizeof tail);
            UNROLL for (int i = 0; i < K; ++i) bias[r * K + i] = tail.sum, factor[r * K + i] = tail.factor;
        }
        __m512i s = _mm512_sub_epi32(raw, _mm512_slli_epi32(_mm512_loadu_si512(bias), 7));
        store(out, mul(_mm512_cvtepi32_ps(s), load(factor)));
        UNROLL for (int r = 0; r < R; ++r)
            std::memcpy(job.out + (row + r) * job.out_stride + j, out + r * K, K * sizeof(float));
    }
}

template <int WIDTH>
static void score_int8_single(const ScoreJob& job, int64_t row) {
    int64_t j = 0;
    for (; j + N <= job.n; j += N) score_int8_block<1, WIDTH, true>(job, row, j);
    if (j < job.n) score_int8_block<1, WIDTH, false>(job, row, j);
}

static void score_int8(const ScoreJob& job, int64_t rows) {  // as `score`
    const int64_t pairs = rows / 2 * 2;
    for (int64_t j = 0; pairs && j < job.n; j += N) {
        const int64_t end = std::min<int64_t>(j + N, job.n);
        int64_t row = 0, fetched = j * job.width;
        auto fetch_until = [&](int64_t key) __attribute__((always_inline)) {
            for (; fetched < key * job.width; fetched += LINE) fetch(job.ahead.next, fetched);
        };
        for (; row + 4 <= pairs; row += 4)
            for (int64_t i = j; i < end; i += N / 4) {
                fetch_until(std::min<int64_t>(i + N / 4, end));
                score_int8_block<4, 0, false>(job, row, i);
            }
        for (; row < pairs; row += 2)
            for (int64_t i = j; i < end; i += N / 2) {
                fetch_until(std::min<int64_t>(i + N / 2, end));
                score_int8_block<2, 0, false>(job, row, i);
            }
    }
    if (pairs == rows) return;
    if (job.width == 64) return score_int8_single<64>(job, pairs);
    if (job.width == 128) return score_int8_single<128>(job, pairs);
    score_int8_single<0>(job, pairs);
}

struct ByteWeights {  // of one row: n weights are (256 high + low) * factor
    const uint8_t *high, *low;
    float factor;
};

// Weights times scales, as far as their sign is `sign`, in bytes; false when there are none.
static bool byte_weights(const float* weights, const float* scale, int64_t n, float sign, float* scratch,
                         ByteWeights& out) {
    const int64_t padded = (n + N - 1) / N * N;
    vf largest = zero(), w[8];  // a tile has at most 128 keys
    for (int64_t j = 0; j < padded; j += N) {
        const int left = static_cast<int>(n - j);
        vf x = left >= N ? mul(load(weights + j), load(scale + j))
                         : mul(load_part(weights + j, left), load_part(scale + j, left));
        w[j / N] = vmax(mul(x, set1(sign)), zero());
        largest = vmax(largest, w[j / N]);
    }
    const float most = hmax(largest);
    if (most == 0.f) return false;
    uint8_t *high = reinterpret_cast<uint8_t*>(scratch), *low = high + padded;
    const vf inverse = set1(65535.f / most);
    for (int64_t j = 0; j < padded; j += N) {
        __m512i x = _mm512_cvtps_epi32(mul(w[j / N], inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + j), _mm512_cvtepi32_epi8(x));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + j), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
    }
    out = ByteWeights{high, low, sign * most / 65535.f};
    return true;
}

// Adds n values to vectors FIRST .. FIRST + C - 1 of the four that 64 columns from `at` on make, for R rows.
template <int R, int FIRST, int C, bool PART>
INLINE void sum_int8_block(const ValueJob& job, const ByteWeights* weights, const float* keep, int64_t row, int64_t at) {
    const int8_t* values = static_cast<const int8_t*>(job.values) + at;
    const Ahead ahead{job.ahead.next + at * job.n / 2, job.ahead.far};
    const int64_t left = job.width - at;
    __m512i high[R][C], low[R][C];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int c = 0; c < C; ++c) high[r][c] = low[r][c] = _mm512_setzero_si512();
    auto four = [&](int64_t j, const int8_t* const* k) __attribute__((always_inline)) {
        __m512i x[4], v[4];
        if constexpr (R == 1) fetch_half<256>(ahead, j * 64);
        UNROLL for (int i = 0; i < 4; ++i) x[i] = PART ? load_bytes(k[i], left) : load_bytes(k[i]);
        if constexpr (FIRST == 0) {
            __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
            v[0] = _mm512_unpacklo_epi16(a, b), v[1] = _mm512_unpackhi_epi16(a, b);
        }
        if constexpr (FIRST + C == 4) {
            __m512i a = _mm512_unpackhi_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[2], x[3]);
            v[2] = _mm512_unpacklo_epi16(a, b), v[3] = _mm512_unpackhi_epi16(a, b);
        }
        UNROLL for (int r = 0; r < R; ++r) {
            int32_t h, l;
            std::memcpy(&h, weights[r].high + j, 4);
            std::memcpy(&l, weights[r].low + j, 4);
            const __m512i y = _mm512_set1_epi32(h), z = _mm512_set1_epi32(l);
            UNROLL for (int c = 0; c < C; ++c) {
                high[r][c] = _mm512_dpbusd_epi32(high[r][c], y, v[FIRST + c]);
                low[r][c] = _mm512_dpbusd_epi32(low[r][c], z, v[FIRST + c]);
            }
        }
    };
    int64_t j = 0;
    for (; j + 4 <= job.n; j += 4, values += 4 * job.stride) {
        const int8_t* k[4] = {values, values + job.stride, values + 2 * job.stride, values + 3 * job.stride};
        four(j, k);
    }
    if (j < job.n) {  // the last key stands in for those that are missing, with weight 0
        const int8_t* k[4];
        for (int64_t i = 0; i < 4; ++i) k[i] = values + std::min(i, job.n - 1 - j) * job.stride;
        four(j, k);
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int c = 0; c < C; ++c) {
            float* out = job.sums + (row + r) * job.sums_stride + at + (FIRST + c) * N;
            vf sum = _mm512_cvtepi32_ps(add_ints(_mm512_slli_epi32(high[r][c], 8), low[r][c]));
            store(out, fma(sum, set1(weights[r].factor), mul(set1(keep[r]), load(out))));
        }
}

template <bool PART>
static void sum_int8_columns(const ValueJob& job, const ByteWeights* weights, const float* keep, int64_t row,
                             int64_t count, int64_t at) {
    if (count == 1) return sum_int8_block<1, 0, 4, PART>(job, weights, keep, row, at);
    if (count == 2) return sum_int8_block<2, 0, 4, PART>(job, weights, keep, row, at);
    sum_int8_block<4, 0, 2, PART>(job, weights, keep, row, at);
    sum_int8_block<4, 2, 2, PART>(job, weights, keep, row, at);
}

static void sum_int8(ValueJob& job, int64_t rows, const float* scale, float* scratch, int64_t scratch_stride) {
    static const uint8_t nothing[128] = {};
    for (const float sign : {1.f, -1.f}) {  // tables may make weights negative; products are of unsigned weights
        for (int64_t row = 0; row < rows;) {
            const int64_t count = rows - row >= 4 ? 4 : rows - row >= 2 ? 2 : 1;
            ByteWeights weights[4];
            float keep[4];
            bool some = false;
            for (int64_t r = 0; r < count; ++r) {
                weights[r] = ByteWeights{nothing, nothing, 0.f};
                some |= byte_weights(job.weights + (row + r) * job.weights_stride, scale, job.n, sign,
                                     scratch + (row + r) * scratch_stride, weights[r]);
                keep[r] = sign > 0 ? job.keep[row + r] : 1.f;
            }
            if (some || sign > 0) {
                int64_t at = 0;
                for (; at + 64 <= job.width; at += 64) sum_int8_columns<false>(job, weights, keep, row, count, at);
                if (at < job.width) sum_int8_columns<true>(job, weights, keep, row, count, at);
            }
            row += count;
        }
    }
}
