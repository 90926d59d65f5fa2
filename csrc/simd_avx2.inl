// AVX2 with FMA and F16C: 8 lanes, 16 registers. Included inside a namespace compiled for that target.

constexpr int N = 8;
constexpr int ROW_BLOCK = 4;
constexpr int VALUE_VECTORS = 8;
using vf = __m256;
INLINE vf exp2_polynomial(vf x);

INLINE vf zero() { return _mm256_setzero_ps(); }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE float hsum(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
INLINE float hmax(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
// Whether a lane is above x, or not a number.
INLINE bool any_above(vf a, float x) { return _mm256_movemask_ps(_mm256_cmp_ps(a, set1(x), _CMP_NLE_UQ)) != 0; }
INLINE vf reverse(vf a) {
    return _mm256_permutevar8x32_ps(a, _mm256_set_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE void deinterleave(vf& x, vf& y) {
    vf a = _mm256_shuffle_ps(x, y, 0x88), b = _mm256_shuffle_ps(x, y, 0xDD);
    x = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xD8));
    y = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(b), 0xD8));
}

INLINE vf load(const bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
INLINE vf load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE vf load(const i8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
template <class E>
INLINE vf load_part(const E* p, int n) {
    E part[N] = {};
    for (int i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
}

INLINE void split_pairs(__m256i x, vf* out) {
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
INLINE void load_pairs(const bf16* p, vf* out) {
    split_pairs(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), out);
}
INLINE void load_pairs_part(const bf16* p, int n, vf* out) {
    bf16 part[2 * N] = {};
    for (int i = 0; i < n; ++i) part[i] = p[i];
    load_pairs(part, out);
}

INLINE vf reduce(const vf* a) {
    vf t[4], u[2];
    UNROLL for (int i = 0; i < 4; ++i)
        t[i] = add(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    UNROLL for (int i = 0; i < 2; ++i) {
        __m256d x = _mm256_castps_pd(t[2 * i]), y = _mm256_castps_pd(t[2 * i + 1]);
        u[i] = add(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    return add(_mm256_permute2f128_ps(u[0], u[1], 0x20), _mm256_permute2f128_ps(u[0], u[1], 0x31));
}

INLINE vf exp2v(vf x) {
    vf bounded = vmax(x, set1(-127.f));
    vf whole = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf y = exp2_polynomial(sub(bounded, whole));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    y = mul(y, _mm256_castsi256_ps(power));
    // max(x, -127) hides a NaN; let it through, and make 2^-inf exactly 0
    y = _mm256_and_ps(y, _mm256_cmp_ps(x, set1(-126.f), _CMP_NLT_UQ));
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
