// Which streams run ahead of what is demanded.
//
// Without a schedule, streams run what somebody waits for, and nothing else. A seed chooses among
// all orders that streams and events allow: at each launch, and between the steps of each wait, some
// streams run some of what they have queued. Each is eager for a while and lazy for a while, so that
// some fall far behind others.
#pragma once

#include <cstdint>
#include <optional>

namespace vdev {

class Stream;

void set_schedule(std::optional<uint64_t> seed);
// Runs what the schedule chooses now; nothing without one. The stream has got, or is to do, work.
void run_ahead(Stream& stream);

}  // namespace vdev
