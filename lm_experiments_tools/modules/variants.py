"""Model types of variants in config.json, so that transformers does not load them as its own models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class VariantConfig:
    """Mixin before a configuration class of transformers; `variant_keys` are keys that change the model's computation.

    If one of them is not at its default, or the class is derived from ours, config.json has `variant_type` as its
    model type. AutoModel reads it with the classes given to `register_variants`, or refuses it as unknown if their
    package is not imported. In memory `model_type` is that of transformers, which PEFT and others know.
    """

    variant_type: ClassVar[str]
    variant_keys: ClassVar[tuple[str, ...]]

    @property
    def is_variant(self) -> bool:
        """True if transformers' class would compute something else or drop keys."""
        ours = next(cls for cls in type(self).__mro__ if "variant_type" in vars(cls))
        return type(self) is not ours or any(getattr(self, key) != getattr(ours, key) for key in self.variant_keys)

    def to_diff_dict(self) -> dict[str, Any]:
        """Values for config.json."""
        values = super().to_diff_dict()
        return {**values, "model_type": self.variant_type} if self.is_variant else values

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values from config.json, and the remaining keyword arguments."""
        values, unused = super().get_config_dict(*args, **kwargs)
        if values.get("model_type") == cls.variant_type:
            values["model_type"] = cls.model_type
        return values, unused


class TakesBothConfigs(type):
    """Metaclass of models that also take the base class of their configuration, transformers' own."""

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
        config_cls: the class that AutoConfig returns.
        models: class of transformers (AutoModel, AutoModelForMaskedLM, ...) -> class of the model.
        architectures: names of classes that may have written a checkpoint; others would lose keys and methods.
    """
    from transformers import AutoConfig

    class Saved(config_cls):
        """`config_cls` under the variant's model type, because AutoConfig finds classes by their model type."""

        model_type = config_cls.variant_type

        @classmethod
        def from_dict(cls, values: dict[str, Any], **kwargs: Any) -> Any:
            unknown = sorted({*(values.get("architectures") or ())} - {*architectures})
            if unknown:
                raise ValueError(f"This checkpoint is of {', '.join(unknown)}: read it with that class.")
            return config_cls.from_dict({**values, "model_type": config_cls.model_type}, **kwargs)

    AutoConfig.register(Saved.model_type, Saved)
    for auto, model_cls in models.items():
        auto.register(config_cls, model_cls, exist_ok=True)  # its name is that of transformers' class
