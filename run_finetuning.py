"""Fine-tune a pre-trained model: text to text, classification, regression, instructions, causal language modelling.

On this machine (CPU or one GPU)::

    python run_finetuning.py --from_pretrained runs/t5-small --task text_to_text --prefix "summarize: " \\
        --data_path train.jsonl --valid_data_path valid.jsonl --test_data_path test.jsonl \\
        --batch_size 8 --lr 1e-4 --epochs 3 --save_best --optimize_metric rougeL --model_path runs/summaries

    python run_finetuning.py --model_type encoder --task classification --from_pretrained bert-base-uncased \\
        --data_path train.tsv --valid_data_path dev.tsv --batch_size 32 --lr 2e-5 --model_path runs/polarity

The same, on several workers, with one of these in the place of `python`::

    horovodrun --gloo -np 2 python
    torchrun --nproc_per_node 2
    accelerate launch --config_file accelerate_configs/fsdp.yaml

Where memory is small: --gradient_checkpointing, --freeze, --optimizer Adafactor, --peft lora, --quantize int8, in the
order that docs/out_of_memory.md gives. The same command again continues an interrupted run. `--config run.yaml` reads
flags from a file; `--model_cls my_module:MyT5` trains a model class of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lm_experiments_tools.config.cli import SPEED, parse, run_main
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.models.inherited import inherited_settings

if TYPE_CHECKING:
    from lm_experiments_tools.checkpoint.source import Source


def main(argv: Sequence[str] | None = None) -> None:
    found: list[Source] = []
    inherit = partial(inherited_settings, found=found)
    args, origins = parse(FinetuningArgs, argv, description=__doc__, inherit=inherit, resolve=SPEED)
    if args.plan:
        from lm_experiments_tools.planning.show import show_run

        return show_run(args, origins)
    args.check_used()
    args = args.resolved(origins)

    # imported after parsing, so that --help and a mistyped flag answer at once
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.backends.collective import on_all
    from lm_experiments_tools.checkpoint.source import ModelFiles
    from lm_experiments_tools.models.pretrained import pretrained_model
    from lm_experiments_tools.models.speed import choose_speed
    from lm_experiments_tools.models.tokenizers import load_tokenizer
    from lm_experiments_tools.planning.finders import find_or_train
    from lm_experiments_tools.recipes.common import (
        close_run,
        optimizer_from_args,
        seed_worker,
        show_run,
        start_run,
    )
    from lm_experiments_tools.recipes.finetuning import (
        evaluate_last,
        finetuning_loop,
        save_tokenizer,
        show_inherited,
        show_summary,
        with_new_tokens,
    )
    from lm_experiments_tools.recipes.finetuning_data import finetuning_data

    args, origins = choose_speed(args, origins, found)
    args, folder = args.while_finding()
    backend = get_backend(args)  # before start_run changes the folder: a launcher names its files from this one
    run = start_run(args, backend)
    show_inherited(args, origins)
    files = ModelFiles(args, found)
    tokenizer = on_all(backend, lambda: load_tokenizer(args, files))
    data = finetuning_data(with_new_tokens(args, tokenizer), backend, tokenizer, files)
    if data.train is not None:
        args = args.with_epochs(data.train.samples_per_epoch, backend.world_size)
    model = on_all(backend, lambda: pretrained_model(args, tokenizer, data.label_names, files))
    show_summary(backend, model)
    optimizer = optimizer_from_args(args, model)
    seed_worker(args.seed, backend.rank)
    tokenizer_dir = save_tokenizer(args, backend, tokenizer, data)
    trainer = finetuning_loop(args, backend, model, optimizer, data, tokenizer, tokenizer_dir)
    show_run(args, origins, run, backend, backend.unwrap(), data)
    if find_or_train(trainer, origins, folder, data):
        return
    evaluate_last(trainer, data)
    trainer.save_metrics(args.model_path)
    close_run(backend, data)


if __name__ == "__main__":
    run_main(main)
