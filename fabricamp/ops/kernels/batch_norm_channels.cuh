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

  // By the channel's thread, from what forward saved; all is loaded before the first is waited for.
  __device__ __forceinline__ float fetch(const Layer& a, int64 channel) {
    float middle = a.saved[channel], inverse = a.saved[a.channels + channel];
    float weight = parameter_at(a, a.weight, channel, 1.f), added = RELU ? parameter_at(a, a.bias, channel, 0.f) : 0.f;
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

// Parameters and running values of the tile's channels, read early by a thread each.
struct Early {
  float weight[kTile], bias[kTile], mean[kTile], variance[kTile], batches;

  // All is loaded before the first is waited for.
  __device__ __forceinline__ void read(const Layer& a, int64 channel, bool keeps) {
    const Parameter *running_mean = keeps ? a.running_mean : nullptr, *running_var = keeps ? a.running_var : nullptr;
    float factor = parameter_at(a, a.weight, channel, 1.f), added = parameter_at(a, a.bias, channel, 0.f);
    float old_mean = parameter_at(a, running_mean, channel, 0.f);
    float old_variance = parameter_at(a, running_var, channel, 0.f);
    unsigned long long seen = keeps && a.momentum < 0 ? *a.batches : 0;
    weight[threadIdx.x] = factor;
    bias[threadIdx.x] = added;
    mean[threadIdx.x] = old_mean;
    variance[threadIdx.x] = old_variance;
    if (threadIdx.x == 0) batches = (float)seen;
  }

  __device__ __forceinline__ void move(const Layer& a, int64 channel, Pair pair, float count) const {
    float share = a.momentum < 0 ? 1.f / batches : (float)a.momentum;
    float found = count > 1.f ? pair.second / (count - 1.f) : 0.f;  // one value has none
    a.running_mean[channel] = Narrow<Parameter>::of(share * pair.first + (1.f - share) * mean[threadIdx.x]);
    a.running_var[channel] = Narrow<Parameter>::of(share * found + (1.f - share) * variance[threadIdx.x]);
  }
};
