"""Log L2 norms of the gradient, the weights and the update of each part of a T5: a callback in a run of your own.

    python examples/log_norms.py --data_path DATA --vocab V.model --model_cfg t5-small --lr 1e-3 --model_path runs/t5

The gradient is the clipped one. Updates of 1e-3 of the weights are usual. Not with DeepSpeed: it hides gradients.
"""

import re

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lm_experiments_tools.backends.collective import total_norm
from lm_experiments_tools.config.cli import parse, run_main
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.recipes.t5 import T5Pretraining
from lm_experiments_tools.recipes.t5_sources import sources_of_phases


class LogNorms:
    """Callback that logs norms after every `every` updates, under norm/gradient/encoder.block.0 and the like."""

    def __init__(self, model: torch.nn.Module, every: int = 100) -> None:
        self.model, self.every, self.countdown = model, every, every
        self.hook = register_optimizer_step_pre_hook(self.note)

    def parts(self) -> dict[str, list[torch.nn.Parameter]]:
        """Parameters by the first numbered module of their name, or else by their module."""
        parts = {}
        for name, parameter in self.model.named_parameters():
            block = re.match(r".*?\.\d+(?=\.)", name)
            parts.setdefault(block[0] if block else name.rpartition(".")[0], []).append(parameter)
        return parts

    def note(self, *_) -> None:
        """Keep gradients' norms and weights of an update that will be logged."""
        self.countdown -= 1
        if self.countdown == 0:
            parts = self.parts()
            self.gradients = {part: total_norm(p.grad for p in of if p.grad is not None) for part, of in parts.items()}
            self.before = {part: [p.detach().clone() for p in of] for part, of in parts.items()}

    def on_step_end(self, trainer, info) -> None:
        values = {}
        for part, of in self.parts().items() if self.countdown == 0 else ():  # else the run was resumed in between
            after = [p.detach() for p in of]
            update = total_norm(new - old for new, old in zip(after, self.before[part], strict=True))
            norms = {"gradient": self.gradients[part], "weight": total_norm(after), "update": update}
            values |= {f"norm/{kind}/{part}": norm.item() for kind, norm in norms.items()}
        self.countdown, self.before = self.every, None
        trainer.log("train", {}, **values)


class Watched(T5Pretraining):
    def loop_options(self, args, source, model):
        return {**super().loop_options(args, source, model), "callbacks": [LogNorms(model)]}


if __name__ == "__main__":
    args, origins = parse(T5PretrainingArgs)
    run_main(lambda: Watched(args, origins, lambda: sources_of_phases(args)).run())
