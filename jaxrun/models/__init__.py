"""The model and its loss, as pure functions of arrays."""

from jaxrun.models.loss import LossSums, cross_entropy
from jaxrun.models.transformer import Model, Params, build

__all__ = ["LossSums", "Model", "Params", "build", "cross_entropy"]
