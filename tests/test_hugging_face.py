"""Models of Hugging Face, which make their loss themselves, against the bare module.

Sequences are padded, and the padding's labels are -100: the loss is a mean over what is left.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.guides import definitions
from tests.launched import launched
from tests.models import assert_all_close, grads_of
from tests.test_docstrings import ROOT

Weight = Callable[..., Tensor | None]
WRAPPERS: tuple[Any, ...] = (dp.DataParallel, dp.DistributedDataParallel)
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


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))  # type: ignore[no-any-return]


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    others = {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **others, use_cache=False))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Weight]] = {
    "gpt2": (gpt2, num_next_tokens),
    "llama": (llama, num_next_tokens),
    "t5": (t5, num_labels),
}
each_model = pytest.mark.parametrize(("make", "weight"), MODELS.values(), ids=MODELS)
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


pytestmark = pytest.mark.usefixtures("accelerate_anew")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    from transformers import logging as its_logging

    before = its_logging.get_verbosity()
    its_logging.set_verbosity_error()
    yield
    its_logging.set_verbosity(before)


def pair(make: Callable[[], nn.Module], device: str = "cpu") -> tuple[nn.Module, nn.Module]:
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


def batch(device: str = "cpu") -> dict[str, Tensor]:
    each = samples(len(LENGTHS))
    return {name: torch.stack([one[name] for one in each]).to(device) for name in each[0]}


# --- a plain loop --------------------------------------------------------------------------------


@each_model
@each_wrapper
def test_a_plain_loop(
    slots: list[str], wrapper: Any, make: Callable[[], nn.Module], weight: Weight
) -> None:
    bare, net = pair(make, slots[0])
    model = wrapper(net, slots[:2], scalars=weight)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (bare, net)]
    for step in range(2):
        outputs = [one(**batch(slots[0])) for one in (bare, model)]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.loss.backward()
        assert type(outputs[0]) is type(outputs[1])
        torch.testing.assert_close(outputs[1].loss, outputs[0].loss, msg=f"loss of step {step}")
        assert_all_close([outputs[1].logits], [outputs[0].logits])
        assert_all_close(grads_of(net), grads_of(bare))
        for optimizer in optimizers:
            optimizer.step()


@each_wrapper
def test_a_forward_without_labels(wrapper: Any) -> None:
    bare, net = pair(gpt2)
    model = wrapper(net, ["cpu", "cpu"], scalars=num_next_tokens)
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    assert_all_close([model(**inputs).logits], [bare(**inputs).logits])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_hidden_states(wrapper: Any) -> None:
    net = gpt2()
    bare, model = copy.deepcopy(net), wrapper(net, ["cpu", "cpu"])
    ids = torch.randint(3, 31, (5, 9))
    # transformers installs hooks on the layers in the first forward.
    for _ in range(2):
        states = model(ids, output_hidden_states=True).hidden_states
        assert_all_close(states, bare(ids, output_hidden_states=True).hidden_states)
    model.close()


@each_model
@each_wrapper
def test_accelerate(wrapper: Any, make: Callable[[], nn.Module], weight: Weight) -> None:
    from accelerate import Accelerator

    bare, net = pair(make)
    wrapped = wrapper(net, ["cpu", "cpu"], scalars=weight)
    for model in (bare, wrapped):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        data: Any = samples(10)
        loader: Any = torch.utils.data.DataLoader(data, batch_size=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**inputs).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.unwrap_model(model) is net
    assert_all_close(net.parameters(), bare.parameters())


# --- Trainer -------------------------------------------------------------------------------------


def arguments_for(folder: pathlib.Path, n_gpu: int = 0, **others: Any) -> Any:
    """Two steps, of two batches each."""
    from transformers import TrainingArguments

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
    return arguments


def train(
    model: nn.Module, folder: pathlib.Path, n_gpu: int = 0, trainer_class: Any = None, **others: Any
) -> tuple[list[float], float]:
    """Returns the losses of the steps and that of an evaluation."""
    from transformers import Trainer

    if trainer_class is None:
        # Trainer asks the class of the model for these, and here that is the wrapper.
        trainer_class, others = Trainer, {"label_names": ["labels"], **others}
    # A column that no model takes.
    data = [{**one, "number": torch.tensor(i)} for i, one in enumerate(samples(20))]
    arguments = arguments_for(folder, n_gpu, **others)
    trainer = trainer_class(model, arguments, train_dataset=data, eval_dataset=data[:10])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What Trainer makes of each bare model."""

    @functools.cache
    def of(make: Callable[[], nn.Module]) -> tuple[nn.Module, list[float], float]:
        bare, _ = pair(make)
        return bare, *train(bare, tmp_path_factory.mktemp("bare"))

    return of


@each_model
@each_wrapper
def test_trainer(
    trained: Any,
    tmp_path: pathlib.Path,
    wrapper: Any,
    make: Callable[[], nn.Module],
    weight: Weight,
) -> None:
    bare, losses, evaluated = trained(make)
    _, net = pair(make)
    model = wrapper(net, ["cpu", "cpu"], scalars=weight)
    assert inspect.signature(model.forward) == inspect.signature(net.forward)
    found, of_evaluation = train(model, tmp_path)
    assert found == pytest.approx(losses, rel=1e-3)
    assert of_evaluation == pytest.approx(evaluated, rel=1e-5)
    assert_all_close(net.parameters(), bare.parameters())


def test_trainer_and_a_mean_of_what_adds_up(tmp_path: pathlib.Path) -> None:
    _, net = pair(gpt2)
    for scalars in ("mean", lambda labels, **others: (labels[:, 1:] != -100).sum()):
        model = dp.DataParallel(net, ["cpu", "cpu"], scalars=scalars)
        with pytest.raises(ValueError, match=r"given num_items_in_batch.*returns None"):
            train(model, tmp_path)


def test_trainer_on_a_machine_with_two_accelerators(trained: Any, tmp_path: pathlib.Path) -> None:
    bare, losses, _ = trained(gpt2)
    _, net = pair(gpt2)
    model = dp.DataParallel(net, ["cpu", "cpu"], scalars=num_next_tokens)
    with pytest.raises(ValueError, match=r"must agree .* kwargs\['num_items_in_batch'\] has 2"):
        train(model, tmp_path, n_gpu=2)
    found, _ = train(model, tmp_path, n_gpu=1)
    assert found == pytest.approx(losses, rel=1e-3)
    assert_all_close(net.parameters(), bare.parameters())


def test_trainer_and_a_vector(tmp_path: pathlib.Path) -> None:
    _, net = pair(gpt2)
    with pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
        train(dp.DataParallel(net, ["cpu", "cpu"]), tmp_path)


# --- the class of the guide ----------------------------------------------------------------------


def parallel_trainer(**names: Any) -> Any:
    """The class, with a function of the test for ``scalars=`` where one is given."""
    text = definitions("hugging_face")
    if names:
        assert 'scalars="sum"' in text
        text = text.replace('scalars="sum"', "scalars=weight")
    exec(text, names)
    return names["ParallelTrainer"]


@pytest.mark.parametrize("n_gpu", [0, 2])
@each_model
def test_the_trainer_of_the_guide(
    trained: Any, tmp_path: pathlib.Path, make: Callable[[], nn.Module], weight: Weight, n_gpu: int
) -> None:
    from safetensors.torch import load_file

    bare, losses, evaluated = trained(make)
    _, net = pair(make)
    names = {"weight": weight} if make is t5 else {}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    found, of_evaluation = train(net, tmp_path, n_gpu, parallel_trainer(**names), **saving)
    assert found == pytest.approx(losses, rel=1e-3)
    assert of_evaluation == pytest.approx(evaluated, rel=1e-5)
    assert_all_close(net.parameters(), bare.parameters())
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert set(saved) <= set(bare.state_dict()) and "module" not in " ".join(saved)


def test_the_trainer_of_the_guide_computes_in_bfloat16(tmp_path: pathlib.Path) -> None:
    _, net = pair(gpt2)
    seen = set()
    layer: Any = net.get_submodule("transformer.h.0.attn.c_attn")
    layer.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    train(net, tmp_path, 0, parallel_trainer(), bf16=True)
    assert seen == {torch.bfloat16}


def test_the_trainer_of_the_guide_goes_on_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    _, net = pair(gpt2)
    again = copy.deepcopy(net)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    data = samples(20)
    arguments = arguments_for(tmp_path, **saving)
    parallel_trainer()(net, arguments, train_dataset=data).train()
    trainer = parallel_trainer()(again, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_all_close(again.parameters(), net.parameters(), rtol=0, atol=0)


IN_PROCESSES = """
import pathlib, sys
import torch
from accelerate import Accelerator
from tests import test_hugging_face as tests

folder = pathlib.Path(sys.argv[1])
_, net = tests.pair(tests.gpt2)
trained = tests.train(net, folder / "trainer", 0, ParallelTrainer, per_device_train_batch_size=2)

accelerator = Accelerator(cpu=True)
_, other = tests.pair(tests.gpt2)
model = dp.DistributedDataParallel(
    other, ["cpu", "cpu"], scalars=tests.num_next_tokens, average="samples"
)
model = accelerator.prepare_model(model, evaluation_mode=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(tests.samples(20), batch_size=2)
optimizer, loader = accelerator.prepare(optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
model.check_replicas()
if accelerator.is_main_process:
    states = {"trainer": net.state_dict(), "accelerate": other.state_dict()}
    torch.save({"trained": trained, **states}, folder / "found.pt")
"""


def test_several_processes(tmp_path: pathlib.Path) -> None:
    """Two processes with two replicas each, against the bare model in one."""
    script = tmp_path / "script.py"
    script.write_text(definitions("hugging_face") + IN_PROCESSES)
    launched(script, 2, ROOT, str(tmp_path), virtual=False)
    found = torch.load(tmp_path / "found.pt")

    bare, _ = pair(gpt2)
    # Batches of four in one process are those of two in each of two processes.
    losses, evaluated = train(bare, tmp_path / "bare", per_device_train_batch_size=4)
    assert found["trained"][0] == pytest.approx(losses, rel=1e-3)
    assert found["trained"][1] == pytest.approx(evaluated, rel=1e-5)
    assert_all_close(found["trainer"].values(), bare.state_dict().values())

    bare, _ = pair(gpt2)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    data: Any = samples(20)
    for batch_of_all in torch.utils.data.DataLoader(data, batch_size=4):
        bare(**batch_of_all).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_close(found["accelerate"].values(), bare.state_dict().values())
