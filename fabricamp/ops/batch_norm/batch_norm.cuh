// Shared by the kernels of SyncBatchNorm: how a block loops over its channels and sums in a fixed order.
//
// VALUE is the type of activations, PARAMETER that of weight, bias and running values, VECTOR the number of neighbours read at
// once.  PLANES 1: the values of a channel are contiguous (NCHW); 0: the channels of a position are contiguous (NHWC).
//
// A block works on one tile of channels (a plane's channel, or `columns` * VECTOR neighbours) and one split of their positions.
// Small layers are bound by latencies, not by bytes: all loads that depend on nothing are issued first, all at once.
#pragma once

#ifndef VALUE
#define VALUE __half
#define PARAMETER float
#define VECTOR 8
#define PLANES 0
#endif
#ifndef RELU
#define RELU 0
#define RESIDUAL 0
#endif

typedef VALUE Value;
typedef PARAMETER Parameter;
typedef unsigned long long Word;

constexpr int kVector = VECTOR;
constexpr int kKept = PLANES ? 1 : VECTOR;  // channels of a thread
constexpr int kThreads = 512;               // the most in a block
constexpr int kTile = 64;                   // the most channels of a block
constexpr int kGroups = 32;                 // the most groups of threads that add splits
constexpr int kRanks = 4;                   // ranks whose words are read at once
constexpr int kUnderWay = 8;                // splits whose sums a thread loads at once

// How the blocks of a launch share the work; ops/batch_norm/kernels.py fills in this structure and Layer.
struct Tiling {
  int64 tiles;
  int64 splits;
  int64 per_split;    // positions of each split but the last, which has fewer
  int64 column_bits;  // log2 of the threads along the channels
  int64 lane_bits;    // log2 of the block's threads along the positions
};

struct Layer {
  const Value* x;
  const Value* z;                // the residual, or null
  const Value* dy;
  Value* out;                    // forward: y; backward: the gradient of x, null if it is not needed (then there is no exchange)
  Value* dz;                     // the gradient of z
  const Parameter* weight;       // null: ones
  const Parameter* bias;         // null: zeros
  Parameter* running_mean;       // null: no running values
  Parameter* running_var;
  unsigned long long* batches;
  float* saved;                  // mean, 1 / deviation and variance of all channels over all ranks, then the count of values
  Parameter* weight_gradient;    // null: not needed
  Parameter* bias_gradient;
  int64* partial;                // a pair of floats per split and channel
  int* tickets;                  // one per tile, then one per group of channels
  float* local;                  // forward: two rows and the count of this rank; backward: the sums over all ranks
  const float* gathered;         // `local` of every rank, after a collective
  volatile Word* const* peers;   // the layer's words in the memory of each rank; null: no exchange inside a kernel
  volatile Word* own;            // the words of this rank
  unsigned* exchanges;           // number of exchanges so far, per channel
  volatile int64* failed;        // set to the rank + 1 of a peer that timed out: on the device, and for the host
  volatile int64* host_failed;
  int64 rank;
  int64 ranks;
  int64 crosses;                 // a collective follows: the results of this rank are written to `local`
  int64 timeout;                 // nanoseconds
  int64 channels;
  int64 positions;               // positions of a channel, or vectors in all its planes
  int64 length;                  // vectors in a plane
  int64 group_bits;              // log2 of the channels that one block waits for, at least a tile
  Tiling sums;                   // of the kernels that sum
  Tiling spread;                 // of the kernels that write every value
  double eps;
  double momentum;               // negative: the average over all batches
};

// Division of numbers >= 0: a 64-bit division takes about a hundred instructions, and few numbers need it.
__device__ __forceinline__ int64 quotient(int64 a, int64 b) {
  return (a | b) >> 32 ? a / b : (int64)((unsigned)a / (unsigned)b);
}

// The tile, split, column and lane of this thread.
struct Place {
  int tile, split;
  int width, width_bits;  // channels of a tile: a power of two
  int column, lane;

  __device__ __forceinline__ explicit Place(const Tiling& tiling) {
    int bits = (int)tiling.column_bits;
    split = tiling.splits == 1 ? 0 : (int)(blockIdx.x / (unsigned)tiling.tiles);
    tile = (int)blockIdx.x - split * (int)tiling.tiles;
    width_bits = bits + (kKept == 8 ? 3 : kKept == 4 ? 2 : kKept == 2 ? 1 : 0);
    width = 1 << width_bits;
    column = threadIdx.x & ((1 << bits) - 1);
    lane = threadIdx.x >> bits;
  }

  // The channel of thread `own`, for threads below the width.
  __device__ __forceinline__ int64 channel(int own) const { return (int64)tile * width + own; }
};

__device__ __forceinline__ int64 positions_of(const Layer& a, const Tiling& tiling, int64 split) {
  int64 per = tiling.per_split, left = a.positions - split * per;
  return left < 0 ? 0 : (left < per ? left : per);
}

// The number of a channel's values at this number of positions.
__device__ __forceinline__ float values_at(int64 positions) { return (float)(PLANES ? positions * kVector : positions); }

// The offsets that a thread reads, forwards, or backwards (values read last are still in the cache).
struct Walk {
  int64 at;
  int left;
  int64 step;
#if PLANES
  int64 inner, inner_step, length, wrap;
#endif

  __device__ __forceinline__ Walk(const Layer& a, const Tiling& tiling, const Place& place, bool backwards) {
    int bits = (int)tiling.lane_bits, lanes = 1 << bits;
    int64 found = positions_of(a, tiling, place.split), first = place.split * tiling.per_split + place.lane;
    left = (int)((found - place.lane + lanes - 1) >> bits);
    if (left < 0) left = 0;
    if (backwards && left) first += (int64)(left - 1) * lanes;
    int sign = backwards ? -1 : 1;
#if PLANES
    int64 skipped = (a.channels - 1) * a.length;
    length = a.length;
    int64 plane = first < length ? 0 : quotient(first, length), planes = lanes < length ? 0 : quotient(lanes, length);
    inner = first - plane * length;
    at = (plane * a.channels * length + place.tile * length + inner) * kVector;
    inner_step = sign * (lanes - planes * length);
    step = sign * (planes * a.channels * length + lanes - planes * length) * kVector;
    wrap = sign * skipped * kVector;
#else
    int64 channel = place.channel(place.column * kVector);
    if (channel >= a.channels) left = 0;
    at = first * a.channels + channel;
    step = sign * lanes * a.channels;
#endif
  }

  __device__ __forceinline__ int64 next() {
    int64 now = at;
    --left;
    at += step;
#if PLANES
    inner += inner_step;
    if (inner >= length || inner < 0) {
      inner += inner < 0 ? length : -length;
      at += wrap;
    }
#endif
    return now;
  }
};

// Calls body.use(walk) for the values that body.load(walk) has loaded, then loads and uses the rest.  One of the two advances the
// walk: load, or use if it writes to the same offsets.
template <typename Body> __device__ __forceinline__ void each_batch(Walk& walk, Body& body) {
  for (;;) {
    body.use(walk);
    if (walk.left <= 0) return;
    body.load(walk);
  }
}

// Neighbours in the form they are loaded in: this takes fewer registers than single values.
template <int BYTES> struct RawOf { typedef Pack<unsigned, BYTES / 4> type; };
template <> struct RawOf<2> { typedef Pack<unsigned short, 1> type; };
typedef RawOf<sizeof(Value) * kVector>::type Raw;
typedef Pack<Value, kVector> Neighbours;

__device__ __forceinline__ Neighbours neighbours(const Raw& raw) {
  Neighbours found;
  memcpy(&found, &raw, sizeof found);
  return found;
}

__device__ __forceinline__ Raw raw_at(const Value* from, int64 offset) { return *(const Raw*)(from + offset); }

struct Pair {
  float first, second;
};

// Merges pairs of a mean and a sum of squared deviations, relative to the first mean: this takes one division in total.
struct Moments {
  static constexpr bool kCounted = true;
  float reference = 0.f, first = 0.f, second = 0.f, count = 0.f;

  __device__ __forceinline__ void add(Pair one, float values) {
    if (count == 0.f) reference = one.first;
    float delta = one.first - reference, part = values * delta;
    first += part;
    second += one.second + part * delta;
    count += values;
  }

  __device__ __forceinline__ Pair result() const { return of(reference, first, second, count > 0.f ? 1.f / count : 0.f); }

  // Computes a pair from the sum of deviations from `around` and the sum of their squares.
  __device__ __forceinline__ static Pair of(float around, float sum, float square, float inverse_count) {
    float drift = sum * inverse_count, squares = square - sum * drift;
    return Pair{around + drift, squares < 0.f ? 0.f : squares};
  }
};

struct Sums {
  static constexpr bool kCounted = false;
  float first = 0.f, second = 0.f, count = 0.f;

  __device__ __forceinline__ void add(Pair one, float) {
    first += one.first;
    second += one.second;
  }

  __device__ __forceinline__ Pair result() const { return Pair{first, second}; }
};

// The number of a channel's values in each warp of a block, and the inverses.
struct Counts {
  float values[kThreads / 32], inverse[kThreads / 32];

  // Filled by the first threads; a barrier has to follow.
  __device__ __forceinline__ void fill(const Layer& a, const Tiling& tiling, const Place& place) {
    if (threadIdx.x >= blockDim.x / 32) return;
    int lanes = 32 >> (int)tiling.column_bits;  // of a warp
    int64 found = positions_of(a, tiling, place.split), full = found >> (int)tiling.lane_bits;
    int rest = (int)(found - (full << (int)tiling.lane_bits)) - (int)threadIdx.x * lanes;
    rest = rest < 0 ? 0 : (rest < lanes ? rest : lanes);
    float count = values_at(full * lanes + rest);
    values[threadIdx.x] = count;
    inverse[threadIdx.x] = count > 0.f ? 1.f / count : 0.f;
  }
};

// Sums values over the lanes of a warp with the same column.  Each step halves the values that a lane keeps: in the end it has
// `held` values, starting at index `from`.
template <int HELD, int STEP, int COUNT>
__device__ __forceinline__ void over_warp(float (&values)[COUNT], int columns, int& from, int& held) {
  if constexpr (STEP > 0) {
    if (STEP < columns) return;
    bool upper = threadIdx.x & STEP;
    constexpr int kHalf = HELD / 2;
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      float given = upper ? values[j] : values[j + kHalf], kept = upper ? values[j + kHalf] : values[j];
      values[j] = kept + __shfl_xor_sync(0xffffffffu, given, STEP);
    }
    if constexpr (HELD == 1) {
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], STEP);
      over_warp<1, STEP / 2>(values, columns, from, held);
    } else {
      held = kHalf;
      from += upper ? kHalf : 0;
      over_warp<kHalf, STEP / 2>(values, columns, from, held);
    }
  }
}

// Merges the values of a block's threads in a fixed order; valid in threads below the tile's width.  For a rule that counts, the
// inputs are a thread's mean and squares of `own` values, and the counts of the warps.
template <typename Rule>
__device__ __forceinline__ Pair over_block(const Place& place, float (&first)[kKept], float (&second)[kKept], float own,
                                           const Counts* counts) {
  __shared__ float kept[2 * kThreads / 32 * kTile], around[kThreads / 32 * kTile];
  int columns = place.width / kKept, warp = threadIdx.x >> 5, at = warp * place.width + place.column * kKept;
  int from = 0, held = 2 * kKept;
  float values[2 * kKept];
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    values[2 * j] = first[j];
    values[2 * j + 1] = second[j];
    if (Rule::kCounted) {
      float reference = __shfl_sync(0xffffffffu, first[j], place.column), delta = first[j] - reference;
      values[2 * j] = own * delta;
      values[2 * j + 1] += own * delta * delta;
      if ((threadIdx.x & 31) < columns) around[at + j] = reference;
    }
  }
  over_warp<2 * kKept, 16>(values, columns, from, held);
#pragma unroll
  for (int j = 0; j < 2 * kKept; ++j) {
    if (j < held) kept[2 * at + from + j] = values[j];
  }
  __syncthreads();
  Rule all;
  if (threadIdx.x < place.width) {
#pragma unroll 4
    for (int i = 0; i < blockDim.x / 32; ++i) {
      int index = i * place.width + threadIdx.x;
      Pair one = {kept[2 * index], kept[2 * index + 1]};
      if (Rule::kCounted) one = Moments::of(around[index], one.first, one.second, counts->inverse[i]);
      all.add(one, Rule::kCounted ? counts->values[i] : 0.f);
    }
  }
  return all.result();
}

// Takes the next ticket.  Writes of the block before a barrier are visible to a block that takes a later ticket, after its barrier.
__device__ __forceinline__ int take_ticket(int* at) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
  int taken;
  asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(taken) : "l"(at) : "memory");
  return taken;
#else
  __threadfence();
  int taken = atomicAdd(at, 1);
  __threadfence();
  return taken;
#endif
}

// Merges over all splits of the tile: returns true in the last block to arrive; `pair` is valid in it.
template <typename Rule>
__device__ __forceinline__ bool over_splits(const Layer& a, const Tiling& tiling, const Place& place, Pair& pair) {
  int splits = (int)tiling.splits, tiles = (int)tiling.tiles, width = place.width;
  if (splits == 1) return true;
  __shared__ Pair kept[kGroups * kTile];
  __shared__ float counts[kGroups];
  __shared__ bool last;
  if (threadIdx.x < width) {
    int64 word;
    memcpy(&word, &pair, sizeof word);
    a.partial[((int64)place.split * tiles + place.tile) * width + threadIdx.x] = word;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    last = take_ticket(a.tickets + place.tile) + 1 == splits;
    if (last) a.tickets[place.tile] = 0;
  }
  __syncthreads();
  if (!last) return false;
  int group = threadIdx.x >> place.width_bits, own = threadIdx.x & (width - 1), groups = blockDim.x >> place.width_bits;
  if (groups > kGroups) groups = kGroups;
  if (group < groups) {
    Rule all;
    float full = values_at(tiling.per_split), less = values_at(positions_of(a, tiling, splits - 1));
    const int64* from = a.partial + (int64)place.tile * width + own;
    for (int base = group; base < splits; base += kUnderWay * groups) {
      int64 words[kUnderWay];
#pragma unroll
      for (int i = 0; i < kUnderWay; ++i) {
        int split = base + i * groups;
        words[i] = split < splits ? __ldcg(from + (int64)split * tiles * width) : 0;
      }
#pragma unroll
      for (int i = 0; i < kUnderWay; ++i) {
        int split = base + i * groups;
        Pair one;
        memcpy(&one, &words[i], sizeof one);
        all.add(one, split + 1 < splits ? full : (split + 1 == splits ? less : 0.f));
      }
    }
    kept[group * width + own] = all.result();
    counts[group] = all.count;
  }
  __syncthreads();
  if (threadIdx.x < width) {
    Rule all;
#pragma unroll 4
    for (int i = 0; i < groups; ++i) all.add(kept[i * width + threadIdx.x], counts[i]);
    pair = all.result();
  }
  return true;
}
