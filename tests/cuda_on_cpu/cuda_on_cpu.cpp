// What runs kernels on the CPU: fibers for threads, blocks in turns, and what they wait for (cuda_on_cpu.h).
#include "cuda_on_cpu.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#pragma GCC visibility push(hidden)
namespace cuda_on_cpu {

// One of those that run in turns: a cluster's, or the only one.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<uint64_t> exchange;
  std::vector<char> put_away;  // what is in its __shared__ variables while another one runs
  std::vector<char> memory;
  char* dynamic = nullptr;  // in `memory`
  dim3 index{};
  size_t mailboxes[4]{};
  size_t stages[8]{};    // how often each was filled
  size_t expected[8]{};  // bytes that it still waits for
  bool done = false;
};

// Not among what blocks swap.
#define OWN __attribute__((section(".cuda_on_cpu")))
OWN Fiber* current;
OWN dim3 block_index, block_size, grid_size;
OWN char* dynamic_shared;
OWN std::vector<Block> blocks;
OWN Block* block;
OWN void* scheduler_stack_pointer;
OWN void (*body)(void*);
OWN void* body_argument;
constexpr size_t kStack = 64 * 1024;
OWN bool reverse;  // last to first
OWN size_t cluster_arrivals, num_mailboxes;
OWN unsigned waited, last_that_waited;  // blocks of the launch that have looked at the clock
extern "C" char __bss_start[], _end[];

extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(.text
.globl cuda_on_cpu_switch
.hidden cuda_on_cpu_switch
.type cuda_on_cpu_switch,@function
cuda_on_cpu_switch:
 pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
 movq %rsp,(%rdi); movq %rsi,%rsp
 popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
 ret
)");

[[noreturn]] void fail(const char* why) {
  fprintf(stderr, "cuda_on_cpu: block %u %s\n", block->index.x, why);
  abort();
}

inline void pause(Status why) {
  current->status = why;
  cuda_on_cpu_switch(&current->stack_pointer, scheduler_stack_pointer);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  cuda_on_cpu_switch(&scheduler_stack_pointer, fiber.stack_pointer);
}

void enter() {
  body(body_argument);
  pause(Status::done);
  abort();
}

void start(Fiber& fiber, unsigned number) {
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
inline size_t turn(size_t i, size_t n) { return reverse ? n - 1 - i : i; }

inline size_t threads_of_block() { return (size_t)block_size.x * block_size.y * block_size.z; }

inline size_t count(Status status) {
  size_t found = 0, threads = threads_of_block();
  for (size_t i = 0; i < threads; i++) found += block->fibers[i].status == status;
  return found;
}

void await(const size_t* what, size_t wanted) {
  current->awaited = what;
  current->wanted = wanted;
  if (*what < wanted) pause(Status::at_cluster);
}

// Runs the fibers of one warp until each waits; lets a shuffle go on once all lanes of its mask are there.
bool run_warp(size_t first, size_t last) {
  bool ran = false;
  unsigned waiting = 0, wanted = 0;
  for (size_t i = first; i < last; i++) {
    Fiber& fiber = block->fibers[first + turn(i - first, last - first)];
    if (fiber.status == Status::at_cluster && *fiber.awaited >= fiber.wanted) fiber.status = Status::running;
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
      if (block->fibers[i].status == Status::at_shuffle) block->fibers[i].status = Status::running;
    return true;
  }
  return ran;
}

// Runs the block until nothing in it can; whether anything could.
bool run_block() {
  size_t threads = threads_of_block(), warps = (threads + 31) / 32;
  for (bool any = false;; any = true) {
    bool ran = false;
    for (size_t i = 0; i < warps; i++) {
      size_t warp = turn(i, warps);
      ran |= run_warp(warp * 32, std::min(warp * 32 + 32, threads));
    }
    if (count(Status::at_barrier) == threads) {  // strict: no thread may have left before
      for (size_t i = 0; i < threads; i++) block->fibers[i].status = Status::running;
    } else if (!ran) {
      block->done = count(Status::done) == threads;
      return any;
    }
  }
}

// From here on `which` runs: its __shared__ variables come in place of another's.
void swap_in(Block& which) {
  if (blocks.size() > 1) {
    if (block) block->put_away.assign(__bss_start, _end);
    memcpy(__bss_start, which.put_away.data(), which.put_away.size());
  }
  block = &which;
  block_index = which.index;
  dynamic_shared = which.dynamic;
}

void start_block(Block& which, unsigned index, size_t shared) {
  size_t threads = threads_of_block();
  block = &which;
  which.index = {index, 0, 0};
  if (which.fibers.size() < threads) which.fibers.resize(threads);
  which.exchange.resize(2 * ((threads + 31) / 32) * 32);
  which.memory.assign(shared + 16, (char)0xff);
  which.dynamic = which.memory.data() + 15 - (uintptr_t)(which.memory.data() + 15) % 16;
  if (blocks.size() > 1) which.put_away.assign(_end - __bss_start, (char)0xff);
  std::fill_n(which.mailboxes, 4, 0);
  std::fill_n(which.stages, 8, 0);
  std::fill_n(which.expected, 8, 0);
  which.done = false;
  for (size_t i = 0; i < threads; i++) start(which.fibers[i], (unsigned)i);
}

void stuck() {
  for (Block& one : blocks) {
    block = &one;
    fprintf(stderr,
            "cuda_on_cpu: block %u is stuck: %zu threads done, %zu at __syncthreads, %zu at a shuffle, %zu wait for the cluster\n",
            one.index.x, count(Status::done), count(Status::at_barrier), count(Status::at_shuffle), count(Status::at_cluster));
  }
  abort();
}

// Runs blocks `first` and on, as many as a cluster has.
void run_cluster(size_t first, size_t shared) {
  cluster_arrivals = 0;
  for (size_t i = 0; i < blocks.size(); i++) start_block(blocks[i], (unsigned)(first + i), shared);
  block = nullptr;
  for (size_t done = 0; done < blocks.size();) {
    bool ran = false;
    for (size_t i = 0; i < blocks.size(); i++) {
      Block& one = blocks[turn(i, blocks.size())];
      if (one.done) continue;
      swap_in(one);
      ran |= run_block();
      done += one.done;
    }
    if (!ran) stuck();
  }
}

uint64_t exchange(unsigned mask, uint64_t value, int source) {
  Fiber& own = *current;
  uint64_t* slots = block->exchange.data() + (own.parity ? block->exchange.size() / 2 : 0);
  own.parity ^= 1;
  own.mask = mask;
  slots[own.number] = value;
  pause(Status::at_shuffle);
  return slots[(own.number & ~31) + (source & 31)];
}

void post(int turn, void* place, int rank, const void* value, size_t bytes) {
  Block& peer = blocks[rank];
  if (cluster_arrivals < threads_of_block() * blocks.size() || peer.done) fail("posts to a block that has not started, or is done");
  char* at = (char*)place;
  if (at < __bss_start || at >= _end) fail("takes for a peer's what is no __shared__ variable");
  memcpy(&peer == block ? at : peer.put_away.data() + (at - __bss_start), value, bytes);
  peer.mailboxes[turn % num_mailboxes] += bytes;
}

void launch(void (*given)(void*), void* arguments, bool in_reverse, size_t cluster, size_t mailboxes, unsigned grid, unsigned threads,
            size_t shared) {
  body = given;
  body_argument = arguments;
  reverse = in_reverse;
  block_size = {threads, 1, 1};
  grid_size = {grid, 1, 1};
  num_mailboxes = mailboxes;
  waited = 0;
  if (grid % cluster) {
    fprintf(stderr, "cuda_on_cpu: a grid of %u blocks in clusters of %zu\n", grid, cluster);
    abort();
  }
  blocks.resize(cluster);
  for (size_t i = 0; i < grid; i += cluster) run_cluster(turn(i / cluster, grid / cluster) * cluster, shared);
  std::fill(__bss_start, _end, (char)0);  // the next launch finds nothing of this one's
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

void __syncthreads() { pause(Status::at_barrier); }

void cluster_start() { cluster_arrivals++; }

void cluster_started() {
  if (blocks.size() > 1) await(&cluster_arrivals, threads_of_block() * blocks.size());
}

void receive(int turn, int bytes) {
  size_t &box = block->mailboxes[turn % num_mailboxes], wanted = (turn / num_mailboxes + 1) * (size_t)bytes;
  await(&box, wanted);
  if (box != wanted) fail("got more than it waited for");
}

void expect(int stage, int bytes) {
  if (block->expected[stage]) fail("expects a row where another one is still to come");
  block->expected[stage] = bytes;
}

void bring(int stage, void* place, const void* from, int bytes) {
  if (((uintptr_t)place | (uintptr_t)from | (uintptr_t)bytes) % 16) fail("brings what is not at multiples of 16 bytes");
  memcpy(place, from, bytes);
  block->stages[stage] += (block->expected[stage] -= bytes) == 0;
}

void arrived(int stage, size_t round) {
  await(&block->stages[stage], round + 1);
  if (block->stages[stage] != round + 1) fail("has lost a row that it waited for");
}

long long nanoseconds() {
  if (waited == 0 || last_that_waited != block->index.x) ++waited;
  last_that_waited = block->index.x;
  sched_yield();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}
#pragma GCC visibility pop

extern "C" unsigned blocks_that_waited() { return waited; }
