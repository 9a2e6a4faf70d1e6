"""Fine-tune a pre-trained model: text to text, classification, regression, instructions, causal language modelling.

On this machine (CPU or one GPU)::

    python run_finetuning.py --from_pretrained runs/t5-small --task text_to_text --prefix "summarize: " \\
        --data_path train.jsonl --valid_data_path valid.jsonl --test_data_path test.jsonl \\
        --batch_size 8 --lr 1e-4 --epochs 3 --save_best --optimize_metric rougeL --model_path runs/summaries

    python run_finetuning.py --model_type encoder --task classification --from_pretrained bert-base-uncased \\
        --data_path train.tsv --valid_data_path dev.tsv --batch_size 32 --lr 2e-5 --model_path runs/polarity

On several workers, replace `python` by one of::

    horovodrun --gloo -np 2 python
    torchrun --nproc_per_node 2
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 2

To save memory: --gradient_checkpointing, --freeze, --optimizer Adafactor, --peft lora, --quantize int8, in the
order that docs/out_of_memory.md gives. The same command again continues an interrupted run. `--config run.yaml` reads
flags from a file; `--model_cls my_module:MyT5` trains a model class of your own.
"""

from __future__ import annotations

from collections.abc import Sequence

from lm_experiments_tools.config.cli import SPEED, parse, run_main
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.models.inherited import inherited_settings


def main(argv: Sequence[str] | None = None) -> None:
    args, origins = parse(FinetuningArgs, argv, description=__doc__, inherit=inherited_settings, resolve=SPEED)
    args.check_used()
    args = args.resolved(origins)
    # imported after parsing, so that --help and a mistyped flag answer at once
    from lm_experiments_tools.recipes.finetuning import Finetuning

    Finetuning(args, origins).run()


if __name__ == "__main__":
    run_main(main)
