// Cross-entropy of rows of logits, each read once forward and once backward; one block, or one warp (LANES = 32), per row.
// ops: fused_cross_entropy, fused_linear_cross_entropy
#include "common.cuh"

#ifndef LOGIT  // defined by ops/bridge.py: the types of logits and targets, and the threads of a row
#define LOGIT float
#define LABEL int64
#define LANES 512
#endif
#ifndef SOFTCAP  // 1: the softmax is of cap * tanh(logit / cap)
#define SOFTCAP 0
#endif

#define LOG2_E 1.44269504088896341f
#define LOWEST -3.402823466e38f  // not -inf: -inf - -inf is NaN
#define BATCH (SOFTCAP ? 2 : 4)  // loads in flight per thread: more would spill registers with a cap

constexpr int WIDTH = 16 / sizeof(LOGIT);
typedef Pack<LOGIT, WIDTH> Wide;

// Row r starts at r / inner * outer_stride + r % inner * inner_stride: this also covers slices of a larger tensor.
__device__ __forceinline__ int64 start_of(int64 row, int64 inner, int64 outer_stride, int64 inner_stride) {
  return row / inner * outer_stride + row % inner * inner_stride;
}

__device__ __forceinline__ int lane_of_row() { return threadIdx.x % LANES; }
__device__ __forceinline__ int64 own_row() {
  return (int64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
}

__device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}

__device__ __forceinline__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return 1 / x;
#endif
}

// What the softmax sees of a logit, to 2e-7 of the cap (tanhf would spill registers), and the derivative of that.
struct Cap {
  float size = 0, inverse = 0;

  __device__ __forceinline__ float of(float x) const {
    return SOFTCAP ? size - 2 * size * reciprocal(1 + power_of_two(x * inverse * (2 * LOG2_E))) : x;
  }
  __device__ __forceinline__ float slope_at(float seen) const {
    return SOFTCAP ? 1 - seen * inverse * (seen * inverse) : 1;
  }
};

__device__ __forceinline__ Cap cap_of(double softcap) { return SOFTCAP ? Cap{(float)softcap, 1 / (float)softcap} : Cap{}; }

__device__ __forceinline__ bool in_range(int64 label, int64 classes) { return label >= 0 && label < classes; }

// The elements before the first 16-byte boundary; all elements if `other` is not aligned like `row`.
__device__ __forceinline__ int head_of(const LOGIT* row, const LOGIT* other, int classes) {
  int over = (int)((int64)row & 15);
  if (over != (int)((int64)other & 15)) return classes;
  int head = over ? (16 - over) / (int)sizeof(LOGIT) : 0;
  return head < classes ? head : classes;
}

// Runs body.run(i, values) for all elements i of a row that belong to this thread.
template <typename Body>
__device__ __forceinline__ void each_of_row(const LOGIT* row, int head, int classes, Body& body) {
  int packs = (classes - head) / WIDTH, lane = lane_of_row();
  const Wide* aligned = (const Wide*)(row + head);
  float value[WIDTH], single[1];
  for (int i = lane; i < head; i += LANES) {
    load<1>(row + i, single);
    body.run(i, single);
  }
  for (int i = lane; i < packs; i += BATCH * LANES) {
    Wide pack[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k)
      if (i + k * LANES < packs) pack[k] = aligned[i + k * LANES];
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      if (i + k * LANES >= packs) break;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) value[j] = widen(pack[k].value[j]);
      body.run(head + (i + k * LANES) * WIDTH, value);
    }
  }
  for (int i = head + packs * WIDTH + lane; i < classes; i += LANES) {
    load<1>(row + i, single);
    body.run(i, single);
  }
}

// Statistics of some logits: the largest, the sum of e^(x - largest), and the plain sum.
struct Softmax {
  float largest = LOWEST, sum = 0, total = 0;
  Cap cap;

  template <int N> __device__ __forceinline__ void run(int, const float (&logit)[N]) {
    float next = largest, x[N];
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = cap.of(logit[j]);
#pragma unroll
    for (int j = 0; j < N; ++j) next = fmaxf(next, x[j]);
    sum *= power_of_two((largest - next) * LOG2_E);
    largest = next;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum += power_of_two((x[j] - next) * LOG2_E);
      total += x[j];
    }
  }

  __device__ __forceinline__ void merge(const Softmax& other) {
    float next = fmaxf(largest, other.largest);
    sum = sum * power_of_two((largest - next) * LOG2_E) + other.sum * power_of_two((other.largest - next) * LOG2_E);
    total += other.total;
    largest = next;
  }

  // Reduces over the threads of a warp; valid in its lane 0.
  __device__ __forceinline__ void merge_warp() {
    for (int step = 16; step > 0; step >>= 1) {
      Softmax other;
      other.largest = __shfl_down_sync(0xffffffffu, largest, step);
      other.sum = __shfl_down_sync(0xffffffffu, sum, step);
      other.total = __shfl_down_sync(0xffffffffu, total, step);
      merge(other);
    }
  }

  // Reduces over the threads of a row; valid in its lane 0.
  __device__ __forceinline__ void merge_row() {
    merge_warp();
#if LANES > 32
    __shared__ float warps[3][LANES / 32];
    int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      warps[0][warp] = largest;
      warps[1][warp] = sum;
      warps[2][warp] = total;
    }
    __syncthreads();
    if (warp != 0) return;
    bool has = threadIdx.x < LANES / 32;
    largest = has ? warps[0][threadIdx.x] : LOWEST;
    sum = has ? warps[1][threadIdx.x] : 0.f;
    total = has ? warps[2][threadIdx.x] : 0.f;
    merge_warp();
#endif
  }
};

// Writes each row's loss, and the pair (largest logit, log of the sum of e^(x - largest)); the loss of an invalid target is NaN.
extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_forward(
    const LOGIT* logits, const LABEL* target, float* losses, float* statistics, int64 rows, int64 classes, int64 inner,
    int64 outer_stride, int64 inner_stride, int64 ignore_index, double smoothing, double z_loss, double softcap) {
  int64 index = own_row();
  if (index >= rows) return;
  bool first = lane_of_row() == 0;
  int64 label = target[index];
  if (label == ignore_index) {
    if (first) losses[index] = statistics[2 * index] = statistics[2 * index + 1] = 0.f;
    return;
  }
  const LOGIT* row = logits + start_of(index, inner, outer_stride, inner_stride);
  Softmax all;
  all.cap = cap_of(softcap);
  each_of_row(row, head_of(row, row, classes), classes, all);
  all.merge_row();
  if (!first) return;
  float log_sum = logf(all.sum), whole = all.largest + log_sum, smooth = (float)smoothing;
  statistics[2 * index] = all.largest;
  statistics[2 * index + 1] = log_sum;
  float loss = log_sum;
  loss -= in_range(label, classes) ? (1.f - smooth) * (all.cap.of(widen(row[label])) - all.largest) : nanf("");
  if (smooth > 0) loss -= smooth * (all.total / classes - all.largest);
  if (z_loss != 0) loss += (float)z_loss * whole * whole;
  losses[index] = loss;
}

// Writes the sum of the losses of each block's rows, and how many count; the division into blocks depends on the row count only.
extern "C" __global__ void __launch_bounds__(512) cross_entropy_sums(
    const float* losses, const LABEL* target, double* sums, int64 rows, int64 ignore_index) {
  double sum = 0, count = 0;
#pragma unroll 4
  for (int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += (int64)gridDim.x * blockDim.x) {
    sum += losses[i];
    count += target[i] != ignore_index;
  }
  sum = block_sum(sum);
  count = block_sum(count);
  if (threadIdx.x != 0) return;
  sums[2 * blockIdx.x] = sum;
  sums[2 * blockIdx.x + 1] = count;
}

// Adds the results of the blocks; for a mean, writes 1 / (number of rows that count) after the statistics.
extern "C" __global__ void __launch_bounds__(256) cross_entropy_total(
    const double* sums, float* loss, float* statistics, int64 blocks, int64 rows, int64 mean) {
  bool has = threadIdx.x < blocks;
  double sum = block_sum(has ? sums[2 * threadIdx.x] : 0.);
  double count = block_sum(has ? sums[2 * threadIdx.x + 1] : 0.);
  if (threadIdx.x != 0) return;
  *loss = (float)(mean ? sum / count : sum);
  if (mean) statistics[2 * rows] = (float)(1 / count);
}

// The gradient of a row's logits, without the term of the label.
struct Gradients {
  LOGIT* to;
  float largest, log2_sum, growth, shift;
  Cap cap;

  __device__ __forceinline__ float of(float logit) const {
    float x = cap.of(logit);
    return (growth * power_of_two((x - largest) * LOG2_E - log2_sum) - shift) * cap.slope_at(x);
  }

  template <int N> __device__ __forceinline__ void run(int i, const float (&x)[N]) const {
    float value[N];
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = of(x[j]);
    store<N>(to + i, value);
  }
};

// The thread of a row to which each_of_row gives element i.
__device__ __forceinline__ int lane_of(int i, int head, int classes) {
  int packed = (classes - head) / WIDTH * WIDTH;
  if (i < head) return i % LANES;
  return (i < head + packed ? (i - head) / WIDTH : i - head - packed) % LANES;
}

__device__ __forceinline__ void write_zeros(LOGIT* row, int classes) {
  int head = head_of(row, row, classes), packs = (classes - head) / WIDTH, lane = lane_of_row();
  float none[WIDTH] = {}, single[1] = {};
  for (int i = lane; i < head; i += LANES) store<1>(row + i, single);
  for (int i = lane; i < packs; i += LANES) store<WIDTH>(row + head + i * WIDTH, none);
  for (int i = head + packs * WIDTH + lane; i < classes; i += LANES) store<1>(row + i, single);
}

// Writes the gradient of every logit; `output` may be `logits`.  gradient_stride is 0 if all rows share one gradient.
extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_backward(
    const float* gradient, const LOGIT* logits, const LABEL* target, const float* statistics, LOGIT* output,
    int64 gradient_stride, int64 rows, int64 classes, int64 inner, int64 outer_stride, int64 inner_stride,
    int64 output_outer_stride, int64 output_inner_stride, int64 ignore_index, int64 mean, double smoothing, double z_loss,
    double softcap) {
  int64 index = own_row();
  if (index >= rows) return;
  LOGIT* to = output + start_of(index, inner, output_outer_stride, output_inner_stride);
  int64 label = target[index];
  if (label == ignore_index) {
    write_zeros(to, classes);
    return;
  }
  const LOGIT* row = logits + start_of(index, inner, outer_stride, inner_stride);
  float largest = statistics[2 * index], log_sum = statistics[2 * index + 1], smooth = (float)smoothing;
  float factor = gradient[index * gradient_stride] * (mean ? statistics[2 * rows] : 1.f);
  if (!in_range(label, classes)) factor = nanf("");
  float growth = factor * (1.f + 2.f * (float)z_loss * (largest + log_sum));
  Gradients body{to, largest, log_sum * LOG2_E, growth, factor * smooth / classes, cap_of(softcap)};
  int head = head_of(row, to, classes);
  // The thread of the label's element writes it twice, so it reads the logit first: in place, the first write destroys it.
  bool has_label = in_range(label, classes) && lane_of((int)label, head, classes) == lane_of_row();
  float at_label = has_label ? widen(row[label]) : 0.f;
  each_of_row(row, head, classes, body);
  if (!has_label) return;
  float slope = body.cap.slope_at(body.cap.of(at_label));
  float value[1] = {body.of(at_label) - factor * (1.f - smooth) * slope};
  store<1>(to + label, value);
}

// Multiplies gradients, made for an upstream gradient of 1, by the one that came.  `gradient` begins at 16 bytes.
extern "C" __global__ void __launch_bounds__(256) cross_entropy_rescale(LOGIT* gradient, const float* factor, int64 elements) {
  float by = *factor;
  if (by == 1.f) return;
  int64 packs = elements / WIDTH, thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64)gridDim.x * blockDim.x;
  float value[WIDTH], single[1];
  for (int64 i = thread; i < packs; i += threads) {
    load<WIDTH>(gradient + i * WIDTH, value);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) value[j] *= by;
    store<WIDTH>(gradient + i * WIDTH, value);
  }
  for (int64 i = packs * WIDTH + thread; i < elements; i += threads) {
    load<1>(gradient + i, single);
    single[0] *= by;
    store<1>(gradient + i, single);
  }
}
