// A c10d backend that takes tensors on virtual devices only, as NCCL takes those on CUDA devices
// only. Its habits are NCCL's. A collective runs on a stream of the communicator, behind what the
// current stream has queued; work.wait() makes the current stream wait, and not the host. An error
// comes later, in work.exception(), and every later collective is refused. A thread drives the
// communicator's streams, so that collectives go on although nobody waits.
#include "communicator.h"

#include <torch/library.h>
#include <torch/python.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <c10/core/StreamGuard.h>

#include <unistd.h>

#include <deque>
#include <memory>
#include <set>
#include <thread>

namespace device_only {
namespace {

using namespace c10d;
using WorkPtr = c10::intrusive_ptr<Work>;

using Handle = std::unique_ptr<std::shared_ptr<Collective>>;

// Run a queued collective. An operator that only writes in place is queued on the current stream,
// and gets the memory of devices as CPU tensors when it runs, once. Operators have plain arguments
// only: this one owns the collective at an address.
void run_collective(at::TensorList written, at::TensorList read, int64_t address) {
  const Handle handle(reinterpret_cast<std::shared_ptr<Collective>*>(address));
  (*handle)->run(written.vec(), read.vec());
}

// The meta kernel, which makes no new shapes.
void run_nothing(at::TensorList, at::TensorList, int64_t) {}

// Return dense memory, in whatever order, as one dimension.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
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

// Release the interpreter's lock while threads end that may want it.
auto without_lock() {
  const bool held = Py_IsInitialized() && PyGILState_Check();
  return held ? std::make_unique<pybind11::gil_scoped_release>() : nullptr;
}

class DeviceOnly final : public Backend {
 public:
  // `parent`: the communicator that this one is split from, or nothing.
  DeviceOnly(
      c10::intrusive_ptr<Backend> gloo,
      c10::intrusive_ptr<Store> store,
      std::string name,
      int rank,
      int size,
      std::chrono::milliseconds timeout,
      c10::intrusive_ptr<DeviceOnly> parent)
      : Backend(rank, size),
        options_(c10::make_intrusive<Options>("vccl", timeout)),
        comm_(std::make_shared<Communicator>()),
        parent_(std::move(parent)) {
    comm_->gloo = std::move(gloo);
    comm_->store = std::move(store);
    comm_->name = std::move(name);
    comm_->rank = rank;
    comm_->size = size;
    comm_->limit = timeout.count();
    driver_ = std::thread([this] { drive(); });
  }
  ~DeviceOnly() override {
    stop();
    const auto released = without_lock();
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
    comm_->limit = timeout.count();
  }
  // Wait for kernels, as NCCL does: one whose peer never comes ends by abort(), or by the watchdog.
  void shutdown() override {
    {
      const auto released = without_lock();
      std::unique_lock<std::mutex> lock(comm_->mutex);
      comm_->changed.wait(lock, [this] {
        return comm_->finished == comm_->launched || !comm_->failure.empty();
      });
    }
    stop();
  }
  void abort() override {
    {
      std::lock_guard<std::mutex> lock(comm_->mutex);
      if (comm_->failure.empty()) {
        comm_->failure = "abort() was called";
      }
      comm_->changed.notify_all();
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
  void eagerConnectSingleDevice(at::Device device) override {
    connect(device);
  }
  // Every process of the parent takes part when a communicator is split from it, including those
  // that are not in the new one.
  void take_part_in_split() {
    BarrierOptions options;
    options.device = at::Device(at::kCPU);
    gloo().barrier(options)->wait();
  }

  // --- what the package and torch's wrapper use: others are refused by torch ---------------------

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    check_one(tensors);
    const auto how = c10::str(" of kind ", static_cast<int>(options.reduceOp.op_));
    return launch(OpType::ALLREDUCE, how, tensors, {}, [=, this](auto& written, auto&) {
      const bool average = options.reduceOp == ReduceOp::AVG;
      auto plain = options;
      plain.reduceOp = average ? ReduceOp(ReduceOp::SUM) : options.reduceOp;
      Tensors sent{flat(written[0])};
      complete(gloo().allreduce(sent, plain));
      if (average) {
        const bool real = sent[0].is_floating_point() || sent[0].is_complex();
        real ? sent[0].div_(getSize()) : sent[0].div_(getSize(), "trunc");
      }
    });
  }
  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    check_one(tensors);
    const auto how = c10::str(" from rank ", options.rootRank);
    return launch(OpType::BROADCAST, how, tensors, {}, [=, this](auto& written, auto&) {
      Tensors sent{flat(written[0])};
      complete(gloo().broadcast(sent, options));
    });
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const AllgatherOptions& options) override {
    check_one(inputs);
    return launch(OpType::ALLGATHER, "", outputs[0], inputs, [=, this](auto& written, auto& read) {
      std::vector<Tensors> results{written};
      Tensors sent{read[0].contiguous()};
      complete(gloo().allgather(results, sent, options));
    });
  }
  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const AllgatherOptions& options) override {
    return launch(OpType::_ALLGATHER_BASE, "", {output}, {input}, [=, this](auto& to, auto& from) {
      at::Tensor result = to[0], sent = from[0].contiguous();
      complete(gloo()._allgather_base(result, sent, options));
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& gets,
      std::vector<int64_t>& gives,
      const AllToAllOptions& options) override {
    return launch(OpType::ALLTOALL_BASE, "", {output}, {input}, [=, this](auto& to, auto& from) {
      at::Tensor result = to[0], sent = from[0].contiguous();
      auto received = gets, given = gives;
      complete(gloo().alltoall_base(result, sent, received, given, options));
    });
  }

 private:
  Backend& gloo() const {
    return *comm_->gloo;
  }

  // Wait for it, but no longer than until abort().
  void complete(const WorkPtr& work) const {
    while (!work->isCompleted()) {
      std::unique_lock<std::mutex> lock(comm_->mutex);
      TORCH_CHECK(comm_->failure.empty(), "communicator was aborted: ", comm_->failure);
      comm_->changed.wait_for(lock, std::chrono::microseconds(100));
    }
    work->wait();
  }

  // Connect at the first collective of a device: the host waits for all ranks, without a limit.
  void connect(c10::Device device) {
    std::lock_guard<std::mutex> turn(connecting_);
    if (connected_.count(device.index())) {
      return;
    }
    if (parent_ && connected_.empty()) {
      parent_->take_part_in_split();
    }
    const auto start = std::chrono::steady_clock::now();
    const auto least = std::chrono::milliseconds(habits().setup);
    const auto process = habits().physical ? std::string() : c10::str(" of process ", getpid());
    const auto here = c10::str(device, process);
    const auto all = comm_->meet(c10::str("setup/", connected_.size()), here, [] {});
    for (int i = 0; i < getSize(); ++i) {
      TORCH_CHECK(
          i == getRank() || all[i] != here,
          "vccl: Duplicate GPU detected : rank ", getRank(), " and rank ", i, " both on ", here);
    }
    while (std::chrono::steady_clock::now() < start + least) {
      std::unique_lock<std::mutex> lock(comm_->mutex);
      TORCH_CHECK(comm_->failure.empty(), "communicator was aborted: ", comm_->failure);
      comm_->changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    connected_.insert(device.index());
  }

  std::string describe(OpType kind, const std::string& how, const at::Tensor& tensor) const {
    auto text = c10::str(opTypeToString(kind), how, " of ", tensor.scalar_type());
    // The pieces of ranks may differ.
    return kind == OpType::ALLTOALL_BASE ? text : c10::str(text, " ", tensor.sizes());
  }

  WorkPtr launch(
      OpType kind, const std::string& how, const Tensors& written, const Tensors& read, Body body) {
    Tensors all(written);
    all.insert(all.end(), read.begin(), read.end());
    const auto device = checked_device(all);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::VirtualGuardImpl impl(kVirtual);
    connect(device);
    auto collective = std::make_shared<Collective>();
    collective->comm = comm_;
    collective->body = std::move(body);
    collective->description = describe(kind, how, written[0]);
    auto work = c10::make_intrusive<StreamWork>(getRank(), kind, written, device, collective);
    std::lock_guard<std::mutex> order(launching_);
    const c10::Stream stream = stream_of(device);
    c10::Event ready(kVirtual);
    ready.record(impl.getStream(device));
    ready.block(stream);
    for (const auto& each : all) {
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
      std::lock_guard<std::mutex> noting(habits().mutex);
      habits().launches.emplace_back(
          device.index(), comm_->name, collective->turn, collective->description);
    }
    Handle handle(new std::shared_ptr<Collective>(collective));
    try {
      c10::StreamGuard guard(stream);
      static const auto run = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("device_only::run", "")
                                  .typed<void(at::TensorList, at::TensorList, int64_t)>();
      run.call(written, read, reinterpret_cast<int64_t>(handle.get()));
      handle.release();
      collective->end.record(stream);
      work->mark_launched();
    } catch (const std::exception& error) {
      // It takes its turn, so that others go on.
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

  // Do what the queue of a device does by itself on hardware.
  void drive() {
    // No program has waited for what this thread waits for.
    c10::Dispatcher::singleton()
        .findSchemaOrThrow("dataparallel_virtual::act_as_hardware", "")
        .typed<void()>()
        .call();
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
      // An error of earlier work on the device is told here. It does not undo the collective.
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
      // Collectives under way do not complete, as with ncclCommAbort.
      abort();
    }
    const auto released = without_lock();
    driver_.join();
  }

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Communicator> comm_;
  c10::intrusive_ptr<DeviceOnly> parent_;
  std::mutex connecting_;
  // Devices that have a communicator.
  std::set<c10::DeviceIndex> connected_;
  std::mutex launching_;
  std::unordered_map<c10::DeviceIndex, c10::Stream> streams_;
  // These two under comm_->mutex.
  std::deque<std::shared_ptr<Collective>> queue_;
  bool stopping_ = false;
  std::thread driver_;
};

}  // namespace

TORCH_LIBRARY(device_only, library) {
  library.def("run(Tensor(a!)[] written, Tensor[] read, int address) -> ()");
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
           c10::intrusive_ptr<Store>,
           std::string,
           int,
           int,
           std::chrono::milliseconds,
           c10::intrusive_ptr<DeviceOnly>>())
      .def_property_readonly("options", &DeviceOnly::getBackendOptions)
      .def("_set_default_timeout", &DeviceOnly::setTimeout)
      .def(
          "perform_nocolor_split",
          [](DeviceOnly& self, const at::Device&) { self.take_part_in_split(); },
          py::call_guard<py::gil_scoped_release>());
  module.def("set_habits", [](int64_t setup, bool physical) {
    habits().setup = setup;
    habits().physical = physical;
  });
  module.def("take_records", [] {
    std::lock_guard<std::mutex> lock(habits().mutex);
    return std::make_pair(
        std::exchange(habits().kills, {}), std::exchange(habits().launches, {}));
  });
}

}  // namespace device_only
