"""Pre-train a BERT on your text with masked words and sentence pairs.

On this machine (CPU or one GPU)::

    python -m megatron.preprocess_data --input TEXT --output-prefix DATA --split-sentences \\
        --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt
    python run_bert_pretraining.py --data_path DATA_text_sentence --vocab_file vocab.txt --model_path runs/bert \\
        --model_cfg bert_base_uncased --input_seq_len 128 --batch_size 32 --lr 1e-4 --weight_decay 0.01 \\
        --lr_scheduler linear --num_warmup_steps 10000 --iters 1000000 --log_interval 500 --save_interval 10000

The same, on several workers, with one of these in the place of `python`::

    horovodrun --gloo -np 2 python
    torchrun --nproc_per_node 2
    accelerate launch --config_file accelerate_configs/ddp.yaml

Rows of plain text, without sentences, here to continue an encoder (ModernBERT, ...) of a folder or the Hub::

    python run_bert_pretraining.py --from_pretrained FOLDER --data_path text.jsonl --packing documents \\
        --model_path runs/more --input_seq_len 512 --mlm_prob 0.3 --lr 1e-4 --iters 10000 --save_interval 1000

The same command again continues an interrupted run. `--config run.yaml` reads flags from a file; `--model_cls
my_module:MyBert` trains a model class of your own; `--use_nsp 0` masks words only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import SPEED, parse, run_main
from lm_experiments_tools.models import inherited

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.recipes.bert_data import BertPretrainingData
    from lm_experiments_tools.recipes.common import ModelSource
    from lm_experiments_tools.training.phases import Phase
    from lm_experiments_tools.training.trainer import TrainingLoop


def main(argv: Sequence[str] | None = None) -> None:
    args, origins = parse(BertPretrainingArgs, argv, description=__doc__, inherit=inherited.of_bert, resolve=SPEED)
    if args.plan:
        from lm_experiments_tools.planning.show import show_run

        return show_run(args, origins)

    # imported after parsing, so that --help and a mistyped flag answer at once
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.backends.collective import on_all
    from lm_experiments_tools.models.speed import choose_speed
    from lm_experiments_tools.planning.finders import train_phases
    from lm_experiments_tools.recipes import common, phases
    from lm_experiments_tools.recipes.bert_data import check_bert
    from lm_experiments_tools.recipes.report import fill_in_masked_words, write_report

    args, origins = choose_speed(args, origins)
    args, folder = args.while_finding()
    backend = get_backend(args)  # before start_run changes the folder: a launcher names its files from this one
    parts, run = phases.start_phases(args, backend)
    parts = phases.with_models(parts, backend)
    for phase, model_source in parts[1:]:  # before hours of training
        on_all(backend, partial(check_bert, phase.args, model_source))
    ended = train_phases(parts, partial(build_phase, backend), origins, run, folder, backend)
    if ended is None:
        return
    trainer, data = ended
    trainer.save_metrics(args.model_path)
    if args.report:
        write_report(trainer, fill_in_masked_words(trainer, data))
    common.close_run(backend, data)


def build_phase(backend: Backend, phase: Phase, model_source: ModelSource) -> tuple[TrainingLoop, BertPretrainingData]:
    """Data, model, optimizer and trainer of a phase, at the position of the newest checkpoint."""
    from lm_experiments_tools.backends.collective import on_all
    from lm_experiments_tools.models.packed_rows import prepare
    from lm_experiments_tools.recipes import common
    from lm_experiments_tools.recipes.bert_data import bert_metrics, bert_pretraining_data
    from lm_experiments_tools.training.losses import bert_loss, with_bytes
    from lm_experiments_tools.training.trainer import TrainingLoop

    args = phase.args
    data = bert_pretraining_data(args, backend, model_source)
    model = common.model_from_args(args, model_source, data.tokenizer.vocab_size)
    transform = on_all(backend, lambda: prepare(model, args.input_seq_len)) if args.packing == "documents" else None
    labels = common.labels_alone(args, backend, model, common.most_labels(args))
    optimizer = common.optimizer_from_args(args, model)
    common.seed_worker(args.seed, backend.rank)
    trainer = TrainingLoop(
        args,
        backend,
        model,
        optimizer,
        data.train,
        data.valid,
        batch_transform_fn=transform,
        batch_metrics_fn=bert_metrics,
        tokenizer_dir=data.tokenizer_dir,
        loss=with_bytes(
            common.distilled_loss(args, backend, model, "encoder", bert_loss(args.use_nsp, labels)),
            data.tokenizer.token_bytes,
            model,
        ),
        phase=phase,
    )
    return trainer, data


if __name__ == "__main__":
    run_main(main)
