// Shared by all kernels over a tensor table (built by ops/table.py): one block works on one chunk of one row.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef long long int64;

// The type of a column that a row does not have.
struct None {};

template <typename T> struct MathOf { typedef float type; };
template <> struct MathOf<double> { typedef double type; };

// The type of arithmetic between two columns.
template <typename A, typename B> struct CommonMath {
  typedef decltype(typename MathOf<A>::type() + typename MathOf<B>::type()) type;
};

// The metadata matrix: lines of `rows` words each (drawn in ops/table.py): first chunk, size, info, then the addresses.
enum Line { FIRST_CHUNK, SIZE, INFO, COLUMNS };

struct Table {
  const int64* lines;
  const int* chunk_rows;
  const double* scalars;
  int* tickets;
  int64 rows;
  int64 chunk_size;
  int columns;
  int scalars_per_group;
  int flag_cell;  // index of the cell that is 0 in rows to skip, or -1
  int first_number;  // the line of a row's first number, or 0: rows have none
};

struct Chunk {
  int row;
  int kind;
  bool aligned;
  int64 offset;
  int count;
  const double* scalars;
};

__device__ __forceinline__ int64 line_word(const Table& table, int line, int row) {
  return table.lines[line * table.rows + row];
}

// The cell `index` (one value per row) of the chunk's row.
template <typename T> __device__ __forceinline__ T* cell(const Table& table, const Chunk& chunk, int index) {
  return (T*)line_word(table, COLUMNS + table.columns + index, chunk.row);
}

// The chunk's part of a column.
template <typename T> __device__ __forceinline__ T* column(const Table& table, const Chunk& chunk, int index) {
  return (T*)line_word(table, COLUMNS + index, chunk.row) + chunk.offset;
}

// Finds the first chunk of a row; returns false if the row is to be skipped.  The same in all threads of a block.
__device__ __forceinline__ bool locate_row(const Table& table, int row, Chunk& chunk) {
  int64 info = line_word(table, INFO, row), size = line_word(table, SIZE, row);
  chunk.row = row;
  chunk.kind = (int)(info & 0xff);
  chunk.aligned = (info >> 8) & 1;
  chunk.scalars = table.scalars + (info >> 16) * table.scalars_per_group;
  chunk.offset = 0;
  chunk.count = (int)(size < table.chunk_size ? size : table.chunk_size);
  if (line_word(table, COLUMNS, row) == 0) return false;
  if (table.flag_cell < 0) return true;
  const float* flag = cell<const float>(table, chunk, table.flag_cell);
  return flag == nullptr || *flag != 0.f;
}

// Finds this block's chunk; returns false if its row is to be skipped.  The same in all threads of a block.
__device__ __forceinline__ bool locate(const Table& table, Chunk& chunk) {
  int row = table.chunk_rows[blockIdx.x];
  bool takes_part = locate_row(table, row, chunk);
  chunk.offset = (blockIdx.x - line_word(table, FIRST_CHUNK, row)) * table.chunk_size;
  int64 left = line_word(table, SIZE, row) - chunk.offset;
  chunk.count = (int)(left < table.chunk_size ? left : table.chunk_size);
  return takes_part;
}

// Random bits of a row's elements (ops/draws.py): its numbers are the key, and the number of its first element in the parameter.
struct Draws {
  unsigned low;
  unsigned high;
  int64 first;
  bool active;

  __device__ __forceinline__ unsigned of(int64 i) const {
    unsigned long long element = (unsigned long long)(first + i);
    unsigned word = ((unsigned)element ^ low) + (unsigned)(element >> 32) * 0x85ebca6bu;
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    word = (word ^ (word >> 16) ^ high) * 0x297a2d39u;
    return word ^ (word >> 15);
  }
};

// The draws of a step; `step` counts it.
__device__ __forceinline__ Draws draws_of(const Table& table, const Chunk& chunk, float step) {
  if (table.first_number == 0) return Draws{0, 0, 0, false};
  unsigned long long word = (unsigned long long)line_word(table, table.first_number, chunk.row);
  word += (unsigned long long)step * 0x9e3779b97f4a7c15ull;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
  word ^= word >> 31;
  int64 first = line_word(table, table.first_number + 1, chunk.row) + chunk.offset;
  return Draws{(unsigned)word, (unsigned)(word >> 32), first, true};
}

// The draws of the next step, if the steps are counted in a cell of the rows' own.
__device__ __forceinline__ Draws draws_counted_in(const Table& table, const Chunk& chunk, int index) {
  return draws_of(table, chunk, table.first_number == 0 ? 0.f : *cell<const float>(table, chunk, index) + 1.f);
}

// Called by every thread of every block at its end: true in one thread of the row's last block to arrive.
__device__ __forceinline__ bool last_of_row(const Table& table, const Chunk& chunk) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  int64 size = line_word(table, SIZE, chunk.row);
  int chunks = (int)((size + table.chunk_size - 1) / table.chunk_size);
  int* ticket = table.tickets + chunk.row;
  if (atomicAdd(ticket, 1) + 1 < chunks) return false;
  *ticket = 0;
  return true;
}

template <typename T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Pack { T value[N]; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> struct Narrow;
template <> struct Narrow<float> { template <typename M> __device__ static float of(M x) { return (float)x; } };
template <> struct Narrow<double> { template <typename M> __device__ static double of(M x) { return (double)x; } };
template <> struct Narrow<__half> {
  template <typename M> __device__ static __half of(M x) { return __float2half_rn((float)x); }
};
template <> struct Narrow<__nv_bfloat16> {
  template <typename M> __device__ static __nv_bfloat16 of(M x) { return __float2bfloat16_rn((float)x); }
};

// Loads N neighbours at once, widened to M; N = 1 needs no alignment.
template <int N, typename T, typename M> __device__ __forceinline__ void load(const T* from, M (&to)[N]) {
  Pack<T, N> pack = *(const Pack<T, N>*)from;
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = (M)widen(pack.value[j]);
}

// A column that the row does not have reads as zeros, and a store to it does nothing.
template <int N, typename M> __device__ __forceinline__ void load(const None*, M (&to)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = 0;
}

template <int N, typename T, typename M> __device__ __forceinline__ void store(T* to, const M (&from)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) pack.value[j] = Narrow<T>::of(from[j]);
  *(Pack<T, N>*)to = pack;
}

template <int N, typename M> __device__ __forceinline__ void store(None*, const M (&)[N]) {}

// Whether a state is rounded stochastically.
template <typename T> struct IsDrawn { static const bool value = false; };
template <> struct IsDrawn<__nv_bfloat16> { static const bool value = true; };

// Stores a state; a bf16 one is rounded up in magnitude where the lower 16 of `bits`, added to the value's, carry.
template <int N, typename T, typename M>
__device__ __forceinline__ void store_state(T* to, const M (&from)[N], const unsigned (&)[N], bool) {
  store<N>(to, from);
}

template <int N>
__device__ __forceinline__ void store_state(__nv_bfloat16* to, const float (&from)[N], const unsigned (&bits)[N], bool drawn) {
  if (!drawn) {
    store<N>(to, from);
    return;
  }
  Pack<__nv_bfloat16, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    unsigned word = from[j] == from[j] ? __float_as_uint(from[j]) + (bits[j] & 0xffffu) : 0x7fc00000u;
    pack.value[j] = __ushort_as_bfloat16((unsigned short)(word >> 16));
  }
  *(Pack<__nv_bfloat16, N>*)to = pack;
}

// The 16 bits that a bf16 parameter lacks (ops/remainders.py); a row has them in place of a half copy.
typedef short Remainder;

// The values of a row's parameters.
template <int N, typename P, typename C, typename M>
__device__ __forceinline__ void load_parameters(const P* parameters, const C*, M (&to)[N]) {
  load<N>(parameters, to);
}

template <int N>
__device__ __forceinline__ void load_parameters(const __nv_bfloat16* parameters, const Remainder* remainders, float (&to)[N]) {
  Pack<__nv_bfloat16, N> pack = *(const Pack<__nv_bfloat16, N>*)parameters;
  Pack<Remainder, N> left = *(const Pack<Remainder, N>*)remainders;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    unsigned upper = (unsigned)__bfloat16_as_ushort(pack.value[j]) << 16;
    unsigned bits = upper + (unsigned)(int)left.value[j];
    // Zero with a negative remainder, which no value leaves but an edit may, would carry into the sign.
    to[j] = __uint_as_float((int)(bits ^ upper) < 0 ? upper : bits);
  }
}

// Writes the values into parameters, and what these lack into remainders.
template <int N, typename P, typename C, typename M>
__device__ __forceinline__ void store_values(P* parameters, C*, const M (&from)[N]) {
  store<N>(parameters, from);
}

// Writes the values into half copies.
template <int N, typename C, typename M> __device__ __forceinline__ void store_copies(C* copies, const M (&from)[N]) {
  store<N>(copies, from);
}

template <int N, typename M> __device__ __forceinline__ void store_copies(Remainder*, const M (&)[N]) {}

// Rounded to nearest, ties up in magnitude: what is left is in -0x8000 ... 0x7fff.
template <int N>
__device__ __forceinline__ void store_values(__nv_bfloat16* parameters, Remainder* remainders, const float (&from)[N]) {
  Pack<__nv_bfloat16, N> pack;
  Pack<Remainder, N> left;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    // A carry could make nan an infinity, or zero.
    unsigned bits = from[j] == from[j] ? __float_as_uint(from[j]) : 0x7fc00000u;
    pack.value[j] = __ushort_as_bfloat16((unsigned short)((bits + 0x8000u) >> 16));
    left.value[j] = (Remainder)(bits & 0xffffu);
  }
  *(Pack<__nv_bfloat16, N>*)parameters = pack;
  *(Pack<Remainder, N>*)remainders = left;
}

// Both at once.
template <int N, typename P, typename C, typename M>
__device__ __forceinline__ void store_parameters(P* parameters, C* copies, const M (&from)[N]) {
  store_values<N>(parameters, copies, from);
  store_copies<N>(copies, from);
}

// Runs body.run<N>(i) for every N neighbours of the chunk and body.run<1>(i) for the remaining elements.
template <int N, typename Body> __device__ __forceinline__ void each(const Chunk& chunk, Body& body) {
  int packs = chunk.aligned ? chunk.count / N : 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < packs; i += blockDim.x) body.template run<N>((int64)i * N);
  for (int i = packs * N + threadIdx.x; i < chunk.count; i += blockDim.x) body.template run<1>(i);
}

// The sum over a block, valid in thread 0; always added in the same order.
template <typename T> __device__ __forceinline__ T block_sum(T value) {
  __shared__ T warps[32];
  for (int step = 16; step > 0; step >>= 1) value += __shfl_down_sync(0xffffffffu, value, step);
  __syncthreads();  // an earlier sum may still be read
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = threadIdx.x < (blockDim.x + 31) / 32 ? warps[threadIdx.x] : T(0);
    for (int step = 16; step > 0; step >>= 1) value += __shfl_down_sync(0xffffffffu, value, step);
  }
  return value;
}

// a * b + c in one rounding.  Said and not left to the compiler, which would contract products otherwise for other dtypes: rows of
// masters and rows with remainders have the same bits.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// Clamps to +-limit; unlike fminf and fmaxf it keeps a NaN.
template <typename M> __device__ __forceinline__ M limited(M value, M limit) {
  return value > limit ? limit : (value < -limit ? -limit : value);
}

// The state of a step on the device: words of 32 bits; ops/step_state.py makes a tensor of each and explains them.
struct StepState {
  float scale;
  int growth;
  int hysteresis;
  int applied;
  int skipped;
  int finite;
  float found_inf;
  float multiplier;
  float norm;
  float loss;
  int bad_chunk;
  int streak;
  int first_window;
  float first_loss;
  float first_scale;
  int first_chunk;
};

// How an update reads its gradients: times a multiplier from device memory, then clamped (a negative limit: not clamped).
template <typename M> struct Gradient {
  M multiplier;
  M limit;
  __device__ __forceinline__ M of(M value) const {
    value *= multiplier;
    return limit >= 0 ? limited(value, limit) : value;
  }
};

template <typename M> __device__ __forceinline__ Gradient<M> gradient_of(const StepState* state, double limit) {
  return Gradient<M>{state ? (M)state->multiplier : (M)1, (M)limit};
}

// Whether an update must change nothing.
__device__ __forceinline__ bool skipped(const StepState* state, int64 skips) {
  return state && skips && state->found_inf != 0.f;
}
