// Statistics and parameters of the channels of a block's tile: one thread per channel fetches them for the block.
#pragma once

// The numbers of a channel that its elements are computed with.
struct Channel {
  float mean[kKept], scale[kKept], bias[kKept];
  __device__ __forceinline__ float of(float x, int j) const {
    j %= kKept;
    return fmaf(x - mean[j], scale[j], bias[j]);
  }
};

__device__ __forceinline__ bool serves(const Layer& a, const Place& place) {
  return threadIdx.x < place.width && place.channel(threadIdx.x) < a.channels;
}

// A channel's parameter, or `otherwise` if there is none.  It always loads something: after a branch, a load might have to wait
// for the loads before it.
__device__ __forceinline__ float parameter_at(const Layer& a, const Parameter* from, int64 channel, float otherwise) {
  int64 at = (int64)from + channel * (int64)sizeof(Parameter), other = (int64)a.partial;
  float found = (float)widen(*(const Parameter*)(from ? at : other));
  return from ? found : otherwise;
}

// The numbers of the tile's channels, fetched by one thread per channel for the block.
struct alignas(16) Numbers {
  float mean[kTile], scale[kTile], bias[kTile];

  // Run by the channel's thread, from the values that `statistics` saved; all loads are issued before the first is waited for.
  template <bool BIAS> __device__ __forceinline__ float fetch(const Layer& a, int64 channel) {
    float middle = a.saved[channel], inverse = a.saved[a.channels + channel];
    float weight = parameter_at(a, a.weight, channel, 1.f), added = BIAS ? parameter_at(a, a.bias, channel, 0.f) : 0.f;
    mean[threadIdx.x] = middle;
    scale[threadIdx.x] = inverse * weight;
    bias[threadIdx.x] = added;
    return inverse;
  }

  // Reads the numbers of the thread's own channels.
  __device__ __forceinline__ void read(const Place& place, Channel& channel) const {
    load(mean + place.column * kKept, channel.mean);
    load(scale + place.column * kKept, channel.scale);
    load(bias + place.column * kKept, channel.bias);
  }
};

// A channel's running values, loaded while its statistics are waited for.
struct Running {
  float mean, variance, batches;

  // All loads are issued before the first is waited for.
  __device__ __forceinline__ Running(const Layer& a, int64 channel) {
    mean = parameter_at(a, a.running_mean, channel, 0.f);
    variance = parameter_at(a, a.running_var, channel, 0.f);
    batches = a.momentum < 0 && a.batches ? (float)(*a.batches + 1) : 1.f;  // `normalise` increments the count for this batch
  }

  // Saves a channel's statistics over all ranks for `normalise` and backward, and updates its running values, unless count is 0.
  __device__ __forceinline__ void keep(const Layer& a, int64 channel, Pair pair, float count) const {
    float found = count > 0.f ? pair.second * (1.f / count) : 0.f;
    a.saved[channel] = pair.first;
    a.saved[a.channels + channel] = rsqrtf(found + (float)a.eps);
    a.saved[2 * a.channels + channel] = found;
    if (channel == 0) a.saved[3 * a.channels] = count;
    if (!a.running_mean || count <= 0.f) return;
    float share = a.momentum < 0 ? 1.f / batches : (float)a.momentum;
    float unbiased = count > 1.f ? pair.second / (count - 1.f) : 0.f;  // one value has no unbiased variance
    a.running_mean[channel] = Narrow<Parameter>::of(share * pair.first + (1.f - share) * mean);
    a.running_var[channel] = Narrow<Parameter>::of(share * unbiased + (1.f - share) * variance);
  }
};

// Writes a channel's pair to `local`, for a collective, and in backward for `gradient`.
__device__ __forceinline__ void leave(const Layer& a, int64 channel, Pair pair) {
  a.local[channel] = pair.first;
  a.local[a.channels + channel] = pair.second;
}
