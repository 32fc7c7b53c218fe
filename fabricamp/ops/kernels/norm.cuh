// LayerNorm and RMSNorm: what their kernels share.  A file is compiled for one width and one set of types (ops/norm_kernels.py):
//   WIDTH      elements of a row          VECTOR   neighbours that a thread loads at once; divides WIDTH
//   LANES      threads of a row           ITEMS    loads of a thread for a row: ITEMS * LANES * VECTOR >= WIDTH
//   GROUPS     rows of a block            CENTER   1 LayerNorm, 0 RMSNorm
//   WEIGHT     whether there is a weight  BIAS     whether there is a bias
//   EFFICIENT  whether the output was kept for backward, in place of the input
// and of the types INPUT, OUTPUT, PARAMETER and SAVED (what was kept).
#pragma once

#ifndef WIDTH  // what the doctor compiles
#define WIDTH 1024
#define VECTOR 8
#define LANES 128
#define ITEMS 1
#define GROUPS 2
#define CENTER 1
#define WEIGHT 1
#define BIAS 1
#define EFFICIENT 0
#define SUMS 1
#define AHEAD 1
#define BLOCKS 2
#define INPUT __nv_bfloat16
#define OUTPUT __nv_bfloat16
#define PARAMETER __nv_bfloat16
#define SAVED __nv_bfloat16
#endif

constexpr int kThreads = LANES * GROUPS;
constexpr int kPacks = WIDTH / VECTOR;
constexpr float kShare = 1.f / WIDTH;
constexpr int kTeam = LANES < 32 ? LANES : 32;  // threads of a row that shuffle
constexpr int kTeams = (LANES + 31) / 32;

// The columns of a thread: its item's first one, and whether the row reaches there.
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

// Neighbours as whole words, as long as they are not computed with: a pack's 16-bit values would take a register each.
template <typename T> using Packed = typename Word<sizeof(Pack<T, VECTOR>)>::type;

// For what is read once: past the L1 cache, which then keeps weight and bias for the next row.
template <typename T> __device__ __forceinline__ Packed<T> streamed_at(const T* row, int column) {
  return __ldcg((const Packed<T>*)(row + column));
}

// Makes the compiler forget what it has computed from a pack: it would keep that in registers rather than compute it again.
template <typename P> __device__ __forceinline__ void forget(P& pack) {
  if constexpr (sizeof(pack) % 4 == 0) {
    unsigned words[sizeof(pack) / 4];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (unsigned& word : words) asm volatile("" : "+r"(word));
    memcpy(&pack, words, sizeof(pack));
  }
}

// What neighbours are, computed here and not before.
template <typename T> __device__ __forceinline__ Pack<T, VECTOR> unpacked(Packed<T>& packed) {
  Pack<T, VECTOR> pack;
  forget(packed);
  memcpy(&pack, &packed, sizeof(pack));
  return pack;
}

// An address of which the compiler does not know that it has read there.
template <typename T> __device__ __forceinline__ const T* unknown(const T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// Sums over the threads of a row that are in one warp, the same bits in all of them.
template <int N> __device__ __forceinline__ void team_sums(float (&value)[N]) {
#pragma unroll
  for (int step = kTeam / 2; step > 0; step >>= 1)
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] += __shfl_xor_sync(0xffffffffu, value[n], step);
}

// Sums over the LANES threads of a row, the same bits in all of them.  `turn` alternates: one barrier a sum is enough then.
template <int N> __device__ __forceinline__ void row_sums(float (&value)[N], int& turn) {
  team_sums(value);
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
}

__device__ __forceinline__ float row_sum(float value, int& turn) {
  float values[1] = {value};
  row_sums(values, turn);
  return values[0];
}

// What normalised a row.
struct Row {
  float mean, root;
};

// The elements of a row in the threads of one of its warps; at least 1, for a divisor.
__device__ __forceinline__ int elements_of(int team) {
  int last = kPacks - (ITEMS - 1) * LANES - team * kTeam;  // packs of the last item, those before are whole
  int packs = (ITEMS - 1) * kTeam + (last < 0 ? 0 : last > kTeam ? kTeam : last);
  return packs > 0 ? packs * VECTOR : 1;
}

// A row's mean and one over its deviation, from its warps': the mean of a warp's elements, the sum of the squares of their
// distances from it.  The same bits in all threads; one barrier, once a kernel.
__device__ __forceinline__ Row merged(float mean, float squares, float eps) {
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
  return Row{mean, rsqrtf(squares * kShare + eps)};
}

// The normalised value of an element from what was kept of it.
__device__ __forceinline__ float normalised(float saved, Row row, float weight, float bias, float least) {
#if EFFICIENT
  float divisor = weight >= 0 ? fmaxf(weight, least) : fminf(weight, -least);
  return (saved - bias) / divisor;
#else
  return (saved - row.mean) * row.root;
#endif
}
