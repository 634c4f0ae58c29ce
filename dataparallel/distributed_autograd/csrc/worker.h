// A worker: a process that takes part in distributed autograd.
#pragma once

#include <deque>

#include "context.h"

namespace dataparallel {

class Worker : public std::enable_shared_from_this<Worker> {
 public:
  Worker(std::string name, WorkerId id) : name_(std::move(name)), id_(id) {}

  const std::string& name() const {
    return name_;
  }
  WorkerId id() const {
    return id_;
  }
  // The first of `count` numbers that nothing else has.
  int64_t next_number(int64_t count = 1);

  std::shared_ptr<Context> new_context();
  // The context with this number, made where it is new; null once it was released or all were.
  std::shared_ptr<Context> obtain(ContextId id);
  // The same, but null where it is unknown.
  std::shared_ptr<Context> find(ContextId id) const;
  // Release a context here and on all workers that are known to take part in it, but for the one
  // that said so.
  void release(ContextId id, double timeout, WorkerId told_by = -1);
  void tell_released(ContextId id, WorkerId peer, double timeout);

  // Release every context here, without a word to the others, and take part in none any more.
  void close();

  void take(Delivery delivery);
  void take(const Notification& notification);

  // What is under way, by torch's names.
  std::unordered_map<std::string, int64_t> debug_info();
  void message_left() {
    ++outstanding_;
  }
  void message_arrived() {
    --outstanding_;
  }

 private:
  bool forget(ContextId id, std::shared_ptr<Context>& context);
  std::vector<std::shared_ptr<Context>> contexts() const;
  void end_overdue_passes();

  const std::string name_;
  const WorkerId id_;
  std::atomic<int64_t> outstanding_{0};

  mutable std::mutex mutex_;
  bool closed_ = false;
  std::unordered_map<ContextId, std::shared_ptr<Context>> contexts_;
  // Late messages must not make a context anew.
  std::unordered_set<ContextId> released_;
  std::deque<ContextId> released_order_;
};

// The worker that this process is; an error where there is none.
std::shared_ptr<Worker> process_worker();
// Let another worker, or none, be that one; what was it before is closed.
void set_process_worker(std::shared_ptr<Worker> worker);

} // namespace dataparallel
