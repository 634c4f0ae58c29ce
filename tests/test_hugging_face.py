"""Models of Hugging Face, which make their loss themselves, against the bare module.

Sequences are padded, and the padding's labels are -100: the loss is a mean over what is left.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.launched import launched
from tests.models import WRAPPERS, assert_all_close, grads_of
from tests.test_docstrings import ROOT

Make = Callable[[], nn.Module]
Weight = Callable[..., Tensor | None]
#: The part of each sequence that is no padding.
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
pytestmark = [
    pytest.mark.usefixtures("accelerate_anew"),
    # Its new name is not known to older releases, nor to peft.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


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


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **ends, use_cache=False))  # type: ignore[no-any-return]


def bert(name: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    config = transformers.BertConfig(**sizes, **drops, num_attention_heads=2)
    return getattr(transformers, f"BertFor{name}")(config)  # type: ignore[no-any-return]


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    layers = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, **layers, task_type="CAUSAL_LM"))  # type: ignore[no-any-return]


def classes(number: int, ignored: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Return one label for each sample."""
    return [
        {**row, "labels": torch.tensor(-100 if i in ignored else int(row["input_ids"][0]) % 3)}
        for i, row in enumerate(samples(number))
    ]


def full(number: int) -> list[dict[str, Any]]:
    """As many labels in each sample, until one has fewer."""
    rows = [
        {"input_ids": one["input_ids"], "labels": one["input_ids"] % 28 + 3}
        for one in samples(number)
    ]
    rows[-1]["labels"] = rows[-1]["labels"].index_fill(0, torch.tensor([0, 3]), -100)
    return rows


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """Return a loss of the user's, on the outputs of the whole batch."""
    logits = outputs["logits"].flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    total: Tensor = losses / num_items_in_batch
    return total


class PerSample(nn.Module):
    """A mean over samples of each one's mean over its labels; at first all losses are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"loss": (losses.sum(1) / (labels != -100).sum(1)).mean(), "logits": logits}


class Regression(nn.Module):
    """A mean over samples, whose labels are integers, of which -100 is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(input_ids.to(self.layer.weight.dtype) / 31).squeeze(1)
        return {"loss": (logits - labels).div(100).pow(2).mean(), "logits": logits}


Rows = Callable[[int], list[dict[str, Any]]]
CASES: dict[str, tuple[Make, Rows, dict[str, Any]]] = {
    "gpt2": (gpt2, samples, {}),
    "llama": (llama, samples, {}),
    "t5": (t5, samples, {}),
    "lora": (lora, samples, {}),
    "masked": (functools.partial(bert, "MaskedLM"), samples, {}),
    "masked, one with fewer labels": (functools.partial(bert, "MaskedLM"), full, {}),
    "classes": (functools.partial(bert, "SequenceClassification"), classes, {}),
    "classes, one ignored": (
        functools.partial(bert, "SequenceClassification"),
        functools.partial(classes, ignored=(3,)),
        {},
    ),
    "mean of means": (PerSample, samples, {}),
    "integers that are no classes": (Regression, functools.partial(classes, ignored=(12,)), {}),
    "smoothed": (gpt2, samples, {"label_smoothing_factor": 0.1}),
    "smoothed classes": (
        functools.partial(bert, "SequenceClassification"),
        classes,
        {"label_smoothing_factor": 0.1},
    ),
    "a loss of ones own": (
        functools.partial(bert, "MaskedLM"),
        samples,
        {"compute_loss_func": summed},
    ),
    "checkpointed": (gpt2, samples, {"gradient_checkpointing": True}),
}


def train(
    model: nn.Module,
    folder: pathlib.Path,
    trainer_class: Any = None,
    rows: Rows = samples,
    own: dict[str, Any] | None = None,
    compute_loss_func: Any = None,
    **others: Any,
) -> tuple[list[float], Any]:
    """Three steps, of two batches each; returns their losses, and what a prediction gives."""
    from transformers import Trainer, TrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    # The last batch of an epoch has two samples. And a column that no model takes.
    data = [{**one, "number": torch.tensor(i)} for i, one in enumerate(rows(17))]
    given = {"train_dataset": data, "compute_loss_func": compute_loss_func, **(own or {})}
    trainer = (trainer_class or Trainer)(model, TrainingArguments(**options | others), **given)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.predict(data[:7])


Trained = tuple[nn.Module, list[float], Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Return Trainer's result for each bare model."""

    def of(case: str) -> Trained:
        make, rows, options = CASES[case]
        bare, _ = pair(make)
        folder = tmp_path_factory.mktemp("bare")
        return bare, *train(bare.double(), folder, rows=rows, **options)

    return functools.cache(of)


def assert_as_bare(net: nn.Module, found: tuple[list[float], Any], expected: Trained) -> None:
    """Losses are in single precision, whatever the model has."""
    bare, losses, predicted = expected
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1].metrics["test_loss"] == pytest.approx(predicted.metrics["test_loss"], rel=1e-6)
    for mine, theirs in zip(map(first, found[1][:2]), map(first, predicted[:2]), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))
    assert_all_close(net.parameters(), bare.parameters(), rtol=1e-6, atol=1e-8)


def first(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) else values


@pytest.mark.parametrize(("case", "replicas"), [(case, 2 + i % 2) for i, case in enumerate(CASES)])
def test_trainer(trained: Any, tmp_path: pathlib.Path, case: str, replicas: int) -> None:
    """It finds out what each model's loss is a mean over; dividing it equally is wrong here."""
    from dataparallel.extras.hugging_face import Trainer

    expected = trained(case)
    make, rows, options = CASES[case]
    _, net = pair(make)
    devices = {"device_ids": ["cpu"] * replicas}
    found = train(net.double(), tmp_path, Trainer, rows, devices, **options)
    assert_as_bare(net, found, expected)


def test_trainer_that_compiles(
    trained: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiler finds nothing in the wrapper that it could compile, and disturbs nothing."""
    from dataparallel.extras.hugging_face import Trainer

    expected = trained("masked")
    make, rows, _ = CASES["masked"]
    _, net = pair(make)
    # Trainer changes it for the rest of the process.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    devices = {"device_ids": ["cpu", "cpu"]}
    assert_as_bare(net, train(net.double(), tmp_path, Trainer, rows, devices, **options), expected)


def test_trainer_in_mixed_precision(tmp_path: pathlib.Path, accelerate_anew: None) -> None:
    """Trainer replaces the forward of what it trains by one in autocast."""
    from dataparallel.extras.hugging_face import Trainer

    make, rows, _ = CASES["masked"]
    bare, net = pair(make)
    seen = set()
    net.cls.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))  # type: ignore[union-attr]
    losses, _ = train(bare, tmp_path / "bare", rows=rows)
    devices = {"device_ids": ["cpu", "cpu"]}
    found, predicted = train(net, tmp_path, Trainer, rows, devices, bf16=True)
    assert found == pytest.approx(losses, rel=1e-2) and found != losses
    assert seen == {torch.bfloat16} and predicted.predictions.dtype == "float32"


@pytest.mark.parametrize("case", ["gpt2", "t5"])
@WRAPPERS
def test_trainer_that_is_given_a_wrapper(
    trained: Any, tmp_path: pathlib.Path, wrapper: Any, case: str
) -> None:
    expected = trained(case)
    _, net = pair(CASES[case][0])
    scalars = {"gpt2": num_next_tokens, "t5": num_labels}[case]
    model = wrapper(net.double(), ["cpu", "cpu"], scalars=scalars)
    assert inspect.signature(model.forward) == inspect.signature(net.forward)
    # Trainer asks the class of the model for these, and here that is the wrapper.
    assert_as_bare(net, train(model, tmp_path, label_names=["labels"]), expected)


def test_a_class_of_ones_own(tmp_path: pathlib.Path) -> None:
    """It generates, and it saves."""
    from safetensors.torch import load_file
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

    from dataparallel.extras.hugging_face import TrainerMixin

    class Own(Seq2SeqTrainer):  # type: ignore[misc]
        def __init__(self, model: Any, args: TrainingArguments, **others: Any) -> None:
            options = args.to_dict() | {"predict_with_generate": True, "generation_max_length": 12}
            args = Seq2SeqTrainingArguments(**options)
            super().__init__(model, args, **others)

    class Parallel(TrainerMixin, Own):
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            assert self.args.n_gpu == 0 and self.args.train_batch_size == 5

    bare, net = (one.double() for one in pair(t5))
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    expected = train(bare, tmp_path / "bare", Own)
    found = train(net, tmp_path, Parallel, own={"device_ids": ["cpu", "cpu"]}, **saving)
    assert_as_bare(net, found, (bare, *expected))
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert set(saved) <= set(net.state_dict()) and "module" not in " ".join(saved)


class Restless(nn.Module):
    """Draws random numbers, and writes a buffer and attributes, in any mode."""

    calls: Tensor

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.layer, self.drop, self.mixes = nn.Linear(9, 3), nn.Dropout(0.5), mixes
        self.register_buffer("calls", torch.zeros(()))
        self.last: Any = None
        self.sum = torch.zeros(())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        assert labels is not None
        self.calls += 1
        self.sum += 1
        self.last = torch.rand(())
        logits = self.layer(self.drop(input_ids.float()))
        logits = logits - logits.mean(0) * 0.1 if self.mixes else logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_comparing_changes_nothing(tmp_path: pathlib.Path) -> None:
    from dataparallel.extras.hugging_face import Trainer

    net = Restless()
    seen: list[Any] = []

    def look(*_: Any) -> None:
        attributes = [dict(vars(module)) for module in net.modules()]
        seen.append([torch.get_rng_state(), net.sum, *net.state_dict().values()])
        seen[-1] = [[each.clone() for each in seen[-1]], attributes]

    class Looks(Trainer):
        def _wrap_model(self, *args: Any, **others: Any) -> Any:
            wrapper = super()._wrap_model(*args, **others)
            if not wrapper._forward_pre_hooks.get("seen"):
                wrapper.register_forward_pre_hook(look, prepend=True)
                wrapper.register_forward_pre_hook(look)
            return wrapper

    train(net, tmp_path, Looks, classes, {"device_ids": ["cpu", "cpu"]}, max_steps=1)
    (before, attributes), (after, its_attributes) = seen[:2]
    assert_all_close(after, before, rtol=0.0, atol=0.0)
    assert its_attributes == attributes


def test_what_trainer_refuses(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataparallel.extras.hugging_face import Trainer

    devices = {"device_ids": ["cpu", "cpu"]}
    with pytest.raises(
        ValueError, match=r"of each alone .* samples: 0\.5 and 0\.5.* mixes samples"
    ):
        train(Restless(mixes=True), tmp_path, Trainer, classes, devices)
    net = Restless()
    net.layer.register_forward_pre_hook(lambda module, args: args[0].squeeze(0).view(-1, 1, 9))
    with pytest.raises(RuntimeError, match="Expected target size") as raised:
        train(net, tmp_path, Trainer, classes, devices)
    assert (
        "ran on two samples, to compare. Pass compute_loss_func="
        in vars(raised.value)["__notes__"][0]
    )
    # A user who knows better is believed.
    options = {"wrapper_options": {"scalars": "mean"}}
    train(Restless(mixes=True), tmp_path, Trainer, classes, devices | options)
    wrapper = dp.DataParallel(Restless(), ["cpu", "cpu"])
    with pytest.raises(TypeError, match=r"got a DataParallel for a model; give it the bare model"):
        train(wrapper, tmp_path, Trainer, classes, label_names=["labels"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "dataparallel.extras.hugging_face")
    with pytest.raises(ImportError, match=r"'transformers'.*\[trainer\]"):
        importlib.import_module("dataparallel.extras.hugging_face")


IN_PROCESSES = """
import functools, os, pathlib, sys
import torch
from dataparallel.extras.hugging_face import Trainer
from tests import test_hugging_face as tests

folder = pathlib.Path(sys.argv[1])
devices = {"device_ids": ["cpu", "cpu"]}
_, net = tests.pair(tests.gpt2)
options = {"own": devices, "per_device_train_batch_size": 2, "max_steps": 2}
found = tests.train(net.double(), folder / "a", Trainer, **options)
if os.environ["RANK"] == "0":
    torch.save((found[0], net.state_dict()), folder / "found.pt")

bare, net = (one.double() for one in tests.pair(functools.partial(tests.bert, "MaskedLM")))
expected = tests.train(bare, folder / "b", per_device_train_batch_size=2)
found = tests.train(net, folder / "c", Trainer, own=devices, per_device_train_batch_size=2)
tests.assert_as_bare(net, found, (bare, *expected))
"""


def test_several_processes(tmp_path: pathlib.Path) -> None:
    """Two processes with two replicas each: as the bare model in one, where the model divides.

    If the model does not divide, they are as torch's wrapper in two processes.
    """
    script = tmp_path / "script.py"
    script.write_text(IN_PROCESSES)
    launched(script, 2, ROOT, str(tmp_path), virtual=False)
    losses, state = torch.load(tmp_path / "found.pt")
    net, bare = (one.double() for one in pair(gpt2))
    net.load_state_dict(state)
    # Batches of four in one process are those of two in each of two processes.
    expected, _ = train(bare, tmp_path / "bare", per_device_train_batch_size=4, max_steps=2)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_all_close(net.parameters(), bare.parameters(), rtol=1e-6, atol=1e-8)
