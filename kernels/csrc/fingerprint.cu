// A hash of the bits of each of many tensors, in one launch that reads them once.
//
// The bytes of a tensor are 64-bit words. Each is mixed with its place by the finalizer of
// MurmurHash3 (Austin Appleby, public domain). The results are added up modulo 2^64, in any order,
// so that blocks need not wait for each other. The number of bytes is the word at place 0.
//
// Access pattern: a block has a chunk of one tensor, and its threads read 16 bytes each, side by
// side, GROUP times before they mix. If a tensor does not begin at a multiple of 16 bytes, its
// words are put together from the largest units that can be read there. A warp still reads 256
// bytes in a row, in more instructions. Shuffles, and then one atomic addition for each block, add
// up the sums of the threads.
#include "kernel.cuh"

constexpr int MAX_TENSORS = 480;
// In bytes.
constexpr int CHUNK = 32 * 1024;
constexpr int GROUP = 4;
constexpr int WARP_SIZE = 32;

constexpr u64 STEP = 0x9E3779B97F4A7C15ull;

struct Fingerprint {
  const u8* tensors[MAX_TENSORS];
  const Chunk* chunks;
  // In bytes.
  const i64* sizes;
  // Zeros before the launch.
  u64* results;
};

// Map each word to another one, and no two to the same.
__device__ inline u64 mixed(u64 word) {
  word = (word ^ word >> 32) * 0xFF51AFD7ED558CCDull;
  word = (word ^ word >> 32) * 0xC4CEB9FE1A85EC53ull;
  return word ^ word >> 32;
}

// Return the word of the first `size` bytes, at most 8; missing bytes are zeros.
template <typename Unit>
__device__ inline u64 word_at(const u8* from, int size = 8) {
  const Unit* units = reinterpret_cast<const Unit*>(from);
  u64 word = 0;
#pragma unroll
  for (int j = 0; j < 8 / static_cast<int>(sizeof(Unit)); ++j) {
    if (j * static_cast<int>(sizeof(Unit)) < size) {
      word |= static_cast<u64>(units[j]) << j * 8 * sizeof(Unit);
    }
  }
  return word;
}

// Return this thread's sum of whole words; `offset` is the place of the first one times STEP.
template <typename Unit>
__device__ inline u64 sum_of_words(const u8* from, int words, u64 offset) {
  u64 sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < words; i += THREADS) {
    sum += mixed(word_at<Unit>(from + i * 8) + (offset + static_cast<u64>(i) * STEP));
  }
  return sum;
}

// Return the same for pairs of words, of which the first lies on a multiple of 16 bytes.
__device__ inline u64 sum_of_packs(const u8* from, int packs, u64 offset) {
  const u64* words = reinterpret_cast<const u64*>(from);
  u64 sum = 0;
  for (int base = threadIdx.x; base < packs; base += GROUP * THREADS) {
    Pack<u64> pack[GROUP];
#pragma unroll
    for (int n = 0; n < GROUP; ++n) {
      if (base + n * THREADS < packs) {
        pack[n] = load_aligned(words + 2 * (base + n * THREADS));
      }
    }
    const u64 here = offset + static_cast<u64>(base) * (2 * STEP);
#pragma unroll
    for (int n = 0; n < GROUP; ++n) {
      if (base + n * THREADS < packs) {
        const u64 place = here + n * (2 * THREADS * STEP);
        sum += mixed(pack[n].at[0] + place) + mixed(pack[n].at[1] + (place + STEP));
      }
    }
  }
  return sum;
}

__device__ inline u64 sum_of_chunk(const u8* from, int words, u64 offset) {
  const u64 address = reinterpret_cast<u64>(from);
  if (address % 16 == 0) {
    const int paired = words / 2 * 2;
    return sum_of_packs(from, words / 2, offset) +
           sum_of_words<u64>(from + paired * 8, words - paired,
                             offset + static_cast<u64>(paired) * STEP);
  }
  if (address % 8 == 0) {
    return sum_of_words<u64>(from, words, offset);
  }
  if (address % 4 == 0) {
    return sum_of_words<u32>(from, words, offset);
  }
  if (address % 2 == 0) {
    return sum_of_words<u16>(from, words, offset);
  }
  return sum_of_words<u8>(from, words, offset);
}

// Return the sum over the threads of a block; it is right in thread 0 only.
__device__ inline u64 sum_over_block(u64 sum) {
  __shared__ u64 sums[THREADS / WARP_SIZE];
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  }
  if (threadIdx.x % WARP_SIZE == 0) {
    sums[threadIdx.x / WARP_SIZE] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / WARP_SIZE; ++warp) {
      sum += sums[warp];
    }
  }
  return sum;
}

KERNEL(fingerprint, Fingerprint) {
  const Chunk chunk = p.chunks[blockIdx.x];
  const i64 size = p.sizes[chunk.tensor];
  const i64 begin = static_cast<i64>(chunk.number) * CHUNK;
  const u8* from = p.tensors[chunk.tensor] + begin;
  const int bytes = size - begin < CHUNK ? static_cast<int>(size - begin) : CHUNK;
  const int words = bytes / 8;
  const u64 offset = (static_cast<u64>(begin) / 8 + 1) * STEP;
  u64 sum = sum_of_chunk(from, words, offset);
  if (threadIdx.x == 0) {
    if (chunk.number == 0) {
      sum += mixed(static_cast<u64>(size));
    }
    if (bytes % 8 != 0) {
      const u64 rest = word_at<u8>(from + words * 8, bytes % 8);
      sum += mixed(rest + (offset + static_cast<u64>(words) * STEP));
    }
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) {
    atomicAdd(p.results + chunk.tensor, sum);
  }
}
