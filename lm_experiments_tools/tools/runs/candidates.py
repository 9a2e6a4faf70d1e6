"""The settings that a sweep tries: all of a grid, or those that Optuna proposes from what it has seen."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    import optuna

_LONGEST_NAME = 120  # characters; file systems take 255
_RANGE = {"low", "high", "log"}


def run_name(values: Mapping[str, Any]) -> str:
    """The folder of a run, told by its values: the same for the same ones, different for others."""
    text = ",".join(f"{name}={value}" for name, value in values.items())
    name = re.sub(r"[^\w.,=+-]", "_", text)
    if name != text or len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


class Candidate(NamedTuple):
    """The values of a run by flag, and its number as a trial of Optuna's."""

    values: dict[str, Any]
    number: int = 0


class Grid:
    """Every combination of the values, the last parameter varying fastest."""

    def __init__(self, parameters: Mapping[str, Any]):
        for name, values in parameters.items():
            if not isinstance(values, list):
                raise UserError(f"parameters: {name} is a range, which a grid cannot try: add trials: 20 for Optuna.")
        combinations = itertools.product(*parameters.values())
        self._left = (Candidate(dict(zip(parameters, values, strict=True))) for values in combinations)

    def next(self) -> Candidate | None:
        """The next run, None at the end."""
        return next(self._left, None)

    def tell(self, candidate: Candidate, result: float | None) -> None:
        """Nothing follows from a result."""


class OptunaSearch:
    """`trials` runs whose values Optuna's TPE proposes; kept in a journal, so that it knows the earlier ones.

    Raises:
        UserError: Optuna is not installed.
    """

    def __init__(self, parameters: Mapping[str, Any], direction: str, trials: int, journal: Path):
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend
        except ImportError as error:
            raise UserError(f"trials is for Optuna, which is not there ({error}): pip install 'optuna>=5'.") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        goal = {"min": "minimize", "max": "maximize"}[direction]
        self._study = optuna.create_study(storage=storage, study_name="sweep", direction=goal, load_if_exists=True)
        known = self._study.get_trials(deepcopy=False)
        self._study.sampler = optuna.samplers.TPESampler(seed=len(known), constant_liar=True)
        self._states = optuna.trial.TrialState
        self._distributions = {name: _distribution(name, values) for name, values in parameters.items()}
        self._trials = trials
        # of a sweep that was killed: begun, and of no known end
        self._begun = [t for t in known if t.state == self._states.RUNNING]

    def next(self) -> Candidate | None:
        """The next run, None when there have been enough."""
        trial: optuna.trial.FrozenTrial | optuna.trial.Trial
        if self._begun:
            trial = self._begun.pop(0)
        elif len(self._study.get_trials(deepcopy=False)) >= self._trials:
            return None
        else:
            trial = self._study.ask(self._distributions)
        return Candidate(dict(trial.params), trial.number)

    def tell(self, candidate: Candidate, result: float | None) -> None:
        """Report a run's metric, or None for one that failed."""
        state = self._states.FAIL if result is None else self._states.COMPLETE
        self._study.tell(candidate.number, result, state=state)


def _distribution(name: str, values: Any) -> optuna.distributions.BaseDistribution:
    import optuna

    if isinstance(values, list):
        return optuna.distributions.CategoricalDistribution(values)
    low, high, log = values["low"], values["high"], bool(values.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return optuna.distributions.IntDistribution(low, high, log=log)
    return optuna.distributions.FloatDistribution(float(low), float(high), log=log)


def check_parameters(parameters: Any, where: str) -> None:
    """Refuse what is neither a list of single values nor a range {low, high, log}.

    Raises:
        UserError: naming the parameter.
    """
    if not isinstance(parameters, dict) or not parameters:
        raise UserError(f"{where}: parameters must name at least one flag and its values, as in lr: [1e-3, 1e-2].")
    for name, values in parameters.items():
        if isinstance(values, list) and values and not any(isinstance(value, (list, dict)) for value in values):
            continue
        if not isinstance(values, dict) or not {"low", "high"} <= set(values) <= _RANGE:
            raise UserError(
                f"{where}: parameters: {name} must be a list of values, or a range such as {{low: 1e-4, high: 1e-2, "
                "log: true}."
            )
        try:
            low, high = float(values["low"]), float(values["high"])
        except (TypeError, ValueError):
            raise UserError(f"{where}: parameters: {name}: low and high must be numbers.") from None
        if not low < high or (values.get("log") and low <= 0):
            raise UserError(f"{where}: parameters: {name}: low must be below high, and with log above 0.")
