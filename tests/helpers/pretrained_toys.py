"""Tiny pre-trained models in folders, with a tokenizer of single words."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.tokenizers import load_tokenizer

WORDS = 90
ROWS = 96  # of the embedding
SPREAD = 0.2  # of random weights; with the usual 0.02 all texts look alike to so small a model


def toy_tokenizer(pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    marks = [mark for mark in (pad, "</s>", "<unk>") if mark]
    vocabulary = {word: number for number, word in enumerate([*marks, *(f"w{i}" for i in range(WORDS - len(marks)))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token="</s>", unk_token="<unk>")


def t5_config(**changes) -> T5Config:
    sizes = dict(d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=ROWS, dropout_rate=0.0)
    return T5Config(**{**sizes, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, **changes})


def toy_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "encoder-decoder":
        return T5ForConditionalGeneration(t5_config())
    if kind == "decoder":
        return GPT2LMHeadModel(
            GPT2Config(
                **dict(
                    n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=ROWS, bos_token_id=1, eos_token_id=1
                ),
                initializer_range=SPREAD,
            )
        )
    sizes = dict(
        initializer_range=SPREAD, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return BertForPreTraining(BertConfig(vocab_size=ROWS, max_position_embeddings=64, **sizes))


def save_toy(kind: str, folder: Path, model: torch.nn.Module | None = None) -> Path:
    """Model and tokenizer as `from_pretrained` reads them."""
    model = model or toy_model(kind)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def toy_args(folder: Path | str | None, kind: str = "encoder-decoder", **changes) -> FinetuningArgs:
    task = {"encoder": "classification", "encoder-decoder": "text_to_text", "decoder": "text_to_text"}[kind]
    settings = dict(model_type=kind, task=task, data_path=("x",), valid_data_path="x", lr=1e-3)
    settings |= dict(input_seq_len=32) if kind == "encoder" else dict(input_seq_len=32, target_seq_len=16)
    return FinetuningArgs(**{**settings, "from_pretrained": None if folder is None else str(folder), **changes})


def made(args: FinetuningArgs, labels: Sequence[str] = ("no", "yes")) -> torch.nn.Module:
    """The model of these arguments, with the tokenizer beside it."""
    return pretrained_model(args, load_tokenizer(args), labels)


def toy_batch(kind: str, rows: int = 4, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (rows, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    labels = torch.randint(3, WORDS, (rows, 5), generator=generator)
    if kind == "encoder":
        labels = torch.arange(rows) % 2
    if kind == "decoder":
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
