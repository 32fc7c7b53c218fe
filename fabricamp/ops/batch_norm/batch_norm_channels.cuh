// What SyncBatchNorm's kernels know of the channels of a block's tile: one thread a channel fetches them for all.
#pragma once

// What an element is computed with: its channel's numbers.
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

// A channel's parameter, or `otherwise` where there is none.  Something is loaded in any case: behind a branch a load might have to
// wait for those before it.
__device__ __forceinline__ float parameter_at(const Layer& a, const Parameter* from, int64 channel, float otherwise) {
  int64 at = (int64)from + channel * (int64)sizeof(Parameter), other = (int64)a.partial;
  float found = (float)widen(*(const Parameter*)(from ? at : other));
  return from ? found : otherwise;
}

// The numbers of the tile's channels, which one thread a channel fetches for all.
struct alignas(16) Numbers {
  float mean[kTile], scale[kTile], bias[kTile];

  // By the channel's thread, from what `statistics` saved; all is loaded before the first is waited for.
  template <bool BIAS> __device__ __forceinline__ float fetch(const Layer& a, int64 channel) {
    float middle = a.saved[channel], inverse = a.saved[a.channels + channel];
    float weight = parameter_at(a, a.weight, channel, 1.f), added = BIAS ? parameter_at(a, a.bias, channel, 0.f) : 0.f;
    mean[threadIdx.x] = middle;
    scale[threadIdx.x] = inverse * weight;
    bias[threadIdx.x] = added;
    return inverse;
  }

  // The thread's own ones.
  __device__ __forceinline__ void read(const Place& place, Channel& channel) const {
    load(mean + place.column * kKept, channel.mean);
    load(scale + place.column * kKept, channel.scale);
    load(bias + place.column * kKept, channel.bias);
  }
};

// A channel's running values, on their way while its statistics are waited for.
struct Running {
  float mean, variance, batches;

  // All is loaded before the first is waited for.
  __device__ __forceinline__ Running(const Layer& a, int64 channel) {
    mean = parameter_at(a, a.running_mean, channel, 0.f);
    variance = parameter_at(a, a.running_var, channel, 0.f);
    batches = a.momentum < 0 && a.batches ? (float)(*a.batches + 1) : 1.f;  // `normalise` counts this one
  }

  // What forward knows of a channel over all ranks, for `normalise`, for backward and for evaluation; no values move nothing.
  __device__ __forceinline__ void keep(const Layer& a, int64 channel, Pair pair, float count) const {
    float found = count > 0.f ? pair.second * (1.f / count) : 0.f;
    a.saved[channel] = pair.first;
    a.saved[a.channels + channel] = rsqrtf(found + (float)a.eps);
    a.saved[2 * a.channels + channel] = found;
    if (channel == 0) a.saved[3 * a.channels] = count;
    if (!a.running_mean || count <= 0.f) return;
    float share = a.momentum < 0 ? 1.f / batches : (float)a.momentum;
    float unbiased = count > 1.f ? pair.second / (count - 1.f) : 0.f;  // one value has none
    a.running_mean[channel] = Narrow<Parameter>::of(share * pair.first + (1.f - share) * mean);
    a.running_var[channel] = Narrow<Parameter>::of(share * unbiased + (1.f - share) * variance);
  }
};

// Leaves a channel's pair in `local`, for a collective, and in backward for `gradient`.
__device__ __forceinline__ void leave(const Layer& a, int64 channel, Pair pair) {
  a.local[channel] = pair.first;
  a.local[a.channels + channel] = pair.second;
}
