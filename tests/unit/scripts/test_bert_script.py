"""run_bert_pretraining.py in this process: what it logs is exact, what it saves loads, bad input is a sentence."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification

from lm_experiments_tools.backends import fsdp
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.loader import ValidLoader
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from megatron.bert_dataset import BertDataset
from megatron.tokenizers import build_tokenizer
from run_bert_pretraining import main
from tests.helpers import runs
from tests.helpers.bert_toys import TINY, make_bert_data
from tests.helpers.runs import words

METRICS = ["accuracy_mlm", "accuracy_nsp", "bits_per_byte", "loss", "loss_mlm", "loss_nsp"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_bert_data(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(data, **changed):
    flags = {
        "data_path": data / "train", "vocab_file": data / "vocab.txt", "model_path": "run", "input_seq_len": 48,
        "model_cfg": data / "tiny.json", "batch_size": 8, "lr": 1e-3, "iters": 3, "log_interval": 1,
        "backend": "local", **changed,
    }  # fmt: skip
    main(words(**flags))


def refused(data, sentence, **changed):
    runs.refused(start, sentence, data, **changed)


def records(split="train", run="run"):
    return [{name: line[name] for name in line["metrics"]} for line in runs.records(run, split)]


def test_the_logs_do_not_depend_on_the_split_into_micro_batches(data, work):
    start(data, model_path="whole", batch_size=8)
    start(data, model_path="split", batch_size=2, gradient_accumulation_steps=4)
    whole, split = records(run="whole"), records(run="split")
    assert [sorted(values) for values in whole] == [METRICS] * 3
    for one, other in zip(whole, split, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
        assert one["loss"] == pytest.approx(one["loss_mlm"] + one["loss_nsp"], rel=1e-9)


@pytest.mark.parametrize("flags", [{}, {"use_nsp": 0}, {"use_nsp": 0, "model_cls": "modeling_bert:BertForMaskedLM"}])
def test_only_masked_tokens_are_scored_and_the_logs_stay(data, work, monkeypatch, flags):
    """In training and in validation."""
    scored = runs.scored_tokens(monkeypatch, TINY["vocab_size"])
    flags = {"valid_data_path": data / "valid", "valid_samples": 16, "valid_interval": 1, **flags}
    start(data, model_path="labels", **flags)
    assert scored == [8 * 7] * 9  # 7 is 0.15 * 48
    scored.clear()
    start(data, model_path="all", mlm_positions="all", **flags)
    assert scored == [8 * 48] * 9
    for split in ("train", "valid"):
        for one, other in zip(records(split, "labels"), records(split, "all"), strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def expected_validation(data, model, tokenizer, use_nsp=True):
    """All validation samples in one batch, by transformers' model and plain sums."""
    options = {"max_seq_length": 48, "binary_head": use_nsp, "seed": 42}
    dataset = Dataset(BertDataset(IndexedDataset(data / "valid"), tokenizer, **options))
    batch = {name: torch.from_numpy(values) for name, values in dataset.batch(np.arange(len(dataset))).items()}
    with torch.no_grad():
        outputs = model(**{k: v for k, v in batch.items() if k not in ("labels", "next_sentence_label")})
    logits, labels = outputs.get("prediction_logits", outputs.get("logits")), batch["labels"]
    masked = labels != -100
    right = logits.argmax(-1)[masked] == labels[masked]
    found = {"loss_mlm": cross_entropy(logits[masked], labels[masked]), "accuracy_mlm": right.double().mean()}
    if use_nsp:
        pairs, label = outputs["seq_relationship_logits"], batch["next_sentence_label"]
        found["loss_nsp"] = cross_entropy(pairs, label)
        found["accuracy_nsp"] = (pairs.argmax(-1) == label).double().mean()
    found["loss"] = found["loss_mlm"] + found.get("loss_nsp", 0)
    return {name: value.item() for name, value in found.items()}


def test_workers_validate_each_pair_and_each_masked_token_once(data):
    """The second of two workers has no sample in the last batch, and gets a row without labels."""
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=data / "vocab.txt")
    dataset = Dataset(BertDataset(IndexedDataset(data / "valid"), tokenizer, max_seq_length=48, seed=1))
    number = len(dataset) // 4 * 4 - 3  # one more than fills all rows: rank 1 has none in the last batch
    alone, *both = (list(ValidLoader(dataset, 2, *where, number)) for where in ((0, 1), (0, 2), (1, 2)))
    for name in ("labels", "next_sentence_label"):
        once = sum((batch[name] != -100).sum().item() for batch in alone)
        assert sum((batch[name] != -100).sum().item() for part in both for batch in part) == once


@pytest.mark.parametrize(
    "model_cls, use_nsp", [(BertForPreTraining, True), (BertForPreTraining, False), (BertForMaskedLM, False)]
)
def test_validation_is_that_of_the_checkpoint_as_transformers_loads_it(data, work, model_cls, use_nsp):
    """Batches of 7 do not divide the samples; the tokenizer of the checkpoint makes the ids of the data."""
    start(
        data, valid_data_path=data / "valid", valid_interval=3, batch_size=7, use_nsp=int(use_nsp),
        model_cls=f"transformers:{model_cls.__name__}",
    )  # fmt: skip
    model = model_cls.from_pretrained("run/last").eval()
    tokenizer = build_tokenizer("HFTokenizer", name_or_path="run/last")
    expected = expected_validation(data, model, tokenizer, use_nsp)
    expected["bits_per_byte"] = records("valid")[-1]["bits_per_byte"]  # that of test_bits_per_byte.py
    assert sorted(expected) == (METRICS if use_nsp else ["accuracy_mlm", "bits_per_byte", "loss", "loss_mlm"])
    assert records("valid")[-1] == pytest.approx(expected, rel=1e-5)
    ours = build_tokenizer("BertWordPieceLowerCase", vocab_file=data / "vocab.txt")
    text = "The class statement defines a class object."
    assert AutoTokenizer.from_pretrained("run/last")(text, add_special_tokens=False).input_ids == ours.encode(text)


def test_a_run_stopped_in_the_middle_of_an_epoch_goes_on_as_if_it_had_not_been(data, work):
    drawn = {"dropout_rate": 0.2, "data_path": (data / "train", data / "other"), "data_weights": (1, 2.5)}
    start(data, model_path="whole", iters=5, **drawn)
    start(data, model_path="parts", iters=2, **drawn)
    start(data, model_path="parts", iters=5, **drawn)
    assert records(run="parts") == records(run="whole")
    whole, parts = (BertForPreTraining.from_pretrained(f"{run}/last").state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_report_fills_in_masked_words_of_held_out_text(data, work):
    start(data, valid_data_path=data / "valid", valid_samples=8, valid_at_start=True, report=True)
    report = (work / "run" / "report.txt").read_text()
    examples = [report.split(f"held-out example {number}\n")[1].split("\n")[:3] for number in range(3)]
    for text, truth, guess in examples:
        assert "[MASK]" in text and truth.startswith("  target ") and guess.startswith("  prediction ")
    assert (work / "run" / "loss.png").exists()


def test_the_ancestors_command_line_is_understood(caplog, data, work):
    """The flags of its scripts, and of its own argument parser."""
    argv = (
        "--data_path a b --valid_data_path c --tokenizer ./vocabs/bert-base-uncased/ --model_cfg bert_base_uncased "
        "--model_cls transformers:BertForPreTraining --model_path run --batch_size 16 --gradient_accumulation_steps 2 "
        "--data_n_epochs 1 --data_n_samples 9 --data_impl mmap --data_name wiki --data_skip_warmup --data_n_workers 2 "
        "--save_best --iters 100 --log_interval 25 --save_interval 25 --valid_interval 25 --input_seq_len 128 "
        "--mlm_prob 0.15 --short_seq_prob 0.1 --use_nsp 0 --optimizer AdamW --lr 1e-4 --weight_decay 0.01 --seed 42 "
        "--working_dir . --lr_scheduler constant_with_warmup --num_warmup_steps 10 --clip_grad_norm 1.0"
    )
    args, _ = parse(BertPretrainingArgs, argv.split())
    assert args.data_path == ("a", "b") and args.use_nsp is False and args.data_name == "wiki"
    caplog.set_level("INFO")
    start(data, data_skip_warmup=True, data_n_workers=4, data_name="wiki", iters=1)
    assert caplog.text.count("--data_skip_warmup, --data_n_workers: accepted, and without effect here") == 1
    assert list((work / ".cache" / "bert_samples" / "wiki").glob("train*.npy"))


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"data_impl": "lazy"}, "--data_impl lazy does not exist any more"),
        ({"vocab_file": None}, "no tokenizer is named: .*--vocab_file"),
        ({"tokenizer": "here"}, "--tokenizer and --vocab_file exclude each other"),
        ({"model_cfg": None}, "no model is named: give --model_cfg"),
        # what only the files tell
        ({"lower_case": False}, r"other case .--no_lower_case"),
        (
            {"data_path": "nowhere.jsonl"},
            r"nowhere.jsonl does not exist: .*megatron.preprocess_data .*--split-sentences",
        ),
        ({"input_seq_len": 65}, "--input_seq_len 65 is more than the 64 positions of the model"),
        ({"model_cls": "transformers:BertForMaskedLM"}, "next_sentence_label.*--use_nsp 0"),
        (
            {"model_cfg": "bert_base_uncased-4L_preln_rel", "speed": "off"},
            "'pre_layer_norm', which --model_cls modeling_bert",
        ),
    ],
)
def test_bad_input_is_one_sentence(data, work, changed, sentence):
    refused(data, sentence, **changed)


def test_fsdp_shards_tied_parameters_in_one_unit():
    """torch refuses a parameter of two units: BERT's embedding is its output layer, whose bias has two owners."""
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(num_hidden_layers=2))
    assert fsdp.unit_classes(model, ["BertEmbeddings", "BertLayer"]) == ["BertLayer"]
    with fsdp.ends_in_one_unit(model, ["BertLayer"]):
        assert model.get_input_embeddings() is None and model.get_output_embeddings() is None
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.device("meta"):
        classifier = BertForSequenceClassification(BertConfig(num_hidden_layers=2))
    units = fsdp.unit_classes(classifier, ["BertEmbeddings", "BertLayer"])
    assert units == ["BertEmbeddings", "BertLayer"]
    with fsdp.ends_in_one_unit(classifier, units):
        assert classifier.get_input_embeddings() is None  # its table is in the unit of BertEmbeddings
    with fsdp.ends_in_one_unit(classifier, ["BertLayer"]):
        assert classifier.get_input_embeddings() is not None
