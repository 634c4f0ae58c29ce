// Between workers that are processes: messages go through torch.distributed.rpc.
#pragma once

#include "link.h"

namespace dataparallel {

// Note [Gradients as calls of operators]
// torch's RPC takes a call of a registered operator in without Python: the receiving process runs
// it in a thread of its pool and never asks for the interpreter. So the messages of a backward
// pass are operators, and a pass needs Python only for nodes and hooks written in it. The RPC
// layer accepts operators of the namespace `aten` alone, which is why ours are there, under names
// that nobody will take for torch's.
class RpcLink : public Link {
 public:
  void deliver(WorkerId to, Delivery delivery, double timeout, Acknowledge done) override;
  void notify(WorkerId to, Notification notification, double timeout, Acknowledge done) override;
  std::string name(WorkerId id) const override;
};

// The worker of this process that takes such messages in; null for none.
void set_process_worker(std::shared_ptr<Worker> worker);

} // namespace dataparallel
