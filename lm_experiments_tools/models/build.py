"""Build models with random weights, read their configurations from JSON files, and check both."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from lm_experiments_tools.checkpoint.source import CONFIG
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes, read_json
from lm_experiments_tools.models.presets import find_config, read_model_settings
from lm_experiments_tools.modules.devices import total_memory
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.names import allow_modules, nearest_names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lm_experiments_tools.checkpoint.source import Source

logger = logging.getLogger(__name__)

# Keys that configuration files on the Hugging Face Hub carry and that say nothing about the model's mathematics.
HUB_KEYS = {
    "_name_or_path", "architectures", "model_type", "n_ctx", "n_positions", "output_past", "task_specific_params",
}  # fmt: skip
# Keys that transformers writes into each config.json, and users into none of theirs.
SAVED_KEYS = {"architectures", "transformers_version"}
# What every PreTrainedConfig takes though its dataclass has no field for it.
GENERAL_KEYS = {
    "attn_implementation", "bos_token_id", "decoder_start_token_id", "dtype", "tie_word_embeddings", "torch_dtype",
}  # fmt: skip
# What `build_model` makes of a model of transformers (`attention.huggingface.enable`).
SPARSE_KEYS = {"sparse_config_cls", "sparse_attention"}
# Keys of the Hub's older files that transformers has given up, with the one value that changes nothing.
INERT_VALUES = {"gradient_checkpointing": False, "position_embedding_type": "absolute"}
_ROLES = ("pad", "eos", "bos", "cls", "sep", "mask")  # of special tokens
# What constructors of transformers and torch raise for a value that they cannot use.
REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    SafetensorError, StrictDataclassError, TypeError, ValueError, re.error,
)  # fmt: skip
_LONGEST_REASON = 300  # in characters, of what a library says
# Kinds of model of our own: importing their package makes transformers know them.
OWN_PACKAGES = {"lm_experiments_t5": "modeling_t5", "lm_experiments_bert": "modeling_bert"}
# Classes of our own, which vary what transformers' class of the same kind does not.
OWN_CLASSES = {
    "bert": "modeling_bert.modeling_bert:BertForPreTraining",
    "t5": "modeling_t5:T5ForConditionalGeneration",
}


def register_own_models(source: Source) -> None:
    """Register this package's model classes with transformers' Auto classes, if config.json names one of them."""
    if package := OWN_PACKAGES.get(source.config.get("model_type")):
        importlib.import_module(package)


def load_model_config(
    path_or_preset: str | Path, config_cls: type | None = None, *, trusted: bool = True
) -> PreTrainedConfig:
    """Read a model configuration from a JSON file, whose key `base` may name another file with the remaining values.

    Unknown keys are allowed in a config.json that transformers saved, as by AutoConfig, and refused elsewhere.
    `tie_word_embeddings: false` is kept, which transformers' T5Config would overwrite. Raises UserError.

    Args:
        path_or_preset: a JSON file, or the name of a shipped preset (`t5-small`; see `presets.list_presets`).
        config_cls: the model's `config_class`; None takes transformers' class for the file's `model_type`.
        trusted: True if the user named this file, so user-defined classes in it are imported; False for a config.json
            next to weights.
    """
    path = find_config(path_or_preset)
    written = read_json(path)
    is_saved = "base" not in written and (path.name == CONFIG or not written.keys().isdisjoint(SAVED_KEYS))
    values = read_model_settings(path) if trusted else written
    if trusted:
        allow_modules(values.values())
    config_cls = config_cls or _config_class(values.get("model_type"), path)
    kinds = [getattr(cls, name, None) for cls in config_cls.__mro__ for name in ("model_type", "variant_type")]
    if values.get("model_type", kinds[0]) not in kinds:
        raise UserError(
            f"{path} describes a '{values['model_type']}' model, but {config_cls.__name__} is a '{kinds[0]}': choose "
            "another --model_cls."
        )
    known = _known_keys(config_cls)
    inert = {key for key, value in INERT_VALUES.items() if key not in known and values.get(key) == value}
    values = {key: value for key, value in values.items() if key not in inert}
    undeclared = [key for key in values if key not in known]
    for key in undeclared:
        ours = _class_that_knows(key, kinds)
        if ours is not None or not is_saved:
            advice = f", which --model_cls {ours} understands" if ours else nearest_names(key, known)
            raise UserError(f"{path}: {config_cls.__name__} has no '{key}'{advice}.")
    if undeclared:
        logger.info("%s: %s declares no %s, passed on as they are", path, config_cls.__name__, ", ".join(undeclared))

    with refusals_named(f"{path} is refused by {config_cls.__name__}"):
        values = _with_floats(values, config_cls)
        config = config_cls(**{key: value for key, value in values.items() if key != "model_type"})
    if "tie_word_embeddings" in values:
        config.tie_word_embeddings = values["tie_word_embeddings"]
    return _with_start(config)


def _with_start(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of an encoder-decoder with a start token: padding, as T5's, where the file names none."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None)
    return config


@contextlib.contextmanager
def refusals_named(what: str) -> Iterator[None]:
    """Context in which errors of transformers, peft and torch become a UserError that begins with `what`.

    These are constructors that refuse a value, files that are no model or need remote code, and unfit adapters.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except UnpicklingError as error:  # torch's own message advises to unpickle anything
        raise UserError(f"{what}: its weights are a pickle with more than tensors: use safetensors.") from error
    except REFUSALS as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"{what}: {reason[:_LONGEST_REASON] or type(error).__name__}") from error


def set_special_tokens(config: PreTrainedConfig, ids: Mapping[str, int | None], model_cls: type) -> None:
    """Give the configuration of a new model the special tokens of its vocabulary, before the model is built.

    A key of another role follows the token that it was equal to: BART's decoder starts with its end token.

    Args:
        ids: id of each role (pad, eos, bos, cls, sep, mask); None for one that the vocabulary lacks.
        model_cls: the model's class. One that generates gets an end token even if its configuration has none.
    """
    always = ("pad", "eos") if hasattr(model_cls, "can_generate") and model_cls.can_generate() else ("pad",)
    new = {role: ids[role] for role in _ROLES if ids.get(role) is not None}
    new.setdefault("bos", new.get("eos", new["pad"]))  # a text begins after the end of another
    parts = [getattr(config, name, None) for name in getattr(type(config), "sub_configs", ())]
    for part in filter(None, [*parts, config]):
        old = {key: value for key, value in vars(part).items() if key.endswith("_token_id") and value is not None}
        now = {f"{role}_token_id": new[role] for role in new if role in always or f"{role}_token_id" in old}
        for key in old.keys() - now.keys():
            same = [role for role in new if old.get(f"{role}_token_id") == old[key]]
            now |= {key: new[same[0]]} if same else {}
        for key, number in now.items():
            if old.get(key) != number:
                logger.info("%s of the model is %s, that of the vocabulary (was %s)", key, number, old.get(key))
                setattr(part, key, number)


def set_decoder_start(model: nn.Module) -> None:
    """Set `decoder_start_token_id` for generation to the token with which the model starts labels in training.

    T5Gemma starts with its decoder's BOS, other models with the configuration's `decoder_start_token_id`.
    """
    config = model.config
    if not getattr(config, "is_encoder_decoder", False):
        return
    is_gemma = config.model_type in ("t5gemma", "t5gemma2")
    start = config.decoder.bos_token_id if is_gemma else getattr(config, "decoder_start_token_id", None)
    if start is None:  # mBART's depends on its labels
        return
    for holder in filter(None, (config, getattr(model, "generation_config", None))):
        holder.decoder_start_token_id = start


def pretrained_config(name: str, config_cls: type | None = None) -> PreTrainedConfig:
    """Load the configuration of a model on the Hub or in a folder, by `config_cls` or AutoConfig. Raises UserError."""
    from transformers import AutoConfig, PreTrainedConfig

    with refusals_named(f"{name}: its configuration cannot be read"):
        values, _ = (config_cls or PreTrainedConfig).get_config_dict(name)
        try:
            return _with_start((config_cls or AutoConfig).from_pretrained(name, trust_remote_code=False))
        except StrictDataclassError:
            config_cls = config_cls or type(AutoConfig.for_model(values["model_type"]))
            return _with_start(config_cls.from_dict(_with_floats(values, config_cls)))


def _with_floats(values: dict, config_cls: type) -> dict:
    """1.0 for a 1 that JSON may hold in place of it, which transformers' strict classes refuse."""
    usual = config_cls()
    whole = {key for key, value in values.items() if type(value) is int and isinstance(getattr(usual, key, 0), float)}
    return {key: float(value) if key in whole else value for key, value in values.items()}


def build_model(model_cls: type, config: PreTrainedConfig, *, seed: int) -> PreTrainedModel:
    """Build a model with random weights, which depend only on the class, the configuration and `seed`.

    The global random state is unchanged. `tie_word_embeddings: false` unties only the output layer; transformers' T5
    would untie encoder and decoder too. A model of transformers with a layout in its configuration
    (`sparse_config_cls`, `sparse_attention`) gets block-sparse attention; see `attention.huggingface.enable`.
    """
    is_converted = takes_our_attention(config)
    check_size(model_cls, config)
    generator = torch.random.default_generator  # the CPU's alone, which is where models are initialised
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        with refusals_named(f"{model_cls.__name__} refuses this {type(config).__name__}"):
            model = model_cls(config)
    finally:
        generator.set_state(state)
    if getattr(config, "tie_word_embeddings", None) is False and getattr(model, "_tied_weights_keys", None):
        untie_only_output(model)
    if is_converted:
        from lm_experiments_tools.attention.huggingface import enable

        enable(model)
    set_decoder_start(model)
    return model


def check_size(model_cls: type, config: PreTrainedConfig, bytes_each: float = 4) -> None:
    """Raise UserError for a model whose weights, of `bytes_each` a parameter, need more than machine and GPUs have.

    They are counted on the meta device. A model that cannot be built there, or is built there anyway, is not checked.
    """
    from transformers.initialization import no_init_weights

    probe = torch.empty(0)
    if probe.is_meta or type(probe) is not torch.Tensor:
        return
    memory = total_memory()
    memory += sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    try:
        with torch.device("meta"), no_init_weights(), torch.random.fork_rng(devices=[]):
            model = model_cls(copy.deepcopy(config))
        # Without initial values weights are not tied either, and a shared one would count twice.
        model.tie_weights()
        needed = bytes_each * num_parameters(model).total
    except REFUSALS:  # building the model on the device raises the same error, and reports it
        return
    if needed > memory:
        raise UserError(
            f"{model_cls.__name__} with this configuration needs {human_bytes(needed)} for its weights, this machine "
            f"has {human_bytes(memory)}: check the sizes in {CONFIG} or in --model_cfg."
        )


def takes_our_attention(config: PreTrainedConfig) -> bool:
    """True if `attention.huggingface.enable` must convert a model of transformers to block-sparse attention.

    Raises UserError for another attention implementation, which would ignore the layout.
    """
    name = getattr(config, "_attn_implementation", None)
    named = [key for key in sorted(SPARSE_KEYS) if getattr(config, key, None) is not None]
    reads_them_itself = SPARSE_KEYS <= _own_keys(type(config))
    if name == "block_sparse" or (name is None and named):
        import lm_experiments_tools.attention.huggingface  # noqa: F401 - registers the name

        return not reads_them_itself
    if named and not reads_them_itself:
        raise UserError(f'attn_implementation "{name}" would ignore {" and ".join(named)}: leave it out.')
    return False


def enable_checkpointing(model: nn.Module) -> None:
    """Enable gradient checkpointing of the non-reentrant kind, so that adapters get gradients. Raises UserError."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"--gradient_checkpointing: {type(model).__name__} does not support it; leave it out.")
    # transformers' name for it since 5.23, which warns of the old one; a user's own model may have the old one alone
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


DROPOUTS = ("dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
DROPOUTS += ("embd_pdrop", "attn_pdrop", "resid_pdrop", "activation_dropout")
HEAD_DROPOUTS = ("classifier_dropout", "seq_classif_dropout")  # None: as the hidden layers'


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout probability of a model configuration. Raises UserError if it has none."""
    names = [name for name in (*DROPOUTS, *HEAD_DROPOUTS) if getattr(config, name, None) is not None]
    if not names:
        raise UserError(f"--dropout_rate: {type(config).__name__} has no dropout to set; leave the flag out")
    for name in names:
        setattr(config, name, rate)


def set_z_loss(config: PreTrainedConfig, weight: float) -> None:
    """Set the weight of the z-loss (see `token_loss`) in a configuration. Raises UserError if the model has none."""
    if not hasattr(type(config), "z_loss"):  # an instance has any key of its file
        raise UserError(
            f"--z_loss: the model of {type(config).__module__}.{type(config).__name__} computes its own loss, without "
            "z-loss: choose --model_cls modeling_t5:T5ForConditionalGeneration, or leave the flag out"
        )
    config.z_loss = weight


def first_position(model: nn.Module) -> int:
    """Position ID that a model gives to the first token: 0, or padding index + 1 in RoBERTa."""
    tables = [m for name, m in model.named_modules() if name.rpartition(".")[2] == "position_embeddings"]
    return max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)


def check_positions(config: PreTrainedConfig, length: int, of_what: str, first: int = 0) -> None:
    """Raise UserError for inputs longer than a model's learned absolute positions; warn for rotary ones.

    `of_what` names the flags that set the length; `first` is the position ID of the first token (`first_position`).
    """
    config = config.get_text_config(decoder=True)  # T5Gemma's is in its parts
    positions = getattr(config, "max_position_embeddings", None)
    kind = getattr(config, "position_embedding_type", "absolute")
    kind = "rotary" if hasattr(config, "rope_parameters") else kind
    if positions is None or length <= positions - first:
        return
    problem = f"{of_what} is more than the {positions - first} positions of the model (max_position_embeddings)"
    if kind in ("absolute", "relative_key", "relative_key_query"):
        raise UserError(f"{problem}: shorten it, or choose another model or configuration.")
    if kind == "rotary":
        logger.warning("%s: its rotary positions go on, but beyond those of its training it is usually worse", problem)


def check_vocabulary(config: PreTrainedConfig, vocabulary_size: int) -> int:
    """Raise UserError unless the embedding has a row for every id of the tokenizer; returns the unused rows."""
    slack = config.vocab_size - vocabulary_size
    if slack < 0:
        rounded = -(-vocabulary_size // 128) * 128
        raise UserError(
            f"The vocabulary has {vocabulary_size} ids but the model's embedding only {config.vocab_size} rows: set "
            f"vocab_size in the model configuration to at least {vocabulary_size}, or add --model_options "
            f"vocab_size={rounded}; rows of loaded weights are kept."
        )
    return slack


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Result of `num_parameters`: how many parameters a model has; a matrix used twice is counted once."""

    total: int
    trainable: int
    embedding: int  # the token table, and the output layer where it is a matrix of its own


def num_parameters(model: nn.Module) -> ParameterCount:
    """Count the parameters of a model (on any device, meta included)."""
    parameters = list(model.parameters())
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    tables = [getter() for getter in getters if getter is not None]
    embedding = {table.weight for table in tables if table is not None}
    return ParameterCount(
        total=sum(number_of(p) for p in parameters),
        trainable=sum(number_of(p) for p in parameters if p.requires_grad),
        embedding=sum(number_of(p) for p in embedding),
    )


def number_of(parameter: torch.Tensor) -> int:
    """Number of elements of a full parameter, even if ZeRO-3 has split it over workers."""
    return getattr(parameter, "ds_numel", parameter.numel())


def _class_that_knows(key: str, kinds: list[str | None]) -> str | None:
    """The model class of our own that declares a key which transformers' configuration does not."""
    classes = (OWN_CLASSES[kind] for kind in kinds if kind in OWN_CLASSES)
    return next((name for name in classes if key in _own_keys(get_cls_by_name(name).config_class)), None)


def _config_class(model_type: str | None, path: Path) -> type:
    from transformers import CONFIG_MAPPING

    if model_type is None:
        raise UserError(f"{path} has no 'model_type' (e.g. t5), so the kind of model is unknown.")
    if model_type not in CONFIG_MAPPING:
        near = nearest_names(model_type, CONFIG_MAPPING.keys())
        raise UserError(f"{path}: transformers has no model_type '{model_type}'{near}.")
    return CONFIG_MAPPING[model_type]


def _own_keys(config_cls: type) -> set[str]:
    return {key for key in vars(config_cls()) if not key.startswith("_")}


def _known_keys(config_cls: type) -> set[str]:
    aliases = set(getattr(config_cls, "attribute_map", {}))
    return _own_keys(config_cls) | aliases | HUB_KEYS | GENERAL_KEYS | SPARSE_KEYS


def untie_only_output(model: PreTrainedModel) -> None:
    """Give the output layer weights of its own, also after `tie_weights`, while other weights stay tied (shared)."""
    output = model.get_output_embeddings()
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if output and p is output.weight}
    model._tied_weights_keys = {t: source for t, source in model._tied_weights_keys.items() if t not in names}
    model.config.tie_word_embeddings = True  # only so that transformers ties at all
    model.tie_weights()
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)
    model.config.tie_word_embeddings = False
