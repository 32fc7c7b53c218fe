// Batch normalisation over the values of several ranks: statistics, normalise, then backward reduce, gradient.
//
// Ranks exchange values by peer memory at the end of statistics and of reduce, or after them by a collective on `local` (and then
// `merge`).  A few blocks wait for the other ranks; the large kernels use the results of these and never wait.  If they did, they
// would fill the GPU until a late rank arrives, and that rank may itself wait for a collective that needs room on this GPU.
// ops: sync_batch_norm
#include "common.cuh"
#include "batch_norm.cuh"
#include "clock.cuh"
#include "batch_norm_ranks.cuh"
#include "batch_norm_channels.cuh"

// The gradient before the ReLU: 0 if the rounded output was not above 0.
__device__ __forceinline__ float masked(const Channel& channel, float x, float z, float dy, int j) {
  if (!RELU) return dy;
  return (float)widen(Narrow<Value>::of(channel.of(x, j) + z)) <= 0.f ? 0.f : dy;
}

// Sums of deviations from the first value of the thread's channel: each sum is over few values, so there is no cancellation.
struct Statistics {
  const Value* x;
  Raw packs[4];
  float shift[kVector], sum[kVector], square[kVector];
  int loaded;

  __device__ __forceinline__ void load(Walk& walk) {
    loaded = walk.left;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < loaded) packs[i] = raw_at(x, walk.next());
    }
  }

  __device__ __forceinline__ void begin(int count) {
    Neighbours pack = neighbours(packs[0]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      shift[j] = count ? (float)widen(pack.value[j]) : 0.f;
      sum[j] = square[j] = 0.f;
    }
  }

  __device__ __forceinline__ void use(const Walk&) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= loaded) return;
      Neighbours pack = neighbours(packs[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float delta = (float)widen(pack.value[j]) - shift[j];
        sum[j] += delta;
        square[j] += delta * delta;
      }
    }
  }

  // Computes mean and sum of squared deviations of the thread's channels, in `shift` and `square`.  Neighbours of one channel have
  // equal counts, so merging them takes no division.
  __device__ __forceinline__ void finish(int count) {
    float inverse = count ? 1.f / count : 0.f, half = 0.5f * count;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Pair pair = Moments::of(shift[j], sum[j], square[j], inverse);
      shift[j] = pair.first;
      square[j] = pair.second;
    }
#pragma unroll
    for (int width = kVector / 2; width >= kKept; width /= 2, half *= 2.f) {
#pragma unroll
      for (int j = 0; j < width; ++j) {
        float delta = shift[j + width] - shift[j];
        shift[j] += 0.5f * delta;
        square[j] += square[j + width] + delta * delta * half;
      }
    }
  }
};

// Exchanges the values of a tile: sends them to the other ranks, and one block merges all; or leaves them to a collective.
__device__ __forceinline__ void meet(const Layer& a, const Place& place, const Sender& sender, Pair pair) {
  int64 own = place.channel(threadIdx.x);
  float count = values_at(a.positions);
  if (a.peers) {
    if (serves(a, place)) sender.send(a, own, pair, count);
    each_met(a, place, [&](int64 channel) {
      Running running(a, channel);
      Moments all;
      bool came = receive(a, channel, all);
      running.keep(a, channel, came ? all.result() : Pair{nanf(""), nanf("")}, came ? all.count : 0.f);
    });
  } else if (serves(a, place)) {
    if (a.crosses) leave(a, own, pair);
    else Running(a, own).keep(a, own, pair, count);
    if (a.crosses && own == 0) a.local[2 * a.channels] = count;
  }
}

// Mean, deviation and count of every channel over all ranks, and the running values; before a collective, this rank's values only.
extern "C" __global__ void __launch_bounds__(512, 2) statistics(Layer a) {
  __shared__ volatile Word* peers[kRanks];
  __shared__ Counts counts;
  Place place(a.sums);
  Walk walk(a, a.sums, place, false);
  int count = walk.left;
  Statistics body;
  body.x = a.x;
  body.load(walk);
  Sender sender(a, place, peers);
  counts.fill(a, a.sums, place);
  body.begin(count);
  each_batch(walk, body);
  body.finish(count);
  float mean[kKept], squares[kKept];
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    mean[j] = body.shift[j];
    squares[j] = body.square[j];
  }
  Pair pair = over_block<Moments>(place, mean, squares, values_at(count), &counts);
  if (over_splits<Moments>(a, a.sums, place, pair)) meet(a, place, sender, pair);
}

// After a collective: the same from the values of every rank, one thread per channel.
extern "C" __global__ void __launch_bounds__(512, 2) merge(Layer a) {
  int64 channel = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= a.channels) return;
  Running running(a, channel);
  Moments all;
  for (int64 rank = 0; rank < a.ranks; ++rank) {
    const float* row = a.gathered + rank * (2 * a.channels + 1);
    all.add(Pair{row[channel], row[a.channels + channel]}, row[2 * a.channels]);
  }
  running.keep(a, channel, all.result(), all.count);
}

struct Normalise {
  static constexpr int kBatch = RESIDUAL ? 2 : 4;
  const Value* x;
  const Value* z;
  Value* y;
  Channel channel;
  Raw packs[kBatch], residuals[kBatch];

  __device__ __forceinline__ void load(Walk walk) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (walk.left <= 0) return;
      int64 at = walk.next();
      packs[i] = raw_at(x, at);
      if (RESIDUAL) residuals[i] = raw_at(z, at);
    }
  }

  __device__ __forceinline__ void use(Walk& walk) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (walk.left <= 0) return;
      int64 at = walk.next();
      Neighbours pack = neighbours(packs[i]), residual;
      if (RESIDUAL) residual = neighbours(residuals[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float value = channel.of((float)widen(pack.value[j]), j);
        if (RESIDUAL) value += (float)widen(residual.value[j]);
        if (RELU) value = value < 0.f ? 0.f : value;
        pack.value[j] = Narrow<Value>::of(value);
      }
      *(Neighbours*)(y + at) = pack;
    }
  }
};

// out = (x - mean) / deviation * weight + bias (+ z), then a ReLU if RELU is set.
extern "C" __global__ void __launch_bounds__(512, 2) normalise(Layer a) {
  __shared__ Numbers numbers;
  Place place(a.spread);
  Walk walk(a, a.spread, place, true);
  Normalise body;
  body.x = a.x;
  body.z = a.z;
  body.y = a.out;
  body.load(walk);
  if (serves(a, place)) numbers.fetch<true>(a, place.channel(threadIdx.x));
  if (blockIdx.x == 0 && threadIdx.x == 0 && a.batches) ++*a.batches;  // here, because blocks of `statistics` read the count
  __syncthreads();
  numbers.read(place, body.channel);
  each_batch(walk, body);
}

// The loads of backward: x, dy and, for the ReLU after a residual, the residual.
template <int BATCH> struct Backward {
  const Value* x;
  const Value* z;
  const Value* dy;
  Channel channel;
  Raw packs[BATCH], gradients[BATCH], residuals[BATCH];

  __device__ __forceinline__ explicit Backward(const Layer& a) : x(a.x), z(a.z), dy(a.dy) {}

  __device__ __forceinline__ void load_next(Walk& walk) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (walk.left <= 0) return;
      int64 at = walk.next();
      packs[i] = raw_at(x, at);
      gradients[i] = raw_at(dy, at);
      if (RELU && RESIDUAL) residuals[i] = raw_at(z, at);
    }
  }

  // Fills in x, and the gradient before the ReLU.
  __device__ __forceinline__ void unpack(int i, float (&values)[kVector], float (&before)[kVector]) const {
    Neighbours pack = neighbours(packs[i]), gradient = neighbours(gradients[i]), residual;
    if (RELU && RESIDUAL) residual = neighbours(residuals[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float added = RELU && RESIDUAL ? (float)widen(residual.value[j]) : 0.f;
      values[j] = (float)widen(pack.value[j]);
      before[j] = masked(channel, values[j], added, (float)widen(gradient.value[j]), j);
    }
  }
};

// Half values have too few digits for a distant mean to matter: the mean may be subtracted after the sums, in fewer registers.
constexpr bool kMeanLate = sizeof(Value) == 2 && !RELU;
constexpr int kReduceBatch = (RELU && RESIDUAL) || sizeof(Value) == 4 ? 2 : 3;

struct Reduce : Backward<kReduceBatch> {
  float first[kKept], second[kKept];
  int loaded;

  __device__ __forceinline__ explicit Reduce(const Layer& a) : Backward(a) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) first[j] = second[j] = 0.f;
  }

  __device__ __forceinline__ void load(Walk& walk) {
    loaded = walk.left;
    load_next(walk);
  }

  __device__ __forceinline__ void use(const Walk&) {
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      if (i >= loaded) return;
      float values[kVector], before[kVector];
      unpack(i, values, before);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        first[j % kKept] += before[j];
        second[j % kKept] += before[j] * (kMeanLate ? values[j] : values[j] - channel.mean[j % kKept]);
      }
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int j = 0; kMeanLate && j < kKept; ++j) second[j] -= channel.mean[j] * first[j];
  }
};

// The sums of dy and of dy * (x - mean) / deviation: the gradients of bias and weight, and this rank's share for the other ranks.
extern "C" __global__ void __launch_bounds__(512, RELU ? 1 : 2) reduce(Layer a) {
  __shared__ volatile Word* peers[kRanks];
  __shared__ Numbers numbers;
  Place place(a.sums);
  Walk walk(a, a.sums, place, false);
  Reduce body(a);
  body.load(walk);
  Sender sender(a, place, peers);
  int64 own = place.channel(threadIdx.x);
  if (serves(a, place)) numbers.fetch<RELU>(a, own);
  __syncthreads();
  if (!kMeanLate) numbers.read(place, body.channel);
  each_batch(walk, body);
  if (kMeanLate) numbers.read(place, body.channel);
  body.finish();
  Pair pair = over_block<Sums>(place, body.first, body.second, 0.f, nullptr);
  if (!over_splits<Sums>(a, a.sums, place, pair)) return;
  if (serves(a, place)) {
    pair.second *= a.saved[a.channels + own];
    if (a.weight_gradient) a.weight_gradient[own] = Narrow<Parameter>::of(pair.second);
    if (a.bias_gradient) a.bias_gradient[own] = Narrow<Parameter>::of(pair.first);
    if (!a.peers) leave(a, own, pair);
    else if (a.out) sender.send(a, own, pair, 0.f);
  }
  if (!a.peers || !a.out) return;
  each_met(a, place, [&](int64 channel) {
    Sums all;
    bool came = receive(a, channel, all);
    leave(a, channel, came ? all.result() : Pair{nanf(""), nanf("")});
  });
}

constexpr int kGradientBatch = RELU && RESIDUAL ? 1 : 2;

struct InputGradient : Backward<kGradientBatch> {
  Value* dx;
  Value* dz;
  float slope[kKept], offset[kKept];

  __device__ __forceinline__ explicit InputGradient(const Layer& a) : Backward(a), dx(a.out), dz(a.dz) {}

  __device__ __forceinline__ void load(Walk walk) { load_next(walk); }

  __device__ __forceinline__ void use(Walk& walk) {
#pragma unroll
    for (int i = 0; i < kGradientBatch; ++i) {
      if (walk.left <= 0) return;
      int64 at = walk.next();
      float values[kVector], before[kVector];
      unpack(i, values, before);
      Neighbours input, residual;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float centred = kMeanLate ? values[j] : values[j] - channel.mean[j % kKept];
        float found = before[j] * channel.scale[j % kKept] - centred * slope[j % kKept] - offset[j % kKept];
        input.value[j] = Narrow<Value>::of(found);
        if (RELU && RESIDUAL) residual.value[j] = Narrow<Value>::of(before[j]);
      }
      if (!RELU || dx) *(Neighbours*)(dx + at) = input;
      if (RELU && RESIDUAL && dz) *(Neighbours*)(dz + at) = residual;
    }
  }
};

struct alignas(16) Slopes {
  float slope[kTile], offset[kTile];
};

// out = weight / deviation * (dy - mean of dy - normalised x * mean of dy * normalised x), means over all ranks; dz = dy masked.
extern "C" __global__ void __launch_bounds__(512, RELU ? 1 : 2) gradient(Layer a) {
  __shared__ Numbers numbers;
  __shared__ Slopes slopes;
  Place place(a.spread);
  Walk walk(a, a.spread, place, true);
  InputGradient body(a);
  body.load(walk);
  if (serves(a, place)) {
    int64 own = place.channel(threadIdx.x);
    float count = a.saved[3 * a.channels], sum = a.local[own], product = a.local[a.channels + own];
    float inverse = numbers.fetch<RELU>(a, own), factor = numbers.scale[threadIdx.x] / count;
    float slope = factor * inverse * product;
    slopes.slope[threadIdx.x] = slope;
    slopes.offset[threadIdx.x] = factor * sum - (kMeanLate ? numbers.mean[threadIdx.x] * slope : 0.f);
  }
  __syncthreads();
  numbers.read(place, body.channel);
  load(slopes.slope + place.column * kKept, body.slope);
  load(slopes.offset + place.column * kKept, body.offset);
  each_batch(walk, body);
}
