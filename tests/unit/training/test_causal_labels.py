"""Models that shift labels inside drop the first of each row; what they do not average over has no weight."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lm_experiments_tools.training.losses import targets_of
from tests.helpers.loops import make_loop
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


class Wrapper(torch.nn.Module):
    """A causal model as a part of a module of one's own, which takes labels and hands them on."""

    shifts_labels = True

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper], ids=["GPT-2", "a module around GPT-2"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_any_split_of_ragged_rows_has_the_gradient_of_one_batch_where_the_model_shifts_labels(batch_size, wrap):
    rows, expected, model = ragged_rows(), tiny_gpt2(), wrap(tiny_gpt2())
    loss = by_hand(expected, rows)
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = gradients_at_steps(model, optimizer)
    args = {"batch_size": batch_size, "gradient_accumulation_steps": 8 // batch_size, "iters": 1}
    loop = make_loop(model, optimizer, DataLoader(rows, 8), DataLoader(rows, 3), **args)
    loop.train()
    seen = {name.removeprefix("inner."): gradient for name, gradient in seen.items()}
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert loop.state.metrics["train"]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert loop.state.metrics["valid"]["loss"] == pytest.approx(loss.item(), rel=1e-6)


def classes():
    import transformers

    import modeling_bert

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    bart = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": VOCABULARY}
    bart |= {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 2), ("ffn_dim", 16))
    }
    xlnet = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": VOCABULARY}
    xlm = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": VOCABULARY, "dropout": 0.0}

    class Own(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, labels=None, **others):
            return super().forward(input_ids, labels=labels, **others)

    yield "GPT2LMHeadModel", tiny_gpt2()
    yield "a class of its own above it", Own(tiny_gpt2().config)
    yield "LlamaForCausalLM", transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=16))
    yield "BertLMHeadModel", transformers.BertLMHeadModel(transformers.BertConfig(**small, is_decoder=True))
    yield "BertForMaskedLM", transformers.BertForMaskedLM(transformers.BertConfig(**small))
    for name in (
        "Bart",
        "BlenderbotSmall",
        "Marian",
        "MBart",
        "Mvp",
        "PLBart",
        "Pegasus",
        "BigBirdPegasus",
        "Blenderbot",
    ):
        config = getattr(transformers, f"{name}Config")(**bart, pad_token_id=0)
        yield f"{name}ForCausalLM", getattr(transformers, f"{name}ForCausalLM")(config)
    yield "BartForConditionalGeneration", transformers.BartForConditionalGeneration(transformers.BartConfig(**bart))
    yield "TrOCRForCausalLM", transformers.TrOCRForCausalLM(transformers.TrOCRConfig(**bart, pad_token_id=0))
    yield "XLMWithLMHeadModel", transformers.XLMWithLMHeadModel(transformers.XLMConfig(**xlm))
    yield "XLNetLMHeadModel", transformers.XLNetLMHeadModel(transformers.XLNetConfig(**xlnet))
    for is_decoder in (True, False):
        config = modeling_bert.BertConfig(**small, intermediate_size=16, is_decoder=is_decoder)
        yield f"our BertForMaskedLM, is_decoder {is_decoder}", modeling_bert.BertForMaskedLM(config)


def test_a_model_is_known_to_drop_the_first_label_if_and_only_if_its_loss_does():
    ids = torch.randint(5, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(2))
    found = {}
    for name, model in classes():
        one, other = ids.clone(), ids.clone()
        other[:, 0] = 4
        with torch.no_grad():
            losses = [model.eval()(input_ids=ids, labels=labels).loss.item() for labels in (one, other)]
        found[name] = targets_of(model).shifts_labels
        assert found[name] == (losses[0] == losses[1]), name
    assert set(found.values()) == {True, False}


def test_a_soft_prompt_has_the_first_label_predicted():
    peft = pytest.importorskip("peft")
    kinds = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    dropped = {}
    for name, config in kinds.items():
        model = peft.get_peft_model(tiny_gpt2(), config(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
        dropped[name] = targets_of(model).shifts_labels
    assert dropped == {"prompt": False, "prefix": True}


def test_the_first_label_of_a_document_in_packed_rows_counts_as_little_as_that_of_a_row():
    """Our causal BERT predicts no document's first token from the document before it."""
    import modeling_bert

    ids = torch.randint(5, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(2))
    segments = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0], [1] * 8])
    labels = ids.masked_fill(segments == 0, -100)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = modeling_bert.BertConfig(**small, vocab_size=VOCABULARY, is_decoder=True)
    model = modeling_bert.BertForMaskedLM(config).eval()
    with torch.no_grad():  # labels that the loss does not read change nothing
        whole = model(input_ids=ids, labels=labels, segment_ids=segments).loss
        read = torch.zeros_like(labels, dtype=torch.bool)
        for row, column in (labels != -100).nonzero().tolist():
            changed = labels.clone()
            changed[row, column] = 1 + changed[row, column] % 30
            read[row, column] = model(input_ids=ids, labels=changed, segment_ids=segments).loss != whole
    assert torch.equal(targets_of(model).valid(labels, None, segments), read) and read.sum() == 10
