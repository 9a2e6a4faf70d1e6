"""The steps that all training scripts share: run directory, checks, seeds, loss, summary, end."""

from __future__ import annotations

import logging
import mmap
import os
import platform
import random
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from lm_experiments_tools.backends.collective import agreed, on_all, say
from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.labels import LABEL_POSITIONS
from lm_experiments_tools.models.build import num_parameters
from lm_experiments_tools.models.from_args import make_optimizer, most_labels
from lm_experiments_tools.models.speed import describe_speed
from lm_experiments_tools.modules.devices import available_memory
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.tracking.run_directory import RunDirectory, setup_logging
from lm_experiments_tools.tracking.tracker import duration
from lm_experiments_tools.training.distillation import Predict, distilled, predictor
from lm_experiments_tools.training.run_folder import claim_for_all
from lm_experiments_tools.training.schedules import LearningRate

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.config.training import ExperimentArgs, TrainerArgs
    from lm_experiments_tools.data.loader import TrainLoader, ValidLoader
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from lm_experiments_tools.training.losses import Loss
    from lm_experiments_tools.training.phases import Phase
    from lm_experiments_tools.training.trainer import TrainingLoop

    PretrainingArgs = BertPretrainingArgs | T5PretrainingArgs

logger = logging.getLogger(__name__)
_PART_OF_MEMORY = 0.8  # of token files; the rest is the processes', see the table in benchmarks/cold_reads.md


def start_run(args: TrainerArgs, backend: Backend) -> RunDirectory | None:
    """Change to `--working_dir`, set up logging and open the run directory. Raises UserError.

    Returns the run directory on rank 0; None on other ranks or without `--model_path`.
    """
    os.chdir(args.working_folder())
    on_all(backend, lambda: setup_logging(args.model_path, backend.rank))
    on_all(backend, lambda: check_phases(args, backend.world_size))
    _check_choices(args, backend)
    if args.model_path is not None:
        say(backend, f"run directory: {args.model_path}")
    elif not args.validate_only:
        say(backend, "neither checkpoints nor logs are saved: there is no --model_path")
    warn_of_idle_gpus(args, backend)
    if args.model_path is None:
        return None
    run = claim_for_all(args, backend)
    if run is not None and not args.validate_only and (run.path / "config.json").exists():
        if not any((run.path / "checkpoints").glob("step_*")):
            logger.warning("%s has no checkpoint yet: the run begins again at step 0", run.path)
    return run


def _check_choices(args: TrainerArgs, backend: Backend) -> None:
    """Refuse choices of `--speed auto` that differ between workers, whose machines may differ; collective."""
    for name in ("model_cls", "bf16"):
        choices = backend.gather(getattr(args, name))
        if any(choice != choices[0] for choice in choices):
            raise agreed(UserError(f"--speed auto: workers choose {name} differently: give --{name}, or --speed off."))


def warn_of_idle_gpus(args: TrainerArgs, backend: Backend) -> None:
    """Warn if a machine has more GPUs than workers; collective."""
    seen = backend.gather((platform.node(), torch.cuda.device_count()))
    if not backend.is_main or backend.device.type != "cuda" or getattr(args, "device_map", None):
        return
    for host, workers in Counter(host for host, _ in seen).items():
        # A batch system may show each worker one GPU alone.
        gpus = max(count for name, count in seen if name == host)
        if gpus > workers:
            logger.warning(
                "%d of the %d GPUs of %s are idle: start a worker for each, for example by torchrun --nproc_per_node "
                "%d, or name those to use in CUDA_VISIBLE_DEVICES",
                gpus - workers, gpus, host, gpus,
            )  # fmt: skip


@contextmanager
def described(
    args: TrainerArgs,
    backend: Backend,
    *,
    is_new: bool,
    trained: Callable[[], TrainingLoop],
    commands: Callable[[str], Sequence[str]] | None,
) -> Iterator[None]:
    """Context that ends a run with its time, its best metric, commands to try its model with, and its folder.

    Args:
        is_new: True if the folder was made for this start; a start that is refused removes it.
        commands: f(quoted run directory) -> shell commands that read the trained model; None for a call of
            `PreTrainer.train`, which no command has started.
    """
    started, folder = time.monotonic(), None if args.validate_only else args.model_path
    ending = f"; the same command{f' with --model_path {folder}' if is_new else ''} continues it"
    if commands is None:
        ending = "; a new object with this model_path continues it by train()"
    try:
        yield
        ending = ""
        if not args.validate_only:
            say(backend, _summary(trained(), time.monotonic() - started))
        if folder is not None and commands is not None:
            # The user's shell has not entered --working_dir.
            where = folder if args.working_folder() == "." else os.path.abspath(folder)
            if following := commands(shlex.quote(str(where))):
                say(backend, f"next: {'; '.join(following)}")
    except UserError:
        ending = ""  # the same command would end in the same error
        raise
    except (KeyboardInterrupt, SystemExit):
        if folder is None and not args.validate_only:
            say(backend, "nothing is saved: there was no --model_path")
        raise
    finally:
        # The settings of a run are recorded once its data, model and optimizer are built.
        if folder is not None and is_new and backend.is_main and not Path(folder, "config.json").exists():
            shutil.rmtree(folder)
            with suppress(OSError):  # other runs are in it
                Path(folder).parent.rmdir()
            folder = None
        if folder is not None:
            say(backend, f"run directory: {folder}{ending}")


def _summary(trainer: TrainingLoop, seconds: float) -> str:
    state, metric = trainer.state, trainer.args.optimize_metric
    text = f"{state.step:,} updates, {duration(seconds)} since this start"
    if state.best_metric is None:
        return text
    return f"{text}, best {metric} on validation {state.best_metric:.4f} at step {state.best_step}"


def check_phases(args: ExperimentArgs, world_size: int) -> None:
    """Check optimizer and schedule of a run, or of each of its phases. Raises UserError."""
    for number, phase in enumerate(phases_of(args), 1):
        try:
            _check_optimization(in_updates(phase, world_size))
        except UserError as error:
            raise UserError(f"--phases: phase {number}: {error}" if args is not phase else str(error)) from None


def _check_optimization(args: ExperimentArgs) -> None:
    """Build optimizer and schedule for a toy parameter, to refuse bad settings before hours of tokenizing."""
    if args.validate_only:
        return
    if getattr(args, "epochs", None) is not None:  # the number of updates is not known yet
        changes: dict[str, Any] = {"epochs": None, "iters": 10**9}
        args = replace(args, **changes)
    rules = [(f"rule {i}", options) for i, (_, options) in enumerate(args.group_rules())]  # each matches a toy
    names = ["layer.0.weight", *(pattern for pattern, _ in rules)]
    LearningRate(args, make_optimizer(args, [(name, nn.Parameter(torch.zeros(2, 2))) for name in names], rules))


class RunData(Protocol):
    """Data of a run: `PretrainingData` or `finetuning_data.FinetuningData`."""

    train: TrainLoader | None
    objective: str


@dataclass
class PretrainingData:
    """Data of a pre-training run.

    Attributes:
        vocabulary_size: number of embeddings needed: greater than any token id.
        train: endless batches of this worker; None with `--validate_only` (seqio: the source of validation data).
        valid: validation examples of this worker; None without validation data.
        tokenizer_dir: folder with Hugging Face tokenizer files; None without `--model_path`.
    """

    vocabulary: Any
    vocabulary_size: int
    train: TrainLoader | None
    valid: ValidLoader | None
    tokenizer_dir: Path | None
    objective: str


def warn_of_data(args: PretrainingArgs, data: PretrainingData) -> None:
    """Warn if training data contains the validation text, or if it has fewer rows than a micro-batch."""
    if data.train is None or args.validate_only:
        return
    for path in args.data_path if args.valid_data_path is not None else ():
        if Path(args.valid_data_path).resolve().is_relative_to(Path(path).resolve()):
            logger.warning(
                "--valid_data_path %s is part of --data_path %s: the model is validated on text that it trains on",
                args.valid_data_path,
                path,
            )
    warn_of_few_rows(args, data)


def warn_of_few_rows(args: TrainerArgs, data: RunData) -> None:
    """Warn if training data has fewer rows than a micro-batch, which then holds some of them twice."""
    rows = None if data.train is None else data.train.samples_per_epoch
    if rows is not None and rows < args.batch_size:
        logger.warning("--data_path has %d rows, fewer than --batch_size %d: name more text", rows, args.batch_size)


def show_run(
    args: ExperimentArgs,
    origins: Mapping[str, str],
    run: RunDirectory | None,
    backend: Backend,
    model: nn.Module,
    data: RunData,
    phase: Phase | None = None,
) -> None:
    """Log a summary of the run and write its settings to the run directory."""
    if not backend.is_main:
        return
    count = num_parameters(model)
    rows = args.global_batch_size(backend.world_size)
    epoch = None if data.train is None else data.train.samples_per_epoch
    kind = "virtual ranks" if args.shares(backend.world_size) > 1 else "worker(s)"
    workers = f"{args.virtual_size(backend.world_size)} {kind}"
    updates = args.iters - (0 if phase is None else phase.start)
    panel: dict[str, Any] = {
        "model": f"{args.model_cls or type(model).__name__}, {count.total:,} parameters ({count.embedding:,} in "
        f"embeddings){'' if count.trainable == count.total else f', {count.trainable:,} of them trained'}",
        "objective": data.objective,
        "batch": f"micro-batch {args.batch_size} x accumulation {args.gradient_accumulation_steps} x {workers}"
        f" = {rows} rows a step",
        "steps": f"{updates} updates, {updates * rows:,} examples"
        + (f" = {updates * rows / epoch:.2f} epochs of {epoch:,}" if epoch else ""),
        "optimizer": ", ".join([args.optimizer, *args.optimizer_options, f"lr {args.lr}"])
        + ", ".join([f", schedule {args.lr_scheduler or 'constant'}", *args.lr_scheduler_options]),
        "precision": _precision(args),
        "speed": describe_speed(args, origins, model),
    }
    if run is not None:
        panel["run"] = f"{run.path} (tensorboard --logdir {run.path})"
        model_config = model.config.to_dict() if hasattr(model, "config") else None
        recorded = asdict(args) if phase is None else {**asdict(phase.run), "iters": phase.last_step}
        run.write_start(recorded, origins, model_config, world_size=args.virtual_size(backend.world_size))
    if args.validate_only:
        panel["batch"] = f"{args.valid_batch_size()} rows x {backend.world_size} worker(s), validated once"
        del panel["steps"], panel["optimizer"]
    width = max(map(len, panel))
    for name, value in panel.items():
        logger.info("%-*s  %s", width, name, value)


def _precision(args: ExperimentArgs) -> str:
    """Precision of computation, and of the weights where it is lower."""
    options = args.precision_options()
    computed = "fp16" if options["fp16"] else "bf16" if options["bf16"] else "fp32"
    held = getattr(args, "quantize", None)
    return f"{computed}, weights held in {held}" if held else computed


def seed_worker(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch differently on each rank."""
    random.seed(f"{seed}-{rank}")
    np.random.seed((seed * 1000003 + rank) % 2**32)
    torch.manual_seed(seed * 1000003 + rank)


def labels_alone(
    args: PretrainingArgs,
    backend: Backend,
    model: nn.Module,
) -> Callable[[int], int] | None:
    """Choose if the model computes logits only at masked positions (`--mlm_positions`). Raises UserError.

    Our BERT takes these positions. ModernBERT finds them by its labels (`sparse_prediction`), which this sets.
    Returns the argument `most_labels` of `Loss`; None if logits are computed at all positions.
    """
    chosen = args.mlm_positions
    if chosen == "all" or args.distill_from is not None:
        return None
    if LABEL_POSITIONS in forward_names(model):
        return most_labels(args)
    if hasattr(model, "sparse_prediction"):
        model.sparse_prediction = True
    elif chosen == "labels":
        raise UserError(
            f"--mlm_positions labels: {args.model_cls} scores all positions; choose a class of modeling_bert."
        )
    elif backend.is_main:
        logger.info("%s scores all positions, not only those with a label", args.model_cls)
    return None


def distilled_loss(args: PretrainingArgs, backend: Backend, student: nn.Module, kind: ModelKind, loss: Loss) -> Loss:
    """Add the divergence from a teacher's predictions (`--distill_from`) to a loss, which is unchanged without one.

    UserError for a teacher that cannot be loaded, or has another vocabulary or model kind than the student's `kind`.
    """
    if args.distill_from is None:
        return loss
    from lm_experiments_tools.models.saved import open_saved

    def opened() -> Predict:
        teacher = open_saved(args.distill_from, flag="--distill_from")
        rows = [model.get_output_embeddings().weight.shape[0] for model in (teacher.model, student)]
        if rows[0] != rows[1]:
            raise UserError(
                f"--distill_from {args.distill_from} predicts {rows[0]} tokens, the model {rows[1]}: they need one "
                "vocabulary."
            )
        return predictor(teacher.model.requires_grad_(False).to(backend.device), teacher.kind, kind)

    return distilled(loss, on_all(backend, opened), args.distill_weight, backend.autocast)


def save_tokenizer(args: ExperimentArgs, backend: Backend, save: Callable[[Path], object]) -> Path | None:
    """Write the tokenizer by `save` to the run directory, from where checkpoints copy it."""
    if args.model_path is None or args.validate_only:
        return None
    folder = Path(args.model_path) / "tokenizer"
    on_all(backend, lambda: save(folder), only_main=True)
    return folder


def read_at_random(files: Sequence[IndexedDataset]) -> None:
    """Disable the operating system's read-ahead for token files that together do not fit in memory.

    It reads up to 8 MB around each page, which is wasted if the page cache is too small (benchmarks/cold_reads.md).
    """
    size, memory = sum(file.tokens.nbytes for file in files), available_memory()
    if size <= _PART_OF_MEMORY * memory or not hasattr(mmap, "MADV_RANDOM"):
        return
    logger.info("%s of tokens, %s of free memory: no read-ahead", human_bytes(size), human_bytes(memory))
    for file in files:
        if file.num_tokens:
            file.tokens._mmap.madvise(mmap.MADV_RANDOM)
