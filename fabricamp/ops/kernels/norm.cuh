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

// The columns of a thread: its item's first one, and whether the row reaches there.
__device__ __forceinline__ int column_of(int item, int lane) { return (item * LANES + lane) * VECTOR; }
__device__ __forceinline__ bool inside(int item, int lane) {
  return (item + 1) * LANES <= kPacks || item * LANES + lane < kPacks;
}

template <typename T> __device__ __forceinline__ Pack<T, VECTOR> pack_at(const T* row, int column) {
  return *(const Pack<T, VECTOR>*)(row + column);
}

// Makes the compiler forget what it has computed from a pack: it would keep that in registers rather than compute it again.
template <typename T> __device__ __forceinline__ void forget(Pack<T, VECTOR>& pack) {
  if constexpr (sizeof(pack) % 4 == 0) {
    unsigned words[sizeof(pack) / 4];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (unsigned& word : words) asm volatile("" : "+r"(word));
    memcpy(&pack, words, sizeof(pack));
  }
}

// Sums over the LANES threads of a row, the same bits in all of them.  `turn` alternates: one barrier a sum is enough then.
template <int N> __device__ __forceinline__ void row_sums(float (&value)[N], int& turn) {
#pragma unroll
  for (int step = (LANES < 32 ? LANES : 32) / 2; step > 0; step >>= 1)
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] += __shfl_xor_sync(0xffffffffu, value[n], step);
  if (LANES <= 32) return;
  constexpr int kWarps = (LANES + 31) / 32;
  __shared__ float parts[2][GROUPS][kWarps][N];
  int group = threadIdx.x / LANES, warp = threadIdx.x % LANES / 32;
  if ((threadIdx.x & 31) == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) parts[turn][group][warp][n] = value[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    value[n] = parts[turn][group][0][n];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) value[n] += parts[turn][group][other][n];
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

// The normalised value of an element from what was kept of it.
__device__ __forceinline__ float normalised(float saved, Row row, float weight, float bias, float least) {
#if EFFICIENT
  float divisor = weight >= 0 ? fmaxf(weight, least) : fminf(weight, -least);
  return (saved - bias) / divisor;
#else
  return (saved - row.mean) * row.root;
#endif
}
