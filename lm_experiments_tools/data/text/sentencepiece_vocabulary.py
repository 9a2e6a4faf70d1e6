"""SentencePiece vocabularies with T5's special tokens: `<pad>` 0, `</s>` 1, `<unk>` 2, and sentinels at the end.

There are two kinds of `.model` files:

    Google's (t5_32k)     32,000 subwords without sentinels; 100 sentinels are added, <extra_id_k> = 32099 - k
    `lmtools vocab`       the sentinels are user-defined symbols in the file, <extra_id_k> = size - 1 - k

Sentinels in a file are read by their names, wherever they are; mT5's are called ▁<extra_id_k>.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import sentencepiece

from lm_experiments_tools.data.text.vocabulary import (
    DEFAULT_EXTRA_IDS,
    MASK_PIECES,
    MODEL_NAMES,
    Vocabulary,
    find_sentinels,
    read_config,
    sentinel_piece,
)
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NORMAL, _UNKNOWN, _UNUSED = 1, 2, 5  # ModelProto.SentencePiece.Type
_SAMPLE_TEXTS = (  # what a saved tokenizer has to encode as the model does, besides each piece
    "The quick brown fox, aged 7.5 years, didn't jump over 1,234 lazy dogs (in New York)!",
    "  Two  spaces   before,  between and after  ",
    "A tab\tin a line, a non-breaking\u00a0and an ideographic\u3000space, zero\u200bwidth",
    "Na\u00efve caf\u00e9s, cafe\u0301s, \ufb01ne \uff34\uff25\uff38\uff34, \u201cquotes\u201d \u2013 \u20ac5",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u03ba\u03cc\u03c3\u03bc\u03b5! \u4f60\u597d \U00013080 \U0001f600",
    "https://example.org/a_b?c=1&d=<e> def f(x): return {x: 'y'}",
)


class SentencePieceVocabulary(Vocabulary):
    """A vocabulary read from a SentencePiece `.model` file, as T5 uses it.

    Attributes:
        num_pieces: number of subwords in the file; ids from here to `size` are added sentinels.
        sha256: hash of the file.
        identity: hash of everything that determines ids.
    """

    def __init__(self, path: Path, content: bytes, extra_ids: int):
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._content = content
        self._extra_ids = extra_ids
        model = _parse_model(path, content)
        self.num_pieces = len(model.pieces)
        id_of = {piece.piece: index for index, piece in enumerate(model.pieces)}
        inside = find_sentinels(id_of, model.trainer_spec.model_type == model.trainer_spec.UNIGRAM)
        self.size = self.num_pieces + (0 if inside else extra_ids)
        self.sentinel_ids = np.array(inside or self.size - 1 - np.arange(extra_ids), np.int64)
        self.num_sentinels = len(self.sentinel_ids)
        self.pad_id = self._special_id(id_of, model.trainer_spec.pad_piece or "<pad>", "padding")
        self.eos_id = self._special_id(id_of, model.trainer_spec.eos_piece or "</s>", "end-of-sequence")
        # By type, not by trainer_spec.unk_id: edited models keep a stale number there.
        self.unk_id = next((i for i, piece in enumerate(model.pieces) if piece.type == _UNKNOWN), -1)
        if self.unk_id < 0:
            raise UserError(f"vocabulary {path} has no unknown-token piece; train one with `lmtools vocab`")
        self.special_ids = [self.pad_id, self.eos_id, self.unk_id, *self.sentinel_ids.tolist()]
        if inside:
            # An unused piece keeps its id but is never produced by encoding: text cannot forge a sentinel.
            for index in self.sentinel_ids:
                model.pieces[int(index)].type = _UNUSED
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self.bos_id = self.find(model.trainer_spec.bos_piece or "<s>")
        self.mask_id = next((index for piece in MASK_PIECES if (index := self.find(piece)) is not None), None)

    @classmethod
    def read(cls, path: Path, extra_ids: int | None = None) -> SentencePieceVocabulary:
        """Read a `.model` file, or a folder that contains one of `MODEL_NAMES`; see `Vocabulary.load`."""
        if path.is_dir():
            path = next(path / name for name in MODEL_NAMES if (path / name).is_file())
        extra_ids = _extra_ids_beside(path) if extra_ids is None else extra_ids
        return cls(path, path.read_bytes(), extra_ids)

    def _special_id(self, id_of: dict[str, int], piece: str, role: str) -> int:
        if piece not in id_of:
            raise UserError(
                f"vocabulary {self.path} has no {role} piece {piece!r}, which T5 needs; train one with `lmtools vocab`"
            )
        return id_of[piece]

    @cached_property
    def encode_by(self) -> str:
        """Unit of text that is encoded separately, "line" or "document".

        It is "line" if newlines are encoded as spaces (as in T5), so that the lines of a document do not affect each
        other.
        """
        keeps_newlines = "\n" in self._processor.decode(self._processor.encode("a\nb"))
        marks_words = "\u2581" in "".join(self._processor.encode("a", out_type=str))
        return "line" if marks_words and not keeps_newlines else "document"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, in one call and one thread."""
        return self._processor.encode(list(texts), num_threads=1)

    def _decode_chunk(self, ids: list[int], leading_space: bool) -> str:
        if not ids:
            return ""
        starts_word = self._processor.id_to_piece(ids[0]).startswith("\u2581")  # decode() drops that space
        return (" " if starts_word and leading_space else "") + self._processor.decode(ids)

    def _piece(self, index: int) -> str:
        return self._processor.id_to_piece(index)

    def find(self, piece: str) -> int | None:
        index = self._processor.piece_to_id(piece)
        return index if self._processor.id_to_piece(index) == piece else None

    @property
    def token_bytes(self) -> np.ndarray:
        model, counts = self._processor, np.zeros(self.size, np.int64)
        for index in set(range(self.num_pieces)) - {*self.special_ids}:
            if not model.is_control(index):
                text = model.id_to_piece(index).replace("\u2581", " ")
                counts[index] = 1 if model.is_byte(index) else len(text.encode())
        return counts

    @cached_property
    def identity(self) -> str:
        model = _parse_model(self.path, self._content)
        sentinels = dict.fromkeys(self.sentinel_ids.tolist())
        pieces = [(index, p.piece, p.score, p.type) for index, p in enumerate(model.pieces) if index not in sentinels]
        how = model.trainer_spec
        parts = [pieces, list(sentinels), self.size, how.model_type, how.byte_fallback, how.treat_whitespace_as_suffix]
        return hashlib.sha256(json.dumps(parts).encode() + model.normalizer_spec.SerializeToString()).hexdigest()

    def save_tokenizer(self, directory: str | os.PathLike) -> None:
        """Write Hugging Face tokenizer files from which `AutoTokenizer.from_pretrained(directory)` gives the same ids.

        The files are those of a T5Tokenizer if it gives the same ids, else of a plain fast tokenizer.

        Raises:
            UserError: neither gives the same ids.
        """
        from transformers import T5Tokenizer

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        model = _parse_model(self.path, self._content)
        names = [sentinel_piece(k) for k in reversed(range(self.num_sentinels))]
        is_last = names and [piece.piece for piece in model.pieces[-len(names) :]] == names
        if is_last:  # as in Google's: T5Tokenizer adds `extra_ids` of its own
            del model.pieces[-len(names) :]
        (directory / "spiece.model").write_bytes(model.SerializeToString())
        num_added = len(names) if is_last or self.size > self.num_pieces else 0
        config = {"tokenizer_class": "T5Tokenizer", "extra_ids": num_added}
        config |= {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "tokenizer.json").unlink(missing_ok=True)  # from_pretrained would prefer an old one
        # From the folder: T5Tokenizer(vocab_file=...) ignores the file and builds a vocabulary of 104 tokens.
        tokenizer = T5Tokenizer.from_pretrained(str(directory))
        difference = self.first_difference(tokenizer)
        if difference:
            (directory / "spiece.model").unlink()
            tokenizer = self._fast_tokenizer(model)
            difference = self.first_difference(tokenizer)
        if difference:
            raise UserError(f"vocabulary {self.path} cannot be saved as a Hugging Face tokenizer: {difference}")
        tokenizer.save_pretrained(str(directory))

    def first_difference(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Compare tokens and the ids of texts with a tokenizer of transformers.

        The order of the ids of a text may differ: rounding decides it where two segmentations score the same.

        Returns:
            The first difference, for error messages; "" if there is none.
        """
        no_text, model = {*self.special_ids}, self._processor
        pieces = {model.id_to_piece(index): index for index in range(self.num_pieces)}
        pieces |= {sentinel_piece(k): i for k, i in enumerate(self.sentinel_ids.tolist()) if i >= self.num_pieces}
        theirs = tokenizer.get_vocab()
        if pieces != theirs or tokenizer.eos_token_id != self.eos_id:
            odd = min(pieces.items() ^ theirs.items(), key=lambda item: item[1], default=("</s>", self.eos_id))
            return f"transformers makes {len(theirs)} tokens of its {self.size}, the first other one is {odd}"
        ordinary = (i for i in range(self.num_pieces) if not (i in no_text or model.is_control(i) or model.is_byte(i)))
        texts = [*_SAMPLE_TEXTS, *(model.id_to_piece(index).replace("\u2581", " ") for index in ordinary)]
        backend = tokenizer.backend_tokenizer  # a third faster than the tokenizer around it
        backend.encode_special_tokens = True  # as text
        found = backend.encode_batch_fast(texts, add_special_tokens=False)
        backend.encode_special_tokens = False
        for text, expected, ids in zip(texts, self.encode_batch(texts), (row.ids for row in found), strict=True):
            if sorted(ids) != sorted(expected):
                return f"it encodes {text!r} as {expected[:8]}, transformers as {ids[:8]}"
        return ""

    def _fast_tokenizer(self, model) -> PreTrainedTokenizerBase:
        """The model's normalization, algorithm and pieces in `tokenizers`; `model` is without sentinels."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast
        from transformers.tokenization_utils_base import generate_merges

        trainer, rules = model.trainer_spec, model.normalizer_spec
        pad, eos, unk = (model.pieces[index].piece for index in (self.pad_id, self.eos_id, self.unk_id))
        if trainer.model_type == trainer.BPE:
            ids = {piece.piece: index for index, piece in enumerate(model.pieces)}
            scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
            merges = generate_merges(ids, scores)
            algorithm = models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=trainer.byte_fallback)
        else:
            scored = [(piece.piece, piece.score) for piece in model.pieces]
            algorithm = models.Unigram(scored, self.unk_id, trainer.byte_fallback)
        backend = Tokenizer(algorithm)
        steps = [normalizers.Replace("\n", " ")] if self.encode_by == "line" else []
        if rules.precompiled_charsmap:
            steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
        if rules.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
        backend.normalizer = normalizers.Sequence(steps)
        prepend = "always" if rules.add_dummy_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend, trainer.split_by_whitespace)
        strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
        joined = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(joined + strip)
        backend.post_processor = processors.TemplateProcessing(
            single=["$A", eos], pair=["$A", eos, "$B", eos], special_tokens=[(eos, self.eos_id)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            extra_special_tokens=[sentinel_piece(k) for k in reversed(range(self.num_sentinels))],
            pad_token=pad,
            eos_token=eos,
            unk_token=unk,
        )

    def __reduce__(self) -> tuple:
        return SentencePieceVocabulary, (self.path, self._content, self._extra_ids)


def _extra_ids_beside(path: Path) -> int:
    """Sentinels that the T5 tokenizer in whose folder a model lies puts on top of it; else as many as T5's."""
    config = read_config(path.parent)
    if not str(config.get("tokenizer_class", "")).startswith("T5Tokenizer"):
        return DEFAULT_EXTRA_IDS
    named = [*(config.get("extra_special_tokens") or ()), *(config.get("additional_special_tokens") or ())]
    listed = {str(name) for name in named if str(name).startswith("<extra_id_")}
    return config.get("extra_ids") or len(listed) or DEFAULT_EXTRA_IDS


def _parse_model(path: Path, content: bytes):
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
    except DecodeError:
        model = None
    if model is None or not model.pieces:
        raise UserError(f"{path} is not a SentencePiece model ({len(content)} bytes); give the .model file")
    return model
