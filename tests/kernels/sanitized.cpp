// Random requests through every loop of the decode kernel, to be compiled with -fsanitize=address,undefined.
//
// Every stream lies in a heap buffer that ends with its last element, so that a read beyond it is caught; what lies between
// the used parts (other widths, unused capacity) is NaN, so that reading it shows. Results are held against plain loops in
// double precision. Usage: sanitized SEED COUNT; prints one line per failure and exits 1 if there was one.

#include "../../csrc/decode.cpp"

#include <cstdio>
#include <random>

namespace {

std::mt19937 generator;
int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }
int64_t one_of(std::initializer_list<int64_t> choices) { return choices.begin()[pick(0, static_cast<int64_t>(choices.size()) - 1)]; }
bool chance(int percent) { return pick(1, 100) <= percent; }
float normal() { return std::normal_distribution<float>()(generator); }

struct Block {  // exactly `bytes` bytes, misaligned by `shift`
    std::unique_ptr<char[]> memory;
    char* data = nullptr;
    explicit Block(int64_t bytes, int64_t shift = 0) : memory(new char[static_cast<size_t>(bytes + shift)]), data(memory.get() + shift) {}
};

struct StreamData {
    int64_t dtype, G, W, capacity, start, width;
    std::vector<int32_t> bounds;
    std::unique_ptr<Block> bytes, scales;
    std::vector<double> plain;  // (B, G, T, width)
};

void put(char* at, int64_t dtype, float x) {
    if (dtype == F32) std::memcpy(at, &x, 4);
    if (dtype == BF16) { bf16 y; from_float(x, y); std::memcpy(at, &y, 2); }
    if (dtype == F16) { f16 y; from_float(x, y); std::memcpy(at, &y, 2); }
    if (dtype == I8) *at = static_cast<char>(std::isnan(x) ? 99 : std::lrint(std::clamp(x * 40.f, -127.f, 127.f)));
}

double get(const char* at, int64_t dtype) {
    if (dtype == F32) { float x; std::memcpy(&x, at, 4); return x; }
    if (dtype == BF16) { bf16 x; std::memcpy(&x, at, 2); return to_float(x); }
    if (dtype == F16) { f16 x; std::memcpy(&x, at, 2); return to_float(x); }
    return static_cast<double>(*reinterpret_cast<const int8_t*>(at));
}

std::vector<int32_t> random_bounds(int64_t H) {
    std::vector<int32_t> bounds{0};
    while (bounds.back() < H) bounds.push_back(static_cast<int32_t>(std::min(H, bounds.back() + pick(1, H))));
    return bounds;
}

StreamData make_stream(int64_t B, int64_t H, int64_t T, int64_t width, bool flat) {
    StreamData s;
    s.dtype = pick(0, 3), s.width = width, s.start = chance(30) ? pick(1, 5) : 0;
    s.W = s.start + width + (chance(30) ? pick(1, 7) : 0);
    s.capacity = T + (chance(50) ? pick(1, 9) : 0);
    s.bounds = random_bounds(H);
    if (flat) s.bounds.assign(static_cast<size_t>(pick(1, 3)) + 1, 0);
    s.G = static_cast<int64_t>(s.bounds.size()) - 1;
    const int64_t item = ITEM_SIZE[s.dtype], rows = B * s.G * s.capacity;
    const int64_t last = T == 0 ? 0 : (rows - s.capacity + T - 1) * s.W + s.start + width;
    s.bytes = std::make_unique<Block>(last * item, item * pick(0, 3));
    for (int64_t i = 0; i < last; ++i) put(s.bytes->data + i * item, s.dtype, NAN);
    const int64_t last_scale = T == 0 ? 0 : rows - s.capacity + T;
    if (s.dtype == I8) s.scales = std::make_unique<Block>(last_scale * 4);
    for (int64_t i = 0; s.scales && i < last_scale; ++i) put(s.scales->data + 4 * i, F32, NAN);
    for (int64_t bg = 0; bg < B * s.G; ++bg)
        for (int64_t t = 0; t < T; ++t) {
            const float scale = s.dtype == I8 ? 0.02f + 0.01f * std::fabs(normal()) : 1.f;
            if (s.scales) put(s.scales->data + 4 * (bg * s.capacity + t), F32, scale);
            for (int64_t d = 0; d < width; ++d) {
                char* at = s.bytes->data + ((bg * s.capacity + t) * s.W + s.start + d) * item;
                put(at, s.dtype, normal());
                s.plain.push_back(get(at, s.dtype) * scale);
            }
        }
    return s;
}

void add_view(std::vector<int64_t>& request, const StreamData& s, int64_t, int64_t, bool even) {
    const int64_t item = ITEM_SIZE[s.dtype];
    auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); };
    request.insert(request.end(), {address(s.bytes->data + s.start * item), s.dtype, s.G * s.capacity * s.W,
                                   s.capacity * s.W, s.W, s.width, s.scales ? address(s.scales->data) : 0,
                                   s.G * s.capacity, s.capacity, 1, s.G, even ? 0 : address(s.bounds.data())});
}

int64_t shared(const StreamData& s, int64_t h) {
    int64_t g = 0;
    while (s.bounds[static_cast<size_t>(g) + 1] <= h) ++g;
    return g;
}

struct TermData {
    StreamData stream;
    std::vector<float> q, gain, cos, sin;
    int64_t rotate = 0, rotated = 0, rows = 0;
};

bool run_one(int64_t number, int64_t isa) {
    const int64_t B = pick(1, 2), H = pick(1, 5), M = chance(50) ? 1 : pick(2, 6);
    const int64_t T = one_of({0, 1, 2, 15, 16, 17, pick(3, 70), pick(60, 150), pick(200, 600)});
    const bool flat = chance(15), causal = chance(70);
    const int64_t window = chance(30) ? pick(1, 40) : -1;
    auto width = [] { return one_of({1, 3, 8, 16, 20, 33, 64, 72, 128, pick(1, 150)}); };
    auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); };

    std::vector<int32_t> q_pos, k_pos;
    for (int64_t b = 0; b < B; ++b) {
        const int64_t pad = chance(40) ? pick(0, T) : 0;
        const bool gaps = chance(20);
        int32_t at = 0;
        for (int64_t t = 0; t < T; ++t) {
            k_pos.push_back(t < pad ? -1 : at);
            if (t >= pad) at += gaps ? static_cast<int32_t>(pick(1, 3)) : 1;
            if (gaps && chance(5)) k_pos.back() = -1;
        }
        for (int64_t m = 0; m < M; ++m) q_pos.push_back(chance(5) ? -1 : std::max<int32_t>(0, at - static_cast<int32_t>(M - m)));
    }
    std::vector<float> tables[3];
    const int64_t delta_min = -pick(0, 30), table_size = 3 * T + 60 - delta_min;
    for (auto& table : tables)
        if (chance(30))
            for (int64_t i = 0; i < H * table_size; ++i) table.push_back(0.3f * normal());
    const bool same = chance(30) && !tables[0].empty();

    std::vector<TermData> terms(static_cast<size_t>(pick(1, 3)));
    StreamData value;
    const int64_t value_width = width();
    value = make_stream(B, H, T, value_width, flat);
    for (TermData& term : terms) {
        const int64_t D = width();
        term.stream = make_stream(B, H, T, D, false);
        for (int64_t i = 0; i < B * H * M * D; ++i) term.q.push_back(normal() / std::sqrt(static_cast<float>(D)));
        if (chance(30))
            for (int64_t i = 0; i < D; ++i) term.gain.push_back(1.f + 0.2f * normal());
        if (D > 1 && chance(30)) {
            term.rotate = pick(1, 2), term.rotated = 2 * pick(1, D / 2), term.rows = chance(50) ? 3 * T + 8 : 0;
            const int64_t rows = term.rows ? term.rows : B * T;
            for (int64_t i = 0; i < rows * term.rotated / 2; ++i) {
                const float angle = normal();
                term.cos.push_back(std::cos(angle)), term.sin.push_back(std::sin(angle));
            }
        }
    }
    // the value may be a view of the first scoring stream
    const StreamData* summed = &value;
    if (!flat && chance(60)) summed = &terms[0].stream;
    const int64_t heads = flat ? summed->G : 1, out_width = summed->width * heads;

    const int64_t out_dtype = pick(0, 2), out_item = ITEM_SIZE[out_dtype];
    Block out(B * H * M * out_width * out_item);
    std::vector<int64_t> request{static_cast<int64_t>(terms.size()), B, H, M, T, address(out.data), out_dtype,
                                 address(q_pos.data()), B > 1 ? M : 0, address(k_pos.data()), B > 1 ? T : 0, causal, window};
    for (int i = 0; i < 3; ++i) {
        const auto& table = i == 2 && same ? tables[0] : tables[i];
        request.insert(request.end(), {table.empty() ? 0 : address(table.data()), table_size});
    }
    request.insert(request.end(), {table_size, delta_min, flat});
    add_view(request, *summed, H, T, flat);
    for (TermData& term : terms) {
        const int64_t D = term.stream.width;
        request.insert(request.end(), {address(term.q.data()), F32, H * M * D, M * D, D,
                                       term.gain.empty() ? 0 : address(term.gain.data()), term.rotate, term.rotated,
                                       address(term.cos.data()), address(term.sin.data()),
                                       term.rows ? 0 : T * term.rotated / 2, term.rotated / 2, term.rows});
        add_view(request, term.stream, H, T, false);
    }
    if (qvattn_decode(request.data(), 0.7, isa, pick(1, 2)) != 0) return false;

    double worst = 0;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H; ++h)
            for (int64_t m = 0; m < M; ++m) {
                const int64_t q_at = q_pos[static_cast<size_t>(b * M + m)];
                std::vector<double> s(static_cast<size_t>(T), -INFINITY), weight(static_cast<size_t>(T), 0.0);
                std::vector<double> o(static_cast<size_t>(out_width), 0.0);
                double high = -INFINITY, total = 0;
                for (int64_t t = 0; t < T; ++t) {
                    const int64_t k_at = k_pos[static_cast<size_t>(b * T + t)];
                    if (k_at < 0 || (causal && k_at > q_at)) continue;
                    if (window >= 0 && (q_at - k_at >= window || (!causal && k_at - q_at >= window))) continue;
                    double sum = 0;
                    for (const TermData& term : terms) {
                        const int64_t D = term.stream.width, half = term.rotated / 2;
                        const double* k = &term.stream.plain[static_cast<size_t>(((b * term.stream.G + shared(term.stream, h)) * T + t) * D)];
                        const float* q = &term.q[static_cast<size_t>(((b * H + h) * M + m) * D)];
                        std::vector<double> x(k, k + D);
                        for (size_t i = 0; i < term.gain.size(); ++i) x[i] *= term.gain[i];
                        const std::vector<double> y = x;
                        const int64_t row = term.rows ? k_at : b * T + t;
                        for (int64_t i = 0; i < half; ++i) {
                            const size_t a = static_cast<size_t>(term.rotate == HALF ? i : 2 * i);
                            const size_t z = static_cast<size_t>(term.rotate == HALF ? half + i : 2 * i + 1);
                            const double c = term.cos[static_cast<size_t>(row * half + i)], n = term.sin[static_cast<size_t>(row * half + i)];
                            x[a] = y[a] * c - y[z] * n, x[z] = y[z] * c + y[a] * n;
                        }
                        for (int64_t d = 0; d < D; ++d) sum += x[static_cast<size_t>(d)] * q[d];
                    }
                    auto entry = [&](const std::vector<float>& table, double none) {
                        const int64_t at = std::clamp<int64_t>(q_at - k_at - delta_min, 0, table_size - 1);
                        return table.empty() ? none : static_cast<double>(table[static_cast<size_t>(h * table_size + at)]);
                    };
                    s[static_cast<size_t>(t)] = sum * 0.7 * entry(tables[0], 1) + entry(tables[1], 0);
                    weight[static_cast<size_t>(t)] = entry(same ? tables[0] : tables[2], 1);
                    high = std::max(high, s[static_cast<size_t>(t)]);
                }
                for (int64_t t = 0; t < T; ++t) {
                    if (s[static_cast<size_t>(t)] == -INFINITY) continue;
                    const double a = std::exp(s[static_cast<size_t>(t)] - high);
                    total += a;
                    for (int64_t i = 0; i < heads; ++i) {
                        const int64_t g = flat ? i : shared(*summed, h);
                        for (int64_t d = 0; d < summed->width; ++d)
                            o[static_cast<size_t>(i * summed->width + d)] += a * weight[static_cast<size_t>(t)] *
                                summed->plain[static_cast<size_t>(((b * summed->G + g) * T + t) * summed->width + d)];
                    }
                }
                for (int64_t d = 0; d < out_width; ++d) {
                    const double want = total > 0 ? o[static_cast<size_t>(d)] / total : 0.0;
                    const double got = get(out.data + (((b * H + h) * M + m) * out_width + d) * out_item, out_dtype);
                    const double rounding = out_dtype == F32 ? 3e-4 : out_dtype == F16 ? 2e-3 : 1e-2;
                    const double error = std::fabs(got - want) / (rounding * (1 + std::fabs(want)));
                    worst = std::isnan(got) ? INFINITY : std::max(worst, error);
                }
            }
    if (worst <= 1) return true;
    std::printf("request %lld on %s: B=%lld H=%lld M=%lld T=%lld terms=%zu value dtype %lld width %lld flat %d tables %d%d%d causal %d window %lld: error %g\n",
                static_cast<long long>(number), ISAS[isa].name, static_cast<long long>(B), static_cast<long long>(H),
                static_cast<long long>(M), static_cast<long long>(T), terms.size(), static_cast<long long>(summed->dtype),
                static_cast<long long>(summed->width), flat, !tables[0].empty(), !tables[1].empty(), same || !tables[2].empty(),
                causal, static_cast<long long>(window), worst);
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    generator.seed(static_cast<unsigned>(argc > 1 ? std::atoi(argv[1]) : 1));
    const int64_t count = argc > 2 ? std::atoi(argv[2]) : 200;
    int64_t bad = 0;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t isa = 0; isa < ISA_COUNT; ++isa)
            if (isa_works(static_cast<int>(isa))) bad += !run_one(i, isa);
    std::printf("%lld requests on each instruction set, %lld failed\n", static_cast<long long>(count), static_cast<long long>(bad));
    return bad != 0;
}
