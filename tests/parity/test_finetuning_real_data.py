"""run_finetuning.py on real sets: each metric, computed again from the predictions by the reference program.

Losses are computed again by transformers from the checkpoint. The models are tiny and hardly trained; what is tested
is that the numbers are right, not that they are good.
"""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from lm_experiments_tools.data.order import epoch_shift
from run_finetuning import main
from tests.helpers.real_data import DATA, lacking

BERT_VOCABULARY, T5_VOCABULARY = DATA / "vocabs" / "bert-base-uncased", DATA / "vocabs" / "t5_32k"
POLARITY, SCITLDR = DATA / "classification" / "sentence_polarity", DATA / "seq2seq" / "scitldr"
SNI, CORPUS = DATA / "sni", DATA / "corpus"
pytestmark = pytest.mark.skipif(bool(why := lacking(POLARITY, SCITLDR, SNI, CORPUS, T5_VOCABULARY)), reason=str(why))

T5 = {
    "model_type": "t5", "vocab_size": 32128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
GPT = {
    "model_type": "gpt2", "vocab_size": 32128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 1, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip


def finetune(folder, config, **flags):
    """Metrics and predictions of the last validation of a short run."""
    (folder / "model.json").write_text(json.dumps(config))
    settings = {
        "model_cfg": folder / "model.json", "model_path": folder / "run", "iters": 3, "log_interval": 3,
        "batch_size": 8, "lr": 1e-2, "backend": "local", **flags,
    }  # fmt: skip
    words = [[f"--{name}", *(value if isinstance(value, tuple) else (value,))] for name, value in settings.items()]
    main([str(word) for some in words for word in some])
    metrics = json.loads((folder / "run" / "metrics.json").read_text())["valid"]
    file = folder / "run" / "predictions" / "valid.jsonl"
    return metrics, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_the_loss_of_summaries_by_transformers(tmp_path):
    flags = {"input_seq_len": 96, "target_seq_len": 24}
    metrics, rows = finetune(
        tmp_path, T5, tokenizer=T5_VOCABULARY / "sentencepiece.model", data_path=SCITLDR / "train.json",
        valid_data_path=SCITLDR / "validation.json", max_train_samples=64, valid_samples=20, metrics="exact_match",
        **flags,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "last")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "last")
    total = count = 0.0
    for row in rows:
        inputs = tokenizer(row["source"], truncation=True, max_length=96, return_tensors="pt")
        labels = tokenizer(row["references"][0], truncation=True, max_length=24, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            total += model(**inputs, labels=labels).loss.item() * labels.numel()
        count += labels.numel()
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_perplexity_by_transformers(tmp_path):
    text = json.loads((CORPUS / "wikitext2_valid.jsonl").read_text().splitlines()[0])["text"][:6000]
    (tmp_path / "valid.jsonl").write_text(json.dumps({"text": text}) + "\n")
    metrics, _ = finetune(
        tmp_path, GPT, model_type="decoder", task="causal_lm", tokenizer=T5_VOCABULARY / "sentencepiece.model",
        data_path=CORPUS / "wikitext2_test.jsonl", max_train_samples=64, valid_data_path=tmp_path / "valid.jsonl",
        input_seq_len=33,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "last")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "last")
    ids = tokenizer(text)["input_ids"]  # ends in </s>
    first = epoch_shift(0, 0, len(ids))  # evaluation goes round from there
    ids = torch.tensor([ids[first - 1], *ids[first:], *ids[:first]])
    total = 0.0
    for start in range(0, len(ids) - 1, 32):
        block = ids[start : start + 33]
        with torch.no_grad():
            total += model(input_ids=block[None], labels=block[None]).loss.item() * (len(block) - 1)
    assert metrics["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]), rel=1e-12)
