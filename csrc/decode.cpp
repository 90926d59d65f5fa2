// The native CPU decode kernel: attention of a few queries over cached streams, every stream read once.
//
// One translation unit, C++17, plain C interface, no PyTorch. The loops are written once (`decode_body.inl`) and compiled
// for each instruction set (`simd_*.inl`), chosen at run time. It must never read outside the streams it is given, not
// even in the last tile, and never allocates per token.
//
// Shape letters: B batch, H query heads, G shared heads of a stream, M query length, T key length, D width of a view.
//
// How a request is served (numbers refer to decode_body.inl):
//   * Query heads fall into *components*: the smallest runs of heads that share no stream with other heads.
//   * A *unit* is one batch row, one component and one range of keys; units run in parallel, and the partial softmaxes
//     of a split range are merged exactly. How the keys are split depends on the request only, not on the threads.
//   * In a unit, keys are taken tile by tile: score the tile for all query rows, online softmax, sum the tile's values
//     while it is still in the cache. A stream that scores and is summed is thereby fetched from memory once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define QVATTN_X86 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct i8 { int8_t value; };

enum Dtype : int64_t { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 };
constexpr int64_t ITEM_SIZE[] = {4, 2, 2, 1};

inline float from_bits(uint32_t x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline uint32_t to_bits(float x) {
    uint32_t y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(i8 x) { return x.value; }
inline float to_float(f16 x) {
    uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // 2^112 shifts the exponent, and makes normal numbers of subnormal ones
    return from_bits(sign | to_bits(from_bits(rest << 13) * 0x1p112f));
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bf16& y) {
    uint32_t u = to_bits(x);
    y.bits = static_cast<uint16_t>(x != x ? 0x7fc0u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
inline void from_float(float x, f16& y) {
    uint32_t u = to_bits(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) { y.bits = static_cast<uint16_t>(sign | 0x7e00u); return; }
    if (rest >= 0x477ff000u) { y.bits = static_cast<uint16_t>(sign | 0x7c00u); return; }  // rounds to infinity
    if (rest < 0x38800000u) {  // subnormal: let the adder round
        y.bits = static_cast<uint16_t>(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000u));
        return;
    }
    rest += 0xfffu + (rest >> 13 & 1u);
    y.bits = static_cast<uint16_t>(sign | (rest - 0x38000000u) >> 13);
}

struct Heads {  // which run of query heads reads shared head g: bounds[g] .. bounds[g + 1]
    const int32_t* bounds = nullptr;
    std::vector<int32_t> own;
    int64_t count = 0;
};

struct View {  // a view of a stream (B, G, T, D) with strides in elements
    const char* data = nullptr;
    int64_t dtype = 0, stride_b = 0, stride_g = 0, stride_t = 0, width = 0;
    const float* scale = nullptr;  // (B, G, T), for int8
    int64_t scale_b = 0, scale_g = 0, scale_t = 0;
    Heads heads;

    int64_t row_bytes() const { return stride_t * ITEM_SIZE[dtype]; }
    const char* at(int64_t b, int64_t g, int64_t t) const {
        return data + (b * stride_b + g * stride_g + t * stride_t) * ITEM_SIZE[dtype];
    }
    const float* scales(int64_t b, int64_t g, int64_t t) const {
        return scale ? scale + b * scale_b + g * scale_g + t * scale_t : nullptr;
    }
};

enum Rotate : int64_t { NONE = 0, HALF = 1, INTERLEAVED = 2 };

struct Term {
    View keys;
    const char* q = nullptr;
    int64_t q_dtype = 0, q_b = 0, q_h = 0, q_m = 0;
    const float* gain = nullptr;
    int64_t rotate = NONE, rotated = 0;        // how, and how many leading elements
    const float *cos = nullptr, *sin = nullptr;  // rows of rotated / 2
    int64_t cos_b = 0, cos_row = 0, rows = 0;  // rows > 0: looked up by position; 0: one row a token
    bool early = false;                        // scored before the value groups, since it spans several of them
    bool fetches = true;                       // its memory is its own, not the value's
    int64_t padded = 0, q_offset = 0;          // width and place of its queries in the scratch
};

struct Table {
    const float* data = nullptr;
    int64_t stride = 0;
};

struct Tile {  // positions of one tile of keys in one row
    int32_t low, high;  // over real tokens; high = -1: padding only
    int32_t start;      // the first position where they run on without a gap, else -1
    bool padding;       // some are padding
};

struct Component {
    int32_t h0, h1;
    int32_t v0, v1;  // shared heads of the value (flat: all of them)
};

struct Unit {
    int64_t b, component, t0, t1, slot;  // slot: where its partial result goes, -1: straight to the output
};

struct Item {
    int64_t b, component, first_slot, slots;
};

struct Plan {
    int64_t B, H, M, T;
    char* out;
    int64_t out_dtype;
    const int32_t *q_pos, *k_pos;
    int64_t q_pos_b, k_pos_b;
    bool causal;
    int64_t window;  // -1: none
    float scale;
    Table mul, add, value_mul;
    int64_t table_size, delta_min;
    View value;
    bool flat;
    std::vector<Term> terms;
    bool any_early = false;

    int64_t out_width, padded_value;  // padded_value: of one accumulator row
    int64_t tile, chunk;                     // keys per tile; keys per early pass, a multiple of the tile
    int64_t max_rows, q_floats, rotated_floats, scratch_floats, partial_floats;
    std::vector<Component> components;
    std::vector<Tile> tiles;  // [row of k_pos][tile]
    int64_t tiles_per_row;
    std::vector<Unit> units;
    std::vector<Item> items;

    const Tile& tile_at(int64_t b, int64_t t) const { return tiles[(k_pos_b ? b : 0) * tiles_per_row + t / tile]; }
    const int32_t* positions(int64_t b) const { return k_pos + b * k_pos_b; }
    int64_t query_position(int64_t b, int64_t m) const { return q_pos[b * q_pos_b + m]; }
};

enum Sight { HIDDEN = 0, PARTLY = 1, WHOLE = 2 };

// Whether a query at position q sees none, some or all keys of a tile.
inline Sight sight(const Plan& plan, const Tile& tile, int64_t q) {
    if (tile.high < 0) return HIDDEN;
    bool all = !tile.padding;
    if (plan.causal) {
        if (tile.low > q) return HIDDEN;
        all = all && tile.high <= q;
    }
    if (plan.window >= 0) {
        if (tile.high <= q - plan.window) return HIDDEN;
        all = all && tile.low > q - plan.window;
        if (!plan.causal) {
            if (tile.low >= q + plan.window) return HIDDEN;
            all = all && tile.high < q + plan.window;
        }
    }
    return all ? WHOLE : PARTLY;
}

inline bool visible(const Plan& plan, int64_t q, int64_t k) {
    if (k < 0 || (plan.causal && k > q)) return false;
    if (plan.window < 0) return true;
    return q - k < plan.window && (plan.causal || k - q < plan.window);
}

inline bool tile_seen(const Plan& plan, const Tile& tile, int64_t b) {
    for (int64_t m = 0; m < plan.M; ++m)
        if (sight(plan, tile, plan.query_position(b, m)) != HIDDEN) return true;
    return false;
}

// The shared head that query head h reads.
inline int64_t shared_head(const Heads& heads, int64_t h) {
    return std::upper_bound(heads.bounds, heads.bounds + heads.count + 1, static_cast<int32_t>(h)) - heads.bounds - 1;
}

// Asks for the memory at `at` bytes behind p. A hint, never an access, so it may point anywhere.
INLINE void fetch(const void* p, int64_t at) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(p) + at), 0, 3);
}
INLINE void fetch_far(const void* p, int64_t at) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(p) + at), 0, 2);
}

#define INT8_FILE "int8_plain.inl"
namespace portable {
#define SIMD_FILE "simd_portable.inl"
#include "decode_body.inl"
#undef SIMD_FILE
}  // namespace portable

#ifdef QVATTN_X86

#if defined(__clang__)
#define BEGIN_TARGET(features) \
    _Pragma(STRING(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_TARGET(features) _Pragma("GCC push_options") _Pragma(STRING(GCC target(features)))
#define END_TARGET _Pragma("GCC pop_options")
#endif
#define STRING(x) #x

BEGIN_TARGET("avx2,fma,f16c")
namespace avx2 {
#define SIMD_FILE "simd_avx2.inl"
#include "decode_body.inl"
#undef SIMD_FILE
}  // namespace avx2
END_TARGET

#undef INT8_FILE
#define INT8_FILE "int8_vnni.inl"
BEGIN_TARGET("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace avx512 {
#define SIMD_FILE "simd_avx512.inl"
#include "decode_body.inl"
#undef SIMD_FILE
}  // namespace avx512
END_TARGET
#undef INT8_FILE

#endif

struct Isa {
    const char* name;
    int64_t lanes;
    void (*run_unit)(const Plan&, const Unit&, const Unit* after, float* scratch, float* partials);
    void (*merge)(const Plan&, const Item&, float* partials);
    int64_t (*query_floats)(int64_t dtype, int64_t width);
    int64_t (*sum_floats)(int64_t dtype, int64_t width);
    Tile (*scan)(const int32_t* positions, int64_t n);
    double (*read)(const char*, int64_t);
};

#define QVATTN_ISA(name) \
    {#name, name::N, name::run_unit, name::merge, name::query_floats, name::sum_floats, name::scan, name::read_bytes}
const Isa ISAS[] = {
    QVATTN_ISA(portable),
#ifdef QVATTN_X86
    QVATTN_ISA(avx2),
    QVATTN_ISA(avx512),
#endif
};
constexpr int ISA_COUNT = sizeof(ISAS) / sizeof(ISAS[0]);

bool isa_works(int i) {
#ifdef QVATTN_X86
    __builtin_cpu_init();
    if (i == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (i == 2)
        return isa_works(1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return i == 0;
}

int best_isa() {
    static const int best = [] {
        int i = ISA_COUNT - 1;
        while (!isa_works(i)) --i;
        return i;
    }();
    return best;
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// ---- reading the request ---------------------------------------------------------------------------------------------

struct Reader {  // the request is a row of integers, in the order that kernels/cpu.py writes
    const int64_t* at;
    int64_t next() { return *at++; }
    template <class P>
    const P* pointer() { return reinterpret_cast<const P*>(static_cast<intptr_t>(next())); }
};

constexpr int64_t LAYOUT_VERSION = 1;

void read_heads(Reader& in, Heads& heads, int64_t H, bool flat) {
    heads.count = in.next();
    heads.bounds = in.pointer<int32_t>();
    if (heads.bounds) return;
    heads.own.resize(heads.count + 1);
    int64_t each = flat ? 0 : H / heads.count;
    for (int64_t g = 0; g <= heads.count; ++g) heads.own[g] = static_cast<int32_t>(g * each);
    heads.bounds = heads.own.data();
}

void read_view(Reader& in, View& view, int64_t H, bool flat) {
    view.data = in.pointer<char>();
    view.dtype = in.next();
    view.stride_b = in.next(), view.stride_g = in.next(), view.stride_t = in.next();
    view.width = in.next();
    view.scale = in.pointer<float>();
    view.scale_b = in.next(), view.scale_g = in.next(), view.scale_t = in.next();
    read_heads(in, view.heads, H, flat);
}

Table read_table(Reader& in) {
    Table table;
    table.data = in.pointer<float>();
    table.stride = in.next();
    return table;
}

void read_request(Plan& plan, Reader in) {
    int64_t terms = in.next();
    plan.B = in.next(), plan.H = in.next(), plan.M = in.next(), plan.T = in.next();
    plan.out = const_cast<char*>(in.pointer<char>());
    plan.out_dtype = in.next();
    plan.q_pos = in.pointer<int32_t>(), plan.q_pos_b = in.next();
    plan.k_pos = in.pointer<int32_t>(), plan.k_pos_b = in.next();
    plan.causal = in.next() != 0, plan.window = in.next();
    plan.mul = read_table(in), plan.add = read_table(in), plan.value_mul = read_table(in);
    plan.table_size = in.next(), plan.delta_min = in.next();
    plan.flat = in.next() != 0;
    read_view(in, plan.value, plan.H, plan.flat);
    plan.terms.resize(terms);
    for (Term& term : plan.terms) {
        term.q = in.pointer<char>();
        term.q_dtype = in.next(), term.q_b = in.next(), term.q_h = in.next(), term.q_m = in.next();
        term.gain = in.pointer<float>();
        term.rotate = in.next(), term.rotated = in.next();
        term.cos = in.pointer<float>(), term.sin = in.pointer<float>();
        term.cos_b = in.next(), term.cos_row = in.next(), term.rows = in.next();
        read_view(in, term.keys, plan.H, false);
    }
}

// ---- planning --------------------------------------------------------------------------------------------------------

bool has_bound(const Heads& heads, int32_t h) {
    return std::binary_search(heads.bounds, heads.bounds + heads.count + 1, h);
}

void plan_components(Plan& plan) {
    for (Term& term : plan.terms) {
        term.early = false;
        if (plan.flat) continue;  // one value group over all heads
        for (int64_t g = 1; g < plan.value.heads.count; ++g)
            term.early = term.early || !has_bound(term.keys.heads, plan.value.heads.bounds[g]);
        plan.any_early = plan.any_early || term.early;
    }
    int32_t begin = 0;
    for (int32_t h = 1; h <= plan.H; ++h) {
        bool split = h == plan.H || (!plan.flat && has_bound(plan.value.heads, h));
        for (const Term& term : plan.terms) split = split && has_bound(term.keys.heads, h);
        if (!split) continue;
        Component c{begin, h, 0, static_cast<int32_t>(plan.value.heads.count)};
        if (!plan.flat) {
            c.v0 = static_cast<int32_t>(shared_head(plan.value.heads, begin));
            c.v1 = static_cast<int32_t>(shared_head(plan.value.heads, h - 1)) + 1;
        }
        plan.components.push_back(c);
        begin = h;
    }
}

constexpr int64_t TILE_BYTES = 16 << 10, SCORE_BYTES = 128 << 10, UNIT_BYTES = 512 << 10, CHUNK = 1024;

void plan_tiles(const Isa& isa, Plan& plan) {
    const View& value = plan.value;
    for (Term& term : plan.terms) {
        const View& keys = term.keys;
        int64_t apart = std::abs(keys.data - value.data);
        term.fetches = !(keys.row_bytes() == value.row_bytes() && apart < value.row_bytes() &&
                         keys.heads.count == value.heads.count);
    }
    plan.tile = std::clamp<int64_t>(TILE_BYTES / std::max<int64_t>(value.width * ITEM_SIZE[value.dtype], 1), 16, 128);
    plan.tile = plan.tile / 16 * 16;
    plan.max_rows = 0;
    for (const Component& c : plan.components) plan.max_rows = std::max<int64_t>(plan.max_rows, (c.h1 - c.h0) * plan.M);
    // with many rows the sums, not the memory, take the time: then longer tiles pay for their loads and stores
    if (plan.flat || plan.max_rows > 4 * (plan.components[0].v1 - plan.components[0].v0)) plan.tile = std::max<int64_t>(plan.tile, 64);
    plan.chunk = plan.tile;
    if (plan.any_early) {  // long runs suit the hardware's own fetching; but scores must stay in the second-level cache,
        // and there must be enough chunks for all threads
        const int64_t affordable = SCORE_BYTES / (4 * plan.max_rows);
        const int64_t fair = plan.T * plan.B * static_cast<int64_t>(plan.components.size()) / 8;
        plan.chunk = std::max<int64_t>(std::min({CHUNK, affordable, fair}) / plan.tile, 1) * plan.tile;
    }
    plan.tiles_per_row = (plan.T + plan.tile - 1) / plan.tile;
    int64_t rows = plan.k_pos_b ? plan.B : 1;
    plan.tiles.resize(rows * plan.tiles_per_row);
    for (int64_t b = 0; b < rows; ++b)
        for (int64_t i = 0; i < plan.tiles_per_row; ++i) {
            int64_t t = i * plan.tile;
            plan.tiles[b * plan.tiles_per_row + i] =
                isa.scan(plan.k_pos + b * plan.k_pos_b + t, std::min(plan.tile, plan.T - t));
        }
}

void plan_scratch(const Isa& isa, Plan& plan) {
    const int64_t lanes = isa.lanes;
    const View& value = plan.value;
    plan.out_width = plan.flat ? value.width * value.heads.count : value.width;
    int64_t one = isa.sum_floats(value.dtype, value.width);
    plan.padded_value = plan.flat ? one * value.heads.count : one;
    int64_t q = 0, widest = 0;
    for (Term& term : plan.terms) {
        term.padded = isa.query_floats(term.rotate ? F32 : term.keys.dtype, term.keys.width);
        term.q_offset = q;
        q += term.padded * plan.max_rows;
        widest = std::max(widest, term.rotate ? term.padded : 0);
    }
    plan.q_floats = q;
    plan.partial_floats = plan.max_rows * (plan.padded_value + 1 + lanes);  // sums, shift, partial weights
    plan.rotated_floats = widest * plan.tile;
    int64_t parts[] = {q, plan.max_rows * plan.chunk, plan.max_rows * plan.tile, plan.max_rows, plan.tile, plan.tile,
                       plan.tile, plan.rotated_floats, plan.partial_floats};  // see lay_out
    plan.scratch_floats = 0;
    for (int64_t part : parts) plan.scratch_floats += round_up(part, 16);
}

// The range of keys that some query of row b sees, in whole tiles.
void seen_range(const Plan& plan, int64_t b, int64_t& t0, int64_t& t1) {
    int64_t low = 0, high = plan.tiles_per_row;
    while (low < high && !tile_seen(plan, plan.tile_at(b, low * plan.tile), b)) ++low;
    while (high > low && !tile_seen(plan, plan.tile_at(b, (high - 1) * plan.tile), b)) --high;
    t0 = low * plan.tile, t1 = std::min(high * plan.tile, plan.T);
}

int64_t token_bytes(const Plan& plan, const Component& c) {
    const View& value = plan.value;
    int64_t bytes = (c.v1 - c.v0) * value.width * ITEM_SIZE[value.dtype];
    for (const Term& term : plan.terms)
        if (term.fetches)
            bytes += (shared_head(term.keys.heads, c.h1 - 1) - shared_head(term.keys.heads, c.h0) + 1) *
                     term.keys.width * ITEM_SIZE[term.keys.dtype];
    return std::max<int64_t>(bytes, 1);
}

int64_t plan_units(Plan& plan) {
    int64_t slots = 0, components = static_cast<int64_t>(plan.components.size());
    for (int64_t b = 0; b < plan.B; ++b) {
        int64_t t0, t1;
        seen_range(plan, b, t0, t1);
        for (int64_t c = 0; c < components; ++c) {
            int64_t length = std::max<int64_t>(UNIT_BYTES / token_bytes(plan, plan.components[c]), 256);
            int64_t pieces = std::max<int64_t>((t1 - t0 + length - 1) / length, 1);
            length = round_up((t1 - t0 + pieces - 1) / pieces, plan.chunk);
            plan.items.push_back(Item{b, c, slots, 0});
            if (t1 - t0 <= length) {
                plan.units.push_back(Unit{b, c, t0, t1, -1});
                continue;
            }
            for (int64_t t = t0; t < t1; t += length, ++plan.items.back().slots)
                plan.units.push_back(Unit{b, c, t, std::min(t + length, t1), slots++});
        }
    }
    return slots;
}

// Memory that lives as long as the calling thread and only grows, so that steps neither allocate nor fault pages in.
float* arena(int64_t floats) {
    struct Free { void operator()(float* p) const { std::free(p); } };
    static thread_local std::unique_ptr<float, Free> memory;
    static thread_local int64_t size = 0;
    if (floats > size) {
        memory.reset();
        size = 0;
        memory.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(round_up(4 * floats, 64)))));
        if (!memory) throw std::bad_alloc();
        size = floats;
    }
    return memory.get();
}

void run(const Isa& isa, Plan& plan, int threads) {
    plan_components(plan);
    plan_tiles(isa, plan);
    plan_scratch(isa, plan);
    int64_t slots = plan_units(plan), units = static_cast<int64_t>(plan.units.size());
    int64_t items = static_cast<int64_t>(plan.items.size());
    threads = static_cast<int>(std::clamp<int64_t>(units, 1, std::max(threads, 1)));
    int64_t work = 0;
    for (const Unit& unit : plan.units) work += (unit.t1 - unit.t0) * token_bytes(plan, plan.components[unit.component]);
    if (work < 32 << 10) threads = 1;  // waking a thread would take longer
    float* memory = arena(threads * plan.scratch_floats + slots * plan.partial_floats);
    float* partials = memory + threads * plan.scratch_floats;
    // a thread takes a few units in a row, since while one ends the next one's memory can already be fetched
    const int64_t batch = std::clamp<int64_t>(units / (8 * threads), 1, 8), batches = (units + batch - 1) / batch;
    auto run_batch = [&](int64_t i, float* scratch) {
        const Unit *unit = &plan.units[i * batch], *end = plan.units.data() + std::min((i + 1) * batch, units);
        for (; unit != end; ++unit) isa.run_unit(plan, *unit, unit + 1 == end ? nullptr : unit + 1, scratch, partials);
    };
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float* scratch = memory + omp_get_thread_num() * plan.scratch_floats;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < batches; ++i) run_batch(i, scratch);
        if (slots) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < items; ++i)
                if (plan.items[i].slots) isa.merge(plan, plan.items[i], partials);
        }
    }
#else
    for (int64_t i = 0; i < batches; ++i) run_batch(i, memory);
    for (int64_t i = 0; i < items; ++i)
        if (plan.items[i].slots) isa.merge(plan, plan.items[i], partials);
#endif
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Which layout of requests this library reads; kernels/cpu.py refuses another one.
EXPORT int64_t qvattn_layout_version() { return LAYOUT_VERSION; }

// The name of instruction set i, or null; and whether this machine has it.
EXPORT const char* qvattn_isa_name(int64_t i) { return i >= 0 && i < ISA_COUNT ? ISAS[i].name : nullptr; }
EXPORT int64_t qvattn_isa_works(int64_t i) { return i >= 0 && i < ISA_COUNT && isa_works(static_cast<int>(i)); }
EXPORT int64_t qvattn_has_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

// Serves one request. isa: -1 for the best. Returns 0, or 1 when memory ran out, 2 for an instruction set that is not here.
EXPORT int64_t qvattn_decode(const int64_t* request, double scale, int64_t isa, int64_t threads) {
    if (isa >= ISA_COUNT || (isa >= 0 && !isa_works(static_cast<int>(isa)))) return 2;
    try {
        Plan plan;
        plan.scale = static_cast<float>(scale);
        read_request(plan, Reader{request});
        run(ISAS[isa < 0 ? best_isa() : isa], plan, static_cast<int>(threads));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// Reads `bytes` bytes once with all threads, for measuring what the machine can do. Returns a sum over them.
EXPORT double qvattn_read(const char* data, int64_t bytes, int64_t isa, int64_t threads) {
    const Isa& with = ISAS[isa < 0 || isa >= ISA_COUNT || !isa_works(static_cast<int>(isa)) ? best_isa() : isa];
    constexpr int64_t piece = 512 << 10;
    int64_t pieces = (bytes + piece - 1) / piece;
    double sum = 0;
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(dynamic, 1) reduction(+ : sum)
#endif
    for (int64_t i = 0; i < pieces; ++i) sum += with.read(data + i * piece, std::min(piece, bytes - i * piece));
    return sum;
}
