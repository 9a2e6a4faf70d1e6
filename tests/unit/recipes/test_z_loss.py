"""--z_loss reaches our T5's loss, whose closed form is z * logsumexp(logits)^2, and is refused elsewhere."""

import pytest
import torch
import transformers

import modeling_t5
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.from_args import ModelSource, model_from_args

SIZE = {"vocab_size": 50, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "dropout_rate": 0.0}
SIZE |= {"decoder_start_token_id": 0, "pad_token_id": 0}


def built(flag, package=modeling_t5, **config):
    args = T5PretrainingArgs(data_path=("x",), model_cfg="t5-small", lr=1.0, speed="off", z_loss=flag)
    source = ModelSource("T5", package.T5ForConditionalGeneration, package.T5Config(**SIZE, **config))
    return model_from_args(args, source, 50).eval()


@pytest.mark.parametrize("chunk_size", [0, 3])
def test_the_flag_adds_the_squared_log_of_the_denominator(chunk_size):
    assert built(None, z_loss=1e-4).config.z_loss == 1e-4
    plain, weighted = (built(z, cross_entropy_chunk_size=chunk_size, z_loss=1.0) for z in (0.0, 1e-2))
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[6, 7, 1, -100]])}
    log_z = plain(**inputs, return_logits=True).logits[0, :3].double().logsumexp(-1)
    losses = [model(**inputs, return_logits=False).loss.item() for model in (plain, weighted)]
    assert losses[1] - losses[0] == pytest.approx(1e-2 * log_z.square().mean().item(), rel=1e-3)


def test_a_class_that_computes_its_own_loss_refuses_the_flag():
    with pytest.raises(UserError, match=r"--z_loss: the model of transformers.*choose --model_cls modeling_t5"):
        built(1e-4, transformers, z_loss=1e-4)
