// Exponential moving average: columns parameter, average, and in some tables remainder.
// ops: ema
#include "common.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float)
#endif

template <typename P, typename A, typename R> struct Ema {
  typedef typename CommonMath<P, A>::type M;
  const P* parameters;
  A* averages;
  const R* remainders;
  M share;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M p[N], average[N];
    load_parameters<N>(parameters + i, remainders + i, p);
    load<N>(averages + i, average);
#pragma unroll
    // Computed from the nearer end: a share of 1 gives exactly the parameter, a share of 0 exactly the average.
    for (int j = 0; j < N; ++j) {
      M distance = p[j] - average[j];
      average[j] = share < (M)0.5 ? average[j] + share * distance : p[j] - ((M)1 - share) * distance;
    }
    store<N>(averages + i, average);
  }
};

template <typename P, typename A, typename R = None>
__device__ __forceinline__ void average(const Table& table, const Chunk& chunk, double share) {
  typedef Ema<P, A, R> Body;
  const R* remainders = table.columns > 2 ? column<const R>(table, chunk, 2) : nullptr;
  Body body{column<const P>(table, chunk, 0), column<A>(table, chunk, 1), remainders, (typename Body::M)share};
  each<4>(chunk, body);
}

// Column 1 += (1 - decay) * (column 0 - column 1); the decay is read from device memory if an address is given.
extern "C" __global__ void __launch_bounds__(512) ema(Table table, const StepState* state, const double* decay_at, double decay) {
  Chunk chunk;
  if (skipped(state, 1) || !locate(table, chunk)) return;
  double share = 1.0 - (decay_at ? *decay_at : decay);
  switch (chunk.kind) {
#define KIND(index, ...) case index: average<__VA_ARGS__>(table, chunk, share); break;
    KINDS
#undef KIND
  }
}
