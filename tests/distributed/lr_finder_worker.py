"""One job of test_finder_workers.py: both finders on two workers, of which each can hold another number of rows.

argv: the folder that is written to; FULL_AT=ROWS_OF_RANK_0,ROWS_OF_RANK_1 in the environment.
"""

import os
import sys

import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.cli import run_main
from lm_experiments_tools.config.training import ExperimentArgs
from lm_experiments_tools.recipes.lr_finder import find_lr
from lm_experiments_tools.recipes.micro_batch_finder import find_micro_batch
from lm_experiments_tools.tracking.run_directory import setup_logging
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller

ROWS = 24  # of an update


class Hungry(TinyLabeller):
    """Asks for more memory than there is from `most` + 1 rows on."""

    most = ROWS

    def forward(self, input_ids, labels):
        if len(input_ids) > self.most:
            torch.empty(2**60, dtype=torch.uint8)
        return super().forward(input_ids, labels)


def loop(backend, **settings):
    args = ExperimentArgs(model_cfg="none", lr=0.1, **settings).while_finding()[0]
    model = Hungry()
    rows = args.rows_per_worker()
    batches = SeekableBatches(RaggedPairs(96), rows, backend.rank, backend.world_size)
    return TrainingLoop(args, backend, model, torch.optim.SGD(model.parameters(), lr=args.lr), batches)


def main():
    (folder,) = sys.argv[1:]
    backend = get_backend(ExperimentArgs(model_cfg="none", lr=0.1))
    setup_logging(None, backend.rank)
    rows = ROWS // backend.world_size
    find_lr(loop(backend, batch_size=rows, find_lr=30, find_lr_min=1e-2, find_lr_max=1e2), folder)
    backend.release()
    trainer = loop(backend, batch_size=rows, find_micro_batch=True)
    if "FULL_AT" in os.environ:
        backend.unwrap().most = int(os.environ["FULL_AT"].split(",")[backend.rank])
    find_micro_batch(trainer, folder)
    backend.close()


if __name__ == "__main__":
    run_main(main)
