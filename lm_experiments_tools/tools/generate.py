"""Generate text with a model, fill in blanks, or label texts.

    lmtools generate runs/t5 "The <extra_id_0> of the file is <extra_id_1>."
    lmtools generate runs/bert "The name of the [MASK] is a string."
    lmtools generate runs/gpt --file prompts.txt --do_sample --top_p 0.9 --json > written.jsonl

An encoder-decoder fills in blanks (<extra_id_0>, ...) or answers, an encoder lists the most likely tokens of each
mask, a decoder continues the text, a classifier predicts labels. A fine-tuned model gets the prefix it was trained
with. A run directory means its best checkpoint, or the last one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lm_experiments_tools.config.flags import COUNT, NOT_NEGATIVE, POSITIVE, Range, check_groups, needs
from lm_experiments_tools.data.text.byte_tokenizer import swap_sentinels
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.progress import make_bar

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BatchEncoding

    from lm_experiments_tools.models.saved import Opened

POSITIONAL = ("from_pretrained", "text")
_SENTINEL = re.compile(r"<extra_id_\d+>")


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """The model, its input texts, and how output is generated."""

    from_pretrained: str | None = None
    """Hugging Face name or folder, run directory or checkpoint. As the first argument it needs no flag."""
    text: tuple[str, ...] = ()
    """Texts. After the model they need no flag."""
    file: str | None = None
    """File with one text a line; - reads standard input."""
    model_cls: str | None = None
    """Class of the model, as module:Class. None: the one it was saved from."""
    batch_size: Annotated[int, COUNT] = 8
    """Texts of a batch."""
    max_new_tokens: Annotated[int, COUNT] = 64
    """Most tokens generated for a text."""
    num_beams: Annotated[int, COUNT] = 1
    """Beams of beam search. 1: greedy decoding."""
    do_sample: bool = False
    """Sample tokens instead of choosing the most likely."""
    temperature: Annotated[float, POSITIVE, needs("do_sample")] = 1.0
    """Divides the logits before sampling."""
    top_k: Annotated[int, NOT_NEGATIVE, needs("do_sample")] = 0
    """Sample from the K most likely tokens. 0: from all."""
    top_p: Annotated[
        float, Range(lambda value: 0 < value <= 1, "it must be above 0 and at most 1"), needs("do_sample")
    ] = 1.0
    """Sample from the smallest set of most likely tokens with this total probability."""
    seed: int = 0
    """Random seed of sampling."""
    top: Annotated[int, COUNT] = 5
    """Tokens to list for each mask of an encoder, or labels of a classifier."""
    json: bool = False
    """Print a JSON object a line instead of text."""

    def __post_init__(self) -> None:
        check_groups(self, (GenerateArgs,))
        if self.from_pretrained is None:
            raise UserError('lmtools generate: name a model and a text, as in lmtools generate runs/mine "A text".')
        if bool(self.text) == (self.file is not None):
            raise UserError("lmtools generate: give either texts after the model, or --file.")

    def options(self) -> dict[str, Any]:
        """Collect the arguments of transformers' `generate` from the flags."""
        chosen = {"max_new_tokens": self.max_new_tokens, "num_beams": self.num_beams, "do_sample": self.do_sample}
        if self.do_sample:
            chosen |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return chosen


def run(args: GenerateArgs) -> None:
    """Print the model's output for each text, batch by batch."""
    texts = _texts(args)
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries print when they are imported
        for answer in _all_answers(args, texts):
            is_utf8 = out.encoding.lower() in ("utf-8", "utf8")
            print(json.dumps(answer, ensure_ascii=not is_utf8) if args.json else _shown(answer), file=out, flush=True)


def _all_answers(args: GenerateArgs, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    import torch

    from lm_experiments_tools.checkpoint.source import find_source

    torch.manual_seed(args.seed)
    return (_fine_tuned if find_source(args.from_pretrained).task else _answers)(args, texts)


def _texts(args: GenerateArgs) -> list[str]:
    if args.file is None:
        texts = list(args.text)
    else:
        read = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8", errors="replace")
        texts = [line for line in read.splitlines() if line.strip()]
    if not texts or not all(text.strip() for text in texts):
        raise UserError("lmtools generate: a text is empty.")
    return texts


def _shown(answer: Mapping[str, Any]) -> str:
    lines = [answer["text"]]
    for words in answer.get("masks", ()):
        lines.append("  " + "  ".join(f"{entry['word']} {entry['probability']:.3f}" for entry in words))
    if "labels" in answer:
        lines.append("  " + "  ".join(f"{entry['label']} {entry['probability']:.3f}" for entry in answer["labels"]))
    written = answer.get("filled", answer.get("output"))
    if written is not None:
        lines.append("  " + (written if isinstance(written, str) else ", ".join(written)).replace("\n", "\n  "))
    return "\n".join(lines)


def _batches(count: int, size: int) -> Iterable[int]:
    """First texts of the batches, with a progress bar unless the terminal shows the answers."""
    return make_bar(range(0, count, size), desc="batches", show=not sys.__stdout__.isatty())


def _fine_tuned(args: GenerateArgs, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    from lm_experiments_tools.recipes.finetuner import FineTuner

    cls = {} if args.model_cls is None else {"model_cls": args.model_cls}
    tuner = FineTuner(args.from_pretrained, **cls)
    options = args.options() if tuner.args.model_type != "encoder" else {}
    for start in _batches(len(texts), args.batch_size):
        part = texts[start : start + args.batch_size]
        for text, output in zip(part, tuner.predict(part, batch_size=args.batch_size, **options), strict=True):
            yield {"text": text, "output": output}


def _answers(args: GenerateArgs, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    import torch

    from lm_experiments_tools.models.saved import open_saved

    opened = open_saved(args.from_pretrained, args.model_cls)
    model, tokenizer = opened.model, opened.tokenizer
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.can_generate():
        answer = _written
    elif opened.model.get_output_embeddings() is not None:
        answer = _masked
        if missing := [text for text in texts if mask_of(tokenizer) not in text]:
            raise UserError(f"the model fills in {mask_of(tokenizer)}, which is not in {missing[0][:60]!r}.")
    else:
        answer = _labelled
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    for start in _batches(len(texts), args.batch_size):
        part = texts[start : start + args.batch_size]
        with torch.no_grad():
            found = answer(opened, _encoded(opened, part, args), args)
        for text, entry in zip(part, found, strict=True):
            blanks = _SENTINEL.findall(text) if answer is _written and opened.kind == "encoder-decoder" else []
            yield {"text": text, **entry, **({"filled": filled(text, entry["output"])} if blanks else {})}


def mask_of(tokenizer: Any) -> str:
    """Return the mask token, or the one that `--task mlm` uses instead. Raises UserError if there is none."""
    from lm_experiments_tools.data.text.tokenizer import MASK_PIECES, sentinel_piece

    names = (*MASK_PIECES, sentinel_piece(0), f"▁{sentinel_piece(0)}")
    known = [token for token in names if token in tokenizer.get_vocab()]
    if tokenizer.mask_token is None and not known:
        raise UserError("the tokenizer has no mask_token: name it in tokenizer_config.json.")
    return tokenizer.mask_token or known[0]


def _encoded(opened: Opened, texts: Sequence[str], args: GenerateArgs) -> BatchEncoding:
    """The texts as a batch. For a decoder, rows are padded on the left and do not end with EOS."""
    from lm_experiments_tools.models.build import check_positions, first_position

    tokenizer, continues = opened.tokenizer, opened.writes_on
    rows = [swap_sentinels(tokenizer, tokenizer(text)["input_ids"]) for text in texts]
    length, what = max(map(len, rows)), f"a text of {max(map(len, rows))} tokens"
    if continues:
        rows = [row[:-1] if len(row) > 1 and row[-1] == tokenizer.eos_token_id else row for row in rows]
        length = max(map(len, rows)) + args.max_new_tokens
        what = f"a text of {max(map(len, rows))} tokens and {args.max_new_tokens} to be written (--max_new_tokens)"
    check_positions(opened.model.config, length, what, first_position(opened.model))
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="left" if continues else "right")
    return batch.to(opened.model.device)


def _written(opened: Opened, batch: BatchEncoding, args: GenerateArgs) -> list[dict[str, Any]]:
    read = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    rows = opened.model.generate(**read, **args.options(), pad_token_id=opened.tokenizer.pad_token_id)
    if opened.kind == "decoder":
        rows = rows[:, batch["input_ids"].shape[1] :]
    return [{"output": text_of(opened.tokenizer, row)} for row in rows.tolist()]


def text_of(tokenizer: Any, row: Sequence[int]) -> str:
    """Decode token ids to text, without the tokens that frame it, such as eos.

    Sentinels and users' own special tokens are text, as in the predictions of fine-tuning.
    """
    from lm_experiments_tools.data.examples.example_encoder import framing_ids

    hidden = framing_ids(tokenizer) | {tokenizer.mask_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    return tokenizer.decode([token for token in swap_sentinels(tokenizer, row) if token not in hidden]).strip()


def filled(text: str, output: str) -> str:
    """Fill the blanks of a text: replace each sentinel by the words that the model wrote for it.

    Args:
        output: the model's output, in which each sentinel precedes its words. A sentinel that it lacks stays.
    """
    parts = _SENTINEL.split(output)
    found = dict(zip(_SENTINEL.findall(output)[::-1], parts[:0:-1], strict=True))  # the first of two wins
    return _SENTINEL.sub(lambda match: found.get(match[0], match[0]).strip(), text)


def _logits(opened: Opened, batch: BatchEncoding) -> Tensor:
    from lm_experiments_tools.modules.inspection import forward_names

    names = forward_names(opened.model)
    output = opened.model(**{name: value for name, value in batch.items() if name in names})
    return output["logits"] if "logits" in output else output["prediction_logits"]


def _masked(opened: Opened, batch: BatchEncoding, args: GenerateArgs) -> list[dict[str, Any]]:
    tokenizer, logits = opened.tokenizer, _logits(opened, batch)
    (mask,) = swap_sentinels(tokenizer, [tokenizer.convert_tokens_to_ids(mask_of(tokenizer))])
    found = []
    for ids, scores in zip(batch["input_ids"], logits, strict=True):
        chosen = scores[ids == mask][:, : len(tokenizer)].softmax(-1).topk(min(args.top, len(tokenizer)))
        masks = []
        for row in zip(chosen.values.tolist(), chosen.indices.tolist(), strict=True):
            pairs = zip(*row, strict=True)
            masks.append([{"word": tokenizer.decode([token]).strip(), "probability": p} for p, token in pairs])
        found.append({"masks": masks})
    return found


def _labelled(opened: Opened, batch: BatchEncoding, args: GenerateArgs) -> list[dict[str, Any]]:
    if opened.reader != "AutoModelForSequenceClassification":
        raise UserError(f"{opened.source.name}: a {type(opened.model).__name__} neither generates nor labels texts.")
    logits, names = _logits(opened, batch), opened.model.config.id2label
    if opened.model.config.problem_type == "regression" or logits.shape[-1] == 1:
        return [{"output": [f"{value:.4g}" for value in row]} for row in logits.tolist()]
    several = opened.model.config.problem_type == "multi_label_classification"
    chosen = (logits.sigmoid() if several else logits.softmax(-1)).topk(min(args.top, logits.shape[-1]))
    rows = zip(chosen.values.tolist(), chosen.indices.tolist(), strict=True)
    return [{"labels": [{"label": names[i], "probability": p} for p, i in zip(*row, strict=True)]} for row in rows]
