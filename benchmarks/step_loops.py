"""The training loops that benchmarks/step.py compares: ours, transformers' in a bare loop and in Trainer, nanoT5's.

Each takes a `Shape` and batches, and trains until the batches end. nanoT5 is imported from a checkout of
github.com/PiotrNawrot/nanoT5: its model, optimizer and `train` are its own, and what transformers 5 took away from
under it is put back.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

Batches = Iterable[dict[str, Tensor]]


@dataclass(frozen=True)
class Shape:
    """What is trained: a preset of models_configs/, rows of `inputs` tokens, of T5 also `targets`."""

    preset: str
    rows: int
    inputs: int
    targets: int | None = None
    rounds: int = 4  # measured steps of each loop
    real_lengths: bool = False  # rows as long as texts are, padded to the longest of their batch

    @property
    def is_t5(self) -> bool:
        return self.targets is not None


def config_of(shape: Shape) -> Any:
    """The preset's configuration; T5's without dropout, as nanoT5 trains."""
    from lm_experiments_tools.models.build import load_model_config

    config = load_model_config(shape.preset)
    if shape.is_t5:
        config.dropout_rate = 0.0
    return config


def ours(shape: Shape, batches: Batches, precision: str, speed: str = "auto", **flags: Any) -> None:
    """As run_t5_pretraining.py and run_bert_pretraining.py build and train it, with these flags."""
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.models.from_args import model_from_args, model_source, optimizer_from_args
    from lm_experiments_tools.models.speed import choose_speed
    from lm_experiments_tools.modules.inspection import forward_names
    from lm_experiments_tools.recipes.common import labels_alone
    from lm_experiments_tools.training.losses import MODEL_LOSS, bert_loss
    from lm_experiments_tools.training.trainer import TrainingLoop

    values = {
        "model_cfg": shape.preset,
        "data_path": ("none",),
        "vocab" if shape.is_t5 else "vocab_file": "none",
        "input_seq_len": shape.inputs,
        "optimizer": "AdamWScale",
        "lr": 1e-3,
        "clip_grad_norm": 1.0,
        "iters": 10**6,
        "batch_size": shape.rows,
        "log_interval": 100,
        precision: True,
        "speed": speed,
        **({"dropout_rate": 0.0} if shape.is_t5 else {}),
        **flags,
    }
    values.pop("fp32", None)
    args = (T5PretrainingArgs if shape.is_t5 else BertPretrainingArgs)(**values)
    args, _ = choose_speed(args, dict.fromkeys(values, "given"))
    backend = get_backend(args)
    source = model_source(args, backend)
    model = model_from_args(args, source, source.config.vocab_size)
    loss = MODEL_LOSS
    if not shape.is_t5:
        loss = bert_loss(use_nsp=True, most_labels=labels_alone(args, backend, model))
    optimizer = optimizer_from_args(args, model)
    options = {"return_logits": False} if "return_logits" in forward_names(model) else None
    loader = DataLoader(batches, batch_size=None)
    TrainingLoop(args, backend, model, optimizer, loader, loss=loss, forward_kwargs=options).train()


def _transformers_model(shape: Shape, attention: str) -> nn.Module:
    name = "T5ForConditionalGeneration" if shape.is_t5 else "BertForPreTraining"
    config = config_of(shape)
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config, attn_implementation=attention)


def bare(shape: Shape, batches: Batches, precision: str, attention: str = "sdpa", compiled: bool = False) -> None:
    """transformers' model in the shortest loop that trains it, with torch's fused AdamW."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _transformers_model(shape, attention).to(device).train()
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for batch in DataLoader(batches, batch_size=None):
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trainer(shape: Shape, batches: Batches, precision: str, compiled: bool = False) -> None:
    """transformers' model in transformers' Trainer, as its examples set it up."""

    kind = "Seq2Seq" if shape.real_lengths else ""

    class Trainer(getattr(transformers, f"{kind}Trainer")):
        def get_train_dataloader(self) -> DataLoader:
            return self.accelerator.prepare(DataLoader(batches, batch_size=None))

    with tempfile.TemporaryDirectory() as folder:
        options = getattr(transformers, f"{kind}TrainingArguments")(
            folder,
            max_steps=10**6,
            per_device_train_batch_size=shape.rows,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            bf16=precision == "bf16",
            torch_compile=compiled,
        )
        Trainer(_transformers_model(shape, "sdpa"), options, train_dataset=batches).train()


NANOT5_MODEL = "nanoT5/utils/t5_model.py"  # of its checkout


def nanot5(shape: Shape, batches: Batches, precision: str, checkout: Path, compiled: bool = False) -> None:
    """nanoT5's model, AdamWScale and `train` on an Accelerator, as its main.py puts them together."""
    from accelerate import Accelerator

    parts = import_nanot5(checkout)
    config = transformers.T5Config.from_dict(config_of(shape).to_dict())
    config.tie_word_embeddings = False  # the constructor of transformers 5 overwrites it
    config.is_bf16 = torch.cuda.is_available() and precision == "bf16"
    torch.manual_seed(0)
    model = parts["t5_model"].MyT5(config)
    on_cpu = not torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = True
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if precision == "bf16" else "no")
    optimizer = parts["copied_utils"].AdamWScale(model.parameters(), lr=1e-3)
    schedule = transformers.get_constant_schedule(optimizer)
    parted = accelerator.prepare(model, optimizer, schedule, DataLoader(batches, batch_size=None))
    model, optimizer, schedule, loader = parted
    if compiled:
        model = torch.compile(model)
    never = 10**9
    args = types.SimpleNamespace(
        mode="pt",
        current_train_step=1,
        current_epoch=1,
        last_log=0.0,
        optim=types.SimpleNamespace(total_steps=never, grad_acc=1, grad_clip=1.0),
        logging=types.SimpleNamespace(every_steps=100, grad_l2=True, weights_l2=True),
        eval=types.SimpleNamespace(every_steps=never),
        checkpoint=types.SimpleNamespace(every_steps=never),
    )
    quiet = types.SimpleNamespace(log_stats=lambda **kwargs: None)
    parts["train_utils"].train(model, loader, None, accelerator, schedule, optimizer, quiet, args, None)


def import_nanot5(checkout: Path) -> dict[str, types.ModuleType]:
    """Its modules, without the packages it logs and measures by, and with what transformers 5 no longer offers."""
    from transformers.data import data_collator
    from transformers.modeling_utils import ModuleUtilsMixin
    from transformers.utils import PaddingStrategy

    missing = {"evaluate": {}, "neptune": {}, "omegaconf": {"OmegaConf": None, "open_dict": None}}
    missing |= {"datasets": {}, "datasets.iterable_dataset": {"IterableDataset": type("IterableDataset", (), {})}}
    for name, members in missing.items():  # what it would log and read data by
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(members)
    for name in ("nanoT5", "nanoT5.utils"):  # packages whose __init__ would import hydra
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    names = {"Any": Any, "Optional": Optional, "Union": Union, "PaddingStrategy": PaddingStrategy}
    names["PreTrainedTokenizerBase"] = transformers.PreTrainedTokenizerBase
    for name, value in names.items():
        setattr(data_collator, name, value)
        if hasattr(data_collator, "__all__"):
            data_collator.__all__.append(name)

    def additive(self: nn.Module, mask: Tensor, *_: Any, **__: Any) -> Tensor:
        while mask.dim() < 4:
            mask = mask[:, None]
        dtype = torch.float32 if self.dtype is None else self.dtype
        return (1.0 - mask.to(dtype)) * torch.finfo(dtype).min

    def extended(self: nn.Module, mask: Tensor, shape: tuple[int, ...], *_: Any, **__: Any) -> Tensor:
        if not self.config.is_decoder:
            return additive(self, mask)
        places = torch.arange(shape[1], device=mask.device)
        causal = (places[None] <= places[:, None]).to(mask.dtype)
        return additive(self, causal[None] * mask[:, None])

    ModuleUtilsMixin.invert_attention_mask = additive
    ModuleUtilsMixin.get_extended_attention_mask = extended
    names = ("t5_model", "copied_utils", "train_utils")
    return {name: importlib.import_module(f"nanoT5.utils.{name}") for name in names}


def with_cuda_graphs(shape: Shape, batches: Batches, precision: str) -> None:
    """Ours, each compiled block recorded as CUDA graphs by Inductor."""
    import torch._inductor.config

    torch._inductor.config.triton.cudagraphs = True
    ours(shape, batches, precision, compile=True)


LOOPS: dict[str, Callable[..., None]] = {
    "ours, --speed off": lambda *args: ours(*args, speed="off", compile=False),
    "ours": ours,
    "ours, not compiled": lambda *args: ours(*args, compile=False),
    "ours, compiled": lambda *args: ours(*args, compile=True),
    "ours, CUDA graphs": with_cuda_graphs,
    "transformers, bare loop": bare,
    "transformers, bare loop, compiled": lambda *args: bare(*args, compiled=True),
    "transformers Trainer": trainer,
    "transformers Trainer, compiled": lambda *args: trainer(*args, compiled=True),
    "nanoT5": nanot5,
    "nanoT5, compiled": lambda *args: nanot5(*args, compiled=True),
}
