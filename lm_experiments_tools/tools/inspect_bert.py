"""Look before you train a BERT: sentences, lengths, frequencies, padding, steps, and samples as the model gets them.

    lmtools inspect_bert --config run.yaml
    lmtools inspect_bert --data_path DATA_text_sentence --vocab_file vocab.txt --input_seq_len 128 --output look/

Flags and YAML files are those of run_bert_pretraining.py; nothing is trained.
"""

import dataclasses
import os
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.config.bert import BertDataArgs, BertObjectiveArgs, BertPretrainingArgs
from lm_experiments_tools.config.flags import check_groups
from lm_experiments_tools.config.pretraining import MixtureArgs
from lm_experiments_tools.config.training import BatchArgs, RunArgs
from lm_experiments_tools.tools.look import LookArgs, Source, first_documents, show_counts, show_samples

if TYPE_CHECKING:
    from megatron.bert_dataset import BertDataset
    from megatron.tokenizers import BertDataTokenizer

WRONG_PAIR = {"swap": "a wrong pair: B comes before A", "random": "a wrong pair: B is from another document"}


@dataclass(frozen=True, kw_only=True)
class InspectBertArgs(BertPretrainingArgs, LookArgs):
    """The flags of run_bert_pretraining.py, so that its YAML files are read as they are, and what to look at."""

    def __post_init__(self) -> None:
        # What concerns the model or its training need not be complete to look at the data.
        check_groups(self, (BertDataArgs, MixtureArgs, BertObjectiveArgs, BatchArgs, RunArgs, LookArgs))


def run(args: InspectBertArgs) -> None:
    """Print what there is to know of the data of a run."""
    from lm_experiments_tools.recipes.bert_data import bert_tokenizer, open_sentences
    from megatron.tokenizers import check_tokenizer

    os.chdir(args.working_folder())
    tokenizer = bert_tokenizer(args)
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number, path in enumerate(args.data_path):
            tokens = open_sentences(path)
            check_tokenizer(tokens, tokenizer)
            sources.append(first_documents(path, tokens, args, Path(folder) / str(number)))
            show_counts(
                sources[-1],
                args,
                vocab_size=tokenizer.vocab_size,
                unk_id=-1 if tokenizer.unk is None else tokenizer.unk,
                piece=lambda index: tokenizer.decode([index]),
                marks={"input": args.input_seq_len},
                sentences=True,
            )
        _show_run(args, sources, tokenizer, folder)


def _show_run(args: InspectBertArgs, sources: list[Source], tokenizer: "BertDataTokenizer", folder: str) -> None:
    """Print what the run makes of the data: objective, unread tokens, steps, padding, samples."""
    from lm_experiments_tools.data.loader import TrainLoader
    from lm_experiments_tools.data.mixture import MixtureDataset
    from lm_experiments_tools.recipes.bert_data import bert_datasets
    from lm_experiments_tools.tools.samples import Wording

    whole = all(source.share == 1.0 for source in sources)
    opened = {source.tokens.prefix: source.tokens for source in sources}
    settings = dataclasses.replace(
        args,
        data_path=tuple(source.tokens.prefix for source in sources),
        data_name=args.data_name if whole else folder,  # the mapping of a part is of no use to the run
        valid_data_path=None,
        validate_only=False,
        max_unread=1.0,  # looked at all the same
    )
    dataset, _, _ = bert_datasets(settings, tokenizer, opened.__getitem__)
    print(f"\nobjective    {dataset.describe()}, vocabulary {tokenizer.vocab_size:,}")
    members = dataset.datasets if isinstance(dataset, MixtureDataset) else [dataset]
    for source, member in zip(sources, members, strict=True):
        _show_unread(source, member, args.max_unread)
    wording = Wording(
        tokenizer.decode,
        {tokenizer.pad: "[PAD]", tokenizer.mask: "MASK"},
        labels_at_inputs=True,
        meanings={"next_sentence_label": {0: "a right pair: B follows A", 1: WRONG_PAIR[args.nsp]}},
    )
    with closing(TrainLoader(dataset, args.global_batch_size(args.world_size))) as train:  # all workers' rows
        show_samples(train, len(dataset), sources, args, False, wording)


def _show_unread(source: Source, dataset: "BertDataset", limit: float) -> None:
    counts = dataset.mapping.counts
    refused = f"; more than --max_unread {limit:g}, so that training refuses it" if counts.unread > limit else ""
    print(
        f"not read     no sample has room for {counts.unread:.2%} of the tokens of {source.path}, "
        f"{counts.describe_unread()}{refused}"
    )
