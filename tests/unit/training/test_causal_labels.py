"""Models that shift labels inside drop the first of each row; what they do not average over has no weight."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.modules.inspection import drops_first_label
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import gradients_at_steps

VOCABULARY = 40


def tiny_gpt2(cls_name="GPT2LMHeadModel"):
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, cls_name)(config)


def ragged_rows(lengths=(12, 2, 3, 2, 1, 1, 9, 2)):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in lengths:
        ids = torch.randint(1, VOCABULARY, (12,), generator=generator)
        mask = (torch.arange(12) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return rows


def by_hand(model, rows):
    """The loss of all tokens that follow another one, by torch."""
    batch = torch.utils.data.default_collate(rows)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_any_split_of_ragged_rows_has_the_gradient_of_one_batch_where_the_model_shifts_labels(batch_size):
    rows, expected, model = ragged_rows(), tiny_gpt2(), tiny_gpt2()
    loss = by_hand(expected, rows)
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = gradients_at_steps(model, optimizer)
    args = TrainerArgs(batch_size=batch_size, gradient_accumulation_steps=8 // batch_size, iters=1, log_interval=1)
    valid = DataLoader(rows, batch_size=3)
    loop = TrainingLoop(args, LocalBackend(), model, optimizer, DataLoader(rows, batch_size=8), valid)
    loop.train()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert loop.state.metrics["train"]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert loop.state.metrics["valid"]["loss"] == pytest.approx(loss.item(), rel=1e-6)


def classes():
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    bart = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    xlnet = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": VOCABULARY}

    class Own(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, labels=None, **others):
            return super().forward(input_ids, labels=labels, **others)

    yield "GPT2LMHeadModel", tiny_gpt2()
    yield "a class of its own above it", Own(tiny_gpt2().config)
    yield "LlamaForCausalLM", transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=16))
    yield "BertLMHeadModel", transformers.BertLMHeadModel(transformers.BertConfig(**small, is_decoder=True))
    yield "BertForMaskedLM", transformers.BertForMaskedLM(transformers.BertConfig(**small))
    yield "BartForCausalLM", transformers.BartForCausalLM(transformers.BartConfig(**bart, vocab_size=VOCABULARY))
    yield "XLNetLMHeadModel", transformers.XLNetLMHeadModel(transformers.XLNetConfig(**xlnet))


def test_a_model_is_said_to_drop_the_first_label_if_and_only_if_its_loss_does():
    ids = torch.randint(5, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(2))
    found = {}
    for name, model in classes():
        one, other = ids.clone(), ids.clone()
        other[:, 0] = 4
        with torch.no_grad():
            losses = [model.eval()(input_ids=ids, labels=labels).loss.item() for labels in (one, other)]
        found[name] = drops_first_label(model)
        assert found[name] == (losses[0] == losses[1]), name
    assert set(found.values()) == {True, False}


def test_a_soft_prompt_has_the_first_label_predicted():
    peft = pytest.importorskip("peft")
    kinds = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    dropped = {}
    for name, config in kinds.items():
        model = peft.get_peft_model(tiny_gpt2(), config(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
        labels = torch.full((1, 6), -100)
        labels[:, 0] = 3
        ids = torch.ones(1, 6, dtype=torch.long)
        with torch.no_grad():
            loss = model(input_ids=ids, attention_mask=ids, labels=labels).loss
        dropped[name] = drops_first_label(model)
        assert dropped[name] == bool(loss.isnan())
    assert dropped == {"prompt": False, "prefix": True}
