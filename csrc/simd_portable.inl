// No instruction set assumed: 4 lanes of compiler vectors (SSE2 on x86-64, NEON on AArch64).

constexpr int N = 4;
constexpr int ROW_BLOCK = 4;
constexpr int VALUE_VECTORS = 8;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
INLINE vf exp2_polynomial(vf x);

INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf zero() { return set1(0.f); }
INLINE vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
INLINE vf add(vf a, vf b) { return a + b; }
INLINE vf sub(vf a, vf b) { return a - b; }
INLINE vf mul(vf a, vf b) { return a * b; }
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE float hsum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
INLINE float hmax(vf a) {
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
// Whether a lane is above x, or not a number.
INLINE bool any_above(vf a, float x) { return !(hmax(a) <= x); }
INLINE vf reverse(vf a) { return vf{a[3], a[2], a[1], a[0]}; }
INLINE void deinterleave(vf& x, vf& y) {
    vf a{x[0], x[2], y[0], y[2]}, b{x[1], x[3], y[1], y[3]};
    x = a, y = b;
}

typedef uint32_t vu __attribute__((vector_size(16)));
typedef uint16_t vu16 __attribute__((vector_size(8)));
typedef int8_t vi8 __attribute__((vector_size(4)));
template <class Vector, class E>
INLINE Vector load_bits(const E* p) {
    Vector x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

INLINE vf load(const bf16* p) { return reinterpret_cast<vf>(__builtin_convertvector(load_bits<vu16>(p), vu) << 16); }
INLINE vf load(const f16* p) {  // as to_float
    const vu bits = __builtin_convertvector(load_bits<vu16>(p), vu), rest = (bits & 0x7fffu) << 13;
    const vu number = reinterpret_cast<vu>(reinterpret_cast<vf>(rest) * 0x1p112f);
    const vu whole = rest >= 0x0f800000u ? number | 0x7f800000u : number;
    return reinterpret_cast<vf>(whole | (bits & 0x8000u) << 16);
}
INLINE vf load(const i8* p) { return __builtin_convertvector(load_bits<vi8>(p), vf); }
template <class E>
INLINE vf load_part(const E* p, int n) {
    E part[N] = {};
    for (int i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
}

INLINE void load_pairs(const bf16* p, vf* out) {
    const vu x = load_bits<vu>(p);
    out[0] = reinterpret_cast<vf>(x << 16);
    out[1] = reinterpret_cast<vf>(x & 0xffff0000u);
}
INLINE void load_pairs_part(const bf16* p, int n, vf* out) {
    bf16 part[2 * N] = {};
    for (int i = 0; i < n; ++i) part[i] = p[i];
    load_pairs(part, out);
}

INLINE vf reduce(const vf* a) { return vf{hsum(a[0]), hsum(a[1]), hsum(a[2]), hsum(a[3])}; }

INLINE vf exp2v(vf x) {
    vf bounded = vmax(x, set1(-127.f));
    // adding and taking away 1.5 * 2^23 rounds to the nearest whole number
    vf whole = (bounded + 12582912.f) - 12582912.f;
    vf y = exp2_polynomial(bounded - whole);
    vi power = (__builtin_convertvector(whole, vi) + 127) << 23;
    y = y * reinterpret_cast<vf>(power);
    y = x < -126.f ? zero() : y;
    return x != x ? x : y;
}
