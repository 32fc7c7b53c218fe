// Computes the multiplier from partial sums, and updates the loss scale: one block each, everything in device memory.
// ops: finish, update_scale
#include "common.cuh"

// How an accumulation step is finished; filled in by ops/scaling.py.
struct Rule {
  double growth_factor;
  double backoff_factor;
  double minimum;
  double maximum;
  int64 growth_interval;
  int64 hysteresis;
  int64 sticky;  // after a skipped step the scale stays
  int64 slots;
  StepState* ring;
  StepState* mirror;  // the same in pinned host memory
};

__device__ __forceinline__ void move_scale(StepState& now, const Rule& rule) {
  if (now.finite) {
    now.growth += 1;
    now.hysteresis = (int)rule.hysteresis;
    if (now.growth >= rule.growth_interval) {
      now.growth = 0;
      double grown = now.scale * rule.growth_factor;
      now.scale = (float)(grown > rule.maximum ? rule.maximum : grown);
    }
    return;
  }
  now.growth = 0;
  now.hysteresis = now.hysteresis > 0 ? now.hysteresis - 1 : 0;
  if (now.hysteresis == 0) {
    double backed_off = now.scale * rule.backoff_factor;
    now.scale = (float)(backed_off < rule.minimum ? rule.minimum : backed_off);
  }
}

// Finishes an accumulation step: counts it, stores the first overflow of several in a row, updates the scale, writes the ring.
__device__ __forceinline__ void end_step(StepState* state, const float* loss, const Rule& rule) {
  StepState now = *state;
  if (loss) now.loss = *loss;
  int window = now.applied + now.skipped;
  bool held = rule.sticky && now.streak > 0 && !now.finite;
  if (!now.finite && now.streak == 0) {
    now.first_window = window;
    now.first_loss = now.loss;
    now.first_scale = now.scale;
    now.first_chunk = now.bad_chunk;
  }
  now.streak = now.finite ? 0 : now.streak + 1;
  now.applied += now.finite;
  now.skipped += 1 - now.finite;
  now.bad_chunk = -1;
  if (!held) move_scale(now, rule);
  // Recorded before `finite` is reset for the next step.
  if (rule.ring) rule.ring[window % rule.slots] = now;
  if (rule.mirror) {
    // The host may read while later steps run in the same launch: `applied`, which shows that the slot is valid, is written last.
    StepState* slot = rule.mirror + window % rule.slots;
    StepState shown = now;
    shown.applied = -1;
    *slot = shown;
    __threadfence_system();
    *(volatile int*)&slot->applied = now.applied;
  }
  now.finite = 1;
  *state = now;
}

// Writes multiplier, norm and found_inf, updates `finite`, stores the first bad chunk, and may finish the accumulation step.
extern "C" __global__ void __launch_bounds__(1024)
finish(StepState* state, const float* partial, int64 count, const float* scale, double divisor, double max_norm,
       int64 origin, int64 sticky, Rule rule, const float* loss, int64 ends_step) {
  __shared__ int lowest;
  if (threadIdx.x == 0) lowest = 0x7fffffff;
  __syncthreads();
  double sum = 0;
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) {
    float one = partial[i];
    sum += one;
    if (!isfinite(one)) atomicMin(&lowest, (int)i);
  }
  sum = block_sum(sum);  // its barriers also complete the search for `lowest`
  if (threadIdx.x != 0) return;
  float norm = sqrtf((float)sum);
  bool finite = isfinite(norm);
  if (!finite && state->bad_chunk < 0 && lowest < 0x7fffffff) state->bad_chunk = (int)origin + lowest;
  if (sticky && (state->streak > 0 || !state->finite)) finite = false;
  state->norm = norm;
  state->found_inf = finite ? 0.f : 1.f;
  if (!finite) state->finite = 0;
  float multiplier = 1.f / (*scale * (float)divisor);
  // A NaN norm has to stay NaN; fminf would lose it.
  if (max_norm >= 0) {
    float coefficient = (float)max_norm / (norm + 1e-6f);
    multiplier *= coefficient > 1.f ? 1.f : coefficient;
  }
  state->multiplier = multiplier;
  if (ends_step) end_step(state, loss, rule);
}

// Finishes an accumulation step in which several optimizers stepped.
extern "C" __global__ void __launch_bounds__(32) update_scale(StepState* state, const float* loss, Rule rule) {
  if (threadIdx.x == 0) end_step(state, loss, rule);
}
