// The schedule, by which streams run ahead of what is demanded.
//
// Without a schedule, streams run what somebody waits for, and nothing else. A seed chooses among
// all orders that streams and events allow. At each launch, and between the steps of each wait,
// some streams run some of what they have queued. Each is eager for a while and lazy for a while,
// so that some fall far behind others.
#pragma once

#include <cstdint>
#include <optional>

namespace vdev {

class Stream;

void set_schedule(std::optional<uint64_t> seed);
// Run what the schedule chooses, if there is one. The stream is among those that have work.
void run_ahead(Stream& stream);

}  // namespace vdev
