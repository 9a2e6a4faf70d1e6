"""PEFT: what learns, what is saved, and that peft itself loads it to the same text."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint.weights import load_weights, save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.adapters import new_token_prefix
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.saved import open_saved
from lm_experiments_tools.models.tokenizers import load_tokenizer
from lm_experiments_tools.modules.inspection import saved_state
from lm_experiments_tools.optimizers import build_optimizer
from tests.helpers.damage import truncate
from tests.helpers.pretrained_toys import save_toy, toy_args, toy_batch, toy_tokenizer

AUTO = {
    "encoder": AutoModelForSequenceClassification,
    "encoder-decoder": AutoModelForSeq2SeqLM,
    "decoder": AutoModelForCausalLM,
}
LABELS = ("no", "yes")
RATES = {"lora": 1e-2, "prompt_tuning": 0.3, "prefix_tuning": 3e-2, "new_tokens": 0.3}
SMALL = 3e-2  # for embeddings drawn with a standard deviation of 0.2, not of 1 as T5's


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_toy(kind, folder / kind) for kind in AUTO}


def made(args):
    tokenizer = load_tokenizer(args)
    return pretrained_model(args, tokenizer, LABELS), tokenizer


def batch_of(args, tokenizer):
    batch = toy_batch(args.model_type)
    if args.peft == "new_tokens":
        ids = torch.tensor(tokenizer(new_token_prefix(tokenizer), add_special_tokens=False)["input_ids"])
        rows = batch["input_ids"].shape[0]
        batch["input_ids"] = torch.cat([ids.expand(rows, -1), batch["input_ids"]], 1)
        batch["attention_mask"] = torch.cat([torch.ones(rows, len(ids)).long(), batch["attention_mask"]], 1)
        if args.model_type == "decoder":
            batch["labels"] = torch.cat([torch.full((rows, len(ids)), -100), batch["labels"]], 1)
    return batch


def trained(model, batch, steps, lr):
    """Losses of `steps` updates on one batch, through the backend as the loop drives it."""
    optimizer = build_optimizer(model, name="AdamW", lr=lr, weight_decay=0.0)
    backend = LocalBackend(device=torch.device("cpu"))
    backend.setup(model.train(), optimizer)
    losses = []
    for _ in range(steps):
        loss = backend.model(**batch).loss
        backend.backward(loss)
        backend.clip_and_step()
        losses.append(loss.item())
    model.eval()
    assert {p for group in optimizer.param_groups for p in group["params"]} == {
        p for p in model.parameters() if p.requires_grad
    }
    return losses, backend


def answer(model, batch):
    model.eval()
    with torch.no_grad():
        if batch["labels"].dim() == 1:
            return model(**batch).logits
        mask = torch.ones_like(batch["input_ids"])  # of padded rows peft gets a decoder's positions wrong
        return model.generate(input_ids=batch["input_ids"], attention_mask=mask, max_new_tokens=6, pad_token_id=0)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("lora", kind) for kind in AUTO),
        *((method, "encoder-decoder") for method in ("prompt_tuning", "prefix_tuning", "new_tokens")),
        ("prompt_tuning", "decoder"), ("prefix_tuning", "encoder"),
    ],
)  # fmt: skip
def test_each_kind_learns_and_saves_what_it_trained_and_loads_again(method, kind, bases, tmp_path):
    count = {} if method == "lora" else {"num_virtual_tokens": 8}
    args = toy_args(bases[kind], kind, peft=method, dropout_rate=0.0, **count)
    model, tokenizer = made(args)
    batch = batch_of(args, tokenizer)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses, backend = trained(model, batch, 12, RATES[method] if kind == "encoder-decoder" else SMALL)
    assert losses[-1] < 0.95 * losses[0]
    now = dict(model.named_parameters())
    assert frozen and all(torch.equal(value, now[name]) for name, value in frozen.items())

    folder = tmp_path / "adapter"
    folder.mkdir()
    save_model(folder, backend.unwrap(), backend.state.model_state())
    labels = ["label_names.json"] if kind == "encoder" else []
    files = ["adapter_config.json", "adapter_model.safetensors", *labels]
    assert sorted(path.name for path in folder.iterdir()) == files
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(value.numel() for value in load_file(folder / "adapter_model.safetensors").values()) == count
    expected = answer(model, batch)

    base = AUTO[kind].from_pretrained(bases[kind], **({"num_labels": 2} if kind == "encoder" else {}))
    if method == "new_tokens":
        base.resize_token_embeddings(max(len(tokenizer), base.get_input_embeddings().num_embeddings))
    assert torch.equal(answer(peft.PeftModel.from_pretrained(base, str(folder)), batch), expected)

    tokenizer.save_pretrained(folder)
    again, _ = made(toy_args(folder, kind))
    assert torch.equal(answer(again, batch), expected)
    assert saved_state(again).keys() == saved_state(model).keys()
    fresh, _ = made(args)
    load_weights(fresh, folder)  # what a resumed run does
    assert torch.equal(answer(fresh, batch), expected)


def test_lora_has_the_settings_of_the_flags(bases):
    flags = {"lora_r": 4, "lora_alpha": 6.0, "lora_dropout": 0.25}
    model, _ = made(toy_args(bases["encoder-decoder"], peft="lora", lora_targets=("v", "wi"), **flags))
    config = model.peft_config["default"]
    assert {name: getattr(config, name.removeprefix("lora_") if name == "lora_r" else name) for name in flags} == flags
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert layers == {"v", "wi"}


def test_a_prompt_starts_from_its_text_or_from_words(bases):
    text = {"peft": "prompt_tuning", "num_virtual_tokens": 5, "prompt_init_text": "w1 w2"}
    model, tokenizer = made(toy_args(bases["encoder-decoder"], **text))
    table, ids = model.get_base_model().shared.weight, tokenizer("w1 w2 w1 w2 w1")["input_ids"]
    assert torch.equal(model.prompt_encoder["default"].embedding.weight, table[ids])
    random, _ = made(toy_args(bases["encoder-decoder"], peft="prompt_tuning"))
    prompt = random.prompt_encoder["default"].embedding.weight
    assert prompt.shape[0] == 20
    assert all(any(torch.equal(row, word) for word in table[3:90]) for row in prompt)


@pytest.mark.parametrize(
    "setting",
    [
        {"peft_type": "LORX"},  # KeyError
        {"r": "x"},  # TypeError
        {"r": 0},  # ValueError
        {"target_modules": "("},  # re.error
    ],
    ids=str,
)
def test_an_adapter_that_peft_cannot_make_is_a_sentence(setting, bases, tmp_path):
    model, _ = made(toy_args(bases["encoder-decoder"], peft="lora"))
    save_model(tmp_path, model)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    for read in (lambda: open_saved(str(tmp_path)), lambda: made(toy_args(tmp_path, tokenizer=str(bases["decoder"])))):
        with pytest.raises(UserError, match=f"{file}: peft cannot build the adapter that it describes") as refusal:
            read()
        assert "\n" not in str(refusal.value)


def test_an_adapter_of_other_shapes_or_cut_short_is_not_merged(bases, tmp_path):
    model, _ = made(toy_args(bases["encoder-decoder"], peft="lora"))
    save_model(tmp_path, model)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 2}))
    with pytest.raises(UserError, match=f"{file}: peft cannot build the adapter .*size mismatch"):
        open_saved(str(tmp_path))
    truncate("adapter_model.safetensors", 0.5)(tmp_path)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors cannot be read .*truncated or corrupt"):
        open_saved(str(tmp_path))


def test_an_adapter_of_another_model_or_kind_is_refused(bases, tmp_path):
    model, _ = made(toy_args(bases["encoder-decoder"], peft="lora", lora_r=2))
    save_model(tmp_path, model)
    other, _ = made(toy_args(bases["encoder-decoder"], peft="lora"))
    with pytest.raises(
        UserError, match=r"does not fit this model: 0 .* 0 unexpected, 24 .* \(2, 64\) there and \(8, 64"
    ):
        load_weights(other, tmp_path)
    with pytest.raises(UserError, match=r"--peft prompt_tuning does not fit the adapter .* which is .*LORA"):
        made(toy_args(tmp_path, tokenizer=str(bases["encoder-decoder"]), peft="prompt_tuning"))
    with pytest.raises(UserError, match=r"is no adapter of peft .*name the base model by --from_pretrained"):
        load_weights(other, bases["encoder-decoder"])
    whole, _ = made(toy_args(bases["encoder-decoder"]))
    with pytest.raises(UserError, match="holds an adapter, not a whole model"):
        load_weights(whole, tmp_path)


def test_a_classifiers_adapter_is_merged_with_its_head(tmp_path):
    base = save_toy("encoder", tmp_path / "base")
    model = pretrained_model(toy_args(base, "encoder", peft="lora"), toy_tokenizer(), ("no", "so", "yes")).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    (tmp_path / "adapter").mkdir()
    save_model(tmp_path / "adapter", model)
    batch = toy_batch("encoder")
    merged = open_saved(str(tmp_path / "adapter")).model
    assert merged.config.id2label == {0: "no", 1: "so", 2: "yes"}
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(**batch).logits, model(**batch).logits, atol=1e-5, rtol=1e-4)
