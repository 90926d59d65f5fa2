// Streams in int8, for instruction sets without a fitting integer product: elements become floats as they are read.

constexpr int64_t INT8_STEP = N;

static int64_t int8_place(int64_t i) { return i; }
static int64_t int8_query_floats(int64_t width) { return (width + N - 1) / N * N; }

// q of `width` scaled floats, in place.
static void pack_int8_query(float*, int64_t) {}

static void score_int8(const ScoreJob& job, int64_t rows) { score<i8>(job, rows); }

// The weights of a row are first multiplied by the scales of the values.
static void sum_int8(ValueJob& job, int64_t rows, const float* scale, float* scratch, int64_t scratch_stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < job.n; ++j)
            scratch[r * scratch_stride + j] = job.weights[r * job.weights_stride + j] * scale[j];
    job.weights = scratch, job.weights_stride = scratch_stride;
    sum_values<i8>(job, rows);
}
