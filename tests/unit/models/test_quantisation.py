"""A base held in 8 or 4 bits: it learns beside it, only the adapter is saved, and it writes the same text again."""

import logging

import pytest
import torch
from transformers import T5ForConditionalGeneration

from lm_experiments_tools.backends.backend import LocalBackend, check_whole
from lm_experiments_tools.checkpoint.weights import save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.freezing import summary
from lm_experiments_tools.optimizers import build_optimizer
from tests.helpers.pretrained_toys import made, save_toy, t5_config, toy_args, toy_batch

pytest.importorskip("bitsandbytes")
# After these many updates at this rate on one batch the loss is below this share of the first.
STATED = {"lora": (20, 2e-2, 0.5), "prompt_tuning": (30, 0.5, 0.9)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    return save_toy("", tmp_path_factory.mktemp("t5"), T5ForConditionalGeneration(t5_config(num_layers=1)))


@pytest.mark.parametrize(("method", "bits"), [("lora", "int8"), ("prompt_tuning", "nf4")])
def test_learns_by_the_stated_amount_saves_its_adapter_alone_and_generates_the_same(
    method, bits, base, tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    steps, lr, share = STATED[method]
    model = made(toy_args(base, peft=method, quantize=bits))
    batch = toy_batch("encoder-decoder")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    backend = LocalBackend(device=torch.device("cpu"))
    backend.setup(model.train(), build_optimizer(model, name="AdamW", lr=lr, weight_decay=0.0))
    losses = []
    for _ in range(steps):
        loss = backend.model(**batch, use_cache=False).loss
        backend.backward(loss)
        backend.clip_and_step()
        losses.append(loss.item())
    assert losses[-1] < share * losses[0]
    assert "will be cast" not in caplog.text  # which bitsandbytes says of each multiplication
    after = dict(model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    held = {"int8": {torch.int8}, "nf4": {torch.uint8}}[bits]
    assert {p.dtype for p in model.parameters()} == {torch.float32} | held
    assert backend.state.weights_norm() > 0

    save_model(tmp_path, backend.unwrap(), backend.state.model_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 4 * trained + 4096
    again = made(toy_args(tmp_path, peft=method, quantize=bits, tokenizer=str(base)))
    ask = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"max_new_tokens": 8}
    assert torch.equal(again.generate(**ask), model.eval().generate(**ask))


def test_bytes_are_counted_as_they_are_held(base):
    whole, int8, nf4 = (summary(made(toy_args(base, peft="lora", quantize=bits))) for bits in (None, "int8", "nf4"))
    assert whole.all.total == int8.all.total == nf4.all.total
    assert whole.all.trainable == nf4.all.trainable
    assert whole.all.bytes == 4 * whole.all.total
    assert whole.parts["encoder"].bytes > 2 * int8.parts["encoder"].bytes > 2 * nf4.parts["encoder"].bytes


def test_checkpointing_needs_no_other_flag_and_changes_no_gradient(base):
    """peft issue 80: "element 0 of tensors does not require grad"."""
    batch, gradients = toy_batch("encoder-decoder"), []
    for recompute in (False, True):
        model = made(toy_args(base, peft="lora", quantize="int8", gradient_checkpointing=recompute)).train()
        model(**batch, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert (
            any(m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")) == recompute
        )
    assert max(gradient.abs().max() for gradient in gradients[0].values()) > 0.01
    torch.testing.assert_close(gradients[0], gradients[1])


def test_refusals(base, monkeypatch):
    model = made(toy_args(base, peft="lora", quantize="int8"))
    with pytest.raises(UserError, match="--quantize does not work with FSDP"):
        check_whole(model, "FSDP", shards=True)
    check_whole(model, "Horovod")
    with pytest.raises(UserError, match="add --peft lora"):
        toy_args(base, quantize="int8").check_used()
    toy_args(base, quantize="int8", validate_only=True).check_used()
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"--quantize nf4 needs the package bitsandbytes .*pip install bitsandbytes"):
        made(toy_args(base, peft="lora", quantize="nf4"))
