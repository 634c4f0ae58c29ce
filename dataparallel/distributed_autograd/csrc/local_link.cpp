#include "local_link.h"

#include "pass.h"
#include "worker.h"

namespace dataparallel {

void LocalLink::join(const std::shared_ptr<Worker>& worker) {
  std::lock_guard<std::mutex> lock(mutex_);
  workers_[worker->id()] = worker;
}

std::shared_ptr<Worker> LocalLink::find(WorkerId id) const {
  std::shared_ptr<Worker> worker;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = workers_.find(id); found != workers_.end()) {
      worker = found->second.lock();
    }
  }
  TORCH_CHECK(worker, "worker ", id, " was closed");
  return worker;
}

std::string LocalLink::name(WorkerId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workers_.find(id);
  const auto worker = found == workers_.end() ? nullptr : found->second.lock();
  return worker ? worker->name() : std::to_string(id);
}

void LocalLink::deliver(WorkerId to, Delivery delivery, double, Acknowledge done) {
  std::string error;
  try {
    find(to)->take(std::move(delivery));
  } catch (...) {
    error = describe(std::current_exception());
  }
  done(error);
}

void LocalLink::notify(WorkerId to, Notification notification, double, Acknowledge done) {
  std::string error;
  try {
    find(to)->take(notification);
  } catch (...) {
    error = describe(std::current_exception());
  }
  done(error);
}

} // namespace dataparallel
