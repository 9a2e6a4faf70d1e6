"""Hugging Face tokenizers trained on made-up text, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    f"The naïve word{i} counts\n\n  {i * 37} things, “{'x' * (i % 5)}” <extra_id_0> [MASK] </s>\tend"
    for i in range(60)
]
BERT_LIKE = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


def byte_level_tokenizer(path: Path, special: Sequence[str] = (*BERT_LIKE, "[unused0]", "[unused1]")) -> Path:
    """A tokenizer.json of byte-level BPE, as GPT-2's and ModernBERT's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(path))
    return path


def byte_fallback_tokenizer(folder: Path, sentinels: int = 30, special: Sequence[str] = ()) -> Path:
    """The folder of BPE with `\u2581` for a space, bytes for rare characters and <unusedN>, as Gemma's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    unused, in_bytes = (f"<unused{i}>" for i in range(sentinels)), (f"<0x{i:02X}>" for i in range(256))
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *unused, *in_bytes, *special]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(str(folder))
    return folder
