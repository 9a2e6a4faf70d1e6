"""Several soft prompts on one frozen model, trained together; they vote on the prediction.

Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", section 6: k prompts cost one model in
memory and one forward pass on rows that are repeated k times. On disk they are k folders prompt_00, prompt_01, ...,
each an adapter that peft loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


class PromptEnsemble(nn.Module):
    """k prompts of v virtual tokens before the inputs of a frozen model of transformers.

    Every row of a batch is repeated k times, each with its own prompt. The loss is the mean over all.

    Args:
        base: the model; its parameters are frozen here.
        start: float[k, v, width], initial values of the prompts.
        peft_config: peft's configuration of one such prompt, for the files.
    """

    def __init__(self, base: nn.Module, start: Tensor, peft_config: Any) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.prompts = nn.Parameter(start.detach().clone())
        self.peft_config = {"default": peft_config}
        self.config, self.generation_config = base.config, getattr(base, "generation_config", None)

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the base model's, as with peft."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)

    def get_base_model(self) -> nn.Module:
        """The model without prompts."""
        return self.base

    def get_input_embeddings(self) -> nn.Module:
        """Input embeddings of the base model."""
        return self.base.get_input_embeddings()

    def can_generate(self) -> bool:
        """True if the base model can generate."""
        return self.base.can_generate()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **others: Any,
    ) -> ModelOutput:
        """`loss`, the mean over all prompts; for a classifier also `logits` float[rows, classes] (see `vote`)."""
        from transformers.utils import ModelOutput

        rows, (k, count, _) = input_ids.shape[0], self.prompts.shape
        inputs = after_prompts(self, self.prompts, input_ids, attention_mask)
        if token_type_ids is not None:
            before = token_type_ids.new_zeros(rows * k, count)
            inputs["token_type_ids"] = torch.cat([before, token_type_ids.repeat_interleave(k, 0)], 1)
        if labels is not None:
            labels = labels.repeat_interleave(k, 0)
            if self.base.can_generate() and not self.config.is_encoder_decoder:
                labels = torch.cat([labels.new_full((rows * k, count), -100), labels], 1)
        outputs = self.base(**inputs, labels=labels, **others)
        answer = ModelOutput() if outputs.loss is None else ModelOutput(loss=outputs.loss)
        if not self.base.can_generate():
            answer["logits"] = vote(outputs.logits.unflatten(0, (rows, k)))
        return answer

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Majority vote: the most frequent text generated for each row, int64[rows, length]; on a tie the first."""
        if options.get("num_return_sequences", 1) > 1:
            raise UserError("num_return_sequences: a prompt ensemble generates one text.")
        from peft.utils.integrations import gather_params_ctx

        with gather_params_ctx([self.prompts], modifier_rank=None):  # ZeRO-3 gathers them in `forward` alone
            prompts = self.prompts.detach().clone()
        written = generate_after_prompts(self.base, prompts, input_ids, attention_mask, **options)
        texts = written.unflatten(0, (len(input_ids), len(prompts)))
        return torch.stack([most_frequent(row, self.config.pad_token_id) for row in texts])

    def file_names(self) -> dict[str, dict[str, str]]:
        """Parameters to save, {folder: {name in its adapter file: name of the trained parameter}}."""
        heads = {f"base_model.{n}": f"base.{n}" for n, p in self.base.named_parameters() if p.requires_grad}
        return {
            f"prompt_{number:02d}": {"prompt_embeddings": "prompts", **heads} for number in range(len(self.prompts))
        }

    def split(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Convert trained parameters to the contents of adapter files, by folder."""
        return {
            folder: {saved: state[name][number] if name == "prompts" else state[name] for saved, name in names.items()}
            for number, (folder, names) in enumerate(self.file_names().items())
        }

    def joined(self, folders: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Convert the contents of adapter files, by folder, to trained parameters."""
        names = self.file_names()
        state = {name: folders[folder][saved] for folder in names for saved, name in names[folder].items()}
        return state | {"prompts": torch.stack([folders[folder]["prompt_embeddings"] for folder in names])}


def vote(logits: Tensor) -> Tensor:
    """Combine the logits of k prompts, [rows, k, classes] -> [rows, classes]: number of votes plus mean probability.

    With one class (regression), the mean.
    """
    if logits.shape[-1] == 1:
        return logits.mean(1)
    votes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(1)
    return votes + logits.float().softmax(-1).mean(1)


def most_frequent(texts: Tensor, pad: int) -> Tensor:
    """The most frequent row of int64[k, length], without padding; the first one on a tie."""
    keys = [tuple(token for token in row if token != pad) for row in texts.tolist()]
    counts = Counter(keys)
    return texts[keys.index(max(counts, key=counts.__getitem__))]


def after_prompts(
    model: nn.Module, prompts: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
) -> dict[str, Tensor]:
    """Prepend each soft prompt to every row: `inputs_embeds` and `attention_mask` of all pairs.

    Args:
        model: has the input embeddings.
        prompts: float[k, v, width].
        input_ids, attention_mask: int64[rows, length].

    Returns:
        [rows * k, v + length, ...]: row 0 after prompts 0 to k - 1, then row 1, ...
    """
    rows, (k, count, _) = input_ids.shape[0], prompts.shape
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    embedded = model.get_input_embeddings()(input_ids).repeat_interleave(k, 0)
    return {
        "inputs_embeds": torch.cat([prompts.to(embedded.dtype).repeat(rows, 1, 1), embedded], 1),
        "attention_mask": torch.cat([mask.new_ones(rows * k, count), mask.repeat_interleave(k, 0)], 1),
    }


def generate_after_prompts(
    model: nn.Module, prompts: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The result of `model.generate` for every row after each soft prompt, int64[rows * k, length]."""
    read = after_prompts(model, prompts, input_ids, attention_mask)
    if not model.config.is_encoder_decoder:
        read["input_ids"] = input_ids.repeat_interleave(prompts.shape[0], 0)
        if options.get("max_length") is not None:  # transformers would count the prompts
            options.setdefault("max_new_tokens", options.pop("max_length") - input_ids.shape[1])
    return model.generate(**read, **options)
