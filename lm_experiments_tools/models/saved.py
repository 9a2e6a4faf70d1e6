"""Open saved models unchanged with their original class, to inspect, export and evaluate them.

To train a saved model use `pretrained` instead, which may add a head or an adapter and freeze weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_experiments_tools.checkpoint.adapter_files import check_base, saved_by_name
from lm_experiments_tools.checkpoint.conversion import quiet_loading
from lm_experiments_tools.checkpoint.manifest import MANIFEST, parse_step
from lm_experiments_tools.checkpoint.source import Source, find_base, find_source
from lm_experiments_tools.checkpoint.weights import mean_state
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.models.adapters import check_peft, described_by
from lm_experiments_tools.models.build import (
    OWN_PACKAGES,
    check_size,
    pretrained_config,
    refusals_named,
    register_own_models,
    set_decoder_start,
)
from lm_experiments_tools.models.pretrained import AUTO_CLASSES, STRICTLY, kind_of, some_names
from lm_experiments_tools.models.tokenizers import read_tokenizer, without_end
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.names import resolve_configured
from lm_experiments_tools.tracking.run_directory import settings_in_use

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The Auto class by which a stranger reads a model: the first one that gives exactly its class.
READERS = (
    "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForPreTraining",
    "AutoModelForSequenceClassification", "AutoModel",
)  # fmt: skip
OURS = ("modeling_t5", "modeling_bert")
LIBRARIES = ("transformers", *OURS)  # packages whose classes are no user's


@dataclass(frozen=True)
class Opened:
    """A saved model that `open_saved` has loaded.

    Attributes:
        model: in float32 on the CPU, in evaluation mode; an adapter is merged into its base.
    """

    source: Source
    model: PreTrainedModel
    is_merged: bool = False

    @property
    def kind(self) -> str | None:
        """Kind of the model: "encoder", "encoder-decoder" or "decoder"; None for other models."""
        found = kind_of(self.model.config)  # None of a configuration of the user's own
        return "decoder" if found is None and self.model.can_generate() else found

    @property
    def writes_on(self) -> bool:
        """True if the model generates by continuing a text, as decoders do."""
        return self.kind == "decoder" and self.model.can_generate()

    @property
    def is_own(self) -> bool:
        """True if the model's class is a user's own, from neither transformers nor this package."""
        return type(self.model).__module__.partition(".")[0] not in LIBRARIES

    @property
    def reader(self) -> str | None:
        """Name of transformers' Auto class that loads the model (such as AutoModelForMaskedLM); None if none does."""
        import transformers

        for name in READERS:
            mapping = getattr(transformers, name)._model_mapping
            found = mapping[type(self.model.config)] if type(self.model.config) in mapping else ()
            if type(self.model) in (found if isinstance(found, tuple) else (found,)):
                return name
        return None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model, or for an adapter that of its base model. Raises UserError.

        A decoder's tokenizer appends no EOS to its prompts.
        """
        source = self.source
        if source.is_adapter and not any(source.path.glob("tokenizer*")):
            source = find_base(source)
        with quiet_loading():  # AutoTokenizer warns of a configuration whose kind is ours
            tokenizer = read_tokenizer(source, source.name)
        return without_end(tokenizer) if self.writes_on else tokenizer


def open_saved(name: str, model_cls: str | None = None, flag: str = "--from_pretrained") -> Opened:
    """Open a saved model: a folder, checkpoint, run directory (its best checkpoint, else its last) or Hub name.

    Args:
        model_cls: module:Class; None takes the class in config.json, or the user's own one that the run used.
    """
    source = find_source(name, flag)
    if source.is_file:
        raise UserError(f"{flag} {name} holds weights alone: make a folder of it by lmtools convert, and name that.")
    if source.is_adapter:
        return Opened(source, merged(source).eval(), is_merged=True)
    cls = saved_class(source, model_cls)
    return Opened(source, loaded(cls, source.name).eval())


def saved_class(source: Source, model_cls: str | None = None) -> type:
    """Find the model class that saved weights belong to, unless `model_cls` names one. Raises UserError."""
    if model_cls is not None:
        return get_cls_by_name(model_cls)
    register_own_models(source)
    architectures = source.config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if source.path is None:
        config = pretrained_config(source.name)
        named = (config.architectures or [None])[0]
    trained = run_settings(source).get("model_cls")
    if isinstance(trained, str) and trained.rpartition(":")[2] == named:
        if trained.partition(":")[0].partition(".")[0] not in LIBRARIES:
            return resolve_configured(trained, torch.nn.Module, f"{source.name} was trained by --model_cls {trained}")
    package = OWN_PACKAGES.get(source.config.get("model_type"), "transformers")
    found = getattr(importlib.import_module(package), named, None) if isinstance(named, str) else None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        problem = f"the class {named} of config.json is not in {package}" if named else "config.json names no class"
        raise UserError(f"{source.name}: {problem}: give --model_cls.")
    return found


def run_settings(source: Source) -> dict[str, Any]:
    """Read the arguments of the training run that a checkpoint belongs to; empty outside a run directory."""
    folder = run_folder(source)
    return (settings_in_use(folder) or {}) if folder is not None else {}


def run_folder(source: Source) -> Path | None:
    """Directory of the run that a checkpoint belongs to; None outside a run directory."""
    path = None if source.path is None else source.path.resolve()
    if path is None or parse_step(path.name) is None or not (path / MANIFEST).is_file():
        return None
    folder = path.parent.parent
    return folder if path.parent.name == "checkpoints" and (folder / "config.json").is_file() else None


def position_of(checkpoint: Path) -> dict[str, int]:
    """Read how far training was at a checkpoint: its step, samples and tokens."""
    state = read_json(checkpoint / "trainer_state.json").get("state", {})
    counts = {name: state.get(f"consumed_{name}", 0) for name in ("samples", "tokens")}
    return {"step": parse_step(checkpoint.resolve().name), **counts}


def loaded(cls: type, folder: str, name: str | None = None) -> PreTrainedModel:
    """Load a model by `cls.from_pretrained`; UserError unless the files have all of its weights and no others."""
    name, called = name or folder, cls.__name__
    with refusals_named(f"{name}: it cannot be read as {called}"), quiet_loading(), torch.random.fork_rng(devices=[]):
        config_cls, known = getattr(cls, "config_class", None), {}
        if config_cls is not None:
            known["config"] = pretrained_config(folder, config_cls)
            check_size(cls, known["config"])
        model, info = cls.from_pretrained(folder, **known, **STRICTLY)
    for kind, what in (("missing_keys", "are missing"), ("unexpected_keys", "are not its own")):
        if info[kind]:
            number, names = len(info[kind]), some_names(sorted(info[kind]))
            raise UserError(f"{name} is no {called}: {number} of its weights {what} ({names}): check --model_cls.")
    if getattr(getattr(model, "generation_config", None), "decoder_start_token_id", None) is None:
        set_decoder_start(model)
    return model


@torch.no_grad()
def average_weights(model: torch.nn.Module, others: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Average the weights of several models, computed in float64, and store the mean in the first, `model`.

    UserError if others, (name for messages, model), have weights of other names or shapes, or other integers.
    """
    own = model.state_dict()

    def states() -> Iterator[dict[str, torch.Tensor]]:
        yield own
        for name, other in others:
            theirs = other.state_dict()
            shapes, others_shapes = ({key: x.shape for key, x in state.items()} for state in (own, theirs))
            differing = [key for key in {**own, **theirs} if shapes.get(key) != others_shapes.get(key)]
            differing += [
                k for k in own if not differing and not own[k].is_floating_point() and (own[k] != theirs[k]).any()
            ]
            if differing:
                raise UserError(f"--average {name} is another model: {some_names(differing)} differ")
            yield theirs

    for key, value in mean_state(states()).items():
        own[key].copy_(value)


def merged(adapter: Source) -> PreTrainedModel:
    """Load a LoRA adapter and merge it into its base model; a classifier's saved head is used too."""
    base = find_base(adapter)
    check_peft(f"the adapter {adapter.name}")
    import peft
    import transformers

    with described_by(adapter.base_named_in):
        kind = peft.PeftConfig.from_pretrained(str(adapter.path)).peft_type
    if kind != "LORA":
        raise UserError(
            f"{adapter.name} is an adapter of kind {kind}, which cannot be merged into its base: use LoRA."
        )
    if base.is_file:
        raise UserError(f"{base.name} holds weights alone: write the model by save_pretrained, and name its folder.")
    register_own_models(base)
    config = pretrained_config(base.name)
    classes = getattr(transformers, AUTO_CLASSES[kind_of(config) or "decoder"])
    heads = [v for k, v in saved_by_name(adapter.path).items() if k.endswith("classifier.bias")]
    names = adapter.label_names or [f"LABEL_{number}" for number in range(len(heads[0]) if heads else 0)]
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    check_size(classes._model_mapping[type(config)], config)
    with refusals_named(f"{base.name}: it cannot be read as {classes.__name__}"), quiet_loading():
        model, _ = classes.from_pretrained(base.name, config=config, **STRICTLY)
    model.base_fingerprint = base.fingerprint()
    with described_by(adapter.base_named_in):
        adapted = peft.PeftModel.from_pretrained(model, str(adapter.path))
    check_base(adapted, adapter.path)
    return adapted.merge_and_unload()
