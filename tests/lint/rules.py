"""What may run code that comes from data: the names, and what to use instead."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Predicate = Callable[[ast.Call], bool]


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _loads_weights_only(call: ast.Call) -> bool:
    return _is(_keyword(call, "weights_only"), True) and _keyword(call, "pickle_module") is None


def _unpacks_data(call: ast.Call) -> bool:
    kind = _keyword(call, "filter")
    return isinstance(kind, ast.Constant) and kind.value == "data"


def _has_literal(call: ast.Call) -> bool:
    """The first argument stands in the source, so no data decides what is loaded."""
    return bool(call.args) and isinstance(call.args[0], ast.Constant)


def _has_arguments(call: ast.Call) -> bool:
    return bool(call.args or call.keywords)


def _loads_no_pickle(call: ast.Call) -> bool:
    """The third argument of numpy.load is allow_pickle; as a keyword it has a rule of its own."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return False
    return len(call.args) < 3 or _is(call.args[2], False)


def _never(call: ast.Call) -> bool:
    return False


@dataclass(frozen=True)
class Rule:
    """Why something is forbidden, and which calls of it are not.

    Attributes:
        reason: What it does, and what to use instead.
        allows: Whether a call is harmless. Default: none is.
    """

    reason: str
    allows: Predicate = field(default=_never)


_UNPICKLES = "unpickles, which runs what the data says; use JSON or safetensors"
_CODE = "runs code that is made at run time; look the name up in a table"
_SHELL = "a shell reads the text as a program; use subprocess.run with a list of arguments"
_ARCHIVE = "an archive may name files outside of the folder; say filter='data'"
_ARTIFACTS = "loads machine code and pickles; only from a place that nobody else can write"
_NATIVE = "loads machine code from a file; only from a place that nobody else can write"

#: Modules of which only some names may be used, since the rest loads what it should not.
MODULES: Mapping[str, tuple[frozenset[str], Rule]] = {
    **dict.fromkeys(
        ("pickle", "_pickle", "cPickle", "dill", "cloudpickle"),
        (
            frozenset(
                [
                    "dump",
                    "dumps",
                    "Pickler",
                    "HIGHEST_PROTOCOL",
                    "DEFAULT_PROTOCOL",
                    "PickleBuffer",
                    "PickleError",
                    "PicklingError",
                    "UnpicklingError",
                ]
            ),
            Rule(_UNPICKLES),
        ),
    ),
    "marshal": (frozenset({"dump", "dumps"}), Rule("marshal trusts its data; use JSON")),
    "shelve": (frozenset(), Rule(_UNPICKLES)),
    "jsonpickle": (frozenset({"encode"}), Rule(_UNPICKLES)),
    "joblib": (frozenset({"dump", "Parallel", "delayed", "cpu_count"}), Rule(_UNPICKLES)),
    "yaml": (
        frozenset(
            [
                "safe_load",
                "safe_load_all",
                "SafeLoader",
                "CSafeLoader",
                "dump",
                "safe_dump",
                "YAMLError",
            ]
        ),
        Rule("other loaders of YAML make any object; use yaml.safe_load"),
    ),
    "runpy": (frozenset(), Rule(_CODE)),
    "code": (frozenset(), Rule(_CODE)),
    "codeop": (frozenset(), Rule(_CODE)),
    "xmlrpc": (frozenset(), Rule("takes orders from peers that nobody has authenticated")),
    "multiprocessing.managers": (frozenset(), Rule("a manager unpickles what its peers send")),
    "multiprocessing.connection": (
        frozenset({"Connection", "wait"}),
        Rule("a connection unpickles what its peer sends; use a socket and JSON"),
    ),
    "torch.hub": (frozenset({"get_dir", "set_dir"}), Rule("runs code from the network")),
    "torch.package": (frozenset(), Rule("a package holds code, which is run")),
    "torch.distributed.checkpoint": (
        frozenset({"state_dict"}),
        Rule("torch's distributed checkpoints unpickle their metadata; use dp.checkpoint"),
    ),
    "torch.distributed.rpc": (
        frozenset(
            [
                "RRef",
                "PyRRef",
                "WorkerInfo",
                "TensorPipeRpcBackendOptions",
                "api",
                "constants",
                "functions",
                "is_available",
                "shutdown",
            ]
        ),
        Rule("torch's RPC unpickles and runs what its peers send; in a trusted network only"),
    ),
    "torch.utils.cpp_extension": (
        frozenset({"include_paths", "library_paths", "CUDA_HOME"}),
        Rule("compiles and loads from a folder in /tmp; use dataparallel.kernels.native"),
    ),
}

#: torch's collectives of Python objects.
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)

#: Functions and classes by their full names.
NAMES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("torch.load", "torch.serialization.load"),
        Rule("unpickles unless weights_only=True stands in the call", _loads_weights_only),
    ),
    **dict.fromkeys(
        ("torch.hub.load_state_dict_from_url", "torch.utils.model_zoo.load_url"),
        Rule("unpickles unless weights_only=True stands in the call", _loads_weights_only),
    ),
    **dict.fromkeys(
        ("torch.jit.load", "torch.export.load", "torch.storage._load_from_bytes"),
        Rule("the file holds code or pickles; load weights from safetensors"),
    ),
    **dict.fromkeys(
        ("multiprocessing.reduction.ForkingPickler", "pandas.read_pickle"),
        Rule(_UNPICKLES),
    ),
    **dict.fromkeys(("eval", "exec", "compile"), Rule(_CODE)),
    **dict.fromkeys(("builtins.eval", "builtins.exec", "builtins.compile"), Rule(_CODE)),
    **dict.fromkeys(
        ("__import__", "builtins.__import__", "importlib.import_module", "importlib.__import__"),
        Rule("imports what data names; write the name of the module", _has_literal),
    ),
    **dict.fromkeys(
        (
            "importlib.util.spec_from_file_location",
            "importlib.machinery.ExtensionFileLoader",
            "importlib.machinery.SourceFileLoader",
            "importlib.machinery.SourcelessFileLoader",
            "torch.ops.load_library",
            "torch.classes.load_library",
        ),
        Rule(_NATIVE),
    ),
    **dict.fromkeys(
        ("ctypes.CDLL", "ctypes.PyDLL", "ctypes.cdll.LoadLibrary"), Rule(_NATIVE, _has_literal)
    ),
    **dict.fromkeys(
        (
            "os.system",
            "os.popen",
            "subprocess.getoutput",
            "subprocess.getstatusoutput",
            "asyncio.create_subprocess_shell",
        ),
        Rule(_SHELL),
    ),
    **dict.fromkeys(
        (
            "torch.compiler.load_cache_artifacts",
            "torch.compiler.load_compiled_function",
            "torch._inductor.aoti_load_package",
            "torch._inductor.package.load_package",
        ),
        Rule(_ARTIFACTS),
    ),
    **dict.fromkeys(("numpy.load", "numpy.lib.npyio.load"), Rule(_UNPICKLES, _loads_no_pickle)),
    "shutil.unpack_archive": Rule(_ARCHIVE, _unpacks_data),
    "logging.config.listen": Rule(_CODE),
    "tempfile.mktemp": Rule("anybody may make the file first; use tempfile.mkstemp"),
}

#: Methods by their names alone, since nothing tells of which class an object is.
METHODS: Mapping[str, Rule] = {
    **dict.fromkeys(OBJECT_COLLECTIVES, Rule("unpickles what a peer sends; send JSON")),
    **dict.fromkeys(("read_pickle", "read_array"), Rule(_UNPICKLES)),
    "RawModule": Rule(_NATIVE),
    "extractall": Rule(_ARCHIVE, _unpacks_data),
    "subprocess_shell": Rule(_SHELL),
    # That of a socket has the number of bytes.
    "recv": Rule("a connection's recv() unpickles; use recv_bytes() and JSON", _has_arguments),
}

#: The value that an argument must have, wherever it is given.
KEYWORDS: Mapping[str, tuple[object, Rule]] = {
    "allow_pickle": (False, Rule(_UNPICKLES)),
    "weights_only": (True, Rule("weights_only=True must stand in the call")),
    "trust_remote_code": (False, Rule("runs code from the network")),
    "shell": (False, Rule(_SHELL)),
}
