// Many tensors of any layout to or from one bucket, scaled and cast, in one launch.
//
// A block takes one chunk of one tensor. The part of a tensor in the bucket fills its memory
// without gaps. The layout of the tensor itself decides in which of three ways it is copied:
//
// - RUN: in the same order, so both are arrays. Packs of 16 bytes on both sides, two to four of
//   them in flight for each thread. Writes are always aligned; where reads are not, each thread
//   reads the aligned packs around its elements (its neighbor's pack comes from the L1 cache) and
//   shifts.
// - STRIDED: any strides. Threads go along the bucket, so that it is accessed in a row, and
//   compute where the element of the tensor is. A warp accesses the tensor in a row too if the
//   innermost dimension has stride 1.
// - TILED: the tensor has stride 1 in another dimension than the bucket, as a transposed one. A
//   tile of both dimensions goes through shared memory: it is read along one and written along the
//   other, so that both are accessed in a row. The pitch is odd: no two threads of a warp meet in a
//   bank.
#include "kernel.cuh"

constexpr int MAX_TENSORS = 480;
constexpr int MAX_DIMS = 8;
constexpr u32 CHUNK = 8192;
constexpr int TILE = 4160;

enum Way { RUN, STRIDED, TILED };
enum Type { F32, F16, BF16 };

// The way to copy one tensor: `Copy` of copy_plans.py.
struct Record {
  i64 offset;
  i64 size;
  i64 chunks;
  i64 dtype;
  i64 way;
  i64 num_dims;
  // For tiles: the dimension in which the tensor has stride 1, its extent in it, and its extent in
  // the last dimension, in which the bucket has stride 1.
  i64 along;
  i64 columns;
  i64 rows;
  // In the order of the bucket, in which they are contiguous; strides are those of the tensor.
  i64 sizes[MAX_DIMS];
  i64 strides[MAX_DIMS];
  // Division by a size: see Note [Division by a product].
  i64 factors[MAX_DIMS];
  i64 shifts[MAX_DIMS];
};

struct Flatten {
  // Null for a tensor that is not there.
  void* tensors[MAX_TENSORS];
  void* bucket;
  const Record* records;
  const Chunk* chunks;
  double scale;
};

// --- values ---------------------------------------------------------------------------------

template <typename S, typename D>
struct Same {
  static constexpr bool VALUE = false;
};
template <typename T>
struct Same<T, T> {
  static constexpr bool VALUE = true;
};

// Values that are never scaled are copied as bits.
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
      // A product would change the payload of a NaN.
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

// The fewest elements that fill whole packs on both sides.
template <typename S, typename D>
struct Unit {
  static constexpr u32 SIZE = 16 / (sizeof(S) < sizeof(D) ? sizeof(S) : sizeof(D));
  static constexpr int IN = SIZE * sizeof(S) / 16;
  static constexpr int OUT = SIZE * sizeof(D) / 16;
};

// Move to the front the N words that begin `shift` bytes after the first of N + 4.
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

// Load the words of one unit from an aligned address, and one more pack to shift from.
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

// Copy to `to`, which is aligned; `from` lies `shift` bytes after the aligned address that is read.
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

// --- strides --------------------------------------------------------------------------------

// Note [Division by a product]
// A number below 2^31 divided by d is ((n * factor >> 32) + n) >> shift. Here shift is the least
// with 2^shift >= d, and factor is 2^32 * (2^shift - d) / d + 1, rounded down. That takes four
// instructions instead of some twenty.
__device__ inline u32 quotient(u32 number, u32 factor, u32 shift) {
  return (static_cast<u32>(static_cast<u64>(number) * factor >> 32) + number) >> shift;
}

template <typename S, typename D, bool TO_BUCKET>
__device__ inline void copy_strided(const S* from, D* to, const Record& record, u32 number,
                                    double scale) {
  constexpr int GROUP = 4;
  const u32 end = lesser(static_cast<u32>(record.size), (number + 1) * CHUNK);
  for (u32 first = number * CHUNK + threadIdx.x; first < end; first += THREADS * GROUP) {
    u32 rest[GROUP];
    i64 at[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      rest[g] = first + g * THREADS;
      at[g] = 0;
    }
    for (int d = static_cast<int>(record.num_dims) - 1; d > 0; --d) {
      const u32 size = static_cast<u32>(record.sizes[d]);
      const u32 factor = static_cast<u32>(record.factors[d]);
      const u32 shift = static_cast<u32>(record.shifts[d]);
      const i64 stride = record.strides[d];
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        const u32 next = quotient(rest[g], factor, shift);
        at[g] += (rest[g] - next * size) * stride;
        rest[g] = next;
      }
    }
    S value[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const u32 i = first + g * THREADS;
      at[g] += rest[g] * record.strides[0];
      if (i < end) {
        value[g] = from[TO_BUCKET ? at[g] : i];
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const u32 i = first + g * THREADS;
      if (i < end) {
        to[TO_BUCKET ? i : at[g]] = convert<S, D>(value[g], scale);
      }
    }
  }
}

// --- tiles ----------------------------------------------------------------------------------

struct TilePlace {
  i64 in_tensor = 0;
  i64 in_bucket = 0;
  // The step between rows in the tensor, and between columns in the bucket; the other two are 1.
  i64 row_stride = 0;
  i64 column_stride = 0;
  u32 rows = 0;
  u32 columns = 0;
};

__device__ inline TilePlace place_of(const Record& record, u32 number) {
  TilePlace place;
  const int last = static_cast<int>(record.num_dims) - 1;
  i64 stride = 1;
  for (int d = last; d >= 0; --d) {
    const u32 size = static_cast<u32>(record.sizes[d]);
    const bool is_row = d == last;
    const bool is_column = d == record.along;
    const u32 extent = is_row ? record.rows : is_column ? record.columns : 1;
    const u32 tiles = (size + extent - 1) / extent;
    const u32 index = number % tiles * extent;
    number /= tiles;
    place.in_tensor += index * record.strides[d];
    place.in_bucket += index * stride;
    if (is_row) {
      place.rows = lesser(extent, size - index);
      place.row_stride = record.strides[d];
    } else if (is_column) {
      place.columns = lesser(extent, size - index);
      place.column_stride = stride;
    }
    stride *= size;
  }
  return place;
}

// A divisor of numbers up to TILE.
struct SmallDivisor {
  u32 divisor;
  u32 factor;

  __device__ explicit SmallDivisor(u32 divisor)
      : divisor(divisor), factor(0xffffffffu / divisor + 1) {}
  __device__ u32 quotient(u32 number) const {
    // The factor for a divisor of 1 would have one bit more.
    return divisor == 1 ? number : static_cast<u32>(static_cast<u64>(number) * factor >> 32);
  }
};

// Go through a tile with neighboring threads at neighboring elements of the tensor, or of the
// bucket. Calls load and store with (place in the tile, place in that array). A thread loads some
// elements before it stores the first.
template <bool IN_TENSOR, typename S, typename Load, typename Store>
__device__ inline void for_tile(const TilePlace& place, Load load, Store store) {
  constexpr int GROUP = 4;
  const u32 pitch = place.columns | 1;
  const u32 size = place.rows * place.columns;
  const SmallDivisor line(IN_TENSOR ? place.columns : place.rows);
  const i64 stride = IN_TENSOR ? place.row_stride : place.column_stride;
  for (u32 first = threadIdx.x; first < size; first += THREADS * GROUP) {
    u32 in_tile[GROUP];
    i64 at[GROUP];
    S value[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const u32 i = first + g * THREADS;
      if (i < size) {
        const u32 number = line.quotient(i);
        const u32 inner = i - number * line.divisor;
        in_tile[g] = IN_TENSOR ? number * pitch + inner : inner * pitch + number;
        at[g] = number * stride + inner;
        value[g] = load(in_tile[g], at[g]);
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      if (first + g * THREADS < size) {
        store(in_tile[g], at[g], value[g]);
      }
    }
  }
}

template <typename S, typename D, bool TO_BUCKET>
__device__ inline void copy_tile(const S* from, D* to, const Record& record, u32 number,
                                 double scale, S* tile) {
  const TilePlace place = place_of(record, number);
  from += TO_BUCKET ? place.in_tensor : place.in_bucket;
  to += TO_BUCKET ? place.in_bucket : place.in_tensor;
  for_tile<TO_BUCKET, S>(
      place, [=](u32, i64 i) { return from[i]; },
      [=](u32 in_tile, i64, S value) { tile[in_tile] = value; });
  __syncthreads();
  for_tile<!TO_BUCKET, S>(
      place, [=](u32 in_tile, i64) { return tile[in_tile]; },
      [=](u32, i64 i, S value) { to[i] = convert<S, D>(value, scale); });
}

// --- chunks ---------------------------------------------------------------------------------

template <typename S, typename D, bool TO_BUCKET>
__device__ inline void copy_chunk(const void* source, void* target, const Record& record,
                                  u32 number, double scale, void* tile) {
  const S* from = static_cast<const S*>(source);
  D* to = static_cast<D*>(target);
  if (record.way == RUN) {
    const i64 begin = static_cast<i64>(number) * CHUNK;
    const i64 rest = record.size - begin;
    copy_run<S, D>(from + begin, to + begin, static_cast<u32>(rest < CHUNK ? rest : CHUNK), scale);
  } else if (record.way == STRIDED) {
    copy_strided<S, D, TO_BUCKET>(from, to, record, number, scale);
  } else {
    copy_tile<S, D, TO_BUCKET>(from, to, record, number, scale, static_cast<S*>(tile));
  }
}

// Write zeros for a chunk of a tensor that is not there, which is divided evenly.
template <typename B>
__device__ inline void fill_zeros(B* to, const Record& record, i64 number) {
  const i64 share = (record.size + record.chunks - 1) / record.chunks;
  const i64 end = (number + 1) * share < record.size ? (number + 1) * share : record.size;
  for (i64 i = number * share + threadIdx.x; i < end; i += THREADS) {
    to[i] = B{};
  }
}

template <typename T, typename B, bool TO_BUCKET>
__device__ inline void copy_tensor(void* tensor, B* bucket, const Record& record, u32 number,
                                  double scale, void* tile) {
  if constexpr (TO_BUCKET) {
    copy_chunk<T, B, true>(tensor, bucket, record, number, scale, tile);
  } else {
    copy_chunk<B, T, false>(bucket, tensor, record, number, scale, tile);
  }
}

template <typename B, bool TO_BUCKET>
__device__ inline void flatten(const Flatten& p) {
  // Only floats of at most 4 bytes are mixed.
  __shared__ u64 tile[TILE * (sizeof(B) > 4 ? 8 : 4) / 8];
  const Chunk chunk = p.chunks[blockIdx.x];
  const Record& record = p.records[chunk.tensor];
  void* tensor = p.tensors[chunk.tensor];
  B* bucket = static_cast<B*>(p.bucket) + record.offset;
  const u32 number = static_cast<u32>(chunk.number);
  if (tensor == nullptr) {
    if constexpr (TO_BUCKET) {
      fill_zeros(bucket, record, number);
    }
  } else if constexpr (IsBits<B>::VALUE || Same<B, double>::VALUE) {
    copy_tensor<B, B, TO_BUCKET>(tensor, bucket, record, number, p.scale, tile);
  } else if (record.dtype == F32) {
    copy_tensor<float, B, TO_BUCKET>(tensor, bucket, record, number, p.scale, tile);
  } else if (record.dtype == F16) {
    copy_tensor<Half, B, TO_BUCKET>(tensor, bucket, record, number, p.scale, tile);
  } else {
    copy_tensor<BFloat, B, TO_BUCKET>(tensor, bucket, record, number, p.scale, tile);
  }
}

#define FLATTEN(name, B)                                        \
  KERNEL(flatten_##name, Flatten) { flatten<B, true>(p); }      \
  KERNEL(unflatten_##name, Flatten) { flatten<B, false>(p); }

FLATTEN(f32, float)
FLATTEN(f64, double)
FLATTEN(f16, Half)
FLATTEN(bf16, BFloat)
FLATTEN(bits_2, u16)
FLATTEN(bits_4, u32)
FLATTEN(bits_8, u64)
