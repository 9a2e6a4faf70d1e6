"""A T5 to start training from where there are minutes, not days: its initial values look at neighbours.

    python scripts/make_start.py --data data/default/train --vocab data/default/vocab.model --output data/default/start

writes a folder for `--init_checkpoint`. Nothing is trained. Three things that a T5 finds out slowly are its initial
values, and training changes them as any other:

- which tokens stand near: each head of self-attention but the last favours one offset, by its relative bias (so begins
  ConViT, arXiv 2103.10697);
- which answer is asked for: queries of cross-attention are its keys, so that a sentinel of the decoder finds its own
  place in the encoder's output, and what its values hold is passed on (cf. arXiv 2305.09828);
- which words stand in like places: embeddings are singular vectors of the positive mutual information of training
  tokens at most three apart (Levy and Goldberg 2014, "Neural word embedding as implicit matrix factorization").
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from lm_experiments_tools.config.cli import run_main
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import check_vocabulary as check_tokens
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model, check_vocabulary, load_model_config, set_special_tokens

REACH = 3  # tokens apart that still count as neighbours, by 1 / distance
MOST_TOKENS = 10_000_000  # the first so many are counted; their pairs take some 2 GB of memory
OFFSETS = (-1, 1, -2, 2, -3, 3)  # of the encoder's heads, in turn
LOOKS_BACK = (1, 0, 2, 3)  # of the decoder's, which sees what was before
FILES = ("config.json", "model.safetensors")
BIAS, MATCH, QUIET = 5.0, 2.0, 0.3


def neighbour_embeddings(tokens: Tensor, num_ids: int, width: int) -> Tensor:
    """Float [num_ids, width], rows of root mean square 1; those of ids without neighbours are 0.

    Args:
        tokens: int64 [num_tokens], the text.
    """
    pairs = torch.cat([torch.stack([tokens[:-n], tokens[n:]]) for n in range(1, REACH + 1)], dim=1)
    weights = torch.cat([torch.full((len(tokens) - n,), 1 / n) for n in range(1, REACH + 1)])
    follows = torch.sparse_coo_tensor(pairs, weights, (num_ids, num_ids), check_invariants=True).coalesce()
    counts = torch.cat([follows, follows.t()], dim=1).coalesce()  # what follows an id, what precedes it
    (ids, contexts), values = counts.indices(), counts.values()
    of_ids, of_contexts = (torch.sparse.sum(counts, dim=dim).to_dense() for dim in (1, 0))
    chance = of_ids[ids] * (of_contexts / values.sum())[contexts] ** 0.75  # not normalised: more than chance by far
    information = (values / chance).log()
    known = information > 0
    places = counts.indices()[:, known]
    matrix = torch.sparse_coo_tensor(places, information[known], counts.shape, check_invariants=True).coalesce()
    left, singular, _ = torch.svd_lowrank(matrix, q=min(width + 8, num_ids), niter=2)
    table = (left * singular.sqrt())[:, :width]
    table = nn.functional.pad(table, (0, width - table.shape[1]))
    table = table @ torch.linalg.qr(torch.randn(width, width)).Q  # no feature is larger than another
    length = table.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-3, table / length.clamp(min=1e-3) * width**0.5, 0.0)


@torch.no_grad()
def look_at_neighbours(model: nn.Module) -> None:
    """Set the initial values of a T5's attention; see above."""
    to_the_right = model.config.relative_attention_num_buckets // 2
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            weight.zero_()
            for head in range(weight.shape[1] - 1):
                offset = OFFSETS[head % len(OFFSETS)]
                both_ways = -offset if offset < 0 else to_the_right + offset
                weight[both_ways if name.startswith("encoder") else LOOKS_BACK[head % len(LOOKS_BACK)], head] = BIAS
        elif name.endswith(("SelfAttention.o.weight", "wo.weight")):
            weight.mul_(QUIET)  # at first a token is mostly itself
        elif name.endswith("EncDecAttention.k.weight"):
            attention = model.get_submodule(name.removesuffix(".k.weight"))
            attention.q.weight.copy_(weight * (MATCH * model.config.d_kv**-0.5))
            attention.o.weight.copy_(attention.v.weight.t())


def check_ids(data: str, tokens: np.ndarray, num_ids: int) -> None:
    """Refuse tokens that are too few or that the model has no embedding of."""
    least, most = tokens.min(initial=0), tokens.max(initial=0)
    if len(tokens) <= REACH or least < 0 or most >= num_ids:
        raise UserError(
            f"{data} holds {len(tokens):,} tokens with ids {'up' if least >= 0 else f'from {least}'} to {most}: at "
            f"least {REACH + 1} tokens are needed, of ids below the model's {num_ids}."
        )


def check_output(output: Path) -> None:
    """Refuse a file, and a folder that holds more than a start: a model there would be written over."""
    if output.exists() and not (output.is_dir() and {path.name for path in output.iterdir()} <= set(FILES)):
        raise UserError(f"--output {output} is there and is no start to start from: give another folder.")


def check_buckets(config: T5Config) -> None:
    """Refuse relative positions that have no bucket of their own for the neighbours looked at."""
    least = 4 * (max(map(abs, OFFSETS)) + 1)  # half of those of a direction are of one offset each
    if config.relative_attention_num_buckets < least:
        raise UserError(
            f"The model has {config.relative_attention_num_buckets} relative_attention_num_buckets, in which "
            f"neighbours share one: set at least {least} in the model configuration."
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="tokens to train on, a prefix of `lmtools tokenize`")
    parser.add_argument("--vocab", required=True, help="its vocabulary")
    parser.add_argument("--model_cfg", default="t5-micro", help="a T5's JSON file or preset")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the values that are not counted")
    args = parser.parse_args(argv)
    args.output = args.output.absolute()
    check_output(args.output)
    config, vocabulary = load_model_config(args.model_cfg, T5Config), Tokenizer.load(args.vocab)
    set_special_tokens(config, vocabulary.special_tokens, T5ForConditionalGeneration)
    check_vocabulary(config, vocabulary.size)
    check_buckets(config)
    data = IndexedDataset(args.data)
    check_tokens(data, vocabulary)
    tokens = np.asarray(data.tokens[:MOST_TOKENS], dtype=np.int64)
    check_ids(args.data, tokens, config.vocab_size)
    torch.manual_seed(args.seed)
    model = build_model(T5ForConditionalGeneration, config, seed=args.seed)
    look_at_neighbours(model)
    table = neighbour_embeddings(torch.from_numpy(tokens), config.vocab_size, config.d_model)
    counted = table.any(dim=1)
    model.shared.weight.data[counted] = table[counted]
    partial = args.output.with_name(f"{args.output.name}.partial")
    model.save_pretrained(partial)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in FILES:  # of which the second says that the folder is whole
        partial.joinpath(name).replace(args.output / name)
    shutil.rmtree(partial)
    print(f"embeddings of {counted.sum():,} ids from the neighbours of {len(tokens):,} tokens: {args.output}")


if __name__ == "__main__":
    run_main(main)
