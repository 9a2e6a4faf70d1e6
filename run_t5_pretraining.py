"""Pre-train a T5 on your text with span corruption, or another model with another objective (--task).

On this machine (CPU or one GPU)::

    python run_t5_pretraining.py --data_path DATA --vocab VOCAB.model --model_path runs/t5-small \\
        --model_cfg models_configs/t5_configs/t5-small.json --input_seq_len 512 --target_seq_len 192 \\
        --batch_size 32 --lr 1e-3 --optimizer Adafactor --scale_parameter --lr_scheduler constant_with_warmup \\
        --num_warmup_steps 10000 --iters 100000 --log_interval 500 --save_interval 10000

On several workers, replace `python` by one of::

    horovodrun --gloo -np 2 python
    torchrun --nproc_per_node 2
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2

DATA is a token prefix made by `lmtools tokenize`, or text (.jsonl, .jsonl.gz, .txt, a folder of them), which is
tokenized first. The same command again continues an interrupted run. `--config run.yaml` reads flags from a file;
`--model_cls my_module:MyT5` trains a model class of your own.
"""

from __future__ import annotations

from collections.abc import Sequence

from lm_experiments_tools.config.cli import SPEED, parse, run_main
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.models import inherited


def main(argv: Sequence[str] | None = None) -> None:
    args, origins = parse(T5PretrainingArgs, argv, description=__doc__, inherit=inherited.of_t5, resolve=SPEED)
    # imported after parsing, so that --help and a mistyped flag answer at once, as does a vocabulary of other tokens
    from lm_experiments_tools.backends.cluster import attempt
    from lm_experiments_tools.recipes.t5_sources import sources_of_phases

    sources = attempt(lambda: sources_of_phases(args))
    from lm_experiments_tools.recipes.t5 import T5Pretraining

    T5Pretraining(args, origins, sources).run()


if __name__ == "__main__":
    run_main(main)
