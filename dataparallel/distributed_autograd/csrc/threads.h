// Threads that passes run in, kept for the next pass.
#pragma once

#include <functional>

namespace dataparallel {

// Run `job` in a thread of its own: at once, whatever else runs, since passes wait for each other.
void run_in_thread(std::function<void()> job);

// Wait until no job runs; false if that takes longer than `seconds`.
bool wait_for_threads(double seconds);

} // namespace dataparallel
