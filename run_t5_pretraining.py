"""Pre-train a T5 on your text with span corruption, or another model with another objective (--task).

On this machine (CPU or one GPU)::

    python run_t5_pretraining.py --data_path DATA --vocab VOCAB.model --model_path runs/t5-small \\
        --model_cfg models_configs/t5_configs/t5-small.json --input_seq_len 512 --target_seq_len 192 \\
        --batch_size 32 --lr 1e-3 --optimizer Adafactor --scale_parameter --lr_scheduler constant_with_warmup \\
        --num_warmup_steps 10000 --iters 100000 --log_interval 500 --save_interval 10000

The same, on several workers, with one of these in the place of `python`::

    horovodrun --gloo -np 2 python
    torchrun --nproc_per_node 2
    accelerate launch --config_file accelerate_configs/ddp.yaml

DATA is a token prefix made by `lmtools tokenize`, or text (.jsonl, .jsonl.gz, .txt, a folder of them), which is
tokenized first. The same command again continues an interrupted run. `--config run.yaml` reads flags from a file;
`--model_cls my_module:MyT5` trains a model class of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lm_experiments_tools.config.cli import SPEED, parse, run_main
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.models import inherited

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.recipes.common import ModelSource
    from lm_experiments_tools.recipes.t5_data import PretrainingData
    from lm_experiments_tools.recipes.t5_sources import T5Sources
    from lm_experiments_tools.training.phases import Phase
    from lm_experiments_tools.training.trainer import TrainingLoop


def main(argv: Sequence[str] | None = None) -> None:
    args, origins = parse(T5PretrainingArgs, argv, description=__doc__, inherit=inherited.of_t5, resolve=SPEED)
    if args.plan:
        from lm_experiments_tools.planning.show import show_run

        return show_run(args, origins)
    # imported after parsing, so that --help and a mistyped flag answer at once, as does a vocabulary of other tokens
    from lm_experiments_tools.backends.cluster import attempt
    from lm_experiments_tools.recipes.t5_sources import sources_of_phases

    sources = attempt(lambda: sources_of_phases(args))
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.backends.collective import on_all
    from lm_experiments_tools.models.speed import choose_speed
    from lm_experiments_tools.planning.finders import train_phases
    from lm_experiments_tools.recipes import common, phases, t5_data
    from lm_experiments_tools.recipes.report import filled_right, t5_examples, write_report

    args, origins = choose_speed(args, origins)
    args, folder = args.while_finding()
    backend = get_backend(args)  # before start_run changes the folder: a launcher names its files from this one
    parts, run = phases.start_phases(args, backend)
    sources = on_all(backend, sources)
    parts = phases.with_models(parts, backend)
    for phase, model_source in parts:  # before hours of tokenizing
        t5_data.check_model(phase.args, model_source, sources[0].vocabulary.size)
        on_all(backend, partial(t5_data.check_examples, phase.args, sources[0].vocabulary, model_source.kind))
    ended = train_phases(parts, partial(build_phase, backend, sources), origins, run, folder, backend)
    if ended is None:
        return
    trainer, data = ended
    trainer.save_metrics(args.model_path)
    if args.report:
        write_report(trainer, t5_examples(trainer, data), filled_right(trainer, data))
    common.close_run(backend, data)


def build_phase(
    backend: Backend, sources: Sequence[T5Sources], phase: Phase, model_source: ModelSource
) -> tuple[TrainingLoop, PretrainingData]:
    """Data, model, loss, optimizer and trainer of a phase, at the position of the newest checkpoint."""
    from lm_experiments_tools.modules.inspection import forward_names
    from lm_experiments_tools.recipes import common, t5_data
    from lm_experiments_tools.recipes.report import WrittenExamples
    from lm_experiments_tools.training.trainer import TrainingLoop

    args = phase.args
    data = t5_data.pretraining_data(args, backend, sources[phase.number], model_source.kind)
    model = common.model_from_args(args, model_source, data.vocabulary.size)
    t5_data.check_causality(args, model)
    loss = t5_data.pretraining_loss(args, backend, model, data.vocabulary)
    loss = common.distilled_loss(args, backend, model, model_source.kind, loss)
    takes_no_logits = "return_logits" in forward_names(model) and args.distill_from is None
    optimizer = common.optimizer_from_args(args, model)
    common.seed_worker(args.seed, backend.rank)
    number, vocabulary = args.show_valid_examples, data.vocabulary
    collect = (lambda split: WrittenExamples(lambda: trainer, split, vocabulary, number)) if number else None
    trainer = TrainingLoop(
        args,
        backend,
        model,
        optimizer,
        None if args.validate_only else data.train,
        data.valid,
        batch_transform_fn=t5_data.without_full_masks(model),
        batch_metrics_fn=t5_data.pretraining_metrics,  # none of logits, which modeling_t5 then need not hold whole
        forward_kwargs={"return_logits": False} if takes_no_logits else None,
        generate_kwargs={"do_sample": False},
        tokenizer_dir=data.tokenizer_dir,
        loss=loss,
        collect=collect,
        phase=phase,
    )
    return trainer, data


if __name__ == "__main__":
    run_main(main)
