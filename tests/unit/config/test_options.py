"""Settings of optimizers and schedules that have no flag: how they are written, and what is refused."""

import pytest

from lm_experiments_tools.config.options import checked_options, parameters_of, read_options
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError


def function(
    first, number: float = 1.0, count: int = 3, pair=(0.9, 0.99), switch=False, kind="a", some: int | None = None
):
    pass


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.9,0.98", (0.9, 0.98)), ("[0.9,0.98]", [0.9, 0.98]), ("1e-6", 1e-6), ("true", True), ("True", True),
        ("3", 3), ("linear", "linear"), ("1-sqrt", "1-sqrt"), ("'0.5'", "0.5"), ("None", None), ("null", None),
        ("a=b", "a=b"), ("{[1]:2}", "{[1]:2}"), ("{[1]}", "{[1]}"), ("[" * 9999, "[" * 9999),
    ],
)  # fmt: skip
def test_values_are_json_or_literals_or_text(text, value):
    assert read_options("optimizer_options", [f"it={text}"]) == {"it": value}


@pytest.mark.parametrize("texts", [["0.98"], ["=3"], ["betas="], ["be-tas=1"], ["a=1", "a=2"]])
def test_what_is_not_one_name_and_value_is_refused_when_flags_are_read(texts):
    with pytest.raises(UserError, match=r"^--optimizer_options "):
        T5PretrainingArgs(data_path="a", model_cfg="b", lr=1.0, optimizer_options=tuple(texts))


def test_options_of_a_schedule_need_one():
    with pytest.raises(UserError, match=r"^--lr_scheduler_options needs an --lr_scheduler"):
        T5PretrainingArgs(data_path="a", model_cfg="b", lr=1.0, lr_scheduler_options=("power=2",))


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"numbr": 1.0}, "x has no option 'numbr'; did you mean 'number'"),
        ({"first": 1.0}, "x: first is no option but has a flag of its own, --lr: give that"),
        ({"number": "many"}, "x: number is 'many', but it takes a value such as 1.0"),
        ({"switch": "no"}, "x: switch is 'no', but it takes a value such as False"),
        ({"some": "off"}, "x: some is 'off': write True or False"),
        ({"pair": 0.9}, r"x: pair is 0.9, but it takes a value such as \(0.9, 0.99\)"),
    ],
)
def test_an_option_that_does_not_fit_is_one_sentence(option, sentence):
    with pytest.raises(UserError, match=f"^{sentence}") as error:
        checked_options("x", option, parameters_of(function), {"first": "lr"})
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_values_are_made_those_of_the_signature():
    given = {"number": 2, "count": 4, "pair": [0.5, 1], "switch": True, "kind": "b", "some": None}
    assert checked_options("x", given, parameters_of(function), {}) == {**given, "number": 2.0, "pair": (0.5, 1)}
    assert type(checked_options("x", {"number": 2}, parameters_of(function), {})["number"]) is float
    assert checked_options("x", {"anything": "goes"}, None, {}) == {"anything": "goes"}
