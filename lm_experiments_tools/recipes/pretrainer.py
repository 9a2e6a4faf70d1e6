"""Pre-training from Python, with the flags of the pre-training scripts as settings.

run = PreTrainer("t5-small", data_path="my_text/", vocab="google-t5/t5-small", iters=2000)
run.train()
run.save("mine")
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.backends.cluster import attempt
from lm_experiments_tools.checkpoint.source import Source, find_source
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.flags import AUTO
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import inherited
from lm_experiments_tools.models.build import load_model_config, pretrained_config, register_own_models
from lm_experiments_tools.models.pretrained import kind_of
from lm_experiments_tools.models.speed import choose_speed
from lm_experiments_tools.modules.inspection import evaluated
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.recipes.bert import BertPretraining
from lm_experiments_tools.recipes.common import described
from lm_experiments_tools.recipes.keywords import as_flag, changed_args, fast, save_folder, stop_button
from lm_experiments_tools.recipes.t5 import T5Pretraining
from lm_experiments_tools.recipes.t5_sources import sources_of_phases
from lm_experiments_tools.tracking.notebook import Results
from lm_experiments_tools.training.run_folder import with_run_directory

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.recipes.recipe import Pretraining
    from lm_experiments_tools.recipes.settings import PreTrainingSettings

_REFUSED = dict.fromkeys(("validate_only", "working_dir"), "the scripts")
# Without lr and optimizer. AdamWScale and its rate are nanoT5's; 5e-4 suits BERT's batches of some hundred rows.
_OF_NEW_T5 = {"optimizer": "AdamWScale", "lr": 2e-2, "lr_scheduler": "cosine"}
_OF_OTHER_NEW = {"optimizer": "AdamW", "lr": 5e-4, "lr_scheduler": "linear"}
_OF_PRETRAINED = {"optimizer": "AdamW", "lr": 1e-4, "lr_scheduler": "linear"}
_OF_ALL = {"clip_grad_norm": 1.0, "warmup_ratio": 0.1}


class PreTrainer:
    """A model to pre-train on text: a T5 or another model by an objective, an encoder as BERT is.

    An encoder is trained as by run_bert_pretraining.py, by default on plain text (`packing="documents"`). Other
    models, and those with a `task`, are trained as by run_t5_pretraining.py.

    Args:
        model_cfg: configuration of a new model: a JSON file, or the name of one below models_configs. None with
            `from_pretrained`, `base_model` or `init_checkpoint`.
        keywords: flags of the script. Without `lr` and `optimizer` they are usual ones, which the log names.

    Attributes:
        args: the settings.

    Raises:
        UserError: an unknown or impossible setting.
    """

    def __init__(self, model_cfg: str | Path | None = None, **keywords: Unpack[PreTrainingSettings]) -> None:
        settings: dict[str, Any] = dict(keywords)
        if model_cfg is not None:
            settings["model_cfg"] = model_cfg
        settings = {name: as_flag(name, value, None) for name, value in settings.items()}
        kind = _kind_of_model(settings)
        self._is_bert = kind == "encoder" and "task" not in settings
        if self._is_bert:
            settings = {"packing": "documents", **settings}
        usual = _usual_optimizer(settings, kind)
        found = (inherited.of_bert if self._is_bert else inherited.of_t5)(settings)
        self.args: T5PretrainingArgs | BertPretrainingArgs = self._changed(
            None, {**{name: value for name, (value, _) in found.items()}, **usual, **settings}
        )
        given = {**dict.fromkeys(settings, "given"), **{name: origin for name, (_, origin) in found.items()}}
        self.args, self._origins = choose_speed(self.args, given, keeps_process=True)
        self._usual_schedule = usual.get("lr_scheduler")
        self._recipe: Pretraining | None = None  # that has built the model
        self._has_trained = False  # in `args.model_path`

    @cached_property
    def backend(self) -> Backend:
        """The distributed backend of the launcher, or of a single process; created on first use."""
        return get_backend(self.args)

    @property
    def model(self) -> nn.Module:
        """The model, once `train` or `evaluate` has built it."""
        return self._built("model").trainer.backend.unwrap()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the data, a `Tokenizer` of this package."""
        return self._built("tokenizer").data.vocabulary

    @fast
    def train(self, **settings: Unpack[PreTrainingSettings]) -> Results:
        """Train on `data_path`; returns the last metrics of each split, as in metrics.json.

        If `model_path` has checkpoints, the run is resumed. So a second call with more `iters` continues the first;
        the usual schedule is then that of the whole length, and raises the rate again. Settings of a call that is
        refused are forgotten.

        Args:
            settings: flags to change before training, for example iters=4000. A rate that is given here changes
                neither the usual optimizer nor the usual schedule, as one given to PreTrainer does.

        Raises:
            UserError: an impossible setting, or a second call whose first saved no checkpoint.
        """
        args = self._changed(self.args, dict(settings))
        if self._has_trained and (args.model_path is None or args.model_path != self.args.model_path):
            raise UserError(
                "this PreTrainer has trained, and a second train() continues the checkpoints of its model_path: give "
                "both the same one, or save(folder), from whose weights PreTrainer(from_pretrained=folder) starts."
            )
        return Results(self._run(args).trainer.state.metrics)

    @fast
    def evaluate(self) -> Results:
        """Compute the loss on `valid_data_path`, on at most `valid_samples` examples.

        Before `train`, the weights are those of the newest checkpoint in `model_path`, if any.

        Raises:
            UserError: there is no validation data, or the weights would be random.
        """
        if self.args.lacks_validation():
            raise UserError("there is no validation data: give valid_data_path or valid_fraction to PreTrainer.")
        if not hasattr(self._recipe, "trainer"):
            if not (self.args.may_resume() or self.args.names_weights()):
                raise UserError("evaluate: the weights are random: train(), or give model_path of a run.")
            recipe = self._run(replace(self.args, validate_only=True, save_best=False))
            return Results(recipe.trainer.state.metrics["valid"])
        trainer = self._recipe.trainer
        with evaluated(self.model):
            return Results(trainer.validate(trainer.valid_dataloader, write_tb=False) or {})

    def save(self, path: str | Path) -> None:
        """Save model and tokenizer as a folder for `from_pretrained`. Every worker must call it."""
        recipe = self._built("save")
        save_folder(Path(path), self.backend, self.model, recipe.data.vocabulary.save)

    def _changed(self, args: Any, settings: dict[str, Any]) -> Any:
        args_class = BertPretrainingArgs if self._is_bert else T5PretrainingArgs
        return changed_args(args_class, args, settings, owner="PreTrainer", refused=_REFUSED)

    def _run(self, args: T5PretrainingArgs | BertPretrainingArgs) -> Pretraining:
        """Train or validate by a new recipe, which takes the place of the one before if it gives the object weights.

        The model of the one before is kept until the new settings are accepted.
        """
        recipe_class = BertPretraining if self._is_bert else T5Pretraining
        is_new, args = args.model_path == AUTO, with_run_directory(args, self.backend, recipe_class.script)
        run_args = args
        # The usual schedule has the length of the run: a longer second call would find a kept one ended at 0.
        stretches = bool(self._usual_schedule) and args.lr_scheduler == self._usual_schedule
        if stretches and args.epochs is None:
            run_args = replace(args, num_training_steps=args.num_training_steps or args.iters)
        if isinstance(run_args, BertPretrainingArgs):
            recipe: Pretraining = BertPretraining(run_args, self._origins)
        else:
            recipe = T5Pretraining(run_args, self._origins, attempt(lambda: sources_of_phases(run_args)))
        recipe.backend, recipe.before = self.backend, self._recipe
        recipe.stretches_schedule = stretches and args.num_training_steps is None
        try:
            ends = described(args, self.backend, is_new=is_new, trained=lambda: recipe.trainer, commands=None)
            with stop_button(lambda: recipe.trainer), ends:
                recipe.train()
                if not args.validate_only:
                    recipe.finish()
        finally:
            recipe.close_data()
            if not hasattr(recipe, "trainer") or not (recipe.trainer.state.step or args.names_weights()):
                recipe.free()  # no model, or one with random weights
            else:
                self._recipe = recipe
                if not args.validate_only:
                    self.args, self._has_trained = args, True
        return recipe

    def _built(self, what: str) -> Pretraining:
        if not hasattr(self._recipe, "trainer"):
            raise UserError(f"{what}: there is no model, or the last start failed: call train() or evaluate() first.")
        return self._recipe


def _kind_of_model(settings: dict[str, Any]) -> str | None:
    """Kind of the model by its configuration; None if no setting names one."""
    model_cls = settings.get("model_cls")
    config_cls = None if model_cls is None else getattr(get_cls_by_name(model_cls), "config_class", None)
    if settings.get("model_cfg") is not None:
        return kind_of(load_model_config(settings["model_cfg"], config_cls))
    named = next((settings[n] for n in ("from_pretrained", "base_model", "init_checkpoint") if settings.get(n)), None)
    if named is None:
        return None
    source: Source = find_source(named)
    register_own_models(source)
    return kind_of(pretrained_config(source.name, config_cls))


def _usual_optimizer(settings: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """Optimizer, rate and schedule for settings without `lr`, except those that are given."""
    if not {"lr", "optimizer", "relative_step", "phases"}.isdisjoint(settings):
        return {}
    usual = _OF_NEW_T5 if kind == "encoder-decoder" else _OF_OTHER_NEW
    usual = _OF_PRETRAINED if settings.get("from_pretrained") or settings.get("init_checkpoint") else usual
    given = {*settings, *(("warmup_ratio",) if "num_warmup_steps" in settings else ())}
    return {name: value for name, value in {**usual, **_OF_ALL}.items() if name not in given}
