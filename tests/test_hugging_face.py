"""Models of Hugging Face, which make their loss themselves, against the bare module.

Sequences are padded, and the padding's labels are -100: the loss is a mean over what is left.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.models import assert_all_close, grads_of

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


def train(model: nn.Module, folder: pathlib.Path, n_gpu: int = 0) -> tuple[list[float], float]:
    """Two steps, of two batches each; returns their losses and that of an evaluation."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=5,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        # Trainer asks the class of the model for these, and here that is the wrapper.
        label_names=["labels"],
    )
    assert arguments.n_gpu == 0
    arguments._n_gpu = n_gpu
    # A column that no model takes.
    data = [{**one, "number": torch.tensor(i)} for i, one in enumerate(samples(20))]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:10])
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
    model.in_dims = {"num_items_in_batch": None}
    with pytest.raises(ValueError, match=r"a vector as num_items_in_batch.* arguments._n_gpu = 1"):
        train(model, tmp_path, n_gpu=2)
    found, _ = train(model, tmp_path, n_gpu=1)
    assert found == pytest.approx(losses, rel=1e-3)
    assert_all_close(net.parameters(), bare.parameters())


def test_trainer_and_a_vector(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    _, net = pair(gpt2)
    caplog.set_level(logging.WARNING, "dataparallel")
    with pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
        train(dp.DataParallel(net, ["cpu", "cpu"]), tmp_path)
    (message,) = [text for text in caplog.messages if "pass scalars= to the wrapper" in text]
    assert "outputs['loss']" in message
