"""One job of test_lr_finder_workers.py: the range test. argv: the folder that is written to."""

import sys

import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.cli import run_main
from lm_experiments_tools.config.training import ExperimentArgs
from lm_experiments_tools.recipes.lr_finder import find_lr
from lm_experiments_tools.tracking.run_directory import setup_logging
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller

ROWS = 24  # of an update


def loop(backend, **settings):
    args = ExperimentArgs(model_cfg="none", lr=0.1, **settings).while_finding()[0]
    model = TinyLabeller()
    rows = args.rows_per_worker()
    batches = SeekableBatches(RaggedPairs(96), rows, backend.rank, backend.world_size)
    return TrainingLoop(args, backend, model, torch.optim.SGD(model.parameters(), lr=args.lr), batches)


def main():
    (folder,) = sys.argv[1:]
    backend = get_backend(ExperimentArgs(model_cfg="none", lr=0.1))
    setup_logging(None, backend.rank)
    rows = ROWS // backend.world_size
    find_lr(loop(backend, batch_size=rows, find_lr=30, find_lr_min=1e-2, find_lr_max=1e2), folder)
    backend.close()


if __name__ == "__main__":
    run_main(main)
