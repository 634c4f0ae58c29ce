// Between workers that are threads of one process: a message is a function call.
#pragma once

#include <mutex>
#include <unordered_map>

#include "link.h"

namespace dataparallel {

class LocalLink : public Link {
 public:
  void join(const std::shared_ptr<Worker>& worker);
  void deliver(WorkerId to, Delivery delivery, double timeout, Acknowledge done) override;
  void notify(WorkerId to, Notification notification, double timeout, Acknowledge done) override;
  std::string name(WorkerId id) const override;

 private:
  std::shared_ptr<Worker> find(WorkerId id) const;

  mutable std::mutex mutex_;
  std::unordered_map<WorkerId, std::weak_ptr<Worker>> workers_;
};

} // namespace dataparallel
