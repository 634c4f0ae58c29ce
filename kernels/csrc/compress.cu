// float32 to numbers of 16 bits, or to blocks of 8-bit numbers with a scale each; and back.
//
// Access pattern: all is done in blocks of 256 elements. A block of 16-bit numbers is taken by a
// warp, one of 8-bit numbers by half a warp, which then finds its maximum in four exchanges. Thread
// t reads the packs t, t + LANES, ... of four floats of its block, so that the threads read, and
// write errors and results, in a row. What a thread has got is then four (or two) small packs that
// lie far apart in the compressed tensor. The threads exchange them in groups of four (or two),
// after which each has 16 bytes in a row. All reads of a block are issued before the first number
// is computed: up to 128 bytes in flight for each thread.
//
// Blocks that are not whole, and tensors that are not aligned, are read by elements: the traffic is
// the same, but it takes more instructions.
#include "kernel.cuh"

constexpr int BLOCK = 256;
constexpr int WARP_SIZE = 32;
constexpr u32 WHOLE_WARP = 0xffffffffu;

struct Compress {
  const float* tensor;
  // What earlier calls did not send is added, and what this one does not send is written.
  float* error;
  void* compressed;
  i64 size;
  i64 blocks;
  double scale;
};

struct Decompress {
  const void* compressed;
  float* out;
  i64 size;
  i64 blocks;
  double scale;
};

// --- a block, divided among LANES threads ---------------------------------------------------

template <int LANES>
struct Share {
  static constexpr int PACKS = BLOCK / (LANES * Pack<float>::SIZE);
  Pack<float> pack[PACKS];
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x % WARP_SIZE); }

// Where a pack of this thread begins in its block.
template <int LANES>
__device__ inline int place(int pack) {
  return (pack * LANES + lane() % LANES) * Pack<float>::SIZE;
}

template <int LANES, bool FAST>
__device__ inline Share<LANES> load_share(const float* from, i64 first, i64 size) {
  Share<LANES> share;
#pragma unroll
  for (int k = 0; k < Share<LANES>::PACKS; ++k) {
    const i64 i = first + place<LANES>(k);
    if constexpr (FAST) {
      share.pack[k] = load_aligned(from + i);
    } else {
#pragma unroll
      for (int j = 0; j < Pack<float>::SIZE; ++j) {
        share.pack[k].at[j] = i + j < size ? from[i + j] : 0.0f;
      }
    }
  }
  return share;
}

template <int LANES, bool FAST>
__device__ inline void store_share(float* to, i64 first, i64 size, const Share<LANES>& share) {
#pragma unroll
  for (int k = 0; k < Share<LANES>::PACKS; ++k) {
    const i64 i = first + place<LANES>(k);
    if constexpr (FAST) {
      store_aligned(to + i, share.pack[k]);
    } else {
#pragma unroll
      for (int j = 0; j < Pack<float>::SIZE; ++j) {
        if (i + j < size) {
          to[i + j] = share.pack[k].at[j];
        }
      }
    }
  }
}

// What is to be sent.
template <int LANES, bool ERROR, bool FAST>
__device__ inline Share<LANES> load_values(const Compress& p, i64 first) {
  Share<LANES> values = load_share<LANES, FAST>(p.tensor, first, p.size);
  Share<LANES> error;
  if constexpr (ERROR) {
    error = load_share<LANES, FAST>(p.error, first, p.size);
  }
#pragma unroll
  for (int k = 0; k < Share<LANES>::PACKS; ++k) {
#pragma unroll
    for (int j = 0; j < Pack<float>::SIZE; ++j) {
      float& value = values.pack[k].at[j];
      value = value * static_cast<float>(p.scale);
      if constexpr (ERROR) {
        value = value + error.pack[k].at[j];
      }
    }
  }
  return values;
}

// --- exchanges between neighbours -----------------------------------------------------------

// Thread t gets the parts t of both threads of a pair, in the order of the threads.
__device__ inline Pack<u64> exchanged(Pack<u64> part) {
  const bool second = lane() & 1;
  const u64 other = __shfl_xor_sync(WHOLE_WARP, second ? part.at[0] : part.at[1], 1);
  part.at[0] = second ? other : part.at[0];
  part.at[1] = second ? part.at[1] : other;
  return part;
}

template <int DISTANCE>
__device__ inline void exchange(u32& low, u32& high) {
  const bool upper = lane() & DISTANCE;
  const u32 other = __shfl_xor_sync(WHOLE_WARP, upper ? low : high, DISTANCE);
  low = upper ? other : low;
  high = upper ? high : other;
}

// Thread t gets the parts t of four threads, in the order of the threads.
__device__ inline Pack<u32> exchanged(Pack<u32> part) {
  exchange<1>(part.at[0], part.at[1]);
  exchange<1>(part.at[2], part.at[3]);
  exchange<2>(part.at[0], part.at[2]);
  exchange<2>(part.at[1], part.at[3]);
  return part;
}

// Where the 16 bytes that a thread has after an exchange begin in its block.
template <int LANES, typename Part>
__device__ inline int place_of_exchanged() {
  constexpr int SIDES = Pack<Part>::SIZE;
  const int thread = lane() % LANES;
  return (thread % SIDES) * (BLOCK / SIDES) + (thread / SIDES) * (BLOCK / LANES);
}

// --- 16 bits --------------------------------------------------------------------------------

template <typename T, bool ERROR, bool FAST>
__device__ inline void compress_16(const Compress& p, i64 block) {
  T* to = static_cast<T*>(p.compressed);
  const i64 first = block * BLOCK;
  Share<WARP_SIZE> values = load_values<WARP_SIZE, ERROR, FAST>(p, first);
  Pack<u64> part = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int j = 0; j < Pack<float>::SIZE; ++j) {
      float& value = values.pack[k].at[j];
      const T narrow = Element<T>::narrow(value);
      part.at[k] |= static_cast<u64>(narrow.bits) << (16 * j);
      const i64 i = first + place<WARP_SIZE>(k) + j;
      if (!FAST && i < p.size) {
        to[i] = narrow;
      }
      const float sent = Element<T>::widen(narrow);
      value = sent - sent == 0 ? value - sent : 0.0f;
    }
  }
  if constexpr (FAST) {
    T* at = to + first + place_of_exchanged<WARP_SIZE, u64>();
    store_aligned(reinterpret_cast<u64*>(at), exchanged(part));
  }
  if constexpr (ERROR) {
    store_share<WARP_SIZE, FAST>(p.error, first, p.size, values);
  }
}

template <typename T, bool ADD, bool FAST>
__device__ inline void decompress_16(const Decompress& p, i64 block) {
  const T* from = static_cast<const T*>(p.compressed);
  const i64 first = block * BLOCK;
  Share<WARP_SIZE> out;
  if constexpr (ADD) {
    out = load_share<WARP_SIZE, FAST>(p.out, first, p.size);
  }
  Pack<u64> part = {};
  if constexpr (FAST) {
    const T* at = from + first + place_of_exchanged<WARP_SIZE, u64>();
    part = exchanged(load_aligned(reinterpret_cast<const u64*>(at)));
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int j = 0; j < Pack<float>::SIZE; ++j) {
      T narrow = {static_cast<u16>(part.at[k] >> (16 * j))};
      const i64 i = first + place<WARP_SIZE>(k) + j;
      if (!FAST && i < p.size) {
        narrow = from[i];
      }
      const float value = Element<T>::widen(narrow) * static_cast<float>(p.scale);
      out.pack[k].at[j] = ADD ? out.pack[k].at[j] + value : value;
    }
  }
  store_share<WARP_SIZE, FAST>(p.out, first, p.size, out);
}

// --- 8 bits ---------------------------------------------------------------------------------

// For Note [Format of int8].
constexpr float SMALLEST_SCALE = 1.17549435e-38f;  // The smallest normal number.
constexpr float LARGEST_SCALE = 2.67938848e+36f;   // The largest that times 127 is finite.
constexpr u32 INFINITE = 0x7f800000u;
constexpr u32 NOT_A_NUMBER = 0x7fc00000u;
// Numbers from here on lie 1 apart: to add it rounds to an integer, halves to the even one, and
// leaves that in the lowest bits.
constexpr float SHIFT = 12582912.0f;

// The scale of a block, and what its numbers are multiplied with. Both are 0 if it has none.
struct Scale {
  float value;
  float inverse;
  bool is_finite;
};

__device__ inline Scale scale_of(const Share<WARP_SIZE / 2>& values) {
  // Without their signs, numbers are ordered like their bits, infinity and no numbers at the end.
  u32 largest = 0;
#pragma unroll
  for (int k = 0; k < Share<WARP_SIZE / 2>::PACKS; ++k) {
#pragma unroll
    for (int j = 0; j < Pack<float>::SIZE; ++j) {
      const u32 bits = as_bits(values.pack[k].at[j]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
  }
#pragma unroll
  for (int distance = WARP_SIZE / 4; distance > 0; distance /= 2) {
    const u32 other = __shfl_xor_sync(WHOLE_WARP, largest, distance);
    largest = other > largest ? other : largest;
  }
  if (largest >= INFINITE) {
    return {0, 0, false};
  }
  const float most = as_float(largest);
  const float scale = most / 127.0f;
  if (scale < SMALLEST_SCALE) {
    return {0, 0, true};
  }
  return {scale < LARGEST_SCALE ? scale : LARGEST_SCALE, 127.0f / most, true};
}

__device__ inline i8* numbers_of(const void* compressed, i64 blocks) {
  return static_cast<i8*>(const_cast<void*>(compressed)) + blocks * static_cast<i64>(sizeof(float));
}

template <bool ERROR, bool FAST>
__device__ inline void compress_8(const Compress& p, i64 block) {
  constexpr int LANES = WARP_SIZE / 2;
  const i64 first = block * BLOCK;
  Share<LANES> values = load_values<LANES, ERROR, FAST>(p, first);
  const Scale scale = scale_of(values);
  if (lane() % LANES == 0) {
    static_cast<float*>(p.compressed)[block] =
        scale.is_finite ? scale.value : as_float(NOT_A_NUMBER);
  }
  Pack<u32> part = {};
#pragma unroll
  for (int k = 0; k < Share<LANES>::PACKS; ++k) {
#pragma unroll
    for (int j = 0; j < Pack<float>::SIZE; ++j) {
      float& value = values.pack[k].at[j];
      value = scale.is_finite ? value : 0.0f;
      const float shifted = value * scale.inverse + SHIFT;
      part.at[k] |= (as_bits(shifted) & 0xffu) << (8 * j);
      value = value - (shifted - SHIFT) * scale.value;
    }
  }
  const i64 at = first + place_of_exchanged<LANES, u32>();
  const Pack<u32> bytes = exchanged(part);
  if (FAST || at < p.size) {
    store_aligned(reinterpret_cast<u32*>(numbers_of(p.compressed, p.blocks) + at), bytes);
  }
  if constexpr (ERROR) {
    store_share<LANES, FAST>(p.error, first, p.size, values);
  }
}

template <bool ADD, bool FAST>
__device__ inline void decompress_8(const Decompress& p, i64 block) {
  constexpr int LANES = WARP_SIZE / 2;
  const i64 first = block * BLOCK;
  const i64 at = first + place_of_exchanged<LANES, u32>();
  Pack<u32> part = {};
  if (FAST || at < p.size) {
    part = load_aligned(reinterpret_cast<const u32*>(numbers_of(p.compressed, p.blocks) + at));
  }
  const float scale = static_cast<const float*>(p.compressed)[block];
  Share<LANES> out;
  if constexpr (ADD) {
    out = load_share<LANES, FAST>(p.out, first, p.size);
  }
  part = exchanged(part);
#pragma unroll
  for (int k = 0; k < Share<LANES>::PACKS; ++k) {
#pragma unroll
    for (int j = 0; j < Pack<float>::SIZE; ++j) {
      const i8 number = static_cast<i8>(part.at[k] >> (8 * j));
      const float value = (static_cast<float>(number) * scale) * static_cast<float>(p.scale);
      out.pack[k].at[j] = ADD ? out.pack[k].at[j] + value : value;
    }
  }
  store_share<LANES, FAST>(p.out, first, p.size, out);
}

// --- kernels --------------------------------------------------------------------------------

// `PER_WARP` blocks at a time. All threads of a warp take the same branch: they exchange data.
template <int PER_WARP, typename Fast, typename Slow>
__device__ inline void for_blocks(i64 blocks, i64 size, bool aligned, Fast fast, Slow slow) {
  constexpr int WARPS = THREADS / WARP_SIZE;
  const i64 warp = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP_SIZE;
  const i64 step = static_cast<i64>(gridDim.x) * WARPS * PER_WARP;
  for (i64 block = warp * PER_WARP; block < blocks; block += step) {
    const i64 own = block + lane() / (WARP_SIZE / PER_WARP);
    if (aligned && (block + PER_WARP) * BLOCK <= size) {
      fast(own);
    } else {
      slow(own);
    }
  }
}

#define COMPRESS(name, PER_WARP, call, ...)                                                  \
  KERNEL(name, Compress) {                                                                   \
    const bool aligned = is_aligned(p.tensor) && is_aligned(p.error) &&                      \
                         is_aligned(static_cast<const char*>(p.compressed));                 \
    for_blocks<PER_WARP>(                                                                    \
        p.blocks, p.size, aligned, [&](i64 block) { call<__VA_ARGS__, true>(p, block); },    \
        [&](i64 block) { call<__VA_ARGS__, false>(p, block); });                             \
  }
#define DECOMPRESS(name, PER_WARP, call, ...)                                                \
  KERNEL(name, Decompress) {                                                                 \
    const bool aligned =                                                                     \
        is_aligned(p.out) && is_aligned(static_cast<const char*>(p.compressed));             \
    for_blocks<PER_WARP>(                                                                    \
        p.blocks, p.size, aligned, [&](i64 block) { call<__VA_ARGS__, true>(p, block); },    \
        [&](i64 block) { call<__VA_ARGS__, false>(p, block); });                             \
  }

COMPRESS(compress_bf16, 1, compress_16, BFloat, false)
COMPRESS(compress_bf16_error, 1, compress_16, BFloat, true)
COMPRESS(compress_f16, 1, compress_16, Half, false)
COMPRESS(compress_f16_error, 1, compress_16, Half, true)
COMPRESS(compress_i8, 2, compress_8, false)
COMPRESS(compress_i8_error, 2, compress_8, true)

DECOMPRESS(decompress_bf16, 1, decompress_16, BFloat, false)
DECOMPRESS(decompress_bf16_add, 1, decompress_16, BFloat, true)
DECOMPRESS(decompress_f16, 1, decompress_16, Half, false)
DECOMPRESS(decompress_f16_add, 1, decompress_16, Half, true)
DECOMPRESS(decompress_i8, 2, decompress_8, false)
DECOMPRESS(decompress_i8_add, 2, decompress_8, true)
