// From partial sums to one multiplier, and the loss scaler's rule: one block each, everything in device memory.
#include "common.cuh"

// Writes multiplier, norm and found_inf, folds the step into the window, and notes the lowest bad chunk.
extern "C" __global__ void __launch_bounds__(1024)
finish(StepState* state, const float* partial, int64 count, const float* scale, double divisor, double max_norm,
       int64 origin) {
  __shared__ int lowest;
  if (threadIdx.x == 0) lowest = 0x7fffffff;
  __syncthreads();
  double sum = 0;
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) {
    float one = partial[i];
    sum += one;
    if (!isfinite(one)) atomicMin(&lowest, (int)i);
  }
  sum = block_sum(sum);  // its barriers end the search too
  if (threadIdx.x != 0) return;
  float norm = sqrtf((float)sum);
  bool finite = isfinite(norm);
  state->norm = norm;
  state->found_inf = finite ? 0.f : 1.f;
  if (!finite) {
    state->finite = 0;
    if (state->bad_chunk < 0 && lowest < 0x7fffffff) state->bad_chunk = (int)origin + lowest;
  }
  float multiplier = 1.f / (*scale * (float)divisor);
  // A NaN norm has to stay one, which fminf would not let it.
  if (max_norm >= 0) {
    float coefficient = (float)max_norm / (norm + 1e-6f);
    multiplier *= coefficient > 1.f ? 1.f : coefficient;
  }
  state->multiplier = multiplier;
}

// Ends a window: counts it, latches the first overflow of a run of them, moves the scale, and records all in the ring.
extern "C" __global__ void __launch_bounds__(32)
update_scale(StepState* state, const float* loss, StepState* ring, int64 slots, double growth_factor, double backoff_factor,
             int64 growth_interval, double minimum, double maximum, int64 hysteresis) {
  if (threadIdx.x != 0) return;
  StepState now = *state;
  if (loss) now.loss = *loss;
  int window = now.applied + now.skipped;
  int finite = now.finite;
  if (finite) {
    now.applied += 1;
    now.growth += 1;
    now.hysteresis = (int)hysteresis;
    now.streak = 0;
    if (now.growth >= growth_interval) {
      now.growth = 0;
      double grown = now.scale * growth_factor;
      now.scale = (float)(grown > maximum ? maximum : grown);
    }
  } else {
    if (now.streak == 0) {
      now.first_window = window;
      now.first_loss = now.loss;
      now.first_scale = now.scale;
      now.first_chunk = now.bad_chunk;
    }
    now.streak += 1;
    now.skipped += 1;
    now.growth = 0;
    now.hysteresis = now.hysteresis > 0 ? now.hysteresis - 1 : 0;
    if (now.hysteresis == 0) {
      double backed_off = now.scale * backoff_factor;
      now.scale = (float)(backed_off < minimum ? minimum : backed_off);
    }
  }
  now.bad_chunk = -1;
  if (ring) ring[window % slots] = now;  // with the window's own `finite`
  now.finite = 1;
  *state = now;
}
