// The place in the program at which something was launched, for messages.
#pragma once

#include <memory>
#include <string>

namespace vdev {

// A place is cheap to take: its text is made when somebody reads it. It is empty outside of Python.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::string describe() const = 0;

  // Return the place where this thread is.
  static std::shared_ptr<const Place> here();
};

}  // namespace vdev
