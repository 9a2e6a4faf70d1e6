"""Hyperparameter search with Optuna: run a training script once per trial.

    python examples/sweep_optuna.py --config run.yaml --output runs/sweep --trials 20

Edit `search_space` for other parameters. The study is kept in OUTPUT/study.log: the same command again resumes an
interrupted trial from its checkpoint and adds more trials. `lmtools compare OUTPUT` shows the runs.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState


def search_space(trial: optuna.Trial) -> dict[str, object]:
    """Flags of one trial."""
    return {
        "lr": trial.suggest_float("lr", 1e-3, 5e-2, log=True),
        "optimizer": trial.suggest_categorical("optimizer", ["AdamW", "AdamWScale"]),
    }


def best_value(run: Path, metric: str, direction: str) -> float:
    """Best validation value of a run.

    Raises:
        optuna.TrialPruned: the run logged none.
    """
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    values = [r[metric] for r in records if r["split"] == "valid" and isinstance(r.get(metric), (int, float))]
    if not values:
        raise optuna.TrialPruned(f"{run} logged no validation {metric}: set --valid_interval.")
    return min(values) if direction == "minimize" else max(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="pretrain-t5", choices=("pretrain-t5", "pretrain-bert", "finetune"))
    parser.add_argument("--config", required=True, help="YAML file with the other flags of the script")
    parser.add_argument("--output", required=True, type=Path, help="folder of the runs and the study")
    parser.add_argument("--trials", type=int, default=20, help="number of trials to add")
    parser.add_argument("--metric", default="loss", help="validation metric")
    parser.add_argument("--direction", default="minimize", choices=("minimize", "maximize"))
    args = parser.parse_args()

    def objective(trial: optuna.Trial) -> float:
        flags = search_space(trial)
        run = args.output / ",".join(f"{name}={value}" for name, value in flags.items())
        command = [sys.executable, "-m", "lm_experiments_tools.tools.main", args.script, "--config", args.config]
        command += [
            "--model_path",
            str(run),
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        ]
        subprocess.run(command, check=True)
        return best_value(run, args.metric, args.direction)

    args.output.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(args.output / "study.log")))
    study = optuna.create_study(storage=storage, study_name="sweep", direction=args.direction, load_if_exists=True)
    for interrupted in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(interrupted.number, state=TrialState.FAIL)
        study.enqueue_trial(interrupted.params)
    study.optimize(objective, n_trials=args.trials, catch=subprocess.CalledProcessError)
    print(f"best {args.metric}: {study.best_value:.4g} with {study.best_params}")


if __name__ == "__main__":
    main()
