"""k prompts side by side are k prompts alone; their votes; on disk each is an adapter of peft."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lm_experiments_tools.checkpoint.writer import load_weights, save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.inspection import is_spread
from lm_experiments_tools.modules.prompt_ensemble import most_frequent, vote
from tests.helpers.pretrained_toys import made, save_toy, toy_args, toy_batch

CHOICES = dict(peft="prompt_tuning", num_prompts=3, num_virtual_tokens=4, dropout_rate=0.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """kind -> (base folder, ensemble, its folder) after a few updates."""
    found = {}
    for kind in ("encoder", "encoder-decoder", "decoder"):
        base = save_toy(kind, tmp_path_factory.mktemp(kind))
        model = made(toy_args(base, kind, **CHOICES)).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(5):
            model(**toy_batch(kind)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        folder = tmp_path_factory.mktemp(f"{kind}_ensemble")
        save_model(folder, model.eval())
        found[kind] = base, model, folder
    return found


@pytest.mark.parametrize("kind", ["encoder-decoder", "decoder"])
def test_each_prompt_alone_is_what_it_is_in_the_ensemble(kind, saved):
    base, model, folder = saved[kind]
    auto = AutoModelForSeq2SeqLM if kind == "encoder-decoder" else AutoModelForCausalLM
    batch, losses, texts = toy_batch(kind), [], []
    ask = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    for name in ("prompt_00", "prompt_01", "prompt_02"):
        alone = peft.PeftModel.from_pretrained(auto.from_pretrained(base), folder / name).eval()
        losses.append(alone(**batch).loss)
        texts.append(alone.generate(**ask, max_new_tokens=5, pad_token_id=0, do_sample=False))
    assert len({round(loss.item(), 4) for loss in losses}) == 3
    torch.testing.assert_close(model(**batch).loss, torch.stack(losses).mean())
    width = max(text.shape[1] for text in texts)
    texts = torch.stack([torch.nn.functional.pad(text, (0, width - text.shape[1])) for text in texts], 1)
    together = model.generate(**ask, max_new_tokens=5, pad_token_id=0)
    assert torch.equal(together, torch.stack([most_frequent(row, 0) for row in texts])[:, : together.shape[1]])


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", "decoder"])
def test_it_is_loaded_again_and_trains_only_prompts_and_head(kind, saved):
    base, model, folder = saved[kind]
    batch = toy_batch(kind)
    again, fresh = made(toy_args(folder, kind, tokenizer=str(base))), made(toy_args(base, kind, **CHOICES))
    load_weights(fresh, folder)
    for other in (again.eval(), fresh.eval()):
        assert torch.equal(other(**batch).loss, model(**batch).loss)
        assert {n for n, p in other.named_parameters() if p.requires_grad} - {"prompts"} == (
            {"base.classifier.weight", "base.classifier.bias"} if kind == "encoder" else set()
        )
    one = made(toy_args(base, kind, **{**CHOICES, "num_prompts": 1}))
    with pytest.raises(UserError, match=r"holds 3 prompt\(s\), this model has 1: see --num_prompts"):
        load_weights(one, folder)


def test_classifier_gives_one_row_of_logits_for_each_row(saved):
    _, model, _ = saved["encoder"]
    assert model(**toy_batch("encoder")).logits.shape == (4, 2)


def test_what_it_has_not_is_the_bases_and_it_saves_twice(saved, tmp_path):
    _, model, _ = saved["encoder-decoder"]
    assert "T5Block" in model._no_split_modules and model.dtype is torch.float32
    model.base.is_quantized, model.base.hf_device_map = True, {"encoder": "cpu", "decoder": "disk"}
    assert model.is_quantized and is_spread(model)
    del model.base.is_quantized, model.base.hf_device_map
    assert not hasattr(model, "no_such_thing")
    for _ in range(2):
        save_model(tmp_path, model)
    made(toy_args(tmp_path, tokenizer=str(saved["encoder-decoder"][0])))


def test_votes_by_majority_then_by_probability():
    logits = torch.tensor([[[9.0, 0.0], [0.0, 0.1], [0.0, 0.1]], [[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    assert vote(logits).argmax(-1).tolist() == [1, 0]  # two against a sure one
    even = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    assert vote(even).argmax(-1).tolist() == [0]  # one each: the more probable
    assert vote(torch.tensor([[[1.0], [2.0]]])).tolist() == [[1.5]]


def test_text_of_most_prompts_and_the_first_of_ties():
    assert most_frequent(torch.tensor([[5, 6, 0], [7, 0, 0], [7, 0, 0]]), 0).tolist() == [7, 0, 0]
    assert most_frequent(torch.tensor([[5, 6], [7, 0]]), 0).tolist() == [5, 6]
