// CUDA C++ for the CPU: one fiber per CUDA thread, blocks one after another, so that kernels run where there is no GPU.
// What kernels call; what runs them is in cuda_on_cpu.cpp, which is compiled once for all of them.
//
// It checks indexing, tails, masks, formulas and barriers: a barrier that not all threads reach ends the process, and a missing
// one shows when the fibers run in reverse order too.  It does not check speed, asynchrony, memory order between
// blocks, or the contraction of products and sums.  Kernels may not spin on another block or use inline PTX.  Dynamic shared
// memory (compiler.py rewrites its declaration) is NaN at a block's start.  x86-64 only.
//
// The blocks of a cluster (CLUSTER, where the text defines it) take turns: each runs until all its threads wait, for the cluster or
// for good.  What is `__shared__` is the library's zero-initialised memory but for this file's own, and is swapped with the turn:
// an address in a peer's shared memory is one in what was put away for it.
#pragma once
#include <math.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct dim3 {
  unsigned x, y, z;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};

// Hidden: each library that is loaded has its own.
#pragma GCC visibility push(hidden)
namespace cuda_on_cpu {

enum class Status { running, at_barrier, at_shuffle, at_cluster, done };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  dim3 thread{};
  int number = 0;
  Status status = Status::running;
  unsigned mask = 0;        // the lanes that a shuffle waits for
  unsigned parity = 0;      // shuffles use two exchange buffers in turn
  const size_t* awaited = nullptr;  // what of the cluster it waits for, and how much of it
  size_t wanted = 0;
};

extern Fiber* current;
extern dim3 block_index, block_size, grid_size;
extern char* dynamic_shared;

uint64_t exchange(unsigned mask, uint64_t value, int source);
void post(int turn, void* place, int rank, const void* value, size_t bytes);
void launch(void (*body)(void*), void* arguments, bool in_reverse, size_t cluster, size_t mailboxes, unsigned grid, unsigned threads,
            size_t shared);

template <class T> T shuffle(unsigned mask, T value, int source) {
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  word = exchange(mask, word, source);
  memcpy(&value, &word, sizeof value);
  return value;
}

template <class... Arguments, size_t... I>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<Arguments>*)arguments[I]...);
}

template <class... Arguments> void call(void (*kernel)(Arguments...), void* arguments) {
  call(kernel, (void**)arguments, std::index_sequence_for<Arguments...>{});
}

}  // namespace cuda_on_cpu

#define threadIdx (::cuda_on_cpu::current->thread)
#define blockIdx (::cuda_on_cpu::block_index)
#define blockDim (::cuda_on_cpu::block_size)
#define gridDim (::cuda_on_cpu::grid_size)
#define warpSize 32

void __syncthreads();
// What kernels/cluster.cuh has: its barrier counts all threads of the cluster, a mailbox all bytes since the start.
void cluster_start();
void cluster_started();
void receive(int turn, int bytes);
// What kernels/ring.cuh has: what is asked for is there at once.
void expect(int stage, int bytes);
void bring(int stage, void* place, const void* from, int bytes);
void arrived(int stage, size_t round);
// The clock of all threads, for who waits: the other rank may need this core.
long long nanoseconds();
#pragma GCC visibility pop

inline void __syncwarp(unsigned mask = ~0u) { cuda_on_cpu::shuffle(mask, 0, 0); }
inline void __threadfence() {}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void ring_start() { __syncthreads(); }
template <int N> void post(int turn, void* place, int rank, const float (&value)[N]) {
  cuda_on_cpu::post(turn, place, rank, value, sizeof value);
}
inline int cuda_on_cpu_lane() { return cuda_on_cpu::current->number & 31; }
template <class T> T __shfl_sync(unsigned mask, T value, int lane) { return cuda_on_cpu::shuffle(mask, value, lane); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return cuda_on_cpu::shuffle(mask, value, cuda_on_cpu_lane() ^ lanes);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, int by) {
  int lane = cuda_on_cpu_lane();
  return cuda_on_cpu::shuffle(mask, value, lane + by < 32 ? lane + by : lane);
}
template <class T> T atomicAdd(T* at, T value) {
  T old = *at;
  *at = old + value;
  return old;
}
template <class T> T atomicMin(T* at, T value) {
  T old = *at;
  *at = old < value ? old : value;
  return old;
}
template <class T> T atomicMax(T* at, T value) {
  T old = *at;
  *at = old > value ? old : value;
  return old;
}
template <class T> T __ldcg(const T* from) { return *from; }
template <class T> void __stwb(T* to, T value) { *to = value; }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned choice) {
  uint64_t both = (uint64_t)high << 32 | low;
  unsigned word = 0;
  for (int byte = 0; byte < 4; ++byte) word |= (unsigned)(both >> 8 * (choice >> 4 * byte & 7) & 0xff) << 8 * byte;
  return word;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
using std::isfinite;
using std::isnan;

// CLUSTER, the blocks of a cluster, is 1 where the kernel's text does not define it, and MAILBOXES (cluster.cuh) 2 (compiler.py).
// What the host calls: launch_<kernel>(reverse, blocks, threads, bytes of dynamic shared memory, addresses of the arguments).
#define EXPORT(kernel)                                                                                                \
  extern "C" void launch_##kernel(bool reverse, unsigned blocks, unsigned threads, size_t shared, void** arguments) { \
    cuda_on_cpu::launch([](void* given) { cuda_on_cpu::call(kernel, given); }, arguments, reverse, CLUSTER, MAILBOXES, blocks, \
                        threads, shared);                                                                             \
  }
