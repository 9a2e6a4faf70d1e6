"""A decoder's text for a prompt is the same alone, beside longer texts, and by plain forward passes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lm_experiments_tools import FineTuner
from lm_experiments_tools.recipes.finetuning import with_new_tokens
from lm_experiments_tools.training.micro_batches import MicroBatch
from lm_experiments_tools.training.validation import generate
from tests.helpers.pretrained_toys import ROWS, save_toy

TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8", "w9", "w4 w70 w3"]
VIRTUAL = {"num_virtual_tokens": 4}
KINDS = {
    "none": {},
    "lora": {"peft": "lora"},
    "prompt_tuning": {"peft": "prompt_tuning", **VIRTUAL},
    "prefix_tuning": {"peft": "prefix_tuning", **VIRTUAL},
    "new_tokens": {"peft": "new_tokens", **VIRTUAL},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=ROWS)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(**sizes, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=1)
    )
    return {"gpt2": save_toy("decoder", folder / "gpt2"), "llama": save_toy("decoder", folder / "llama", llama)}


def tuner(base, **settings):
    made = FineTuner(base, model_type="decoder", input_seq_len=32, target_seq_len=12, speed="off", **settings)
    generator = torch.Generator().manual_seed(5)
    for parameter in made.model.parameters():
        if parameter.requires_grad and made.args.peft is not None:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    made.model.eval()
    return made


@torch.no_grad()
def written_by_forward_passes(made, text):
    """Greedily, without a cache and without padding, as the model was trained."""
    ids = made.tokenizer(with_new_tokens(made.args, made.tokenizer).prefix + text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    while ids.shape[1] < start + 12 and (ids.shape[1] == start or ids[0, -1] != made.tokenizer.eos_token_id):
        logits = made.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    frame = {made.tokenizer.eos_token_id, made.tokenizer.pad_token_id}
    return made.tokenizer.decode([token for token in ids[0, start:].tolist() if token not in frame]).strip()


@pytest.mark.parametrize(
    ("base", "kind"), [*(("gpt2", kind) for kind in KINDS), ("llama", "none"), ("llama", "prefix_tuning")]
)
def test_batch_writes_what_each_text_alone_does(base, kind, bases):
    made = tuner(bases[base], **KINDS[kind])
    alone = [made.generate_single(text) for text in TEXTS]
    assert made.predict(TEXTS) == alone
    assert [written_by_forward_passes(made, text) for text in TEXTS] == alone


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}])
def test_soft_prompt_is_generated_after_as_peft_does_it(options, bases):
    """Of a single text nothing is padded, and there peft is right."""
    import peft

    made = tuner(bases["gpt2"], **KINDS["prompt_tuning"])
    ask = made.tokenizer(TEXTS[:1], return_tensors="pt")
    ask = {name: ask[name] for name in ("input_ids", "attention_mask")}
    for length in ({"max_new_tokens": 12}, {"max_length": 20}):
        ours = made.model.generate(**ask, **options, **length)
        assert torch.equal(ours, peft.PeftModelForCausalLM.generate(made.model, **ask, **options, **length))
        assert ours.shape[1] > 9


def test_what_is_sampled_for_rows_depends_on_them_and_the_seed_alone(bases):
    made = tuner(bases["gpt2"])
    prompts = torch.randint(2, ROWS, (2, 5), generator=torch.Generator().manual_seed(1))
    written = []
    for padding in (0, 3):  # of longer rows that are this worker's too, in other micro-batches
        torch.manual_seed(padding)  # what it drew before
        prompt = torch.cat([torch.ones(2, padding, dtype=torch.int64), prompts], 1)
        mask = torch.cat([torch.zeros(2, padding, dtype=torch.int64), torch.ones_like(prompts)], 1)
        batch = {"input_ids": prompts, "prompt_ids": prompt, "prompt_mask": mask}
        options = {"do_sample": True, "max_new_tokens": 12}
        written.append(generate(made.model, MicroBatch({"input_ids": prompts}, batch, {"labels": 1}), options, seed=3))
    assert torch.equal(*written)
