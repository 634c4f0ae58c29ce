#include "schedule.h"

#include "streams.h"

#include <algorithm>
#include <random>

namespace vdev {
namespace {

struct Schedule {
  std::mutex mutex;
  std::mt19937_64 random;
  // The mean number of looks at a stream until its mood changes, which depends on the seed.
  uint64_t looks_per_mood = 2;
  // The streams in the order in which they got work, each with its eagerness, from 0 to 2.
  std::vector<std::pair<Stream*, uint64_t>> streams;

  void meet(Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto same = [&](const auto& each) { return each.first == &stream; };
    if (std::none_of(streams.begin(), streams.end(), same)) {
      streams.emplace_back(&stream, random() % 3);
    }
  }

  // Choose a stream that runs next; null if none does.
  Stream* choose() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<Stream*> willing;
    for (auto& [stream, eager] : streams) {
      if (!stream->is_ready()) {
        continue;
      }
      if (random() % looks_per_mood == 0) {
        eager = random() % 3;
      }
      if (random() % 2 < eager) {
        willing.push_back(stream);
      }
    }
    return willing.empty() ? nullptr : willing[random() % willing.size()];
  }
};

std::atomic<bool> has_schedule{false};
thread_local bool is_ahead = false;

Schedule& schedule() {
  static auto* instance = new Schedule();
  return *instance;
}

}  // namespace

void set_schedule(std::optional<uint64_t> seed) {
  std::lock_guard<std::mutex> lock(schedule().mutex);
  schedule().random.seed(seed.value_or(0));
  schedule().looks_per_mood = uint64_t{2} << schedule().random() % 5;
  schedule().streams.clear();
  has_schedule = seed.has_value();
}

void run_ahead(Stream& stream) {
  if (!has_schedule || is_ahead) {
    return;
  }
  is_ahead = true;
  schedule().meet(stream);
  const GilRelease no_gil;
  while (Stream* chosen = schedule().choose()) {
    try {
      chosen->run_next();
    } catch (...) {
      // The call of this thread is not the cause.
      raise_later({[error = std::current_exception()] { std::rethrow_exception(error); }, false});
    }
  }
  is_ahead = false;
}

}  // namespace vdev
