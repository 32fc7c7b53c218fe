// CUDA C++ for the CPU: one fiber per CUDA thread, blocks one after another, so that kernels run where there is no GPU.
//
// It checks indexing, tails, masks, formulas and barriers: a barrier that not all threads reach ends the process, and a missing
// one shows when the fibers run in reverse order too (-DREVERSE).  It does not check speed, asynchrony, memory order between
// blocks, or the contraction of products and sums.  Kernels may not spin on another block or use inline PTX.  Dynamic shared
// memory (compiler.py rewrites its declaration) is NaN at a block's start.  x86-64 only.
#pragma once
#include <math.h>

#include <time.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};

namespace cuda_on_cpu {

enum class Status { running, at_barrier, at_shuffle, done };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  dim3 thread{};
  int number = 0;
  Status status = Status::running;
  unsigned mask = 0;        // the lanes that a shuffle waits for
  unsigned parity = 0;      // shuffles use two exchange buffers in turn
};

// All static: an inline variable would be shared by every library that is loaded.
static std::vector<Fiber> fibers;
static std::vector<uint64_t> exchange;
static void* scheduler_stack_pointer;
static Fiber* current;
static void (*body)(void*);
static void* body_argument;
static dim3 block_index, block_size, grid_size;
constexpr size_t kStack = 64 * 1024;
static char* dynamic_shared;

extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(.text
.weak cuda_on_cpu_switch
.type cuda_on_cpu_switch,@function
cuda_on_cpu_switch:
 pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
 movq %rsp,(%rdi); movq %rsi,%rsp
 popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
 ret
)");

inline void pause(Status why) {
  current->status = why;
  cuda_on_cpu_switch(&current->stack_pointer, scheduler_stack_pointer);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  cuda_on_cpu_switch(&scheduler_stack_pointer, fiber.stack_pointer);
}

inline void enter() {
  body(body_argument);
  pause(Status::done);
  abort();
}

inline void start(Fiber& fiber, unsigned number) {
  if (!fiber.stack) fiber.stack = (char*)aligned_alloc(64, kStack);
  fiber.status = Status::running;
  fiber.parity = 0;
  fiber.number = (int)number;
  fiber.thread = {number % block_size.x, number / block_size.x % block_size.y, number / block_size.x / block_size.y};
  void** top = (void**)(fiber.stack + kStack);
  *--top = nullptr;
  *--top = (void*)enter;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.stack_pointer = top;
}

// The i-th of n to run.
inline size_t turn(size_t i, size_t n) {
#ifdef REVERSE
  return n - 1 - i;
#else
  return i;
#endif
}

inline size_t count(Status status, size_t from, size_t to) {
  size_t found = 0;
  for (size_t i = from; i < to; i++) found += fibers[i].status == status;
  return found;
}

// Runs the fibers of one warp until each waits; lets a shuffle go on once all lanes of its mask are there.
inline bool run_warp(size_t first, size_t last) {
  bool ran = false;
  unsigned waiting = 0, wanted = 0;
  for (size_t i = first; i < last; i++) {
    Fiber& fiber = fibers[first + turn(i - first, last - first)];
    if (fiber.status == Status::running) {
      ran = true;
      resume(fiber);
    }
    if (fiber.status == Status::at_shuffle) {
      waiting |= 1u << (fiber.number & 31);
      wanted |= fiber.mask;
    }
  }
  unsigned lanes = last - first == 32 ? ~0u : (1u << (last - first)) - 1;
  if (waiting && (wanted & ~waiting & lanes) == 0) {
    for (size_t i = first; i < last; i++)
      if (fibers[i].status == Status::at_shuffle) fibers[i].status = Status::running;
    return true;
  }
  return ran;
}

inline void run_block() {
  size_t threads = (size_t)block_size.x * block_size.y * block_size.z, warps = (threads + 31) / 32;
  if (fibers.size() < threads) fibers.resize(threads);
  exchange.resize(2 * warps * 32);
  for (size_t i = 0; i < threads; i++) start(fibers[i], (unsigned)i);
  for (;;) {
    bool ran = false;
    for (size_t i = 0; i < warps; i++) {
      size_t warp = turn(i, warps);
      ran |= run_warp(warp * 32, std::min(warp * 32 + 32, threads));
    }
    size_t done = count(Status::done, 0, threads), waiting = count(Status::at_barrier, 0, threads);
    if (done == threads) return;
    if (waiting == threads) {  // strict: no thread may have left before
      for (size_t i = 0; i < threads; i++) fibers[i].status = Status::running;
    } else if (!ran) {
      fprintf(stderr, "cuda_on_cpu: block %u is stuck: %zu threads done, %zu at __syncthreads, %zu at a shuffle\n",
              block_index.x, done, waiting, threads - done - waiting);
      abort();
    }
  }
}

template <class T> T shuffle(unsigned mask, T value, int source) {
  Fiber& own = *current;
  uint64_t* slots = exchange.data() + (own.parity ? exchange.size() / 2 : 0);
  own.parity ^= 1;
  own.mask = mask;
  memcpy(&slots[own.number], &value, sizeof value);
  pause(Status::at_shuffle);
  T result;
  memcpy(&result, &slots[(own.number & ~31) + (source & 31)], sizeof result);
  return result;
}

template <class... Arguments, size_t... I>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<Arguments>*)arguments[I]...);
}

template <class... Arguments> void launch(void (*kernel)(Arguments...), unsigned blocks, unsigned threads, size_t shared,
                                           void** arguments) {
  struct Call {
    void (*kernel)(Arguments...);
    void** arguments;
  } now{kernel, arguments};
  body = [](void* made) {
    Call* it = (Call*)made;
    call(it->kernel, it->arguments, std::index_sequence_for<Arguments...>{});
  };
  body_argument = &now;
  block_size = {threads, 1, 1};
  grid_size = {blocks, 1, 1};
  block_index = {0, 0, 0};
  std::vector<char> memory(shared + 16);
  dynamic_shared = memory.data() + 15 - (uintptr_t)(memory.data() + 15) % 16;
  for (size_t i = 0; i < blocks; i++) {
    block_index.x = (unsigned)turn(i, blocks);
    memset(dynamic_shared, 0xff, shared);
    run_block();
  }
}

}  // namespace cuda_on_cpu

#define threadIdx (::cuda_on_cpu::current->thread)
#define blockIdx (::cuda_on_cpu::block_index)
#define blockDim (::cuda_on_cpu::block_size)
#define gridDim (::cuda_on_cpu::grid_size)
#define warpSize 32

inline void __syncthreads() { cuda_on_cpu::pause(cuda_on_cpu::Status::at_barrier); }
inline void __syncwarp(unsigned mask = ~0u) { cuda_on_cpu::shuffle(mask, 0, 0); }
inline void __threadfence() {}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
// The clock of all threads.
inline long long nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
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
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
using std::isfinite;
using std::isnan;

// What the host calls: launch_<kernel>(blocks, threads, bytes of dynamic shared memory, addresses of the arguments).
#define EXPORT(kernel)                                                                  \
  extern "C" void launch_##kernel(unsigned blocks, unsigned threads, size_t shared, void** arguments) { \
    cuda_on_cpu::launch(kernel, blocks, threads, shared, arguments);                                    \
  }
