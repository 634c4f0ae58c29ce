"""The check of the interpreter's lock: is it on, and what turned it on."""

from __future__ import annotations

from dataparallel.tools.doctor.check import Check, Probe

#: Modules with compiled parts that this package imports, or that torch and its users do.
_MODULES = (
    "torch", "triton", "numpy", "cupy", "pynvml", "psutil", "matplotlib", "sklearn", "safetensors",
    "dataparallel",
)  # fmt: skip


def interpreter_lock(probe: Probe) -> Check:
    """Tell if replicas wait for the interpreter's lock, and name what turned it on."""
    name = "GIL"
    if not probe.free_threaded:
        return Check("Basics", name, "ok", "on, as in any Python that is not free-threaded")
    for setting, value, remedy in (
        ("-X gil", probe.lock_option, "leave -X gil out"),
        ("PYTHON_GIL", probe.environment("PYTHON_GIL"), "unset PYTHON_GIL"),
    ):
        if value == "0":
            return Check("Basics", name, "ok", f"off, whatever is imported, by {setting}=0")
        if value:
            detail = f"on, by {setting}={value}, although this Python works without it"
            return Check("Basics", name, "problem", detail, remedy)
    guilty = probe.lock_takers(_MODULES)
    takers = ", ".join(f"{module} ({extension})" for module, extension in guilty.items())
    remedy = "keep it off at your own risk: PYTHON_GIL=0 python ..." if guilty else ""
    if not probe.lock():
        detail = f"off until one of these is imported: {takers}" if guilty else "off"
        return Check("Basics", name, "ok", detail, remedy)
    cause = takers or "a module that doctor does not know"
    remedy = remedy or "find it: python -W error::RuntimeWarning train.py"
    return Check("Basics", name, "problem", f"on, by the import of {cause}", remedy)
