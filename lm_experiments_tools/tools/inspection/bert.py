"""Data of run_bert_pretraining.py: sentences of each data path, and the samples made from them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.mixture import MixtureDataset
from lm_experiments_tools.recipes.bert_data import bert_datasets, bert_tokenizer, open_sentences
from lm_experiments_tools.tools.inspection.batches import Wording, training_section
from lm_experiments_tools.tools.inspection.section import Section
from lm_experiments_tools.tools.inspection.tokens import TokenSource, open_source, token_section
from megatron.tokenizers import check_tokenizer

WRONG_PAIR = {"swap": "a wrong pair: B comes before A", "random": "a wrong pair: B is from another document"}


def sections(args: Any) -> Iterator[Section]:
    """A section for each data path, and one for the training data made from them."""
    os.chdir(args.working_folder())
    tokenizer, sources = bert_tokenizer(args), []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(args.data_path):
            tokens = open_sentences(path)
            check_tokenizer(tokens, tokenizer)
            sources.append(open_source(path, tokens, args, Path(folder) / str(number)))
            yield token_section(
                sources[-1],
                args,
                vocab_size=tokenizer.vocab_size,
                unk_id=tokenizer.unk,
                piece=lambda index: tokenizer.decode([index]),
                sentences=True,
            )
        yield _training(args, sources, tokenizer, folder)


def _training(args: Any, sources: list[TokenSource], tokenizer: Any, folder: str) -> Section:
    whole = all(source.fraction == 1.0 for source in sources)
    opened = {source.tokens.prefix: source.tokens for source in sources}
    settings = replace(
        args,
        data_path=tuple(opened),
        data_name=args.data_name if whole else folder,  # the run has no use for the sample mapping of a part
        valid_data_path=None,
        validate_only=False,
        max_unread=1.0,  # the run refuses such data, but inspection shows it
    )
    dataset, _, _ = bert_datasets(settings, tokenizer, opened.__getitem__)
    facts = [("objective", f"{dataset.describe()}, vocabulary {tokenizer.vocab_size:,}")]
    members = dataset.datasets if isinstance(dataset, MixtureDataset) else [dataset]
    for source, member in zip(sources, members, strict=True):
        counts = member.mapping.counts
        lost = f"{counts.unread:.2%} of the tokens of {source.path} fit in no sample"
        limit = f"; more than --max_unread {args.max_unread:g}, so that training refuses it"
        facts.append(("not read", lost + (limit if counts.unread > args.max_unread else "")))
    wording = Wording(
        tokenizer.decode,
        {tokenizer.pad: "[PAD]", tokenizer.mask: "MASK"},
        labels_at_inputs=True,
        meanings={"next_sentence_label": {0: "a right pair: B follows A", 1: WRONG_PAIR[args.nsp]}},
    )
    with closing(TrainLoader(dataset, args.global_batch_size(args.world_size))) as train:  # the rows of all workers
        return training_section(train, len(dataset), sources, args, False, wording, facts)
