"""Forked children and the end of a process."""

from __future__ import annotations

import pytest

from tests.virtual.oracle import run_python

PREAMBLE = """
import os, sys, torch, dataparallel.virtual as v
v.enable(2)
"""


def test_forked_loader_workers_handle_cpu_tensors() -> None:
    code = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.randn(3).mul(0) + i
x = torch.ones(3, device="virtual:1") + 1
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, pin_memory=True)
print(sum(batch.sum().item() for batch in loader), x.sum().item())
"""
    done = run_python(PREAMBLE + code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "84.0 6.0\n"
    assert done.stderr == ""


def test_device_in_a_forked_child_is_a_clear_error() -> None:
    code = """
x = torch.ones(3, device="virtual:1")
child = os.fork()
if child == 0:
    assert torch.virtual._is_in_bad_fork()
    torch.manual_seed(3)
    for use in (lambda: x + 1, lambda: torch.empty(2, device="virtual:0"), lambda: x.cpu()):
        try:
            use()
        except RuntimeError as error:
            assert "cannot be used in a forked subprocess" in str(error), error
        else:
            os._exit(3)
    del x
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_python(PREAMBLE + code)
    assert done.stdout == "7\n", done.stderr


@pytest.mark.parametrize(
    "code",
    [
        # Live tensors, streams, events and queued work, some of which would fail.
        """
s = torch.Stream("virtual:0")
with s:
    a = torch.ones(4, device="virtual:0") + 1
    b = torch.ones(3, 2, device="virtual:0").index_select(0, a.long() * 9)
e = s.record_event()
sys.modules["keep"] = (a, b, s, e)
""",
        # A backward that has just ended, with its graph alive.
        """
w = torch.ones(4, 4, device="virtual:1", requires_grad=True)
loss = (w @ w).sum()
loss.backward(retain_graph=True)
sys.modules["keep"] = (w, loss)
""",
        # Strict mode, pinned memory and generators.
        """
v.set_strict(True)
p = torch.ones(4).pin_memory()
y = p.to("virtual:1", non_blocking=True) * torch.rand(4, device="virtual:1")
g = torch.Generator(device="virtual:1")
""",
    ],
    ids=["queued", "backward", "strict"],
)
def test_process_ends_quietly(code: str) -> None:
    done = run_python(PREAMBLE + code)
    assert (done.returncode, done.stderr) == (0, "")
