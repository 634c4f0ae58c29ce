// A c10d backend that takes tensors on virtual devices only, as NCCL takes those on CUDA devices
// only. Its habits are NCCL's: a collective runs on a stream of the communicator, behind what the
// current stream has queued; work.wait() makes the current stream wait, and not the host; an error
// comes later, in work.exception(), and every later collective is refused. A thread drives the
// communicator's streams, so that collectives go on although nobody waits.
#include "communicator.h"
#include "stream_work.h"

#include <torch/library.h>
#include <torch/python.h>

#include <pybind11/chrono.h>

#include <c10/core/StreamGuard.h>

#include <atomic>
#include <deque>
#include <thread>

namespace device_only {
namespace {

using namespace c10d;
using WorkPtr = c10::intrusive_ptr<Work>;

// An operator that only writes in place is queued on the current stream, and gets the memory of
// devices as CPU tensors when it runs.
void run_collective(at::TensorList written, at::TensorList read, int64_t number) {
  if (const auto collective = table().take(number)) {
    collective->run(written.vec(), read.vec());
  }
}

// Makes no new shapes.
void run_nothing(at::TensorList, at::TensorList, int64_t) {}

Tensors joined(const Tensors& first, const Tensors& second) {
  Tensors result(first);
  result.insert(result.end(), second.begin(), second.end());
  return result;
}

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors result;
  for (const auto& list : lists) {
    result.insert(result.end(), list.begin(), list.end());
  }
  return result;
}

// Dense memory in whatever order, as one dimension.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

bool is_average(const ReduceOp& op) {
  return op == ReduceOp::AVG;
}

void check_one(const Tensors& tensors) {
  TORCH_CHECK_VALUE(
      tensors.size() == 1, "vccl: Expecting one tensor only but got ", tensors.size());
}

c10::Device checked_device(const Tensors& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "vccl: there is no tensor");
  const auto device = tensors[0].device();
  for (const auto& each : tensors) {
    TORCH_CHECK_VALUE(
        each.device().type() == kVirtual && !each.is_sparse(),
        "vccl: Tensors must be virtual and dense, got one on ",
        each.device());
    TORCH_CHECK_VALUE(
        each.device() == device,
        "vccl: Tensors must be on one device, got ",
        device,
        " and ",
        each.device());
    TORCH_CHECK_VALUE(each.is_non_overlapping_and_dense(), "vccl: Tensors must be contiguous");
  }
  return device;
}

class DeviceOnly final : public Backend {
 public:
  // `parent`: what the communicator is split from, or nothing.
  DeviceOnly(
      c10::intrusive_ptr<Backend> gloo,
      int rank,
      int size,
      std::chrono::milliseconds timeout,
      c10::intrusive_ptr<DeviceOnly> parent)
      : Backend(rank, size),
        options_(c10::make_intrusive<Options>("vccl", timeout)),
        comm_(std::make_shared<Communicator>()),
        parent_(std::move(parent)) {
    comm_->gloo = std::move(gloo);
    comm_->rank = rank;
    driver_ = std::thread([this] { drive(); });
  }
  ~DeviceOnly() override {
    stop();
    // gloo joins its threads, which may have to let go of objects of Python's.
    std::optional<pybind11::gil_scoped_release> release;
    if (Py_IsInitialized() && PyGILState_Check()) {
      release.emplace();
    }
    comm_->gloo.reset();
  }
  const std::string getBackendName() const override {
    return "vccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    std::lock_guard<std::mutex> lock(comm_->mutex);
    return static_cast<uint64_t>(comm_->launched);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    comm_->gloo->setTimeout(timeout);
  }
  void shutdown() override {
    stop();
  }
  void abort() override {
    {
      std::lock_guard<std::mutex> lock(comm_->mutex);
      if (comm_->failure.empty()) {
        comm_->failure = "abort() was called";
      }
    }
    try {
      comm_->gloo->abort();
    } catch (const std::exception&) {
      // Gloo may have none.
    }
  }

  // --- splitting -------------------------------------------------------------------------------

  bool supportsSplitting() const override {
    return true;
  }
  void eagerConnectSingleDevice(at::Device) override {
    split();
  }
  // Every process of the parent takes part when a communicator is split from it, also those that
  // are not in the new one.
  void take_part_in_split() {
    BarrierOptions options;
    options.device = at::Device(at::kCPU);
    gloo().barrier(options)->wait();
  }

  // --- reductions ------------------------------------------------------------------------------

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    check_one(tensors);
    return launch(OpType::ALLREDUCE, tensors, {}, tensors, [=, this](auto& written, auto&) {
      reduce_in_place(written[0], options.reduceOp, options.timeout);
    });
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const AllreduceCoalescedOptions& options) override {
    const auto body = [=, this](auto& written, auto&) {
      for (const auto& each : written) {
        reduce_in_place(each, options.reduceOp, options.timeout);
      }
    };
    return launch(OpType::ALLREDUCE_COALESCED, tensors, {}, tensors, body);
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override {
    check_one(tensors);
    return launch(OpType::REDUCE, tensors, {}, tensors, [=, this](auto& written, auto&) {
      const bool here = options.rootRank == getRank();
      // What gloo leaves elsewhere than at the root is not what was there.
      Tensors sent{here ? flat(written[0]) : flat(written[0]).clone()};
      auto plain = options;
      plain.reduceOp = is_average(options.reduceOp) ? ReduceOp(ReduceOp::SUM) : options.reduceOp;
      gloo().reduce(sent, plain)->wait();
      if (is_average(options.reduceOp)) {
        sent[0].div_(getSize());
      }
    });
  }
  WorkPtr reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const ReduceScatterOptions& options) override {
    check_one(outputs);
    const auto body = [=, this](auto& written, auto& read) {
      Tensors rows;
      for (const auto& each : read) {
        rows.push_back(each.reshape(-1));
      }
      scatter_sum(written[0], at::cat(rows), options);
    };
    return launch(OpType::REDUCE_SCATTER, outputs, joined(inputs), outputs, body);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const ReduceScatterOptions& options) override {
    const auto body = [=, this](auto& written, auto& read) {
      scatter_sum(written[0], read[0].clone(), options);
    };
    return launch(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, {output}, body);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const ReduceScatterOptions& options) override {
    const auto body = [=, this](auto& written, auto& read) {
      for (size_t i = 0; i < written.size(); ++i) {
        scatter_sum(written[i], read[i].clone(), options);
      }
    };
    return launch(OpType::COALESCED, outputs, inputs, outputs, body);
  }

  // --- copies ----------------------------------------------------------------------------------

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    check_one(tensors);
    return launch(OpType::BROADCAST, tensors, {}, tensors, [=, this](auto& written, auto&) {
      Tensors sent{flat(written[0])};
      gloo().broadcast(sent, options)->wait();
    });
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const AllgatherOptions& options) override {
    check_one(inputs);
    const auto body = [=, this](auto& written, auto& read) {
      std::vector<Tensors> results{written};
      Tensors sent{read[0].contiguous()};
      gloo().allgather(results, sent, options)->wait();
    };
    return launch(OpType::ALLGATHER, joined(outputs), inputs, outputs[0], body);
  }
  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const AllgatherOptions& options) override {
    const auto body = [=, this](auto& written, auto& read) {
      gather_into(written[0], read[0], options);
    };
    return launch(OpType::_ALLGATHER_BASE, {output}, {input}, {output}, body);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const AllgatherOptions& options) override {
    const auto body = [=, this](auto& written, auto& read) {
      for (size_t i = 0; i < written.size(); ++i) {
        gather_into(written[i], read[i], options);
      }
    };
    return launch(OpType::COALESCED, outputs, inputs, outputs, body);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const GatherOptions& options)
      override {
    check_one(inputs);
    const auto body = [=, this](auto& written, auto& read) {
      std::vector<Tensors> results;
      if (options.rootRank == getRank()) {
        results.push_back(written);
      }
      Tensors sent{read[0].contiguous()};
      gloo().gather(results, sent, options)->wait();
    };
    return launch(OpType::GATHER, joined(outputs), inputs, joined(outputs), body);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ScatterOptions& options)
      override {
    check_one(outputs);
    const auto body = [=, this](auto& written, auto& read) {
      std::vector<Tensors> sent;
      if (options.rootRank == getRank()) {
        sent.push_back(read);
      }
      Tensors results{written};
      gloo().scatter(results, sent, options)->wait();
    };
    return launch(OpType::SCATTER, outputs, joined(inputs), outputs, body);
  }
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& gets,
      std::vector<int64_t>& gives,
      const AllToAllOptions& options) override {
    const auto body = [=, this](auto& written, auto& read) {
      at::Tensor result = written[0], sent = read[0].contiguous();
      auto to = gets, from = gives;
      gloo().alltoall_base(result, sent, to, from, options)->wait();
    };
    return launch(OpType::ALLTOALL_BASE, {output}, {input}, {output}, body);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override {
    const auto body = [=, this](auto& written, auto& read) {
      Tensors from, to;
      std::vector<int64_t> gives, gets;
      for (const auto& each : read) {
        from.push_back(each.reshape(-1));
        gives.push_back(each.numel());
      }
      for (const auto& each : written) {
        to.push_back(each.reshape(-1));
        gets.push_back(each.numel());
      }
      at::Tensor sent = at::cat(from), result = at::cat(to);
      gloo().alltoall_base(result, sent, gets, gives, options)->wait();
      const auto parts = result.split_with_sizes(gets);
      for (size_t i = 0; i < written.size(); ++i) {
        written[i].copy_(parts[i].view_as(written[i]));
      }
    };
    return launch(OpType::ALLTOALL, outputs, inputs, outputs, body);
  }
  // In the order of launch like everything else: two processes that both send before they receive
  // wait for each other.
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    check_one(tensors);
    return launch(OpType::SEND, {}, tensors, tensors, [=, this](auto&, auto& read) {
      Tensors sent{read[0].contiguous()};
      gloo().send(sent, to, tag)->wait();
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    check_one(tensors);
    return launch(OpType::RECV, tensors, {}, tensors, [=, this](auto& written, auto&) {
      Tensors result{flat(written[0])};
      gloo().recv(result, from, tag)->wait();
    });
  }
  // The host waits for this one, as for NCCL's.
  WorkPtr barrier(const BarrierOptions& options) override {
    const auto here = c10::impl::VirtualGuardImpl(kVirtual).getDevice();
    const auto token = at::zeros({1}, at::TensorOptions().device(here));
    const auto body = [=, this](auto&, auto&) {
      auto plain = options;
      plain.device = at::Device(at::kCPU);
      plain.device_ids.clear();
      gloo().barrier(plain)->wait();
    };
    return launch(OpType::BARRIER, {token}, {}, {token}, body, /*host_waits=*/true);
  }

 private:
  Backend& gloo() const {
    return *comm_->gloo;
  }

  void split() {
    if (parent_ && !is_split_.exchange(true)) {
      parent_->take_part_in_split();
    }
  }

  void reduce_in_place(
      const at::Tensor& tensor,
      const ReduceOp& op,
      std::chrono::milliseconds timeout) const {
    AllreduceOptions options;
    options.reduceOp = is_average(op) ? ReduceOp(ReduceOp::SUM) : op;
    options.timeout = timeout;
    Tensors sent{flat(tensor)};
    gloo().allreduce(sent, options)->wait();
    if (!is_average(op)) {
      return;
    }
    if (tensor.is_floating_point() || tensor.is_complex()) {
      sent[0].div_(getSize());
    } else {
      sent[0].div_(getSize(), "trunc");
    }
  }
  void gather_into(at::Tensor output, const at::Tensor& input, const AllgatherOptions& options)
      const {
    at::Tensor sent = input.contiguous();
    gloo()._allgather_base(output, sent, options)->wait();
  }
  // Changes `input`.
  void scatter_sum(
      const at::Tensor& output,
      const at::Tensor& input,
      const ReduceScatterOptions& options) const {
    const auto all = input.reshape(-1);
    reduce_in_place(all, options.reduceOp, options.timeout);
    output.copy_(all.chunk(getSize())[static_cast<size_t>(getRank())].view_as(output));
  }

  // `host_waits`: whether work.wait() blocks the host.
  WorkPtr launch(
      OpType kind,
      const Tensors& written,
      const Tensors& read,
      const Tensors& results,
      Body body,
      bool host_waits = false) {
    const auto device = checked_device(joined(written, read));
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::VirtualGuardImpl impl(kVirtual);
    auto collective = std::make_shared<Collective>();
    collective->comm = comm_;
    collective->body = [this, body](const Tensors& to, const Tensors& from) {
      split();
      body(to, from);
    };
    auto work =
        c10::make_intrusive<StreamWork>(getRank(), kind, results, device, collective, host_waits);
    std::lock_guard<std::mutex> order(launching_);
    const c10::Stream stream = stream_of(device);
    c10::Event ready(kVirtual);
    ready.record(impl.getStream(device));
    ready.block(stream);
    for (const auto& each : joined(written, read)) {
      impl.recordDataPtrOnStream(each.storage().data_ptr(), stream);
    }
    {
      std::lock_guard<std::mutex> lock(comm_->mutex);
      TORCH_CHECK(
          comm_->failure.empty(),
          "vccl: communicator was aborted on rank ",
          getRank(),
          ": ",
          comm_->failure);
      TORCH_CHECK(!stopping_, "vccl: the process group was destroyed");
      collective->turn = comm_->launched++;
    }
    const int64_t number = table().put(collective);
    try {
      c10::StreamGuard guard(stream);
      static const auto run = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("device_only::run", "")
                                  .typed<void(at::TensorList, at::TensorList, int64_t)>();
      run.call(written, read, number);
      collective->end.record(stream);
      work->mark_launched();
    } catch (const std::exception& error) {
      table().take(number);
      // In its turn, so that others go on.
      collective->run({}, {});
      collective->finish(std::current_exception(), error.what());
      throw;
    }
    std::lock_guard<std::mutex> lock(comm_->mutex);
    queue_.push_back(std::move(collective));
    comm_->changed.notify_all();
    return work;
  }

  c10::Stream stream_of(c10::Device device) {
    const auto found = streams_.find(device.index());
    if (found != streams_.end()) {
      return found->second;
    }
    const auto made = c10::impl::VirtualGuardImpl(kVirtual).getNewStream(device);
    return streams_.emplace(device.index(), made).first->second;
  }

  // What the queue of a device does by itself on hardware.
  void drive() {
    for (;;) {
      std::shared_ptr<Collective> next;
      {
        std::unique_lock<std::mutex> lock(comm_->mutex);
        comm_->changed.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) {
          return;
        }
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      // An error of earlier work of the device is told here. It does not undo the collective.
      std::string failure = "it never ran";
      for (int tries = 0; tries < 100 && !next->is_done(); ++tries) {
        try {
          next->end.synchronize();
        } catch (const std::exception& error) {
          failure = error.what();
        }
      }
      if (!next->is_done()) {
        const c10::Error error(
            {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, failure);
        next->finish(std::make_exception_ptr(error), failure);
      }
    }
  }

  void stop() {
    bool busy = false;
    {
      std::lock_guard<std::mutex> lock(comm_->mutex);
      if (stopping_) {
        return;
      }
      stopping_ = true;
      busy = comm_->finished < comm_->launched;
      comm_->changed.notify_all();
    }
    if (busy) {
      // As ncclCommAbort: what is under way does not complete.
      abort();
    }
    std::optional<pybind11::gil_scoped_release> release;
    if (Py_IsInitialized() && PyGILState_Check()) {
      release.emplace();
    }
    driver_.join();
  }

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Communicator> comm_;
  c10::intrusive_ptr<DeviceOnly> parent_;
  std::atomic<bool> is_split_{false};
  std::mutex launching_;
  std::unordered_map<c10::DeviceIndex, c10::Stream> streams_;
  // These two under comm_->mutex.
  std::deque<std::shared_ptr<Collective>> queue_;
  bool stopping_ = false;
  std::thread driver_;
};

}  // namespace

TORCH_LIBRARY(device_only, library) {
  library.def("run(Tensor(a!)[] written, Tensor[] read, int number) -> ()");
}
TORCH_LIBRARY_IMPL(device_only, CPU, library) {
  library.impl("run", run_collective);
}
TORCH_LIBRARY_IMPL(device_only, Meta, library) {
  library.impl("run", run_nothing);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  py::class_<DeviceOnly, c10::intrusive_ptr<DeviceOnly>, Backend>(module, "DeviceOnly")
      .def(py::init<
           c10::intrusive_ptr<Backend>,
           int,
           int,
           std::chrono::milliseconds,
           c10::intrusive_ptr<DeviceOnly>>())
      .def_property_readonly("options", &DeviceOnly::getBackendOptions)
      .def(
          "perform_nocolor_split",
          [](DeviceOnly& self, const at::Device&) { self.take_part_in_split(); },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace device_only
