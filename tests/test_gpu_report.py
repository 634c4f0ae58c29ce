"""``make gpu``: it goes on after failures, ends in time, and its page says what happened."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from benchmarks.kernel_cases import KernelCase
from benchmarks.kernels import Turn, judge, summarize
from dataparallel.kernels.backend import registered
from dataparallel.tools.bench.harness import Spread
from tests.gpu.kernel_cases import CASES
from tests.gpu.report import findings, host_waits, outcomes, programs
from tests.gpu.report.__main__ import Report, main
from tests.gpu.report.machine import PACKAGES, Machine
from tests.gpu.report.parts import NAMES, Part, device_sets, plan
from tests.gpu.report.running import ROOT, Ended, lay_out, run
from tests.kernels.host_backend import HostBackend

EVERYTHING = Machine(
    packages=dict.fromkeys(PACKAGES, "1.0"),
    programs={"nvidia-smi": "/bin/nvidia-smi", "compute-sanitizer": "/bin/compute-sanitizer"},
    gpus=["a GPU"],
)


def part(code: str, title: str = "a part", limit: float = 30.0, missing: str = "") -> Part:
    """A part that runs some Python."""
    command = (sys.executable, "-c", code)
    return Part("build", title, command, limit, findings.build, missing=missing)


def report(folder: pathlib.Path, seconds: float = 100.0) -> Report:
    """A run that has just begun; its page is page.md."""
    begin = time.monotonic()
    return Report(["virtual:0"], Machine(), begin, seconds, folder / "page.md", folder)


def page(folder: pathlib.Path) -> str:
    return (folder / "page.md").read_text()


def program(path: pathlib.Path, text: str) -> str:
    """A program that stands in for one of NVIDIA's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


# --- a run -----------------------------------------------------------------------------------


def test_a_run_goes_on_after_what_fails_hangs_and_is_missing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
    parts = [
        part("raise SystemExit('what was wrong')", "one that fails"),
        part(hangs, "one that hangs", limit=2),
        part("", "one that cannot run", missing="needs what is not here"),
        part("import os; os.abort()", "one that dies"),
        part("print('all is well')", "one that works"),
    ]
    begin = time.monotonic()
    assert report(tmp_path).run(parts) == 1
    assert time.monotonic() - begin < 60
    text = page(tmp_path)
    assert "| one that fails | failed |" in text and "    what was wrong\n" in text
    assert "| one that hangs | failed | 2 | ended at its limit of 2 s |" in text
    assert "| one that cannot run | not run |  | needs what is not here |" in text
    assert "| one that dies | failed |" in text and "ended by signal 6" in text
    assert "| one that works | passed |" in text and "all is well" in text
    assert "## Parts: 1 passed, 3 failed, 1 not run\n" in text
    child = text.split("child ")[1].split()[0]
    status = pathlib.Path(f"/proc/{child}/stat")
    # Where nobody waits for it, it may remain as a zombie.
    assert not status.exists() or status.read_text().split(") ")[1][0] in "ZX"
    assert "[5/5] one that works" in capsys.readouterr().out


def test_a_run_has_only_so_much_time(tmp_path: pathlib.Path) -> None:
    assert report(tmp_path).run([part("print(1)"), part("", missing="needs a GPU")]) == 0
    assert report(tmp_path, seconds=1.0).run([part("print(1)")]) == 0
    assert "| not run |  | the 1 s of the whole run were over |" in page(tmp_path)
    hangs = part("import time; time.sleep(600)", limit=500)
    assert report(tmp_path, seconds=6.0).run([hangs]) == 1
    assert "ended at its limit of 6 s" in page(tmp_path)


def test_ctrl_c_leaves_what_was_found(tmp_path: pathlib.Path) -> None:
    def stopped(ended: Ended) -> findings.Findings:
        raise KeyboardInterrupt

    parts = [part("print('found')", "first"), replace(part("", "second"), read=stopped)]
    assert report(tmp_path).run(parts) == 130
    assert "found" in page(tmp_path)
    assert "| second | not run |  | stopped with Ctrl-C |" in page(tmp_path)


def test_signs_of_life(tmp_path: pathlib.Path) -> None:
    told: list[str] = []
    code = "import time; print('one'); print('two', flush=True); time.sleep(1)"
    ended = run(
        [sys.executable, "-c", code],
        folder=tmp_path,
        environment=os.environ,
        limit=30,
        tell=lambda seconds, line: told.append(line),
        tick=0.2,
    )
    assert ended.status == 0 and ended.output == "one\ntwo\n"
    assert told[-1] == "two"


def test_a_run_on_virtual_devices_leaves_the_page_of_gpus_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin" / "nvidia-smi", "print('A made-up GPU, 1.2.3')")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    chosen = ["--devices", "virtual:0,virtual:1", "--only", "readings", "--only", "sanitizer"]
    assert main([*chosen, "--output", str(tmp_path / "page.md")]) == 0
    text = page(tmp_path)
    assert "| nvidia-smi | A made-up GPU, 1.2.3 |" in text
    assert text.count("needs an NVIDIA GPU that torch can use") == 5


def test_usage(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "page.md"
    assert main(["--devices", "cuda:0,cuda:99", "--output", str(output)]) == 2
    assert not output.exists()
    assert "make gpu DEVICES=virtual:0,virtual:1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "docs/measurements/gpu.md, and without GPUs out/gpu.md" in told
    assert "make gpu DEVICES=virtual:0,virtual:1" in told
    with pytest.raises(SystemExit, match="2"):
        main(["--devices", "gpu"])
    assert "'gpu' is none of cuda:0, virtual:0 and cpu" in capsys.readouterr().err


# --- the parts -------------------------------------------------------------------------------


def test_what_is_trained_on() -> None:
    assert device_sets(["cuda:0"]) == [("cuda:0",), ("cuda:0", "cuda:0"), ("cuda:0", "cpu")]
    assert device_sets(["cuda:0", "cuda:1"])[-1] == ("cuda:0", "cuda:1")
    assert device_sets(["cpu"]) == [("cpu",), ("cpu", "cpu")]


def test_with_everything_all_parts_run_on_a_gpu(tmp_path: pathlib.Path) -> None:
    parts = plan(["cuda:0"], EVERYTHING, tmp_path)
    assert not [each.title for each in parts if each.missing]
    assert {each.name for each in parts} == set(NAMES)
    (tests,) = [each for each in parts if each.name == "tests"]
    assert {"gpu or multi_gpu", "tests/gpu", "tests/test_generators.py"} <= set(tests.command)
    # Two of NCCL's processes cannot be on one device; and one of them needs a GPU.
    peers = [
        each.command[each.command.index("--peers") + 1] for each in parts if each.name == "train"
    ]
    assert peers == ["bare,ddp", "bare", "bare"]


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("pytest", {"tests"}),
        ("rich", {"train", "kernels"}),
        ("psutil", {"train"}),
        ("cupy", {"sanitizer"}),
        ("pynvml", {"readings"}),
        ("compute-sanitizer", {"sanitizer"}),
        ("nvidia-smi", {"readings"}),
    ],
)
def test_what_is_absent_stops_only_what_needs_it(
    absent: str, names: set[str], tmp_path: pathlib.Path
) -> None:
    packages = {name: version for name, version in EVERYTHING.packages.items() if name != absent}
    programs = {name: path for name, path in EVERYTHING.programs.items() if name != absent}
    machine = replace(EVERYTHING, packages=packages, programs=programs)
    missing = {each.name: each.missing for each in plan(["cuda:0"], machine, tmp_path)}
    assert {name for name, why in missing.items() if why} == names
    assert all(PACKAGES.get(absent, absent) in missing[name] for name in names)
    parts = plan(["virtual:0"], Machine(trouble="ImportError: no torch"), tmp_path)
    assert all("ImportError: no torch" in each.missing for each in parts)


def sanitizer_parts(path: str, folder: pathlib.Path) -> list[Part]:
    machine = replace(EVERYTHING, programs={"compute-sanitizer": path})
    return [one for one in plan(["cuda:0"], machine, folder) if one.name == "sanitizer"]


def test_a_sanitizer_that_finds_something(tmp_path: pathlib.Path) -> None:
    path = program(
        tmp_path / "compute-sanitizer",
        """
import sys
tool = sys.argv[sys.argv.index("--tool") + 1]
assert sys.argv[-3:-1] == ["tests.gpu.report.programs", "kernels"]
if tool == "racecheck":
    print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
elif tool == "memcheck":
    print("========= Invalid __global__ write of size 4 bytes in reduce_add_float")
    print("chatter\\n" * 50)
    print("========= ERROR SUMMARY: 1 error")
    sys.exit(86)
elif tool == "initcheck":
    print("========= ERROR SUMMARY: 0 errors\\nRuntimeError: the program has failed")
    sys.exit(1)
else:
    print("========= ERROR SUMMARY: 0 errors")
""",
    )
    assert report(tmp_path).run(sanitizer_parts(path, tmp_path)) == 1
    text = page(tmp_path)
    assert "| compute-sanitizer, racecheck | passed |" in text
    assert "| compute-sanitizer, synccheck | passed |" in text
    assert "| compute-sanitizer, memcheck | failed |" in text
    assert "Invalid __global__ write of size 4 bytes in reduce_add_float" in text
    assert "chatter" not in text
    assert "| compute-sanitizer, initcheck | failed |" in text
    assert "    RuntimeError: the program has failed" in text
    path = program(tmp_path / "compute-sanitizer", "print('Device not supported')")
    assert report(tmp_path).run(sanitizer_parts(path, tmp_path)) == 1
    assert "Device not supported" in page(tmp_path), "it has refused, and not passed"


# --- what they find --------------------------------------------------------------------------


def outcomes_of(folder: pathlib.Path, text: str, limit: float = 60.0) -> findings.Findings:
    """What is found out about a file of tests, run as the part does."""
    (folder / "test_some.py").write_text(text)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    machine = replace(EVERYTHING, packages={"pytest": "1.0"})
    (tests,) = [one for one in plan(["cuda:0"], machine, folder) if one.name == "tests"]
    command = [word for word in tests.command if not word.startswith("tests/")]
    command.append("test_some.py")
    environment = {**os.environ, **tests.environment, "PYTHONPATH": str(ROOT)}
    (folder / "outcomes.jsonl").unlink(missing_ok=True)
    assert environment[outcomes.VARIABLE] == str(folder / "outcomes.jsonl")
    return tests.read(run(command, folder=folder, environment=environment, limit=limit))


TESTS = """
import pytest, time
pytestmark = pytest.mark.gpu
def test_works(): pass
def test_fails(): assert 1 == 2, "not the same"
def test_is_left_out(): pytest.skip("needs more")
def test_other(): pass
"""


def test_outcomes_of_tests_of_which_the_last_hangs(tmp_path: pathlib.Path) -> None:
    hanging = TESTS + "def test_hangs(): time.sleep(600)\n"
    found = outcomes_of(tmp_path, hanging, limit=10.0)
    assert found.verdict == "failed"
    assert found.summary == "2 passed, 1 failed, 1 skipped, ended at its limit of 10 s"
    assert found.tables[0].rows[0][:4] == ("test_some.py", "2", "1", "1")
    assert found.tables[1].rows == (("needs more", "1"),)
    (name, told), (_, last) = found.failures
    assert name == "test_some.py::test_fails" and "not the same" in told
    assert "test_hangs" in last


@pytest.mark.parametrize(
    ("text", "verdict", "told"),
    [
        ("import no_such_module\n", "failed", "No module named 'no_such_module'"),
        ("import pytest\n@pytest.mark.gpu\ndef test(): pytest.skip('')\n", "not run", "1 skipped"),
        ("import pytest\n@pytest.mark.gpu\ndef test(): pass\n", "passed", "1 passed"),
    ],
)
def test_outcomes(tmp_path: pathlib.Path, text: str, verdict: str, told: str) -> None:
    found = outcomes_of(tmp_path, text)
    assert found.verdict == verdict
    assert told in (found.failures[0][1] if found.failures else found.summary)


def write(path: pathlib.Path, content: Any) -> pathlib.Path:
    path.write_text(json.dumps(content))
    return path


def test_step_times(tmp_path: pathlib.Path) -> None:
    time_, ratio = Spread(0.0125, 0.01, 0.02), Spread(1.5, 1.25, 2.0)
    bare = {
        "contestant": "bare",
        "title": "bare module",
        "seconds": asdict(time_),
        "ours_over_this": asdict(ratio),
        "host_bytes": 3 * 2**20,
        "device_bytes": 2**20,
        "agrees": True,
    }
    content = {
        "cases": [{"title": "mlp (256)", "rows": [bare]}],
        "comparisons": [{"title": "bare module", "time_mean": {"median": 1.5}}],
    }
    found = findings.train(Ended(0, 1.0, ""), write(tmp_path / "train.json", content))
    assert (found.verdict, found.summary) == ("passed", "1.50 times as long as bare module")
    line = ("mlp (256)", "bare module", "12.5 (10..20)", "1.5 (1.25..2)", "3", "1", "yes")
    assert found.tables[0].rows == (line,)
    found = findings.train(Ended(2, 1.0, "no GPU\n"), tmp_path / "none.json")
    assert (found.verdict, found.failures) == ("failed", (("exit status 2", "no GPU"),))


def test_rates_of_kernels(tmp_path: pathlib.Path) -> None:
    case = KernelCase("reduce_add", "2 inputs", "float32", 16 * 2**20)
    seconds = {"ours": 1e-3, "copy": 1e-3, "foreach": 2e-3}
    turns = {name: [Turn(value, 5e-6, True)] for name, value in seconds.items()}
    rows = [summarize(case, turns, True), summarize(case, turns, False)]
    content = {
        "rows": [asdict(row) for row in rows],
        "bars": judge(rows),
        "setting": {"runs": "kernels"},
    }
    found = findings.kernels(Ended(1, 1.0, ""), write(tmp_path / "kernels.json", content))
    assert (found.verdict, found.summary) == ("failed", "2 calls of kernels; 1 with wrong results")
    assert found.tables[0].rows[0][1:] == (
        "1.11",
        "1.000 (reduce_add, 2 inputs, float32, 16 MiB)",
        "0 of 1",
        "met",
    )
    line = found.tables[1].rows[0]
    assert line[2:] == ("50.3", "1 (1..1)", "0.5 (0.5..0.5), foreach", "5.0", "yes")
    assert found.tables[1].rows[1][-1] == "**no**"


def test_the_parts_that_count_what_waits() -> None:
    for devices in (["virtual:0"], ["virtual:0"] * 2, ["virtual:0", "virtual:1"]):
        step = host_waits.count(tuple(devices), "training step")
        assert step.ours == step.bare == {"waits": 0.0}
    checked = host_waits.count(("virtual:0",), 'nonfinite="skip"')
    assert checked.ours == checked.bare == {"waits": 1.0}
    assert host_waits.count(("virtual:0", "cpu"), "evaluation").ours["waits"] > 0


def counted_on_cuda(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> tuple[dict[str, float], Sequence[str]]:
    """What is counted of calls on a CUDA device; on this machine nothing is on one."""
    for name in ("set_sync_debug_mode", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(host_waits, "_WAITING", ("aten::mul",))

    def repeat(times: int) -> None:
        for _ in range(times):
            call()

    return host_waits.counted(repeat, torch.device("cuda:0"))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_waits_on_cuda_are_warnings_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)

    def call() -> None:
        warnings.warn("something else", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        x.mul(2).mul(3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, places = counted_on_cuda(monkeypatch, call)
    assert found == {"warned": 1.0, "aten::mul": 2.0}
    assert [place.split(":")[0] for place in places] == ["tests/test_gpu_report.py"]


def test_what_a_sanitizer_watches_launches_every_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = HostBackend()
    monkeypatch.setattr(programs, "CALLS", ((33, 1),))
    with registered([backend]):
        for what in ("build", "kernels"):
            capsys.readouterr()
            monkeypatch.setattr(sys, "argv", ["programs", what, "cpu"])
            programs.main()
            assert what == "kernels" or "kernels in" in capsys.readouterr().out
    assert capsys.readouterr().out.split() == [case.__name__ for case in CASES]
    launched = {name.split("_")[0] for name in backend.launches}
    assert {case.__name__.split("_")[0] for case in CASES} <= launched


# --- without installation --------------------------------------------------------------------


def test_the_package_can_be_imported_where_it_was_laid_out(tmp_path: pathlib.Path) -> None:
    lay_out(tmp_path)
    code = "from dataparallel.tools import cli; import dataparallel.kernels as k; print(k.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; cli.main(['--version'])"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    place, version = done.stdout.splitlines()
    assert pathlib.Path(place) == tmp_path / "dataparallel" / "kernels" / "__init__.py"
    assert version == "dataparallel 0.1.0"
