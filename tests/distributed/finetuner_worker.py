"""One worker with a FineTuner: `finetuner_worker.py MODEL DATA FOLDER BATCH_SIZE STEP ...`, each a method to call."""

import json
import sys

from lm_experiments_tools import FineTuner
from lm_experiments_tools.checkpoint import weights as checkpoint
from lm_experiments_tools.errors import UserError

model, data, folder, batch_size, *steps = sys.argv[1:]
settings = {
    "iters": 2,
    "lr": 1e-3,
    "input_seq_len": 32,
    "target_seq_len": 16,
    "metrics": "exact_match",
    "speed": "off",
}
tuner = FineTuner(model, data_path=data, valid_data_path=data, batch_size=int(batch_size), **settings)
write = checkpoint.save_model


def seen(*args, **options):
    print(f"written by {tuner.backend.rank}\n", end="", flush=True)
    write(*args, **options)


checkpoint.save_model = seen
losses = []
try:
    for step in steps:
        if step == "save":
            tuner.save(folder)
        else:
            losses.append(tuner.evaluate()["loss"] if step == "evaluate" else tuner.train()["valid"]["loss"])
except UserError as error:
    losses.append(str(error))
if tuner.backend.is_main:
    print(f"losses {json.dumps(losses)}\n", end="", flush=True)
tuner.backend.close()
