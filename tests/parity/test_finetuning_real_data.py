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
BERT = {
    "model_type": "bert", "vocab_size": 30522, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
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


def test_classification_by_scikit_learn(tmp_path):
    of = pytest.importorskip("sklearn.metrics")
    metrics, rows = finetune(
        tmp_path, BERT, model_type="encoder", task="classification", tokenizer=BERT_VOCABULARY, input_seq_len=64,
        data_path=POLARITY / "train.tsv", valid_data_path=POLARITY / "dev.tsv", max_train_samples=200,
        valid_samples=90, metrics=("accuracy", "f1", "precision", "recall", "mcc"),
    )  # fmt: skip
    said, true = [row["prediction"] for row in rows], [row["references"][0] for row in rows]
    options = {"pos_label": "1", "zero_division": 0}
    assert len(rows) == 90
    assert metrics["accuracy"] == of.accuracy_score(true, said)
    assert metrics["f1"] == pytest.approx(of.f1_score(true, said, **options), rel=1e-12)
    assert metrics["precision"] == pytest.approx(of.precision_score(true, said, **options), rel=1e-12)
    assert metrics["recall"] == pytest.approx(of.recall_score(true, said, **options), rel=1e-12)
    assert metrics["mcc"] == pytest.approx(of.matthews_corrcoef(true, said), rel=1e-12)


def test_summaries_by_sacrebleu_and_rouge_score(tmp_path):
    sacrebleu = pytest.importorskip("sacrebleu")
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    metrics, rows = finetune(
        tmp_path, T5, tokenizer=T5_VOCABULARY / "sentencepiece.model", data_path=SCITLDR / "train.json",
        valid_data_path=SCITLDR / "validation_multiref.jsonl", max_train_samples=64, valid_samples=20,
        input_seq_len=96, target_seq_len=24, metrics=("bleu", "chrf", "rouge", "gen_len"), prefix="summarize: ",
    )  # fmt: skip
    said, references = [row["prediction"] for row in rows], [row["references"] for row in rows]
    columns = [[some[k] if k < len(some) else None for some in references] for k in range(max(map(len, references)))]
    assert len(rows) == 20 and len(columns) > 1
    assert metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(said, columns).score, rel=1e-12)
    assert metrics["chrf"] == pytest.approx(sacrebleu.corpus_chrf(said, columns).score, rel=1e-12)
    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = rouge_scorer.RougeScorer(names, use_stemmer=True)
    scores = [scorer.score_multi(some, one) for some, one in zip(references, said, strict=True)]
    for name in names:
        mean = 100 * sum(score[name].fmeasure for score in scores) / len(scores)
        assert metrics[name] == pytest.approx(mean, rel=1e-12)


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


def test_instructions_by_rouge_score(tmp_path):
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    metrics, rows = finetune(
        tmp_path, T5, task="instructions", tokenizer=T5_VOCABULARY / "sentencepiece.model", data_path=SNI,
        valid_data_path=SNI, max_train_samples=64, max_instances_per_task=2, max_instances_per_eval_task=6,
        input_seq_len=512, target_seq_len=16,
    )  # fmt: skip
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    scores = {}
    for row in rows:
        best = max(scorer.score(one, row["prediction"])["rougeL"].fmeasure for one in row["references"])
        scores.setdefault(row["group"], []).append(100 * best)
    assert len(rows) == 30 and len(scores) == 5  # the five official test tasks that are there
    for task, values in scores.items():
        assert metrics[f"rougeL/{task}"] == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert metrics["rougeL"] == pytest.approx(sum(map(sum, scores.values())) / len(rows), abs=1e-9)


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
