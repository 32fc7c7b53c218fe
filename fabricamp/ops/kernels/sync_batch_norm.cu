// Batch normalisation over the values of several ranks: statistics | normalise, then backward reduce | gradient.
//
// `|` is where ranks meet: inside the kernels by peer memory, or between them by a collective on what `local` holds.
#include "common.cuh"
#include "batch_norm.cuh"

// What an element is computed with: its channel's numbers.
struct Channel {
  float mean[kKept], scale[kKept], bias[kKept];
  __device__ __forceinline__ float of(float x, int j) const {
    j %= kKept;
    return fmaf(x - mean[j], scale[j], bias[j]);
  }
};

__device__ __forceinline__ float weight_of(const Layer& a, int64 channel) {
  return a.weight ? (float)widen(a.weight[channel]) : 1.f;
}

__device__ __forceinline__ float bias_of(const Layer& a, int64 channel) {
  return a.bias ? (float)widen(a.bias[channel]) : 0.f;
}

__device__ __forceinline__ int64 own_channel(const Layer& a, int j) {
  int64 tile = tile_of(a);
  if (PLANES) return tile;
  int64 channel = (tile * a.columns + threadIdx.x % (unsigned)a.columns) * kKept + j;
  return channel < a.channels ? channel : 0;
}

// The thread's channels from what forward saved.
__device__ __forceinline__ void load_channel(const Layer& a, Channel& channel) {
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    int64 c = own_channel(a, j);
    channel.mean[j] = a.saved[c];
    channel.scale[j] = a.saved[a.channels + c] * weight_of(a, c);
    channel.bias[j] = RELU ? bias_of(a, c) : 0.f;
  }
}

// A gradient as it comes before the ReLU: none where the output, as rounded, was not above 0.
__device__ __forceinline__ float masked(const Channel& channel, float x, float z, float dy, int j) {
  if (!RELU) return dy;
  return (float)widen(Narrow<Value>::of(channel.of(x, j) + z)) <= 0.f ? 0.f : dy;
}

// Sums of deviations from the first value of the thread's channel: few values each, so that nothing cancels.
struct Statistics {
  const Value* x;
  float shift[kVector], sum[kVector], square[kVector];
  template <int BATCH> __device__ __forceinline__ void run(const int64 (&offsets)[BATCH]) {
    Pack<Value, kVector> packs[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) packs[i] = pack_at(x, offsets[i]);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float delta = (float)widen(packs[i].value[j]) - shift[j];
        sum[j] += delta;
        square[j] += delta * delta;
      }
    }
  }
};

// Count, mean and sum of squared deviations of every channel on this rank, on their way to the others.
extern "C" __global__ void __launch_bounds__(512, 2) statistics(Layer a) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && a.batches) *a.batches += 1;
  Walk walk(a, false);
  int count = walk.left;
  Statistics body;
  body.x = a.x;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    body.shift[j] = count ? (float)widen(a.x[walk.at + j]) : 0.f;
    body.sum[j] = body.square[j] = 0.f;
  }
  each_batch<4>(walk, body);
  float inverse = count ? 1.f / count : 0.f;
  float mean[kKept], squares[kKept];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    float drift = body.sum[j] * inverse, own = body.square[j] - body.sum[j] * drift;
    own = own < 0.f ? 0.f : own;
    if (j < kKept) {
      mean[j % kKept] = body.shift[j] + drift;
      squares[j % kKept] = own;
    } else {
      Moments::merge(mean[0], squares[0], (float)count * j, body.shift[j] + drift, own, (float)count);
    }
  }
  Pair pair = over_block<Moments>(a, mean, squares, (float)(PLANES ? count * kVector : count));
  if (!over_splits<Moments>(a, pair)) return;
  int64 width = a.columns * kKept, tile = tile_of(a), channel = tile * width + threadIdx.x;
  if (threadIdx.x < width && channel < a.channels) {
    publish(a, channel, pair.first);
    publish(a, a.channels + channel, pair.second);
  }
  if (tile == 0 && threadIdx.x == 0) publish(a, 2 * a.channels, (float)(PLANES ? a.positions * kVector : a.positions));
  close_exchange(a);
}

struct Normalise {
  const Value* x;
  const Value* z;
  Value* y;
  Channel channel;
  template <int BATCH> __device__ __forceinline__ void run(const int64 (&offsets)[BATCH]) {
    Pack<Value, kVector> packs[BATCH], residuals[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      packs[i] = pack_at(x, offsets[i]);
      if (RESIDUAL) residuals[i] = pack_at(z, offsets[i]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float value = channel.of((float)widen(packs[i].value[j]), j);
        if (RESIDUAL) value += (float)widen(residuals[i].value[j]);
        if (RELU) value = value < 0.f ? 0.f : value;
        packs[i].value[j] = Narrow<Value>::of(value);
      }
      *(Pack<Value, kVector>*)(y + offsets[i]) = packs[i];
    }
  }
};

__device__ __forceinline__ void keep_running(const Layer& a, int64 channel, float mean, float squares, float count) {
  if (!a.running_mean || count == 0.f) return;
  float factor = a.momentum < 0 ? 1.f / (float)*a.batches : (float)a.momentum;
  float variance = count > 1.f ? squares / (count - 1.f) : 0.f;  // one value has none
  float old_mean = (float)widen(a.running_mean[channel]), old_variance = (float)widen(a.running_var[channel]);
  a.running_mean[channel] = Narrow<Parameter>::of(factor * mean + (1.f - factor) * old_mean);
  a.running_var[channel] = Narrow<Parameter>::of(factor * variance + (1.f - factor) * old_variance);
}

// out = (x - mean) / deviation * weight + bias (+ z) (or 0 where that is below), and the running values.
extern "C" __global__ void __launch_bounds__(512, 2) normalise(Layer a) {
  __shared__ float means[kTile], scales[kTile], biases[kTile];
  Pair pair;
  float count;
  if (!over_ranks<Moments, true>(a, pair, count)) return;
  int64 width = a.columns * kKept, tile = tile_of(a), channel = tile * width + threadIdx.x;
  if (threadIdx.x < width && channel < a.channels) {
    float variance = count > 0.f ? pair.second / count : 0.f, inverse = 1.f / sqrtf(variance + (float)a.eps);
    means[threadIdx.x] = pair.first;
    scales[threadIdx.x] = inverse * weight_of(a, channel);
    biases[threadIdx.x] = bias_of(a, channel);
    if (blockIdx.x < a.tiles) {
      a.saved[channel] = pair.first;
      a.saved[a.channels + channel] = inverse;
      a.saved[2 * a.channels + channel] = variance;
      if (channel == 0) a.saved[3 * a.channels] = count;
      keep_running(a, channel, pair.first, pair.second, count);
    }
  }
  __syncthreads();
  Normalise body;
  body.x = a.x;
  body.z = a.z;
  body.y = a.out;
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    int own = PLANES ? 0 : threadIdx.x % (int)a.columns * kKept + j;
    body.channel.mean[j] = means[own];
    body.channel.scale[j] = scales[own];
    body.channel.bias[j] = biases[own];
  }
  Walk walk(a, true);
  each_batch<RESIDUAL ? 2 : 4>(walk, body);
}

struct Reduce {
  const Value* x;
  const Value* z;
  const Value* dy;
  Channel channel;
  float first[kKept], second[kKept];
  template <int BATCH> __device__ __forceinline__ void run(const int64 (&offsets)[BATCH]) {
    Pack<Value, kVector> packs[BATCH], gradients[BATCH], residuals[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      packs[i] = pack_at(x, offsets[i]);
      gradients[i] = pack_at(dy, offsets[i]);
      if (RELU && RESIDUAL) residuals[i] = pack_at(z, offsets[i]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float value = (float)widen(packs[i].value[j]);
        float residual = RELU && RESIDUAL ? (float)widen(residuals[i].value[j]) : 0.f;
        float gradient = masked(channel, value, residual, (float)widen(gradients[i].value[j]), j);
        first[j % kKept] += gradient;
        second[j % kKept] += gradient * (value - channel.mean[j % kKept]);
      }
    }
  }
};

// The sums of dy and of dy * (x - mean) / deviation: the gradients of bias and weight, and what the others need of them.
extern "C" __global__ void __launch_bounds__(512, RELU ? 1 : 2) reduce(Layer a) {
  Reduce body;
  body.x = a.x;
  body.z = a.z;
  body.dy = a.dy;
  load_channel(a, body.channel);
#pragma unroll
  for (int j = 0; j < kKept; ++j) body.first[j] = body.second[j] = 0.f;
  Walk walk(a, false);
  each_batch<(RELU && RESIDUAL) || sizeof(Value) == 4 ? 2 : 3>(walk, body);
  Pair pair = over_block<Sums>(a, body.first, body.second, 0.f);
  if (!over_splits<Sums>(a, pair)) return;
  int64 width = a.columns * kKept, channel = tile_of(a) * width + threadIdx.x;
  if (threadIdx.x < width && channel < a.channels) {
    pair.second *= a.saved[a.channels + channel];
    if (a.weight_gradient) a.weight_gradient[channel] = Narrow<Parameter>::of(pair.second);
    if (a.bias_gradient) a.bias_gradient[channel] = Narrow<Parameter>::of(pair.first);
    if (a.out) {
      publish(a, channel, pair.first);
      publish(a, a.channels + channel, pair.second);
    }
  }
  if (a.out) close_exchange(a);
}

// Half values have too few digits for a mean far from them to matter: one number less to hold.
constexpr bool kMeanInOffset = sizeof(Value) == 2 && !RELU;

struct InputGradient {
  const Value* x;
  const Value* z;
  const Value* dy;
  Value* dx;
  Value* dz;
  Channel channel;
  float slope[kKept], offset[kKept];
  template <int BATCH> __device__ __forceinline__ void run(const int64 (&offsets)[BATCH]) {
    Pack<Value, kVector> packs[BATCH], gradients[BATCH], residuals[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      packs[i] = pack_at(x, offsets[i]);
      gradients[i] = pack_at(dy, offsets[i]);
      if (RELU && RESIDUAL) residuals[i] = pack_at(z, offsets[i]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float value = (float)widen(packs[i].value[j]);
        float residual = RELU && RESIDUAL ? (float)widen(residuals[i].value[j]) : 0.f;
        float gradient = masked(channel, value, residual, (float)widen(gradients[i].value[j]), j);
        float centred = kMeanInOffset ? value : value - channel.mean[j % kKept];
        if (RELU && RESIDUAL) residuals[i].value[j] = Narrow<Value>::of(gradient);
        gradient = gradient * channel.scale[j % kKept] - centred * slope[j % kKept] - offset[j % kKept];
        packs[i].value[j] = Narrow<Value>::of(gradient);
      }
      if (!RELU || dx) *(Pack<Value, kVector>*)(dx + offsets[i]) = packs[i];
      if (RELU && RESIDUAL && dz) *(Pack<Value, kVector>*)(dz + offsets[i]) = residuals[i];
    }
  }
};

// out = weight / deviation * (dy - mean of dy - normalised x * mean of dy * normalised x), means over all ranks; dz = dy masked.
extern "C" __global__ void __launch_bounds__(512, RELU ? 1 : 2) gradient(Layer a) {
  __shared__ float slopes[kTile], offsets[kTile];
  InputGradient body;
  body.x = a.x;
  body.z = a.z;
  body.dy = a.dy;
  body.dx = a.out;
  body.dz = a.dz;
  if (a.out) {
    Pair pair;
    float unused;
    if (!over_ranks<Sums, false>(a, pair, unused)) return;
    int64 width = a.columns * kKept, channel = tile_of(a) * width + threadIdx.x;
    if (threadIdx.x < width && channel < a.channels) {
      float inverse = a.saved[a.channels + channel], factor = inverse * weight_of(a, channel) / a.saved[3 * a.channels];
      slopes[threadIdx.x] = factor * inverse * pair.second;
      offsets[threadIdx.x] = factor * pair.first;
      if (kMeanInOffset) offsets[threadIdx.x] -= a.saved[channel] * slopes[threadIdx.x];
    }
    __syncthreads();
  }
  load_channel(a, body.channel);
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    int own = PLANES ? 0 : threadIdx.x % (int)a.columns * kKept + j;
    body.slope[j] = a.out ? slopes[own] : 0.f;
    body.offset[j] = a.out ? offsets[own] : 0.f;
  }
  Walk walk(a, true);
  each_batch<RELU && RESIDUAL ? 1 : 2>(walk, body);
}
