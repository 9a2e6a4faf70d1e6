"""One job of test_sharded_checkpoints.py: a run of the trainer, saved at steps 2 and 4, or continued.

    checkpoint_worker.py OUT RUN [--resume] [--fails | --dies]

Rank 0 writes the gathered weights to OUT/weights.safetensors. When the last rank writes its files of step 4, the disk
--fails or the worker --dies; each rank writes the error message to OUT/error_RANK.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.checkpoint.tree import WorkersFiles
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import RunError
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, tiny_t5


def main():
    out, run, *flags = Path(sys.argv[1]), *sys.argv[2:]
    resumed = "--resume" in flags
    batch = 2 if int(os.environ.get("WORLD_SIZE", os.environ.get("HOROVOD_SIZE", "1"))) > 1 else 4
    args = TrainerArgs(
        batch_size=batch, iters=6 if resumed else 4, save_interval=2, log_interval=2, keep_checkpoints=None,
        model_path=run, clip_grad_norm=1.0,
    )  # fmt: skip
    backend = get_backend(args)
    model = tiny_t5()
    model.register_buffer("strided", torch.arange(12.0).view(3, 4).t() + backend.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = SeekableBatches(RaggedPairs(24), batch, backend.rank, backend.world_size)
    loop = TrainingLoop(args, backend, model, optimizer, loader)
    (out / "begins").write_text(str(loop.state.step))
    if {"--fails", "--dies"} & set(flags) and backend.rank == backend.world_size - 1:
        write = WorkersFiles.write

        def failing(files):
            if loop.state.step >= 4 and "--dies" in flags:
                os.kill(os.getpid(), signal.SIGKILL)
            if loop.state.step >= 4:
                raise OSError(28, "No space left on device")
            write(files)

        WorkersFiles.write = failing
    try:
        loop.train()
    except RunError as error:
        (out / f"error_{backend.rank}").write_text(str(error))
        os._exit(1)
    weights = backend.state.model_state()
    if backend.is_main:
        save_file({name: value.clone().contiguous() for name, value in weights.items()}, out / "weights.safetensors")
    backend.close()


if __name__ == "__main__":
    main()
