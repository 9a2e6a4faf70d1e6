"""SentencePiece models with T5's special tokens: `<pad>` 0, `</s>` 1, `<unk>` 2, and sentinels at the end.

There are two kinds of `.model` files:

    Google's (t5_32k)     32,000 subwords without sentinels; 100 sentinels are added, <extra_id_k> = 32099 - k
    `lmtools vocab`       the sentinels are user-defined symbols in the file, <extra_id_k> = size - 1 - k

Sentinels in a file are read by their names, wherever they are; mT5's are called ▁<extra_id_k>.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece

from lm_experiments_tools.data.text.tokenizer import (
    DEFAULT_EXTRA_IDS,
    MASK_PIECES,
    MODEL_NAMES,
    Tokenizer,
    find_sentinels,
    read_config,
    sentinel_piece,
)
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _UNUSED = 1, 2, 5  # ModelProto.SentencePiece.Type
_SAMPLE_TEXTS = (  # what a saved tokenizer has to encode as the model does, besides each piece
    "The quick brown fox, aged 7.5 years, didn't jump over 1,234 lazy dogs (in New York)!",
    "  Two  spaces   before,  between and after  ",
    "A tab\tin a line, a non-breaking\u00a0and an ideographic\u3000space, zero\u200bwidth",
    "Na\u00efve caf\u00e9s, cafe\u0301s, \ufb01ne \uff34\uff25\uff38\uff34, \u201cquotes\u201d \u2013 \u20ac5",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u03ba\u03cc\u03c3\u03bc\u03b5! \u4f60\u597d \U00013080 \U0001f600",
    "https://example.org/a_b?c=1&d=<e> def f(x): return {x: 'y'}",
)


def read_model(path: Path, extra_ids: int | None) -> SentencePieceTokenizer | None:
    """Read a `.model` file, or the one in a T5 tokenizer's folder; see `Tokenizer.load`.

    Returns:
        None for other tokenizers, and for a folder whose other files name tokens that the model does not contain.
    """
    config = read_config(path if path.is_dir() else path.parent)
    is_t5 = str(config.get("tokenizer_class") or "T5Tokenizer").startswith("T5Tokenizer")
    if path.is_file():
        model = None if path.suffix in (".json", ".txt") else path
    else:
        model = next((path / name for name in MODEL_NAMES if is_t5 and (path / name).is_file()), None)
    if model is None:
        return None
    if extra_ids is None:  # as many as the T5 tokenizer in this folder adds
        named = [text for text in _extra_tokens(config) if text.startswith("<extra_id_")] if is_t5 else []
        extra_ids = (config.get("extra_ids") if is_t5 else 0) or len(named) or DEFAULT_EXTRA_IDS
    found = SentencePieceTokenizer(model, model.read_bytes(), extra_ids)
    if path.is_dir() and (other := _other_tokens(path, config, found)):
        logger.info("%s is read by AutoTokenizer: %s is not all of it, but lacks %s", path, model.name, other[:3])
        return None
    return found


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    lists = [config.get(name) or () for name in ("extra_special_tokens", "additional_special_tokens")]
    return [_text(token) for tokens in lists for token in tokens]


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _other_tokens(folder: Path, config: dict[str, Any], model: SentencePieceTokenizer) -> list[Any]:
    """Tokens in the other files of a T5 tokenizer that the model lacks, or has with another id or role."""
    saved = read_config(folder, "tokenizer.json")
    vocab = saved.get("model", {}).get("vocab") or {}
    ids = vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    ids |= {token["content"]: token["id"] for token in saved.get("added_tokens", ())}
    unknown: list[Any] = []
    if model.path.name == MODEL_NAMES[0]:  # otherwise T5Tokenizer does not find it
        ids |= {_text(token): int(index) for index, token in config.get("added_tokens_decoder", {}).items()}
        ids |= read_config(folder, "added_tokens.json")
        unknown = [text for text in _extra_tokens(config) if text not in model.pieces]
        roles = {role: _text(config[f"{role}_token"]) for role in ("pad", "eos", "unk") if config.get(f"{role}_token")}
        unknown += [text for role, text in roles.items() if model.find(text) != model.roles[role]]
    return unknown + [piece for piece, index in ids.items() if model.find(piece) != index]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, as T5 uses it."""

    word_mark = "\u2581"

    def __init__(self, path: Path, content: bytes, extra_ids: int):
        self.path, self._content, self._extra_ids = path, content, extra_ids
        model = _parse_model(path, content)
        trainer, self._num_pieces = model.trainer_spec, len(model.pieces)
        ids = {piece.piece: index for index, piece in enumerate(model.pieces)}
        inside = find_sentinels(ids, trainer.model_type == trainer.UNIGRAM)
        self.size = self._num_pieces + (0 if inside else extra_ids)
        sentinel_ids = inside or range(self.size - 1, self._num_pieces - 1, -1)
        names = {} if inside else {sentinel_piece(k): index for k, index in enumerate(sentinel_ids)}
        self.pieces = ids | names
        special = {"padding": trainer.pad_piece or "<pad>", "end-of-sequence": trainer.eos_piece or "</s>"}
        for role, piece in special.items():
            if piece not in ids:
                raise UserError(
                    f"vocabulary {path} has no {role} piece {piece!r}, which T5 needs; train one with `lmtools vocab`"
                )
        # By type, not by trainer_spec.unk_id: edited models keep a stale number there.
        unk_id = next((i for i, piece in enumerate(model.pieces) if piece.type == _UNKNOWN), None)
        if unk_id is None:
            raise UserError(f"vocabulary {path} has no unknown-token piece; train one with `lmtools vocab`")
        mask_id = next((ids[piece] for piece in MASK_PIECES if piece in ids), None)
        roles = {"pad": ids[special["padding"]], "eos": ids[special["end-of-sequence"]], "unk": unk_id}
        self._set_ids({**roles, "bos": ids.get(trainer.bos_piece or "<s>"), "mask": mask_id}, sentinel_ids)
        for index in inside:
            # An unused piece keeps its id but is never produced by encoding: text cannot forge a sentinel.
            model.pieces[index].type = _UNUSED
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def __reduce__(self) -> tuple:
        return SentencePieceTokenizer, (self.path, self._content, self._extra_ids)

    @cached_property
    def encode_by(self) -> str:
        """Unit of text that is encoded separately, "line" or "document".

        It is "line" if newlines are encoded as spaces (as in T5), so that the lines of a document do not affect each
        other. No setting of a model says so: its normalization is compiled.
        """
        keeps_newlines = "\n" in self._processor.decode(self._processor.encode("a\nb"))
        marks_words = self.word_mark in "".join(self._processor.encode("a", out_type=str))
        return "line" if marks_words and not keeps_newlines else "document"

    @cached_property
    def fingerprint(self) -> str:
        model = _parse_model(self.path, self._content)
        sentinels = dict.fromkeys(self.sentinel_ids.tolist())
        pieces = [(index, p.piece, p.score, p.type) for index, p in enumerate(model.pieces) if index not in sentinels]
        how = model.trainer_spec
        parts = [pieces, list(sentinels), self.size, how.model_type, how.byte_fallback, how.treat_whitespace_as_suffix]
        return hashlib.sha256(json.dumps(parts).encode() + model.normalizer_spec.SerializeToString()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, in one call and one thread."""
        return self._processor.encode(list(texts), num_threads=1)

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def _num_bytes(self, index: int, piece: str) -> int:
        if index >= self._num_pieces or self._processor.is_control(index):
            return 0
        return 1 if self._processor.is_byte(index) else super()._num_bytes(index, piece)

    def save(self, directory: str | os.PathLike) -> None:
        """Write Hugging Face tokenizer files from which `AutoTokenizer.from_pretrained(directory)` gives the same ids.

        The files are those of a T5Tokenizer if it gives the same ids, else of a plain fast tokenizer.

        Raises UserError: neither gives the same ids.
        """
        from transformers import T5Tokenizer

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        model = _parse_model(self.path, self._content)
        names = [sentinel_piece(k) for k in reversed(range(len(self.sentinel_ids)))]
        is_last = names and [piece.piece for piece in model.pieces[-len(names) :]] == names
        if is_last:  # as in Google's: T5Tokenizer adds `extra_ids` of its own
            del model.pieces[-len(names) :]
        (directory / "spiece.model").write_bytes(model.SerializeToString())
        num_added = len(names) if is_last or self.size > self._num_pieces else 0
        config = {"tokenizer_class": "T5Tokenizer", "extra_ids": num_added}
        config |= {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "added_tokens.json"):  # from_pretrained would read those of another tokenizer
            (directory / name).unlink(missing_ok=True)
        # From the folder: T5Tokenizer(vocab_file=...) ignores the file and builds a vocabulary of 104 tokens.
        tokenizer = T5Tokenizer.from_pretrained(str(directory))
        if self._difference(tokenizer):
            (directory / "spiece.model").unlink()
            tokenizer = self._fast_tokenizer(model)
            if difference := self._difference(tokenizer):
                raise UserError(f"vocabulary {self.path} cannot be saved as a Hugging Face tokenizer: {difference}")
        tokenizer.save_pretrained(str(directory))

    def _difference(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The first difference to a tokenizer of transformers in tokens or the ids of texts; "" if there is none.

        The order of the ids of a text may differ: rounding decides it where two segmentations score the same.
        """
        theirs, model = tokenizer.get_vocab(), self._processor
        if self.pieces != theirs or tokenizer.eos_token_id != self.eos_id:
            odd = min(self.pieces.items() ^ theirs.items(), key=lambda item: item[1], default=("</s>", self.eos_id))
            return f"transformers makes {len(theirs)} tokens of its {self.size}, the first other one is {odd}"
        no_text = {*self.special_ids.tolist(), *(i for i in range(self._num_pieces) if model.is_byte(i))}
        ordinary = (i for i in range(self._num_pieces) if not (i in no_text or model.is_control(i)))
        texts = [*_SAMPLE_TEXTS, *(model.id_to_piece(index).replace(self.word_mark, " ") for index in ordinary)]
        backend = tokenizer.backend_tokenizer  # a third faster than the tokenizer around it
        backend.encode_special_tokens = True  # as text
        found = backend.encode_batch_fast(texts, add_special_tokens=False)
        backend.encode_special_tokens = False
        for text, expected, ids in zip(texts, self.encode_batch(texts), (row.ids for row in found), strict=True):
            if sorted(ids) != sorted(expected):
                return f"it encodes {text!r} as {expected[:8]}, transformers as {ids[:8]}"
        return ""

    def _fast_tokenizer(self, model: Any) -> PreTrainedTokenizerBase:
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
            extra_special_tokens=[sentinel_piece(k) for k in reversed(range(len(self.sentinel_ids)))],
            pad_token=pad,
            eos_token=eos,
            unk_token=unk,
        )


def _parse_model(path: Path, content: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
    except DecodeError:
        model = None
    if model is None or not model.pieces:
        raise UserError(f"{path} is not a SentencePiece model ({len(content)} bytes); give the .model file")
    return model
