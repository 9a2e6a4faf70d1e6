"""Load tokenizers for fine-tuning from a folder, the Hugging Face Hub or a SentencePiece model."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.checkpoint.source import ModelFiles, Source, hub_source
from lm_experiments_tools.data.examples.example_encoder import added_end
from lm_experiments_tools.data.text.hf_tokenizer import check_words, load_pretrained, read_pretrained
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.adapters import new_token_names
from lm_experiments_tools.models.build import register_own_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lm_experiments_tools.config.finetuning import FinetuningArgs

logger = logging.getLogger(__name__)

_TOKENIZER_SETTINGS = (
    "bos_token", "eos_token", "unk_token", "pad_token", "extra_special_tokens", "model_max_length", "padding_side",
    "truncation_side", "clean_up_tokenization_spaces", "chat_template",
)  # fmt: skip


def load_tokenizer(args: FinetuningArgs, files: ModelFiles | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `--tokenizer` names, or the one saved with the model's weights. Raises UserError.

    EOS replaces a missing padding token. `files` are the model's, if they are already open.
    """
    files = files or ModelFiles(args)
    flag, name = files.tokenizer_flag
    named = f"{flag} {name}"
    tokenizer = named_tokenizer(name, flag, None if Path(name).is_file() else files.tokenizer)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise UserError(f"{named}: the tokenizer has neither a padding nor an end-of-text token to pad with.")
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: %s, its end of text, is used", tokenizer.eos_token)
    # Without the languages of sources and targets its tokens would be those of another one, without a word.
    if hasattr(tokenizer, "set_tgt_lang_special_tokens"):
        raise UserError(f"{named}: tokenizers that mark languages (mBART's, NLLB's) are not supported.")
    if args.peft == "new_tokens":
        tokenizer.add_tokens(new_token_names(args), special_tokens=True)
    return tokenizer


def named_tokenizer(name: str, flag: str, source: Source | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, a SentencePiece model or the Hub, unchanged. UserError, which names `flag`."""
    path, named = Path(name), f"{flag} {name}"
    source = source or (Source(name, path) if path.exists() else hub_source(name, flag))
    tokenizer = read_tokenizer(source, named)
    check_words(tokenizer, named)
    return tokenizer


def read_tokenizer(source: Source, named: str) -> PreTrainedTokenizerBase:
    """Read a tokenizer from its location; `named` is the flag with its value, for error messages."""
    path = source.path or Path(source.name)
    if source.path is not None and path.is_dir():
        verify_model(path)
        register_own_models(source)
    return load_pretrained(named, lambda: read_pretrained(path), "name a tokenizer with --tokenizer")


def without_end(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a decoder's tokenizer that adds no EOS after prompts, after which the decoder would start another text.

    Its class becomes the general one, because T5Tokenizer appends EOS whatever its files say. Slow tokenizers (ByT5's)
    are returned unchanged.
    """
    ends = added_end(tokenizer)
    if not ends or not tokenizer.is_fast:
        return tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    ids = tokenizer("a")["input_ids"][: -len(ends)]
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    begins = tokenizer.convert_ids_to_tokens(ids[: len(ids) - len(text)])
    settings = {name: tokenizer.init_kwargs[name] for name in _TOKENIZER_SETTINGS if name in tokenizer.init_kwargs}
    changed = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer), **settings)
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*begins, "$A"],
        pair=[*begins, "$A", "$B"],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in dict.fromkeys(begins)],
    )
    return changed
