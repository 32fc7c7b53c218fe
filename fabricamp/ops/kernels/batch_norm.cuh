// What the kernels of SyncBatchNorm share: how a block walks over its channels, sums in a fixed order, and meets other ranks.
//
// VALUE is the type of activations, PARAMETER that of weight, bias and running values, VECTOR how many neighbours are read at
// once.  PLANES 1: the values of a channel lie side by side (NCHW); 0: the channels of a place do (NHWC).
//
// A block serves one tile of channels (a plane's channel, or `columns` * VECTOR neighbours) and one split of their positions.
// Across ranks travel words of a value and the exchange's number: a word that has the number has arrived, so no fence is needed.
// Two buffers take turns: who writes the next but one has read the next from a peer that was done with this one.
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
constexpr int kThreads = 512;               // the most of a block
constexpr int kTile = 64;                   // the most channels of a block
constexpr int kGroups = 32;                 // the most groups of threads that add up splits
constexpr int kRanks = 8;                   // ranks that are read at once

// ops/sync_batch_norm_kernels.py has the same fields.
struct Layer {
  const Value* x;
  const Value* z;                // a residual that is added, or null
  const Value* dy;
  Value* out;                    // forward: y; backward: the gradient of x, null where nobody needs it and no rank is met
  Value* dz;                     // the gradient of z
  const Parameter* weight;       // null: ones
  const Parameter* bias;         // null: zeros
  Parameter* running_mean;       // null: none are kept
  Parameter* running_var;
  int64* batches;
  float* saved;                  // mean, 1 / deviation and variance of all channels over all ranks, then the count of values
  Parameter* weight_gradient;    // null: nobody asks
  Parameter* bias_gradient;
  volatile int64* partial;       // a pair of floats per split and channel
  int* tickets;                  // one per tile, then one for all tiles
  float* local;                  // what this rank found: two rows, and forward its count
  const float* gathered;         // the same of every rank whose part is read
  volatile Word* const* peers;   // the layer's words in the memory of each rank; null: nothing crosses inside a kernel
  unsigned* exchanges;           // how many there have been
  volatile int64* failed;        // set where a peer did not come: on the device, and for the host
  volatile int64* host_failed;
  int64 rank;
  int64 ranks;                   // in `peers`, or in `gathered`
  int64 timeout;                 // nanoseconds
  int64 channels;
  int64 positions;               // places, or vectors in all planes of a channel
  int64 length;                  // vectors in a plane
  int64 splits;
  int64 per_split;               // positions of each but the last
  int64 tiles;
  int64 columns;                 // threads side by side
  double eps;
  double momentum;               // negative: the average over all batches
};

#ifdef __CUDACC__
__device__ __forceinline__ int64 nanoseconds() {
  int64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
#endif

// Numbers from 0; a division of 64 bits takes some hundred instructions, and few of them need it.
__device__ __forceinline__ int64 quotient(int64 a, int64 b) {
  return (a | b) >> 32 ? a / b : (int64)((unsigned)a / (unsigned)b);
}

// What this block serves.
__device__ __forceinline__ int64 tile_of(const Layer& a) { return blockIdx.x % (unsigned)a.tiles; }
__device__ __forceinline__ int64 split_of(const Layer& a) { return blockIdx.x / (unsigned)a.tiles; }

// Values of a channel in a split.
__device__ __forceinline__ float split_count(const Layer& a, int64 split) {
  int64 per = a.per_split, left = a.positions - split * per;
  left = left < 0 ? 0 : (left < per ? left : per);
  return (float)(PLANES ? left * kVector : left);
}

// The offsets that a thread reads, first to last or backwards (what was read last is still in the cache).
struct Walk {
  int64 at;
  int left;
  int64 step;
#if PLANES
  int64 inner, inner_step, length, wrap;
#endif

  __device__ __forceinline__ Walk(const Layer& a, bool backwards) {
    int64 tile = tile_of(a), split = split_of(a), per = a.per_split;
    int columns = (int)a.columns, lanes = blockDim.x / columns, lane = threadIdx.x / columns;
    int64 first = split * per + lane, end = split * per + per;
    if (end > a.positions) end = a.positions;
    left = first < end ? (int)quotient(end - first + lanes - 1, lanes) : 0;
    if (backwards && left) first += (int64)(left - 1) * lanes;
    int sign = backwards ? -1 : 1;
#if PLANES
    int64 skipped = (a.channels - 1) * a.length;
    length = a.length;
    int64 plane = length ? quotient(first, length) : 0, planes = length ? quotient(lanes, length) : 0;
    inner = first - plane * length;
    at = (plane * a.channels * length + tile * length + inner) * kVector;
    inner_step = sign * (lanes - planes * length);
    step = sign * (planes * a.channels * length + lanes - planes * length) * kVector;
    wrap = sign * skipped * kVector;
#else
    int64 column = tile * columns + threadIdx.x % columns;
    if (column * kVector >= a.channels) left = 0;
    at = first * a.channels + column * kVector;
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

// Runs body.run<count>(offsets) for several places at a time, so that as many loads are under way, then for each that is left.
template <int BATCH, typename Body> __device__ __forceinline__ void each_batch(Walk& walk, Body& body) {
  while (walk.left >= BATCH) {
    int64 offsets[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) offsets[i] = walk.next();
    body.template run<BATCH>(offsets);
  }
  while (walk.left > 0) {
    int64 offsets[1] = {walk.next()};
    body.template run<1>(offsets);
  }
}

__device__ __forceinline__ Pack<Value, kVector> pack_at(const Value* from, int64 offset) {
  return *(const Pack<Value, kVector>*)(from + offset);
}

// How two pairs become one.  Mean and sum of squared deviations: by counts.
struct Moments {
  __device__ __forceinline__ static void merge(float& mean, float& squares, float count, float other_mean,
                                               float other_squares, float other_count) {
    float total = count + other_count;
    if (total == 0.f) return;
    float share = other_count / total, delta = other_mean - mean;
    mean += delta * share;
    squares += other_squares + delta * delta * (count * share);
  }
};

struct Sums {
  __device__ __forceinline__ static void merge(float& first, float& second, float, float other_first, float other_second,
                                               float) {
    first += other_first;
    second += other_second;
  }
};

struct Pair {
  float first, second;
};

__device__ __forceinline__ int64 as_word(Pair pair) {
  int64 word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

__device__ __forceinline__ Pair as_pair(int64 word) {
  Pair pair;
  memcpy(&pair, &word, sizeof pair);
  return pair;
}

// What the threads of a block have, merged in a fixed order; right in threads below the tile's width.
template <typename Rule>
__device__ __forceinline__ Pair over_block(const Layer& a, float (&first)[kKept], float (&second)[kKept], float count) {
  __shared__ Pair kept[kThreads / 32 * kTile];
  __shared__ float counts[kThreads / 32];
  int columns = (int)a.columns, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = columns * kKept;
  for (int step = 16; step >= columns; step >>= 1) {
    float other_count = __shfl_down_sync(0xffffffffu, count, step);
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      float other_first = __shfl_down_sync(0xffffffffu, first[j], step);
      float other_second = __shfl_down_sync(0xffffffffu, second[j], step);
      Rule::merge(first[j], second[j], count, other_first, other_second, other_count);
    }
    count += other_count;
  }
  if (lane < columns) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) kept[warp * width + lane * kKept + j] = Pair{first[j], second[j]};
  }
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  Pair all = {0.f, 0.f};
  if (threadIdx.x < width) {
    float total = 0.f;
    for (int i = 0; i < blockDim.x / 32; ++i) {
      Pair one = kept[i * width + threadIdx.x];
      Rule::merge(all.first, all.second, total, one.first, one.second, counts[i]);
      total += counts[i];
    }
  }
  return all;
}

// The same over all splits of the tile: true in the block that comes last, which has it.
template <typename Rule> __device__ __forceinline__ bool over_splits(const Layer& a, Pair& pair) {
  if (a.splits == 1) return true;
  __shared__ Pair kept[kGroups * kTile];
  __shared__ float counts[kGroups];
  __shared__ bool last;
  int width = (int)a.columns * kKept;
  int64 tile = tile_of(a), split = split_of(a);
  if (threadIdx.x < width) a.partial[(split * a.tiles + tile) * width + threadIdx.x] = as_word(pair);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(a.tickets + tile, 1) + 1 == a.splits;
    if (last) a.tickets[tile] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return false;
  int groups = blockDim.x / width, group = threadIdx.x / width, own = threadIdx.x % width;
  if (groups > kGroups) groups = kGroups;
  if (group < groups) {
    Pair all = {0.f, 0.f};
    float total = 0.f;
#pragma unroll 4
    for (int64 i = group; i < a.splits; i += groups) {
      Pair one = as_pair(a.partial[(i * a.tiles + tile) * width + own]);
      float count = split_count(a, i);
      Rule::merge(all.first, all.second, total, one.first, one.second, count);
      total += count;
    }
    kept[group * width + own] = all;
    counts[group] = total;
  }
  __syncthreads();
  if (threadIdx.x < width) {
    pair = Pair{0.f, 0.f};
    float total = 0.f;
    for (int i = 0; i < groups; ++i) {
      Pair one = kept[i * width + threadIdx.x];
      Rule::merge(pair.first, pair.second, total, one.first, one.second, counts[i]);
      total += counts[i];
    }
  }
  return true;
}

// Where rank `from` puts word `index` of exchange `number`: two buffers of one row a rank.
__device__ __forceinline__ int64 place(const Layer& a, unsigned number, int64 from, int64 index) {
  return ((number & 1) * a.ranks + from) * (2 * a.channels + 1) + index;
}

__device__ __forceinline__ void publish(const Layer& a, int64 index, float value) {
  if (!a.peers) {
    a.local[index] = value;
    return;
  }
  unsigned number = *(volatile unsigned*)a.exchanges + 1, bits;
  memcpy(&bits, &value, sizeof bits);
  Word word = (Word)number << 32 | bits;
  for (int64 i = 0; i < a.ranks; ++i) {
    int64 to = a.rank + i < a.ranks ? a.rank + i : a.rank + i - a.ranks;  // not all to one at once
    a.peers[to][place(a, number, a.rank, index)] = word;
  }
}

// The end of what is published: once every tile is there, the exchange has its number.
__device__ __forceinline__ void close_exchange(const Layer& a) {
  if (!a.peers) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int* ticket = a.tickets + a.tiles;
  if (atomicAdd(ticket, 1) + 1 < a.tiles) return;
  *ticket = 0;
  *a.exchanges += 1;
}

// Waits for a word, of which `word` was read; false where its sender did not come in time, or where one did not before.
__device__ __forceinline__ bool await(const Layer& a, unsigned number, int64 from, volatile Word* where, Word word,
                                      float& value) {
  int64 began = 0;
  for (int polls = 1; (unsigned)(word >> 32) != number; ++polls) {
    if (polls % 64 == 0) {
      int64 now = nanoseconds();
      if (began == 0) began = now;
      if (*a.failed != 0) return false;
      if (now - began > a.timeout) {
        *a.failed = from + 1;
        *a.host_failed = from + 1;
        __threadfence_system();
        return false;
      }
    }
    word = *where;
  }
  unsigned bits = (unsigned)word;
  memcpy(&value, &bits, sizeof value);
  return true;
}

// A channel's pair from rank `from`, and with `counted` that rank's count.
__device__ __forceinline__ bool receive(const Layer& a, unsigned number, int64 from, int64 channel, bool counted, Pair& pair,
                                        float& count) {
  volatile Word* row = a.peers[a.rank] + place(a, number, from, 0);
  volatile Word *first = row + channel, *second = first + a.channels, *third = counted ? row + 2 * a.channels : first;
  Word words[3] = {*first, *second, *third};  // all under way at once
  return await(a, number, from, first, words[0], pair.first) && await(a, number, from, second, words[1], pair.second) &&
         await(a, number, from, third, words[2], count);
}

// Rows `first` and `second` of every rank for the tile's channels, merged in the order of ranks; right in threads below the tile's
// width.  `count` is forward's number of values over all ranks.  False in all threads where a rank did not come.
template <typename Rule, bool COUNTS> __device__ __forceinline__ bool over_ranks(const Layer& a, Pair& all, float& count) {
  __shared__ Pair kept[kRanks * kTile];
  __shared__ float counts[kRanks];
  __shared__ int missing;
  int width = (int)a.columns * kKept;
  int64 tile = tile_of(a), row = 2 * a.channels + 1;
  unsigned number = a.peers ? *(volatile unsigned*)a.exchanges : 0;
  all = Pair{0.f, 0.f};
  count = 0.f;
  if (threadIdx.x == 0) missing = 0;
  for (int64 base = 0; base < a.ranks; base += kRanks) {
    int ranks = (int)(a.ranks - base < kRanks ? a.ranks - base : kRanks);
    __syncthreads();
    for (int i = threadIdx.x; i < ranks * width; i += blockDim.x) {
      int64 rank = base + i / width, channel = tile * width + i % width;
      if (channel >= a.channels) continue;
      Pair pair = {0.f, 0.f};
      float found = 0.f;
      bool counted = COUNTS && i % width == 0;
      if (a.peers) {
        if (!receive(a, number, rank, channel, counted, pair, found)) missing = 1;
      } else {
        pair = Pair{a.gathered[rank * row + channel], a.gathered[rank * row + a.channels + channel]};
        if (counted) found = a.gathered[rank * row + 2 * a.channels];
      }
      kept[i] = pair;
      if (i % width == 0) counts[i / width] = found;
    }
    __syncthreads();
    if (missing) return false;
    if (threadIdx.x < width) {
      for (int i = 0; i < ranks; ++i) {
        Pair one = kept[i * width + threadIdx.x];
        Rule::merge(all.first, all.second, count, one.first, one.second, counts[i]);
        count += counts[i];
      }
    }
  }
  return true;
}
