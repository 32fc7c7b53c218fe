// Shared by the kernels of LayerNorm and RMSNorm.  A file is compiled for one width and one set of types (ops/norm/plans.py):
//   WIDTH      elements of a row          VECTOR   neighbours that a thread loads at once; divides a slice
//   LANES      threads of a slice         ITEMS    loads of a thread for a row: ITEMS * LANES * VECTOR >= WIDTH / CLUSTER
//   GROUPS     rows of a block            CLUSTER  blocks of a row (cluster.cuh), each with a slice of its columns; or 1
//   WEIGHT     whether there is a weight  BIAS     whether there is a bias
//   CENTER     1 LayerNorm, 0 RMSNorm
//   EFFICIENT  whether the output was saved for backward, instead of the input
// and the types INPUT, OUTPUT, PARAMETER and SAVED (of the saved tensor).
#pragma once

#ifndef WIDTH  // the configuration that `fabricamp doctor` compiles
#define WIDTH 1024
#define VECTOR 8
#define LANES 128
#define ITEMS 1
#define GROUPS 2
#define CLUSTER 1
#define CENTER 1
#define WEIGHT 1
#define BIAS 1
#define EFFICIENT 0
#define SUMS 1
#define AHEAD 1
#define BLOCKS 2
#define STAGES 4
#define INPUT __nv_bfloat16
#define OUTPUT __nv_bfloat16
#define PARAMETER __nv_bfloat16
#define SAVED __nv_bfloat16
#endif

constexpr int kThreads = LANES * GROUPS;
constexpr int kSlice = WIDTH / CLUSTER;  // columns of a block
constexpr int kPacks = kSlice / VECTOR;
constexpr float kShare = 1.f / WIDTH;
constexpr int kTeam = LANES < 32 ? LANES : 32;  // threads of a slice that shuffle with each other
constexpr int kTeams = (LANES + 31) / 32;
constexpr int kWarps = CLUSTER * kTeams;  // of a row
constexpr int kSpan = kWarps < 32 && (kWarps & (kWarps - 1)) == 0 ? kWarps : 32;  // threads that add the results of the warps

// The first column of the block's slice.
__device__ __forceinline__ int slice_start() { return (int)(blockIdx.x % CLUSTER) * kSlice; }

// A thread's index in its row's slice, and the index of that row in the block.  With one group both are constants: saves registers.
__device__ __forceinline__ int lane_of_row() { return GROUPS == 1 ? threadIdx.x : threadIdx.x % LANES; }
__device__ __forceinline__ int group_of_block() { return GROUPS == 1 ? 0 : threadIdx.x / LANES; }

// The columns of a thread in its slice: the first column of an item, and whether the slice contains the item.
__device__ __forceinline__ int column_of(int item, int lane) { return (item * LANES + lane) * VECTOR; }
__device__ __forceinline__ bool inside(int item, int lane) {
  return (item + 1) * LANES <= kPacks || item * LANES + lane < kPacks;
}

template <typename T> __device__ __forceinline__ Pack<T, VECTOR> pack_at(const T* row, int column) {
  return *(const Pack<T, VECTOR>*)(row + column);
}

template <int BYTES> struct Word;
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

// Neighbours packed in full words until they are computed with: the 16-bit values of a pack would take one register each.
template <typename T> using Packed = typename Word<sizeof(Pack<T, VECTOR>)>::type;

// Reads values that are needed once: bypasses the L1 cache, which then keeps weight and bias for the next row.
template <typename T> __device__ __forceinline__ Packed<T> streamed_at(const T* row, int column) {
  return __ldcg((const Packed<T>*)(row + column));
}

// Narrows and stores neighbours at once: compilers were seen to split a plain store into one per neighbour.
template <typename T> __device__ __forceinline__ void put(T* to, const float (&from)[VECTOR]) {
  Pack<T, VECTOR> pack;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) pack.value[j] = Narrow<T>::of(from[j]);
  Packed<T> words;
  memcpy(&words, &pack, sizeof(words));
  __stwb((Packed<T>*)to, words);
}

// Makes the compiler forget values computed from a pack: it would keep them in registers rather than compute them again.
template <typename P> __device__ __forceinline__ void forget(P& pack) {
  if constexpr (sizeof(pack) % 4 == 0) {
    unsigned words[sizeof(pack) / 4];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (unsigned& word : words) asm volatile("" : "+r"(word));
    memcpy(&pack, words, sizeof(pack));
  }
}

// Unpacks neighbours here, not earlier.
template <typename T> __device__ __forceinline__ Pack<T, VECTOR> unpacked(Packed<T>& packed) {
  Pack<T, VECTOR> pack;
  forget(packed);
  memcpy(&pack, &packed, sizeof(pack));
  return pack;
}

// Hides from the compiler that it has already read from this address.
template <typename T> __device__ __forceinline__ const T* unknown(const T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// Sums over the threads of a row in one warp (or over SPAN of these), the same bits in all of them.
template <int SPAN = kTeam, int N> __device__ __forceinline__ void team_sums(float (&value)[N]) {
#pragma unroll
  for (int step = SPAN / 2; step > 0; step >>= 1)
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] += __shfl_xor_sync(0xffffffffu, value[n], step);
}

#if CLUSTER > 1
// Collects the values of all warps of the row in each block's shared memory; they stay valid for one more turn.
template <int N> __device__ __forceinline__ const Pack<float, N>* collected(const float (&value)[N], int& turn) {
  __shared__ Pack<float, N> warps[2][kWarps];
  Pack<float, N>* row = warps[turn & 1];
  int rank = threadIdx.x & 31;
  if (rank < CLUSTER) post(turn, row + blockIdx.x % CLUSTER * kTeams + threadIdx.x / 32, rank, value);
  receive(turn++, sizeof(warps[0]));
  return row;
}
#endif

// Sums over the threads of a row, the same bits in all of them.  `turn` alternates, or counts
// in a cluster, so that one barrier per sum is enough.
template <int N> __device__ __forceinline__ void row_sums(float (&value)[N], int& turn) {
  team_sums(value);
#if CLUSTER > 1
  const Pack<float, N>* warps = collected(value, turn);
#pragma unroll
  for (int n = 0; n < N; ++n) value[n] = 0;
#pragma unroll
  for (int warp = threadIdx.x % kSpan; warp < kWarps; warp += kSpan)
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] += warps[warp].value[n];
  team_sums<kSpan>(value);
#else
  if (kTeams == 1) return;
  __shared__ float parts[2][GROUPS][kTeams][N];
  int group = threadIdx.x / LANES, warp = threadIdx.x % LANES / 32;
  if ((threadIdx.x & 31) == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) parts[turn][group][warp][n] = value[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    value[n] = parts[turn][group][0][n];
#pragma unroll
    for (int other = 1; other < kTeams; ++other) value[n] += parts[turn][group][other][n];
  }
  turn ^= 1;
#endif
}

__device__ __forceinline__ float row_sum(float value, int& turn) {
  float values[1] = {value};
  row_sums(values, turn);
  return values[0];
}

// The statistics that normalised a row: its mean, and 1 / deviation.
struct Row {
  float mean, root;
};

// The elements of a slice in the threads of one of its warps; at least 1, for a divisor.
__device__ __forceinline__ int elements_of(int team) {
  int last = kPacks - (ITEMS - 1) * LANES - team * kTeam;  // packs of the last item; the items before are full
  int packs = (ITEMS - 1) * kTeam + (last < 0 ? 0 : last > kTeam ? kTeam : last);
  return packs > 0 ? packs * VECTOR : 1;
}

// A row's mean and 1 / deviation from the statistics of its warps (the mean of a warp's elements, the sum of squares of their
// distances from this mean).  The same bits in all threads; one barrier, once per kernel.
__device__ __forceinline__ Row merged(float mean, float squares, float eps) {
#if CLUSTER > 1
  int turn = 0;
  float own[2] = {mean, squares}, sum[1] = {0};
  const Pack<float, 2>* warps = collected(own, turn);
#pragma unroll
  for (int warp = threadIdx.x % kSpan; warp < kWarps; warp += kSpan) sum[0] += warps[warp].value[0] * elements_of(warp % kTeams);
  team_sums<kSpan>(sum);
  mean = sum[0] * kShare;
  sum[0] = 0;
#pragma unroll
  for (int warp = threadIdx.x % kSpan; warp < kWarps; warp += kSpan) {
    float apart = warps[warp].value[0] - mean;
    sum[0] += warps[warp].value[1] + apart * apart * elements_of(warp % kTeams);
  }
  team_sums<kSpan>(sum);
  squares = sum[0];
#else
  if (kTeams > 1) {
    __shared__ float means[GROUPS][kTeams], rests[GROUPS][kTeams];
    int group = threadIdx.x / LANES, team = threadIdx.x % LANES / 32;
    if ((threadIdx.x & 31) == 0) means[group][team] = mean, rests[group][team] = squares;
    __syncthreads();
    mean = squares = 0;
#pragma unroll
    for (int other = 0; other < kTeams; ++other) mean += means[group][other] * elements_of(other);
    mean *= kShare;
#pragma unroll
    for (int other = 0; other < kTeams; ++other) {
      float apart = means[group][other] - mean;
      squares += rests[group][other] + apart * apart * elements_of(other);
    }
  }
#endif
  return Row{mean, rsqrtf(squares * kShare + eps)};
}

// The normalised value of an element from its saved value.
__device__ __forceinline__ float normalised(float saved, Row row, float weight, float bias, float least) {
#if EFFICIENT
  float divisor = weight >= 0 ? fmaxf(weight, least) : fminf(weight, -least);
  return (saved - bias) / divisor;
#else
  return CENTER ? fmaf(saved, row.root, -row.mean * row.root) : saved * row.root;
#endif
}

// A row's second sum is of gradients times normalised values.  A normalised value is linear in the saved value, so the products
// with saved values are enough: this takes fewer instructions, and the kernels have no time to spare for more.
__device__ __forceinline__ float summed(float saved, Row row, float weight, float bias, float least) {
  return EFFICIENT ? normalised(saved, row, weight, bias, least) : saved;
}
__device__ __forceinline__ float second_sum(float first, float second, Row row) {
  return EFFICIENT ? second : row.root * (CENTER ? second - row.mean * first : second);
}
