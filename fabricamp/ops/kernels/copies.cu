// Copies up to four tensors into others of equal sizes by one launch: for small tensors a launch costs more than the bytes.
typedef long long int64;

constexpr int kBlocks = 8;  // for each tensor, as ops/copies.py launches them

struct alignas(16) Bytes16 { char value[16]; };

// Copies `count` elements of type T, distributed over the blocks of a tensor.
template <typename T> __device__ __forceinline__ void copied(const char* from, char* to, int64 count, int64 thread, int64 threads) {
  for (int64 place = thread; place < count; place += threads) ((T*)to)[place] = ((const T*)from)[place];
}

extern "C" __global__ void __launch_bounds__(256, 4) copies(
    const char* from0, char* to0, int64 bytes0, const char* from1, char* to1, int64 bytes1,
    const char* from2, char* to2, int64 bytes2, const char* from3, char* to3, int64 bytes3) {
  int which = blockIdx.x / kBlocks;
  const char* from = which == 0 ? from0 : which == 1 ? from1 : which == 2 ? from2 : from3;
  char* to = which == 0 ? to0 : which == 1 ? to1 : which == 2 ? to2 : to3;
  int64 bytes = which == 0 ? bytes0 : which == 1 ? bytes1 : which == 2 ? bytes2 : bytes3;
  int64 thread = (int64)(blockIdx.x % kBlocks) * blockDim.x + threadIdx.x, threads = (int64)kBlocks * blockDim.x;
  int64 whole = ((int64)from | (int64)to) % 16 == 0 ? bytes / 16 : 0;
  copied<Bytes16>(from, to, whole, thread, threads);
  copied<char>(from + 16 * whole, to + 16 * whole, bytes - 16 * whole, thread, threads);
}
