"""Turn a decoder of transformers into an encoder or an encoder-decoder, with its weights and its tokenizer.

    lmtools adapt google/gemma-2-2b --to encoder-decoder --out t5gemma-mine
    lmtools adapt gemma-2-2b --encoder gemma-2-9b --to encoder-decoder --out t5gemma-9b-2b
    lmtools adapt Qwen/Qwen3-0.6B --to encoder --mask_token "<|fim_pad|>" --out qwen3-encoder

Gemma 2, Gemma 3 (text), Llama, Qwen 2 and Qwen 3 become encoders with bidirectional attention and a masked-LM head.
Gemma 2 (as T5Gemma, with cross-attention) and Gemma 3 (as T5Gemma 2, with merged attention) become encoder-decoders.
The result is written only if it loads with bit-identical logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lm_experiments_tools.config.flags import NOT_NEGATIVE
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.export import check_shard_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lm_experiments_tools.models.saved import Opened

POSITIONAL = "source"
_NAMES_SHOWN = 4
_SPARE_WORDS = ("unused", "reserved", "fim_pad", "extra")  # of tokens that decoders' vocabularies keep free


@dataclass(frozen=True, kw_only=True)
class AdaptArgs:
    """Which decoder to adapt, and where to write the result."""

    source: str | None = None
    """Decoder: Hugging Face name or folder, run directory or checkpoint. As the first argument it needs no flag."""
    to: Literal["encoder", "encoder-decoder"] | None = None
    """Kind of model to make."""
    out: str | None = None
    """New folder."""
    encoder: str | None = None
    """--to encoder-decoder: another Gemma 2 for the encoder. None: the source."""
    model_cls: Literal["modeling_t5:T5ForConditionalGeneration"] | None = None
    """--to encoder-decoder: class to make. None: transformers' T5Gemma or T5Gemma 2."""
    mask_token: str | None = None
    """--to encoder: token of the vocabulary that stands for masked ones. None: the tokenizer's."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Of the random cross-attention that an --encoder of another width needs."""
    max_shard_size: str = "50GB"
    """Largest file of weights, as in 5GB or 500MB."""

    def __post_init__(self) -> None:
        if self.source is None or self.to is None or self.out is None:
            raise UserError(
                "lmtools adapt: name decoder, kind and folder, as in lmtools adapt gemma --to encoder --out mine."
            )
        for unread in ("encoder", "model_cls") if self.to == "encoder" else ("mask_token",):
            if getattr(self, unread) is not None:
                raise UserError(f"--{unread} is not read by --to {self.to}: leave it out.")
        check_shard_size(self.max_shard_size)


def run(args: AdaptArgs) -> None:
    """Adapt a decoder as the flags say, and print what was written."""
    from lm_experiments_tools.models.adapted import adapted_encoder, adapted_encoder_decoder
    from lm_experiments_tools.models.saved import Opened, open_saved
    from lm_experiments_tools.tools.hub_folder import new_folder, write_folder
    from modeling_t5.t5gemma import from_t5gemma

    with new_folder(Path(args.out), "--out") as temporary:
        opened = open_saved(args.source, flag="--source")
        tokenizer = None
        if args.to == "encoder":
            tokenizer = opened.tokenizer
            model = adapted_encoder(opened.model, _mask_token_id(args, tokenizer), tokenizer.pad_token_id)
        else:
            other = None if args.encoder is None else open_saved(args.encoder, flag="--encoder").model
            model = adapted_encoder_decoder(opened.model, other, seed=args.seed)
            model = model if args.model_cls is None else from_t5gemma(model.float())
        adapted = Opened(opened.source, model)
        loading = write_folder(adapted, temporary, args.max_shard_size)
        if tokenizer is not None and args.mask_token is not None:
            tokenizer.save_pretrained(temporary)
    _report(args, adapted, loading.code)


def _mask_token_id(args: AdaptArgs, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of the mask token, which the tokenizer then knows.

    Raises:
        UserError: there is none, or `--mask_token` is not in the vocabulary.
    """
    vocabulary, token = tokenizer.get_vocab(), args.mask_token
    if token is None and tokenizer.mask_token is not None:
        return tokenizer.mask_token_id
    if token is not None and token in vocabulary:
        tokenizer.mask_token = token
        return vocabulary[token]
    spare = sorted((n, name) for name, n in vocabulary.items() if any(word in name for word in _SPARE_WORDS))
    names = ", ".join(name for _, name in spare[:_NAMES_SHOWN])
    advice = f"for example {names}" if spare else "one that your text does not use"
    problem = f"--mask_token {token} is not in it" if token is not None else "it has no mask token"
    raise UserError(f"{args.source}: of its vocabulary, {problem}: name by --mask_token a token of it, {advice}.")


def _report(args: AdaptArgs, adapted: Opened, code: str) -> None:
    parameters = sum(weight.numel() for weight in adapted.model.parameters())
    print(
        f"{args.out}: {type(adapted.model).__name__} of {parameters:,} parameters; loaded back, its logits are equal."
    )
    print(code.replace("(folder)", f'("{args.out}")'))
