// AVX-512 (F, BW, DQ, VL, VNNI): 16 lanes, 32 registers. Included inside a namespace compiled for that target.

constexpr int N = 16;           // lanes
constexpr int ROW_BLOCK = 4;    // query rows that share one pass over the keys in registers
constexpr int VALUE_VECTORS = 16;  // accumulators of the value loop
using vf = __m512;
INLINE vf exp2_polynomial(vf x);

INLINE vf zero() { return _mm512_setzero_ps(); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
INLINE __mmask32 first32(int n) { return static_cast<__mmask32>((1ull << n) - 1ull); }

// Whether a lane is above x, or not a number.
INLINE bool any_above(vf a, float x) { return _mm512_cmp_ps_mask(a, set1(x), _CMP_NLE_UQ) != 0; }
INLINE vf reverse(vf a) {
    const __m512i order = _mm512_set_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(order, a);
}

// (a0 b0 a1 b1 ...) in x, y -> a in x, b in y
INLINE void deinterleave(vf& x, vf& y) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    vf a = _mm512_permutex2var_ps(x, even, y), b = _mm512_permutex2var_ps(x, odd, y);
    x = a, y = b;
}

// Elements in memory order.
INLINE vf load(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
INLINE vf load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE vf load(const i8* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// The first n of 16 elements, the others 0; nothing beyond them is read.
INLINE vf load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE vf load_part(const bf16* p, int n) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
}
INLINE vf load_part(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
INLINE vf load_part(const i8* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
}

// Two vectors of bfloat16 at the price of one shift and one mask: even elements, then odd ones.
INLINE void split_pairs(__m512i x, vf* out) {
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
INLINE void load_pairs(const bf16* p, vf* out) { split_pairs(_mm512_loadu_si512(p), out); }
INLINE void load_pairs_part(const bf16* p, int n, vf* out) {
    split_pairs(_mm512_maskz_loadu_epi16(first32(n), p), out);
}

// Lane i of the result is the sum of the lanes of a[i].
INLINE vf reduce(const vf* a) {
    vf t[8], u[4];
    UNROLL for (int i = 0; i < 8; ++i)
        t[i] = add(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; ++i) {
        __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
        u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    vf v = add(_mm512_shuffle_f32x4(u[0], u[1], 0x44), _mm512_shuffle_f32x4(u[0], u[1], 0xEE));
    vf w = add(_mm512_shuffle_f32x4(u[2], u[3], 0x44), _mm512_shuffle_f32x4(u[2], u[3], 0xEE));
    return add(_mm512_shuffle_f32x4(v, w, 0x88), _mm512_shuffle_f32x4(v, w, 0xDD));
}

// 2^x for x <= 0 (0 where x is -inf), relative error below 2e-7.
INLINE vf exp2v(vf x) {
    vf whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // -inf - -inf would be NaN
    vf part = sub(vmax(x, set1(-1000.f)), vmax(whole, set1(-1000.f)));
    return _mm512_scalef_ps(exp2_polynomial(part), whole);
}
