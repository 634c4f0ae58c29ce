"""Install the wheel and the source archive as a stranger would, and see that they work.

    make release

Each of them goes into an environment of its own, which borrows torch from this one, and is used
from an empty folder: the README's program, virtual devices (their C++ source has to be in it), the
command, and a recording. Nothing is signed and nothing is uploaded.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import venv

import torch

from tests.test_docstrings import ROOT, blocks_of

VIRTUAL = """
import torch
import dataparallel as dp
dp.virtual.enable(2)
net = torch.nn.Linear(3, 2)
bare = torch.nn.Linear(3, 2)
bare.load_state_dict(net.state_dict())
x = torch.rand(8, 3)
dp.DistributedDataParallel(net, ["virtual:0", "virtual:1"])(x).sum().backward()
bare(x).sum().backward()
torch.testing.assert_close(net.weight.grad.cpu(), bare.weight.grad)
print("virtual devices train as the bare module, from", dp.__file__)
"""


def main() -> int:
    """Try the archives in dist/."""
    archives = sorted((ROOT / "dist").glob("dataparallel-*"))
    if len(archives) != 2:
        print(f"dist/ should hold one wheel and one source archive, and holds {archives}")
        return 1
    for archive in archives:
        print(f"{archive.name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try_archive(archive, pathlib.Path(folder))
    print("Both archives work. To publish them: CONTRIBUTING.md, A release")
    return 0


def try_archive(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Install an archive without its dependencies, which lie in this environment."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    # A line in such a file is searched after the environment's own packages.
    borrowed = pathlib.Path(torch.__file__).parents[1]
    (pathlib.Path(done.stdout.strip()) / "borrowed.pth").write_text(str(borrowed))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(archive)], check=True)
    work = folder / "work"
    work.mkdir()
    (work / "readme.py").write_text(blocks_of(ROOT / "README.md")[0].code)
    (work / "virtual.py").write_text(VIRTUAL)
    command = str(python.parent / "dataparallel")
    for words in (
        [str(python), "readme.py"],
        [str(python), "virtual.py"],
        [command, "doctor", "--help"],
        [command, "bench", "simulate", "--help"],
        [command, "monitor", "record", "--for", "1", "run.jsonl"],
        [command, "monitor", "report", "run.jsonl"],
    ):
        done = subprocess.run(words, cwd=work, capture_output=True, text=True, timeout=600)
        name = " ".join([pathlib.Path(words[0]).name, *words[1:]])
        if done.returncode:
            raise SystemExit(f"  {name} failed:\n{done.stdout}{done.stderr}")
        print(f"  {name}: works", flush=True)


if __name__ == "__main__":
    sys.exit(main())
