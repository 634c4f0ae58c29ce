"""Every private name of torch that this package reads, calls or replaces.

A name that torch keeps to itself may go, or come to mean something else, with any release. So no
other file touches one, and each stands here with what it is and why it is needed. Unless an entry
says otherwise, torch 2.11 to 2.15 all have the name, with the same meaning. If a torch lacks it,
importing this file does not fail; using the name raises a RuntimeError that tells the versions.

Code that replaces something of torch's is a *patch*, and stands in the last section.

Names are bound when this file is imported, so a call costs no more than torch's own name. Functions
stand where torch changes what a name is bound to, and where torch would have to import something
that takes time. They also stand for attributes of modules, tensors and other objects. The parts of
torch's autograd engine that our C++ uses stand in ``distributed_autograd/csrc/torch_engine.h``.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import datetime
import functools
import importlib
import inspect
import logging
import operator
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
import torch.autograd.forward_ad
import torch.autograd.graph
import torch.backends.mha
import torch.distributed
import torch.library
import torch.nn.modules.batchnorm
import torch.nn.modules.instancenorm
import torch.nn.parallel.distributed
import torch.nn.utils.parametrize
import torch.overrides
import torch.random
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _Missing:
    """A stand-in for a name that this torch lacks."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"torch {torch.__version__} has no {self._path}, or another one than dataparallel "
            "needs; install one of torch 2.11 to 2.15, or a newer dataparallel"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self()


def _private(path: str) -> Any:
    """Return the object that torch has under a private name."""
    try:
        return operator.attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        return _Missing(path)


# --- autograd's engine -----------------------------------------------------------------------

#: The number of the backward that runs in this thread, -1 outside of any. Tells apart two backward
#: calls over one graph, and code that a checkpoint runs again from code that forward runs.
current_graph_task_id: Callable[[], int] = _private("torch._C._current_graph_task_id")

#: True if a node takes part in the backward that runs now. In ``autograd.grad`` torch raises for
#: the leaf whose gradient is captured, which callers take for yes.
will_execute: Callable[[Any], bool] = _private("torch._C._will_engine_execute_node")

#: True if the backward that runs now was called with ``retain_graph``: the graphs of replicas
#: behind it then are kept as well.
keeps_graph: Callable[[], bool] = _private("torch._C._autograd._get_current_graph_task_keep_graph")

#: With this a checkpoint ends a forward that it runs again, as soon as it has what it needs: no
#: failure of the forward.
StopRecomputation: Any = _private("torch.utils.checkpoint._StopRecomputationError")

#: The number of tensors and storage objects that refer to a storage, by its address. It tells if
#: anybody else has the memory of a gradient.
uses_of_storage: Callable[[int], int] = _private("torch._C._storage_Use_Count")
#: The address of a storage object's storage, which tells storages apart.
address_of_storage: Callable[[Any], int] = operator.attrgetter("_cdata")

#: The number of references of C++ to a tensor, such as those of graphs; 0 where torch has it not.
uses_of_tensor: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _: 0)

#: Call a function when the backward that runs now has ended; not called if it fails.
when_backward_ends: Any = _private("torch.autograd.Variable._execution_engine.queue_callback")

#: The hooks that run before a module's forward, by number.
forward_pre_hooks: Callable[[Any], dict[int, Any]] = operator.attrgetter("_forward_pre_hooks")

#: The tables of a module's hooks that its forward may add to. A clone has its own where they are
#: empty.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_hooks(module: Any) -> list[Any]:
    """Return the hooks of a module that run with its forward and its backward."""
    tables = map(vars(module).get, MODULE_HOOKS)
    return [hook for table in tables if table for hook in table.values()]


#: True if a tensor can take the memory of another one and stay the object that it is; ``module.to``
#: asks, too.
takes_memory_of: Callable[[torch.Tensor, torch.Tensor], bool] = _private(
    "torch._has_compatible_shallow_copy_type"
)

#: The hooks of a tensor by number, or None: those on its gradient, and those that run after its
#: gradient was accumulated. Read to let hooks of users run on reduced gradients, once.
backward_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
post_accumulate_grad_hooks: Any = operator.attrgetter("_post_accumulate_grad_hooks")

#: A context in which writing tensors leaves their version counters alone. A broadcast of buffers
#: between forward and backward must not look like a change of saved tensors.
keep_versions: Any = _private("torch.autograd._unsafe_preserve_version_counter")


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the call of a compiled module with its hooks; None before ``module.compile()``."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a module be called by something else; copies and pickles of it do not have that."""
    module._compiled_call_impl = call


def is_compiled(module: torch.nn.Module) -> bool:
    """True if calling a module runs compiled code, of itself or of the module in it."""
    return compiled_call(module) is not None or "_orig_mod" in module._modules


def forward_mode_level() -> int:
    """Return the level of forward-mode derivatives, -1 outside; torch has it in a variable."""
    return int(torch.autograd.forward_ad._current_level)


# --- thread-local context --------------------------------------------------------------------
#
# The settings that the thread of a replica takes over from its caller; Note [What is thread-local]
# in ``threads/context.py``.

#: For each setting its getter and its setter: gradients of forward mode, threads for a backward of
#: its own, replay of views, and ``__torch_function__`` off.
THREAD_SETTINGS = tuple(
    (_private(f"torch._C.{get}"), _private(f"torch._C.{put}"))
    for get, put in (
        ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
        ("_is_multithreading_enabled", "_set_multithreading_enabled"),
        ("_is_view_replay_enabled", "_set_view_replay_enabled"),
        ("_get_torch_function_state", "_set_torch_function_state"),
    )
)

#: The modes that see functions.
function_modes: Any = _private("torch.overrides._get_current_function_mode_stack")
push_function_mode: Callable[[Any], None] = _private("torch.overrides._push_mode")
pop_function_mode: Callable[[], Any] = _private("torch.overrides._pop_mode")
#: The kind of function mode that a default device is.
DeviceMode: Any = _private("torch.utils._device.DeviceContext")

#: The modes that see operators.
dispatch_modes: Callable[[], list[Any]] = _private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
#: Pushes and pops anything with a ``__torch_dispatch__``, without the ``__enter__`` of a mode, and
#: at a fraction of its cost. Each result of a collective is wrapped under one.
push_bare_mode: Callable[[Any], None] = _private("torch._C._push_on_torch_dispatch_stack")
pop_bare_mode: Callable[[Any], Any] = _private("torch._C._pop_torch_dispatch_stack")


@contextlib.contextmanager
def dispatch_mode(mode: Any) -> Iterator[None]:
    """Have a mode see operators within a ``with`` block, without its own ``__enter__``."""
    push_bare_mode(mode)
    try:
        yield
    finally:
        # One of torch's own, as that of fake tensors, stands under its key.
        pop_bare_mode(getattr(mode, "_mode_key", None))


#: The hooks on saved tensors that are innermost, and the message where such hooks are refused.
top_saved_tensors_hooks: Any = _private("torch._C._autograd._top_saved_tensors_default_hooks")
push_saved_tensors_hooks: Any = _private("torch._C._autograd._push_saved_tensors_default_hooks")
pop_saved_tensors_hooks: Any = _private("torch._C._autograd._pop_saved_tensors_default_hooks")
saved_tensors_hooks_refusal: Any = _private(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message"
)

#: Gives a thread of ours a name that ``top`` and the monitor show.
set_thread_name: Callable[[str], None] = _private("torch._C._set_thread_name")

#: A range for ``torch.profiler`` that is no operation, so dispatch modes do not see it.
record_range: Any = _private("torch._C._profiler._RecordFunctionFast")

#: The current stream of an accelerator by its index, as ``torch.accelerator.current_stream`` gives
#: it; ten times as quick, for looking up parameters.
accelerator_stream: Callable[[int], torch.Stream] = _private("torch._C._accelerator_getStream")

# --- transforms and traces -------------------------------------------------------------------

#: True if a transform of ``torch.func`` is active: tensors of one thread then cannot be moved to
#: others.
transforms_active: Any = _private("torch._C._are_functorch_transforms_active")
#: The innermost transform, or None.
innermost_transform: Callable[[], Any] = _private("torch._C._functorch.peek_interpreter_stack")
#: True if a tensor stands for another one within a transform, and so has no memory.
is_transformed: Any = _private("torch._C._functorch.is_functorch_wrapped_tensor")
#: True if a tensor stands for many: within a ``vmap``, and in ``is_grads_batched``.
is_batched_by_vmap: Any = _private("torch._C._functorch.is_batchedtensor")
is_batched_by_autograd: Any = _private("torch._C._functorch.is_legacy_batchedtensor")
#: The recording of ``torch.jit.trace``, or None.
tracing_state: Callable[[], Any] = _private("torch._C._get_tracing_state")

# --- the dispatcher --------------------------------------------------------------------------

#: The number of dispatch modes in this thread; cheaper than their list.
num_dispatch_modes: Callable[[], int] = _private("torch._C._len_torch_dispatch_stack")
#: One of torch's own modes, by its key, or None.
torchs_dispatch_mode: Callable[[Any], Any] = _private("torch._C._get_dispatch_mode")
TorchsModes: Any = _private("torch._C._TorchDispatchModeKey")
#: A context without dispatch modes, for operations that are no concern of the user's modes.
without_dispatch_modes: Any = _private("torch.utils._python_dispatch._disable_current_modes")

#: True if an operator, by its name, has a kernel for a dispatch key.
has_kernel: Callable[[str, str], bool] = _private("torch._C._dispatch_has_kernel_for_dispatch_key")
#: The state of a key in this thread, and its switch.
is_key_included: Callable[[Any], bool] = _private("torch._C._dispatch_tls_is_dispatch_key_included")
include_key: Any = _private("torch._C._dispatch_tls_set_dispatch_key_included")
#: The key that ``torch.export`` traces under.
PRE_DISPATCH: Any = _private("torch._C.DispatchKey.PreDispatch")
#: A context in which what is written counts as no change of a tensor. A view that is made there has
#: a version counter of its own, as ``.data`` has, in half of the time.
below_versions: Any = _private("torch._C._AutoDispatchBelowADInplaceOrView")
#: The names of all operators, ``"aten::add.Tensor"``.
all_operators: Callable[[], list[str]] = _private("torch._C._dispatch_get_all_op_names")
#: The schema of an operator, from its name and that of its overload.
schema_named: Callable[[str, str], Any] = _private("torch._C._get_schema")

#: The class of operators, with ``overloadpacket`` and ``decompose()``, and the schema of one.
OpOverload: Any = _private("torch._ops.OpOverload")
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
#: Views whose results are marked as to be conjugated or negated when they are read.
marking_views = (_private("torch.ops.aten._conj"), _private("torch.ops.aten._neg_view"))


# --- tensors and modules ---------------------------------------------------------------------

#: A tensor of a class, with the values of another and a history of its own; how torch makes a
#: ``Parameter`` of a subclass.
make_subclass: Callable[[Any, torch.Tensor, bool], Any] = _private("torch.Tensor._make_subclass")
#: One flat tensor with the elements of several, without an object of Python for each of them.
flatten_dense_tensors: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _private(
    "torch._C._nn.flatten_dense_tensors"
)
#: A tensor of a class without memory of its own, which handles all operators itself.
make_wrapper_subclass: Callable[..., Any] = _private("torch.Tensor._make_wrapper_subclass")
#: Have C++ that asks a tensor for its memory get an error instead of a null pointer.
refuse_memory: Any = _private("torch._C._set_throw_on_mutable_data_ptr")
#: The ``__torch_function__`` of a class that handles operators only.
no_torch_function: Any = _private("torch._C._disabled_torch_function_impl")
#: Makes the view of another base that a tensor is of its own: fake tensors are made by it.
replay_view: Callable[..., torch.Tensor] = _private("torch._C.TensorBase._view_func_unsafe")
#: The tensor of which another one is a view; None if it is none.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
#: Parts of a sparse tensor that need not be coalesced, which the public methods insist on.
sparse_indices: Callable[[torch.Tensor], torch.Tensor] = operator.methodcaller("_indices")
sparse_values: Callable[[torch.Tensor], torch.Tensor] = operator.methodcaller("_values")


def mark_as_parameters(tensors: Iterable[torch.Tensor]) -> None:
    """Have ``isinstance(tensor, nn.Parameter)`` say yes, also of tensors that are no leaves."""
    for tensor in tensors:
        tensor._is_param = True


#: Set by ``torch.nn.parallel.replicate`` on clones, which ``named_parameters()`` and others of
#: torch and of other packages look for.
REPLICA_MARK = "_is_replica"


def original_module(module: torch.nn.Module) -> Any:
    """Return the module inside one that ``torch.compile`` has made, or None."""
    return getattr(module, "_orig_mod", None)


def state_versions(state: Mapping[str, Any]) -> Any:
    """Return the versions of modules that ``state_dict()`` keeps beside their tensors, or None."""
    return getattr(state, "_metadata", None)


def set_state_versions(state: Any, versions: Any) -> None:
    """Give a state the versions that ``load_state_dict()`` looks for beside its tensors."""
    state._metadata = versions


def versions_being_loaded() -> Any:
    """Return the versions in the state that ``load_state_dict()`` loads now, or None.

    Torch hands a module its own version only, and looks up those of its children itself, under
    their paths. A wrapper has to let it find them if the state has other names. They are a local
    variable of the function that goes from module to module.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "load" and "metadata" in frame.f_locals:
            versions = frame.f_locals["metadata"]
            return versions if isinstance(versions, MutableMapping) else None
        frame = frame.f_back
    return None


#: The base class of all batch norms, the synchronized one of this package too.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
#: The base class of all instance norms.
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
#: True if a tensor consists of others that its ``__tensor_flatten__`` tells.
is_wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass


def check_input_of(layer: BatchNorm, tensor: torch.Tensor) -> None:
    """Raise what a batch norm raises for an input with a wrong number of dimensions."""
    layer._check_input_dim(tensor)  # type: ignore[no-untyped-call]


#: The attribute of a module in which torch leaves ignored names, and the function that sets it.
IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
ignore_names: Callable[[torch.nn.Module, Any], None] = _private(
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
)


#: The wrapper of torch whose forward runs, or None. It would undo what one inside of it reduces.
active_torch_wrapper: Callable[[], torch.nn.parallel.DistributedDataParallel | None] = _private(
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module"
)


# --- lists of tensors, containers ------------------------------------------------------------

#: One launch for many tensors. Torch's optimizers are made of them.
foreach_add: Any = _private("torch._foreach_add")
foreach_add_: Any = _private("torch._foreach_add_")
foreach_copy_: Any = _private("torch._foreach_copy_")
foreach_mul: Any = _private("torch._foreach_mul")
foreach_norm: Any = _private("torch._foreach_norm")

#: The openers of containers that were registered with ``torch.utils._pytree``, by their class.
registered_containers: dict[type, Any] = _private("torch.utils._pytree.SUPPORTED_NODES")
#: The leaves of containers as torch opens them.
tree_leaves: Callable[[Any], list[Any]] = _private("torch.utils._pytree.tree_leaves")

# --- optimizers ------------------------------------------------------------------------------


def take_optimizers_in_backward(parameter: torch.Tensor) -> Sequence[Any]:
    """Return the optimizers that torch's ``_apply_optimizer_in_backward`` left on a parameter.

    The hooks by which each would step by itself, before its gradient is reduced, are removed.
    """
    # A module that nobody has imported has registered no hook.
    module: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    for handle in getattr(module, "param_to_optim_hook_handle_map", {}).get(parameter, ()):
        handle.remove()
    found: Sequence[Any] = getattr(parameter, "_in_backward_optimizers", None) or ()
    return found


# --- process groups --------------------------------------------------------------------------


def world() -> Any:
    """Torch's registry of process groups: ``pg_map``, ``pg_names``, ``tags_to_pg``.

    Asked for each time: torch's tests put others in its place.
    """
    return torch.distributed.distributed_c10d._world


def is_registered(group: Any) -> bool:
    """True if torch made a process group, and nobody has destroyed it."""
    return group in world().pg_map


#: The process group of a name, as operators in compiled code find theirs; or a RuntimeError.
group_named: Callable[[str], Any] = _private(
    "torch.distributed.distributed_c10d._resolve_process_group"
)

# To what the default group is bound; in each thread that makes a group.
_bound_to: list[Any] = []
_unbinding = threading.Lock()


def new_process_group(parent: Any, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Return a group with a name of ours; ``new_group`` gives it one, and asks ranks outside of it.

    If the default group is bound to a device (``device_id=...``), torch splits communicators from
    it. To a split all its processes have to come, and only those of the parent do. So torch does
    not see that it is bound.
    """
    c10d: Any = torch.distributed.distributed_c10d
    default: Any = torch.distributed.group.WORLD
    with _unbinding:
        _bound_to.append(default.bound_device_id)
        default.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            parent.size(), parent.rank(), ranks, *args, **kwargs
        )
    finally:
        with _unbinding:
            # The first thread has found it; the others, None.
            first, _ = _bound_to[0], _bound_to.pop()
            default.bound_device_id = None if _bound_to else first
    # The rest of what `new_group` does; and nobody else finds it by its ranks.
    world().pg_group_ranks[group] = {number: i for i, number in enumerate(ranks)}
    world().tags_to_pg[""].remove(group)
    return group


#: The types of devices for which a process group has a backend.
group_devices: Callable[[Any], list[torch.device]] = operator.attrgetter("_device_types")


def group_backend(group: Any, device: torch.device) -> Any:
    """Return the backend of a process group for a device."""
    return group._get_backend(device)


def time_limits(group: Any) -> list[datetime.timedelta]:
    """Return the time limits of a group's backends; somebody else's backend may have none."""
    limits = []
    for device in group_devices(group):
        with contextlib.suppress(AttributeError, RuntimeError):
            limits.append(group_backend(group, device).options._timeout)
    return limits


def set_time_limit(group: Any, device: torch.device, limit: datetime.timedelta) -> None:
    """Set the time limit of the backend for a device, if it can be set."""
    with contextlib.suppress(AttributeError, RuntimeError):
        group_backend(group, device)._set_default_timeout(limit)


#: Collectives under the names that they had before, which old programs call.
all_gather_base: Any = _private("torch.distributed._all_gather_base")
reduce_scatter_base: Any = _private("torch.distributed._reduce_scatter_base")

# Custom builds may lack ``torch.distributed``.
if torch.distributed.is_available():
    # The stores in which processes meet: public, but torch does not export them for type checkers.
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore

    # Compiled code asks for this class before it waits for an argument; ours is derived from it.
    from torch.distributed._functional_collectives import (
        AsyncCollectiveTensor as AsyncCollectiveTensor,
    )

    functional_collectives = torch.distributed._functional_collectives
    #: Torch's operators for collectives, which compilers know; each is to be followed by one that
    #: waits.
    functional_operators: Any = _private("torch.ops._c10d_functional")

#: The settings of the ``Join`` in which a wrapper takes part; torch's base class sets them.
JOIN_CONFIG = "_join_config"
join_config: Callable[[Any], Any] = operator.attrgetter(JOIN_CONFIG)


def set_join(joinable: Any, *, enable: bool, throws: bool = False) -> None:
    """Say that a wrapper takes part in a ``Join``, or in none."""
    join: Any = importlib.import_module("torch.distributed.algorithms.join")
    setattr(joinable, JOIN_CONFIG, join._JoinConfig(enable, throws, enable))


# --- calls between processes, and futures ----------------------------------------------------

#: The class of futures; what ``Future.then`` returns is of it, and not of ``torch.futures.Future``.
Future: Any = _private("torch._C.Future")


def open_with(future: Any, function: Callable[[Any], object]) -> None:
    """Have a future give its value to a function, which may raise, before ``wait()`` returns it."""
    future._set_unwrap_func(function)


#: The mark that ``torch.distributed.rpc.functions.async_execution`` sets on a function.
ASYNC_MARK = "_wrapped_async_rpc_function"


def rpc_agent() -> Any:
    """Return the sender of calls of ``torch.distributed.rpc``; None before ``init_rpc``."""
    api: Any = importlib.import_module("torch.distributed.rpc.api")
    return api._get_current_rpc_agent() if api._is_current_rpc_agent_set() else None


def wrap_rpc(call: Any, start: Any, fetch: Any) -> None:
    """Put functions around what torch's own remote calls go through, which each gets first.

    ``call`` around that of ``rpc_sync``, ``rpc_async``, ``RRef.rpc_sync()`` and ``RemoteModule``,
    ``start`` around those of ``remote``, ``fetch`` around ``RRef.to_here``. Torch has no hooks
    there. A name that torch no longer has is left out, and its calls cut the graph in silence.
    """
    api: Any = importlib.import_module("torch.distributed.rpc.api")
    kinds = ("builtin", "python_udf", "torchscript")
    places = [(api, "_invoke_rpc", call), (api.PyRRef, "to_here", fetch)]
    for owner, name, around in [*places, *((api, f"_invoke_remote_{k}", start) for k in kinds)]:
        if hasattr(owner, name):
            setattr(owner, name, _around(getattr(owner, name), around))


def _around(original: Any, function: Any) -> Any:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return wrapped


def rpc_device_map(worker: int) -> Mapping[torch.device, torch.device]:
    """Return the devices whose tensors are sent to a worker as they are, and their targets."""
    agent = rpc_agent()
    found: Mapping[torch.device, torch.device] = agent._get_device_map(
        agent.get_worker_info(worker)
    )
    return found


def rpc_transport(name: str) -> dict[str, Any]:
    """Return the arguments of ``TensorPipeRpcBackendOptions`` that name the transports of calls."""
    return {"_transports": [name]}


# --- builds and backends ---------------------------------------------------------------------

#: The name of the backend that came from outside; ``"privateuseone"`` if there is none.
privateuse1_name: Callable[[], str] = _private("torch._C._get_privateuse1_backend_name")
#: Makes a module the one of a type of device: ``torch.virtual``.
register_device_module: Callable[[str, Any], None] = _private("torch._register_device_module")

# --- the compiler ----------------------------------------------------------------------------
#
# Importing it takes seconds, so nothing here does unless something is compiled anyway.


def untraced(function: FunctionT) -> FunctionT:
    """Keep the compiler out of a function and all that it calls, as ``torch.compiler.disable``.

    The latter imports the compiler, and costs at each call.
    """
    why = "replicas run in threads, which cannot be compiled"
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def mark_constant(function: FunctionT) -> FunctionT:
    """Have compiled code take over what a function returned, as ``assume_constant_result`` does."""
    vars(function).update(_dynamo_marked_constant=True)
    return function


def is_compilers(function: Any) -> bool:
    """True if this is a function of the compiler, which may bear another one's name and module."""
    names: Any = getattr(function, "__globals__", {})
    return str(names.get("__name__")).startswith("torch._dynamo.")


def is_anything_compiled() -> bool:
    """True if something was compiled in this process, or is to be, as far as is known."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and not isinstance(frames.compile_lock, type(threading.RLock())):
        # Ours is in its place; what was compiled may be forgotten.
        return True
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    # Torch keeps a list of the backends.
    backends: dict[int, Any] = getattr(compiler, "cached_backends", {})
    return any(map(callable, list(backends.values())))


@contextlib.contextmanager
def settings_of_compiler(room: int) -> Iterator[None]:
    """Compile backward together with forward, and keep ``room`` times the entries of the cache."""
    limits: Any = importlib.import_module("torch._dynamo.config")
    lowering: Any = importlib.import_module("torch._functorch.config")
    names = ("recompile_limit", "accumulated_recompile_limit")
    scaled = {name: getattr(limits, name) * room for name in names}
    with lowering.patch(force_non_lazy_backward_lowering=True), limits.patch(scaled):
        yield


def settings_of_calls_kept() -> AbstractContextManager[object]:
    """Around calls of compiled code that overlap, keep what ``dynamic=`` sets in each.

    Before 2.13 that belongs to the process, and each call restores what it found.
    """
    if torch.__version__ >= "2.13":
        return contextlib.nullcontext()
    config: Any = importlib.import_module("torch._dynamo.config")
    names = ("automatic_dynamic_shapes", "assume_static_by_default")
    kept: AbstractContextManager[object] = config.patch({n: getattr(config, n) for n in names})
    return kept


def graphs_of_compiler() -> dict[str, Any]:
    """Return the CUDA graphs that compiled code has recorded for this thread, and their locks.

    Empty if nothing can be recorded. Torch hands them on to the threads of its autograd engine
    alone, and compiled code fails in a thread that has none.
    """
    if "torch._inductor" not in sys.modules or not torch.cuda.is_available():
        return {}
    trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
    names = ("tree_manager_containers", "tree_manager_locks")
    kept = vars(trees.local)
    return {name: kept[name] for name in names if name in kept}


def use_graphs_of_compiler(graphs: dict[str, Any]) -> None:
    """Let compiled code in this thread use the CUDA graphs of another thread."""
    if graphs:
        trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
        vars(trees.local).update(graphs)


def keep_graphs_of_compiler() -> None:
    """Give this thread CUDA graphs of its own for compiled code, if it has none."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None and not hasattr(trees.local, "tree_manager_containers"):
        trees.local.tree_manager_containers = {}
        trees.local.tree_manager_locks = collections.defaultdict(threading.Lock)


# --- patches ---------------------------------------------------------------------------------


def replace_compile_lock(lock: Any) -> Any:
    """Have torch compile under another lock; returns its own.

    See Note [Compiling alone] in ``threads/compile.py``.
    """
    frames: Any = importlib.import_module("torch._dynamo.convert_frame")
    torchs, frames.compile_lock = frames.compile_lock, lock
    return torchs


#: Have torch leave what it compiled for a function in the order in which it was compiled. It moves
#: what fits to the front, and another thread that looks through the entries meanwhile may miss its
#: own.
move_entries_of_compiler: Any = _private("torch._C._dynamo.eval_frame._set_lru_cache")


@contextlib.contextmanager
def first_calls_without_search() -> Iterator[None]:
    """Within this, torch compiles what does not look for custom operations at its first call.

    The search is a dispatch mode, under which random operations do not see their replica.
    """
    wrappers: Any = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    first: Any = wrappers._FirstInvocationContext
    before, first.__init__ = first.__init__, lambda self: self.__dict__.update(_is_first=False)
    try:
        yield
    finally:
        first.__init__ = before


@contextlib.contextmanager
def kernels_beside_others() -> Iterator[None]:
    """Within this, torch compiles kernels for the CPU that leave the interpreter to other threads.

    Its own hold the interpreter's lock from begin to end, so those of replicas would run one after
    another. It stays so for the division of integers: one variable for all threads reports a
    divisor of zero. A torch that makes them in another way is left as it is.
    """
    codes: Any = importlib.import_module("torch._inductor.codecache")
    cache: Any = getattr(codes, "CppPythonBindingsCodeCache", None)
    if not {"call_entry_function", "load_pybinding_async"} <= vars(cache or object).keys():
        yield
        return
    held, load = cache.call_entry_function, vars(cache)["load_pybinding_async"]
    released = (
        "{{ std::tuple given{{{}}}; struct Others {{ PyThreadState* state = PyEval_SaveThread(); "
        "~Others() {{ PyEval_RestoreThread(state); }} }} others; std::apply(kernel, given); }} "
        "Py_RETURN_NONE;"
    )

    def load_pybinding_async(own: Any, types: Any, code: str, *args: Any, **kwargs: Any) -> Any:
        stays = own is not cache or re.search(r"\bmod\(|_integral\(", code)
        cache.call_entry_function = held if stays else released
        return load.__func__(own, types, code, *args, **kwargs)

    cache.load_pybinding_async = classmethod(load_pybinding_async)
    try:
        yield
    finally:
        cache.call_entry_function, cache.load_pybinding_async = held, load


class _Context:
    """A context that several threads may run something in at the same time, each in a copy."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()

    def run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self._context.copy().run(call, *args, **kwargs)

    def copy(self) -> _Context:
        """Itself, which each call copies."""
        return self


def hand_on_contexts_for_any_thread() -> None:
    """Let what is compiled run its backward on several devices at the same time.

    In 2.13, a backward hands the threads of all devices one ``contextvars.Context``. That runs in
    one thread at a time: the second raised "cannot enter context". The function that is handed on
    here runs each in a copy, as torch does from 2.15 on; 2.11 hands nothing on.
    """
    module: Any = torch.autograd.graph
    if torch.__version__ < "2.15" and getattr(module, "contextvars", None) is contextvars:
        module.contextvars = types.SimpleNamespace(
            **{**vars(contextvars), "copy_context": _Context}
        )


def keep_guard_of_compiler() -> None:
    """Have an object of torch's outlive the thread that happens to make it.

    A torch 2.11 that was built for CUDA, on a machine without it, uses a substitute for the guard
    of CUDA devices. It puts that in place when it first compiles. It is gone when the thread ends,
    while all others still use it, and crash. So a thread that never ends makes it first.
    """
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if make is None or torch.version.cuda is None or torch.cuda.device_count():
        return
    made = threading.Event()

    def hold() -> None:
        make()
        made.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="dataparallel-guard", daemon=True).start()
    made.wait(60)


def _stand_in(*args: Any, _call: Callable[..., Any], **kwargs: Any) -> Any:
    return _call(*args, **kwargs)


def _replace(path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have a function do what ``make`` makes of it; nothing if torch lacks it.

    Others may have imported one of Python's by name: it stays the object that it is, and gets other
    code. One of C's, or with a closure, is looked up each time.
    """
    parent, _, name = path.rpartition(".")
    owner = torch if parent == "torch" else _private(parent)
    function = None if isinstance(owner, _Missing) else getattr(owner, name, None)
    if isinstance(function, types.FunctionType) and function.__closure__ is None:
        original = types.FunctionType(
            function.__code__, function.__globals__, name, function.__defaults__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        function.__kwdefaults__ = {"_call": make(original)}
        function.__defaults__, function.__code__ = None, _stand_in.__code__
    elif function is not None:
        setattr(owner, name, make(function))


class _State(NamedTuple):
    """State of the process."""

    name: str
    #: Reads it, given the first arguments of its setters, of which there are ``num_keys``; the
    #: other arguments are what is set.
    read: Callable[..., tuple[Any, ...]]
    setters: tuple[str, ...]
    num_keys: int = 0
    #: True if it is entered and left, and nobody reads it.
    is_level: bool = False


def _state(name: str, setters: str, *getters: str) -> _State:
    """State that functions of ``torch._C`` set and get."""
    return _State(name, _of(*getters), tuple(f"torch._C.{each}" for each in setters.split()))


def _of(*getters: str) -> Callable[[], tuple[Any, ...]]:
    """Return a function that reads state by those functions of ``torch._C`` that exist."""
    names = [getter for getter in getters if hasattr(torch._C, getter)]
    found = [_private(f"torch._C.{name}") for name in names]
    return lambda: tuple(get() for get in found)


_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
_FLAGS = {
    "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32", "depthwise_kernel"),
    "mkldnn": ("enabled", "deterministic"),
    "nnpack": ("enabled",),
    "miopen": ("immediate",),
}


#: The state that torch keeps once for the whole process, and a forward may set and set back. A
#: replica does so alone, see Note [State of the process] in ``threads/exclusive.py``. State is left
#: out if it changes no results, as warnings, or if nobody sets it back, as the number of threads.
_OF_PROCESS = (
    # A thread that leaves the level deletes the tangents of all threads.
    _State(
        "the level of forward-mode derivatives",
        lambda: (forward_mode_level(),),
        ("torch.autograd.forward_ad.enter_dual_level", "torch.autograd.forward_ad.exit_dual_level"),
        is_level=True,
    ),
    # By this ``torch.func.jvp`` knows whether it has to enter that level.
    _State(
        "the nesting of torch.func.jvp",
        lambda: (_private("torch._functorch.eager_transforms.JVP_NESTING"),),
        (
            "torch._functorch.eager_transforms.enter_jvp_nesting",
            "torch._functorch.eager_transforms.exit_jvp_nesting",
        ),
        is_level=True,
    ),
    _State(
        "the default dtype",
        lambda: (torch.get_default_dtype(),),
        ("torch._C._set_default_dtype", "torch._C._set_default_tensor_type"),
    ),
    _state(
        "torch.use_deterministic_algorithms",
        "_set_deterministic_algorithms",
        "_get_deterministic_algorithms",
        "_get_deterministic_algorithms_warn_only",
    ),
    _State(
        "torch.autograd.detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        ("torch.set_anomaly_enabled",),
    ),
    # ``torch.nn.attention.sdpa_kernel``, and ``flags()`` of modules of ``torch.backends``.
    _State(
        "the switches of sdpa_kernel",
        _of(*(f"_get_{name}_sdp_enabled" for name in _ATTENTIONS), "_get_sdp_priority_order"),
        ("torch.nn.attention._sdpa_kernel",),
        is_level=True,
    ),
    *(
        _State(
            f"torch.backends.{name}.flags",
            _of(*(f"_get_{name}_{flag}" for flag in flags)),
            (f"torch.backends.{name}.set_flags",),
            is_level=True,
        )
        for name, flags in _FLAGS.items()
    ),
    # Each for itself, too.
    *(
        _state("a switch of attention", f"_set_sdp_use_{name}", f"_get_{name}_sdp_enabled")
        for name in _ATTENTIONS
    ),
    *(
        _state(f"the flag {name}", f"_set_{name}", f"_get_{name}")
        for name in (
            "sdp_priority_order",
            "math_sdp_allow_fp16_bf16_reduction",
            "cudnn_enabled",
            "cudnn_benchmark",
            "cudnn_deterministic",
            "cudnn_allow_tf32",
            "cudnn_depthwise_kernel",
            "mkldnn_enabled",
            "mkldnn_deterministic",
            "onednn_allow_tf32",
            "nnpack_enabled",
            "miopen_immediate",
            "cublas_allow_tf32",
            "cublas_allow_fp16_accumulation",
            "cublas_allow_fp16_reduced_precision_reduction",
            "cublas_allow_bf16_reduced_precision_reduction",
            "float32_matmul_precision",
            "linalg_preferred_backend",
            "blas_preferred_backend",
            "deterministic_fill_uninitialized_memory",
        )
    ),
    _State(
        "the precision of float32 operations",
        lambda *of: (_private("torch._C._get_fp32_precision_getter")(*of),),
        ("torch._C._set_fp32_precision_setter",),
        num_keys=2,
    ),
    # ``torch.backends.cudnn.enabled = False`` and others, which keep their setters.
    _State(
        "a flag of torch.backends",
        lambda flag, _: (flag.getter(),),
        ("torch.backends.ContextProp.__set__",),
        num_keys=2,
    ),
    _State(
        "the fast path of nn.TransformerEncoder",
        lambda: (torch.backends.mha.get_fastpath_enabled(),),
        ("torch.backends.mha.set_fastpath_enabled",),
    ),
)


def watch_process_state(
    change: Callable[..., Any], changing: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Have state of the process changed by ``change(name, key, read, wanted, put)``.

    ``read()`` gives a tuple, which equals ``wanted`` if ``put()`` will change nothing.
    ``sdpa_kernel`` reads the values to set back within ``changing(name)``.
    """
    for state in _OF_PROCESS:
        for setter in state.setters:
            _replace(setter, functools.partial(_changed_by, change, state))
    _replace("torch.nn.attention._cur_sdpa_kernel_backends", functools.partial(_within, changing))


def _within(
    changing: Callable[[str], AbstractContextManager[None]], read: Callable[..., T]
) -> Callable[..., T]:
    def seen(*args: Any, **kwargs: Any) -> T:
        with changing("sdpa_kernel"):
            return read(*args, **kwargs)

    return seen


def _changed_by(
    change: Callable[..., Any], state: _State, put: Callable[..., Any]
) -> Callable[..., Any]:
    def set_state(*args: Any, **kwargs: Any) -> Any:
        keys, wanted = args[: state.num_keys], (*args[state.num_keys :], *kwargs.values())
        read = functools.partial(state.read, *keys)
        key = (state.read, *map(id, keys))
        call = functools.partial(put, *args, **kwargs)
        return change(state.name, key, read, wanted, call, in_backward=state.is_level)

    return set_state


class _Parametrized(threading.local):
    """The cache of ``parametrize.cached()`` in replicas, one for each.

    It stands in the place of torch's dict while a replica is within such a block. The keys in that
    are those of the wrapped module, also for its replicas on other devices. Outside of replicas all
    is as torch has it, where compiled code can follow.
    """

    #: The cache of others, and the number of blocks that replicas are within.
    _others: ClassVar[dict[Any, Any]] = {}
    _num_blocks: ClassVar[int] = 0

    def __init__(self) -> None:
        # The number of blocks that this replica is within, and its values; None if it is in none.
        self._depth = 0
        self._values: dict[Any, Any] | None = None

    @untraced
    def get(self, key: Any) -> Any:
        if self._values is None:
            return self._others.get(key)
        return self._values.get(key) if self._depth else None

    @untraced
    def __setitem__(self, key: Any, value: Any) -> None:
        if self._values is None:
            self._others[key] = value
        elif self._depth:
            self._values[key] = value

    @contextlib.contextmanager
    def of_replica(self, within: bool) -> Iterator[None]:
        """Within this, a replica runs in this thread; ``within`` a block of its caller or not."""
        before = self._values, self._depth
        self._values, self._depth = {}, 0
        try:
            with torch.nn.utils.parametrize.cached() if within else contextlib.nullcontext():
                yield
        finally:
            self._values, self._depth = before

    def cached(self, original: Callable[[], Iterator[None]]) -> Iterator[None]:
        """Cache as ``parametrize.cached()`` does."""
        if torch.compiler.is_compiling() or self._values is None:
            yield from original()
            return
        module: Any = torch.nn.utils.parametrize
        with _counting:
            if module._cache is not self:
                _Parametrized._others = module._cache
            module._cache, module._cache_enabled = self, module._cache_enabled + 1
            _Parametrized._num_blocks += 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._values = {}
            with _counting:
                module._cache_enabled -= 1
                _Parametrized._num_blocks -= 1
                if not _Parametrized._num_blocks:
                    module._cache = self._others if module._cache_enabled else {}


parametrized = _Parametrized()
_counting = threading.Lock()


def is_caching_parametrizations() -> bool:
    """True if this thread, or another one, is within ``parametrize.cached()``."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


def cache_parametrizations_by_replica() -> None:
    """Have ``parametrize.cached()`` keep what it keeps for one replica."""

    def replacing(original: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        def cached() -> Iterator[None]:
            yield from parametrized.cached(original)

        return cached

    (cell,) = torch.nn.utils.parametrize.cached.__closure__ or ()
    cell.cell_contents = replacing(cell.cell_contents)


@contextlib.contextmanager
def parameters_kept(kept: bool) -> Iterator[None]:
    """Within this, ``module.to`` keeps parameters where it would make new ones.

    It does so between types of devices that are strange to each other, unless it is told to swap
    what is in them.
    """
    if not kept:
        yield
        return
    # One thread at a time, since the setting is for the whole process.
    with _keeping:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


_keeping = threading.RLock()


def keep_parameters_between(kind: str, other: str = "cpu") -> None:
    """Have the methods of modules that move them between two types of devices keep parameters."""
    pair = {kind, other}

    def keeping(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            target = name
            if name == "to":
                device = _private("torch._C._nn._parse_to")(*args, **kwargs)[0]
                target = "" if device is None else device.type
            tensors = (*module.parameters(), *module.buffers())
            kept = {target, *(each.device.type for each in tensors)} == pair
            try:
                with parameters_kept(kept):
                    return move(module, *args, **kwargs)
            except RuntimeError as error:
                if not kept or "Couldn't swap" not in str(error):
                    raise
            # Torch swaps no parameter of which a graph knows, as with weight norm by hooks.
            logging.getLogger("dataparallel").warning(
                "parameters of %s belong to a graph, so torch makes new ones on the other device: "
                "make optimizers, and tie parameters, after the move",
                type(module).__name__,
            )
            return move(module, *args, **kwargs)

        return moved

    for name in ("to", kind, other):
        _replace(f"torch.nn.Module.{name}", functools.partial(keeping, name))


def replace_default_generator(stand_in: Any) -> None:
    """Put a stand-in for the CPU's generator where the functions of ``torch.random`` find it.

    See Note [Checkpointing in replicas] in ``threads/random.py``.
    """
    module: Any = torch.random
    module.default_generator = stand_in


def replace_checkpoint_states(own_generator: Callable[[torch.device], Any]) -> None:
    """Have checkpoints remember the states that replicas of one accelerator draw from.

    The function that checkpoints ask knows the default generators of the devices.
    """
    module: Any = torch.utils.checkpoint
    original = module.get_device_states

    def get_device_states(*args: Any) -> tuple[Sequence[int], Sequence[Any]]:
        indices, states = original(*args)
        kind = module._infer_device_type(*args)
        found = [own_generator(torch.device(kind, index)) for index in indices]
        return indices, [
            own.get_state() if own else s for own, s in zip(found, states, strict=True)
        ]

    module.get_device_states = get_device_states


def replace_seeding(kind: str, own_generator: Callable[[torch.device], Any]) -> None:
    """Have a device module's functions on seeds and states mean the generators of replicas.

    Where a thread has none of its own for a device, they mean the default ones.
    """
    module: Any = torch.get_device_module(kind)

    def own(device: Any) -> Any:
        index = device if isinstance(device, int) else torch.device(device).index
        return own_generator(
            torch.device(kind, module.current_device() if index is None else index)
        )

    def replace(name: str, act: Callable[..., Any], found_for: Callable[..., Any]) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            found = found_for(*args, **kwargs)
            return original(*args, **kwargs) if found is None else act(found, *args)

        setattr(module, name, function)

    def seed_all(_: Any, seed: int) -> None:
        for index in range(module.device_count()):
            generator = own(index)
            if generator is not None:
                generator.manual_seed(int(seed))

    replace("manual_seed", lambda g, seed: g.manual_seed(int(seed)), lambda seed: own(kind))
    replace("manual_seed_all", seed_all, lambda seed: own(kind))
    replace("get_rng_state", lambda g, *_: g.get_state(), lambda device=kind: own(device))
    replace("set_rng_state", lambda g, s, *_: g.set_state(s), lambda s, device=kind: own(device))


class Kernels:
    """Kernels of ours for operators of torch, at a dispatch key; in force while this object lives.

    See Note [A dispatch key for random operations] in ``threads/random.py``.
    """

    def __init__(self, name: str) -> None:
        self.key: Any = torch._C._parse_dispatch_key(name) or _Missing(f"key {name}")()
        #: The set of all keys that come after it.
        self.below: Any = torch._C._dispatch_keyset_full_after(self.key)
        self._name = name
        # Through Any, since torch.library has no types.
        library: Any = torch.library
        self._aten, self._all = library.Library("aten", "IMPL"), library.Library("_", "IMPL")
        self._all.fallback(library.fallthrough_kernel, name)

    def register(self, operation: str, kernel: Callable[..., Any]) -> None:
        """Register a function that takes the dispatch keys first, by the name of an operator."""
        self._aten.impl(operation.removeprefix("aten::"), kernel, self._name, with_keyset=True)
