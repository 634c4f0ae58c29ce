// The threads of a grid, run on one thread of the operating system.
//
// Note [Threads on the host]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~
// The threads of a block are fibers of one thread of the operating system. They run one after the
// other, each until it ends or waits at a barrier. The schedule says in which order: where a
// barrier is missing, results depend on it. A barrier that some threads never reach is an error,
// and so are threads that wait at barriers in different lines. When a block begins, shared memory
// is full of NaN, and local memory of a pattern. One thing is not seen: two threads that add to one
// place without a barrier or an atomic, since none is interrupted between its read and its write.
#pragma once

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <vector>

namespace host {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

class Block;

// The data of a launch, for its thread of the operating system. It begins with a number that is not
// zero: memory of a thread that begins as zeros is that of __shared__, see poison_shared.
struct Launch {
  unsigned not_zero = 1;
  Index thread_index, block_index, block_size, grid_size;
  Block* block = nullptr;
};

inline constinit thread_local Launch launch;

constexpr int WARP = 32;
constexpr size_t STACK = 64 * 1024;
constexpr size_t PAGE = 4096;
enum class State { READY, AT_BARRIER, AT_WARP_BARRIER, ENDED };

// The results of a launch.
constexpr int DONE = 0;
constexpr int DIVERGED = 1;

// A stack. The page below it cannot be written, so that too much local memory is noticed.
class Stack {
 public:
  Stack()
      : memory_(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED || mprotect(memory_, PAGE, PROT_NONE) != 0) {
      throw std::bad_alloc();
    }
  }
  ~Stack() { munmap(memory_, STACK); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  stack_t given() const {
    stack_t stack{};
    stack.ss_sp = memory_;
    stack.ss_size = STACK;
    return stack;
  }

 private:
  void* memory_;
};

// Fill __shared__ of the calling thread with bytes of ones: NaN, or -1. It is all the memory that a
// thread of the operating system has in this library and that begins as zeros.
inline void poison_shared() {
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void*) {
        const ElfW(Phdr)* storage = nullptr;
        bool is_this = false;
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const ElfW(Phdr)& part = library->dlpi_phdr[i];
          const auto offset = reinterpret_cast<uintptr_t>(&poison_shared) - library->dlpi_addr;
          is_this |= part.p_type == PT_LOAD && offset - part.p_vaddr < part.p_memsz;
          storage = part.p_type == PT_TLS ? &part : storage;
        }
        if (!is_this) {
          return 0;
        }
        std::memset(static_cast<char*>(library->dlpi_tls_data) + storage->p_filesz, 0xff,
                    storage->p_memsz - storage->p_filesz);
        return 1;
      },
      nullptr);
}

// A block of threads. A fiber takes one thread after the other, until one waits at a barrier; the
// next threads are those of the next fiber. Without barriers there is one fiber and no switch.
class Block {
 public:
  explicit Block(unsigned threads)
      : stacks_(threads), fiber_of_(threads), states_(threads), places_(threads), slots_(threads) {}

  template <typename Body>
  int run(const std::vector<unsigned>& order, Body& body) {
    entry_ = [](void* given) { (*static_cast<Body*>(given))(); };
    body_ = &body;
    order_ = order;
    started_ = fibers_ = 0;
    std::fill(states_.begin(), states_.end(), State::READY);
    while (started_ < order_.size()) {
      start_fiber();
    }
    while (release()) {
      for (unsigned t : order_) {
        if (states_[t] == State::READY) {
          resume(t);
        }
      }
    }
    const bool ended =
        std::all_of(states_.begin(), states_.end(), [](State s) { return s == State::ENDED; });
    return ended ? DONE : DIVERGED;
  }

  // Called by a thread, in the line `place`.
  void wait(State state, int place) {
    states_[running_] = state;
    places_[running_] = place;
    if (!_setjmp(fiber_of_[running_])) {
      _longjmp(scheduler_, 1);
    }
  }

  uint64_t& slot(unsigned thread) { return slots_[thread]; }

 private:
  void start_fiber() {
    if (!stacks_[fibers_]) {
      stacks_[fibers_] = std::make_unique<Stack>();
    }
    ucontext_t fiber;
    getcontext(&fiber);
    fiber.uc_stack = stacks_[fibers_]->given();
    fiber.uc_link = nullptr;
    makecontext(&fiber, &Block::work, 0);
    ++fibers_;
    if (!_setjmp(scheduler_)) {
      setcontext(&fiber);
    }
  }

  void resume(unsigned thread) {
    running_ = thread;
    launch.thread_index = {thread, 0, 0};
    if (!_setjmp(scheduler_)) {
      _longjmp(fiber_of_[thread], 1);
    }
  }

  static void work() {
    Block& block = *launch.block;
    while (block.started_ < block.order_.size()) {
      const unsigned thread = block.order_[block.started_++];
      block.running_ = thread;
      launch.thread_index = {thread, 0, 0};
      block.entry_(block.body_);
      block.states_[block.running_] = State::ENDED;
    }
    _longjmp(block.scheduler_, 1);
  }

  bool all_at(State state, unsigned from, unsigned to) const {
    for (unsigned t = from; t < to; ++t) {
      if (states_[t] != state || places_[t] != places_[from]) {
        return false;
      }
    }
    return true;
  }

  // Let those threads go on whose barrier all have reached. Threads that have ended are missed:
  // hardware would let it pass, but no kernel should rely on that.
  bool release() {
    const unsigned threads = states_.size();
    bool released = false;
    if (all_at(State::AT_BARRIER, 0, threads)) {
      std::fill(states_.begin(), states_.end(), State::READY);
      return true;
    }
    for (unsigned from = 0; from < threads; from += WARP) {
      const unsigned to = std::min(from + WARP, threads);
      if (all_at(State::AT_WARP_BARRIER, from, to)) {
        std::fill(states_.begin() + from, states_.begin() + to, State::READY);
        released = true;
      }
    }
    return released;
  }

  struct Jump {
    jmp_buf at;
    operator jmp_buf&() { return at; }
  };

  std::vector<std::unique_ptr<Stack>> stacks_;
  std::vector<Jump> fiber_of_;
  std::vector<State> states_;
  std::vector<int> places_;
  std::vector<uint64_t> slots_;
  std::vector<unsigned> order_;
  jmp_buf scheduler_;
  unsigned started_ = 0;
  unsigned fibers_ = 0;
  unsigned running_ = 0;
  void (*entry_)(void*) = nullptr;
  void* body_ = nullptr;
};

// Blocks that no launch uses; their stacks are worth keeping.
inline std::vector<std::unique_ptr<Block>> idle;
inline std::mutex idle_mutex;

inline std::unique_ptr<Block> take_block(unsigned threads) {
  std::lock_guard lock(idle_mutex);
  if (idle.empty()) {
    return std::make_unique<Block>(threads);
  }
  std::unique_ptr<Block> block = std::move(idle.back());
  idle.pop_back();
  return block;
}

inline void give_block_back(std::unique_ptr<Block> block) {
  std::lock_guard lock(idle_mutex);
  idle.push_back(std::move(block));
}

// Return the order in which blocks or threads run: 0 forwards, 1 backwards, others shuffled.
inline std::vector<unsigned> order_of(unsigned count, unsigned schedule) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (schedule == 1) {
    std::reverse(order.begin(), order.end());
  } else if (schedule > 1) {
    std::shuffle(order.begin(), order.end(), std::mt19937(schedule));
  }
  return order;
}

template <typename Body>
int run_grid(unsigned blocks, unsigned threads, unsigned schedule, Body body) {
  std::unique_ptr<Block> block = take_block(threads);
  launch.block = block.get();
  launch.block_size = {threads, 1, 1};
  launch.grid_size = {blocks, 1, 1};
  const auto order = order_of(threads, schedule);
  int status = DONE;
  for (unsigned number : order_of(blocks, schedule)) {
    poison_shared();
    launch.block_index = {number, 0, 0};
    status = block->run(order, body);
    if (status != DONE) {
      break;
    }
  }
  give_block_back(std::move(block));
  return status;
}

}  // namespace host
