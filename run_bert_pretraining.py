"""Pre-train a BERT on your text with masked words and sentence pairs.

On this machine (CPU or one GPU)::

    python -m megatron.preprocess_data --input TEXT --output-prefix DATA --split-sentences \\
        --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt
    python run_bert_pretraining.py --data_path DATA_text_sentence --vocab_file vocab.txt --model_path runs/bert \\
        --model_cfg bert_base_uncased --input_seq_len 128 --batch_size 32 --lr 1e-4 --weight_decay 0.01 \\
        --lr_scheduler linear --num_warmup_steps 10000 --iters 1000000 --log_interval 500 --save_interval 10000

On several workers, replace `python` by one of::

    horovodrun --gloo -np 2 python
    torchrun --nproc_per_node 2
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2

Rows of plain text, without sentences, here to continue an encoder (ModernBERT, ...) of a folder or the Hub::

    python run_bert_pretraining.py --from_pretrained FOLDER --data_path text.jsonl --packing documents \\
        --model_path runs/more --input_seq_len 512 --mlm_prob 0.3 --lr 1e-4 --iters 10000 --save_interval 1000

The same command again continues an interrupted run. `--config run.yaml` reads flags from a file; `--model_cls
my_module:MyBert` trains a model class of your own; `--use_nsp 0` masks words only.
"""

from __future__ import annotations

from collections.abc import Sequence

from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import SPEED, parse, run_main
from lm_experiments_tools.models import inherited


def main(argv: Sequence[str] | None = None) -> None:
    args, origins = parse(BertPretrainingArgs, argv, description=__doc__, inherit=inherited.of_bert, resolve=SPEED)
    from lm_experiments_tools.recipes.bert import (
        BertPretraining,  # now, so that --help and a mistyped flag answer at once
    )

    BertPretraining(args, origins).run()


if __name__ == "__main__":
    run_main(main)
