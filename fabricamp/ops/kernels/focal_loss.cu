// Focal loss of rows of sigmoid logits, one warp per row; the order of the loss's summation depends on shapes only.
// ops: focal_loss
#include "common.cuh"

#ifndef LOGIT  // defined by ops/bridge.py
#define LOGIT float
#endif

#define IGNORED -2

struct Focal {
  float alpha, gamma, smoothing;

  __device__ __forceinline__ float power(float x) const { return gamma == 2.f ? x * x : powf(x, gamma); }

  // The loss of one logit, and the derivative of the loss with respect to the logit.
  __device__ __forceinline__ void of(float x, bool positive, float& loss, float& slope) const {
    float less = expf(-fabsf(x)), sum = 1.f + less;
    float small = less / sum, large = 1.f / sum;
    float p = x >= 0 ? large : small, missing = positive ? (x >= 0 ? small : large) : p;
    float aim = positive ? 1.f - 0.5f * smoothing : 0.5f * smoothing;
    float entropy = (1.f - aim) * x + fmaxf(-x, 0.f) + log1pf(less);
    float weight = (positive ? alpha : 1.f - alpha) * power(missing);
    float turn = gamma * (positive ? -p : (x >= 0 ? small : large));
    loss = weight * entropy;
    slope = weight * (turn * entropy + p - aim);
  }
};

__device__ __forceinline__ int64 first_row() { return ((int64)blockIdx.x * blockDim.x + threadIdx.x) / 32; }
__device__ __forceinline__ int64 rows_at_once() { return (int64)gridDim.x * blockDim.x / 32; }

// Writes the sum of a block's losses into `partials`.
extern "C" __global__ void __launch_bounds__(512) focal_loss_forward(
    const LOGIT* logits, const int64* target, double* partials, int64 rows, int64 classes, int64 real_classes, double alpha,
    double gamma, double smoothing) {
  Focal focal{(float)alpha, (float)gamma, (float)smoothing};
  double sum = 0;
  for (int64 row = first_row(); row < rows; row += rows_at_once()) {
    int64 label = target[row];
    if (label == IGNORED) continue;
    float of_row = 0, loss, slope;
    for (int64 i = threadIdx.x % 32; i < real_classes; i += 32) {
      focal.of(widen(logits[row * classes + i]), i == label, loss, slope);
      of_row += loss;
    }
    sum += of_row;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(512) focal_loss_total(
    const double* partials, const float* positives, float* loss, int64 count) {
  double sum = 0;
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *loss = (float)(sum / *positives);
}

extern "C" __global__ void __launch_bounds__(512) focal_loss_backward(
    const float* gradient, const float* positives, const LOGIT* logits, const int64* target, LOGIT* output, int64 rows,
    int64 classes, int64 real_classes, double alpha, double gamma, double smoothing) {
  Focal focal{(float)alpha, (float)gamma, (float)smoothing};
  float factor = *gradient / *positives;
  for (int64 row = first_row(); row < rows; row += rows_at_once()) {
    int64 label = target[row];
    for (int64 i = threadIdx.x % 32; i < classes; i += 32) {
      float loss, slope = 0;
      bool counts = label != IGNORED && i < real_classes;
      if (counts) focal.of(widen(logits[row * classes + i]), i == label, loss, slope);
      output[row * classes + i] = Narrow<LOGIT>::of(counts ? slope * factor : 0.f);
    }
  }
}
