// The copy of an array by one block, scaled and cast, with 16-byte accesses at any alignment.
#pragma once
#include "kernel.cuh"

// --- values ---------------------------------------------------------------------------------

template <typename S, typename D>
struct Same {
  static constexpr bool VALUE = false;
};
template <typename T>
struct Same<T, T> {
  static constexpr bool VALUE = true;
};

// What is never scaled is copied as bits.
template <typename T>
struct IsBits {
  static constexpr bool VALUE = Same<T, u16>::VALUE || Same<T, u32>::VALUE || Same<T, u64>::VALUE;
};

template <typename S, typename D>
__device__ inline D convert(S value, double scale) {
  if constexpr (IsBits<S>::VALUE) {
    return value;
  } else {
    if constexpr (Same<S, D>::VALUE) {
      // A product would change the payload of what is not a number.
      if (scale == 1) {
        return value;
      }
    }
    using Wide = typename Element<D>::Wide;
    return Element<D>::narrow(Element<S>::widen(value) * static_cast<Wide>(scale));
  }
}

__device__ inline u32 lesser(u32 first, u32 second) { return first < second ? first : second; }

// --- arrays ---------------------------------------------------------------------------------

// The fewest elements that are whole packs on both sides.
template <typename S, typename D>
struct Unit {
  static constexpr u32 SIZE = 16 / (sizeof(S) < sizeof(D) ? sizeof(S) : sizeof(D));
  static constexpr int IN = SIZE * sizeof(S) / 16;
  static constexpr int OUT = SIZE * sizeof(D) / 16;
};

// N words that begin `shift` bytes after the first of N + 4.
template <typename S, int N>
__device__ inline void shift_bytes(u32 (&words)[N + 4], u32 shift) {
  if (shift & 8) {
#pragma unroll
    for (int j = 0; j < N + 2; ++j) {
      words[j] = words[j + 2];
    }
  }
  if constexpr (sizeof(S) <= 4) {
    if (shift & 4) {
#pragma unroll
      for (int j = 0; j < N + 1; ++j) {
        words[j] = words[j + 1];
      }
    }
  }
  if constexpr (sizeof(S) <= 2) {
    const u32 bits = (shift & 3) * 8;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      words[j] = static_cast<u32>((static_cast<u64>(words[j + 1]) << 32 | words[j]) >> bits);
    }
  }
}

// From an aligned address: the words of one unit, and of one more pack to shift from.
template <int PACKS>
__device__ inline void load_words(const char* from, u32 (&words)[4 * PACKS]) {
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const uint4 pack = *reinterpret_cast<const uint4*>(from + 16 * k);
    words[4 * k] = pack.x;
    words[4 * k + 1] = pack.y;
    words[4 * k + 2] = pack.z;
    words[4 * k + 3] = pack.w;
  }
}

template <typename S, typename D, int N>
__device__ inline void store_unit(const u32 (&words)[N], D* to, double scale) {
  using U = Unit<S, D>;
  Pack<S> in[U::IN];
  Pack<D> out[U::OUT];
#pragma unroll
  for (int k = 0; k < U::IN; ++k) {
    uint4 pack;
    pack.x = words[4 * k];
    pack.y = words[4 * k + 1];
    pack.z = words[4 * k + 2];
    pack.w = words[4 * k + 3];
    *reinterpret_cast<uint4*>(&in[k]) = pack;
  }
#pragma unroll
  for (int j = 0; j < static_cast<int>(U::SIZE); ++j) {
    out[j / Pack<D>::SIZE].at[j % Pack<D>::SIZE] =
        convert<S, D>(in[j / Pack<S>::SIZE].at[j % Pack<S>::SIZE], scale);
  }
#pragma unroll
  for (int k = 0; k < U::OUT; ++k) {
    store_aligned(to + k * Pack<D>::SIZE, out[k]);
  }
}

// `to` is aligned; `from` lies `shift` bytes after the aligned address that is read.
template <typename S, typename D, bool SHIFTED>
__device__ inline void copy_units(const S* from, D* to, u32 units, u32 shift, double scale) {
  using U = Unit<S, D>;
  constexpr int PACKS = U::IN + (SHIFTED ? 1 : 0);
  // More would not fit into the registers of sm_80.
  constexpr int GROUP = PACKS > 2 ? 2 : SHIFTED ? 3 : 4;
  const char* base = reinterpret_cast<const char*>(from) - shift;
  for (u32 first = threadIdx.x; first < units; first += THREADS * GROUP) {
    u32 words[GROUP][4 * PACKS];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const u32 unit = first + g * THREADS;
      if (unit < units) {
        load_words<PACKS>(base + static_cast<u64>(unit) * U::IN * 16, words[g]);
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const u32 unit = first + g * THREADS;
      if (unit < units) {
        if constexpr (SHIFTED) {
          shift_bytes<S, 4 * U::IN>(words[g], shift);
        }
        store_unit<S, D>(words[g], to + unit * U::SIZE, scale);
      }
    }
  }
}

template <typename S, typename D>
__device__ inline void copy_run(const S* from, D* to, u32 size, double scale) {
  using U = Unit<S, D>;
  u32 head = static_cast<u32>(head_of(to, size));
  const u32 shift = reinterpret_cast<u64>(from + head) & 15;
  u32 units = (size - head) / U::SIZE;
  if (shift != 0 && units > 0 && head * sizeof(S) < shift) {
    // The pack around the first element would begin before the array.
    head += U::SIZE;
    --units;
  }
  if (shift != 0 && units > 0 && (size - head - units * U::SIZE) * sizeof(S) < 16 - shift) {
    --units;
  }
  if (shift == 0) {
    copy_units<S, D, false>(from + head, to + head, units, shift, scale);
  } else {
    copy_units<S, D, true>(from + head, to + head, units, shift, scale);
  }
  const u32 rest = size - units * U::SIZE;
  for (u32 i = threadIdx.x; i < rest; i += THREADS) {
    const u32 place = i < head ? i : i + units * U::SIZE;
    to[place] = convert<S, D>(from[place], scale);
  }
}
