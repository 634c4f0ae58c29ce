// Where in the program something was launched, for messages.
#pragma once

#include <memory>
#include <string>

namespace vdev {

// Cheap to take; what it says is looked up when somebody reads it. Empty where Python has no part.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::string describe() const = 0;

  // The place where this thread is.
  static std::shared_ptr<const Place> here();
};

}  // namespace vdev
