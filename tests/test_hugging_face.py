"""Models of Hugging Face, which make their loss themselves, against the bare module.

Sequences are padded, and the padding's labels are -100: the loss is a mean over what is left.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.launched import launched
from tests.models import assert_all_close, grads_of
from tests.test_docstrings import ROOT, definitions

Make = Callable[[], nn.Module]
Weight = Callable[..., Tensor | None]
WRAPPERS = pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
#: How much of each sequence is no padding.
LENGTHS = (9, 2, 3, 7, 1)


def num_next_tokens(
    labels: Tensor | None = None, num_items_in_batch: Any = None, **others: Any
) -> Tensor | None:
    """For models that predict the next token: the first label is nobody's."""
    if labels is None or num_items_in_batch is not None:
        return None
    return (labels[:, 1:] != -100).sum()


def num_labels(labels: Tensor, num_items_in_batch: Any = None, **others: Any) -> Tensor:
    """For T5, whose loss is the mean whatever it is given."""
    return (labels != -100).sum()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ends, use_cache=False))  # type: ignore[no-any-return]


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    others = {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **others, use_cache=False))  # type: ignore[no-any-return]


MODELS = pytest.mark.parametrize(
    ("make", "weight"), [(gpt2, num_next_tokens), (t5, num_labels)], ids=["gpt2", "t5"]
)
pytestmark = pytest.mark.usefixtures("accelerate_anew")


def pair(make: Make, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    bare = make().to(device)
    return bare, copy.deepcopy(bare)


def samples(number: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    found = []
    for i in range(number):
        length = LENGTHS[i % len(LENGTHS)]
        ids = torch.randint(3, 31, (9,), generator=random)
        mask = (torch.arange(9) < length).long()
        labels = ids.where(mask == 1, -100)
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return found


# --- a plain loop --------------------------------------------------------------------------------


@MODELS
@WRAPPERS
def test_a_plain_loop(slots: list[str], wrapper: Any, make: Make, weight: Weight) -> None:
    bare, net = pair(make, slots[0])
    model = wrapper(net, slots[:2], scalars=weight)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (bare, net)]
    given = samples(len(LENGTHS))
    batch = {name: torch.stack([one[name] for one in given]).to(slots[0]) for name in given[0]}
    # transformers installs hooks on the layers in the first forward.
    for _ in range(2):
        outputs = [one(**batch, output_hidden_states=True) for one in (bare, model)]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.loss.backward()
        assert type(outputs[0]) is type(outputs[1])
        torch.testing.assert_close(dict(outputs[1]), dict(outputs[0]))
        assert_all_close(grads_of(net), grads_of(bare))
        for optimizer in optimizers:
            optimizer.step()
    if make is gpt2:
        del batch["labels"]
        assert_all_close([model(**batch).logits], [bare(**batch).logits])


# --- Trainer -------------------------------------------------------------------------------------


def train(
    model: nn.Module, folder: pathlib.Path, n_gpu: int = 0, trainer_class: Any = None, **others: Any
) -> tuple[list[float], float]:
    """Two steps, of two batches each; returns their losses and that of an evaluation."""
    from transformers import Trainer, TrainingArguments

    if trainer_class is None:
        # Trainer asks the class of the model for these, and here that is the wrapper.
        trainer_class, others = Trainer, {"label_names": ["labels"], **others}
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**options | others)
    assert arguments.n_gpu == 0
    arguments._n_gpu = n_gpu
    # A column that no model takes.
    data = [{**one, "number": torch.tensor(i)} for i, one in enumerate(samples(20))]
    trainer = trainer_class(model, arguments, train_dataset=data, eval_dataset=data[:10])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


Trained = tuple[nn.Module, list[float], float]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], Trained]:
    """What Trainer makes of each bare model."""

    def of(make: Make) -> Trained:
        bare, _ = pair(make)
        return bare, *train(bare, tmp_path_factory.mktemp("bare"))

    return functools.cache(of)


def assert_as_bare(net: nn.Module, found: tuple[list[float], float], expected: Trained) -> None:
    bare, losses, evaluated = expected
    assert found[0] == pytest.approx(losses, rel=1e-3)
    assert found[1] == pytest.approx(evaluated, rel=1e-5)
    assert_all_close(net.parameters(), bare.parameters())


def parallel_trainer(**names: Any) -> Any:
    """The class of the guide, with a function of the test for ``scalars=`` where one is given."""
    text = definitions("hugging_face")
    if names:
        assert 'scalars="sum"' in text
        text = text.replace('scalars="sum"', "scalars=weight")
    exec(text, names)
    return names["ParallelTrainer"]


@MODELS
@pytest.mark.parametrize("how", [dp.DataParallel, dp.DistributedDataParallel, 0, 2])
def test_trainer(
    trained: Any, tmp_path: pathlib.Path, how: Any, make: Make, weight: Weight
) -> None:
    """Given a wrapper, or a bare model to the class of the guide, which is told of some GPUs."""
    _, net = pair(make)
    if isinstance(how, type):
        model = how(net, ["cpu", "cpu"], scalars=weight)
        assert inspect.signature(model.forward) == inspect.signature(net.forward)
        assert_as_bare(net, train(model, tmp_path), trained(make))
        return
    from safetensors.torch import load_file

    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    trainer = parallel_trainer(**({"weight": weight} if make is t5 else {}))
    assert_as_bare(net, train(net, tmp_path, how, trainer, **saving), trained(make))
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert set(saved) <= set(net.state_dict()) and "module" not in " ".join(saved)


IN_PROCESSES = """
import os, pathlib, sys
import torch
from tests import test_hugging_face as tests

folder = pathlib.Path(sys.argv[1])
_, net = tests.pair(tests.gpt2)
trained = tests.train(net, folder / "trainer", 0, ParallelTrainer, per_device_train_batch_size=2)
if os.environ["RANK"] == "0":
    torch.save((trained, net.state_dict()), folder / "found.pt")
"""


def test_several_processes(tmp_path: pathlib.Path) -> None:
    """Two processes with two replicas each, against the bare model in one."""
    script = tmp_path / "script.py"
    script.write_text(definitions("hugging_face") + IN_PROCESSES)
    launched(script, 2, ROOT, str(tmp_path), virtual=False)
    found, state = torch.load(tmp_path / "found.pt")
    net, bare = pair(gpt2)
    net.load_state_dict(state)
    # Batches of four in one process are those of two in each of two processes.
    expected = train(bare, tmp_path / "bare", per_device_train_batch_size=4)
    assert_as_bare(net, found, (bare, *expected))
