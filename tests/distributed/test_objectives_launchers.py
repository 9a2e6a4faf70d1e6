"""Every objective under every launcher, on real text: losses fall, and a killed run continues exactly.

`make test-launchers` prints the table of benchmarks/launchers.md. The text is two shards (5 MB) of the folder that
PRETRAINING_DATA names (tests/helpers/real_data.py). Models are without dropout, and a step has the same 8 rows however
they are split, so that all launchers must log the losses of the uninterrupted run of one process, step by step.
"""

import json

import pytest

from tests.distributed.launch import ROOT, kill_and_resume, skip_without, start
from tests.helpers.real_data import DATA, lacking
from tests.helpers.runs import TWO_LAYERS, records

SHARDS = [DATA / "corpus" / f"train-0000{k}-of-00008.jsonl" for k in range(2)]
T5_VOCAB = DATA / "vocabs" / "t5_32k" / "sentencepiece.model"
BERT_VOCAB = DATA / "vocabs" / "bert-base-uncased" / "vocab.txt"
WHY_NOT = lacking(*SHARDS, T5_VOCAB, BERT_VOCAB)

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "")]

STEPS, SAVE_INTERVAL = 40, 14
T5_SCRIPT, BERT_SCRIPT = ROOT / "run_t5_pretraining.py", ROOT / "run_bert_pretraining.py"
BERT = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CONFIGS = {
    "t5": {**TWO_LAYERS, "vocab_size": 32128},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 32128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "bert_mlm": {**BERT, "vocab_size": 32128},
    "bert": {**BERT, "vocab_size": 30592},
}  # fmt: skip

T5_MODEL = "--model_cls transformers:T5ForConditionalGeneration --model_cfg t5.json"
# name in the table: flags, packages
OBJECTIVES = {
    "span_corruption": (f"--task span_corruption --target_seq_len 24 {T5_MODEL}", ()),
    "prefix_lm": (f"--task prefix_lm --target_seq_len 64 {T5_MODEL}", ()),
    "ul2": (f"--task ul2 --target_seq_len 64 {T5_MODEL}", ()),
    "causal_lm": (
        "--task causal_lm --model_cls transformers:GPT2LMHeadModel --model_cfg gpt2.json", ()
    ),
    "mlm": (
        "--task mlm --model_cls transformers:BertForMaskedLM --model_cfg bert_mlm.json", ()
    ),
    "bert": ("--model_cls transformers:BertForPreTraining --model_cfg bert.json", ()),
}  # fmt: skip
# backend -> name in the table, rows of a micro-batch and of accumulation that split the 8 rows of a step
BACKENDS = {"alone": ("python", 8, 1), "horovod": ("horovodrun", 2, 2), "ddp": ("torchrun", 2, 2)}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Two shards of text, sentences of them for BERT, and the models' configurations."""
    from megatron.preprocess_data import main as preprocess

    folder = tmp_path_factory.mktemp("work")
    (folder / "text").mkdir()
    for shard in SHARDS:
        (folder / "text" / shard.name).symlink_to(shard)
    preprocess([
        "--input", str(folder / "text"), "--output-prefix", str(folder / "corpus"), "--split-sentences",
        "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(BERT_VOCAB),
    ])  # fmt: skip
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


def command(objective, work, run_dir, backend):
    script, data = T5_SCRIPT, ["--data_path", work / "text", "--vocab", T5_VOCAB]
    if objective == "bert":
        script, data = BERT_SCRIPT, ["--data_path", work / "corpus_text_sentence", "--vocab_file", BERT_VOCAB]
    _, batch_size, accumulation = BACKENDS[backend]
    flags = [work / flag if flag.endswith(".json") else flag for flag in OBJECTIVES[objective][0].split()]
    return [
        script, *flags, *data, "--model_path", run_dir, "--working_dir", work, "--input_seq_len", 64, "--batch_size",
        batch_size, "--gradient_accumulation_steps", accumulation, "--iters", STEPS, "--log_interval", 1,
        "--save_interval", SAVE_INTERVAL, "--lr", "5e-3",
    ]  # fmt: skip


def logged(run_dir):
    """(step, samples consumed, loss) of every step."""
    return [(line["step"], line["samples"], line["loss"]) for line in records(run_dir)]


@pytest.fixture(scope="module")
def uninterrupted(work, tmp_path_factory):
    """The log of the uninterrupted run of one process, by objective; made at the first call."""
    found = {}

    def of(objective):
        if objective not in found:
            folder = tmp_path_factory.mktemp("whole")
            start("alone", *command(objective, work, folder, "alone"), timeout=300)
            found[objective] = logged(folder)
        return found[objective]

    return of


@pytest.fixture(scope="module")
def table():
    """Rows of the table that is printed at the end."""
    rows = []
    yield rows
    head = ["data and objective", "launcher", "loss, steps 1-4", "last 4", "resumed at", "largest difference"]
    print("", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), sep="\n")


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_fall_and_a_killed_run_continues_exactly(objective, backend, work, uninterrupted, table, tmp_path):
    skip_without(*OBJECTIVES[objective][1])
    whole = uninterrupted(objective)
    assert [position[:2] for position in whole] == [(k, 8 * k) for k in range(1, STEPS + 1)]

    output = kill_and_resume(
        backend, command(objective, work, tmp_path, backend), tmp_path, SAVE_INTERVAL, timeout=300
    )
    resumed = int(output.split("resumed from", 1)[1].split("step ", 1)[1].split(",", 1)[0])
    assert SAVE_INTERVAL <= resumed < STEPS

    found = logged(tmp_path)
    assert [position[:2] for position in found] == [position[:2] for position in whole]
    losses = [loss for _, _, loss in found]
    difference = max(abs(ours - theirs) for ours, (_, _, theirs) in zip(losses, whole, strict=True))
    shown = "0" if difference == 0 else f"{difference:.0e}"
    first, last = mean(losses[:4]), mean(losses[-4:])
    table.append([objective, BACKENDS[backend][0], f"{first:.3f}", f"{last:.3f}", f"step {resumed}", shown])
    assert last < first - 0.5
    assert difference <= (0 if backend == "alone" else 2e-4)
