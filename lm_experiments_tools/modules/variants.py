"""Keeps checkpoints of modeling_t5 and modeling_bert from being taken for transformers' own where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class VariantConfig:
    """Goes before a configuration class of transformers, some keys of whose subclass change what the model computes.

    transformers' class of the same `model_type` would read such a checkpoint and, without a word, compute something
    else. So wherever one of these keys is not at its default, or the class is one derived from that subclass,
    config.json names `variant_type` instead: AutoModel
    reads it with the classes that `register_variants` names or, where their package is not imported, refuses it as
    unknown, and transformers' classes warn. In memory `model_type` stays what PEFT and others know.
    """

    variant_type: ClassVar[str]
    variant_keys: ClassVar[tuple[str, ...]]

    @property
    def is_variant(self) -> bool:
        """True if transformers' own class would compute something else, or drop keys of a class derived from ours."""
        ours = next(cls for cls in type(self).__mro__ if "variant_type" in vars(cls))
        return type(self) is not ours or any(getattr(self, key) != getattr(ours, key) for key in self.variant_keys)

    def to_diff_dict(self) -> dict[str, Any]:
        """Values that are written to config.json."""
        values = super().to_diff_dict()
        return {**values, "model_type": self.variant_type} if self.is_variant else values

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values that are read from config.json, and the keyword arguments that are left."""
        values, unused = super().get_config_dict(*args, **kwargs)
        if values.get("model_type") == cls.variant_type:
            values["model_type"] = cls.model_type
        return values, unused


class TakesBothConfigs(type):
    """Metaclass of models that also take the configuration of transformers, AutoConfig's, that theirs derives from."""

    def __call__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        ours = cls.config_class
        if type(config) in ours.__mro__ and not isinstance(config, VariantConfig):
            config = ours(**config.to_dict())
        return super().__call__(config, *args, **kwargs)


def register_variants(
    config_cls: type[VariantConfig], models: Mapping[type, type], architectures: Sequence[str]
) -> None:
    """Let transformers' AutoConfig and AutoModel classes read checkpoints of variants.

    Args:
        config_cls: what AutoConfig then makes of them.
        models: class of transformers (AutoModel, AutoModelForMaskedLM, ...) -> the class that it takes.
        architectures: names of classes whose checkpoints these are; those of another are refused, since the keys and
            methods that it adds would be dropped without a word.
    """

    from transformers import AutoConfig

    class Saved(config_cls):
        """Stands for `config_cls` under the name in config.json: AutoConfig finds configurations by their own."""

        model_type = config_cls.variant_type

        @classmethod
        def from_dict(cls, values: dict[str, Any], **kwargs: Any) -> Any:
            strangers = sorted({*(values.get("architectures") or ())} - {*architectures})
            if strangers:
                raise ValueError(
                    f"This checkpoint is one of {', '.join(strangers)}, a class derived from those of "
                    f"{config_cls.__module__.partition('.')[0]}: read it with that class, not with an Auto class."
                )
            return config_cls.from_dict({**values, "model_type": config_cls.model_type}, **kwargs)

    AutoConfig.register(Saved.model_type, Saved)
    for auto, model_cls in models.items():
        auto.register(config_cls, model_cls, exist_ok=True)  # its name is that of a class of transformers
