"""A saved model, read back by transformers or by our class of it, computes what the model that was saved does."""

import json

import pytest
import torch
import transformers as tr

import modeling_bert
import modeling_t5
from lm_experiments_tools.models.saved import LIBRARIES, open_saved
from lm_experiments_tools.recipes.finetuner import FineTuner
from lm_experiments_tools.tools.main import main
from tests.helpers.finetuning_toys import write_json
from tests.helpers.pretrained_toys import ROWS, WORDS, save_toy, toy_model, toy_tokenizer

BODY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
BART = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
BART |= dict(encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64)
T5 = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
TEN = dict(max_position_embeddings=64)
# Each has another padding id than the tokenizer, 0, or none.
FAMILIES = {
    "bert": (tr.BertConfig, dict(**BODY, **TEN, pad_token_id=3)),
    "bert without padding": (tr.BertConfig, dict(**BODY, **TEN, pad_token_id=None)),
    "roberta": (tr.RobertaConfig, dict(**BODY, **TEN)),
    "xlm-roberta": (tr.XLMRobertaConfig, dict(**BODY, **TEN, pad_token_id=4)),
    "mpnet": (tr.MPNetConfig, dict(**BODY, **TEN)),
    "modernbert": (tr.ModernBertConfig, dict(**BODY, pad_token_id=5, local_attention=8)),
    "electra": (tr.ElectraConfig, dict(**BODY, **TEN, embedding_size=16, pad_token_id=6)),
    "our bert": (modeling_bert.BertConfig, dict(**BODY, **TEN, pad_token_id=3, position_embedding_type="rotary")),
    "t5": (tr.T5Config, dict(**T5, pad_token_id=7)),
    "t5 1.1": (tr.T5Config, dict(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "our t5": (modeling_t5.T5Config, dict(**T5, pad_token_id=7, position_embedding_type="rotary")),
    "bart": (tr.BartConfig, BART),
    "m2m100": (tr.M2M100Config, dict(**BART, decoder_start_token_id=2)),
    "pegasus": (tr.PegasusConfig, dict(**BART, pad_token_id=4)),
    "gpt2": (tr.GPT2Config, dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "llama": (tr.LlamaConfig, dict(**BODY, num_key_value_heads=2)),
    "llama with padding": (tr.LlamaConfig, dict(**BODY, pad_token_id=8)),
    "opt": (tr.OPTConfig, dict(hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, **TEN)),
}
TASK = dict(model_type="encoder-decoder", task="text_to_text", input_seq_len=16, target_seq_len=8, iters=1, lr=1e-3)
MORE = (
    "roberta", "mpnet", "m2m100", "bert without padding", "xlm-roberta", "electra", "our bert", "t5", "pegasus",
    "llama with padding", "opt",
)  # fmt: skip
IDS = dict(vocab_size=ROWS, bos_token_id=1, eos_token_id=1)


def base(name, folder):
    config_cls, changes = FAMILIES[name]
    config = config_cls(**{**IDS, **({"word_embed_proj_dim": 32} if name == "opt" else {}), **changes})
    config.tie_word_embeddings = changes.get("tie_word_embeddings", config.tie_word_embeddings)
    package = next((p for p in (modeling_t5, modeling_bert) if config_cls.__module__.startswith(p.__name__)), tr)
    kind = "encoder-decoder" if config.is_encoder_decoder else "decoder"
    if (type(config) in tr.MODEL_FOR_MASKED_LM_MAPPING and kind == "decoder") or package is modeling_bert:
        kind = "encoder"
    cls = {
        modeling_t5: lambda: modeling_t5.T5ForConditionalGeneration,
        modeling_bert: lambda: modeling_bert.BertForMaskedLM,
        tr: lambda: {
            "encoder": tr.MODEL_FOR_MASKED_LM_MAPPING,
            "decoder": tr.MODEL_FOR_CAUSAL_LM_MAPPING,
            "encoder-decoder": tr.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        }[kind][config_cls],
    }[package]()
    torch.manual_seed(0)
    config.decoder_start_token_id = getattr(config, "decoder_start_token_id", None) or 0
    cls(config).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return kind


@torch.no_grad()
def logits(model, kind):
    ids = torch.randint(9, WORDS, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in ((1, 5), (2, 9)):
        ids[row, length:], mask[row, length:] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "encoder-decoder":
        inputs["labels"] = ids.flip(0).masked_fill(mask.flip(0) == 0, -100)
    found = model.eval()(**inputs).logits
    return found if kind == "encoder" else found[mask.flip(0) > 0 if kind == "encoder-decoder" else mask > 0]


def read_back(folder, model, kind):
    cls = next(c for c in type(model).__mro__ if c.__module__.partition(".")[0] in LIBRARIES)
    again = cls.from_pretrained(folder)
    for found in (again, open_saved(folder).model):
        difference = (logits(found, kind) - logits(model, kind)).abs().max()
        assert difference < 2e-5, f"{folder}: {difference}"  # training took the fused path
    return again


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in FAMILIES])
def test_a_saved_model_is_the_trained_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = base(name, tmp_path / "base")
    rows = [{"text": f"w{i} w{i + 1}", "label": f"w{i % 2}"} for i in range(16)]
    write_json(tmp_path / "rows.jsonl", rows)
    task = dict(task="classification") if kind == "encoder" else dict(task="text_to_text", target_seq_len=16)
    if kind != "encoder":
        rows = [{"source": row["text"], "target": row["label"]} for row in rows]
        write_json(tmp_path / "rows.jsonl", rows)
    speed = {"speed": "off", "model_cls": "transformers:T5ForConditionalGeneration"} if name == "t5 1.1" else {}
    trained = FineTuner(
        "base", **speed, model_type=kind, **task, data_path="rows.jsonl", valid_data_path="rows.jsonl",
        input_seq_len=32, batch_size=8, iters=2, lr=1e-2, model_path="run", log_interval=100,
        use_generate_on_valid=False,
    )  # fmt: skip
    trained.train()
    read_back("run/last", trained.model, kind)
    trained.save("saved")
    read_back("saved", trained.model, kind)
    trained.add_tokens(["<new_1>", "<new_2>", *(f"<new_{i}>" for i in range(3, 12))])
    trained.save("added")
    again = read_back("added", trained.model, kind)
    assert again.get_input_embeddings().weight.shape[0] == 128
    trained.model.resize_token_embeddings(140)
    trained.save("resized")
    read_back("resized", trained.model, kind)
    assert main(["export", "resized", "--to", "exported"]) == 0
    read_back("exported", trained.model, kind)


def test_a_t5_whose_files_name_no_start_starts_with_padding(tmp_path):
    """transformers' T5Config has no such attribute then; T5's published configurations name padding."""
    model = toy_model("encoder-decoder")
    ids = torch.tensor([[5, 6, 1]])
    expected = model.generate(input_ids=ids, max_new_tokens=4), model(input_ids=ids, labels=ids).logits
    save_toy("encoder-decoder", tmp_path, model)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / name).read_text())
        del values["decoder_start_token_id"]
        (tmp_path / name).write_text(json.dumps(values))
    for found in (open_saved(str(tmp_path)).model, FineTuner(tmp_path, **TASK).model):
        found.eval()
        assert torch.equal(found.generate(input_ids=ids, max_new_tokens=4), expected[0])
        torch.testing.assert_close(found(input_ids=ids, labels=ids).logits, expected[1])


@pytest.mark.parametrize(("kind", "reader"), [("decoder", "CausalLM"), ("encoder", "PreTraining")])
def test_a_model_is_read_by_the_class_that_its_users_know(tmp_path, kind, reader):
    """transformers has GPT2LMHeadModel in AutoModelForPreTraining too."""
    assert open_saved(str(save_toy(kind, tmp_path / kind))).reader == f"AutoModelFor{reader}"
