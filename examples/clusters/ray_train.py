"""Train on a Ray cluster: Ray Train starts the workers of one DDP job.

    python examples/clusters/ray_train.py run_t5_pretraining.py --config run.yaml

Edit the constants below. Run it on a node of the cluster or set RAY_ADDRESS. The current folder and the environment
have the same paths on all nodes.
"""

import os
import runpy
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

NUM_WORKERS = 16
RESOURCES_PER_WORKER = {"CPU": 8, "GPU": 1}
MAX_FAILURES = 3  # how often all workers are restarted; they resume from the newest checkpoint


def train(config: dict) -> None:
    """Run the script as one worker; Ray sets its rank and the master's address in the environment."""
    os.chdir(config["folder"])
    sys.argv = config["command"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"{sys.argv[0]} ended with exit code {error.code}") from None


ray.init(address="auto")
TorchTrainer(
    train,
    train_loop_config={"folder": os.getcwd(), "command": sys.argv[1:]},
    scaling_config=ScalingConfig(
        num_workers=NUM_WORKERS,
        use_gpu="GPU" in RESOURCES_PER_WORKER,
        resources_per_worker=RESOURCES_PER_WORKER,
        placement_strategy="SPREAD",
    ),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=MAX_FAILURES)),
).fit()
