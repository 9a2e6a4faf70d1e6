"""`lmtools convert` of checkpoints of megatron-core's own models: the logits are those that it computed."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

from lm_experiments_tools.tools.main import main
from tests.helpers import ROOT
from tests.helpers.megatron_models import inputs

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("megatron.core"), reason="megatron-core is not installed: pip install megatron-core"
)
FILE = "model_optim_rng.pt"


def write(folder, kind: str, ranks: int) -> None:
    """Have megatron-core build the model in one process per rank, forked once it is imported."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "tests.helpers.megatron_models", str(folder), kind]
    done = subprocess.run(
        [*command, str(ranks)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write(folder, "bert", ranks=2)
    return folder


@torch.no_grad()
def compare(run, out, kind: str) -> None:
    assert main(["convert", str(run), "--to", str(out)]) == 0
    theirs, given = torch.load(run / "computed_0.pt"), inputs()
    words = {"input_ids": given["ids"], "attention_mask": given["mask"]}
    if kind == "t5":
        ours = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
        logits = ours(**words, decoder_input_ids=given["decoder_ids"]).logits
        assert torch.allclose(logits, theirs["logits"], atol=1e-5, rtol=0)
        return
    cls = transformers.MegatronBertForPreTraining if kind == "bert" else transformers.MegatronBertForMaskedLM
    ours = cls.from_pretrained(out).eval()(**words, token_type_ids=given["types"])
    logits = ours.prediction_logits if kind == "bert" else ours.logits
    seen = given["mask"].bool()  # what stands at padding differs: it attends to nothing there, and to words here
    assert torch.allclose(logits[seen], theirs["logits"][seen], atol=1e-5, rtol=0) and theirs["logits"].std() > 0.5
    if kind == "bert":
        assert torch.allclose(ours.seq_relationship_logits, theirs["pairs"], atol=1e-5, rtol=0)


def test_bert_of_two_ranks(bert, tmp_path):
    compare(bert, tmp_path / "out", "bert")


@pytest.mark.slow
def test_t5(tmp_path):
    write(tmp_path, "t5", ranks=1)
    compare(tmp_path, tmp_path / "out", "t5")


@pytest.mark.slow
@pytest.mark.parametrize("kind, ranks", [("bert", 1), ("bert_without_pairs", 1), ("t5", 2)])
def test_other_models_and_numbers_of_ranks(tmp_path, kind, ranks):
    write(tmp_path, kind, ranks)
    compare(tmp_path, tmp_path / "out", kind)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made_by_the_pickle",)


def changed(run, **changes) -> None:
    """Change Megatron's arguments, or top entries, of every rank."""
    for file in run.glob(f"*/*/{FILE}"):
        content = torch.load(file, weights_only=False)
        for name, value in changes.items():
            if name in content:
                content[name] = value
            else:
                setattr(content["args"], name, value)
        torch.save(content, file)


def without(run, name: str) -> None:
    for file in run.glob(f"*/*/{FILE}"):
        content = torch.load(file, weights_only=False)
        del content["model"][name]
        torch.save(content, file)


RANK = "iter_0000007/mp_rank_01"
BAD = {
    "a missing rank": (lambda run: (run / RANK / FILE).unlink(), "mp_rank_01/model_optim_rng.pt is missing"),
    "a torn tracker": (
        lambda run: (run / "latest_checkpointed_iteration.txt").write_text("five"),
        "names no iteration, but 'five'",
    ),
    "a rank too many": (lambda run: shutil.copytree(run / RANK, run / "iter_0000007/mp_rank_02"), "has 3 ranks"),
    "a pipeline": (lambda run: (run / RANK).rename(run / f"{RANK}_001"), "mp_rank_01_001 is a pipeline stage"),
    "stages": (lambda run: changed(run, pipeline_model_parallel_size=2), "split over 2 stages of a pipeline"),
    "padding": (lambda run: changed(run, padded_vocab_size=128), "has 64 rows, its args say 128"),
    "gates": (lambda run: changed(run, swiglu=True), "swiglu is True"),
    "no sizes": (lambda run: changed(run, num_layers=None), "its args have no num_layers"),
    "no args": (lambda run: changed(run, args={}), "has no `model` and `args`"),
    "heads": (lambda run: changed(run, num_attention_heads=5), "no multiple of 5 heads"),
    "too few layers": (lambda run: changed(run, num_layers=1), "unexpected"),
    "no embedding": (lambda run: without(run, "embedding.word_embeddings.weight"), "no embedding.word_embeddings"),
    "a lost weight": (lambda run: without(run, "encoder.layers.1.mlp.linear_fc1.weight"), "1 missing"),
    "another model": (lambda run: without(run, "lm_head.dense.weight"), "neither a BERT nor a T5"),
    "half a file": (lambda run: os.truncate(run / RANK / FILE, 3000), "truncated, corrupt"),
    "a pickle": (lambda run: changed(run, iteration=Evil()), "could run code"),
    "torch_dist": (lambda run: (run / "iter_0000007/common.pt").touch(), "torch_dist format"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_are_refused_in_a_sentence(bert, tmp_path, case, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bert, tmp_path / "run")
    damage, message = BAD[case]
    damage(tmp_path / "run")
    assert main(["convert", "run", "--to", "out"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}  # no folder, nothing beside it, no code was run


def test_settings_are_those_of_the_checkpoint(bert, tmp_path, capsys):
    assert main(["convert", str(bert), "--to", str(tmp_path / "out"), "--model_cfg", "t5-small"]) == 2
    assert "leave --model_cfg and --model_cls out" in capsys.readouterr().err
