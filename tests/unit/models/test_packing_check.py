"""--packing is refused for models whose packed examples, compared with themselves alone, see each other."""

import pytest
import torch
import transformers as tr

import modeling_t5
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.finetuning import check_packing
from lm_experiments_tools.training.generators import random_state
from tests.helpers.pretrained_toys import t5_config

SIZES = dict(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)
GPT = dict(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64)
OPT = dict(ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32)
LLAMA = dict(intermediate_size=64)
CONFIGS = {
    "gpt2": tr.GPT2Config(**GPT),
    "llama": tr.LlamaConfig(**SIZES, **LLAMA),
    "gemma2": tr.Gemma2Config(**SIZES, **LLAMA, num_key_value_heads=2, head_dim=8),
    "opt": tr.OPTConfig(**SIZES, **OPT),
    "falcon": tr.FalconConfig(**SIZES),
    "recurrent_gemma": tr.RecurrentGemmaConfig(**SIZES, **LLAMA, lru_width=32, num_key_value_heads=1),
}


def made(config):
    torch.manual_seed(0)
    return tr.AutoModelForCausalLM.from_config(config)


def arguments(model_type="decoder", **changes):
    return FinetuningArgs(model_cfg="x", model_type=model_type, data_path=("x",), packing=True, **changes)


@torch.no_grad()
def sees_other_examples(model):
    """The second of two packed examples, against itself alone."""
    ids, places = torch.arange(5, 15)[None], torch.arange(5).repeat(1, 2)
    model.eval()
    packed = model(input_ids=ids, position_ids=places, use_cache=False).logits[0, 5:]
    alone = model(input_ids=ids[:, 5:], use_cache=False).logits[0]
    return bool((packed - alone).abs().max() > 1e-3 * alone.abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_decoders_whose_packed_examples_see_each_other_are_refused(name):
    model = made(CONFIGS[name])
    if sees_other_examples(model):
        with pytest.raises(UserError, match=f"--packing: in {type(model).__name__} the examples of a row see each"):
            check_packing(model, arguments())
    else:
        check_packing(model, arguments())
    assert sees_other_examples(model) == (list(CONFIGS).index(name) >= list(CONFIGS).index("opt"))


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_adapted_and_8_bit_models_are_judged_by_what_is_under_the_adapter(name, tmp_path):
    """Weights so large that scales of 8-bit layers follow from all tokens of a batch."""
    import peft

    pytest.importorskip("bitsandbytes")
    config = type(CONFIGS[name]).from_dict({**CONFIGS[name].to_dict(), "initializer_range": 0.3, "init_std": 0.3})
    made(config).save_pretrained(tmp_path)
    eight_bits = tr.BitsAndBytesConfig(load_in_8bit=True)
    base = tr.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=eight_bits, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    if name == "llama":
        check_packing(model, arguments())
    else:
        with pytest.raises(UserError, match="in OPTForCausalLM the examples"):
            check_packing(model, arguments())


def test_nothing_of_the_model_or_the_random_state_changes():
    model = made(tr.GPT2Config(**GPT, embd_pdrop=0.5, attn_pdrop=0.5)).train()
    model.lm_head.eval()
    before, modes = random_state(), [module.training for module in model.modules()]
    check_packing(model, arguments())
    assert torch.equal(random_state()["torch"], before["torch"])
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_model_without_weights_is_not_looked_at():
    with torch.device("meta"):
        check_packing(made(CONFIGS["opt"]), arguments())


def test_encoder_decoders_are_looked_at_too():
    config = {**t5_config().to_dict(), "model_type": modeling_t5.T5Config.model_type}
    model = modeling_t5.T5ForConditionalGeneration(modeling_t5.T5Config.from_dict(config))
    check_packing(model, arguments("encoder-decoder"))
    with pytest.raises(UserError, match="T5ForConditionalGeneration takes no segment_ids"):
        check_packing(tr.T5ForConditionalGeneration(t5_config()), arguments("encoder-decoder"))

    class Deaf(modeling_t5.T5ForConditionalGeneration):
        def forward(self, segment_ids=None, decoder_segment_ids=None, **others):
            return super().forward(**others)

    deaf = Deaf(modeling_t5.T5Config.from_dict(config))
    with pytest.raises(UserError, match="in Deaf the examples of a row see each other"):
        check_packing(deaf, arguments("encoder-decoder"))
