// The divergence of a student from its teacher, KL(teacher || student) at a temperature, with the cross-entropy of labels, over chunks of
// the heads' columns: sums chunk by chunk, then the gradients of each chunk of the student's logits. A block takes a row. Rows without a
// label are not read. Both models use the same operations, so equal logits have a divergence and gradients of exactly zero.
#include "common/reduce.cuh"
#include "loss/logits.cuh"

struct __align__(16) Row {
    float max, sum;                     // the student's largest logit so far, and the sum of exp(logit - max)
    float target;                       // the label's logit
    float warm_sum;                     // the sum of exp((logit - max) / temperature)
    float teacher_max, teacher_sum;     // the teacher's, at the temperature
    float difference;                   // the sum of exp((teacher - teacher_max) / temperature) * (teacher - student)
    float unused;
};

// Log-sum-exps of a row.
struct __align__(16) RowSums {
    float student;                      // of logits
    float warm, teacher;                // of logits / temperature
    float unused;
};

struct Arguments {
    const float* logits;        // f32 [rows, columns]: the student's
    const float* teacher;       // f32 [rows, columns]
    const int* labels;          // [rows]; negative: no loss
    Row* found;                 // [rows]
    const RowSums* sums;        // [rows]: gradient
    const float* weights;       // [rows]: gradient
    u16* dlogits;               // bf16 [rows, columns]: gradient
    int first_column;           // the token of the first column
    int columns;                // a multiple of 4, but for the ragged kernels
    int is_first;               // whether no chunk was before this one
    float cap, teacher_cap;     // logits are cap * tanh(logit / cap); 0: as they are
    float inverse;              // 1 / temperature
    float teacher_factor;       // (1 - label_share) * temperature: gradient
    float label_share;          // gradient
};

struct FinishArguments {
    const Row* found;           // [rows]
    const int* labels;          // [rows]
    const float* weights;       // [rows]
    RowSums* sums;              // [rows]
    double* totals;             // [3]: sums over rows of weight times the loss, the cross-entropy and the divergence
    int rows;
    float inverse;
    float teacher_factor;       // (1 - label_share) * temperature^2
    float label_share;
};

constexpr int THREADS = 256, FINISH_THREADS = 512;

// The sum of a thread's exponentials relative to its largest logit, and of their products with `factors`.
struct Exponentials {
    float largest = LOWEST, sum = 0, product = 0;

    template <int COUNT>
    __device__ __forceinline__ void add(const float (&x)[COUNT], const float* factors, float inverse) {
        float largest_of_all = x[0];
#pragma unroll
        for (int e = 1; e < COUNT; e++) largest_of_all = fmaxf(largest_of_all, x[e]);
        float before = largest;
        largest = fmaxf(largest, largest_of_all);
        float kept = __expf((before - largest) * inverse);
        product *= kept;
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            float exponential = __expf((x[e] - largest) * inverse);
            sum = e == 0 ? fmaf(sum, kept, exponential) : sum + exponential;
            if (factors) product = fmaf(exponential, factors[e], product);
        }
    }

    // The sums of a block relative to the largest logit of a row, including those `before` it.
    template <bool HAS_FACTORS>
    __device__ __forceinline__ void join(float before, float inverse, float* by_warp) {
        float own = largest;
        largest = fmaxf(before, block_max(own, by_warp, THREADS / WARP));
        float kept = __expf((own - largest) * inverse);
        sum = block_sum(sum * kept, by_warp, THREADS / WARP);
        if (HAS_FACTORS) product = block_sum(product * kept, by_warp, THREADS / WARP);
    }
};

template <int COUNT>
__device__ __forceinline__ void chunk(const Arguments& a) {
    __shared__ float by_warp[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x, label = a.labels[row];
    if (label < 0) return;
    const float* logits = a.logits + (size_t)row * a.columns;
    const float* teacher_logits = a.teacher + (size_t)row * a.columns;
    bool is_warm = a.inverse != 1;
    Exponentials student, warm, teacher;
#pragma unroll 2
    for (int i = threadIdx.x; i < a.columns / COUNT; i += THREADS) {
        float x[COUNT], y[COUNT], differences[COUNT];
        load_logits(logits + COUNT * i, a.cap, x);
        load_logits(teacher_logits + COUNT * i, a.teacher_cap, y);
#pragma unroll
        for (int e = 0; e < COUNT; e++) differences[e] = y[e] - x[e];
        student.add(x, nullptr, 1);
        if (is_warm) warm.add(x, nullptr, a.inverse);
        teacher.add(y, differences, a.inverse);
    }
    Row old = a.found[row];
    float before = a.is_first ? LOWEST : old.max, teacher_before = a.is_first ? LOWEST : old.teacher_max;
    student.join<false>(before, 1, by_warp);
    if (is_warm) warm.join<false>(before, a.inverse, by_warp);
    teacher.join<true>(teacher_before, a.inverse, by_warp);
    if (threadIdx.x > 0) return;
    if (!a.is_first) {
        student.sum = fmaf(old.sum, __expf(before - student.largest), student.sum);
        warm.sum = fmaf(old.warm_sum, __expf((before - student.largest) * a.inverse), warm.sum);
        float kept = __expf((teacher_before - teacher.largest) * a.inverse);
        teacher.sum = fmaf(old.teacher_sum, kept, teacher.sum);
        teacher.product = fmaf(old.difference, kept, teacher.product);
    }
    int column = label - a.first_column;
    bool is_here = 0 <= column && column < a.columns;
    a.found[row] = {student.largest, student.sum, is_here ? capped(logits[column], a.cap) : old.target, is_warm ? warm.sum : student.sum,
                    teacher.largest, teacher.sum, teacher.product, 0};
}

// weight * (teacher_factor * (softmax(student / T) - softmax(teacher / T)) + label_share * (softmax(student) - onehot)), times the cap's
// derivative 1 - (l / cap)^2 for a capped logit l.
template <int COUNT>
__device__ __forceinline__ void gradient(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x, label = a.labels[row], pieces = a.columns / COUNT;
    const float* logits = a.logits + (size_t)row * a.columns;
    const float* teacher = a.teacher + (size_t)row * a.columns;
    u16* dlogits = a.dlogits + (size_t)row * a.columns;
    if (label < 0) {
        const float zeros[COUNT] = {};
        for (int i = threadIdx.x; i < pieces; i += THREADS) store_gradients(dlogits + COUNT * i, zeros);
        return;
    }
    int target = label - a.first_column;
    float weight = a.weights[row];
    RowSums sums = a.sums[row];
#pragma unroll 2
    for (int i = threadIdx.x; i < pieces; i += THREADS) {
        float x[COUNT], y[COUNT];
        load_logits(logits + COUNT * i, a.cap, x);
        load_logits(teacher + COUNT * i, a.teacher_cap, y);
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            float slope = a.cap > 0 ? 1 - (x[e] / a.cap) * (x[e] / a.cap) : 1;
            float own = __expf(fmaf(x[e], a.inverse, -sums.warm)), of_teacher = __expf(fmaf(y[e], a.inverse, -sums.teacher));
            float g = a.teacher_factor * (own - of_teacher);
            if (a.label_share > 0) g += a.label_share * (__expf(x[e] - sums.student) - (COUNT * i + e == target ? 1 : 0));
            x[e] = weight * g * slope;
        }
        store_gradients(dlogits + COUNT * i, x);
    }
}

// Grid of these four: (rows). The ragged ones take rows of any length.
extern "C" __global__ void __launch_bounds__(THREADS) divergence_chunk(const __grid_constant__ Arguments a) { chunk<4>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) divergence_chunk_ragged(const __grid_constant__ Arguments a) { chunk<1>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) divergence_gradient(const __grid_constant__ Arguments a) { gradient<4>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) divergence_gradient_ragged(const __grid_constant__ Arguments a) { gradient<1>(a); }

// Grid: (1)
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) divergence_finish(const __grid_constant__ FinishArguments a) {
    __shared__ double terms[3][FINISH_THREADS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    double of_labels = 0, of_teacher = 0, loss = 0;
    for (int row = threadIdx.x; row < a.rows; row += FINISH_THREADS) {
        if (a.labels[row] < 0) {
            a.sums[row] = {};
            continue;
        }
        Row r = a.found[row];
        float weight = a.weights[row], log_warm = logf(r.warm_sum), log_teacher = logf(r.teacher_sum);
        RowSums sums = {r.max + logf(r.sum), fmaf(r.max, a.inverse, log_warm), fmaf(r.teacher_max, a.inverse, log_teacher), 0};
        // Differences before sums: nearly equal numbers have lost nothing yet.
        float apart = (r.max - r.teacher_max) * a.inverse + (log_warm - log_teacher);
        float divergence = r.difference / r.teacher_sum * a.inverse + apart, entropy = sums.student - r.target;
        a.sums[row] = sums;
        of_labels += weight * entropy;
        of_teacher += weight * divergence;
        loss += weight * (a.teacher_factor * divergence + a.label_share * entropy);
    }
    terms[0][threadIdx.x] = loss, terms[1][threadIdx.x] = of_labels, terms[2][threadIdx.x] = of_teacher;
    __syncthreads();
    for (int half = FINISH_THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half)
            for (int i = 0; i < 3; i++) terms[i][threadIdx.x] += terms[i][threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x < 3) a.totals[threadIdx.x] = terms[threadIdx.x][0];
}
